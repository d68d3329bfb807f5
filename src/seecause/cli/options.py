"""Options that several commands share, and what is made of them."""

from __future__ import annotations

import ast
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from seecause.cli.progress import Incomplete, counting, shown_as
from seecause.errors import BadOption, NotDefined, printable

if TYPE_CHECKING:
    from seecause.data.dataset import Hole
    from seecause.models.base import ImageModel
    from seecause.report.pages import Section

DEFAULT_MODEL = "builtin:critters-vit"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help=(
            "builtin:NAME, timm:NAME, hf:NAME-OR-FOLDER, torchvision:NAME, open_clip:NAME/TAG, or a"
            " folder that timm, transformers, PEFT or seecause wrote."
        ),
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help=(
            "Your checkpoint (.pth, .ckpt, .safetensors; any number of classes) or an adapter"
            " folder instead of the pretrained weights, or 'random'."
        ),
        metavar="PATH|random",
        show_default="pretrained",
    ),
]
DeviceOption = Annotated[
    Device, typer.Option(help="Where to compute; auto takes the GPU if there is one.")
]
Seed = Annotated[int, typer.Option(help="Seed of everything random.", min=0)]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help=(
            "Write into --out even if it holds other things; files of the same names are replaced."
        ),
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a model runs."""

    device: DeviceOption = Device.auto
    dtype: Annotated[Dtype | None, typer.Option(help="Precision of the model.")] = Dtype.float32
    seed: Seed = 0

    def made(self) -> dict[str, Any]:
        """As `load` takes them."""
        return {"device": pick_device(self.device), "dtype": (self.dtype or Dtype.float32).value}


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a model is read, beyond what it tells itself."""

    class_names: Annotated[
        Path | None,
        typer.Option(
            "--classes",
            help="Class names in the model's order: a file with one a line, or JSON.",
            metavar="FILE",
            show_default="the model's own",
        ),
    ] = None
    mean: Annotated[
        str | None,
        typer.Option(
            help="Mean that pixels (0-1) are normalised by, such as 0.485,0.456,0.406.",
            metavar="R,G,B",
            show_default="the model's own",
        ),
    ] = None
    std: Annotated[
        str | None,
        typer.Option(
            help="Standard deviation likewise.", metavar="R,G,B", show_default="the model's own"
        ),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(
            help="Pictures' size in pixels, where the architecture takes others: 224, or 224,320.",
            metavar="H[,W]",
            show_default="the model's own",
        ),
    ] = None

    def made(self) -> dict[str, Any]:
        """As options of `load`: only what was given."""
        made: dict[str, Any] = {}
        if self.class_names is not None:
            from seecause.models.load import read_class_names

            made["classes"] = read_class_names(self.class_names)
        if self.mean is not None:
            made["mean"] = _three(self.mean, "--mean")
        if self.std is not None:
            made["std"] = _three(self.std, "--std")
        if self.size is not None:
            made["size"] = _sides(self.size)
        return made


def only_downloads_have_bars() -> None:
    """transformers' bars over weights that lie on the disk stay off; gigabytes on their way do
    not come silently."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    silent = are_progress_bars_disabled()
    logging.disable_progress_bar()  # downloads' as well
    if not silent:
        enable_progress_bars()


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model by its name, and how it is read."""

    model: ModelName = DEFAULT_MODEL
    weights: Weights = None
    reading: ReadOptions = ReadOptions()

    def open(self, where: RunOptions, *, check: bool = True) -> ImageModel:
        """Load it. The seed decides random weights."""
        reading = self.reading.made()  # what is wrong in it is said before anything is loaded
        import torch

        from seecause.loading import load

        torch.manual_seed(where.seed)
        if self.model.partition(":")[0] not in ("builtin", "timm", "torchvision", "open_clip"):
            only_downloads_have_bars()
        return load(self.model, weights=self.weights, check=check, **where.made(), **reading)


