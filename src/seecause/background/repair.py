"""From a model and pictures to a mended model: remedies side by side, chosen without group labels.

    learn     three fifths of the pictures: remedies learn from versions of these
    choose    a fifth: which remedy, and its rank, count or epoch, by transplant-worst
    report    a fifth, or data of its own: what is said before and after

First the verdict (`audit`) on learn and choose together: where it is "no", nothing is done unless
`force`. Else the best remedy by transplant-worst wins (with `groups`, by the worst group), if
held-out versions are answered better by more than chance would have it: also where too few answers
are right to tell why, for a model that is nearly always wrong has few.

With a work folder every finished remedy but iFAM is kept (`_remedies`), and so are the eye's maps
and the epochs of fine-tuning: a repair that was killed goes on. WORK/NAME-KEY is a remedy, KEY a
digest of all that decides it: model, pixels, masks, options, seed, version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seecause import __version__
from seecause.background._remedies import (
    Lesson,
    Mended,
    Remedy,
    find_remedy,
    read_remedy,
    remedies as all_remedies,
    write_remedy,
)
from seecause.background.audit import PER_PICTURE, BackgroundAudit, audit_part, masked_or_paired
from seecause.background.images import LabelledImages, Masks, Progress, no_progress
from seecause.background.objects import MaskSource
from seecause.background.result import Candidate, Repair
from seecause.background.versions import (
    origins,
    split_rows,
    versions_to_learn,
    versions_to_test,
)
from seecause.data.dataset import Dataset, evenly
from seecause.data.registry import as_data
from seecause.engine.verify import verify
from seecause.errors import BadOption, NotDefined, SeecauseError
from seecause.faithful.run import joined_processes
from seecause.files import digest, digest_json
from seecause.metrics.statistics import bootstrap_interval
from seecause.models.base import ImageModel
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel

log = logging.getLogger(__name__)

CHEAP = ("nothing", "last-layer", "directions", "directions-refit")
EVERY = "all"  # instead of names: every remedy that the data allows, but iFAM
SHARES = (0.6, 0.2, 0.2)
IN_WORDS = "answers in words, whose weights all its other answers share: no last layer to mend"
ASKED_INSTEAD = (
    "Audit it (seecause audit --classify name_ll), take heads out of it (seecause heads prune"
    " --classify name_ll), or repair its vision tower as a classifier"
)
JUDGED = 400  # pictures that the verdict is taken of, at most


@in_eval_mode
def repair(
    model: ImageModel,
    data: Dataset | LabelledImages | str,
    *,
    masks: MaskSource = None,
    test: Dataset | LabelledImages | str | None = None,
    remedies: Sequence[str] | str = CHEAP,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    groups: bool = False,
    force: bool = False,
    per_picture: int = 8,
    seed: int = 0,
    work: str | Path | None = None,
    progress: Progress = no_progress,
) -> Repair:
    """Mend a model that answers from the background: try remedies on its own pictures with the
    backgrounds exchanged, choose on held-out ones, and report on others. Needs no group label.

    `data` and `masks`: as `sc.audit` takes them. `test`: images to report on, instead of a fifth of
    `data`. `remedies`: names of `sc.background.remedies()`, or "all"; `options` of each, by name. `groups`: remedies may learn from group labels, and the worst group chooses. `force`:
    repair also where there is nothing to repair. `per_picture`: transplants to learn from. `work`:
    a folder from which a repair that was killed goes on.

    The result has `model`, `remedy`, the audits `before` and `after`, and `export(folder)`.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-biased")
    >>> data = sc.data.open_data("critters:certified:train", limit=48)
    >>> mended = sc.repair(model, data, per_picture=2, remedies="directions")
    >>> mended.after.flips < mended.before.flips
    True
    """
    view = _view(model)
    entries = _entries(remedies, options or {}, groups=groups)
    folder = None if work is None else work_folder(Path(work))
    material = masked_or_paired(view, as_data(data), masks, progress)
    if groups:
        _need_groups(material)
    tested = (
        None if test is None else masked_or_paired(view, as_data(test), _again(masks), progress)
    )
    learn, choose, report, both = _split(material, tested, seed)
    held_out = versions_to_test(view, choose, PER_PICTURE, seed=seed)
    lesson = Lesson(
        versions_to_learn(learn, per_picture, seed=seed), held_out, seed, groups, progress=progress
    )
    judged = versions_to_test(view, both, PER_PICTURE, seed=seed)
    verdict = audit_part(view, judged, progress, fills=()).verdict
    key = [view.fingerprint(), per_picture, seed, groups]
    if folder is not None:
        key += [content_key(each, groups=groups) for each in (material, choose)]
    candidates, mended = _try_all(view, entries, lesson, folder, key)
    chosen_by = "worst group" if groups else "transplant-worst"
    name = _choice(candidates, mended, lesson, chosen_by, verdict, force)
    record = _record(view, material, learn, choose, report, per_picture, seed)
    candidates, before, after = _reported(view, report, candidates, mended, name, seed)
    return Repair(
        mended[name].model, view, name, verdict, before, after, candidates, chosen_by, record,
        skipped=(*material.skipped, *(() if tested is None else tested.skipped)),
    )  # fmt: skip


def work_folder(work: Path) -> Path:
    if work.exists() and not work.is_dir():
        raise BadOption("work", str(work), "a folder; this is a file")
    work.mkdir(parents=True, exist_ok=True)
    return work


def content_key(material: LabelledImages, *, groups: bool) -> str:
    """A digest of pixels, labels and masks, and of group labels where they are used."""
    labels = material.labels
    tensors = [material.images, labels]
    tensors += [] if material.masks is None else [material.masks.hard]
    if material.masks is None and material.other_background is not None:
        tensors.append(material.other_background)
    bytes_of = [
        t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for t in tensors
        if t is not None
    ]
    return digest(*bytes_of, repr(material.groups if groups else ()))


def remedy_name(entry: Remedy, settings: Mapping[str, Any], key: list[Any]) -> str:
    """Of the folder of a remedy."""
    return f"{entry.name}-{digest_json([entry.name, dict(settings), key, __version__])}"


def _try_all(
    model: VisionModel,
    entries: Sequence[tuple[Remedy, dict[str, Any]]],
    lesson: Lesson,
    folder: Path | None,
    key: list[Any],
) -> tuple[dict[str, Candidate], dict[str, Mended]]:
    """Every remedy by name, and the mended model of each that could be done."""
    candidates, mended = dict[str, Candidate](), dict[str, Mended]()
    with lesson.progress("trying remedies", len(entries)) as advance:
        for entry, settings in entries:
            place = None if folder is None else folder / remedy_name(entry, settings, key)
            candidates[entry.name], result = _try(model, entry, settings, lesson, place)
            if result is not None:
                mended[entry.name] = result
            advance(1)
    return candidates, mended


def _reported(
    model: VisionModel,
    report: LabelledImages,
    candidates: Mapping[str, Candidate],
    mended: Mapping[str, Mended],
    name: str,
    seed: int,
) -> tuple[dict[str, Candidate], BackgroundAudit, BackgroundAudit]:
    """Candidates with their numbers on pictures that chose nothing, and the audits of the model
    before and after."""
    part = versions_to_test(model, report, PER_PICTURE, seed=seed + 1)
    judged = {known: result.judge(part) for known, result in mended.items()}
    numbers = {known: each.numbers(groups=True) for known, each in judged.items()}
    shown = {
        known: replace(candidate, report=numbers.get(known, {}))
        for known, candidate in candidates.items()
    }
    before = after = audit_part(model, part, judged=judged["nothing"])
    if name != "nothing":
        verify(mended[name].model)
        after = audit_part(mended[name].model, part, judged=judged[name])
    return shown, before, after


def _view(model: ImageModel) -> VisionModel:
    if model.architecture == "prompt":
        raise NotDefined("repair", f"{model.name} {IN_WORDS}", ASKED_INSTEAD)
    if not isinstance(model, VisionModel):
        raise NotDefined(
            "repair", f"{model.name} is not a vision transformer classifier", "Use sc.audit"
        )
    if model.merged or model.gates is not None:
        raise NotDefined("repair", "this view changes its module's answers", "Use the plain model")
    return model


def _entries(
    names: Sequence[str] | str, options: Mapping[str, Mapping[str, Any]], *, groups: bool
) -> list[tuple[Remedy, dict[str, Any]]]:
    """Remedies with their options, "nothing" always the first."""
    names = (names,) if isinstance(names, str) else tuple(names)
    if names == (EVERY,):
        known = all_remedies()
        names = [n for n in known if n != "ifam" and (groups or known[n].needs != "group labels")]
    tried = list(dict.fromkeys(["nothing", *names]))
    unused = [name for name in options if name not in tried]
    if unused:
        raise BadOption("options", unused[0], f"options of remedies that are tried: {tried}")
    entries = [find_remedy(name, dict(options.get(name, {}))) for name in tried]
    if not groups and any(entry.needs == "group labels" for entry in entries):
        raise BadOption("remedies", ", ".join(tried), "groups=True (--groups) for dfr, group-dro")
    return [(entry, dict(options.get(entry.name, {}))) for entry in entries]


def _again(masks: MaskSource) -> MaskSource:
    """A source of masks for other images: given masks belong to theirs."""
    return None if isinstance(masks, Tensor | Masks) else masks


def _need_groups(material: LabelledImages) -> None:
    pictures = material
    lacking = len(pictures) - sum(group is not None for group in pictures.groups)
    if lacking:
        raise BadOption(
            "groups",
            True,
            f"data with a group for every picture: {lacking} of {len(pictures)} of {pictures.name}"
            " have none",
        )


def _split(
    material: LabelledImages, test: LabelledImages | None, seed: int
) -> tuple[LabelledImages, LabelledImages, LabelledImages, LabelledImages]:
    """To learn from, to choose by, to report on; and what the verdict is taken of: pictures that
    are not reported on, spread."""
    assert material.labels is not None
    shares = SHARES if test is None else SHARES[:2]
    pictures = origins(material.ids)  # versions of a picture are not torn apart
    rows = split_rows(material.labels, shares, seed=seed, pictures=pictures)
    for part in rows:
        if len(part) < 2 or len(material.labels[part].unique()) < 2:
            raise BadOption(
                "data",
                f"{len(material)} pictures of {material.name}",
                "at least five of each class: three parts learn, choose and report",
            )
    unreported = torch.cat(rows[:2]).sort().values.tolist()
    both = material.take(torch.tensor(evenly(unreported, JUDGED)))
    learn, choose = material.take(rows[0]), material.take(rows[1])
    return learn, choose, material.take(rows[2]) if test is None else test, both


def _try(
    model: VisionModel, entry: Remedy, settings: dict[str, Any], lesson: Lesson, place: Path | None
) -> tuple[Candidate, Mended | None]:
    """A remedy, or what an earlier run made of it; one that cannot be done is a hole with its
    reason."""
    processes = joined_processes(model.device)
    if place is not None and entry.name != "nothing":
        place.mkdir(exist_ok=True)
    began, kept = time.perf_counter(), None if place is None else read_remedy(model, place)
    if not all(processes.gather(kept is not None)):
        kept = None  # one that does not see it needs the others to learn with
    try:
        result = kept[0] if kept else entry.fit(model, replace(lesson, work=place), **settings)
    except SeecauseError as reason:
        if isinstance(reason, BadOption) and reason.option in settings:
            raise  # what was asked for cannot be done: no hole, but an error
        log.warning("%s cannot be tried: %s", entry.name, reason)
        return Candidate(entry.name, "not tried", failed=str(reason)), None
    seconds = kept[1] if kept else time.perf_counter() - began
    numbers = result.judge(lesson.choose).numbers(groups=lesson.groups)
    candidate = Candidate(entry.name, result.done, result.details, seconds, numbers)
    if place is not None and not kept and entry.name != "nothing" and processes.first:
        write_remedy(place, result, seconds)
    return candidate, result


def _choice(
    candidates: Mapping[str, Candidate],
    mended: Mapping[str, Mended],
    lesson: Lesson,
    chosen_by: str,
    verdict: str,
    force: bool,
) -> str:
    names = [name for name in mended if name != "nothing"]
    if not names or (verdict == "no" and not force):
        return "nothing"

    def key(name: str) -> tuple[float, float, float]:
        numbers = candidates[name].choose
        return numbers[chosen_by], numbers["transplants"], -numbers["flips"]

    best = max(names, key=key)
    if force:
        return best
    before, after = (mended[name].judge(lesson.choose) for name in ("nothing", best))
    gained = after.right_by_picture() - before.right_by_picture()
    low, _ = bootstrap_interval(gained)
    return best if key(best) > key("nothing") and low > 0 else "nothing"


def _lacking(model: VisionModel, material: LabelledImages) -> list[str]:
    """A warning where a repair can make the model forget classes that it saw no picture of."""
    assert material.labels is not None
    occurring, known = len(material.labels.unique()), model.n_classes
    if occurring == known:
        return []
    return [
        f"{occurring} of the model's {known} classes have pictures here: a mended model may answer"
        " these for all others too. Test it on the others before it ships"
    ]


def _record(
    model: VisionModel,
    material: LabelledImages,
    learn: LabelledImages,
    choose: LabelledImages,
    report: LabelledImages,
    per_picture: int,
    seed: int,
) -> dict[str, Any]:
    masks = material.masks
    overlap = None if masks is None or masks.overlap is None else masks.overlap
    return {
        "model": model.name,
        "fingerprint": model.fingerprint(),
        "data": material.name,
        "learn": len(learn),
        "choose": len(choose),
        "report": len(report),
        "report data": report.name,
        "versions of each picture": per_picture,
        "masks": "pairs" if masks is None else masks.source,
        "mask IoU": None if overlap is None else float(overlap[~overlap.isnan()].mean()),
        "notes": [*([] if masks is None else masks.notes), *_lacking(model, material)],
        "seed": seed,
        "seecause": __version__,
    }
