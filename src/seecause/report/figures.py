"""Maps drawn over images, and charts.

Only the drawing is scaled; maps themselves are never changed. A map of one sign is drawn from its
low to its high values (dark to bright, and more opaque). A map with both signs, and every map of a
method whose values speak for and against a class, diverges around zero (blue against, red for). The
range that is drawn leaves out the most extreme values, so that one patch cannot darken all others.
A map that is nearly the same everywhere is drawn pale.

Charts are drawn by matplotlib as inline SVG, in the colours of the page, light or dark.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from markupsafe import Markup
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageOps
from torch import Tensor

from seecause.data.dataset import to_pil
from seecause.errors import BadImage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SKIPPED = 0.22  # share of a diverging colormap on either side of zero that overlays do not use
MIN_DISPLAY = 384  # pixels of the long side: smaller images are enlarged
PAGE_SIDE = 512  # pixels of the short side of an image on a page, at most
SMALL = 160  # pixels of the short side
THUMBNAIL = 192  # pixels across
ALPHA = 0.75  # opacity of the strongest values of an overlay
FLAT = 1e-3  # a map that varies by less, relative to its values, is drawn without colour
PALE = 0.1  # a map that varies by less than this share of its values is drawn pale
INK, PAPER, MARK = "#26262b", "#ffffff", "#40e0ff"


@dataclass(frozen=True)
class Scale:
    """The range of values of a drawing. `signed` drawings are symmetric around zero."""

    low: float
    high: float
    signed: bool
    paleness: float = 0.0  # 0 for full colour, near 1 for a map that is nearly the same everywhere

    @property
    def flat(self) -> bool:
        return self.high <= self.low

    @property
    def colormap(self) -> str:
        """The name of a colormap of matplotlib."""
        return "RdBu_r" if self.signed else "inferno"

    @property
    def ends(self) -> tuple[str, str]:
        return number(self.low, 4), number(self.high, 4)

    @property
    def remark(self) -> str:
        """A remark about a map that is pale or without colour."""
        if self.flat:
            return "no differences: the same everywhere"
        words = f"pale: nearly the same everywhere, or weak (at most {self.ends[1]})"
        return words if self.paleness else ""

    def unit(self, heat: Tensor) -> Tensor:
        """Values as positions in the colormap, 0 to 1."""
        if self.flat:
            return torch.full_like(heat, 0.5 if self.signed else 0.0)
        return ((heat - self.low) / (self.high - self.low)).clamp(0, 1)


def scale_of(*heats: Tensor, signed: bool | None = None) -> Scale:
    """One scale for some maps of any shape.

    Args:
        *heats: Maps that are drawn on the same scale.
        signed: True for methods whose values speak for and against a class; None decides by
            whether values of both signs occur.
    """
    values = torch.cat([heat.detach().double().flatten().cpu() for heat in heats])
    least, most = float(values.min()), float(values.max())
    signed = least < 0 < most if signed is None else signed
    if signed:
        if most - least <= FLAT * max(abs(least), abs(most)):
            return Scale(least, least, True)
        reach = float(values.abs().quantile(0.995))
        return Scale(-reach, reach, True)
    low, high = values.quantile(torch.tensor([0.01, 0.995], dtype=torch.float64)).tolist()
    largest = max(abs(low), abs(high))
    if high - low <= FLAT * largest:
        return Scale(low, low, False)
    return Scale(low, high, False, max(0.0, 1 - (high - low) / (PALE * largest)))


def overlay(image: Tensor, heat: Tensor, *, signed: bool | None = None) -> Image.Image:
    """Draw a map over an image.

    Args:
        image: Raw pixels [3, H, W] in [0, 1].
        heat: A map [h, w] of any resolution.
        signed: Whether the map diverges around zero; None decides by its values.
    """
    scale = scale_of(heat, signed=signed)
    shown = display_image(image)
    size = shown.size[::-1]
    enlarged = F.interpolate(heat[None, None].float().cpu(), size=size, mode="bilinear")[0, 0]
    calm = Image.blend(shown, shown.convert("L").convert("RGB"), 0.5).convert("RGBA")
    return Image.alpha_composite(calm, heat_layer(enlarged, scale, alpha=ALPHA)).convert("RGB")


def display_image(image: Tensor) -> Image.Image:
    """Raw pixels [3, H, W] in [0, 1] as an image, enlarged by a whole factor if it is small."""
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        what = f"tensor of shape {list(image.shape)}"
        raise BadImage(what, "expected raw pixels [3, H, W] in [0, 1]", "see model.preprocess.raw")
    shown = to_pil(image.expand(3, -1, -1))
    factor = -(-MIN_DISPLAY // max(shown.size))
    if factor == 1:
        return shown
    size = (shown.width * factor, shown.height * factor)
    return shown.resize(size, Image.Resampling.LANCZOS)


def page_image(image: Tensor) -> Image.Image:
    """Raw pixels [3, H, W] in [0, 1] as large as pages show them; the browser enlarges small
    ones."""
    shown = to_pil(image.expand(3, -1, -1))
    factor = PAGE_SIDE / min(shown.size)
    if factor >= 1:
        return shown
    size = (round(shown.width * factor), round(shown.height * factor))
    return shown.resize(size, Image.Resampling.LANCZOS)


def heat_layer(heat: Tensor, scale: Scale, *, alpha: float = 1.0) -> Image.Image:
    """A map [h, w] as an RGBA image of the same resolution, opaque where it is strong.

    The colours around zero of a diverging map are left out: over a dark image they look like fog.
    """
    from matplotlib import colormaps

    unit = scale.unit(heat.detach().float().cpu())
    strength = unit
    if scale.signed:
        aside = 2 * unit - 1
        strength = aside.abs()
        unit = unit + SKIPPED * (1 - strength) * aside.sign()
    rgba = colormaps[scale.colormap](unit.numpy(), bytes=True).copy()
    strength = (1 - scale.paleness) * strength.numpy()
    rgba[..., 3] = (alpha * strength**0.65 * 255).round()
    return Image.fromarray(rgba)


@cache
def colours(colormap: str) -> np.ndarray:
    """The 256 colours of a colormap from low to high, [256, 3] uint8."""
    from matplotlib import colormaps

    return colormaps[colormap](np.arange(256), bytes=True)[:, :3].copy()


def outline_layer(
    size: tuple[int, int],
    region: Tensor,
    boxes: Mapping[str, Sequence[float]] | None = None,
    *,
    colour: str = MARK,
) -> Image.Image:
    """A transparent layer of width x height with a line around the cells of `region` [h, w], and
    thin named boxes (x0, y0, x1, y1 in cells of the region)."""
    layer = Image.new("RGBA", size)
    draw = ImageDraw.Draw(layer)
    across, down = size[0] / region.shape[1], size[1] / region.shape[0]
    for name, (x0, y0, x1, y1) in (boxes or {}).items():
        left, top = x0 * across, y0 * down
        draw.rectangle((left, top, max(x0, x1) * across, max(y0, y1) * down), outline=PAPER)
        draw.text((left + 4, top + 2), name, PAPER, font_size=15, stroke_width=2, stroke_fill=INK)
    inside = Image.fromarray((region.cpu() > 0).numpy()).resize(size, Image.Resampling.NEAREST)
    wide = max(3, min(size) // 120)
    framed = ImageOps.expand(inside.convert("L"), 2 * wide, fill=0)  # edges of the image, too
    for line, depth in ((INK, wide + 1), (colour, wide - 1)):
        core = framed.filter(ImageFilter.MinFilter(2 * depth + 1))
        edge = ImageOps.crop(ImageChops.subtract(framed, core), 2 * wide)
        layer.paste(Image.new("RGBA", size, line), mask=edge)
    return layer


def side_by_side(images: Sequence[Image.Image], gap: int = 16) -> Image.Image:
    """Images of one size in a row on white; long ones, such as films, one below the other."""
    wide, high = images[0].size
    down = wide >= 4 * high
    step = (0, high + gap) if down else (wide + gap, 0)
    last = len(images) - 1
    canvas = Image.new("RGB", (wide + last * step[0], high + last * step[1]), PAPER)
    for place, image in enumerate(images):
        canvas.paste(image, (place * step[0], place * step[1]))
    return canvas


def save_photo(image: Image.Image, file: BinaryIO | Path) -> None:
    """Write a JPEG, in which small images keep their single pixels."""
    small = min(image.size) < SMALL
    options: dict[str, Any] = {"quality": 95, "subsampling": 0} if small else {"quality": 85}
    image.convert("RGB").save(file, "JPEG", **options)


def data_uri(image: Image.Image, *, photo: bool = False) -> str:
    """An image as a data URI: PNG, or JPEG for photos."""
    buffer = io.BytesIO()
    if photo:
        save_photo(image, buffer)
    else:
        image.save(buffer, "PNG", optimize=True)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{'jpeg' if photo else 'png'};base64,{encoded}"


def thumbnail(raw: Tensor) -> str:
    """Raw pixels [3, H, W] as a small photo in a data URI."""
    size = (THUMBNAIL, round(THUMBNAIL * raw.shape[1] / raw.shape[2]))
    return data_uri(display_image(raw.float().clamp(0, 1).cpu()).resize(size), photo=True)


def figure_image(figure: Figure) -> Image.Image:
    """A figure of matplotlib as an image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def number(value: float, digits: int = 3) -> str:
    """A number with so many significant digits.

    >>> number(0.000012345), number(1234.5)
    ('1.23e-5', '1.23e3')
    """
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e")


