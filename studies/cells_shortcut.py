"""Cells about a shortcut on real photos: one training each, or the repairs of one.

    erm      the vision transformer, fine-tuned whole
    pdisco   PDiscoFormer: parts vote, from features that have seen the whole picture (one stage)
    ifam     iFAM: a second transformer answers from the patches of the parts alone
    mask     the same second transformer with the true mask: a bound, not a method
    centre   the same with patches around the centre, as many as iFAM keeps: a control
    scatter  the same with patches drawn for each photo by lot: another

Every method is tuned on one seed over a grid of settings; the setting with the best worst group on
validation pictures (then average) is trained with other seeds, which are reported.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import seecause as sc
from seecause._files import digest_json
from seecause.bench.study import Row, StudyContext
from seecause.critters.train import pace
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
from seecause.faithful.config import set_pace
from seecause.faithful.interventions import best_of, packing, try_interventions
from seecause.faithful.losses import TrainingLosses
from seecause.faithful.metrics import mask_pixels
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
DECAY, CLIP, WARM_UP, PROTOTYPE_RATE, HEADS_RATE = 0.05, 2.0, 0.1, 3e-2, 1e-2
ROOM = 8 << 30  # bytes of activations of one cell on a GPU, which it shares with others
AT_ONCE = 256
Three = tuple[PaintedPictures, PaintedPictures, PaintedPictures]


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
    limit: int | None = None,
    earlier: dict[str, list[Row]] | None = None,
    **setting: Any,
) -> list[Row]:
    """A training at a setting, or at the best of `earlier`."""
    if earlier is not None:
        setting = best_setting(earlier, method) | setting
    job = Setting(method, seed, **setting)
    sets = open_pictures(data, seed, setup["size"], limit, context.device)
    do = {"erm": _erm, "pdisco": _parts, "ifam": _parts}.get(method, _mask)
    with budget(ROOM if context.device.startswith("cuda") else None):
        rows = do(context, job, setup, sets)
    title = TITLES[method] + (f", K = {job.parts}" if method in ("ifam", "pdisco") else "")
    own = {**dataclasses.asdict(job), "method": title}
    return [
        {**own, **row, "method": title + ", with interventions" * row["changed"]} for row in rows
    ]


def best_setting(earlier: dict[str, list[Row]], method: str) -> Row:
    """The best on validation pictures of all that were tried, the first of equals. A control has
    the setting of the true mask, and shows as much as iFAM keeps."""
    control = method in ("centre", "scatter")
    tuned = earlier[f"tune {'mask' if control else method}"]
    plain = [row for row in tuned if not row["changed"]]
    best = max(plain, key=lambda row: (row["val worst"], row["val average"]))
    names = ("rate", "length", "background", "variation", "whole")
    setting = {name: best[name] for name in names}
    if control:
        ifam = [row for row in earlier["tune ifam"] if not row["changed"]]
        most = max(ifam, key=lambda row: (row["val worst"], row["val average"]))
        setting["kept"] = round(most["val kept"], 2)
    return setting


@lru_cache(maxsize=3)
def open_pictures(data: str, seed: int, size: int, limit: int | None, device: str) -> Three:
    """Train, validation and test, on the device."""
    cutouts, where = read_cutouts(Path(data), size=size, limit=limit), torch.device(device)
    held_out = (painted_pairs(cutouts, split, size=size, device=where) for split in ("val", "test"))
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
    """Every weight of the transformer, its new head ten times as fast."""
    train, val, test = sets
    model = _seeded(job.seed, lambda: _with_head(backbone(context, setup)))
    model = model.to(context.device).train().requires_grad_(True)
    head = set(model.head.parameters())
    groups = [
        {"params": [p for p in model.parameters() if p not in head], "lr": job.rate},
        {"params": list(head), "lr": 10 * job.rate},
    ]
    fit(job, setup, groups, train, lambda p, x, step: F.cross_entropy(model(x).float(), p.labels))
    state = model.eval().state_dict()
    save_file(
        {k: v.detach().cpu().contiguous() for k, v in state.items()}, _file(context, job, setup)
    )
    answers = (measured(over(setup, some, lambda x, _: model(x)), some) for some in (val, test))
    return [row_of(*answers)]


def tuned_module(context: StudyContext, job: Setting, setup: Row, sets: Three) -> nn.Module:
    """The fine-tuned transformer of a job, trained now if it was not before."""
    if not _file(context, job, setup).is_file():
        _erm(context, job, setup, sets)
    module = _with_head(backbone(context, setup))
    module.load_state_dict(load_file(_file(context, job, setup)))
    return module.to(context.device)


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

    groups = _groups(net, job)
    fit(
        job,
        setup,
        groups,
        train,
        lambda p, x, step: F.cross_entropy(answer(x, p).float(), p.labels),
    )
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
    net = new_net(context, job, setup)
    weights = LossWeights(background=job.background, total_variation=job.variation)
    lesson = TrainingLosses(net, weights)

    def loss(pictures: PaintedPictures, images: Tensor, step: int) -> Tensor:
        return lesson(images, pictures.labels, pictures.photos, job.seed, step)[0]

    fit(job, setup, _groups(net, job), train, loss)
    net.eval()
    rows = [row_of(*(measured_net(setup, net, some) for some in (val, test)))]
    calibrate(net, (images for images, _ in slices(setup, train)), list(QUANTILES))
    tried = try_interventions(
        net, lambda: ((x, part.labels, part.groups) for x, part in slices(setup, val)), QUANTILES
    )
    best = best_of(tried)
    with intervene(net, drop_parts=best.drop, quantile=best.quantile):
        row = {**measured_net(setup, net, test), "changed": True}
    return [*rows, {**row, "drop": str(best.drop), "quantile": best.quantile}]


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


def fit(
    job: Setting,
    setup: Row,
    groups: list[Row],
    train: PaintedPictures,
    loss: Callable[[PaintedPictures, Tensor, int], Tensor],
) -> None:
    """AdamW, a tenth of the steps up and half a cosine down, mirrored pictures, bfloat16 on a GPU.
    The order of pictures is drawn by the job's seed."""
    device = train.labels.device
    optimizer = torch.optim.AdamW(groups, weight_decay=DECAY, fused=device.type == "cuda")
    draw, batch = torch.Generator().manual_seed(job.seed), min(setup["batch"], len(train))
    each, epochs = len(train) // batch, max(1, round(setup["epochs"] * job.length))
    for epoch in range(epochs):
        order = torch.randperm(len(train), generator=draw)
        for number in range(each):
            step = epoch * each + number
            set_pace(optimizer.param_groups, pace(step, epochs * each, WARM_UP))
            rows = order[number * batch : (number + 1) * batch].to(device)
            turned = (torch.rand(batch, generator=draw) < 0.5).to(device)
            pictures = train.take(rows).mirrored(turned)
            images = frame(setup).normalise(pictures.images.float() / 255)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                total = loss(pictures, images, step)
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()


