"""Cells about repairs without group labels: transplants, remedies, controls, and what it costs
where there is nothing to repair.

The pets shortcut is that of `cells_shortcut`: a model is fine-tuned on cats on boards and dogs on
leaves. Remedies see those training pictures only, and no group of any of them; groups of test
pictures are for the table. DFR is beside them, which learns from groups of validation pictures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cells_shortcut as shortcut
import torch
from torch import Tensor

import seecause as sc
from seecause.bench.study import Row, StudyContext
from seecause.background import Pictures
from seecause.background.masks import iou
from seecause.background.images import critter_pictures, logits_of
from seecause.background._remedies import Lesson, find_remedy
from seecause.background.audit import PER_PICTURE, audit_part, verdict_of
from seecause.background.objects import EyeMasks, by_patches
from seecause.background.versions import Material, VersionedPictures, split_rows

ERM: Row = {"rate": 1e-4, "length": 3.0}  # the setting that `shortcut.toml` chose, on seed 0
TRANSPLANTS = 8  # of each picture
Earlier = dict[str, list[Row]]


def trained(context: StudyContext, *, data: str, seed: int, setup: Row) -> list[Row]:
    """One fine-tuned model as it is, and DFR with the groups of validation pictures."""
    case = _case(context, data, seed, setup)
    _, val, _ = case.sets
    seen = shortcut.seen(case.model.preprocess, val)
    dfr = sc.background.retrain_last_layer(case.model, seen, val.labels, val.groups, seed=seed)
    return [
        {"method": "as trained", **case.measured(case.model)},
        {"method": "DFR, with group labels", **case.measured(dfr)},
    ]


def by_masks(
    context: StudyContext, *, data: str, seed: int, setup: Row, earlier: Earlier
) -> list[Row]:
    """A new last layer by every kind of masks, and with backgrounds of the own class only. Nothing
    is chosen, so it learns from all training pictures."""
    case = _case(context, data, seed, setup)
    rows = []
    for name, masks in _masks(context, case, seed).items():
        for donors in ("any", "same-class") if name in ("eye", "true") else ("any",):
            began = time.perf_counter()
            pictures = case.material.pictures
            assert pictures.labels is not None
            options = {"per_picture": TRANSPLANTS, "donors": donors, "seed": seed}
            moved = sc.transplant(pictures.images, masks.cut, pictures.labels, **options)
            part = VersionedPictures(pictures, moved)
            mended = find_remedy("last-layer", {}).fit(case.model, Lesson(part, part, seed))
            seconds = time.perf_counter() - began
            title = f"last layer, {name}" + ", same-class donors" * (donors != "any")
            own = {"method": title, "masks": name, "donors": donors, "iou": _iou(masks)}
            rows.append({**own, "seconds": seconds, **case.measured(mended.model)})
    return rows


def remedied(
    context: StudyContext,
    *,
    data: str,
    seed: int,
    setup: Row,
    remedies: list[str],
    earlier: Earlier,
) -> list[Row]:
    """Remedies that choose by transplant-worst, on masks by the eye."""
    case = _case(context, data, seed, setup)
    masks = _by_eye(context, case)
    options = {"fine-tune": {"epochs": setup["tuned"]}}
    material, rows = Material(case.material.pictures, masks), []
    for row in _remedied(case.model, material, tuple(remedies), options, seed):
        mended = row.pop("model")
        own = {"masks": "eye", "donors": "any", "iou": _iou(masks)}
        own["method"] = f"{row.pop('method')}, eye"
        rows.append({**own, **row, **case.measured(mended)})
    return rows


def chosen(
    context: StudyContext, *, data: str, seed: int, setup: Row, earlier: Earlier
) -> list[Row]:
    """`sc.repair`, which chooses by transplant-worst alone."""
    case, began = _case(context, data, seed, setup), time.perf_counter()
    mended = sc.repair(
        case.model,
        case.material.pictures,
        eye=sc.eye(case.eye, model=case.model, cache=context.work / "eye"),
        remedies=("last-layer", "directions", "directions-refit", "fine-tune"),
        options={"fine-tune": {"epochs": setup["tuned"]}},
        seed=seed,
    )
    row = {"method": "sc.repair, eye", "masks": "eye", "donors": "any", "done": mended.remedy}
    row |= {"verdict": mended.verdict, "seconds": time.perf_counter() - began}
    return [{**row, **case.measured(mended.model)}]


@dataclass(frozen=True, eq=False)
class Case:
    """A fine-tuned model, its eye and its pictures."""

    model: Any
    eye: Any  # the backbone before it was fine-tuned
    sets: shortcut.Three
    material: Material  # training pictures with true masks, without groups
    shown: Tensor  # test pictures, normalised

    def measured(self, model: Any) -> Row:
        return shortcut.measured(logits_of(model, self.shown), self.sets[2])


def _case(context: StudyContext, data: str, seed: int, setup: Row) -> Case:
    sets = shortcut.open_pictures(context, data, seed, setup)
    job = shortcut.Setting("erm", seed, **ERM)
    model = shortcut.tuned_model(context, job, setup, sets)
    train = shortcut.pictures_of(model, sets[0])
    material = Material(train, sc.eye("given", model=model).masks(train))
    shown = shortcut.seen(model.preprocess, sets[2])
    return Case(model, eye_before(context, setup), sets, material, shown)


def eye_before(context: StudyContext, setup: Row) -> Any:
    module = shortcut.backbone(context, setup).to(context.device)
    return sc.wrap(module, name="the pretrained backbone", preprocess=shortcut.frame(setup))


def _by_eye(context: StudyContext, case: Case) -> EyeMasks:
    eye = sc.eye(case.eye, model=case.model, cache=context.work / "eye")
    return eye.masks(case.material.pictures)


def _masks(context: StudyContext, case: Case, seed: int) -> Mapping[str, EyeMasks]:
    """By the eye, true ones, and wrong ones: as many random patches, a square in the centre as
    large as the mean mask, those of another picture."""
    true = case.material.masks
    assert true is not None
    truth, draw = true.masks, torch.Generator().manual_seed(seed)
    chance = torch.rand(truth.shape, generator=draw).to(truth.device).flatten(1)
    count = truth.flatten(1).sum(dim=1, keepdim=True)
    scattered = (chance.argsort(dim=1).argsort(dim=1) < count).view_as(truth)
    side = truth.shape[1]
    line = torch.arange(side, device=truth.device) - (side - 1) / 2
    far = torch.maximum(line[:, None].abs(), line.abs()).expand_as(truth)
    centre = far <= truth.float().mean() ** 0.5 * side / 2
    others = truth[torch.randperm(len(truth), generator=draw).to(truth.device)]
    sure = torch.ones(len(truth))
    wrong = {"random patches": scattered, "centre": centre, "another picture's": others}
    made = {n: EyeMasks(m, sure, n, "given", None, iou(m, truth).cpu()) for n, m in wrong.items()}
    return {"eye": _by_eye(context, case), "true": true, **made}


def _iou(masks: EyeMasks) -> float | None:
    return None if masks.overlap is None else float(masks.overlap.nan_to_num().mean())


def _remedied(
    model: Any, material: Material, names: tuple[str, ...], options: Row, seed: int
) -> list[Row]:
    assert material.pictures.labels is not None
    learn, choose = split_rows(material.pictures.labels, (0.8, 0.2), seed=seed)
    part = material.take(learn).lesson(TRANSPLANTS, seed=seed)
    lesson = Lesson(part, material.take(choose).test(model, PER_PICTURE, seed=seed), seed)
    rows = []
    for name in names:
        own = options.get(name, {})
        began = time.perf_counter()
        mended = find_remedy(name, own).fit(model, lesson, **own)
        held_out = mended.judge(lesson.choose).transplant_worst
        seconds = time.perf_counter() - began
        row = {"method": name, "done": mended.done, "model": mended.model, "seconds": seconds}
        rows.append({**row, "transplant-worst": held_out})
    return rows


def critters(
    context: StudyContext, *, model: str, eyes: list[str], pictures: int, tested: int
) -> list[Row]:
    """A critters model: last layers by every eye, and what `sc.repair` chooses; `force` shows what
    a repair costs where there is nothing to repair."""
    from seecause.critters import draw

    view = context.load(f"builtin:{model}")
    device = view.device
    cases = critter_pictures(view, draw("certified", "train", pictures, device=device), swaps=False)
    test = critter_pictures(view, draw("balanced", "test", tested, device=device))
    rows = [{"method": "as trained", "masks": "", **_critter_row(view, test)}]
    for name in eyes:
        masks = _critter_masks(view, cases, name)
        for row in _remedied(view, Material(cases, masks), ("last-layer", "directions"), {}, 0):
            mended = row.pop("model")
            rows.append({"masks": name, **row, **_critter_row(mended, test)})
            rows[-1]["iou"] = _iou(masks)
        for force in (False, True):
            if name in ("true", "eye"):
                chosen = sc.repair(view, cases, eye=_given(name), force=force)
                row = {"method": "sc.repair" + ", forced" * force, "masks": name}
                row |= {"done": chosen.remedy, "verdict": chosen.verdict}
                rows.append({**row, **_critter_row(chosen.model, test)})
    return [{"model": model, **row} for row in rows]


def _given(name: str) -> str:
    return {"true": "given", "eye": "builtin:critters-vit"}.get(name, name)


def _critter_masks(view: Any, cases: Pictures, name: str) -> EyeMasks:
    if name != "random patches":
        return sc.eye(_given(name), model=view).masks(cases)
    assert cases.truth is not None
    truth = by_patches(cases.truth, view.layout.grid)
    chance = torch.rand(truth.shape, generator=torch.Generator().manual_seed(0)).to(truth.device)
    mixed = chance < truth.float().mean()
    sure = torch.ones(len(truth))
    return EyeMasks(mixed, sure, name, "given", None, iou(mixed, truth).cpu())


def _critter_row(view: Any, test: Pictures) -> Row:
    assert test.swapped is not None and test.labels is not None
    answers = logits_of(view, test.images).argmax(dim=1)
    moved = logits_of(view, test.swapped.background).argmax(dim=1)
    right = sc.metrics.group_accuracy(answers == test.labels, test.groups)
    flips = float((answers != moved).double().mean())
    return {"average": right.average, "worst": right.worst, "flips": flips}


def photos(context: StudyContext, *, data: str, others: str, setup: Row) -> list[Row]:
    """The real ViT-Ti on pets: is there something to repair, and what does a forced repair cost on
    held-out pets, and on `others`, photos of all classes?"""
    view = context.load(setup["model"], weights=context.fill(setup["weights"]))
    cases, all_classes = (
        sc.background.read_pictures(view, context.data(name, context.limit))
        for name in (data, others)
    )
    rows = []
    for force in (False, True):
        mended = sc.repair(view, cases, eye="given", force=force)
        row = {"masks": "true", "method": "sc.repair" + ", forced" * force, "done": mended.remedy}
        for when, result in (("before", mended.before), ("after", mended.after)):
            numbers = result.numbers()
            row |= {f"{when} {n}": numbers.get(n) for n in ("accuracy", "flips", "extra flips")}
        for when, model in (("before", view), ("after", mended.model)):
            answers = logits_of(model, all_classes.images).argmax(dim=1)
            row[f"{when} others"] = float((answers == all_classes.labels).double().mean())
        row["n others"] = len(all_classes)
        rows.append({"model": setup["model"], "verdict": mended.verdict, **row})
    return rows


def verdicts(context: StudyContext, *, data: str, setup: Row, draws: int, right: int) -> list[Row]:
    """How often a clean model is called biased: draws of `right` right answers, with replacement,
    of a real model and of a generated one; and a biased one for comparison."""
    weights = context.fill(setup["weights"])
    real = context.load(setup["model"], weights=weights)
    judged = {
        ("vit_tiny", data): (
            real,
            sc.background.read_pictures(real, context.data(data, context.limit)),
        )
    }
    for name in ("critters-vit", "critters-biased"):
        view = context.load(f"builtin:{name}")
        made = sc.background.read_pictures(view, context.data("critters:certified:test", 320))
        judged[(name, made.name)] = (view, made)
    rows = []
    for (name, where), (view, cases) in judged.items():
        for eye in ("given", "own"):
            material = Material(cases, sc.eye(eye, model=view).masks(cases))
            part = material.test(view, PER_PICTURE, seed=0)
            result = audit_part(view, part, material.masks)
            counts = _verdict_counts(result, draws, right, own=eye == "own")
            masks = "true" if eye == "given" else "own maps"
            own = {"model": name, "data": where, "masks": masks, "verdict": result.verdict}
            numbers = {
                n: result.numbers().get(n) for n in ("flips", "extra flips", "right answers")
            }
            rows.append({**own, **numbers, **counts})
    return rows


def _verdict_counts(result: Any, draws: int, right: int, *, own: bool) -> Row:
    extra, control = result.extra_flips, result.control_flips
    draw = torch.Generator().manual_seed(0)
    counts = dict.fromkeys(("yes", "no", "cannot tell", "perhaps", "too few"), 0)
    for _ in range(draws):
        rows = torch.randint(len(extra), (right,), generator=draw)
        counts[verdict_of(extra[rows], control=control, own=own)] += 1
    return counts