def fixed(value: float, digits: int = 3, sign: str = "") -> str:
    """A number with so many decimals, never minus zero; a dash for NaN. `sign` "+" writes a plus.

    >>> fixed(-0.0001), fixed(0.5, 2, "+"), fixed(float("nan"))
    ('0.000', '+0.50', '-')
    """
    return "-" if value != value else f"{value:{sign}z.{digits}f}"


# Charts. Okabe and Ito's colours can be told apart by the colour-blind; grey is for controls.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5c2e")
GREY = "#777777"
MANY = 32  # more lines have no legend
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))  # readable without colour
TEXT = "#62626c"  # becomes the page's own text colour
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE = {  # of charts, in matplotlib's words
    **dict.fromkeys(INKED, TEXT),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.25, "lines.linewidth": 1.8},
    **{"svg.fonttype": "none", "font.size": 11},
}


@dataclass(frozen=True)
class Line:
    """A line of a chart, with a band of errors where they are known."""

    x: Sequence[Any]
    y: Sequence[float]
    error: Sequence[float] = ()
    control: bool = False


def mean_line(rows: Tensor, x: Sequence[float] | None = None, *, control: bool = False) -> Line:
    """The mean of rows [N, P] with its standard error, along `x` or their indices."""
    along = list(range(rows.shape[1])) if x is None else x
    error = (rows.std(dim=0) / len(rows) ** 0.5).tolist() if len(rows) > 1 else ()
    return Line(along, rows.mean(dim=0).tolist(), error, control)