@dataclass(frozen=True, kw_only=True)
class Output:
    """The folder that a command writes, and what it says meanwhile."""

    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="Folder for the results; it appears when everything is done.",
            file_okay=True,
        ),
    ]
    overwrite: Overwrite = False
    quiet: Quiet = False

    def check(self) -> bool:
        """Refuse a folder with other things in it; whether it holds an earlier result."""
        from seecause.cli.shared import check_out

        return check_out(self.out, overwrite=self.overwrite)

    def folder(self, manifest: dict[str, Any]) -> AbstractContextManager[Path]:
        """A draft that becomes the folder when all of it is there."""
        from seecause.cli.shared import result_folder

        return result_folder(self.out, manifest, overwrite=self.overwrite)

    def write(
        self,
        manifest: dict[str, Any],
        title: str,
        sections: Sequence[Section],
        *,
        lead: str = "",
        tables: Mapping[str, str] | None = None,
        holes: Sequence[Hole] | None = None,
        more: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        """The folder with its page, tables by name, and what `more` writes into it; pictures that
        could not be read are in the manifest."""
        from seecause.report.pages import write_page

        manifest = {"page": "index.html", **manifest}
        if holes is not None:
            manifest["left out"] = [asdict(hole) for hole in holes]
        with self.folder(manifest) as folder:
            write_page(folder / "index.html", title, sections, lead=lead)
            for name, text in (tables or {}).items():
                (folder / name).write_text(text, encoding="utf-8")
            more(folder)

    def counting(self, what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A progress bar."""
        return counting(what, total, quiet=self.quiet)

    def say(self, lines: Iterable[str], *, replaced: bool, holes: Sequence[Hole] = ()) -> None:
        """What came out, then where the page is. Pictures that could not be read have been named;
        the exit code tells of them."""
        if not self.quiet:
            for line in lines:
                typer.echo(line)
            tell_replaced(self.out, replaced)
            typer.echo(f"page: {self.out / 'index.html'}")
        if holes:
            raise Incomplete


@dataclass(frozen=True, kw_only=True)
class ModelRun(Output, RunOptions):
    """Where a model runs, and the folder that is written."""


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command some of whose parameters are groups of options (dataclasses, also in one another):
    the command line sees their fields, each declared once, with what the parameter's default has
    for them."""
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)

    @functools.wraps(command)
    def run(**options: Any) -> Any:
        return command(
            **{name: _value(hints[name], name, options) for name in signature.parameters}
        )

    parameters = signature.parameters.values()
    shown = [flag for p in parameters for flag in _flags(p.name, hints[p.name], p.default)]
    return shown_as(run, shown, hints.get("return"))


def _value(kind: Any, name: str, options: Mapping[str, Any]) -> Any:
    """An option's value, or a group made of the values of its fields."""
    if not is_dataclass(kind):
        return options[name]
    hints = get_type_hints(kind, include_extras=True)
    return kind(**{f.name: _value(hints[f.name], f.name, options) for f in fields(kind)})  # pyright: ignore


def _flags(name: str, kind: Any, default: Any) -> list[inspect.Parameter]:
    """An option as the command line sees it, or those of a group: a field without a default, in
    a group without one, must be given."""
    if not is_dataclass(kind):
        keyword = inspect.Parameter.KEYWORD_ONLY
        return [inspect.Parameter(name, keyword, default=default, annotation=kind)]
    hints = get_type_hints(kind, include_extras=True)
    empty, flags = inspect.Parameter.empty, []
    for field in fields(kind):
        usual = empty if field.default is MISSING else field.default
        value = usual if default is empty else getattr(default, field.name)
        flags += _flags(field.name, hints[field.name], value)
    return flags


def _three(text: str, flag: str) -> tuple[float, ...]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 3):
        raise BadOption(flag, text, "three numbers such as 0.485,0.456,0.406, or one for all")
    return tuple(values * 3 if len(values) == 1 else values)


def _sides(text: str) -> tuple[int, int]:
    words = text.replace("x", ",").split(",")
    if len(words) not in (1, 2) or not all(word.strip().isdecimal() for word in words):
        raise BadOption("--size", text, "pixels such as 224, or height and width: 224,320")
    return int(words[0]), int(words[-1])


def pick_device(device: Device) -> str:
    """The torch device; asking for a GPU that is not there is an error, not a slow run."""
    import torch

    if torch.cuda.is_available() and device is not Device.cpu and "LOCAL_RANK" in os.environ:
        return f"cuda:{os.environ['LOCAL_RANK']}"  # each process of torchrun its own
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is Device.cuda and not torch.cuda.is_available():
        raise BadOption(
            "--device", "cuda", "a GPU that torch can use; here there is none, so give --device cpu"
        )
    return device.value


def names(text: str) -> tuple[str, ...]:
    """Words with commas between them, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def whole_numbers(flag: str, text: str) -> list[int]:
    """Whole numbers with commas between them, each once."""
    words = names(text)
    if not words or not all(word.isdecimal() for word in words):
        raise BadOption(flag, text, "whole numbers with commas between them, such as 1,3")
    return [int(word) for word in words]


def tell_outside(model: str, pictures: Sequence[str], *, suggest: str) -> None:
    """Warn that a model of the generated world is asked about pictures that are not known to be of
    that world."""
    outside = [picture for picture in pictures if not picture.startswith("critters:")]
    if outside:
        others = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        typer.echo(
            f"warning: {model} knows only Critters pictures, so what it says about"
            f" {printable(outside[0])}{others} means nothing. For photos give another --model, such"
            f" as {suggest}",
            err=True,
        )


def tell_replaced(out: Path, replaced: bool) -> None:
    """Say that an earlier result had to go, if `check_out` found one."""
    if replaced:
        typer.echo(f"replaced the earlier result in {out}")


def check_methods(methods: Sequence[str]) -> None:
    """Refuse, before a model is loaded, a name that no method has."""
    from seecause.attribution.registry import find

    for name in methods:
        with suppress(NotDefined):  # it may be for the kind of model that is loaded
            find(name)


def named_option(flag: str, word: str) -> tuple[str, str, Any]:
    """`[name.]key=value` -> name ("" if there is none), key and value."""
    path, equals, text = word.partition("=")
    name, _, key = path.rpartition(".")
    if not equals or not key:
        raise BadOption(flag, word, "[NAME.]KEY=VALUE, such as caap.tail=patched or order=patch")
    return name, key, value_of(text)


def value_of(text: str) -> Any:
    """A number, tuple, True, False or None where the text reads as one, else the text itself."""
    try:
        return ast.literal_eval(
            {"true": "True", "false": "False"}.get(text, text)
        )  # `none` is a word: select=none, approx=none
    except (ValueError, SyntaxError):
        return text
