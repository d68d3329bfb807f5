"""Cells about iFAM as a repair without group labels: which setting, and what edge patches leak.

ifam_setting   iFAM on the pets shortcut at one setting, as in `cells_shortcut`, but learned
               from four fifths of the training pictures; the rest, put on other backgrounds by
               an eye's masks, says what transplant-worst thinks of it
ifam_chosen    the settings that transplant-worst, plain accuracy and group labels choose on
               seed 0, trained with another seed
edges          Critters, `certified`: a classifier that sees the patches of the creature only,
               when edge patches are read whole, left out, or filled where the creature is not
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import cells_shortcut as shortcut
import torch
import torch.nn.functional as F
from cells_repair import Earlier, eye_before
from torch import Tensor
from training import descend

import seecause as sc
from seecause import critters
from seecause.bench.study import Row, StudyContext
from seecause.faithful import IFAM
from seecause.metrics import group_accuracy
from seecause.background.objects import by_patches
from seecause.background.versions import JudgedAnswers, VersionedPictures, split_rows

CRITERIA = {  # who chooses a setting: by what, first and then
    "transplant-worst": ("transplant-worst", "transplants"),
    "accuracy": ("held-out accuracy", "transplant-worst"),
    "group labels": ("val worst", "val average"),
}
SETTING = ("rate", "background", "variation", "whole")
VERSIONS = 4  # transplants of each kind and picture


def ifam_setting(
    context: StudyContext,
    *,
    data: str,
    seed: int,
    setup: Row,
    rate: float,
    background: float,
    variation: float,
    whole: bool,
) -> list[Row]:
    """One training, and what every criterion says of it."""
    job = shortcut.Setting(
        "ifam", seed, rate, background=background, variation=variation, whole=whole
    )
    train, val, test = shortcut.open_pictures(context, data, seed, setup)
    learn, choose = (
        train.take(rows.to(train.labels.device))
        for rows in split_rows(train.labels, (0.8, 0.2), seed=seed)
    )
    part = _held_out(context, setup, choose, seed)
    net = shortcut.fitted_net(context, job, setup, learn)
    judged = JudgedAnswers(part, part.logits(sc.wrap(net, name="iFAM")))
    row = shortcut.row_of(*(shortcut.measured_net(setup, net, split) for split in (val, test)))
    row |= {"transplant-worst": judged.transplant_worst, "transplants": judged.moved_accuracy}
    row |= {"held-out accuracy": judged.accuracy, "method": "iFAM, one setting"}
    return [{**row, **{name: getattr(job, name) for name in SETTING}}]


def _held_out(context: StudyContext, setup: Row, pictures: Any, seed: int) -> VersionedPictures:
    """Transplants of held-out training pictures by the eye's masks: of other classes and, as in an
    audit, of the same."""
    eye = eye_before(context, setup)
    cases = replace(shortcut.pictures_of(eye, pictures), name="held out", truth=None)
    tuned = sc.wrap(shortcut.with_head(copy.deepcopy(eye.module)), name="new head",
                    preprocess=shortcut.frame(setup), classes=shortcut.SPECIES)  # fmt: skip
    seen = sc.eye(eye, model=tuned, cache=context.work / "eye").masks(cases)
    moved, control = (
        sc.transplant(
            cases.images, seen.cut, pictures.labels, per_picture=VERSIONS, donors=donors, seed=seed
        )
        for donors in ("other-class", "same-class")
    )
    return VersionedPictures(cases, moved, control)


def chosen_settings(rows: list[Row]) -> dict[str, Row]:
    """The setting that each criterion takes, the first of equals."""
    best = {}
    for name, (first, then) in CRITERIA.items():
        row = max(rows, key=lambda row: (row[first], row[then]))
        best[name] = {key: row[key] for key in SETTING}
    return best


def ifam_chosen(
    context: StudyContext, *, data: str, seed: int, setup: Row, earlier: Earlier
) -> list[Row]:
    """Every chosen setting trained with this seed; a setting that two criteria take, once."""
    rows, trained = [], dict[str, Row]()
    for name, setting in chosen_settings(earlier["ifam settings"]).items():
        key = repr(setting)
        if key not in trained:
            (trained[key],) = ifam_setting(context, data=data, seed=seed, setup=setup, **setting)
        rows.append({**trained[key], "method": f"iFAM, chosen by {name}"})
    return rows


Shown = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Seen:
    """Scenes with what is known of where their creature is."""

    images: Tensor  # [n, 3, S, S], normalised
    labels: Tensor  # [n]
    groups: Tensor  # [n, 2]
    pixels: Tensor  # [n, S, S] bool
    grid: Tensor  # [n, gh, gw] bool: patches that they cover by half

    def take(self, rows: Tensor) -> Seen:
        return Seen(*(getattr(self, field.name)[rows] for field in fields(self)))


def edges(
    context: StudyContext,
    *,
    seed: int,
    scenes: int,
    steps: int,
    batch: int,
    tested: int,
    rate: float,
) -> list[Row]:
    """`critters-biased` trained on, on `certified`, when it sees the creature's patches only: by
    true masks and by those of an eye (`critters-vit`)."""
    rows = []
    for masks in ("true", "eye"):
        train = _scenes(context, "certified", "train", scenes, seed, masks)
        test = _scenes(context, "balanced", "test", tested, 0, masks)
        for name, shown in WAYS.items():
            if masks == "eye" and name == "whole patches":
                continue  # an eye's patches are all as whole as it can tell
            net = _masked_net(context, seed)
            _fit_masked(net, train, shown, seed, steps, batch, rate)
            rows.append({"method": f"early mask, {masks}: {name}", "masks": masks, "seed": seed,
                         **_balanced(net, test, shown)})  # fmt: skip
    return rows


def _scenes(context: StudyContext, law: str, split: str, count: int, seed: int, masks: str) -> Seen:
    base, biased = (context.load(f"builtin:critters-{name}") for name in ("vit", "biased"))
    latents = critters.draw(law, split, count, seed=seed, device=context.device)
    parts = [critters.render(latents[rows]) for rows in torch.arange(count).split(256)]
    images = biased.preprocess.normalise(torch.cat([part.image for part in parts]))
    pixels = torch.cat([part.mask for part in parts]).bool()
    if masks == "eye":
        seen = sc.eye(base, model=biased).masks(images).masks[:, None].float()
        size = tuple(pixels.shape[-2:])
        pixels = F.interpolate(seen, size, mode="bilinear", align_corners=False)[:, 0] > 0.5
    groups = torch.stack([latents.creature, latents.background], dim=1)
    grid = by_patches(pixels, biased.layout.grid)
    return Seen(images, latents.label, groups, pixels, grid)


def _masked_net(context: StudyContext, seed: int) -> IFAM:
    base = sc.load("builtin:critters-biased")
    torch.manual_seed(seed)
    module = copy.deepcopy(base.module).requires_grad_(True)
    net = IFAM(module, 4, base.classes, preprocess=base.preprocess)
    net.stage1.requires_grad_(False)
    return net.to(context.device).train()


def _half(images: Tensor, pixels: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    return images, grid


def _whole(images: Tensor, pixels: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    inside = F.adaptive_avg_pool2d(pixels[:, None].float(), grid.shape[1:])[:, 0]
    return images, _some_left(inside >= 1 - 1e-6, grid)


def _eroded(images: Tensor, pixels: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    outside = F.max_pool2d((~grid)[:, None].float(), 3, stride=1, padding=1)[:, 0] > 0
    return images, _some_left(~outside, grid)


def _filled(images: Tensor, pixels: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """What the creature does not cover is grey (0 once normalised)."""
    return images * pixels[:, None], grid


def _some_left(mask: Tensor, grid: Tensor) -> Tensor:
    """The mask, or the grid's where it is empty: a classifier must see something."""
    return torch.where(mask.flatten(1).any(dim=1)[:, None, None], mask, grid)