def chart(
    lines: Mapping[str, Line],
    *,
    title: str,
    x: str,
    y: str,
    kind: Literal["lines", "bars", "radar", "heat"] = "lines",
) -> Markup:
    """Lines by name on one pair of axes, as inline SVG; controls are grey and dashed. The y axis
    begins at zero or below. As bars or a radar, places along x are names; a heat map has a row for
    each line."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with rc_context({**cast(dict[Any, Any], STYLE), "svg.hashsalt": title}):
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        axes = figure.add_subplot(xlabel=x, ylabel=y, polar=kind == "radar")
        if kind == "heat":
            axes.grid(visible=False)
            rows = axes.imshow(
                np.asarray([line.y for line in lines.values()], float), aspect="auto"
            )
            figure.colorbar(rows, label=y)
            axes.set_ylabel("")
        styles = zip(cycle(COLOURS), cycle(DASHES), strict=False)
        for name, line in lines.items():
            colour, dash = (GREY, DASHES[1]) if line.control else next(styles)
            values = np.asarray(line.y, float)
            along: Any = line.x
            if kind == "heat":
                continue
            if kind != "lines":
                along = np.arange(len(line.x)) * (2 * np.pi / len(line.x) if kind == "radar" else 1)
                axes.set_xticks(along, line.x)
            if kind == "bars":
                wide = 0.8 / len(lines)
                offset = ([*lines].index(name) - len(lines) / 2 + 0.5) * wide
                axes.bar(along + offset, values, wide, yerr=line.error, color=colour, label=name)
                continue
            if kind == "radar":
                along, values = np.append(along, 0.0), np.append(values, values[:1])
            axes.plot(along, values, color=colour, linestyle=dash, label=name)
            if len(line.error) and kind == "lines":
                error = np.nan_to_num(np.asarray(line.error, float))
                band = (values - error, values + error)
                axes.fill_between(line.x, *band, color=colour, alpha=0.15, linewidth=0)
        low, high = axes.get_ylim()
        if kind != "heat":
            high, least = high if high > 0.06 else 1.0, -0.04 if kind == "lines" else 0.0
            axes.set_ylim(low if low < -0.02 else least * high, high)  # no line is on the axis
        if any(isinstance(place, str) for line in lines.values() for place in line.x):
            axes.tick_params(axis="x", rotation=60)
        if 1 < len(lines) <= MANY and kind != "heat":
            figure.legend(loc="outside lower center", ncols=3 if max(map(len, lines)) < 18 else 2)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(TEXT, "currentColor")
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{Markup.escape(title)}"', 1)
    drawn = Markup('<figure class="chart"><figcaption>{}</figcaption>{}</figure>')
    return drawn.format(title, Markup(svg))


def charts(drawn: Sequence[Markup]) -> Markup:
    """Charts side by side."""
    return Markup('<div class="charts">{}</div>').format(Markup("").join(drawn))
