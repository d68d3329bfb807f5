"""Common parts of commands: options, result folders, printing and progress."""

from __future__ import annotations

import ast
import gc
import json as json_text
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt as Seed, PositiveInt as Count
from cyclopts.validators import Number

from seecause.errors import BadOption, NotDefined, printable
from seecause.options import accepts

if TYPE_CHECKING:
    from seecause.data.dataset import SkippedImage
    from seecause.models.base import ImageModel
    from seecause.report import Section

Facts = dict[str, Any]  # plain values by name: a manifest, or options
MANIFEST = "manifest.json"
EVERY = 10.0  # seconds between lines of progress without a terminal
INCOMPLETE, FAILED = 1, 3  # exit codes: something is missing; a limit is not met
WRITING = "Writing and printing"  # a panel of the help
INPUT: Facts = {"size": int | tuple[int, int], "output": int | str}
INPUT |= dict.fromkeys(("mean", "std"), tuple[float, float, float])
INPUT |= dict.fromkeys(("trust_remote_code", "exif", "alpha", "squash"), bool)
INPUT |= {"crop": float, "interpolation": str}
VIT, BIASED = "builtin:critters-vit", "builtin:critters-biased"
TRAIN, TEST = "critters:certified:train", "critters:balanced:test"

ModelName = Annotated[
    str,
    Parameter(
        name=["--model", "-m"],
        group="Model",
        help="builtin:NAME, timm:NAME, hf:NAME-OR-FOLDER, torchvision:NAME, open_clip:NAME/TAG, a"
        " folder that timm, transformers, PEFT or seecause wrote, or a function that returns your"
        " own module: FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION.",
    ),
]
Data = Annotated[
    str,
    Parameter(
        help="folder:PATH, critters:REGIME[:SPLIT], waterbirds:PATH, imagenet9:PATH[:VARIANT],"
        " pairs:WITH:WITHOUT and others (`seecause list datasets`)."
    ),
]
Limit = Annotated[
    Count, Parameter(help="Read at most this many images of a dataset, spread evenly.")
]
Out = Annotated[
    Path,
    Parameter(
        name=["--out", "-o"],
        group=WRITING,
        help="Folder for the results. It appears when everything is finished.",
    ),
]
Values = Annotated[list[str] | None, Parameter(consume_multiple=False)]  # KEY=VALUE, repeated
Workers = Annotated[
    int | None,
    Parameter(
        validator=Number(gte=0),
        help="Processes that read images and draw; they do not change the results. 0: one process"
        " does everything. Default: one for each core, and 0 for few images.",
    ),
]
Share = Annotated[float | None, Parameter(validator=Number(gte=0, lte=1))]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
MasksFrom = Annotated[
    str | None,
    Parameter(
        help="Where object masks come from: another network (timm:NAME, hf:NAME, builtin:NAME, a"
        " folder), given (masks of the data), own (the model's own maps; do not rely on them) or"
        " discovered. Default: masks or pairs of the data. If there are none, heads score and heads"
        " prune search for masks, which takes minutes."
    ),
]


@Parameter(name="*", group="Model")
@dataclass(frozen=True, kw_only=True)
class Where:
    """Device, precision and seed of a run.

    Attributes:
        device: Where to compute; auto takes the GPU if there is one.
        dtype: Precision of the model. Default: float32; for a vision-language model on a GPU, the
            precision of its weights.
        seed: Seed of all random numbers.
    """

    device: Device = "auto"
    dtype: Dtype | None = None
    seed: Seed = 0


@Parameter(name="*", group="Model")
@dataclass(frozen=True, kw_only=True)
class Trusting(Where):
    """Where a model runs, and whether code of its repository does.

    Attributes:
        trust_remote_code: Allow the code in the model's repository to run.
    """

    trust_remote_code: bool = False


