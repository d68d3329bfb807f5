"""Cells about maps: scored by every metric, checked for sanity, against the truth, and CAAP with
other settings.

A variant is a method's name, or a table: what to call it, the method (CAAP), and its options. Rows
are of one picture each, so that methods can be compared picture by picture.
"""

from __future__ import annotations

import math
import time
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import seecause as sc
from seecause.bench.ablate import attention_by_depth, settings
from seecause.bench.study import Row, StudyContext
from seecause.critters import BACKGROUNDS, Do, draw, render
from seecause.engine.blanks import blank_image
from seecause.engine.token_sets import selection
from seecause.background.images import logits_of
from seecause.metrics import (
    insertion_deletion,
    localization,
    parameter_randomisation,
    part_truth,
    random_logit,
    rank_correlation,
    single_deletion,
)

BATCH = 50
FULL = 400  # with a limit, what is too dear for all pictures sees a share of so many
SIGNED = 0.5  # share of a method's maps that must have both signs for it to be a signed method


def pictures(
    context: StudyContext, model: str, data: str, count: int | None, weights: str | None
) -> tuple[Any, Any]:
    """The model and the pictures: all, `limit` of them spread evenly, or a fixed random `count`."""
    view = context.load(model, **({"weights": weights} if weights else {}))
    context.data(data, context.limit)
    cases = read(view, data, context.limit)
    if count is not None and context.limit is not None:
        count = math.ceil(count * context.limit / FULL)
    if count is not None and count < len(cases):
        order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(0))
        cases = cases.take(order[:count].sort().values)
    return view, cases


@lru_cache(maxsize=4)
def read(view: Any, data: str, limit: int | None) -> Any:
    """Pictures in a model's frame; cells of one process share them."""
    return sc.background.read_pictures(view, sc.data.open_data(data, limit=limit))


def named(variant: str | Row, lighter: Row | None = None) -> tuple[str, Row]:
    """The name of a variant, and what `sc.attribute` is asked for; `lighter` has options by method
    that make a dear one cheap."""
    if isinstance(variant, str):
        variant = {"name": variant, "method": variant}
    asked = {name: value for name, value in variant.items() if name != "name"}
    return variant["name"], {**(lighter or {}).get(asked.get("method"), {}), **asked}


def explained(model: Any, images: Tensor, target: Tensor, asked: Row) -> tuple[Tensor, Tensor]:
    """Maps as metrics take them (of pixels where the method explains pixels and no level = "patch"
    is asked for), and of patches."""
    layers, whole = asked.get("layers"), asked.get("level") == "patch"
    asked = {name: value for name, value in asked.items() if name != "level"}
    asked |= {"layers": tuple(n if n >= 0 else None for n in layers)} if layers else {}
    result = sc.attribute(model, images, target, **asked)
    return (result.maps if whole or result.native is None else result.native), result.maps


def scored(
    context: StudyContext,
    *,
    model: str,
    data: str,
    variant: str | Row,
    weights: str | None = None,
    target: str = "label",
    curves: Row,
    lighter: Row | None = None,
    changes: bool = False,
    alike: tuple[str, ...] = (),
    count: int | None = None,
    earlier: dict[str, list[Row]] | None = None,
) -> list[Row]:
    """Insertion and deletion, localization where there are masks, and milliseconds for a map.

    target = predicted takes rows of the label from `earlier` where that is what the model answers.
    `changes`: maps also on patches, without signs and smoothed. `alike`: Spearman's correlation
    with CAAP under other tails.
    """
    view, cases = pictures(context, model, data, count, weights)
    name, asked = named(variant, lighter)
    predicted = logits_of(view, cases.images).argmax(dim=1)
    classes = cases.labels if target == "label" else predicted
    rows: list[Row] = []
    if target == "predicted" and earlier is not None:
        right = {cases.ids[i] for i in (predicted == cases.labels).nonzero()[:, 0].tolist()}
        known = [row for group in earlier.values() for row in group if row["method"] == name]
        same = [row for row in known if row["picture"] in right]
        rows = [{k: v for k, v in row.items() if k not in ("table", "target")} for row in same]
    taken = {row["picture"] for row in rows}
    todo = torch.tensor([i for i, name in enumerate(cases.ids) if name not in taken])
    for places in todo.split(BATCH) if len(todo) else ():
        some = cases.take(places)
        goal = classes[places.to(classes.device)]
        began = time.perf_counter()
        maps, patches = explained(view, some.images, goal, asked)
        spent = 1000 * (time.perf_counter() - began) / len(some)
        versions = {"": maps} | (_changed(maps, patches) if changes else {})
        for change, values in versions.items():
            whole = change in ("", "patches")
            columns = _scores(view, some, goal, values, curves if whole else None)
            for other in alike:
                caap = sc.attribute(view, some.images, goal, tail=other).maps
                columns[f"rank correlation with {other}"] = rank_correlation(patches, caap)
            rows += _rows(some, columns, method=name, change=change, ms=spent)
    return rows


