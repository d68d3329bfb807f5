"""`seecause explain`: which patches caused the answer?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.options import (
    ModelOptions,
    ModelRun,
    check_methods,
    names,
    tell_outside,
    value_of,
)
from seecause.cli.progress import Facts, Incomplete, starting
from seecause.errors import BadImage, BadOption, printable

if TYPE_CHECKING:
    from seecause.data.dataset import Hole
    from seecause.models.base import Architecture, ImageModel

EXAMPLES = """Examples:

  seecause explain cat.jpg --model timm:deit3_small_patch16_224

  seecause explain critters:clean:test#3 --evidence --interactions

  seecause explain photos/ --model timm:vit_base_patch16_224 --class tabby --method caap,sobel

  seecause explain marked/ --without clean/ --out marks

  seecause explain street.jpg --model hf:facebook/detr-resnet-50 --box 3

  seecause explain street.jpg --model hf:SEGFORMER --region 40,60,200,180 --class road
"""
Images = Annotated[
    list[str],
    typer.Argument(
        help=(
            "Pictures, folders (also of class folders), quoted globs, or samples of a dataset:"
            " critters:clean:test#3. For a video model: folders of"
            " frames, animations or arrays (.npy)."
        ),
        metavar="IMAGE",
        show_default=False,
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="Attribution methods, separated by commas.",
        show_default="caap,mosaic; caap where no gradient passes, and with --option",
    ),
]
MethodOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="An option of the method, such as tail=patched; repeat for more.",
        metavar="KEY=VALUE",
    ),
]
Without = Annotated[
    Path | None,
    typer.Option(
        "--without",
        help=(
            "A folder with another version of each picture under the same name (without a mark, for"
            " one): the maps show what of the difference caused the answer. Samples of"
            " pairs:WITH:WITHOUT need no folder."
        ),
        metavar="FOLDER",
    ),
]


@dataclass(frozen=True, kw_only=True)
class AskedAbout:
    """What of the answer is explained."""

    class_: Annotated[
        str | None,
        typer.Option(
            "--class",
            "-c",
            help="The class to explain, by name or index.",
            metavar="NAME|INDEX",
            show_default="the predicted one",
        ),
    ] = None
    box: Annotated[
        str | None,
        typer.Option(
            help=(
                "For a detector: which box, by the number of its query. Explained is the score"
                " of its class (or of --class), or with a colon a side: 3:left, 3:width."
            ),
            metavar="K[:SIDE]",
            show_default="the surest box, or that of --class",
        ),
    ] = None
    region: Annotated[
        str | None,
        typer.Option(
            help=(
                "For segmentation: where, in pixels of the picture: two corners, one place, or"
                " a mask file. To Segment Anything it is the prompt."
            ),
            metavar="X0,Y0,X1,Y1|X,Y|FILE",
            show_default="the pixels of the largest class",
        ),
    ] = None

    def target(self, model: ImageModel) -> Any:
        """The target that --class, --box and --region name together."""
        from seecause._pictures import read_grey
        from seecause.attribution.explain import FileRegion
        from seecause.models.rows import Box, Region

        label, box, region = self.class_, self.box, self.region
        if box is not None and region is not None:
            raise BadOption("--region", region, "--box or --region, not both")
        if box is not None:
            named = Box.parse(f"box:{box}")
            return Box(named.index, self._label("--box", named.label), named.side)
        if region is None:
            return label if label is None or not model.aimed else model.class_index(label)
        if Path(region).is_file():
            import torch

            where = Region(torch.from_numpy(read_grey(region)), label)
        else:
            where = Region.parse(f"region:{region}")
            where = Region(where.where, self._label("--region", where.label))
        return FileRegion(where, model.preprocess)

    def _label(self, flag: str, named: str | int | None) -> str | int | None:
        """The class of --class, or the one that `flag` names beside a place."""
        if self.class_ is not None and named is not None:
            raise BadOption("--class", self.class_, f"no class: {flag} names {named} already")
        return named if self.class_ is None else self.class_


@dataclass(frozen=True, kw_only=True)
class Also:
    """What is shown beside the maps."""

    evidence: Annotated[
        bool,
        typer.Option(
            "--evidence",
            help="Also the patches that are enough for the answer, and those that it needs.",
        ),
    ] = False
    interactions: Annotated[
        bool,
        typer.Option(
            "--interactions",
            help="Also the pairs of places that cause together what neither causes alone.",
        ),
    ] = False


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(explain)


def explain(
    images: Images,
    model: ModelOptions = ModelOptions(),
    about: AskedAbout = AskedAbout(),
    method: Methods = None,
    option: MethodOption = None,
    without: Without = None,
    also: Also = Also(),
    run: ModelRun = ModelRun(out=Path("explained")),
) -> Facts:
    """Which patches of each picture caused the model's answer?

    Writes a page (index.html), overlays (PNG), the raw maps (safetensors) and a manifest. Pictures
    that cannot be read are left out and named; the exit code is 1 then.
    """
    from seecause.data.images import find_pictures, second_versions

    replaces = run.check()
    if method is not None and not names(method):
        raise BadOption("--method", method, "at least one method; `seecause methods` lists them")
    files = find_pictures(images)
    others, shown = second_versions(files, without), short_names(files)
    with starting(f"loading {model.model}", quiet=run.quiet):  # after what is quickly refused
        check_methods(names(method or ""))
        opened = model.open(run)
        methods, pairs = _methods(method, opened, bool(option)), option or []
        kind = opened.architecture
        options = _options_of(methods, pairs, seed=run.seed, architecture=kind)
        target = about.target(opened)
        named, files = files, opened.preprocess.inputs(files)
        if files != list(named):  # frames, by the film they are of
            others, shown = second_versions(files, without), short_names(files)
        from seecause.attribution.explain import explain_batches
        from seecause.report.explain import write_explanations

    if not run.quiet:
        _warn(opened, model.model, files)
    holes: list[Hole] = []
    with run.counting(f"explaining with {', '.join(methods)}", len(files)) as advance:
        parts = explain_batches(
            opened, files, names=shown, methods=methods, target=target, others=others,
            options=options, also=[name for name, wanted in asdict(also).items() if wanted],
            skipped=holes,
        )  # fmt: skip
        facts: dict[str, Any] = {}
        with run.folder(facts) as folder:
            rows = write_explanations(folder, parts, shown, skipped=holes, progress=advance)
            maps = sorted(path.name for path in (folder / "maps").iterdir())
            reasons = {hole.name: hole.reason for hole in holes}
            facts |= {
                "command": "explain",
                "out": str(run.out),
                "page": "index.html",
                "maps": {name: f"maps/{name}" for name in maps},
                "images": [
                    {"file": file, "name": name, **rows.get(place, {"error": reasons.get(name)})}
                    for place, (file, name) in enumerate(zip(files, shown, strict=True))
                ],
            }
    run.say(map(printable, _lines(facts["images"], opened)), replaced=replaces)
    for hole in holes:
        typer.echo(f"left out: {printable(hole.reason)}", err=True)
    if holes:
        raise Incomplete(facts)
    return facts


def _warn(opened: ImageModel, model: str, files: Sequence[str]) -> None:
    """Of pictures that the model does not know, and of answers without names."""
    from seecause.critters import CLASSES

    if tuple(opened.classes) == tuple(CLASSES):  # it knows the generated world, and nothing else
        tell_outside(model, files, suggest="timm:deit3_small_patch16_224")
    if not opened.classes:
        typer.echo(f"note: {model} has no class names here; --classes FILE names them", err=True)


def _methods(text: str | None, model: ImageModel, with_options: bool) -> Sequence[str]:
    """Those that are named, or the usual ones; options are CAAP's where nothing is named."""
    from seecause.attribution.explain import default_methods

    if text is not None:
        return names(text)
    return ["caap"] if with_options else list(default_methods(model))


