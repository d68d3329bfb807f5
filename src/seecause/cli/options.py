"""Options that several commands share, and what is made of them."""

from __future__ import annotations

import ast
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from seecause.cli.progress import Incomplete, counting
from seecause.errors import BadOption, printable

if TYPE_CHECKING:
    from seecause.data.dataset import Hole
    from seecause.models.base import Architecture, ImageModel

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
DtypeOption = Annotated[Dtype, typer.Option(help="Precision of the model.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.", min=0)]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        help="Folder for the results; it appears when everything is done.",
        file_okay=True,
    ),
]
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
class Output:
    """The folder that a command writes, and what it says meanwhile."""

    out: Out
    overwrite: Overwrite = False
    quiet: Quiet = False

    def check(self) -> bool:
        """Refuse a folder with other things in it; whether it holds an earlier result."""
        from seecause.report.folder import check_out

        return check_out(self.out, overwrite=self.overwrite)

    def folder(self, manifest: dict[str, Any]) -> AbstractContextManager[Path]:
        """A draft that becomes the folder when all of it is there."""
        from seecause.report.folder import result_folder

        return result_folder(self.out, manifest, overwrite=self.overwrite)

    def counting(self, what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A progress bar."""
        return counting(what, total, quiet=self.quiet)

    def say(self, lines: Sequence[str], *, replaced: bool, holes: Sequence[Hole] = ()) -> None:
        """What came out, then where the page is. Pictures that could not be read have been named;
        the exit code tells of them."""
        if not self.quiet:
            for line in lines:
                typer.echo(line)
            tell_page(self.out, replaced=replaced)
        if holes:
            raise Incomplete


@dataclass(frozen=True, kw_only=True)
class ModelRun(Output):
    """The same, and where a model runs."""

    device: DeviceOption = Device.auto
    dtype: DtypeOption = Dtype.float32
    seed: Seed = 0


ClassNames = Annotated[
    Path | None,
    typer.Option(
        "--classes",
        help="Class names in the model's order: a file with one a line, or JSON.",
        metavar="FILE",
        show_default="the model's own",
    ),
]
Mean = Annotated[
    str | None,
    typer.Option(
        help="Mean that pixels (0-1) are normalised by, such as 0.485,0.456,0.406.",
        metavar="R,G,B",
        show_default="the model's own",
    ),
]
Std = Annotated[
    str | None,
    typer.Option(
        help="Standard deviation likewise.", metavar="R,G,B", show_default="the model's own"
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        help="Pictures' size in pixels, where the architecture takes others: 224, or 224,320.",
        metavar="H[,W]",
        show_default="the model's own",
    ),
]
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_reading: ContextVar[Mapping[str, Any]] = ContextVar("reading", default=MappingProxyType({}))


def with_reading(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--classes --mean --std --size`, which `open_model` heeds: how the model it
    opens is read."""

    @functools.wraps(command)
    def run(
        *,
        class_names: Path | None = None,
        mean: str | None = None,
        std: str | None = None,
        size: str | None = None,
        **options: Any,
    ) -> Any:
        given = {
            "classes": None if class_names is None else _names_in(class_names),
            "mean": None if mean is None else _three(mean, "--mean"),
            "std": None if std is None else _three(std, "--std"),
            "size": None if size is None else _sides(size),
        }
        before = _reading.set({name: value for name, value in given.items() if value is not None})
        try:
            return command(**options)
        finally:
            _reading.reset(before)

    flags = {"class_names": ClassNames, "mean": Mean, "std": Std, "size": Size}
    return with_flags(command, run, flags)


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command some of whose parameters are groups of options (dataclasses): the command line
    sees their fields, each declared once, with what the parameter's default has for them."""
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    groups = {name: hints[name] for name in signature.parameters if is_dataclass(hints[name])}

    @functools.wraps(command)
    def run(**options: Any) -> Any:
        made = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**made, **options)

    shown: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            shown.append(parameter.replace(annotation=hints[name], kind=_KEYWORD))
            continue
        own = get_type_hints(groups[name], include_extras=True)
        shown += [
            inspect.Parameter(
                field.name,
                _KEYWORD,
                default=_default(parameter, field),
                annotation=own[field.name],
            )
            for field in fields(groups[name])
        ]
    run.__signature__ = signature.replace(parameters=shown)  # pyright: ignore
    returned = {name: hint for name, hint in hints.items() if name == "return"}
    run.__annotations__ = {p.name: p.annotation for p in shown} | returned
    return run


def _default(parameter: inspect.Parameter, field: Field[Any]) -> Any:
    """That of a field of a group: the parameter's, else its own; one that has neither is asked
    for."""
    if parameter.default is not inspect.Parameter.empty:
        return getattr(parameter.default, field.name)
    return inspect.Parameter.empty if field.default is MISSING else field.default


def with_flags(
    command: Callable[..., Any], run: Callable[..., Any], flags: Mapping[str, Any]
) -> Callable[..., Any]:
    """`run`, which calls `command`, with the command's options as the command line sees them and
    some more (None unless given)."""
    hints = {**get_type_hints(command, include_extras=True), **flags}
    signature = inspect.signature(command)
    own = [p for name, p in signature.parameters.items() if name not in flags]
    more = [inspect.Parameter(n, _KEYWORD, default=None) for n in flags]
    shown = [parameter.replace(annotation=hints[parameter.name]) for parameter in (*own, *more)]
    run.__signature__ = signature.replace(parameters=shown)  # pyright: ignore
    run.__annotations__ = hints
    return run


def reading() -> dict[str, Any]:
    """What `--classes --mean --std --size` say, as options of `load`: only what was given."""
    return dict(_reading.get())


def _names_in(path: Path) -> tuple[str, ...]:
    from seecause.models.checkpoints import read_class_names

    return read_class_names(path)


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


def open_model(
    name: str, *, weights: str | None, device: Device, dtype: Dtype, seed: int, check: bool = True
) -> ImageModel:
    """Load by name. The seed decides random weights."""
    import torch

    from seecause.loading import load

    torch.manual_seed(seed)
    return load(
        name,
        weights=weights,
        device=pick_device(device),
        dtype=dtype.value,
        check=check,
        **reading(),
    )


def names(text: str) -> tuple[str, ...]:
    """Words with commas between them, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


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


def tell_page(out: Path, *, replaced: bool) -> None:
    """Where the page is, and whether it took the place of another."""
    tell_replaced(out, replaced)
    typer.echo(f"page: {out / 'index.html'}")


def method_options(
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