def _scores(view: Any, cases: Any, target: Tensor, maps: Tensor, curves: Row | None) -> Row:
    columns: Row = {}
    if curves is not None:
        areas = insertion_deletion(view, cases.images, maps, target, **curves)
        columns |= {"insertion": areas.insertion_area, "deletion": areas.deletion_area}
        columns["ins-del"] = areas.difference
        columns["idsds"] = single_deletion(view, cases.images, maps, target)
    if cases.truth is not None:
        place = localization(maps, cases.truth)
        columns |= {name: getattr(place, name) for name in ("aupr1", "aupr0", "pointing")}
    return columns


def _rows(cases: Any, columns: Row, **more: Any) -> list[Row]:
    values = {name: column.double().cpu().tolist() for name, column in columns.items()}
    each = ({name: column[i] for name, column in values.items()} for i in range(len(cases)))
    return [{"picture": cases.ids[i], **more, **row} for i, row in enumerate(each)]


def smoothed(maps: Tensor) -> Tensor:
    """The mean over each patch and its neighbours, as CAAP's box1 selects them. [B, gh, gw]."""
    box = selection((maps.shape[1], maps.shape[2]), "box1").to(maps.device).double()
    return (maps.double().flatten(1) @ (box / box.sum(dim=1, keepdim=True)).T).view(maps.shape)


def _changed(maps: Tensor, patches: Tensor) -> dict[str, Tensor]:
    """Maps of patches that give other methods their best chance to find the object."""
    both = (patches.amin(dim=(1, 2)) < 0) & (patches.amax(dim=(1, 2)) > 0)
    versions = {"smoothed": smoothed(patches)}
    if maps is not patches:
        versions["patches"] = patches
    if float(both.double().mean()) >= SIGNED:
        versions["absolute"] = patches.abs()
        versions["absolute, smoothed"] = smoothed(patches.abs())
    return versions


def sanity(
    context: StudyContext,
    *,
    model: str,
    data: str,
    variant: str | Row,
    weights: str | None = None,
    lighter: Row | None = None,
    steps: int = 4,
    count: int | None = None,
) -> list[Row]:
    """Is the map another one for a redrawn model, for another class, for the next likely one?"""
    view, cases = pictures(context, model, data, count, weights)
    name, asked = named(variant, lighter)
    redrawn = parameter_randomisation(
        view, cases.images, lambda m, x, t: explained(m, x, t, asked)[0], cases.labels, steps=steps
    )
    other = random_logit(
        view, cases.images, lambda x, t: explained(view, x, t, asked)[0], cases.labels
    )
    order = logits_of(view, cases.images).argsort(dim=1, descending=True)
    second = torch.where(order[:, 0] == cases.labels, order[:, 1], order[:, 0])
    rival = random_logit(
        view, cases.images, lambda x, t: explained(view, x, t, asked)[0], cases.labels, other=second
    )
    columns = {"mprt": redrawn.signed, "mprt-abs": redrawn.absolute, "runner-up": rival.signed}
    columns |= {"random-logit": other.signed, "random-logit-abs": other.absolute}
    return _rows(cases, columns, method=name)


