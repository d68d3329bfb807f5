"""Cells about a real model's background: composites of photos, an audit, and the model without
heads.

Heads are scored on one half of the pets (each breed cut in two), numbers are those of the other
half: nothing is chosen on what is reported. `cells_intervals` makes the tables of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from cells_heads import GREY, PRINTED, cigma, contrastive_gating, controls
from torch import Tensor

import seecause as sc
from seecause.bench.study import Row, StudyContext
from seecause.data.backgrounds import ALONE, Composites, compose, halves
from seecause.background import Erasure, HeadScores, Masks, Pictures, Swapped, select
from seecause.background._outcomes import logits_without
from seecause.background.erase import ErasedViews
from seecause.background.gains import jensen_shannon, log_probs
from seecause.background.masks import harden
from seecause.background.images import logits_of

RHO = 0.35  # share of the pixels that discovered masks keep
OPEN = 0.5  # a gate above it is open (Nam et al. 2025)
SWAP = "another breed's photo"
AFTER = ("true masks, grey", "discovered masks, mean")  # looks that are measured without heads too
Earlier = dict[str, list[Row]]


@dataclass(frozen=True, eq=False)
class Photos:
    """The model and the photos, and what is made of them without measuring anything."""

    model: Any
    pets: Pictures  # labels are ImageNet's; truth: 1 animal, 0 background, IGNORE border
    imagenet: Pictures
    mixes: int
    seed: int

    @cached_property
    def half(self) -> Tensor:
        """[N] 0: heads are chosen on it, 1: numbers are taken on it."""
        return halves(self.pets.labels.cpu(), seed=self.seed)

    @property
    def shapes(self) -> Tensor:
        """[N, H, W] bool: the animal with its border, which shows its fur and outline."""
        return self.pets.truth != 0

    @cached_property
    def right(self) -> Tensor:
        answers = logits_of(self.model, self.pets.images).argmax(dim=1)
        return (answers == self.pets.labels).cpu()

    @cached_property
    def composites(self) -> Composites:
        pixels = self.model.preprocess.raw(self.pets.images).clamp(0, 1)
        labels = self.pets.labels.cpu()
        return compose(pixels, self.shapes, labels, self.half, draws=self.mixes, seed=self.seed)

    def seen(self, pixels: Tensor) -> Tensor:
        return self.model.preprocess.normalise(pixels).to(self.model.dtype)

    @cached_property
    def swapped(self) -> Swapped:
        """The animal on another breed's photo, and another breed's animal on the photo."""
        mixed = self.seen(self.composites.mixed["mixed_rand"][0])
        turned = self.composites.donors["mixed_rand"][0].argsort()
        return Swapped(mixed, mixed[turned.to(mixed.device)])

    def masks(self, earlier: Earlier) -> Masks:
        """Discovered ones, from the rows that keep them."""
        soft = torch.tensor([row["soft"] for row in earlier["masks"]], device=self.model.device)
        hard, ties = harden(soft, tuple(self.pets.images.shape[-2:]), rho=RHO)
        return Masks(hard, soft, ties, protocol={"source": "discovered", "rho": RHO})


def opened(context: StudyContext, setup: Row) -> Photos:
    """With a limit, four photos of each of some breeds: either half has two, one to paste and one
    to paste on."""
    model = context.load(setup["model"], weights=context.fill(setup["weights"]))
    names = tuple(context.fill(setup[name]) for name in ("pets", "imagenet"))
    for name in names:
        context.data(name)
    return _opened(model, *names, context.limit, setup["mixes"], setup["seed"])


@lru_cache(maxsize=1)
def _opened(
    model: Any, pets: str, imagenet: str, limit: int | None, mixes: int, seed: int
) -> Photos:
    data = sc.data.open_data(pets)
    if limit is not None:
        labels = list(dict.fromkeys(data.labels))
        count = min(len(labels), max(2, round(limit / 4)))
        kept = {labels[place * len(labels) // count] for place in range(count)}
        few = []
        for label in kept:
            few += [photo for photo in data.photos if photo.label == label][:4]
        data = replace(data, photos=tuple(photo for photo in data.photos if photo in few))
    others = sc.background.read_pictures(model, sc.data.open_data(imagenet, limit=limit))
    return Photos(model, sc.background.read_pictures(model, data), others, mixes, seed)


def answers(context: StudyContext, *, setup: Row) -> list[Row]:
    """What the whole model answers to photos and to every composite; of mixed ones, every draw."""
    photos = opened(context, setup)
    rows = []
    for name, cases in (("pets", photos.pets), ("imagenet", photos.imagenet)):
        top = logits_of(photos.model, cases.images).topk(5, dim=1).indices == cases.labels[:, None]
        columns = {"right": top[:, 0], "top 5": top.any(dim=1)}
        rows += _by_photo(cases.ids, columns, kind=name)
    made, labels = photos.composites, photos.pets.labels
    breeds = labels.unique()
    for kind, stack in {**{name: made.alone[name][None] for name in ALONE}, **made.mixed}.items():
        logits = torch.stack([logits_of(photos.model, photos.seen(pixels)) for pixels in stack])
        own = labels.expand(len(stack), -1)[..., None]
        columns = {
            "right": logits.argmax(dim=-1) == labels,
            "right among breeds": breeds[logits[..., breeds].argmax(dim=-1)] == labels,
            "probability": log_probs(logits).exp().gather(-1, own)[..., 0],
        }
        means = {name: value.double().mean(dim=0) for name, value in columns.items()}
        rows += _by_photo(photos.pets.ids, means | {"breed": labels}, kind=kind)
    return rows


def _by_photo(ids: Sequence[str], columns: dict[str, Tensor], **more: Any) -> list[Row]:
    lists = {name: values.double().tolist() for name, values in columns.items()}
    each = [{name: values[i] for name, values in lists.items()} for i in range(len(ids))]
    return [{"photo": name, **more, **row} for name, row in zip(ids, each, strict=True)]


def masks(context: StudyContext, *, setup: Row, part: int) -> list[Row]:
    """Masks discovered in a quarter of the pets."""
    photos = opened(context, setup)
    rows = range(part * len(photos.pets) // 4, (part + 1) * len(photos.pets) // 4)
    images = photos.pets.images[rows.start : rows.stop]
    found = sc.background.discover_masks(photos.model, images, steps=setup["mask_steps"], rho=RHO)
    ids = photos.pets.ids[rows.start : rows.stop]
    return [{"photo": n, "soft": soft.tolist()} for n, soft in zip(ids, found.soft, strict=True)]


def audit(context: StudyContext, *, setup: Row, earlier: Earlier) -> list[Row]:
    """FIG and BIG by every look, and how well discovered masks meet the animal, beside masks that
    know nothing of it."""
    photos = opened(context, setup)
    own, truth = photos.masks(earlier), photos.pets.truth
    other = Masks.oracle(photos.shapes.roll(1, dims=0))
    middle = centre(own.hard)
    sources = (own, Masks.oracle(photos.shapes))
    looks = {
        look.name: look
        for look in (Erasure(s, fill) for s in sources for fill in ("mean", "grey", "blur"))
    } | {
        "true masks, border left in both, grey": Erasure(Masks.oracle(truth), "grey"),
        "the animal on another breed's photo": Erasure(None, photos.swapped),
        "control: another photo's true mask, grey": Erasure(other, "grey"),
        "control: centre, grey": Erasure(Masks.oracle(middle), "grey"),
    }
    rows = []
    for name, look in looks.items():
        gains = sc.background.information_gains(
            photos.model, photos.pets.images, look.masks, baseline=look.baseline
        )
        columns = {"fig": gains.fig, "big": gains.big, "right": photos.right}
        rows += _by_photo(photos.pets.ids, columns, look=name)
    lot = torch.rand(middle.shape, generator=torch.Generator().manual_seed(0))
    guesses = {
        "discovered masks": own.hard,
        "control: another photo's discovered mask": own.hard.roll(1, dims=0),
        "control: centre": middle,
        "control: random pixels": lot.to(middle.device) < RHO,
    }
    for name, hard in guesses.items():
        rows += _by_photo(photos.pets.ids, {"iou": sc.background.iou(hard, truth)}, look=name)
    return rows


def centre(like: Tensor) -> Tensor:
    """A box in the middle of each frame [N, H, W], as large as discovered masks are."""
    height, width = like.shape[1:]
    top, left = (round(side * (1 - RHO**0.5) / 2) for side in (height, width))
    box = torch.zeros_like(like)
    box[:, top : height - top, left : width - left] = True
    return box


def scores(context: StudyContext, *, setup: Row, by: str, earlier: Earlier) -> list[Row]:
    """Heads scored by one family of methods, on right answers of the first half."""
    photos = opened(context, setup)
    rows = ((photos.half == 0) & photos.right).nonzero()[:, 0]
    model, cases, here = photos.model, photos.pets.take(rows), rows.to(photos.model.device)
    images, labels, shapes = cases.images, cases.labels, photos.shapes[here]
    truth, own = Masks.oracle(shapes), photos.masks(earlier).take(rows)
    swap = Swapped(photos.swapped.background[here], photos.swapped.foreground[here])
    looks = {
        "discovered masks": {
            PRINTED: Erasure(own, "mean"),
            "cigma, discovered masks, grey": Erasure(own, "grey"),
        },
        "true masks": {"cigma, true masks": Erasure(truth, "mean"), GREY: Erasure(truth, "grey")},
        "swap": {f"cigma, {SWAP}": Erasure(None, swap)},
    }
    if by in looks:
        found = cigma(model, images, labels, looks[by])
    elif by == "controls":
        found = controls(model, images, labels, truth)
    elif by == "regression":
        draws = max(32, -(-2 * model.n_layers * model.n_heads // len(rows)))  # few photos need more
        options = {"draws": draws, "target": labels, "seed": setup["seed"]}
        found = {
            "regression, true masks, grey": sc.background.regress(model, images, truth, **options)
        }
    elif by == "gating":
        found = {by: select(by, model, images, labels, **setup["gating"])}
    else:
        gates = contrastive_gating(model, images, labels, shapes, **setup["gating"])
        found = {"gating, contrastive": gates}
    return [{"method": name, "value": _ranked(one).tolist()} for name, one in found.items()]


def _ranked(one: HeadScores) -> Tensor:
    """Of gating, above 0 only for heads it calls interfering: both gates shut in the mean."""
    if "interference" not in one.after:
        return one.value
    opened = 1 - one.after["interference"]
    shut = one.after.get("facilitation", torch.zeros_like(opened))
    return torch.where((opened <= OPEN) & (shut <= OPEN), 1 - opened, -opened)


def removals(context: StudyContext, *, setup: Row, sets: str, earlier: Earlier) -> list[Row]:
    """What each photo of the second half does without heads: those that methods choose, as many at
    random, or each head alone."""
    photos = opened(context, setup)
    chosen: dict[tuple[Any, ...], Row] = {}
    for row in earlier["scores"]:
        ranked = HeadScores(torch.tensor(row["value"], dtype=torch.float64))
        for k in setup["ks"]:
            chosen[row["method"], k] = {
                "heads": sorted(ranked.top(k)),
                "K": k,
                "row": row["method"],
            }
    wanted = [{"row": "the whole model", "heads": []}, *chosen.values()]
    if sets == "single heads":
        every = torch.ones(photos.model.n_layers, photos.model.n_heads).nonzero().tolist()
        wanted = [{"row": "one head", "heads": [tuple(head)]} for head in every]
    if sets == "random":
        wanted = []
        for size in sorted({len(one["heads"]) for one in chosen.values()} - {0}):
            options = {"draws": setup["draws"], "seed": setup["seed"]}
            lots = sc.background.random_sets(photos.model, size, **options)
            wanted += [{"row": "random", "heads": h, "draw": i} for i, h in enumerate(lots)]
    stage = Stage(photos, photos.masks(earlier))
    done: dict[tuple[Any, ...], Row] = {}
    for one in wanted:
        key = tuple(map(tuple, one["heads"]))
        done[key] = done[key] if key in done else stage.without(one["heads"])
        one |= done[key] | {"removed": len(key), "heads": " ".join(f"{a}.{b}" for a, b in key)}
    return wanted


class Stage:
    """Photos of the half that was not scored, and of ImageNet, in one stack: every set of heads is
    removed under the same eyes."""

    def __init__(self, photos: Photos, masks: Masks):
        self.photos, made = photos, photos.composites
        rows = (photos.half == 1).nonzero()[:, 0]
        here, self.right = rows.to(photos.model.device), photos.right[rows]
        sure = rows[self.right].to(here.device)
        self.labels = photos.pets.labels[here]
        pictures = {"imagenet": photos.imagenet.images, "pets": photos.pets.images[here]}
        pictures |= {n: photos.seen(s[:, here].flatten(0, 1)) for n, s in made.mixed.items()}
        looks = (
            Erasure(Masks.oracle(photos.shapes[sure]), "grey"),
            Erasure(masks.take(sure.cpu()), "mean"),
        )
        for look in looks:
            views = ErasedViews(photos.model, photos.pets.images[sure], look.masks, look.baseline)
            no_background, no_foreground = views.erased(slice(None))
            pictures[f"{look.name}, no background"] = no_background
            pictures[f"{look.name}, no foreground"] = no_foreground
        self.counts = [len(images) for images in pictures.values()]
        self.names, self.stack = list(pictures), torch.cat(list(pictures.values()))
        place = torch.full((len(photos.half),), -1).index_copy(0, rows, torch.arange(len(rows)))
        self.back = place[made.donors["mixed_rand"][0].argsort()[rows]]

    def without(self, heads: Sequence[Any]) -> Row:
        logits = logits_without(self.photos.model, self.stack, [heads])[0]
        found = dict(zip(self.names, logits.split(self.counts), strict=True))
        mixed = {
            name: found[name].unflatten(0, (-1, len(self.labels)))
            for name in ("mixed_same", "mixed_rand")
        }  # [draws, pets, C]
        row: Row = {
            "imagenet": _list(found["imagenet"].argmax(dim=1) == self.photos.imagenet.labels),
            "pets": _list(found["pets"].argmax(dim=1) == self.labels),
        }
        for name, some in mixed.items():
            row[name] = _list((some.argmax(dim=-1) == self.labels).double().mean(dim=0))
        sure = self.right.to(logits.device)
        plain, swapped = log_probs(found["pets"])[sure], mixed["mixed_rand"][0]
        pairs = {n: (found[f"{n}, no foreground"], found[f"{n}, no background"]) for n in AFTER}
        pairs[SWAP] = (swapped[self.back.to(logits.device)][sure], swapped[sure])
        for name, pair in pairs.items():
            row[f"FIG, {name}"], row[f"BIG, {name}"] = (
                _list(jensen_shannon(plain, log_probs(view))) for view in pair
            )
        return row


def _list(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
