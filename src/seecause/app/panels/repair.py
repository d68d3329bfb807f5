"""Audit and repair: does the model predict from the background, and can that be repaired?

Objects are put on backgrounds of other images (`sc.audit`); predictions that change are counted,
beside those that cutting alone changes. A remedy learns from such images (`sc.repair`) and is
evaluated on held-out images. The server keeps the results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from seecause.app.jobs import Reply
from seecause.app.panels import (
    Name,
    OnModel,
    Panel,
    as_script,
    counting,
    kept,
    offered,
    photo,
)
from seecause.app.state import ActionContext, hide_folders, own_view
from seecause.background.audit import BackgroundAudit, audit as audit_background
from seecause.background.images import LabelledImages, Progress, images_of, model_for
from seecause.background.repair import REMEDIES, Remedy, Repair, repair
from seecause.data.dataset import open_data
from seecause.errors import BadOption
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel
from seecause.options import summary_of
from seecause.report import write_page
from seecause.report.background import audit_lines, meaning, repair_sections

TILES = 6  # transplants on the sheet, and worst images
TILE_SIDE = 144
MOST_PICTURES = 512
REPAIRS = 3  # that are kept for each model
GIVEN, OWN = "data", "own"  # sources of object masks that are no served model


class OnData(OnModel):
    """`masks`: the source of object masks: those of the dataset ("data"), the model's own maps
    ("own"), or another served model."""

    data: Name
    masks: Name = GIVEN
    limit: Annotated[int, Field(ge=8, le=MOST_PICTURES)] = 64


class RepairRequest(OnData):
    """`learn`: data that the remedy learns from, and `data` what is reported on; where both are the
    same (None), a fifth of it. `force`: take the remedy also where it is not better."""

    learn: Name | None = None
    remedy: Name = "last-layer"
    force: bool = False

    @property
    def training(self) -> str:
        return self.learn or self.data

    @property
    def held_out(self) -> bool:
        return self.training != self.data


def audit(context: ActionContext, request: OnData) -> Reply:
    """The verdict, the number of predictions that flip, and example images."""
    model, pictures = read(context, request.data, request.limit)
    result = audit_background(
        model, pictures, masks=mask_source(context, request.masks), progress=telling(context)
    )
    (low, high), numbers = result.interval, result.numbers()
    return {
        "verdict": result.verdict,
        "words": audit_lines(result),
        "pictures": len(result.data),
        "skipped": [asdict(image) for image in result.data.skipped],
        "right": int(result.judged.counted.sum()),
        "flips": _or_none(result.flips),
        "control": _or_none(result.control_flips),
        "extra": numbers.get("extra flips"),
        "interval": [low, high] if low == low else None,
        "rows": [_row(name, value) for name, value in numbers.items()],
        "sheet": _tiles(model, [result], _spread(result)),
        "worst": _tiles(model, [result], [version for _, version in result.worst(TILES)]),
        "remedies": fitting_remedies(context.model, grouped=result.data.grouped),
    }


def offer(context: ActionContext, request: OnModel) -> Reply:
    """Remedies that can be tried with the model, before the data is known."""
    return {"remedies": fitting_remedies(context.model, grouped=False)}


def run_repair(context: ActionContext, request: RepairRequest) -> Reply:
    """The effect of the remedy on held-out images."""
    return _repaired(context, request)[1]


def export(context: ActionContext, request: RepairRequest) -> Reply:
    """The repaired model as a zip file: a native checkpoint, its card, and a page."""
    result, _ = _taken(context, request)
    context.progress(0.3, "writing the checkpoint")
    return offered(context, f"{context.served.key}-repaired-by-{request.remedy}.zip", result.export)


def open_repaired(context: ActionContext, request: RepairRequest) -> Reply:
    """Serve the repaired model beside the one that it was made from."""
    result, reply = _taken(context, request)
    owner = context.session.id if context.session.owns(request.model_dump(), "") else ""
    owner = owner or context.served.owner
    key = context.state.add_repaired(context.served, request.remedy, result.model, owner)
    return {"model": key, "sentence": reply["sentence"]}


def report(context: ActionContext, request: RepairRequest) -> Reply:
    """The page of the audit before and after, to download."""
    result, _ = _repaired(context, request)
    with tempfile.TemporaryDirectory() as scratch:
        name = f"{context.served.key}-{request.remedy}.html"
        title = f"{context.served.key}: before and after"
        sections = repair_sections(result)
        page = write_page(Path(scratch) / name, title, sections, lead=result.sentence)
        size = page.stat().st_size
        return {"file": context.session.add_file(name, page), "name": name, "bytes": size}


def _taken(context: ActionContext, request: RepairRequest) -> tuple[Repair, Reply]:
    result, reply = _repaired(context, request)
    if not reply["taken"]:
        raise BadOption("remedy", request.remedy, "another remedy: nothing was changed")
    return result, reply


def _repaired(context: ActionContext, request: RepairRequest) -> tuple[Repair, Reply]:
    known = [context.data(name) for name in (request.data, request.training)]
    key = (*known, request.model_dump_json())
    return kept(context, "repairs", REPAIRS, key, lambda: _repair(context, request))


def _repair(context: ActionContext, request: RepairRequest) -> tuple[Repair, Reply]:
    model, remedy = context.transformer, _remedy(request.remedy)
    result = repair(
        model,
        read(context, request.training, request.limit, merge=False)[1],
        masks=mask_source(context, request.masks),
        test=read(context, request.data, request.limit, merge=False)[1]
        if request.held_out
        else None,
        remedies=(request.remedy,),
        groups=remedy.needs_groups,
        force=request.force,
        progress=telling(context),
    )
    tried, taken = result.candidates[request.remedy], result.remedy != "nothing"
    first, pair = result.before.numbers(), [result.before, result.after]
    after = result.after.numbers() if taken else tried.test
    worst = [version for _, version in result.before.worst(TILES)]
    return result, {
        "remedy": request.remedy,
        "taken": taken,
        "seconds": round(tried.seconds, 1),
        "sentence": result.sentence,
        "done": tried.failed or tried.done,
        "failed": bool(tried.failed),
        "counts": [result.record[part] for part in ("train", "validation", "test")],
        "rows": [
            {**_row(name, value), "after": after[name]}
            for name, value in first.items()
            if after.get(name, torch.nan) == after.get(name, torch.nan)
        ],
        "notes": list(result.record["notes"]),
        "skipped": [asdict(image) for image in result.skipped],
        "worst": _tiles(model, pair if taken else pair[:1], worst),
    }


def fitting_remedies(model: ImageModel, *, grouped: bool) -> list[Reply]:
    """What can be tried with this model and data; none without a transformer's last layer."""
    if not isinstance(model, VisionModel) or model.architecture == "prompt":
        return []
    known = [each for each in REMEDIES.values() if grouped or not each.needs_groups]
    return [
        {"name": each.name, "summary": summary_of(each.fit).replace("`", ""), "cost": each.cost}
        for each in known
    ]