@Parameter(name="*", group="Model")
@dataclass(frozen=True, kw_only=True)
class Reading(Where):
    """How a model is loaded, and where it runs.

    Attributes:
        weights: Your checkpoint (.pth, .ckpt, .safetensors; any number of classes) or an adapter
            folder instead of the pretrained weights, or 'random'.
        classes: A file with class names in the model's order, one on each line or as JSON. For
            zero-shot CLIP also imagenet: the names and prompts it was published with.
        input: How images are prepared, if the model's own values are wrong: a FILE (a timm config,
            the folder of a transformers processor, FILE.py:FUNCTION that returns a transform),
            mean=R,G,B, std=R,G,B, size=H[,W], crop=SHARE, interpolation=NAME, squash=true,
            exif=true (apply EXIF rotation), alpha=true (transparency on white); repeat for more.
            output=INDEX picks one of a module's outputs. trust_remote_code=true runs the code of a
            repository.
    """

    weights: str | None = None
    classes: Path | None = None
    input: Values = None

    def options(self) -> Facts:
        """Options of `sc.load` beside weights, device and dtype: only what was given."""
        files = [word for word in self.input or () if "=" not in word]
        options = by_name([w for w in self.input or () if "=" in w], "--input").pop("", {})
        for name in options.keys() & {"mean", "std"}:
            options[name] = (options[name],) * 3 if accepts(float, options[name]) else options[name]
        for name, value in options.items():
            if name not in INPUT or not accepts(INPUT[name], value):
                expected = (
                    "a FILE, mean=R,G,B, std=R,G,B, size=H[,W], crop=SHARE, interpolation=NAME,"
                    " squash=true, exif=true, alpha=true, output=INDEX or trust_remote_code=true"
                )
                raise BadOption("--input", f"{name}={value}", expected)
        for name in ("exif", "alpha"):  # workers read images, too
            if options.pop(name, False):
                os.environ[f"SEECAUSE_{name.upper()}"] = "1"
        if "interpolation" in options:
            options["filter"] = options.pop("interpolation")
        steps = {n: options.pop(n) for n in ("crop", "squash", "filter") if n in options}
        if files:
            from seecause.loading import own_function
            from seecause.models.preprocess import from_record, preprocess_of

            transform = own_function(files[-1])
            base = preprocess_of(transform() if transform else files[-1])
            base = base if isinstance(base, dict) else base.record()
            steps = from_record({**base, **steps}).record()
        if steps:
            options["preprocess"] = steps
        if self.classes is not None:
            from seecause.loading import IMAGENET, read_class_names

            word = str(self.classes) == IMAGENET and not self.classes.exists()
            options["classes"] = IMAGENET if word else read_class_names(self.classes)
        return options

    def load(
        self,
        model: str,
        output: Printing,
        *,
        check: bool = True,
    ) -> ImageModel:
        """Load a model, and say how its images are prepared; the seed decides random weights."""
        options = self.options()  # errors in them are reported before anything is loaded
        with loading(model, quiet=output.quiet):
            import torch

            from seecause.loading import load

            torch.manual_seed(self.seed)
            if model.partition(":")[0] not in ("builtin", "timm", "torchvision", "open_clip"):
                only_downloads_have_bars()
            options |= {"device": pick_device(self.device), "dtype": self.dtype or "float32"}
            opened = load(model, weights=self.weights, check=check, **options)
        if check:
            output.say(f"images: {opened.preprocess.sentence()}")
        return opened


@Parameter(name="*", group=WRITING)
@dataclass(frozen=True, kw_only=True)
class Printing:
    """How a command prints its result.

    Attributes:
        quiet: Print nothing but errors.
        json: Print one JSON object, for programs, instead of text.
    """

    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False
    json: bool = False

    @property
    def silent(self) -> bool:
        return self.quiet or self.json

    def say(self, *lines: str) -> None:
        """Print lines, unless only JSON or nothing is asked for."""
        for line in () if self.silent else lines:
            print(printable(line))

    def progress(self, what: str, total: int) -> Any:
        """A progress bar, as the library's `progress` arguments take it."""
        return counting(what, total, quiet=self.quiet)

    def finish(
        self,
        facts: Mapping[str, Any],
        lines: Iterable[str] = (),
        *,
        skipped: Sequence[SkippedImage] = (),
        code: int = 0,
    ) -> int:
        """Print the result, as lines or as JSON; returns the exit code, 1 if images were
        skipped."""
        page = [f"page: {Path(facts['out'], facts['page'])}"] if "page" in facts else []
        self.say(*lines, *page)
        if self.json:
            print(json_text.dumps(plain(facts), indent=2))
        return code or (INCOMPLETE if skipped else 0)


