"""Results as notebooks show them: a piece of HTML, or a matplotlib figure."""

from __future__ import annotations

import io
import sys
from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from PIL import Image

from seecause._pictures import decode_image
from seecause.attribution.result import Attribution, Looks
from seecause.errors import BadOption
from seecause.report.explain_pictures import drawn
from seecause.report.overlay import LONG, is_long, overlay, picture
from seecause.report.page import fragment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 8  # pictures
SIDE = 192  # pixels of the short side in HTML
BYTES = 180_000  # of all pictures of a cell, as text: notebooks keep them, pages have more
QUALITIES = (80, 70, 60, 45, 30, 15)
INCHES = 2.6  # one picture of a figure
Runs = Mapping[str, Attribution]


def notebook_html(runs: Runs) -> str:
    """The first pictures, each beside its maps, with what the model answers below."""
    runs = {method: drawn(run) for method, run in runs.items()}
    first = next(iter(runs.values()))
    cards, count = [], min(len(first), SHOWN)
    most = BYTES // (count * (1 + len(runs)))
    for index in range(count):
        views = [(_small(picture(first.images[index]), most), caption(first, index))]
        for method, run in runs.items():
            views.append((_small(_overlay(run, index), most), map_caption(method, run, index)))
        cards.append((first.name(index), views))
    return fragment(
        "notebook.html.j2",
        cards=cards,
        more=len(first) - len(cards),
        methods=", ".join(runs),
        model=str(first.manifest.get("model", "")),
        random=first.manifest.get("random_weights", False),
    )


def plot(runs: Runs, ax: Axes | None = None, **options: Any) -> Figure:
    """Rows of pictures and their maps; one map into `ax`, where axes are given."""
    runs = {method: drawn(run) for method, run in runs.items()}
    first = next(iter(runs.values()))
    if ax is not None:
        if len(runs) * len(first) != 1:
            raise BadOption(
                "ax", f"{len(runs)} methods, {len(first)} pictures", "one map: att[0].plot(ax=ax)"
            )
        ((method, run),) = runs.items()
        _draw(ax, _overlay(run, 0, **options), map_caption(method, run, 0))
        return cast("Figure", ax.get_figure())
    from matplotlib.figure import Figure

    count, columns = min(len(first), SHOWN), 1 + len(runs)
    if is_long(first.images.shape[-1], first.images.shape[-2]):  # films and sounds, down the page
        high = INCHES * LONG * first.images.shape[-2] / first.images.shape[-1] + 0.35
        figure = Figure(figsize=(INCHES * LONG, high * count * columns), layout="constrained")
        grid = figure.subplots(count * columns, 1, squeeze=False).reshape(count, columns)
    else:
        figure = Figure(figsize=(INCHES * columns, (INCHES + 0.35) * count), layout="constrained")
        grid = figure.subplots(count, columns, squeeze=False)
    for index in range(count):
        _draw(grid[index][0], picture(first.images[index]), caption(first, index))
        for axes, (method, run) in zip(grid[index][1:], runs.items(), strict=True):
            _draw(axes, _overlay(run, index, **options), map_caption(method, run, index))
    return figure


def show(result: Looks) -> None:
    """In a notebook below the cell, else in a window."""
    if "IPython" in sys.modules:
        from IPython import get_ipython  # pyright: ignore[reportMissingImports]
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        if get_ipython() is not None:
            display(result)
            return
    buffer = io.BytesIO()
    result.plot().savefig(buffer, format="png", dpi=110)
    decode_image(buffer.getvalue(), "the figure").show()


def caption(run: Attribution, index: int) -> str:
    """What the model answers."""
    if not run.answers:
        return run.name(index)
    best = run.answers[index][0]
    return f"{best.name}, {best.probability:.2f}"


def map_caption(method: str, run: Attribution, index: int) -> str:
    """The method, and the class of its map."""
    return f"{method}: {run.labels[index]}" if run.labels else method


def _overlay(run: Attribution, index: int, **options: Any) -> Image.Image:
    return overlay(run.images[index], run.pixels()[index], **options)


def _draw(axes: Axes, image: Image.Image, title: str) -> None:
    axes.imshow(image)
    axes.set_title(title, fontsize=8)
    axes.set_axis_off()


def _small(image: Image.Image, most: int) -> str:
    """As a JPEG inside HTML, of `most` characters or a little more."""
    factor = SIDE / min(image.size)
    image = image.resize((round(image.width * factor), round(image.height * factor)))
    content = b""
    for quality in QUALITIES:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        content = b64encode(buffer.getvalue())
        if len(content) <= most:
            break
    return f"data:image/jpeg;base64,{content.decode()}"
