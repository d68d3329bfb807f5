"""`seecause heads score` and `seecause heads prune`: which heads go, and what that did."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from seecause.cli.heads_options import (
    TEST,
    TRAIN,
    AskedModel,
    AskedRun,
    DataOption,
    Draws,
    ErasedBackground,
    HeadSelector,
    Limit,
    SampledAnswers,
    TestLimit,
    TestOption,
    head_limit,
    lead_of,
    same_backgrounds,
)
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.background.heads import HeadScores
    from seecause.background.prune import PruneResult, ScoredHeads
    from seecause.models.base import ImageModel


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
    asked: AskedModel = AskedModel(),
    data: DataOption = TRAIN,
    limit: Limit = 64,
    sampling: SampledAnswers = SampledAnswers(),
    selector: HeadSelector = HeadSelector(),
    erasing: ErasedBackground = ErasedBackground(),
    run: AskedRun = AskedRun(out=Path("scores")),
) -> None:
    """Score every head. Writes a page with the layer x head grid, and scores.csv with errors and
    what each removal costs."""
    from seecause.background import score_heads
    from seecause.data.registry import open_data

    replaces, options, background = run.check(), selector.options(), erasing.background()
    model = asked.ask(data, run)
    result = score_heads(
        model,
        open_data(data, limit=limit),
        selector=selector.by,
        options=options,
        sampling=sampling.made(),
        **background,
        seed=run.seed,
        progress=run.counting,
    )
    _write_scores(model, result, run)
    scores = result.scores
    best = [f"{head} {float(scores.value[head]):.3g}" for head in scores.order()[:5]]
    highest = f"highest (layer, head): {', '.join(best) or 'no head has a score above 0'}"
    run.say([*_about_lines(scores), highest], replaced=replaces, holes=result.data.skipped)


def _write_scores(model: ImageModel, result: ScoredHeads, run: AskedRun) -> None:
    """Page, table and manifest."""
    from seecause.report.background import scores_csv, scores_section, settings_section
    from seecause.report.pages import skipped_section

    scores, by = result.scores, result.selector
    manifest = {
        "command": "heads score",
        "table": "scores.csv",
        **result.record,
        "run": _plain(scores.protocol),
    }
    run.write(
        manifest,
        f"{model.name}: heads by {by}",
        [
            scores_section(scores, by=by),
            *skipped_section(result.data.skipped),
            settings_section(model, result.record),
        ],
        lead=lead_of(model, result.data),
        tables={"scores.csv": scores_csv(scores)},
        holes=result.data.skipped,
    )


def prune(
    asked: AskedModel = AskedModel(),
    data: DataOption = TRAIN,
    limit: Limit = 64,
    sampling: SampledAnswers = SampledAnswers(),
    test: TestOption = TEST,
    test_limit: TestLimit = 64,
    top: Top = "0.1",
    selector: HeadSelector = HeadSelector(),
    erasing: ErasedBackground = ErasedBackground(),
    form: FormOption = Form.zeroed,
    draws: Draws = 20,
    run: AskedRun = AskedRun(out=Path("repaired")),
) -> None:
    """Remove the highest heads for good, and measure what that did on other pictures.

    Heads with a score of 0 or less stay. Writes OUT/model (a checkpoint), a page with numbers
    before and after, scores.csv and curve.csv.
    """
    from seecause.background import prune_and_test
    from seecause.data.registry import open_data

    replaces, most = run.check(), head_limit(top)
    options, background = selector.options(), erasing.background()
    model = asked.ask(data, run)
    _check_form(model, form.value)
    result = prune_and_test(
        model,
        open_data(data, limit=limit),
        open_data(test, limit=test_limit),
        selector=selector.by,
        options=options,
        top=most,
        draws=draws,
        seed=run.seed,
        sampling=sampling.made(),
        **background,
        same=same_backgrounds(test, test_limit),
        progress=run.counting,
    )
    _write_pruned(result, form, run)
    lines = [*_prune_lines(result), f"checkpoint: {run.out / 'model'}"]
    run.say(lines, replaced=replaces, holes=result.skipped)


def _prune_lines(result: PruneResult) -> list[str]:
    """What went, and what that changed."""
    lines = _about_lines(result.scored.scores)
    lines += [] if result.heads else ["nothing is removed: no head has a score above 0"]
    lines.append(f"removed {len(result.heads)} heads: {result.heads}")
    for name, (before, after) in result.changes().items():
        if not name.startswith(("FIG", "BIG")):
            lines.append(f"{name}: {before:.3f} -> {after:.3f}")
    return lines


def _write_pruned(result: PruneResult, form: Form, run: AskedRun) -> None:
    """The checkpoint, the page, the tables and the manifest of a prune."""
    from seecause.background.images import model_for
    from seecause.report.background import (
        before_after_section,
        change_section,
        curves_section,
        scores_csv,
        scores_section,
        settings_section,
    )
    from seecause.report.pages import rows_csv, skipped_section

    by, scores, model = result.scored.selector, result.scored.scores, result.model
    record = {**result.scored.record, "form": form.value}
    manifest = {
        "command": "heads prune",
        "model": "model",
        "removed": result.heads,
        **record,
        "run": _plain(scores.protocol),
    }
    sections = [
        change_section(result.before, result.after, result.test, gaps=result.gaps),
        curves_section(result.curve, by=by),
        scores_section(scores, by=by, chosen=result.heads),
        before_after_section(model_for(model, result.test), result.examples),
        *skipped_section(result.skipped),
        settings_section(model, record),
    ]
    line = zip(result.curve.ks, result.curve.chosen, strict=True)
    rows = [{"K": k, **outcome.numbers()} for k, outcome in line]
    run.write(
        manifest,
        f"{model.name} without {len(result.heads)} heads",
        sections,
        lead=lead_of(model, result.test),
        tables={"scores.csv": scores_csv(scores), "curve.csv": rows_csv(rows)},
        holes=result.skipped,
        more=lambda folder: _export(result, folder / "model", form),
    )


def _export(result: PruneResult, folder: Path, form: Form) -> None:
    """A checkpoint of the model without the heads, whatever kind of model it is."""
    if result.model.architecture != "prompt":
        result.export(folder, form=form.value)
        return
    from seecause.lvlm.prompt_classifier import PromptClassifier, export

    export(cast(PromptClassifier, result.model), result.heads, folder, note=result.note)


def _check_form(model: ImageModel, form: str) -> None:
    """Refuse, before anything is measured, a form that the model cannot be written in."""
    from seecause.background.prune import check_form
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
    from seecause.report.background import no_effect

    if nothing := no_effect(scores):
        return [nothing]
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
