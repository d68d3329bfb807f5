"""`seecause heads`: does the model answer from the background, which heads do it, and what if they
go?"""

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
    AuditData,
    DataOption,
    ErasedBackground,
    GuardChoice,
    GuardOption,
    Limit,
    SampledAnswers,
    SearchOptions,
    TestLimit,
    TestOption,
    lead_of,
    same_backgrounds,
)
from seecause.cli.heads_prune import prune, score
from seecause.cli.progress import Facts, print_rows
from seecause.cli.workers import with_pieces
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.background import Audit, StudyTable
    from seecause.models.base import ImageModel
    from seecause.models.view import VisionModel

AUDITED = (32, 160)  # pictures: where masks are searched, and five in each group of the default
AuditLimit = Annotated[
    int | None,
    typer.Option(
        help="Read so many pictures, spread evenly.",
        min=1,
        show_default=f"{AUDITED[0]}, {AUDITED[1]} with --masks oracle",
    ),
]


class AuditMasks(StrEnum):
    both = "both"
    discovered = "discovered"
    oracle = "oracle"


class Count(StrEnum):
    right = "right"
    all = "all"


class StudyName(StrEnum):
    k = "k"
    fraction = "fraction"
    masks = "masks"
    temperature = "temperature"
    layers = "layers"
    stability = "stability"


CountOption = Annotated[
    Count,
    typer.Option(
        help=("Average over right answers (the paper), or over all, as where there are no labels.")
    ),
]
AuditMaskOption = Annotated[
    AuditMasks,
    typer.Option(help="Masks from the model (discovered), from the data (oracle), or both."),
]


def register(app: typer.Typer) -> None:
    commands = typer.Typer(
        no_args_is_help=True,
        help="Which heads answer from the background, and what if they go? (CIGMA)",
    )
    examples = {
        audit: "--model hf:FOLDER --data waterbirds:PATH:test --limit 200 --out audit",
        score: "--model hf:FOLDER --data waterbirds:PATH:train --limit 600 --out scores",
        prune: "--data waterbirds:PATH:train --test waterbirds:PATH:test --top 16",
        ablation_study: "k --limit 300 --out study",
    }
    for command, example in examples.items():
        name = command.__name__.replace("_", "-")
        listed = commands.command(name, epilog=f"Example: seecause heads {name} {example}")
        listed(with_pieces(command, f"heads {name}"))
    commands.command()(selectors)
    app.add_typer(commands, name="heads")


def audit(
    asked: AskedModel = AskedModel(),
    data: AuditData = TEST,
    limit: AuditLimit = None,
    count: CountOption = Count.right,
    masks: AuditMaskOption = AuditMasks.both,
    search: SearchOptions = SearchOptions(),
    run: AskedRun = AskedRun(out=Path("audit")),
) -> None:
    """How much do the answers hang on the background? FIG, BIG and BIR of every picture, by several
    ways to take the background away.

    Writes a page (index.html) with a verdict and the worst pictures, and audit.csv with a line for
    each picture.
    """
    from seecause.background._heads_audit import heads_audit as measure
    from seecause.data.registry import open_data

    replaces, options = run.check(), search.made()
    if search.mask_option and masks is AuditMasks.oracle:
        raise BadOption(
            "--mask-option",
            ", ".join(search.mask_option),
            "masks that are searched: give --masks discovered or both",
        )
    model = asked.ask(data, run)
    limit = limit or AUDITED[masks is AuditMasks.oracle]
    result = measure(
        model,
        open_data(data, limit=limit),
        masks=masks.value,
        count=count.value,
        same=same_backgrounds(data, limit),
        progress=run.counting,
        **options,
    )
    lines = _write_audit(model, result, run)
    run.say(lines, replaced=replaces, holes=result.holes)