@Parameter(name="*", group=WRITING)
@dataclass(frozen=True, kw_only=True)
class Output(Printing):
    """How a command prints its result, and whether it may overwrite files in --out.

    Attributes:
        overwrite: Write into --out even if it contains other files; files of the same names are
            replaced.
    """

    overwrite: bool = False

    def check(self, out: Path) -> None:
        """Raises, before any work is done, if the folder cannot be written."""
        if check_out(out, overwrite=self.overwrite):
            self.say(f"the earlier result in {out} is replaced at the end")

    def write(
        self,
        out: Path,
        manifest: Facts,
        title: str,
        sections: Sequence[Section],
        lines: Iterable[str],
        *,
        lead: str = "",
        tables: Mapping[str, str] | None = None,
        skipped: Sequence[SkippedImage] = (),
        more: Callable[[Path], object] = lambda folder: None,
        code: int = 0,
    ) -> int:
        """Write a folder with a page, tables by name, and the files of `more`; then `finish`."""
        from seecause.report import write_page

        manifest = {"out": str(out), "page": "index.html", **manifest}
        manifest["skipped"] = [asdict(image) for image in skipped]
        with result_folder(out, manifest, overwrite=self.overwrite) as folder:
            write_page(folder / "index.html", title, sections, lead=lead)
            for name, text in (tables or {}).items():
                (folder / name).write_text(text, encoding="utf-8")
            more(folder)
        return self.finish(manifest, lines, skipped=skipped, code=code)


# Values of options.


def value_of(text: str) -> Any:
    """A number, tuple, True, False or None where the text reads as one, else the text itself."""
    try:  # `none` is a word: select=none
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


def by_name(words: Sequence[str] | None, flag: str = "--option") -> dict[str, Facts]:
    """Options by the name before the dot ("" if there is none): `[name.]key=value`."""
    options: dict[str, Facts] = {}
    for word in words or ():
        path, equals, text = word.partition("=")
        name, _, key = path.rpartition(".")
        if not equals or not key:
            expected = "[NAME.]KEY=VALUE, such as caap.tail=patched or steps=16"
            raise BadOption(flag, word, expected)
        options.setdefault(name, {})[key] = value_of(text)
    return options


def refuse(options: Collection[str], known: str) -> None:
    """Raises if options remain after the known ones were taken."""
    if options:
        raise BadOption("--option", ", ".join(options), known)


def names(text: str) -> tuple[str, ...]:
    """Words with commas between them, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def whole_numbers(flag: str, text: str) -> list[int]:
    """Whole numbers with commas between them."""
    words = names(text)
    if not all(word.isdecimal() for word in words):
        raise BadOption(flag, text, "whole numbers with commas between them, such as 1,3")
    return [int(word) for word in words]


def check_methods(methods: Sequence[str]) -> None:
    """Refuse unknown attribution methods before a model is loaded."""
    from seecause.attribution.registry import find

    for name in methods:
        with suppress(NotDefined):  # it may be for the kind of model that is loaded
            find(name)


def pick_device(device: Device) -> str:
    """The torch device; asking for a GPU that is not there is an error, not a slow run."""
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        expected = "a GPU that torch can use; here there is none, so give --device cpu"
        raise BadOption("--device", device, expected)
    if device == "cpu" or not available:
        return "cpu"
    rank = os.environ.get("LOCAL_RANK")  # each process of torchrun has its own
    return "cuda" if rank is None else f"cuda:{rank}"


def only_downloads_have_bars() -> None:
    """Switch off transformers' bars over weights on the disk, but not those of downloads."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    silent = are_progress_bars_disabled()
    logging.disable_progress_bar()  # downloads' as well
    if not silent:
        enable_progress_bars()


def warn_outside(model: str, images: Sequence[str], *, suggest: str) -> None:
    """Warn if a model of Critters is used for other images."""
    if not all(image.startswith("critters:") for image in images):
        tell(
            f"warning: {model} knows only Critters images, so its predictions for others mean"
            f" nothing. For photos give another --model, such as {suggest}"
        )


