"""`seecause audit`: does the model answer from the background? With limits, for builds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.heads_options import TEST, AskedModel, AskedRun, AuditData, Limit, lead_of
from seecause.errors import BadOption, DataMissing

if TYPE_CHECKING:
    from seecause.background.audit import BackgroundAudit
    from seecause.background.objects import MaskSource
    from seecause.models.base import ImageModel

FAILED = 3  # exit code: a limit is not met
AUDIT = "seecause audit --model FOLDER --data folder:PATH --masks-from timm:vit_base_patch16_224"


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """Where object masks come from."""

    masks_from: Annotated[
        str | None,
        typer.Option(
            help=(
                "Where object masks come from: another network (timm:NAME, hf:NAME, builtin:NAME, a"
                " folder; fetched unless --masks-weights), given (masks of the data), own (the"
                " model's maps, not to be trusted) or discovered."
            ),
            show_default="masks or pairs of the data",
        ),
    ] = None
    masks_weights: Annotated[
        str | None,
        typer.Option(help="A weights file for the network.", show_default="pretrained"),
    ] = None
    masks_method: Annotated[
        str | None,
        typer.Option(
            help="Attribution method of the network's maps: caap, mosaic and others.",
            show_default="caap",
        ),
    ] = None

    def source(self, model: ImageModel, cache: Path | None = None) -> MaskSource:
        """What `sc.audit` and `sc.repair` take as `masks`."""
        from seecause.background.objects import object_masks
        from seecause.loading import load

        name = self.masks_from
        plain = name in (None, "given")  # masks of the data are not computed
        by_name = not plain and name not in ("own", "discovered")
        unused = {"--masks-weights": None if by_name else self.masks_weights}
        unused |= {"--masks-method": self.masks_method, "--masks-cache": cache} if plain else {}
        for option, value in unused.items():
            if value is not None:
                raise BadOption(option, str(value), "--masks-from NAME of a network beside it")
        if plain:
            return name
        found: Any = name
        if by_name:
            try:
                found = load(str(name), weights=self.masks_weights, device=model.device)
            except DataMissing as missing:
                if self.masks_weights is not None:
                    raise
                remedy = "a network whose weights are here or can be fetched, or --masks-weights"
                raise BadOption("--masks-from", name, f"{remedy}: {missing.reason}") from None
        method = {} if self.masks_method is None else {"method": self.masks_method}
        return partial(object_masks, model, source=found, cache=cache, **method)


@dataclass(frozen=True, kw_only=True)
class TransplantOptions(MaskOptions):
    """What objects are cut out by, and how often they are put elsewhere."""

    masks_cache: Annotated[
        Path | None, typer.Option(help="Keep masks and maps in this folder.")
    ] = None
    per_picture: Annotated[
        int, typer.Option(help="Transplants of each picture and kind.", min=1)
    ] = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that the whole 95 % interval must meet; None: no limit."""

    max_flips: Annotated[
        float | None,
        typer.Option(
            help="Share of correct predictions that another background may change, beyond what"
            " cutting alone changes.",
            min=0,
            max=1,
        ),
    ] = None
    max_bir: Annotated[
        float | None, typer.Option(help="Background influence (BIR).", min=0, max=1)
    ] = None
    min_accuracy: Annotated[
        float | None, typer.Option(help="Accuracy on plain images.", min=0, max=1)
    ] = None
    min_worst_group: Annotated[
        float | None, typer.Option(help="Accuracy in every group of the data.", min=0, max=1)
    ] = None


def register(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {AUDIT}")(audit)


def audit(
    asked: AskedModel = AskedModel(),
    data: AuditData = TEST,
    limit: Limit = 160,
    limits: Limits = Limits(),
    transplant: TransplantOptions = TransplantOptions(),
    run: AskedRun = AskedRun(out=Path("audit")),
) -> None:
    """Does the model answer from the background? Objects are put on other backgrounds, and answers
    that change are counted, beside those that cutting alone changes.

    Pictures of your own lie in class folders (folder:PATH, with PATH/cat/1.jpg), with masks in
    PATH/masks or --masks-from a network.

    Writes a page (index.html) with a verdict and the worst pictures, and audit.csv. Pictures that
    cannot be read are left out and named; the exit code is 1 then. A limit (--max-flips and others)
    is met if the whole 95 % interval meets it; the exit code is 3 if one is not.
    """
    from seecause.background.audit import ENOUGH, missed_limits
    from seecause.report.background import audit_csv, audit_lines, audit_sections
    from seecause.report.pages import title_name

    replaces = run.check()
    if limit < ENOUGH and not run.quiet:  # before minutes are spent
        note = f'note: {limit} pictures: the verdict can only be "too few"'
        typer.echo(note, err=True)
    opened = asked.ask(data, run)
    answering, result = audited(opened, data, transplant, run, limit=limit)
    asked_limits = {name: limit for name, limit in asdict(limits).items() if limit is not None}
    missed = missed_limits(result, **asked_limits)
    manifest: dict[str, Any] = {"command": "audit", "table": "audit.csv"}
    manifest |= {"verdict": result.verdict, "numbers": result.numbers(), "run": result.protocol}
    manifest |= {"limits": asked_limits, "limits not met": missed}
    run.write(
        manifest,
        f"Does {title_name(opened.name)} answer from the background?",
        audit_sections(answering, result),
        lead=lead_of(opened, result.data),
        tables={"audit.csv": audit_csv(result, answering.classes)},
        holes=result.data.skipped,
    )
    lines = audit_lines(result, notes=False)  # warnings have been shown already
    lines += [f"Limit not met: {reason}." for reason in missed]
    run.say(lines, replaced=replaces, holes=() if missed else result.data.skipped)
    if missed:
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
        masks=transplant.source(model, transplant.masks_cache),
        per_picture=transplant.per_picture,
        seed=run.seed,
        progress=run.counting,
    )
