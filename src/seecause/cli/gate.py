"""`seecause gate`: may this model ship? An exit code for a build, and an evidence pack."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.audit import TransplantOptions, audited
from seecause.cli.heads_options import (
    BIASED,
    TEST,
    AskedModel,
    AskedRun,
    AuditData,
    Limit,
    lead_of,
)
from seecause.cli.options import ModelName, Weights, grouped, tell_page, with_reading
from seecause.cli.progress import Incomplete
from seecause.cli.workers import FLAGS, with_pieces
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.repair._gate import Gate

FAILED = 3  # exit code: a limit is missed, or not shown to be met


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model must keep; None: not asked for."""

    max_flips: Annotated[
        float | None,
        typer.Option(
            help="Right answers that another background may change, beyond what cutting alone"
            " does.",
            min=0,
            max=1,
        ),
    ] = None
    max_bir: Annotated[
        float | None, typer.Option(help="The background's share of the answers, BIR.", min=0, max=1)
    ] = None
    min_accuracy: Annotated[float | None, typer.Option(help="On plain pictures.", min=0, max=1)] = (
        None
    )
    min_worst_group: Annotated[
        float | None, typer.Option(help="In every group of the data.", min=0, max=1)
    ] = None

    def checked(self) -> dict[str, float | None]:
        """By name, and one at least."""
        from seecause.repair._gate import check_limits

        limits = asdict(self)
        if all(value is None for value in limits.values()):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in limits)
            raise BadOption("limits", "none", f"one at least, of {flags}")
        check_limits(limits)
        return limits


JUnit = Annotated[
    Path | None,
    typer.Option("--junit", help="Also write the report for the build server to this file."),
]


def register(app: typer.Typer) -> None:
    example = "seecause gate --model FOLDER --data folder:PATH --max-flips 0.1 --junit gate.xml"
    app.command(epilog=f"Example: {example}")(with_pieces(with_reading(grouped(gate))))


def gate(
    context: typer.Context,
    model: ModelName = BIASED,
    weights: Weights = None,
    data: AuditData = TEST,
    limits: Limits = Limits(),
    junit: JUnit = None,
    limit: Limit = 400,
    transplant: TransplantOptions = TransplantOptions(),
    run: AskedRun = AskedRun(out=Path("gate")),
) -> None:
    """May this model ship? Limits on an audit are judged by the end of a 95 % interval that is hard
    to meet; the exit code is 3 unless all are met.

    Writes an evidence pack: a page, numbers, digests of weights and pictures, versions, command and
    a JUnit report. Where all are met and pictures could not be read, the exit code is 1.
    """
    from seecause.repair._gate import gate as judge
    from seecause.report.gate import write_pack

    wanted, replaces = limits.checked(), run.check()
    opened = AskedModel(model=model, weights=weights).open(data, run)
    answering, audit = audited(opened, data, transplant, run, limit=limit)
    result = judge(audit, **wanted)
    record = {"command": command_line(context), "files": weights_files(model, weights)}
    manifest = {"command": "gate", "page": "index.html", "passed": result.passed}
    with run.folder(manifest) as folder:
        write_pack(folder, answering, result, lead=lead_of(opened, audit.pictures), **record)
    _write_junit(junit, result, answering.name)
    if not run.quiet:
        typer.echo("\n".join([result.sentence, *(check.sentence for check in result.checks)]))
        tell_page(run.out, replaced=replaces)
    if not result.passed:
        raise typer.Exit(FAILED)
    if audit.pictures.holes:  # named when they were read
        raise Incomplete


def _write_junit(file: Path | None, result: Gate, name: str) -> None:
    """The report for the build server, where it is asked for."""
    from seecause._files import write_atomic
    from seecause.report.gate import junit_xml

    if file is not None:
        file.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, junit_xml(result, name))


def command_line(context: typer.Context) -> str:
    """The command as it was given, for the record; who did the work changes nothing in it."""
    words = ["seecause", str(context.info_name)]
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name in (*FLAGS, "work"):
            continue
        if source is not None and source.name == "COMMANDLINE":
            words.append(max(parameter.opts, key=len))
            value: Any = context.params[str(parameter.name)]
            words += [] if value is True else [str(value)]
    return shlex.join(words)


def weights_files(model: str, weights: str | None) -> dict[str, str]:
    """Digests of the local files that weights are read from; none for those of a hub."""
    from seecause._files import digest_file

    place = Path(weights or model.partition(":")[2] or model)
    if not place.exists():
        place = Path(model)
    if place.is_file():
        return {place.name: digest_file(place)}
    files = sorted(place.glob("*.safetensors")) + sorted(place.glob("*.bin"))
    return {file.name: digest_file(file) for file in files} if place.is_dir() else {}
