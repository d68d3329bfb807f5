"""`seecause explain`: which patches caused the answer?"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seecause.cli.options import (
    DEFAULT_MODEL,
    Device,
    DeviceOption,
    Dtype,
    DtypeOption,
    ModelName,
    Out,
    Overwrite,
    Quiet,
    Seed,
    Weights,
    names,
)
from seecause.errors import BadOption

if TYPE_CHECKING:
    from torch import Tensor

    from seecause.models.base import ImageModel
    from seecause.report.explain import Explanation

EXAMPLES = """Examples:

  seecause explain cat.jpg --model timm:deit3_small_patch16_224

  seecause explain critters:clean:test#3

  seecause explain photos/ --class "Egyptian cat" --method caap,sobel --out cats
"""


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(explain)


def explain(
    images: Annotated[
        list[str],
        typer.Argument(
            help="Pictures, folders, quoted globs, or samples of a dataset: critters:clean:test#3.",
            metavar="IMAGE",
            show_default=False,
        ),
    ],
    model: ModelName = DEFAULT_MODEL,
    weights: Weights = None,
    class_: Annotated[
        str | None,
        typer.Option(
            "--class",
            "-c",
            help="The class to explain, by name or index.",
            metavar="NAME|INDEX",
            show_default="the predicted one",
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="Attribution methods, separated by commas.")] = "caap",
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="An option of the method, such as tail=patched; repeat for more.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    out: Out = Path("explained"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Which patches of each picture caused the model's answer?

    Writes a page (index.html), one overlay PNG for each picture, the raw maps (safetensors) and a
    manifest.
    """
    from seecause.cli.options import method_options, open_model, tell_outside
    from seecause.cli.progress import counting
    from seecause.critters import CLASSES
    from seecause.data.images import find_pictures
    from seecause.report.explain import explain as run
    from seecause.report.folder import check_out

    replaces = check_out(out, overwrite=overwrite)
    methods = names(method)
    if not methods:
        raise BadOption("--method", method, "at least one method; `seecause methods` lists them")
    files = find_pictures(images)
    opened = open_model(model, weights=weights, device=device, dtype=dtype, seed=seed)
    options = method_options(methods, option or [], seed=seed, architecture=opened.architecture)
    target = None if class_ is None else opened.class_index(class_)
    with counting("reading pictures", len(files), quiet=quiet) as advance:
        batch = _read(opened, files, advance)
    if not quiet and tuple(opened.classes) == tuple(CLASSES):
        tell_outside(model, files, suggest="timm:deit3_small_patch16_224")
    with counting(
        f"explaining with {', '.join(methods)}", len(files) * len(methods), quiet=quiet
    ) as advance:
        found = run(
            opened,
            batch,
            names=short_names(files),
            methods=methods,
            target=target,
            options=options,
            advance=advance,
        )
    with counting("writing", len(files), quiet=quiet) as advance:
        _write(found, files, out, overwrite, advance)
    if not quiet:
        _report(found, out, replaced=replaces)


def _read(model: ImageModel, files: Sequence[str], advance: Callable[[int], None]) -> Tensor:
    """All pictures as the model sees them, [N, 3, H, W]; the originals are let go one by one, so
    large photos do not pile up."""
    import torch

    from seecause.data.images import open_pictures

    prepared = []
    for picture in open_pictures(files):
        prepared.append(model.preprocess(picture))
        advance(1)
    return torch.cat(prepared)


def _write(
    found: Explanation,
    files: Sequence[str],
    out: Path,
    overwrite: bool,
    advance: Callable[[int], None],
) -> None:
    from dataclasses import asdict

    from seecause.report.explain import explain_panel, explain_section
    from seecause.report.folder import result_folder
    from seecause.report.page import protocol_section, write_page

    overlays = [f"overlays/{_file_name(name)}.png" for name in found.names]
    rows = zip(files, overlays, found.answers, strict=True)
    manifest = {
        "command": "explain",
        "page": "index.html",
        "maps": {method: f"maps/{method}" for method in found.runs},
        "images": [
            {"file": file, "overlay": png, "answers": [asdict(a) for a in answers]}
            for file, png, answers in rows
        ],
    }
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        for method, run in found.runs.items():
            run.save(folder / "maps" / method)
        for index, png in enumerate(overlays):
            (folder / png).parent.mkdir(parents=True, exist_ok=True)
            explain_panel(found, index).save(folder / png)
            advance(1)
        model = found.first.manifest["model"]
        sections = [
            explain_section(found),
            protocol_section([run.manifest for run in found.runs.values()]),
        ]
        write_page(folder / "index.html", f"What {model} saw", sections, lead=_lead(found))


def _lead(found: Explanation) -> str:
    count = len(found.names)
    return f"{count} picture{'s' * (count != 1)}, explained with {', '.join(found.runs)}."


def short_names(files: Sequence[str]) -> list[str]:
    """File names, with as much of their folders as tells them apart; samples of datasets keep
    theirs."""
    from seecause.data.images import sample_of

    places = {file: Path(file).absolute() for file in files if not sample_of(file)}
    short = {file: place.name for file, place in places.items()}
    if len(set(short.values())) < len(short):
        shared = os.path.commonpath([place.parent for place in places.values()])
        short = {file: place.relative_to(shared).as_posix() for file, place in places.items()}
    return [short.get(file, file) for file in files]


def _file_name(name: str) -> str:
    """`critters:clean:test#3` -> `critters-clean-test-3`: colons and hashes are no part of file
    names everywhere."""
    from seecause.data.images import sample_of

    return re.sub(r"[^\w.]+", "-", name) if sample_of(name) else name


def _report(found: Explanation, out: Path, *, replaced: bool) -> None:
    from seecause.cli.options import tell_page
    from seecause.report.explain import said

    if found.first.manifest["random_weights"]:
        typer.echo(f"{found.first.manifest['model']} has random weights: its answers mean nothing")
    for name, answers in zip(found.names, found.answers, strict=True):
        typer.echo(f"{name}: {said(answers)}")
    tell_page(out, replaced=replaced)