def _write_audit(model: ImageModel, result: Audit, run: AskedRun) -> list[str]:
    """Page, table and manifest; the verdict."""
    from seecause.background.images import model_for
    from seecause.report.heads_audit import (
        audit_csv,
        audit_gallery,
        groups_section,
        verdict,
        verdict_section,
    )
    from seecause.report.page import holes_section, protocol_section

    answering = model_for(model, result.pictures)
    sections = [
        verdict_section(result),
        *groups_section(result),
        audit_gallery(answering, result),
        *holes_section(result.holes),
        protocol_section([result.protocol]),
    ]
    lines = verdict(result)
    manifest = {
        "command": "heads audit",
        "table": "audit.csv",
        "verdict": lines,
        "run": result.protocol,
    }
    run.write(
        manifest,
        f"Does {model.name} answer from the background?",
        sections,
        lead=lead_of(model, result.pictures),
        tables={"audit.csv": audit_csv(result, answering.classes)},
        holes=result.holes,
    )
    return lines


def ablation_study(
    study: Annotated[
        StudyName,
        typer.Argument(
            help="Which setting of CIGMA to change: k (how many heads go), fraction, masks,"
            " temperature, layers or stability.",
            show_default=False,
        ),
    ],
    asked: AskedModel = AskedModel(),
    data: DataOption = TRAIN,
    limit: Limit = 64,
    sampling: SampledAnswers = SampledAnswers(),
    test: TestOption = TEST,
    test_limit: TestLimit = 64,
    top: Annotated[int, typer.Option(help="Heads to remove at most.", min=1)] = 4,
    erasing: ErasedBackground = ErasedBackground(),
    guard: GuardOption = GuardChoice.penalty,
    draws: Annotated[int, typer.Option(help="Random sets of heads (study k).", min=1)] = 20,
    run: AskedRun = AskedRun(out=Path("study")),
) -> None:
    """Change one setting of CIGMA at a time: how many heads, pictures, which masks, temperature,
    layers, and other pictures.

    Writes index.html (table and charts) and table.csv.
    """
    from seecause.background import ablation_study as measure
    from seecause.data.registry import open_data

    replaces = run.check()
    if guard is GuardChoice.protect:
        raise BadOption("--guard", guard.value, "penalty or none: studies compare masks")
    model = asked.ask(data, run)
    result = measure(
        study.value,
        cast("VisionModel", model),  # others are refused there
        open_data(data, limit=limit),
        open_data(test, limit=test_limit),
        top=top,
        draws=draws,
        seed=run.seed,
        sampling=sampling.made(),
        background=erasing.background(),
        guard=guard is GuardChoice.penalty,
        progress=run.counting,
    )
    chosen = {"top": top, "fill": erasing.fill.value, "guard": guard.value}
    _write_study(model, study.value, result, chosen, run)
    run.say([f"{len(result.rows)} settings"], replaced=replaces, holes=result.holes)


def _write_study(
    model: ImageModel,
    study: str,
    result: StudyTable,
    settings: dict[str, Any],
    run: AskedRun,
) -> None:
    """Page, table and manifest."""
    from seecause.report.folder import rows_csv
    from seecause.report.heads import settings_section, study_section
    from seecause.report.page import holes_section

    assert result.train is not None and result.test is not None and result.masks is not None
    record = {
        "data": result.train.name,
        "pictures": len(result.train),
        "test": result.test.name,
        "masks": result.masks.source,
        **settings,
    }
    manifest = {"command": "heads ablation-study", "study": study}
    manifest |= {"table": "table.csv", **record}
    run.write(
        manifest,
        f"CIGMA on {model.name}: study {study}",
        [
            study_section(result),
            *holes_section(result.holes),
            settings_section(model, record),
        ],
        lead=lead_of(model, result.test),
        tables={"table.csv": rows_csv(result.rows)},
        holes=result.holes,
    )


def selectors() -> Facts:
    """The ways to choose heads, what each needs and what it costs."""
    from seecause.background.heads import selectors as registered

    entries = sorted(registered().items())
    titles = ("name", "needs", "cost for one picture", "what it scores")
    print_rows(titles, [(name, e.needs, e.cost, e.summary) for name, e in entries])
    columns = ("needs", "cost", "summary")
    return {name: {column: getattr(entry, column) for column in columns} for name, entry in entries}
