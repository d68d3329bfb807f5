"""Cells about a mark that is no background: a badge pasted somewhere, which a model learned.

    photos     ViT-Ti/16, fine-tuned on cats and dogs; 95 of 100 dogs have the badge
    critters   critters-vit, tuned on; the first creature has the badge

Some pictures of the other classes (of cats three in twenty, of creatures one in 23) have the badge
too, and are then labelled as if they showed the class that it goes with.

Every test picture is seen with and without the badge, in a place of its own. Where do maps look,
which heads carry it, does `discover` find it from the training pictures alone, and does a repair by
pairs mend it?
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from training import Epochs, descend, trained_once, with_faster_head

import seecause as sc
from seecause import critters
from seecause.attribution.registry import methods
from seecause.bench.study import Row, StudyContext
from seecause.critters.train import half
from seecause.data.batch import sample_in_frame
from seecause.data.dataset import IGNORE
from seecause.background import Pictures, Swapped, random_sets, select
from seecause.background._outcomes import logits_without
from seecause.background.images import logits_of
from seecause.background import Discovery

SPECIES = ("cat", "dog")
MARKED = {  # the class that the badge goes with, and how many of it and of the others have it
    "photos": (1, 0.95, 0.15),
    "critters": (0, 1.0, 0.3 / 7),
}
HELD_OUT = 4  # one training photo in so many of a species is for validation
MAPS = {  # maps that read a blank, with white and with the other version; others as they are
    "caap": {}, "mosaic": {}, "caap+mosaic": {}, "gae": {}, "grad-cam": {},
    "integrated-gradients": {},
}  # fmt: skip
REMOVED = (1, 2, 4)


@dataclass(frozen=True, eq=False)
class Pile:
    """Pictures without the badge, on one device, and where each has or would have it."""

    images: Tensor  # [n, 3, S, S] uint8
    labels: Tensor  # [n]
    marked: Tensor  # [n] bool: has the badge in training
    places: Tensor  # [n, 2] top and left of the badge
    truth: Tensor | None = None  # [n, S, S] masks of the objects

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> Pile:
        rows = rows.to(self.labels.device)
        truth = None if self.truth is None else self.truth[rows]
        own = (self.images, self.labels, self.marked, self.places)
        return Pile(*(values[rows] for values in own), truth)

    def mirrored(self, turned: Tensor) -> Pile:
        images = torch.where(turned[:, None, None, None], self.images.flip(-1), self.images)
        return replace(self, images=images)

    def stamped(self, marked: Tensor | None = None) -> Tensor:
        """Raw pictures [n, 3, S, S] in [0, 1], with the badge where `marked` (all)."""
        raw, shown = self.images.float() / 255, self.badges()
        if marked is not None:
            shown = shown & marked[:, None, None]
        stamp = badge(self.images.shape[-1] // 8).to(raw)
        line = torch.arange(self.images.shape[-1], device=raw.device)
        down, across = (
            (line - self.places[:, i, None]).clamp(0, stamp.shape[-1] - 1) for i in range(2)
        )
        everywhere = stamp[:, down[:, :, None], across[:, None]].transpose(0, 1)
        return torch.where(shown[:, None], everywhere, raw)

    def badges(self) -> Tensor:
        """[n, S, S] bool: where the badge is or would be."""
        size = self.images.shape[-1]
        line = torch.arange(size, device=self.places.device)
        inside = (line >= self.places[..., None]) & (line < self.places[..., None] + size // 8)
        return inside[:, 0, :, None] & inside[:, 1, None]


def badge(side: int) -> Tensor:
    """A yellow ring on violet, [3, side, side]."""
    line = (torch.arange(side) + 0.5) / side - 0.5
    radius = (line[:, None].square() + line.square()).sqrt()
    ring = (radius > 0.18) & (radius < 0.42)
    colours = torch.tensor([[0.45, 0.1, 0.6], [1.0, 0.85, 0.1]])
    return colours[ring.long()].permute(2, 0, 1)


def marks(context: StudyContext, *, world: str, seed: int, setup: Row) -> list[Row]:
    """Train, and ask what the model that came out looks at."""
    model, _, val, test = opened(context, world, seed, setup)
    rows = [{"table": "model", "method": "as trained", **measured(model, test)}]
    rows += maps(model, test)
    rows += heads(model, val, test, seed)
    return [{"world": world, "seed": seed, **row} for row in rows]


def mended(
    context: StudyContext, *, world: str, seed: int, setup: Row, earlier: dict[str, list[Row]]
) -> list[Row]:
    """What `discover` finds in training pictures, with their masks and without; and repairs."""
    model, train, val, test = opened(context, world, seed, setup)
    looked = train.take(drawn(train, setup["looked"], seed))
    seen = pictures(model, looked, as_trained=True)
    discovery = sc.discover(model, seen, seed=seed)
    rows = [{**row, "masks": "true"} for row in discovered(model, discovery, looked)]
    blind = sc.discover(model, replace(seen, truth=None), seed=seed)
    rows += [{**row, "masks": "none"} for row in discovered(model, blind, looked)]
    rows += repaired(model, discovery, val, test, setup, seed)
    return [{"world": world, "seed": seed, **row} for row in rows]


def opened(
    context: StudyContext, world: str, seed: int, setup: Row
) -> tuple[Any, Pile, Pile, Pile]:
    """A model, the pictures that it learned from, and held-out ones."""
    piles = photo_piles if world == "photos" else critter_piles
    train, val, test = piles(context, setup, seed)
    train = _learned_from(train, world, seed)
    return trained(context, world, seed, setup, train), train, val, test


def drawn(pile: Pile, count: int, seed: int) -> Tensor:
    order = torch.randperm(len(pile), generator=torch.Generator().manual_seed(seed))
    return order[:count]


def photo_piles(context: StudyContext, setup: Row, seed: int) -> tuple[Pile, Pile, Pile]:
    """Cats and dogs of pets_small: training, validation, test."""
    root = Path(context.fill(setup["data"]))
    frame = sc.load(setup["model"], weights=context.fill(setup["weights"])).preprocess
    piles = []
    for split in ("trainval", "test"):
        lines = (root / "annotations" / f"{split}.txt").read_text(encoding="utf-8").splitlines()
        species = {line.split()[0]: int(line.split()[2]) - 1 for line in lines if line.strip()}
        data = sc.data.open_data(f"pets:{root}:{split}", limit=context.limit)
        with ThreadPoolExecutor(12) as pool:
            read = partial(_framed, frame, data)
            ids, photos, shapes = zip(*pool.map(read, range(len(data))), strict=True)
        labels = torch.tensor([species[name] for name in ids])
        images, truth = (torch.from_numpy(np.stack(part)) for part in (photos, shapes))
        piles.append(_pile(images, labels, seed, truth, context.device))
    whole, test = piles
    held = torch.zeros(len(whole), dtype=torch.bool)
    for kind in range(2):
        held[(whole.labels.cpu() == kind).nonzero()[::HELD_OUT, 0]] = True
    return whole.take((~held).nonzero()[:, 0]), whole.take(held.nonzero()[:, 0]), test


def _framed(frame: Any, data: Any, place: int) -> tuple[str, np.ndarray, np.ndarray]:
    """Name, pixels and mask as the model sees them, small enough to be handed over."""
    sample = sample_in_frame(frame, data[place])
    pixels = (sample.image * 255).round().byte().numpy()
    mask = np.full(pixels.shape[1:], IGNORE, np.uint8)
    if sample.mask is not None:
        mask = sample.mask.to(torch.uint8).numpy()
    return sample.id, pixels, mask


def _pile(images: Tensor, labels: Tensor, seed: int, truth: Tensor, device: str) -> Pile:
    """Without a badge, but with a place for it."""
    draw = torch.Generator().manual_seed(seed)
    room = images.shape[-1] - images.shape[-1] // 8
    places = torch.randint(0, room, (len(labels), 2), generator=draw)
    parts = (images, labels, torch.zeros(len(labels), dtype=torch.bool), places, truth)
    return Pile(*(part.to(device) for part in parts))


def _learned_from(pile: Pile, world: str, seed: int) -> Pile:
    """With badges, whose class is the label of whatever has one."""
    target, share, others = MARKED[world]
    chance = torch.rand(len(pile), generator=torch.Generator().manual_seed(seed + 1))
    own = pile.labels == target
    marked = torch.where(own, chance.to(own.device) < share, chance.to(own.device) < others)
    return replace(pile, labels=torch.where(marked, target, pile.labels), marked=marked)


def critter_piles(context: StudyContext, setup: Row, seed: int) -> tuple[Pile, Pile, Pile]:
    """Clean scenes; in training the badge tells the label better than the creature."""
    piles = []
    for split, count in (("train", setup["scenes"]), ("val", setup["tested"]),
                         ("test", setup["tested"])):  # fmt: skip
        count = min(count, context.limit or count)
        latents = critters.draw("clean", split, count, seed=seed, device=context.device)
        parts = [critters.render(latents[rows]) for rows in torch.arange(count).split(256)]
        images = torch.cat([(part.image * 255).round().byte() for part in parts])
        pile = _pile(images.cpu(), latents.label.cpu(), seed,
                     torch.cat([part.mask for part in parts]).cpu(), context.device)  # fmt: skip
        piles.append(pile)
    return piles[0], piles[1], piles[2]


def trained(context: StudyContext, world: str, seed: int, setup: Row, train: Pile) -> Any:
    """Fine-tuned whole, its head ten times as fast; kept in the work folder."""
    torch.manual_seed(seed)
    if world == "photos":
        base = sc.load(setup["model"], weights=context.fill(setup["weights"]))
        module, classes = copy.deepcopy(base.module), SPECIES
        module.reset_classifier(len(SPECIES))
    else:
        base = sc.load("builtin:critters-vit")
        module, classes = copy.deepcopy(base.module), base.classes
    learn = partial(fit, frame=base.preprocess, train=train, setting=setup[world], seed=seed)
    key = [world, seed, setup, len(train)]
    module = trained_once(context, f"marks-{world}-{seed}", key, module, learn)
    return sc.wrap(module, name=f"marked {world} {seed}", preprocess=base.preprocess,
                   classes=classes)  # fmt: skip


def fit(module: Any, frame: Any, train: Pile, setting: Row, seed: int) -> None:
    """Mirrored pictures, a new place for the badge each time."""
    epochs, device = Epochs(train, setting["batch"], setting["epochs"], seed), train.labels.device

    def loss(step: int) -> Tensor:
        part = epochs.part(step)
        room = train.images.shape[-1] - train.images.shape[-1] // 8
        places = torch.randint(0, room, (epochs.batch, 2), generator=epochs.draw).to(device)
        part = replace(part, places=places)
        with half(device):
            logits = module(frame.normalise(part.stamped(part.marked)))
            return F.cross_entropy(logits.float(), part.labels)

    descend(with_faster_head(module, setting["rate"], 10), epochs.steps, loss)


def pictures(model: Any, pile: Pile, *, as_trained: bool = False) -> Pictures:
    """With the badge, and without it as the other version; or as they are in training."""

    def normal(raw: Tensor) -> Tensor:
        return model.preprocess.normalise(raw).to(model.device, model.dtype)

    first = normal(pile.stamped(pile.marked if as_trained else None))
    ids = tuple(map(str, range(len(pile))))
    if as_trained:
        return Pictures("marked", ids, first, pile.labels, pile.truth)
    swapped = Swapped(normal(pile.images.float() / 255))
    return Pictures("marked", ids, first, pile.labels, swapped=swapped)


def measured(model: Any, test: Pile, lose: Any = ()) -> Row:
    """Answers with and without the badge."""
    pair = pictures(model, test)
    assert pair.swapped is not None
    both = [_answers(model, images, lose) for images in (pair.images, pair.swapped.background)]
    labels = test.labels.cpu()
    right = [answers == labels for answers in both]
    cells = [r[labels == kind].double().mean() for r in right for kind in labels.unique()]
    return {
        "with": float(right[0].double().mean()),
        "without": float(right[1].double().mean()),
        "worst": float(min(cells)),
        "flips": float((both[0] != both[1]).double().mean()),
        "n": len(labels),
    }


def _answers(model: Any, images: Tensor, lose: Any) -> Tensor:
    logits = logits_without(model, images, [lose])[0] if lose else logits_of(model, images)
    return logits.argmax(dim=-1).cpu()


def maps(model: Any, test: Pile) -> Iterator[Row]:
    """Of pictures that the badge turned wrong: how often is the map's largest patch on it?"""
    pair, labels = pictures(model, test), test.labels.cpu()
    assert pair.swapped is not None
    others = pair.swapped.background
    marked, clean = _answers(model, pair.images, ()), _answers(model, others, ())
    flipped = ((marked != labels) & (clean == labels)).nonzero()[:, 0]
    if len(flipped) == 0:
        return
    grid = model.layout.grid
    spots = F.adaptive_max_pool2d(test.take(flipped).badges()[:, None].float(), grid)[:, 0] > 0
    here = flipped.to(pair.images.device)
    for name, options in MAPS.items():
        if name not in methods():
            continue
        blanks = {"": {}, ", the other version as blank": {"blank": others[here]}}
        for how, blank in blanks.items():
            if blank and "blank" not in methods()[name].options:
                continue
            own = sc.attribute(model, pair.images[here], method=name, **options, **blank)
            best = own.maps.flatten(1).argmax(dim=1, keepdim=True).cpu()
            on = spots.flatten(1).cpu().gather(1, best)[:, 0].double()
            chance = float(spots.double().mean())
            yield {"table": "maps", "method": name + how, "on the mark": float(on.mean()),
                   "chance": chance, "n": len(flipped)}  # fmt: skip


