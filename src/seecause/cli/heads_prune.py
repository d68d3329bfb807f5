"""`seecause heads score` and `seecause heads prune`: which heads go, and what that did."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from seecause.cli.heads_options import (
    BIASED,
    TEST,
    TRAIN,
    By,
    Cap,
    ClassifyOption,
    DataOption,
    Draws,
    DtypeOption,
    Filling,
    FillOption,
    Guard,
    GuardOption,
    Limit,
    MaskCacheOption,
    MaskChoice,
    MaskOption,
    MaskPairs,
    OperatorName,
    OperatorOption,
    OptionPairs,
    QuestionOption,
    ScopeOption,
    Screen,
    Share,
    Steps,
    Stratified,
    TestLimit,
    TestOption,
    background_of,
    head_limit,
    open_asked,
    same_backgrounds,
    search_options,
    selector_options,
)
from seecause.cli.options import (
    Device,
    DeviceOption,
    ModelName,
    Out,
    Overwrite,
    Quiet,
    Seed,
    Weights,
)
from seecause.cli.progress import counting
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.heads._prune_and_test import PruneResult, ScoredHeads
    from seecause.heads.scores import HeadScores
    from seecause.models.base import ImageModel

from seecause.cli.heads_options import lead_of, say


class Form(StrEnum):
    zeroed = "zeroed"
    sliced = "sliced"


Top = Annotated[
    str,
    typer.Option(
        help="Heads to remove at most: a count such as 16, or a share such as 0.1.",
        metavar="K|SHARE",
    ),
]
FormOption = Annotated[
    Form,
    typer.Option(
        help=(
            "zeroed: the same shape, loads in the library the model is of; sliced: smaller, loads"
            " by sc.load."
        )
    ),
]


def score(
    model: ModelName = BIASED,
    weights: Weights = None,
    data: DataOption = TRAIN,
    limit: Limit = 64,
    classify: ClassifyOption = None,
    scope: ScopeOption = None,
    question: QuestionOption = None,
    share: Share = 0.4,
    cap: Cap = 512,
    stratified: Stratified = False,
    by: By = "cigma",
    option: OptionPairs = None,
    masks: MaskOption = MaskChoice.auto,
    fill: FillOption = Filling.grey,
    operator: OperatorOption = OperatorName.zero,
    guard: GuardOption = Guard.penalty,
    screen: Screen = None,
    steps: Steps = 250,
    mask_option: MaskPairs = None,
    mask_cache: MaskCacheOption = None,
    out: Out = Path("scores"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Score every head. Writes a page with the layer x head grid, and scores.csv with errors and
    what each removal costs."""
    from seecause.data.registry import open_data
    from seecause.heads import AnswerSampling, score_heads
    from seecause.report.folder import check_out

    replaces = check_out(out, overwrite=overwrite)
    options = selector_options(by, option, operator=operator, guard=guard, screen=screen)
    background = background_of(masks, fill, search_options(steps, mask_cache, mask_option))
    opened = open_asked(
        model, data, weights=weights, device=device, dtype=dtype, seed=seed,
        classify=classify, scope=scope, question=question,
    )  # fmt: skip
    result = score_heads(
        opened,
        open_data(data, limit=limit),
        selector=by,
        options=options,
        sampling=AnswerSampling(share, cap, stratified),
        background=background,
        seed=seed,
        progress=partial(counting, quiet=quiet),
    )
    _write_scores(opened, result, out, overwrite=overwrite)
    scores = result.scores
    best = [f"{head} {float(scores.value[head]):.3g}" for head in scores.order()[:5]]
    highest = f"highest (layer, head): {', '.join(best) or 'no head has a score above 0'}"
    lines = [*_about_lines(scores), highest]
    say(lines, out, replaced=replaces, quiet=quiet, holes=result.pictures.holes)


def _write_scores(model: ImageModel, result: ScoredHeads, out: Path, *, overwrite: bool) -> None:
    """Page, table and manifest."""
    from seecause.report.folder import result_folder
    from seecause.report.heads import scores_csv, scores_section, settings_section
    from seecause.report.page import holes_section, write_page

    scores, by = result.scores, result.selector
    manifest = {
        "command": "heads score",
        "page": "index.html",
        "table": "scores.csv",
        **result.record,
        "run": _plain(scores.protocol),
        "left out": [asdict(hole) for hole in result.pictures.holes],
    }
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        sections = [scores_section(scores, by=by), *holes_section(result.pictures.holes)]
        sections.append(settings_section(model, result.record))
        lead = lead_of(model, result.pictures)
        write_page(folder / "index.html", f"{model.name}: heads by {by}", sections, lead=lead)
        (folder / "scores.csv").write_text(scores_csv(scores), encoding="utf-8")


