"""What panels have in common when they answer: classes as bars, maps as layers, and the lines that
do the same without the page."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from seecause.app.jobs import Reply
from seecause.app.state import ActionContext, ServedModel
from seecause.models.base import ImageModel
from seecause.report.overlay import data_uri, heat_layer, number, scale_of
from seecause.target import spread
from seecause.types import wide

SHOWN = 5  # classes


def answers(
    model: ImageModel,
    logits: Tensor,
    whole: Tensor,
    *,
    count: int = SHOWN,
    target: int | None = None,
) -> list[dict[str, Any]]:
    """The `count` most probable classes of the whole picture, in that order, so that rows stay
    where they are while values move; then the target and the two that lead now, if they are not
    among them."""
    values = spread(wide(logits), "prob", sigmoid=model.sigmoid)
    first = whole.topk(min(count, whole.numel())).indices.tolist()
    first += [] if target is None else [target]
    return bars(values, first, lambda places: [model.class_name(place) for place in places])


def bars(
    values: Tensor, first: list[int], names: Callable[[list[int]], list[str]]
) -> list[dict[str, Any]]:
    """Probabilities [n] at the places `first` and at the two that lead now, as bars."""
    best, leading = int(values.argmax()), values.topk(min(2, values.numel())).indices.tolist()
    places = list(dict.fromkeys([*first, *leading]))
    return [
        {
            "class": place,
            "name": name,
            "probability": round(float(values[place]), 6),
            "leads": place == best,
        }
        for place, name in zip(places, names(places), strict=True)
    ]


def heat(
    values: Tensor, *, among: Tensor | None = None, signed: bool | None = None
) -> dict[str, Any]:
    """A map [gh, gw]: its numbers, and how it is drawn; on the scale of some maps, if they are
    given."""
    scale = scale_of(values if among is None else among, signed=signed)
    return {
        "grid": list(values.shape),
        "values": rounded(values),
        "layer": data_uri(heat_layer(values, scale)),
        "low": number(scale.low),
        "high": number(scale.high),
        "signed": scale.signed,
        "clipped": scale.clipped,
    }


def rounded(values: Tensor) -> list[float | None]:
    """Four digits each; None where there is no number, which JSON has no word for."""
    listed = values.detach().double().flatten().tolist()
    return [float(f"{value:.4g}") if abs(value) < 1e300 else None for value in listed]


def counting(
    context: ActionContext, total: int, words: Callable[[int], str]
) -> Callable[[int], None]:
    """`advance(count)`, which tells how much of `total` is done, in words."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        context.progress(done / max(1, total), words(done))

    return advance


def offered(context: ActionContext, name: str, write: Callable[[Path], Path]) -> Reply:
    """What `write(folder)` writes, as a zip file to be downloaded."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write(Path(scratch) / "model")
        context.progress(0.7, "packing it")
        packed = Path(shutil.make_archive(str(folder), "zip", folder))
        size = packed.stat().st_size
        return {"file": context.session.add_file(name, packed), "name": name, "bytes": size}


def opening_lines(context: ActionContext, *pictures: str) -> list[str]:
    """Python that loads the model and the pictures a request speaks of: `images` for one, `images`
    and `others` for two."""
    lines = ["import seecause as sc", "from seecause.data.images import open_picture", ""]
    lines.append(load_line(context.served))
    for variable, id in zip(("images", "others"), pictures, strict=False):
        lines.append(f"{variable} = model.prepare(open_picture({context.picture(id).name!r}))")
    return lines


def load_line(served: ServedModel) -> str:
    """Python that loads a model as the server did, but for the folders of this machine."""
    options = {"weights": served.weights} if served.weights else {}
    options |= dict(served.reading) | ({"classes": "FILE"} if "classes" in served.reading else {})
    return f"model = {call('sc.load', repr(served.spec), **options)}"


def model_words(served: ServedModel) -> list[str]:
    """The same for a command."""
    words = ["--model", served.spec, *(["--weights", served.weights] if served.weights else [])]
    for name, value in served.reading.items():
        words += [f"--{name}", "FILE" if name == "classes" else ",".join(map(str, value))]
    return words


def answer_lines(model: ImageModel) -> list[str]:
    """Python that prints the most probable class of `logits` [C], and how probable it is."""
    chances = "logits.sigmoid()" if model.sigmoid else "logits.softmax(-1)"
    return [f"print(model.class_name(int(logits.argmax())), float({chances}.max()))"]


def class_word(model: ImageModel, index: int) -> str | int:
    """The name of a class, where it is enough to find it again; else its index."""
    name = model.class_name(index)
    alone = [known.casefold() for known in model.classes].count(name.casefold()) == 1
    return name if alone else index


def call(function: str, *given: str, **options: Any) -> str:
    """A call in Python; options are written as they are typed."""
    words = [*given, *(f"{name}={value!r}" for name, value in options.items())]
    return f"{function}({', '.join(words)})"


def command(words: Sequence[str], options: Mapping[str, Any] | None = None) -> str:
    """A line for a shell, every word quoted where it must be; `options` become --option."""
    extra = [f"{name}={_typed(value)}" for name, value in (options or {}).items()]
    every = [*words, *(word for option in extra for word in ("--option", option))]
    return " ".join(shlex.quote(word) for word in every)


def as_script(lines: Sequence[str]) -> Reply:
    """Lines of Python, and the shell's line that runs them: for what has no command of its own."""
    python = "\n".join(lines) + "\n"
    return {"python": python, "command": f"python - <<'END'\n{python}END"}


def _typed(value: Any) -> str:
    """A value as the command line reads it."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