def backbone(context: StudyContext, setup: Row) -> Any:
    """The pretrained transformer, on the CPU; of another shape and untrained where one is given."""
    if "architecture" in setup:
        return _seeded(0, lambda: timm.models.VisionTransformer(**setup["architecture"]))
    name, weights = setup["model"], context.fill(setup["weights"])
    return copy.deepcopy(sc.load(name, weights=weights).module)


def frame(setup: Row) -> Preprocess:
    return Preprocess(size=(setup["size"],) * 2, mean=(0.5,) * 3, std=(0.5,) * 3)


def new_net(context: StudyContext, job: Setting, setup: Row) -> IFAM:
    stages, freeze = 1 if job.method == "pdisco" else 2, "none" if job.whole else "stage1"
    options = {"preprocess": frame(setup), "stages": stages, "freeze": freeze}

    def make() -> IFAM:
        tower = backbone(context, setup).requires_grad_(True)
        return IFAM(tower, job.parts, SPECIES, **options)

    return _seeded(job.seed, make).to(context.device).train()


def _groups(net: IFAM, job: Setting) -> list[Row]:
    factors = {"prototype_factor": PROTOTYPE_RATE / job.rate, "head_factor": HEADS_RATE / job.rate}
    groups = parameter_groups(net, job.rate, DECAY, **factors)
    kept = [
        {**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups
    ]
    return [group for group in kept if group["params"]]


def _with_head(module: Any) -> Any:
    module.reset_classifier(len(SPECIES))
    return module


def _seeded(seed: int, make: Callable[[], Any]) -> Any:
    """What `make` gives when chance starts from `seed`; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _file(context: StudyContext, job: Setting, setup: Row) -> Path:
    """Fine-tuned weights, for repairs."""
    key = digest_json(
        [dataclasses.asdict(job), setup, context.limit, context.device.partition(":")[0]]
    )
    context.work.mkdir(parents=True, exist_ok=True)
    return context.work / f"shortcut-erm-{key}.safetensors"


def slices(setup: Row, pictures: PaintedPictures) -> Iterator[tuple[Tensor, PaintedPictures]]:
    """Normalised images with what is known of them."""
    for start in range(0, len(pictures), AT_ONCE):
        part = pictures.take(slice(start, start + AT_ONCE))
        yield frame(setup).normalise(part.images.float() / 255), part


@torch.no_grad()
def over(
    setup: Row, pictures: PaintedPictures, answer: Callable[[Tensor, PaintedPictures], Tensor]
) -> Tensor:
    """Logits [N, C] of all pictures."""
    return torch.cat([answer(images, part) for images, part in slices(setup, pictures)])
