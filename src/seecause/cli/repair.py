"""`seecause repair`: remedies side by side, and a checkpoint to ship. And `seecause discover`: what
kinds of patches turn pictures into which class?"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.audit import MaskOptions
from seecause.cli.heads_options import BIASED, KINDS, TRAIN, Limit, lead_of
from seecause.cli.options import ModelOptions, ModelRun, named_option, names, whole_numbers
from seecause.cli.progress import counting
from seecause.errors import BadOption, NotDefined, UnsupportedModel

if TYPE_CHECKING:
    from seecause.background.discover import Discovery
    from seecause.background.repair import Repair

DataOption = Annotated[str, typer.Option("--data", help=f"Pictures to repair with: {KINDS}")]
TestOption = Annotated[
    str | None,
    typer.Option("--test", help="Pictures to report on.", show_default="a fifth of --data"),
]


@dataclass(frozen=True, kw_only=True)
class RemedyOptions:
    """What is tried, from what, and how it is chosen."""

    remedies: Annotated[
        str,
        typer.Option(
            help=(
                "What to try: last-layer, directions, directions-refit, heads, fine-tune; with"
                " --groups dfr; or all."
            ),
        ),
    ] = "last-layer,directions,directions-refit"
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="An option of a remedy, such as fine-tune.epochs=3; repeat for more.",
            metavar="REMEDY.KEY=VALUE",
        ),
    ] = None
    groups: Annotated[
        bool, typer.Option("--groups", help="Use group labels, and choose by the worst group.")
    ] = False
    force: Annotated[
        bool, typer.Option("--force", help="Repair also where there is nothing to repair.")
    ] = False
    per_picture: Annotated[
        int, typer.Option(help="Transplants of each picture to learn from.", min=1)
    ] = 8

    def made(self) -> dict[str, Any]:
        """As `sc.repair` takes them."""
        options: dict[str, dict[str, Any]] = {}
        for pair in self.option or []:
            remedy, key, value = named_option("--option", pair)
            if not remedy:
                raise BadOption("--option", pair, "REMEDY.KEY=VALUE, such as fine-tune.epochs=3")
            options.setdefault(remedy, {})[key] = value
        named = {"remedies": names(self.remedies), "options": options, "groups": self.groups}
        return {**named, "force": self.force, "per_picture": self.per_picture}


REPAIR_EXAMPLE = (
    "Example: seecause repair --model FOLDER --data folder:PATH --masks-from timm:NAME"
    " --remedies last-layer,fine-tune --out repaired"
)
SAID = 5  # findings on the terminal
DISCOVER_EXAMPLES = """Examples:

  seecause discover --model hf:FOLDER --data folder:PATH --limit 300 --out kinds

  seecause repair --model hf:FOLDER --data pairs:kinds/pairs/with:kinds/pairs/without
"""
SearchedData = Annotated[
    str, typer.Option("--data", help=f"Pictures to look for shortcuts in: {KINDS}")
]
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
    app.command(epilog=REPAIR_EXAMPLE)(repair)
    app.command(epilog=DISCOVER_EXAMPLES)(discover)


def repair(
    model: ModelOptions = ModelOptions(model=BIASED),
    data: DataOption = TRAIN,
    test: TestOption = None,
    limit: Limit = 256,
    masks: MaskOptions = MaskOptions(),
    trying: RemedyOptions = RemedyOptions(),
    run: ModelRun = ModelRun(out=Path("repaired")),
) -> None:
    """Mend a model that answers from the background, without group labels: remedies learn from
    objects on other backgrounds, and the best on held-out ones is kept.

    Writes OUT/model (a native checkpoint, its card, a page with pictures before and after). Killed,
    the same command continues: masks and fine-tuning are kept in OUT.work until the end.
    `torchrun --nproc_per_node=8 -m seecause repair ...` fine-tunes on many GPUs.
    """
    from seecause.background.repair import ASKED_INSTEAD, IN_WORDS, repair as mend
    from seecause.data.batch import take_names
    from seecause.data.registry import open_data
    from seecause.faithful.run import join_processes

    replaces, options = run.check(), trying.made()
    try:
        opened = model.open(run)
    except UnsupportedModel:
        raise NotDefined("repair", f"{model.model} {IN_WORDS}", ASKED_INSTEAD) from None
    pictures = open_data(data, limit=limit)
    take_names(opened, pictures)
    work = run.out.with_name(f"{run.out.name}.work")
    look = masks.source(opened, None if masks.masks_from in (None, "given") else work / "masks")
    with join_processes(str(opened.device)) as processes:
        result = mend(
            opened,
            pictures,
            masks=look,
            test=None if test is None else open_data(test, limit=limit),
            seed=run.seed,
            cache=work,
            progress=partial(counting, quiet=run.quiet or not processes.first),
            **options,
        )
        processes.wait()  # nobody still reads what is removed below
    if not processes.first:
        return
    _write_repair(result, run)
    shutil.rmtree(work, ignore_errors=True)
    lines = [result.sentence, *_lines(result)]
    lines += [] if result.remedy == "nothing" else [f"checkpoint: {run.out / 'model'}"]
    run.say(lines, replaced=replaces, holes=result.skipped)


def _write_repair(result: Repair, run: ModelRun) -> None:
    """The page, and the mended model where there is one."""
    from seecause.report.background import repair_sections

    def export(folder: Path) -> None:
        if result.remedy != "nothing":
            result.export(folder / "model")

    manifest = {"command": "repair", "model": "model", **result.facts()}
    title = f"{result.original.name}: before and after"
    run.write(manifest, title, repair_sections(result), lead=result.sentence, more=export)


def _lines(result: Repair) -> list[str]:
    """What a reader must know and the eye has not said already, and what every remedy did to
    held-out pictures."""
    masks = result.before.masks
    heard = () if masks is None else masks.notes
    lines = [f"note: {note}" for note in result.record["notes"] if note not in heard]
    for candidate in result.candidates.values():
        if candidate.failed:
            lines.append(f"{candidate.name}: not tried: {candidate.failed}")
            continue
        numbers = candidate.test
        lines.append(
            f"{candidate.name}: transplant-worst {numbers['transplant-worst']:.3f}, flips"
            f" {numbers['flips']:.3f}, accuracy {numbers['accuracy']:.3f}"
        )
    return lines


def discover(
    model: ModelOptions = ModelOptions(model=BIASED),
    data: SearchedData = TRAIN,
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
    from seecause.background.discover import discover as find
    from seecause.data.registry import open_data

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
    lines = _write_discovery(opened.name, lead_of(opened, result.data), result, places, run)
    run.say(lines, replaced=replaces, holes=result.data.skipped)


def _write_discovery(
    model: str, lead: str, result: Discovery, places: list[int], run: ModelRun
) -> list[str]:
    """Page, table, pairs of some findings, and what is said of them."""
    from seecause.report.background import discover_sections, write_pairs
    from seecause.report.pages import rows_csv

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
        tables={"findings.csv": rows_csv(result.rows())},
        holes=result.data.skipped,
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
