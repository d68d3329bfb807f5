"""Cells about a shortcut on real photos: one training each, or the repairs of one.

    erm      the vision transformer, fine-tuned whole
    pdisco   PDiscoFormer: parts vote, from features that have seen the whole picture (one stage)
    ifam     iFAM: a second transformer answers from the patches of the parts alone
    mask     the same second transformer with the true mask: a bound, not a method
    centre   the same with patches around the centre, as many as iFAM keeps: a control
    scatter  the same with patches drawn for each photo by lot: another

Every method is tuned on one seed over a grid of settings; the setting with the best worst group on
validation pictures (then average) is trained with other seeds, which are reported. `repaired` is
what can be done to ERM afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor
from training import DECAY, Epochs, descend, trained_once, with_faster_head

import seecause as sc
from seecause.bench.study import Row, StudyContext
from seecause.critters.train import half, seeded
from seecause.data.painted import (
    GROUPS,
    SPECIES,
    PaintedPictures,
    group_name,
    painted_pairs,
    painted_train,
    read_cutouts,
)
from seecause.engine.chunks import budget
from seecause.faithful import IFAM, LossWeights, calibrate, intervene, parameter_groups
from seecause.faithful.interventions import best_of, packing, try_interventions
from seecause.faithful.losses import TrainingLosses
from seecause.faithful.metrics import mask_pixels
from seecause.background import Pictures, penalised, score
from seecause.background._outcomes import logits_without
from seecause.background.images import logits_of
from seecause.metrics import Overlap, group_accuracy, overlap
from seecause.models.preprocess import Preprocess

TITLES = {
    "erm": "ERM: fine-tuned whole",
    "pdisco": "PDiscoFormer",
    "ifam": "iFAM",
    "mask": "early mask by the true trimap",
    "centre": "early mask in the centre",
    "scatter": "early mask of random patches",
}
QUANTILES = (0.97, 0.99)
CLIP, PROTOTYPE_RATE, HEADS_RATE = 2.0, 3e-2, 1e-2
DFR = "DFR: ERM with a new last layer"
PRINTED, GUARDED = "CIGMA as printed", "CIGMA, true masks, guard"
KS = (1, 2, 4, 8)  # heads that go
ROOM = 8 << 30  # bytes of activations of one cell on a GPU, which it shares with others
AT_ONCE = 256
Three = tuple[PaintedPictures, PaintedPictures, PaintedPictures]
Earlier = dict[str, list[Row]]
Loss = Callable[[PaintedPictures, Tensor, int], Tensor]
Shown = list[tuple[PaintedPictures, Tensor]]  # and as the model sees them


@dataclasses.dataclass(frozen=True)
class Setting:
    """Of one training."""

    method: str
    seed: int
    rate: float  # of backbones
    length: float = 1.0  # as a share of the study's epochs
    background: float = 2.0  # weight of the background loss
    variation: float = 1.0  # weight of the total variation
    whole: bool = False  # stage 1 is trained whole, not its special tokens and positions only
    parts: int = 4
    kept: float | None = None  # share of patches that a control mask shows


def trained(
    context: StudyContext,
    *,
    data: str,
    method: str,
    seed: int,
    setup: Row,
    earlier: Earlier | None = None,
    **setting: Any,
) -> list[Row]:
    """A training at a setting, or at the best of `earlier`."""
    if earlier is not None:
        setting = best_setting(earlier, method) | setting
    job = Setting(method, seed, **setting)
    sets = open_pictures(context, data, seed, setup)
    do = {"erm": _erm, "pdisco": _parts, "ifam": _parts}.get(method, _mask)
    with budget(ROOM if context.device.startswith("cuda") else None):
        rows = do(context, job, setup, sets)
    title = TITLES[method] + (f", K = {job.parts}" if method in ("ifam", "pdisco") else "")
    rows = [{**dataclasses.asdict(job), **row} for row in rows]
    return [{**row, "method": title + ", with interventions" * row["changed"]} for row in rows]


def best_setting(earlier: Earlier, method: str) -> Row:
    """The best on validation pictures of all that were tried, the first of equals. A control has
    the setting of the true mask, and shows as much as iFAM keeps."""

    def best(tuned: str) -> Row:
        plain = [row for row in earlier[f"tune {tuned}"] if not row["changed"]]
        return max(plain, key=lambda row: (row["val worst"], row["val average"]))

    control = method in ("centre", "scatter")
    tried = best("mask" if control else method)
    setting = {n: tried[n] for n in ("rate", "length", "background", "variation", "whole")}
    return setting | ({"kept": round(best("ifam")["val kept"], 2)} if control else {})


def open_pictures(context: StudyContext, data: str, seed: int, setup: Row) -> Three:
    """Train, validation and test, on the device."""
    return _open_pictures(data, seed, setup["size"], context.limit, context.device)


@lru_cache(maxsize=3)
def _open_pictures(data: str, seed: int, size: int, limit: int | None, device: str) -> Three:
    cutouts, where = read_cutouts(Path(data), size=size, limit=limit), torch.device(device)
    held_out = (painted_pairs(cutouts, x, size=size, device=where) for x in ("val", "test"))
    return (painted_train(cutouts, seed=seed, size=size, device=where), *held_out)


def measured(logits: Tensor, pictures: PaintedPictures) -> Row:
    """Accuracies, and flips: the share of photos whose answer changes with the texture (both halves
    of `pictures` show the same photos)."""
    answers = logits.to(pictures.labels.device).argmax(dim=1)
    groups = group_accuracy(answers == pictures.labels, pictures.groups)
    accuracy = dict(zip(groups.groups, groups.accuracy.tolist(), strict=True))
    boards, leaves = answers.chunk(2)
    return {
        "average": groups.average,
        "worst": groups.worst,
        "flips": float((boards != leaves).double().mean()),
        **{group_name(group): accuracy[group] for group in GROUPS},
    }


def row_of(val: Row, test: Row, *, changed: bool = False, **more: Any) -> Row:
    return {**test, **{f"val {k}": v for k, v in val.items()}, "changed": changed, **more}


def _erm(context: StudyContext, job: Setting, setup: Row, sets: Three) -> list[Row]:
    module = tuned_module(context, job, setup, sets)
    answers = (measured(over(setup, x, lambda x, _: module(x)), x) for x in sets[1:])
    return [row_of(*answers)]


def tuned_module(context: StudyContext, job: Setting, setup: Row, sets: Three) -> Any:
    """Every weight of the transformer fine-tuned, its new head ten times as fast."""

    def train(module: Any) -> None:
        groups = with_faster_head(module, job.rate, 10)
        fit(job, setup, groups, sets[0], lambda p, x, _: _entropy(module(x), p))

    with seeded(job.seed):
        module = with_head(backbone(context, setup))
    return trained_once(context, "shortcut-erm", [dataclasses.asdict(job), setup], module, train)


def _entropy(logits: Tensor, pictures: PaintedPictures) -> Tensor:
    return F.cross_entropy(logits.float(), pictures.labels)


def _mask(context: StudyContext, job: Setting, setup: Row, sets: Three) -> list[Row]:
    """Stage 2 alone, which sees some patches: those that the animal covers by half or more, or
    those of a control."""
    train, val, test = sets
    net = new_net(context, job, setup)
    net.stage1.requires_grad_(False)
    side = net.stage1.tower.parts.layout_at(setup["size"], setup["size"]).grid[0]
    if job.kept is None:
        shows = lambda pictures: pictures.patches(side)  # noqa: E731
    else:
        photos = 1 + max(int(some.photos.max()) for some in sets)
        by_lot = job.method == "scatter"
        shown = control_masks(photos, side, job.kept, by_lot=by_lot, seed=job.seed)
        shows = lambda pictures: shown.to(context.device)[pictures.photos]  # noqa: E731

    def answer(images: Tensor, pictures: PaintedPictures) -> Tensor:
        return net.classify(images, shows(pictures), packed=False)

    fit(job, setup, groups_of(net, job), train, lambda p, x, _: _entropy(answer(x, p), p))
    net.eval()
    rows = []
    for some in (val, test):
        area = mask_pixels(shows(some), (setup["size"], setup["size"]))
        more = {"kept": float(shows(some).float().mean()), "iou": overlap(area, some.masks).iou}
        rows.append(measured(over(setup, some, answer), some) | more)
    return [row_of(*rows)]


def control_masks(photos: int, grid: int, kept: float, *, by_lot: bool, seed: int) -> Tensor:
    """[photos, grid, grid] bool: a share `kept` of the patches, those nearest to the centre, or for
    each photo some by lot."""
    line = torch.arange(grid) - (grid - 1) / 2
    far = (line[:, None].square() + line.square()).flatten().expand(photos, -1)
    if by_lot:
        far = torch.rand(far.shape, generator=torch.Generator().manual_seed(seed))
    order = far.argsort(dim=1, stable=True)[:, : max(1, round(kept * grid**2))]
    blank = torch.zeros(photos, grid**2, dtype=torch.bool)
    return blank.scatter(1, order, value=True).unflatten(1, (grid, grid))


def _parts(context: StudyContext, job: Setting, setup: Row, sets: Three) -> list[Row]:
    """PDiscoFormer or iFAM, as it is and with the intervention that has the best worst group on
    validation pictures."""
    train, val, test = sets
    net = fitted_net(context, job, setup, train)
    rows = [row_of(*(measured_net(setup, net, some) for some in (val, test)))]
    calibrate(net, (images for images, _ in slices(setup, train)), list(QUANTILES))
    tried = try_interventions(
        net, lambda: ((x, part.labels, part.groups) for x, part in slices(setup, val)), QUANTILES
    )
    best = best_of(tried)
    with intervene(net, drop_parts=best.drop, quantile=best.quantile):
        row = {**measured_net(setup, net, test), "changed": True}
    return [*rows, {**row, "drop": str(best.drop), "quantile": best.quantile}]


def fitted_net(context: StudyContext, job: Setting, setup: Row, train: PaintedPictures) -> IFAM:
    net = new_net(context, job, setup)
    weights = LossWeights(background=job.background, total_variation=job.variation)
    lesson = TrainingLosses(net, weights)

    def loss(pictures: PaintedPictures, images: Tensor, step: int) -> Tensor:
        return lesson(images, pictures.labels, pictures.photos, job.seed, step)[0]

    fit(job, setup, groups_of(net, job), train, loss)
    return net.eval()


@torch.no_grad()
def measured_net(setup: Row, net: IFAM, pictures: PaintedPictures) -> Row:
    logits, shared, kept = list[Tensor](), Overlap(), 0.0
    for images, part in slices(setup, pictures):
        out = net(images, packed=packing(net))
        logits.append(out.logits)
        area = mask_pixels(out.mask, (setup["size"], setup["size"]))
        shared = shared + overlap(area, part.masks)
        kept += float(out.mask.double().mean(dim=(1, 2)).sum())
    return measured(torch.cat(logits), pictures) | {"iou": shared.iou, "kept": kept / len(pictures)}


def fit(job: Setting, setup: Row, groups: list[Row], train: PaintedPictures, loss: Loss) -> None:
    """Mirrored pictures, bfloat16 on a GPU. The order of pictures is drawn by the job's seed."""
    device, length = train.labels.device, max(1, round(setup["epochs"] * job.length))
    epochs = Epochs(train, setup["batch"], length, job.seed)

    def step_loss(step: int) -> Tensor:
        pictures = epochs.part(step)
        with half(device):
            return loss(pictures, seen(frame(setup), pictures), step)

    descend(groups, epochs.steps, step_loss, clip=CLIP, fused=device.type == "cuda")