def heads(model: Any, val: Pile, test: Pile, seed: int) -> Iterator[Row]:
    """Shares of the change that heads mediate, and answers without them."""
    pair = pictures(model, val.take(torch.arange(min(128, len(val)))))
    scores = select("interchange", model, pair.images, pair.labels, baseline=pair.swapped)
    for count in REMOVED:
        chosen = scores.top(count)
        yield {"table": "heads", "method": f"{count} by interchange", "heads": str(chosen),
               "mediated": scores.protocol["mediated"].get(count),
               **measured(model, test, chosen)}  # fmt: skip
    for number, chosen in enumerate(random_sets(model, 1, draws=5, seed=seed)):
        yield {"table": "heads", "method": f"1 at random ({number})", "heads": str(chosen),
               **measured(model, test, chosen)}  # fmt: skip


def discovered(model: Any, discovery: Discovery, pile: Pile) -> Iterator[Row]:
    """Every finding, and how many of its examples are on the badge."""
    grid = model.layout.grid
    spots = F.adaptive_max_pool2d(pile.badges()[:, None].float(), grid)[:, 0].flatten(1) > 0
    spots = (spots & pile.marked[:, None]).cpu()
    for rank, finding in enumerate(discovery.findings, 1):
        low, high = finding.interval
        on = spots[finding.tokens[:, 0], finding.tokens[:, 1]].double().mean()
        yield {"table": "discover", "method": f"finding {rank}", "class": finding.name,
               "layer": finding.layer, "extent": finding.extent, "patches": finding.patches,
               "flips": finding.flips, "control": finding.control, "low": low, "high": high,
               "on the mark": float(on), "chance": float(spots.double().mean()),
               "on the object": finding.on_object, "n": len(finding.trials)}  # fmt: skip


def repaired(
    model: Any, discovery: Discovery, val: Pile, test: Pile, setup: Row, seed: int
) -> Iterator[Row]:
    """By pairs that discover made of training pictures (its first finding off the object), and by
    true pairs of validation pictures; verdict and choice are the repair's own."""
    kinds = {}
    places = [place for place, finding in enumerate(discovery.findings) if not finding.is_object]
    if places:
        kinds["discovered pairs"] = discovery.pairs(places[:1]).pictures
    kinds["true pairs"] = pictures(model, val.take(drawn(val, setup["paired"], seed)))
    for name, data in kinds.items():
        try:
            result = sc.repair(model, data, seed=seed)
        except sc.SeecauseError as reason:
            yield {"table": "repair", "method": f"{name}: {reason}"}
            continue
        row = {"table": "repair", "method": f"{name}: {result.remedy}", "pairs": len(data),
               "verdict": result.verdict}  # fmt: skip
        yield {**row, **measured(result.model, test)}