def _options_of(
    methods: Sequence[str], pairs: Sequence[str], *, seed: int, architecture: Architecture
) -> dict[str, dict[str, Any]]:
    """`key=value` words -> options by method. An option goes to every method that has it; one that
    none has is an error."""
    from seecause.attribution.registry import find

    entries = {method: find(method, architecture) for method in methods}
    options: dict[str, dict[str, Any]] = {
        m: {"seed": seed} if "seed" in entry.options else {} for m, entry in entries.items()
    }
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise BadOption("--option", pair, "key=value, such as tail=patched or layers=1,8")
        takers = [method for method, entry in entries.items() if key in entry.options]
        if not takers:
            known = sorted({option for entry in entries.values() for option in entry.options})
            raise BadOption(
                "--option",
                pair,
                f"an option of {', '.join(methods)}: {', '.join(known) or 'there are none'}",
            )
        for method in takers:
            options[method][key] = value_of(text)
    return options


def _lines(rows: Sequence[Mapping[str, Any]], model: ImageModel) -> list[str]:
    """What the model answers to each picture that could be read."""
    from seecause.report.explain import answer_text, box_texts, prediction_text as row_text
    from seecause.target import Answer

    warning = f"{model.name} has random weights: its answers mean nothing"
    lines = [warning] if model.random_weights else []
    for row in rows:
        if "row" in row:
            lines.append(f"{row['name']}: {row_text(row)}")
            lines += [f"  {words}" for words in box_texts(row)]
        elif "answers" in row:
            answers = [Answer(**answer) for answer in row["answers"]]
            lines.append(f"{row['name']}: {answer_text(answers)}")
    return lines


def short_names(files: Sequence[str]) -> list[str]:
    """File names, with as much of their folders as tells them apart; samples of datasets keep
    theirs. A name that no page can hold is refused."""
    from seecause.data.images import sample_of

    for file in files:
        if any("\ud800" <= character <= "\udfff" for character in file):
            raise BadImage(ascii(file), "its name is not UTF-8", "rename it, or its folder")
    places = {
        file: Path(os.path.normpath(Path(file).absolute())) for file in files if not sample_of(file)
    }
    short = {file: place.name for file, place in places.items()}
    if len(set(short.values())) < len(short):
        shared = os.path.commonpath([place.parent for place in places.values()])
        short = {file: place.relative_to(shared).as_posix() for file, place in places.items()}
    return [short.get(file, file) for file in files]