WAYS: dict[str, Shown] = {
    "half-covered patches": _half,
    "whole patches": _whole,
    "eroded by a patch": _eroded,
    "edges filled": _filled,
}


def _fit_masked(
    net: IFAM, train: Seen, shown: Shown, seed: int, steps: int, batch: int, rate: float
) -> None:
    assert net.stage2 is not None
    draw = torch.Generator().manual_seed(seed)

    def loss(step: int) -> Tensor:
        rows = torch.randint(len(train.labels), (batch,), generator=draw)
        part = train.take(rows.to(train.labels.device))
        return F.cross_entropy(_answers(net, part, shown).float(), part.labels)

    weights = [p for p in net.stage2.parameters() if p.requires_grad]
    descend([{"params": weights, "lr": rate}], steps, loss)


def _answers(net: IFAM, part: Seen, shown: Shown) -> Tensor:
    images, mask = shown(part.images, part.pixels, part.grid)
    return net.classify(images, _some_left(mask, torch.ones_like(mask)), packed=False)


@torch.no_grad()
def _balanced(net: IFAM, test: Seen, shown: Shown) -> Row:
    """Accuracy over balanced pictures, and the share of patches that is seen."""
    net.eval()
    parts = [test.take(rows) for rows in torch.arange(len(test.labels)).split(256)]
    answers = torch.cat([_answers(net, part, shown).argmax(dim=1) for part in parts])
    right = group_accuracy(answers == test.labels, test.groups)
    kept = shown(test.images, test.pixels, test.grid)[1].double().mean()
    return {"average": right.average, "worst": right.worst, "kept": float(kept)}
