"""`seecause heads`: does the model answer from the background, which heads do it, and what if they
go?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from seecause.cli.heads_masks import MaskCacheOption, MaskPairs, Steps
from seecause.cli.heads_open import (
    BIASED,
    TEST,
    TRAIN,
    ClassifyOption,
    DtypeOption,
    QuestionOption,
    ScopeOption,
)
from seecause.cli.heads_run import (
    AuditData,
    By,
    Cap,
    DataOption,
    Filling,
    FillOption,
    Guard,
    GuardOption,
    Limit,
    MaskOption,
    OperatorOption,
    OptionPairs,
    Removal,
    Screen,
    Share,
    Source,
    Stratified,
    TestOption,
)
from seecause.cli.heads_study import ablation_study
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

AUDITED = (
    32,
    160,
    # pictures, where masks are searched and where they are not: five in each of the 32 groups of
    # critters:balanced
)
AuditLimit = Annotated[
    int | None,
    typer.Option(
        help="Read so many pictures, spread evenly.",
        min=1,
        show_default=f"{AUDITED[0]}, {AUDITED[1]} with --masks oracle",
    ),
]
HEADS, OTHERS = "Which heads carry the background?", "Which heads go first?"


class AuditMasks(StrEnum):
    both = "both"
    discovered = "discovered"
    oracle = "oracle"


class Count(StrEnum):
    right = "right"
    all = "all"


class Form(StrEnum):
    zeroed = "zeroed"
    sliced = "sliced"


def register(app: typer.Typer) -> None:
    commands = typer.Typer(
        no_args_is_help=True,
        help="Does the model answer from the background, which heads do it, and what if they go?",
    )
    commands.command(
        epilog=(
            "Example: seecause heads audit --model hf:FOLDER --data waterbirds:PATH:test --limit"
            " 200 --out audit"
        )
    )(audit)
    commands.command(
        epilog=(
            "Example: seecause heads score --model hf:FOLDER --data waterbirds:PATH:train --limit"
            " 600 --out scores"
        )
    )(score)
    commands.command(
        epilog=(
            "Example: seecause heads prune --data waterbirds:PATH:train --test waterbirds:PATH:test"
            " --top 16 --out repaired"
        )
    )(prune)
    commands.command(
        "ablation-study", epilog="Example: seecause heads ablation-study k --limit 300 --out study"
    )(ablation_study)
    commands.command()(selectors)
    app.add_typer(commands, name="heads")


def audit(
    model: ModelName = BIASED,
    weights: Weights = None,
    data: AuditData = TEST,
    limit: AuditLimit = None,
    classify: ClassifyOption = None,
    scope: ScopeOption = None,
    question: QuestionOption = None,
    count: Annotated[
        Count,
        typer.Option(
            help=(
                "Average over right answers (the paper), or over all, as where there are no labels."
            )
        ),
    ] = Count.right,
    masks: Annotated[
        AuditMasks,
        typer.Option(help="Masks from the model (discovered), from the data (oracle), or both."),
    ] = AuditMasks.both,
    steps: Steps = 250,
    mask_option: MaskPairs = None,
    mask_cache: MaskCacheOption = None,
    out: Out = Path("audit"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """How much do the answers hang on the background? FIG, BIG and BIR of every picture, by several
    ways to take the background away.

    Writes a page (index.html) with a verdict and the worst pictures, and audit.csv with a line for
    each picture.
    """
    from seecause.cli.heads_masks import search_of
    from seecause.cli.heads_open import fitted, open_asked, twin_of
    from seecause.cli.heads_run import lead, read, say
    from seecause.cli.progress import counting
    from seecause.heads.audit import audit as run
    from seecause.heads.outcomes import background_gaps
    from seecause.models.view import VisionModel
    from seecause.report.folder import check_out, result_folder
    from seecause.report.heads import audit_csv, groups_section, verdict_section
    from seecause.report.heads_gallery import audit_gallery
    from seecause.report.page import protocol_section, write_page

    replaces = check_out(out, overwrite=overwrite)
    search = search_of(steps, mask_cache, mask_option)
    search.check_used(masks is not AuditMasks.oracle, "give --masks discovered or both")
    opened = open_asked(
        model,
        data,
        weights=weights,
        device=device,
        dtype=dtype,
        seed=seed,
        classify=classify,
        scope=scope,
        question=question,
    )
    opened = fitted(opened, data) if isinstance(opened, VisionModel) else opened
    limit = limit or AUDITED[masks is AuditMasks.oracle]
    cases = read(opened, data, limit, quiet=quiet)
    same = twin_of(opened, data, limit, quiet=quiet) if isinstance(opened, VisionModel) else None
    with counting(
        "searching masks", len(cases) * (masks is not AuditMasks.oracle), quiet=quiet
    ) as advance:
        found = run(
            opened,
            cases,
            masks=masks.value,
            count=count.value,
            steps=steps,
            mask_options=search.options,
            cache=mask_cache,
            progress=advance,
        )
    said = found.verdict()
    if same is not None and isinstance(opened, VisionModel):
        (gap,) = background_gaps(opened, same, cases, [[]])
        said.append(
            f"BG-gap {gap:.3f}: that much accuracy is lost when the background is one of another"
            f" class ({len(same)} and {len(cases)} pictures)."
        )
    sections = [
        verdict_section(found, said),
        *groups_section(found),
        audit_gallery(opened, found),
        protocol_section([found.protocol]),
    ]
    manifest = {
        "command": "heads audit",
        "page": "index.html",
        "table": "audit.csv",
        "verdict": said,
        "run": found.protocol,
    }
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        write_page(
            folder / "index.html",
            f"Does {opened.name} answer from the background?",
            sections,
            lead=lead(opened, cases),
        )
        (folder / "audit.csv").write_text(audit_csv(found, opened.classes), encoding="utf-8")
    say(said, out, replaced=replaces, quiet=quiet)


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
    masks: MaskOption = Source.auto,
    fill: FillOption = Filling.grey,
    operator: OperatorOption = Removal.zero,
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
    from seecause.cli.heads_masks import search_of
    from seecause.cli.heads_open import fitted, open_asked
    from seecause.cli.heads_run import (
        TAKES,
        check_screen,
        lead,
        look_for,
        need_view,
        options_of,
        plain,
        read,
        recorded,
        say,
        scored,
        settings,
    )
    from seecause.heads.pictures import answered_right
    from seecause.report.folder import check_out, result_folder
    from seecause.report.heads import scores_csv, scores_section
    from seecause.report.page import write_page

    replaces = check_out(out, overwrite=overwrite)
    options = options_of(by, option or [], operator=operator, guard=guard, screen=screen, fill=fill)
    search = search_of(steps, mask_cache, mask_option)
    search.check_used(
        by in TAKES and fill is not Filling.swap, f"not --by {by} --fill {fill.value}"
    )
    opened = fitted(
        need_view(
            open_asked(
                model,
                data,
                weights=weights,
                device=device,
                dtype=dtype,
                seed=seed,
                classify=classify,
                scope=scope,
                question=question,
            )
        ),
        data,
    )
    check_screen(opened, screen)
    cases = answered_right(
        opened,
        read(opened, data, limit, quiet=quiet),
        share=share,
        cap=cap,
        stratified=stratified,
        seed=seed,
    )
    look = look_for(opened, cases, masks, fill, search, quiet=quiet) if by in TAKES else None
    found, said = scored(
        opened,
        cases,
        by,
        look,
        operator=operator,
        guard=guard,
        screen=screen,
        options=options,
        seed=seed,
        quiet=quiet,
    )
    told = {
        "data": cases.name,
        "pictures": len(cases),
        **recorded(by, look, operator=operator, guard=guard),
        **options,
        **search.record,
    }
    manifest = {
        "command": "heads score",
        "page": "index.html",
        "table": "scores.csv",
        **told,
        "run": plain(found.protocol),
    }
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        sections = [
            scores_section(found, by=by, title=HEADS if by == "cigma" else OTHERS),
            settings(opened, told),
        ]
        write_page(
            folder / "index.html",
            f"{opened.name}: heads by {by}",
            sections,
            lead=lead(opened, cases),
        )
        (folder / "scores.csv").write_text(scores_csv(found), encoding="utf-8")
    best = ", ".join(
        f"({layer}, {head}) {float(found.value[layer, head]):.3g}"
        for layer, head in found.order()[:5]
    )
    say(
        [*said, f"highest (layer, head): {best or 'no head has a score above 0'}"],
        out,
        replaced=replaces,
        quiet=quiet,
    )


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
    test_limit: Annotated[int, typer.Option(help="Read so many pictures of --test.", min=1)] = 64,
    by: By = "cigma",
    top: Annotated[
        str,
        typer.Option(
            help="Heads to remove at most: a count such as 16, or a share such as 0.1.",
            metavar="K|SHARE",
        ),
    ] = "0.1",
    option: OptionPairs = None,
    masks: MaskOption = Source.auto,
    fill: FillOption = Filling.grey,
    operator: OperatorOption = Removal.zero,
    guard: GuardOption = Guard.penalty,
    screen: Screen = None,
    form: Annotated[
        Form,
        typer.Option(
            help=(
                "zeroed: the same shape, loads in the library the model is of; sliced: smaller,"
                " loads by sc.load."
            )
        ),
    ] = Form.zeroed,
    draws: Annotated[
        int, typer.Option(help="Random sets of heads for the band beside the curves.", min=1)
    ] = 20,
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
    from seecause.cli.heads_masks import search_of
    from seecause.cli.heads_open import check_export, fitted, open_asked, twin_of, write_model
    from seecause.cli.heads_run import (
        TAKES,
        check_top,
        count_of,
        lead,
        look_for,
        need_view,
        options_of,
        plain,
        read,
        recorded,
        say,
        scored,
        settings,
        spread,
    )
    from seecause.cli.progress import counting
    from seecause.data.answers import group_shares
    from seecause.heads.outcomes import background_gaps, curve
    from seecause.heads.pictures import answered_right
    from seecause.report.folder import check_out, result_folder
    from seecause.report.heads import (
        change_section,
        changes,
        curves_section,
        rows_csv,
        scores_csv,
        scores_section,
    )
    from seecause.report.heads_gallery import SHOWN, repair_gallery
    from seecause.report.page import write_page

    replaces = check_out(out, overwrite=overwrite)
    k = count_of(top)
    options, search = (
        options_of(by, option or [], operator=operator, guard=guard, screen=screen),
        search_of(steps, mask_cache, mask_option),
    )
    opened = need_view(
        open_asked(
            model,
            data,
            weights=weights,
            device=device,
            dtype=dtype,
            seed=seed,
            classify=classify,
            scope=scope,
            question=question,
        )
    )
    most = check_top(opened, k, screen)
    if by == "greedy":
        options.setdefault("top", max(1, most))
    check_export(opened, form.value)
    scorer, judge = fitted(opened, data), fitted(opened, test)
    seen = read(scorer, data, limit, quiet=quiet)
    cases = answered_right(scorer, seen, share=share, cap=cap, stratified=stratified, seed=seed)
    look = look_for(scorer, cases, masks, fill, search, quiet=quiet) if by in TAKES else None
    found, said = scored(
        scorer,
        cases,
        by,
        look,
        operator=operator,
        guard=guard,
        screen=screen,
        options=options,
        seed=seed,
        quiet=quiet,
    )
    heads = found.top(k)
    said += [] if heads else ["nothing is removed: no head has a score above 0"]
    tested, same = (
        read(judge, test, test_limit, quiet=quiet),
        twin_of(judge, test, test_limit, quiet=quiet),
    )
    looks = [
        look_for(
            judge,
            tested,
            masks,
            Filling.grey if fill is Filling.swap else fill,
            search,
            quiet=quiet,
        )
    ]
    looks += (
        [look_for(judge, tested, masks, Filling.swap, search, quiet=quiet)]
        if tested.swapped is not None
        else []
    )
    ks = sorted(
        {
            0,
            *(
                max(1, len(heads) * part // 4)
                for part in (1, 2, 4, 8)
                if len(heads) * part // 4 <= found.value.isfinite().sum()
            ),
            len(heads),
        }
    )
    with counting("measuring", len(tested), quiet=quiet) as advance:
        line = curve(
            judge,
            tested,
            found,
            ks,
            looks,
            draws=draws,
            seed=seed,
            train=group_shares(seen.groups),
            progress=advance,
        )
    gaps = background_gaps(judge, same, tested, [[], heads]) if same is not None else []
    before, after = line.chosen[0], line.chosen[ks.index(len(heads))]
    told = {
        "data": cases.name,
        "pictures": len(cases),
        **recorded(by, look, operator=operator, guard=guard),
        **options,
        **search.record,
        "form": form.value,
    }
    manifest = {
        "command": "heads prune",
        "page": "index.html",
        "model": "model",
        "removed": heads,
        **told,
        "run": plain(found.protocol),
    }
    note = (
        f"Heads were chosen by {by} on {len(cases)} pictures of {cases.name}: the {len(heads)}"
        " highest scores."
    )
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        write_model(opened, heads, folder / "model", form=form.value, note=note)
        sections = [
            change_section(before, after, tested, gaps=gaps),
            curves_section(line, by=by),
            scores_section(found, by=by, chosen=heads, title=HEADS if by == "cigma" else OTHERS),
            repair_gallery(
                judge,
                tested.take(spread(len(tested), SHOWN)),
                heads,
                looks[0].take(spread(len(tested), SHOWN)),
            ),
            settings(opened, told),
        ]
        write_page(
            folder / "index.html",
            f"{opened.name} without {len(heads)} heads",
            sections,
            lead=lead(opened, tested),
        )
        (folder / "scores.csv").write_text(scores_csv(found), encoding="utf-8")
        rows = [{"K": k, **one.numbers()} for k, one in zip(line.ks, line.chosen, strict=True)]
        (folder / "curve.csv").write_text(rows_csv(rows), encoding="utf-8")
    first, second = changes(before, after, gaps)
    shown = [
        name
        for name in first
        if name in second and name != "removed" and not name.startswith(("FIG", "BIG"))
    ]
    lines = [f"{name}: {first[name]:.3f} -> {second[name]:.3f}" for name in shown]
    say(
        [*said, f"removed {len(heads)} heads: {heads}", *lines, f"checkpoint: {out / 'model'}"],
        out,
        replaced=replaces,
        quiet=quiet,
    )


def selectors() -> None:
    """The ways to choose heads, what each needs and what it costs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from seecause.heads.registry import selectors as known

    table = Table(
        "name",
        "needs",
        "cost for one picture",
        "what it scores",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name, entry in sorted(known().items()):
        table.add_row(name, entry.needs, entry.cost, entry.summary)
    Console(highlight=False).print(table)