# Folders of results, which are complete or absent.


def check_out(out: Path, *, overwrite: bool = False) -> bool:
    """Raises, before any work is done, if `out` cannot be written or contains other files. Returns
    whether it contains an earlier result, which the new one will replace."""
    from seecause.files import recover_folder

    recover_folder(out)  # after a command that was killed
    there = out.absolute()
    nearest = next(place for place in (there, *there.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise BadOption("--out", str(out), f"a folder that can be written; {nearest} is not")
    occupied = out.is_dir() and any(out.iterdir())
    ours = occupied and _is_ours(out)
    if occupied and not ours and not overwrite:
        expected = (
            "a new folder, an empty one, or one that holds only results of seecause; give"
            " --overwrite to write into it"
        )
        raise BadOption("--out", str(out), expected)
    return ours


@contextmanager
def result_folder(out: Path, manifest: Facts, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when the block ends well. The manifest, in its
    final state and with the list of all files, is added to it.

    Earlier results of this package are replaced as a whole. In a folder with other files,
    `overwrite` replaces files of the same names and keeps the rest.
    """
    from seecause.files import draft_folder, replace_folder, write_json

    check_out(out, overwrite=overwrite)
    beside = out.is_dir() and any(out.iterdir()) and not _is_ours(out)
    with draft_folder(out) as draft:
        yield draft
        files = [path for path in draft.rglob("*") if path.is_file()]
        listed = sorted(str(path.relative_to(draft)) for path in files)
        write_json(draft / MANIFEST, {**plain(manifest), "files": [*listed, MANIFEST]})
        if beside:
            shutil.copytree(draft, out, dirs_exist_ok=True)
        else:
            replace_folder(draft, out)


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds nothing but the files that its manifest lists."""
    try:
        listed = json_text.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()} <= set(listed)


def plain(value: Any) -> Any:
    """A value as JSON allows it: NaN and infinity become null, paths and other objects text."""
    text = json_text.dumps(value, default=str)
    return json_text.loads(text, parse_constant=lambda name: None)


def lead_of(model: ImageModel, data: Any) -> str:
    """The sentence under the title of a page about labelled images."""
    lead = f"{len(data)} images of {data.name}."
    lead += f" {len(data.skipped)} could not be read." if data.skipped else ""
    random = " The model has random weights: its predictions mean nothing."
    return lead + (random if model.random_weights else "")


# Messages and progress on standard error.


def tell(line: str) -> None:
    """Print a line to standard error."""
    print(printable(line), file=sys.stderr)


@contextmanager
def loading(what: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner on terminals while libraries are imported and weights are read. Garbage collection
    is paused meanwhile, which saves a sixth of the time."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    gc.disable()
    try:
        with console.status(f"loading {what}"):
            yield
    finally:
        gc.enable()


@contextmanager
def counting(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Yields `advance(done, note, total)`: a bar on terminals; in logs a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console, count, last = Console(stderr=True), 0, time.monotonic()
    began = last
    bar = Progress(
        "{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[note]}",
        TimeRemainingColumn(), console=console, transient=True, speed_estimate_period=600,
        disable=quiet or not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task(what, total=total, note="")

        def advance(done: int, note: str = "", total: int = total) -> None:
            nonlocal count, last
            count += done
            bar.update(task, advance=done, total=total, note=note)
            if bar.disable and not quiet and time.monotonic() - last >= EVERY:
                last = time.monotonic()
                left = (last - began) / max(1, count) * (total - count)
                tell(f"{what}: {count} of {total}, about {left:.0f} s left {note}".rstrip())

        yield advance


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Print rows under the titles of their columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    shown = Table(
        Column(titles[0], no_wrap=True), *titles[1:], title=title, box=box.SIMPLE_HEAD,
        pad_edge=False, title_justify="left", title_style="bold", header_style="dim",
        show_header=any(titles),
    )  # fmt: skip
    for row in rows:
        shown.add_row(*row)
    Console(highlight=False).print(shown)
