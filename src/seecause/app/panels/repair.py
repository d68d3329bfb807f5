"""Audit and repair: does the model predict from the background, and can that be repaired?

Objects are put on backgrounds of other images (`sc.audit`); predictions that change are counted,
beside those that cutting alone changes. A remedy learns from such images (`sc.repair`) and is
evaluated on held-out images. Datasets are those that the server was started with, so a
result is the same for everybody: it is kept with the model, and asking again costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from seecause.app.jobs import Reply
from seecause.app.panels import (
    Name,
    OnModel,
    Panel,
    as_script,
    call,
    counting,
    load_line,
    offered,
)
from seecause.app.sessions import Recent
from seecause.app.state import ActionContext, hide_folders, own_view
from seecause.background.audit import SOME, BackgroundAudit, audit as audit_background
from seecause.background.images import LabelledImages, Progress, images_of, model_for
from seecause.background.repair import REMEDIES, Remedy, Repair, repair
from seecause.data.dataset import open_data, to_pil
from seecause.errors import BadOption
from seecause.models.base import ImageModel
from seecause.models.block import wide
from seecause.models.view import VisionModel
from seecause.options import summary_of
from seecause.report.background import audit_lines, meaning
from seecause.report.figures import data_uri

TILES = 6  # transplants on the sheet, and worst images
TILE_SIDE = 144
MOST_PICTURES = 512
AUDITS, REPAIRS = 16, 2  # results that are kept for each model
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
    key = (request.data, request.masks, request.limit)
    return _kept(context, "audits", AUDITS, key, lambda: _audited(context, request))


def _audited(context: ActionContext, request: OnData) -> Reply:
    model, pictures = read(context, request.data, request.limit)
    result = audit_background(
        model, pictures, masks=_mask_source(context, request), progress=telling(context)
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
        "from": SOME,
        "rows": [_row(name, value) for name, value in numbers.items()],
        "sheet": _tiles(model, [result], _spread(result)),
        "worst": _tiles(model, [result], [version for _, version in result.worst(TILES)]),
        "remedies": fitting_remedies(context.model, grouped=result.data.grouped),
    }


def run_repair(context: ActionContext, request: RepairRequest) -> Reply:
    """The effect of the remedy on held-out images."""
    return _repaired(context, request)[1]


def export(context: ActionContext, request: RepairRequest) -> Reply:
    """The repaired model as a zip file: a native checkpoint, its card, and a page."""
    result, answer = _repaired(context, request)
    if not answer["taken"]:
        raise BadOption("remedy", request.remedy, "another remedy: nothing was changed")
    context.progress(0.3, "writing the checkpoint")
    return offered(context, f"{context.served.key}-repaired-by-{request.remedy}.zip", result.export)


def _repaired(context: ActionContext, request: RepairRequest) -> tuple[Repair, Reply]:
    key = (
        request.data,
        request.masks,
        request.limit,
        request.training,
        request.remedy,
        request.force,
    )
    return _kept(context, "repairs", REPAIRS, key, lambda: _repair(context, request))


def _repair(context: ActionContext, request: RepairRequest) -> tuple[Repair, Reply]:
    model, remedy = context.transformer, _remedy(request.remedy)
    result = repair(
        model,
        read(context, request.training, request.limit, merge=False)[1],
        masks=_mask_source(context, request),
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
    if name not in context.state.data:
        raise BadOption(
            "data", name, f"one of {', '.join(context.state.data) or 'none: see --data'}"
        )
    data = open_data(context.state.data[name], limit=limit)
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


def _mask_source(context: ActionContext, request: OnData) -> ImageModel | str | None:
    """The `masks` argument of `sc.audit`. Another served model is a view of its own, because jobs
    of that model may switch its heads meanwhile."""
    if request.masks == GIVEN:
        return None
    if request.masks in (OWN, context.served.key):
        return OWN
    other = context.state.served(request.masks)
    if other.kind != "classifier" or not isinstance(other.view, VisionModel):
        raise BadOption("masks", request.masks, "a vision transformer that is served")
    return own_view(other.view)


def _kept(
    context: ActionContext, what: str, most: int, key: Hashable, make: Callable[[], Any]
) -> Any:
    """One of the latest `most` results, made if it is not there."""
    results = context.served.memo.setdefault(what, Recent(most))
    return results.get_or_make(key, make)


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
            donor = _uri(model, data.images[int(moved.donor[version])])
        image = moved[version : version + 1][0]
        truth = int(moved.labels[version])
        tiles.append(
            {
                "picture": data.ids[place],
                "object": _uri(model, data.images[place]),
                "background": donor,
                "moved": _uri(model, image),
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


def _uri(model: ImageModel, image: Tensor) -> str:
    raw = wide(model.preprocess.raw(image[None]))[0].clamp(0, 1).cpu()
    shown = to_pil(raw)
    shown.thumbnail((TILE_SIDE, TILE_SIDE))
    return data_uri(shown, photo=True)


def copy(context: ActionContext, request: RepairRequest) -> Reply:
    """Python code that computes these results without the app."""
    groups = _remedy(request.remedy).needs_groups
    source = None if request.masks == GIVEN else OWN
    if request.masks not in (GIVEN, OWN, context.served.key):
        source = context.state.served(request.masks).spec
    looking: dict[str, Any] = {} if source is None else {"masks": source}
    repairing_options: dict[str, Any] = {**looking, "remedies": (request.remedy,)}
    repairing_options |= {"groups": True} if groups else {}
    repairing_options |= {"force": True} if request.force else {}
    limit, test = request.limit, ["test=data"] if request.held_out else []
    lines = [
        "import seecause as sc",
        "",
        load_line(context.served),
        f"data = sc.data.open_data({request.data!r}, limit={limit})",
        f"result = {call('sc.audit', 'model', 'data', **looking)}",
        "print(result.verdict, result.flips, result.control_flips, result.interval)",
        f"learn = sc.data.open_data({request.training!r}, limit={limit})",
        f"repaired = {call('sc.repair', 'model', 'learn', *test, **repairing_options)}",
        "print(repaired.sentence)",
        'repaired.export("repaired")',
    ]
    return as_script(lines)


PANEL = Panel(
    "repair",
    "Audit",
    "Does it predict from the background, and can that be repaired?",
    actions=(audit, run_repair, export, copy),
)