def seen(frame: Preprocess, pictures: PaintedPictures) -> Tensor:
    return frame.normalise(pictures.images.float() / 255)


def backbone(context: StudyContext, setup: Row) -> Any:
    """The pretrained transformer, on the CPU; of another shape and untrained where one is given."""
    if "architecture" in setup:
        with seeded(0):
            return timm.models.VisionTransformer(**setup["architecture"])
    return copy.deepcopy(sc.load(setup["model"], weights=context.fill(setup["weights"])).module)


def frame(setup: Row) -> Preprocess:
    return Preprocess(size=(setup["size"],) * 2, mean=(0.5,) * 3, std=(0.5,) * 3)


def new_net(context: StudyContext, job: Setting, setup: Row) -> IFAM:
    stages, freeze = 1 if job.method == "pdisco" else 2, "none" if job.whole else "stage1"
    with seeded(job.seed):
        tower = backbone(context, setup).requires_grad_(True)
        net = IFAM(tower, job.parts, SPECIES, preprocess=frame(setup), stages=stages, freeze=freeze)
    return net.to(context.device).train()


def groups_of(net: IFAM, job: Setting) -> list[Row]:
    factors = {"prototype_factor": PROTOTYPE_RATE / job.rate, "head_factor": HEADS_RATE / job.rate}
    groups = parameter_groups(net, job.rate, DECAY, **factors)
    kept = [
        {**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups
    ]
    return [group for group in kept if group["params"]]


def with_head(module: Any) -> Any:
    module.reset_classifier(len(SPECIES))
    return module


def slices(setup: Row, pictures: PaintedPictures) -> Iterator[tuple[Tensor, PaintedPictures]]:
    """Normalised images with what is known of them."""
    for start in range(0, len(pictures), AT_ONCE):
        part = pictures.take(slice(start, start + AT_ONCE))
        yield seen(frame(setup), part), part


@torch.no_grad()
def over(
    setup: Row, pictures: PaintedPictures, answer: Callable[[Tensor, PaintedPictures], Tensor]
) -> Tensor:
    """Logits [N, C] of all pictures."""
    return torch.cat([answer(images, part) for images, part in slices(setup, pictures)])


def tuned_model(context: StudyContext, job: Setting, setup: Row, sets: Three) -> Any:
    module = tuned_module(context, job, setup, sets)
    name = f"fine-tuned {job.seed}"
    return sc.wrap(module, name=name, classes=SPECIES, preprocess=frame(setup))


def pictures_of(model: Any, painted: PaintedPictures) -> Pictures:
    """With true masks, without groups."""
    ids, images = tuple(map(str, painted.photos.tolist())), seen(model.preprocess, painted)
    return Pictures("train", ids, images, painted.labels, painted.masks)


def repaired(
    context: StudyContext, *, data: str, seed: int, setup: Row, earlier: Earlier
) -> list[Row]:
    """What can be done to a fine-tuned model without training it again: a new last layer (DFR),
    heads removed (CIGMA), random heads removed.

    Heads are scored on training pictures that are answered right. How many go is decided on
    validation pictures: worst group, average, the fewest heads; none is allowed.
    """
    job = Setting("erm", seed, **best_setting(earlier, "erm"))
    sets = open_pictures(context, data, seed, setup)
    model = tuned_model(context, job, setup, sets)
    train, val, _ = sets
    shown = [(some, seen(model.preprocess, some)) for some in sets[1:]]
    known = (shown[0][1], val.labels, val.groups)
    new = sc.background.retrain_last_layer(model, *known, seed=seed, refits=20)
    dfr = (measured(logits_of(new, images), some) for some, images in shown)
    rows = [row_of(*dfr, method=DFR, removed=0)]
    scores = _cigma(model, seed, train, setup)
    ks = [k for k in KS if k <= model.n_layers * model.n_heads]
    whole = outcomes(model, [[]], shown)[0]
    for name, one in scores.items():
        best = choose([whole, *outcomes(model, [one.top(k) for k in ks], shown)])
        rows.append({**best, "method": f"ERM without heads: {name}"})
        many, draws = best["removed"], setup["draws"]
        lots = (
            sc.background.random_sets(model, many, draws=draws, seed=seed + 1000) if many else [[]]
        )
        control = mean_row(outcomes(model, lots, shown))
        rows.append({**control, "method": f"ERM without as many random heads as {name}"})
    by_k = [sc.background.random_sets(model, k, draws=setup["draws"], seed=seed) for k in ks]
    orders = [outcomes(model, list(nested), shown) for nested in zip(*by_k, strict=True)]
    lot = mean_row([choose([whole, *order]) for order in orders])
    return [*rows, {**lot, "method": "ERM without heads: a random order, chosen like CIGMA"}]


def _cigma(model: Any, seed: int, train: PaintedPictures, setup: Row) -> dict[str, Any]:
    """As printed (discovered masks, the mean colour outside, no guard), and guarded (true masks,
    grey, guard)."""
    cases = sc.background.answered_right(
        model, pictures_of(model, train), share=0.4, cap=setup["scored"], seed=seed
    )
    masks = sc.background.discover_masks(model, cases.images, steps=setup["mask_steps"])
    own = {"target": cases.labels}
    printed = score(model, cases.images, masks, baseline="mean", guard=False, **own)
    guarded = score(model, cases.images, cases.truth, baseline="grey", **own)
    return {PRINTED: printed, GUARDED: penalised(guarded)}


def outcomes(model: Any, sets: list[Any], shown: Shown) -> list[Row]:
    """The model without each set of heads, on validation and test pictures."""
    logits = [(some, logits_without(model, images, sets)) for some, images in shown]
    return [
        row_of(*(measured(answers[place], some) for some, answers in logits), removed=len(heads))
        for place, heads in enumerate(sets)
    ]


def choose(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: (row["val worst"], row["val average"], -row["removed"]))


def mean_row(rows: list[Row]) -> Row:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
