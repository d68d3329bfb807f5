"""`seecause audit`: does the model answer from the background? And `seecause gate`: may it ship? An
exit code for a build, and an evidence pack."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.heads_options import TEST, AskedModel, AskedRun, AuditData, Limit, lead_of
from seecause.cli.workers import Pieces, with_pieces
from seecause.errors import BadOption, MissingWeights

if TYPE_CHECKING:
    from seecause.background._gate import Gate
    from seecause.background.audit import BackgroundAudit
    from seecause.background.objects import Eye
    from seecause.models.base import ImageModel

FAILED = 3  # exit code: a limit is missed, or not shown to be met
AUDIT = "seecause audit --model FOLDER --data folder:PATH --eye timm:vit_base_patch16_224"
GATE = "seecause gate --model FOLDER --data folder:PATH --max-flips 0.1 --junit gate.xml"


@dataclass(frozen=True, kw_only=True)
class EyeOptions:
    """What finds the objects."""

    eye: Annotated[
        str | None,
        typer.Option(
            help=(
                "What finds the objects: another network than the audited one (timm:NAME, hf:NAME,"
                " builtin:NAME, a folder; fetched unless --eye-weights), given (masks of the data),"
                " or own (the model's maps, not to be trusted)."
            ),
            show_default="masks or pairs of the data",
        ),
    ] = None
    eye_weights: Annotated[
        str | None, typer.Option(help="A weights file for the eye.", show_default="pretrained")
    ] = None
    eye_method: Annotated[
        str | None,
        typer.Option(
            help="Method of the eye's maps: caap, mosaic and others.", show_default="caap"
        ),
    ] = None

    def open(self, model: ImageModel, cache: Path | None = None) -> Eye | str | None:
        """The eye, or None for what the data brings."""
        from seecause.background.objects import eye

        looks = self.eye not in (None, "given")  # masks of the data are not looked for
        weighs = looks and self.eye != "own"
        unused = {"--eye-weights": None if weighs else self.eye_weights}
        unused |= {} if looks else {"--eye-method": self.eye_method, "--eye-cache": cache}
        for option, value in unused.items():
            if value is not None:
                raise BadOption(option, str(value), "--eye NAME of another network beside it")
        if self.eye is None or not looks:
            return self.eye
        method, weights = self.eye_method or "caap", self.eye_weights
        try:
            return eye(self.eye, model=model, method=method, cache=cache, weights=weights)
        except MissingWeights as missing:
            if weights is not None:
                raise
            remedy = "an eye whose weights are here or can be fetched, or --eye-weights FILE"
            raise BadOption("--eye", self.eye, f"{remedy} beside it: {missing.reason}") from None


@dataclass(frozen=True, kw_only=True)
class TransplantOptions(EyeOptions):
    """What objects are cut out by, and how often they are put elsewhere."""

    eye_cache: Annotated[Path | None, typer.Option(help="Keep the eye's maps in this folder.")] = (
        None
    )
    per_picture: Annotated[
        int, typer.Option(help="Transplants of each picture and kind.", min=1)
    ] = 4


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
        from seecause.background._gate import check_limits

        limits = asdict(self)
        if all(value is None for value in limits.values()):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in limits)
            raise BadOption("limits", None, f"one at least, of {flags}")
        check_limits(limits)
        return limits


JUnit = Annotated[
    Path | None,
    typer.Option("--junit", help="Also write the report for the build server to this file."),
]


def register(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {AUDIT}")(with_pieces(audit))
    app.command(epilog=f"Example: {GATE}")(with_pieces(gate))


def audit(
    asked: AskedModel = AskedModel(),
    data: AuditData = TEST,
    limit: Limit = 160,
    transplant: TransplantOptions = TransplantOptions(),
    run: AskedRun = AskedRun(out=Path("audit")),
) -> None:
    """Does the model answer from the background? Objects are put on other backgrounds, and answers
    that change are counted, beside those that cutting alone changes.

    Pictures of your own lie in class folders (folder:PATH, with PATH/cat/1.jpg), with masks in
    PATH/masks or an --eye that finds the objects.

    Writes a page (index.html) with a verdict and the worst pictures, and audit.csv. Pictures that
    cannot be read are left out and named; the exit code is 1 then. `seecause heads audit` erases
    backgrounds instead, and needs no masks.
    """
    from seecause.background.audit import ENOUGH
    from seecause.report.page import title_name
    from seecause.report.repair import audit_csv, audit_lines, audit_sections

    replaces = run.check()
    if limit < ENOUGH and not run.quiet:  # before minutes are spent
        note = f'note: {limit} pictures: the verdict can only be "too few"'
        typer.echo(note, err=True)
    opened = asked.ask(data, run)
    answering, result = audited(opened, data, transplant, run, limit=limit)
    manifest: dict[str, Any] = {"command": "audit", "table": "audit.csv"}
    manifest |= {"verdict": result.verdict, "numbers": result.numbers(), "run": result.protocol}
    run.write(
        manifest,
        f"Does {title_name(opened.name)} answer from the background?",
        audit_sections(answering, result),
        lead=lead_of(opened, result.pictures),
        tables={"audit.csv": audit_csv(result, answering.classes)},
        holes=result.pictures.holes,
    )
    lines = audit_lines(result, notes=False)  # the eye has warned already
    run.say(lines, replaced=replaces, holes=result.pictures.holes)


def gate(
    context: typer.Context,
    asked: AskedModel = AskedModel(),
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
    from seecause.background._gate import gate as judge
    from seecause.report.gate import write_pack

    wanted, replaces = limits.checked(), run.check()
    opened = asked.ask(data, run)
    answering, audit = audited(opened, data, transplant, run, limit=limit)
    result = judge(audit, **wanted)
    files, command = weights_files(asked.model, asked.weights), command_line(context)
    lead = lead_of(opened, audit.pictures)
    manifest = {"command": "gate", "page": "index.html", "passed": result.passed}
    with run.folder(manifest) as folder:
        write_pack(folder, answering, result, command=command, files=files, lead=lead)
    _write_junit(junit, result, answering.name)
    lines = [result.sentence, *(check.sentence for check in result.checks)]
    run.say(lines, replaced=replaces, holes=audit.pictures.holes if result.passed else ())
    if not result.passed:
        raise typer.Exit(FAILED)


def audited(
    opened: ImageModel, data: str, transplant: TransplantOptions, run: AskedRun, *, limit: int
) -> tuple[ImageModel, BackgroundAudit]:
    """The model as it answers in the classes of the data, and its audit."""
    from seecause.background.audit import audit
    from seecause.background.images import model_for
    from seecause.data.batch import take_names
    from seecause.data.registry import open_data

    pictures = open_data(data, limit=limit)
    take_names(opened, pictures)
    model = model_for(opened, pictures)
    return model, audit(
        model,
        pictures,
        eye=transplant.open(model, transplant.eye_cache),
        per_picture=transplant.per_picture,
        seed=run.seed,
        progress=run.counting,
    )


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
        if parameter.name in {field.name for field in fields(Pieces)}:
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