def _remedy(name: str) -> Remedy:
    if name not in REMEDIES:
        raise BadOption("remedy", name, f"one of {', '.join(REMEDIES)}")
    return REMEDIES[name]


def read(
    context: ActionContext, name: str, limit: int, *, merge: bool = True
) -> tuple[ImageModel, LabelledImages]:
    """Images of a dataset that the server was started with, under the name that the app uses, so
    that no folder of this machine is named. With `merge`, also the model with the data's
    classes."""
    data = open_data(context.data(name), limit=limit)
    model = model_for(context.model, data) if merge else context.model
    pictures = images_of(model, data, telling(context))
    skipped = tuple(replace(each, reason=hide_folders(each.reason)) for each in pictures.skipped)
    return model, replace(pictures, name=name, skipped=skipped)


def telling(context: ActionContext) -> Progress:
    """A `progress` argument for audits and repairs that reports to the job."""

    @contextmanager
    def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
        context.progress(0.0, what)
        yield counting(context, total, lambda done: f"{what}, {done} of {total}")

    return progress


def mask_source(context: ActionContext, masks: str) -> ImageModel | str | None:
    """The `masks` argument of `sc.audit`. Another served model is a view of its own, because jobs
    of that model may switch its heads meanwhile."""
    if masks == GIVEN:
        return None
    if masks in (OWN, context.served.key):
        return OWN
    other = context.state.served(masks, context.session.id)
    if other.kind != "classifier" or not isinstance(other.view, VisionModel):
        raise BadOption("masks", masks, "a vision transformer that is served")
    return own_view(other.view)


def _row(name: str, value: float) -> Reply:
    return {"name": name, "value": value, "meaning": meaning(name)}


def _or_none(value: float) -> float | None:
    return value if value == value else None


def _spread(audit: BackgroundAudit) -> list[int]:
    """Transplants, spread over all images; empty for pairs, which are not cut."""
    moved = int((~audit.judged.versions.control).sum())  # they come first
    if audit.masks is None:
        return []
    return torch.linspace(0, moved - 1, min(TILES, moved)).round().long().tolist()


def _tiles(
    model: ImageModel, audits: Sequence[BackgroundAudit], versions: Sequence[int]
) -> list[Reply]:
    """Versions of the first audit's images: their sources, and the predictions in every audit of
    the same images."""
    moved, data = audits[0].judged.versions, audits[0].data
    tiles = []
    for version in versions:
        place, donor = int(moved.source[version]), None
        if data.masks is not None:
            donor = photo(model, data.images[int(moved.donor[version])][None], TILE_SIDE)
        image = moved[version : version + 1]
        truth = int(moved.labels[version])
        tiles.append(
            {
                "picture": data.ids[place],
                "object": photo(model, data.images[place][None], TILE_SIDE),
                "background": donor,
                "moved": photo(model, image, TILE_SIDE),
                "truth": model.class_name(truth),
                "donor": model.class_name(int(moved.donor_labels[version])),
                "answers": [_both(model, audit, place, version, truth) for audit in audits],
            }
        )
    return tiles


def _both(
    model: ImageModel, audit: BackgroundAudit, place: int, version: int, truth: int
) -> list[Reply]:
    """The predictions for an image and for its version."""
    rows = (audit.judged.plain[place], audit.judged.moved[version])
    places = [int(row.argmax()) for row in rows]
    return [{"name": model.class_name(best), "right": best == truth} for best in places]


def copy(context: ActionContext, request: RepairRequest) -> Reply:
    """Python code that computes these results without the app."""
    source = None if request.masks == GIVEN else OWN
    if request.masks not in (GIVEN, OWN, context.served.key):
        source = context.state.served(request.masks, context.session.id).spec
    options = {"groups": _remedy(request.remedy).needs_groups, "force": request.force}
    options = {name: True for name, value in options.items() if value}
    masks = {} if source is None else {"masks": source}
    return as_script("repair", context, request, masks=masks, options=options)


PANEL = Panel(
    "repair",
    "Repair",
    "Can the model be repaired, and at what cost?",
    actions=(audit, offer, run_repair, open_repaired, export, report, copy),
    kinds=("classifier",),
    kept=(audit, run_repair),
    blocks=True,
)
