"""`seecause discover`: which kinds of patches turn pictures into which class?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.heads_options import BIASED, KINDS, TRAIN, Limit, lead_of
from seecause.cli.options import (
    ModelName,
    ModelRun,
    Weights,
    grouped,
    names,
    open_model,
    with_reading,
)
from seecause.cli.workers import with_pieces
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.repair.discover import Discovery

SAID = 5  # findings on the terminal
EXAMPLES = """Examples:

  seecause discover --model hf:FOLDER --data folder:PATH --limit 300 --out kinds

  seecause repair --model hf:FOLDER --data pairs:kinds/pairs/with:kinds/pairs/without
"""
Data = Annotated[str, typer.Option("--data", help=f"Pictures to look for shortcuts in: {KINDS}")]
MethodName = Annotated[
    str, typer.Option("--method", help="What finds evidence: caap+mosaic, caap, mosaic.")
]
LayerList = Annotated[
    str | None,
    typer.Option(
        "--layers",
        help="Layers whose tokens are sorted into kinds, such as 3,6,9.",
        show_default="the first, a quarter, half and three quarters of the depth",
    ),
]
KindCount = Annotated[int, typer.Option("--kinds", help="Kinds of patches at each layer.", min=1)]
Trials = Annotated[int, typer.Option(help="Pastes of each kind.", min=1)]
PairChoice = Annotated[
    str,
    typer.Option(
        "--pairs",
        help=(
            "Findings whose pairs are written, by rank, such as 1,3; or best (the first that is not"
            " on the object, if masks are known), or none."
        ),
    ),
]


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(with_pieces(with_reading(grouped(discover))))


def discover(
    model: ModelName = BIASED,
    weights: Weights = None,
    data: Data = TRAIN,
    limit: Limit = 64,
    method: MethodName = "caap+mosaic",
    layers: LayerList = None,
    kinds: KindCount = 24,
    trials: Trials = 32,
    pairs: PairChoice = "best",
    run: ModelRun = ModelRun(out=Path("discovered")),
) -> None:
    """Which kinds of patches turn pictures into which class? Nobody has to name a shortcut first.

    Patches that answers hang on are sorted into kinds; each is pasted into pictures that are
    answered otherwise. Writes a page (index.html), findings.csv, and pairs to repair by.
    """
    from seecause.data.registry import open_data
    from seecause.repair.discover import discover as find

    replaces = run.check()
    wanted = _ranks("--pairs", pairs) if pairs not in ("best", "none") else None
    chosen = None if layers is None else _ranks("--layers", layers)
    opened = open_model(model, weights=weights, device=run.device, dtype=run.dtype, seed=run.seed)
    result = find(
        opened,
        open_data(data, limit=limit),
        method=method,
        layers=chosen,
        kinds=kinds,
        trials=trials,
        seed=run.seed,
        progress=run.counting,
    )
    places = [] if pairs == "none" else _places(result, wanted)
    lines = _write(opened.name, lead_of(opened, result.pictures), result, places, run)
    run.say(lines, replaced=replaces, holes=result.pictures.holes)


def _write(model: str, lead: str, result: Discovery, places: list[int], run: ModelRun) -> list[str]:
    """Page, table, pairs of some findings, and what is said of them."""
    from seecause.report.discover import discover_sections, findings_rows, write_pairs
    from seecause.report.heads import rows_csv
    from seecause.report.page import write_page

    manifest: dict[str, Any] = {
        "command": "discover",
        "page": "index.html",
        "table": "findings.csv",
    }
    manifest |= {"pairs": [place + 1 for place in places], "run": result.protocol}
    manifest |= {"left out": [asdict(hole) for hole in result.pictures.holes]}
    lines = [f"{rank}. {f.sentence()}" for rank, f in enumerate(result.findings[:SAID], 1)]
    lines = lines or ["no kind of patch turns pictures into a class by more than chance"]
    with run.folder(manifest) as folder:
        title = f"What turns pictures into another class for {model}?"
        write_page(folder / "index.html", title, discover_sections(result), lead=lead)
        (folder / "findings.csv").write_text(rows_csv(findings_rows(result)), encoding="utf-8")
        if places:
            count = write_pairs(result, places, folder / "pairs")
            numbers = ", ".join(str(place + 1) for place in places)
            spec = f"pairs:{run.out / 'pairs' / 'with'}:{run.out / 'pairs' / 'without'}"
            lines.append(f"{count} pairs of finding {numbers} to repair by: --data {spec}")
    return lines


def _ranks(flag: str, text: str) -> list[int]:
    words = names(text)
    if not words or not all(word.isdecimal() for word in words):
        raise BadOption(flag, text, "whole numbers with commas between them, such as 1,3")
    return [int(word) for word in words]


def _places(result: Discovery, wanted: list[int] | None) -> list[int]:
    """Places of the findings whose pairs are written."""
    count = len(result.findings)
    if wanted is not None:
        wrong = [rank for rank in wanted if not 1 <= rank <= count]
        if wrong:
            raise BadOption("--pairs", wrong[0], f"ranks from 1 to {count}, best or none")
        return [rank - 1 for rank in wanted]
    off = [place for place, finding in enumerate(result.findings) if not finding.is_object]
    return off[:1]