def against_truth(
    context: StudyContext, *, model: str, regime: str, variant: str | Row, count: int
) -> list[Row]:
    """Completeness, correctness and contrastivity, from pictures drawn again without a part."""
    view = context.load(model)
    name, asked = named(variant)
    latents = draw(regime, "test", min(count, context.limit or count), device=view.device)
    scores = part_truth(view, latents, lambda x, t: explained(view, x, t, asked)[0])
    each = zip(scores.correctness.tolist(), scores.contrastivity.tolist(), strict=True)
    rows = [{"method": name, "completeness": scores.completeness, "threshold": scores.threshold,
             "overall": scores.overall}]  # fmt: skip
    for place, (right, told_apart) in enumerate(each):
        row = {"method": name, "picture": place}
        rows.append({**row, "part-correctness": right, "part-contrastivity": told_apart})
    return rows


def ablation(
    context: StudyContext,
    *,
    model: str,
    data: str,
    setting: str,
    weights: str | None = None,
    curves: Row,
    count: int | None = None,
) -> list[Row]:
    """CAAP with one setting changed at a time, and how like the default's its maps are."""
    view, cases = pictures(context, model, data, count, weights)
    rows: list[Row] = []
    for places in torch.arange(len(cases)).split(BATCH):
        some, default = cases.take(places), None
        for name, options in settings(setting, view, {}).items():
            maps = sc.attribute(view, some.images, some.labels, **options).maps
            default = maps if default is None else default
            columns = _scores(view, some, some.labels, maps, curves)
            columns["rank correlation with the default"] = rank_correlation(maps, default)
            rows += _rows(some, columns, method=name)
    return rows


def class_attention(
    context: StudyContext,
    *,
    model: str,
    data: str,
    weights: str | None = None,
    count: int | None = None,
) -> list[Row]:
    """Attention of the class token to a patch of the object and of the background, by block."""
    view, cases = pictures(context, model, data, count, weights)
    depth = attention_by_depth(view, cases.images, cases.truth)
    columns = {"on the object": depth.on_object, "on the background": depth.on_background}
    rows = []
    for block in range(depth.on_object.shape[1]):
        here = {name: values[:, block] for name, values in columns.items()}
        rows += _rows(cases, here, method=f"block {block + 1}", uniform=depth.uniform)
    return rows


def background_share(context: StudyContext, *, model: str, regime: str, count: int) -> list[Row]:
    """Percent of CAAP's positive attribution on the background, beside its share of the area, and
    how often another background changes the answer, of this model and of an untrained one."""
    view = context.load(model)
    untrained = context.load("timm:vit_tiny_patch16_224", weights="random", size=96)
    latents = draw(regime, "test", min(count, context.limit or count), seed=1, device=view.device)
    rows: list[Row] = []
    for start in range(0, len(latents), BATCH):
        part = latents[start : start + BATCH]
        scene = render(part)
        moved = render(part, do=Do(background=(part.background + 1) % len(BACKGROUNDS)))
        images, swapped = (
            view.preprocess.normalise(p.image).to(view.dtype) for p in (scene, moved)
        )
        share, area = outside_share(view, images, scene.mask)
        flips = {
            name: logits_of(m, images).argmax(dim=1) != logits_of(m, swapped).argmax(dim=1)
            for name, m in (("flips", view), ("flips untrained", untrained))
        }
        values = {"share": share, "area": area, **flips}
        lists = {name: value.double().cpu().tolist() for name, value in values.items()}
        for i in range(len(part)):
            row = {name: 100 * value[i] for name, value in lists.items()}
            rows.append({"method": model, "picture": start + i, **row})
    return rows


def outside_share(model: Any, images: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """[B] share of max(0, A - f(blank)) that lies on the background, and of the area that is."""
    result = sc.attribute(model, images)
    classes = torch.tensor(result.manifest["target"]["class"], device=images.device)
    with torch.no_grad():
        blank = model(blank_image(model, (images.shape[-2], images.shape[-1])))
    neutral = blank.softmax(dim=-1)[0, classes]
    positive = (result.maps - neutral[:, None, None]).clamp_min(0)
    outside = F.adaptive_avg_pool2d((~mask)[:, None].float(), result.maps.shape[1:])[:, 0]
    total = positive.sum(dim=(1, 2)).clamp_min(1e-12)
    return (positive * outside).sum(dim=(1, 2)) / total, outside.mean(dim=(1, 2))
