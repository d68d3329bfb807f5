"""`seecause audit`: does the model answer from the background?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.heads_options import (
    BIASED,
    TEST,
    AuditData,
    ClassifyOption,
    DtypeOption,
    Limit,
    QuestionOption,
    ScopeOption,
    lead_of,
    open_asked,
    say,
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
    with_reading,
)
from seecause.cli.progress import counting
from seecause.cli.workers import with_pieces

if TYPE_CHECKING:
    from seecause.models.base import ImageModel
    from seecause.repair.audit import BackgroundAudit
    from seecause.repair.eye import Eye

EyeOption = Annotated[
    str | None,
    typer.Option(
        "--eye",
        help=(
            "What finds the objects: another network than the audited one (timm:NAME, hf:NAME,"
            " builtin:NAME, a folder; fetched unless --eye-weights), given (masks of the data), or"
            " own (the model's maps, not to be trusted)."
        ),
        show_default="masks or pairs of the data",
    ),
]
EyeWeights = Annotated[
    str | None,
    typer.Option("--eye-weights", help="A weights file for the eye.", show_default="pretrained"),
]
EyeMethod = Annotated[
    str | None,
    typer.Option(
        "--eye-method",
        help="Method of the eye's maps: caap, mosaic and others.",
        show_default="caap",
    ),
]
EyeCache = Annotated[
    Path | None, typer.Option("--eye-cache", help="Keep the eye's maps in this folder.")
]
PerPicture = Annotated[int, typer.Option(help="Transplants of each picture and kind.", min=1)]


def register(app: typer.Typer) -> None:
    example = "seecause audit --model FOLDER --data folder:PATH --eye timm:vit_base_patch16_224"
    app.command(epilog=f"Example: {example}")(with_pieces(with_reading(audit)))


def audit(
    model: ModelName = BIASED,
    weights: Weights = None,
    data: AuditData = TEST,
    limit: Limit = 160,
    eye: EyeOption = None,
    eye_weights: EyeWeights = None,
    eye_method: EyeMethod = None,
    eye_cache: EyeCache = None,
    per_picture: PerPicture = 4,
    classify: ClassifyOption = None,
    scope: ScopeOption = None,
    question: QuestionOption = None,
    out: Out = Path("audit"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Does the model answer from the background? Objects are put on other backgrounds, and answers
    that change are counted, beside those that cutting alone changes.

    Pictures of your own lie in class folders (folder:PATH, with PATH/cat/1.jpg), with masks in
    PATH/masks or an --eye that finds the objects.

    Writes a page (index.html) with a verdict and the worst pictures, and audit.csv. Pictures that
    cannot be read are left out and named; the exit code is 1 then. `seecause heads audit` erases
    backgrounds instead, and needs no masks.
    """
    from seecause.report.folder import check_out, result_folder
    from seecause.report.page import write_page
    from seecause.report.repair import audit_csv, audit_lines, audit_sections

    replaces = check_out(out, overwrite=overwrite)
    opened = open_asked(
        model, data, weights=weights, device=device, dtype=dtype, seed=seed,
        classify=classify, scope=scope, question=question,
    )  # fmt: skip
    look = partial(open_eye, name=eye, weights=eye_weights, method=eye_method, cache=eye_cache)
    answering, result = audited(
        opened, data, look, limit=limit, per_picture=per_picture, seed=seed, quiet=quiet
    )
    lines = audit_lines(result, notes=False)  # the eye has warned already
    manifest: dict[str, Any] = {"command": "audit", "page": "index.html", "table": "audit.csv"}
    manifest |= {"verdict": result.verdict, "numbers": result.numbers(), "run": result.protocol}
    manifest["left out"] = [asdict(hole) for hole in result.pictures.holes]
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        title = f"Does {opened.name} answer from the background?"
        lead, sections = lead_of(opened, result.pictures), audit_sections(answering, result)
        write_page(folder / "index.html", title, sections, lead=lead)
        (folder / "audit.csv").write_text(audit_csv(result, answering.classes), encoding="utf-8")
    say(lines, out, replaced=replaces, quiet=quiet, holes=result.pictures.holes)


def audited(
    opened: ImageModel,
    data: str,
    look: Callable[[ImageModel], Eye | str | None],
    *,
    limit: int,
    per_picture: int,
    seed: int,
    quiet: bool,
) -> tuple[ImageModel, BackgroundAudit]:
    """The model as it answers in the classes of the data, and its audit."""
    from seecause.data.registry import open_data
    from seecause.heads.pictures import model_for
    from seecause.repair.audit import audit

    pictures = open_data(data, limit=limit)
    model = model_for(opened, pictures)
    progress = partial(counting, quiet=quiet)
    return model, audit(
        model, pictures, eye=look(model), per_picture=per_picture, seed=seed, progress=progress
    )


def open_eye(
    model: ImageModel, name: str | None, weights: str | None, method: str | None, cache: Path | None
) -> Eye | str | None:
    """The eye of that name, or None for what the data brings."""
    from seecause.errors import BadOption, MissingWeights
    from seecause.repair.eye import eye

    looks = name not in (None, "given")  # masks of the data are not looked for
    unused = {"--eye-weights": None if looks and name != "own" else weights}
    unused |= {} if looks else {"--eye-method": method, "--eye-cache": cache}
    for option, value in unused.items():
        if value is not None:
            raise BadOption(option, str(value), "--eye NAME of another network beside it")
    if not looks:
        return name
    try:
        return eye(name, model=model, method=method or "caap", cache=cache, weights=weights)
    except MissingWeights:
        if weights is not None:
            raise
        remedy = "an eye whose weights are here or can be fetched, or --eye-weights FILE beside it"
        raise BadOption("--eye", name, remedy) from None