def prune(
    model: ModelName = BIASED,
    weights: Weights = None,
    data: DataOption = TRAIN,
    limit: Limit = 64,
    classify: ClassifyOption = None,
    scope: ScopeOption = None,
    question: QuestionOption = None,
    share: Share = 0.4,
    cap: Cap = 512,
    stratified: Stratified = False,
    test: TestOption = TEST,
    test_limit: TestLimit = 64,
    by: By = "cigma",
    top: Top = "0.1",
    option: OptionPairs = None,
    masks: MaskOption = MaskChoice.auto,
    fill: FillOption = Filling.grey,
    operator: OperatorOption = OperatorName.zero,
    guard: GuardOption = Guard.penalty,
    screen: Screen = None,
    form: FormOption = Form.zeroed,
    draws: Draws = 20,
    steps: Steps = 250,
    mask_option: MaskPairs = None,
    mask_cache: MaskCacheOption = None,
    out: Out = Path("repaired"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Remove the highest heads for good, and measure what that did on other pictures.

    Heads with a score of 0 or less stay. Writes OUT/model (a checkpoint), a page with numbers
    before and after, scores.csv and curve.csv.
    """
    from seecause.data.registry import open_data
    from seecause.heads import AnswerSampling, prune_and_test
    from seecause.report.folder import check_out

    replaces, most = check_out(out, overwrite=overwrite), head_limit(top)
    options = selector_options(by, option, operator=operator, guard=guard, screen=screen)
    background = background_of(masks, fill, search_options(steps, mask_cache, mask_option))
    opened = open_asked(
        model, data, weights=weights, device=device, dtype=dtype, seed=seed,
        classify=classify, scope=scope, question=question,
    )  # fmt: skip
    _check_form(opened, form.value)
    result = prune_and_test(
        opened, open_data(data, limit=limit), open_data(test, limit=test_limit),
        selector=by, options=options, top=most, draws=draws, seed=seed,
        sampling=AnswerSampling(share, cap, stratified), background=background,
        same=same_backgrounds(test, test_limit), progress=partial(counting, quiet=quiet),
    )  # fmt: skip
    _write_pruned(result, form, out, overwrite=overwrite)
    lines = [*_prune_lines(result), f"checkpoint: {out / 'model'}"]
    say(lines, out, replaced=replaces, quiet=quiet, holes=result.holes)


def _prune_lines(result: PruneResult) -> list[str]:
    """What went, and what that changed."""
    lines = _about_lines(result.scored.scores)
    lines += [] if result.heads else ["nothing is removed: no head has a score above 0"]
    lines.append(f"removed {len(result.heads)} heads: {result.heads}")
    for name, (before, after) in result.changes().items():
        if not name.startswith(("FIG", "BIG")):
            lines.append(f"{name}: {before:.3f} -> {after:.3f}")
    return lines


def _write_pruned(result: PruneResult, form: Form, out: Path, *, overwrite: bool) -> None:
    """The checkpoint, the page, the tables and the manifest of a prune."""
    from seecause.heads.pictures import model_for
    from seecause.report.folder import result_folder
    from seecause.report.heads import (
        change_section,
        curves_section,
        rows_csv,
        scores_csv,
        scores_section,
        settings_section,
    )
    from seecause.report.heads_audit import repair_gallery
    from seecause.report.page import holes_section, write_page

    by, scores, model = result.scored.selector, result.scored.scores, result.model
    record = {**result.scored.record, "form": form.value}
    manifest = {
        "command": "heads prune",
        "page": "index.html",
        "model": "model",
        "removed": result.heads,
        **record,
        "run": _plain(scores.protocol),
        "left out": [asdict(hole) for hole in result.holes],
    }
    sections = [
        change_section(result.before, result.after, result.test, gaps=result.gaps),
        curves_section(result.curve, by=by),
        scores_section(scores, by=by, chosen=result.heads),
        repair_gallery(model_for(model, result.test), result.examples),
        *holes_section(result.holes),
        settings_section(model, record),
    ]
    title = f"{model.name} without {len(result.heads)} heads"
    line = zip(result.curve.ks, result.curve.chosen, strict=True)
    rows = [{"K": k, **outcome.numbers()} for k, outcome in line]
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        _export(result, folder / "model", form)
        write_page(folder / "index.html", title, sections, lead=lead_of(model, result.test))
        (folder / "scores.csv").write_text(scores_csv(scores), encoding="utf-8")
        (folder / "curve.csv").write_text(rows_csv(rows), encoding="utf-8")


def _export(result: PruneResult, folder: Path, form: Form) -> None:
    """A checkpoint of the model without the heads, whatever kind of model it is."""
    if result.model.architecture != "prompt":
        result.export(folder, form=form.value)
        return
    from seecause.lvlm.prompt_classifier import PromptClassifier, export

    export(cast(PromptClassifier, result.model), result.heads, folder, note=result.note)


def _check_form(model: ImageModel, form: str) -> None:
    """Refuse, before anything is measured, a form that the model cannot be written in."""
    from seecause.heads._export import check_form
    from seecause.models.view import VisionModel

    if not isinstance(model, VisionModel):
        return
    if model.architecture != "prompt":
        check_form(model, form)
    elif form != "zeroed":
        raise BadOption("--form", form, "zeroed: a vision-language model keeps its architecture")


def _about_lines(scores: HeadScores) -> list[str]:
    """What heads carry together where two versions were exchanged; how far a screen can be
    trusted, where there was one."""
    shares = scores.protocol.get("mediated")
    if shares:
        listed = ", ".join(f"{share:.0%} by {count}" for count, share in shares.items())
        return [f"of what the other version changes, the highest heads carry {listed}"]
    about = scores.protocol.get("screen")
    if about is None:
        return []
    return [
        f"{about['verified']} verified + {about['audited']} audited of {about['heads']} heads:"
        f" agreement {about['agreement']:.2f}, estimated recall {about['recall']:.2f}"
    ]


def _plain(protocol: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold."""
    kinds = str | int | float | bool | list | dict | None
    return {k: v if isinstance(v, kinds) else str(v) for k, v in protocol.items()}
