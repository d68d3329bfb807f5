"""`seecause discover`: which kinds of patches turn pictures into which class?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.heads_options import BIASED, KINDS, TRAIN, Limit, lead_of
from seecause.cli.options import ModelOptions, ModelRun, whole_numbers
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
    app.command(epilog=EXAMPLES)(with_pieces(discover))


def discover(
    model: ModelOptions = ModelOptions(model=BIASED),
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
    wanted = whole_numbers("--pairs", pairs) if pairs not in ("best", "none") else None
    chosen = None if layers is None else whole_numbers("--layers", layers)
    opened = model.open(run)
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
    from seecause.report.folder import rows_csv

    ranks = [place + 1 for place in places]
    lines = [f"{rank}. {f.sentence()}" for rank, f in enumerate(result.findings[:SAID], 1)]
    lines = lines or ["no kind of patch turns pictures into a class by more than chance"]

    def pairs(folder: Path) -> None:
        if places:
            count = write_pairs(result, places, folder / "pairs")
            spec = f"pairs:{run.out / 'pairs' / 'with'}:{run.out / 'pairs' / 'without'}"
            numbers = ", ".join(map(str, ranks))
            lines.append(f"{count} pairs of finding {numbers} to repair by: --data {spec}")

    manifest: dict[str, Any] = {"command": "discover", "table": "findings.csv", "pairs": ranks}
    manifest["run"] = result.protocol
    run.write(
        manifest,
        f"What turns pictures into another class for {model}?",
        discover_sections(result),
        lead=lead,
        tables={"findings.csv": rows_csv(findings_rows(result))},
        holes=result.pictures.holes,
        more=pairs,
    )
    return lines


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
