"""Maps drawn over images, and charts.

Only the drawing is scaled; maps themselves are never changed. A map of one sign is drawn from its
low to its high values (dark to bright, and more opaque). A map with both signs, and every map of a
method whose values speak for and against a class, diverges around zero (blue against, red for). The
range drawn leaves out the outermost values, so that one patch cannot darken all others; the legend
names it, and `Scale.clipped` says where the values end. A map that is nearly the same everywhere is
drawn pale.

Charts are drawn by matplotlib as inline SVG, in the colours of the page, light or dark.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from markupsafe import Markup
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont, ImageOps
from torch import Tensor

from seecause.data.images import to_pil
from seecause.errors import BadImage, UnknownName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEQUENTIAL, DIVERGING = "inferno", "RdBu_r"
PALE = 0.22  # share of a diverging colormap, on either side of zero, that overlays leave out
MIN_DISPLAY = 384  # pixels of the short side: smaller images are enlarged
THUMBNAIL = 192  # pixels across
LONG = 4  # an image this many times as wide as high is shown in a row of its own
# a map that varies by less, relative to its values, is rounding: it is drawn without colour
_FLAT = 1e-3
_PALE = 0.1  # one that varies by less than this share of its values is drawn pale, in proportion
_SLIGHT = 1e-5  # and so is one of both signs that stays below this
_CLIPPED = 0.05  # values beyond the range by this share of it are reported
INK, PAPER, MARK = "#26262b", "#ffffff", "#40e0ff"


@dataclass(frozen=True)
class Scale:
    """The values a drawing runs between. `signed` drawings are symmetric around zero."""

    low: float
    high: float
    signed: bool
    colormap: str
    paleness: float = 0.0  # 0 for full colour, near 1 for a map that is nearly the same everywhere
    extremes: tuple[float, float] | None = None  # the lowest and highest value, drawn or not

    @property
    def flat(self) -> bool:
        return self.high <= self.low

    @property
    def ends(self) -> tuple[str, str]:
        """The two ends as text, with as many digits as tell them apart."""
        return self._text(self.low), self._text(self.high)

    @property
    def clipped(self) -> str:
        """Where the values end, if they go far beyond the range that is drawn."""
        if self.extremes is None or self.flat:
            return ""
        (lowest, highest), slack = self.extremes, _CLIPPED * (self.high - self.low)
        if lowest >= self.low - slack and highest <= self.high + slack:
            return ""
        written = self._text(lowest), self._text(highest)
        return "" if written == self.ends else f"clipped: values run from {' to '.join(written)}"

    @property
    def remark(self) -> str:
        """What a reader must know about a map that is pale or without colour."""
        if self.flat:
            return "no differences: the same everywhere"
        if not self.paleness:
            return ""
        if self.signed:
            return f"pale: no value is beyond {number(self.high)}"
        share = (self.high - self.low) / max(abs(self.low), abs(self.high))
        return f"pale: nearly the same everywhere, values differ by {100 * share:.2g} %"

    def unit(self, heat: Tensor) -> Tensor:
        """Values as positions in the colormap, 0 to 1."""
        if self.flat:
            return torch.full_like(heat, 0.5 if self.signed else 0.0)
        return ((heat - self.low) / (self.high - self.low)).clamp(0, 1)

    def strength(self, heat: Tensor) -> Tensor:
        """How opaque a value is, 0 to 1: small values leave the image visible."""
        unit = self.unit(heat)
        return (1 - self.paleness) * ((2 * unit - 1).abs() if self.signed else unit)

    def _text(self, value: float) -> str:
        largest, apart = max(abs(self.low), abs(self.high)), self.high - self.low
        digits = 2 + math.floor(math.log10(largest / apart)) if apart > 0 else 3
        return number(value, max(3, digits))


def scale_of(*heats: Tensor, signed: bool | None = None, colormap: str | None = None) -> Scale:
    """One scale for some maps of any shape.

    Args:
        *heats: Maps that are drawn on the same scale.
        signed: True for methods whose values speak for and against a class; None decides by
            whether values of both signs occur.
        colormap: A colormap of matplotlib.

    Raises:
        UnknownName: If matplotlib has no such colormap.
    """
    from matplotlib import colormaps

    values = torch.cat([heat.detach().double().flatten().cpu() for heat in heats])
    extremes = float(values.min()), float(values.max())
    signed = extremes[0] < 0 < extremes[1] if signed is None else signed
    colormap = colormap or (DIVERGING if signed else SEQUENTIAL)
    if colormap not in colormaps:
        raise UnknownName("colormap", colormap, colormaps)
    if signed:
        if extremes[1] - extremes[0] <= _FLAT * max(map(abs, extremes)):
            return Scale(extremes[0], extremes[0], True, colormap)
        reach = float(values.abs().quantile(0.995))
        return Scale(-reach, reach, True, colormap, max(0.0, 1 - reach / _SLIGHT), extremes)
    ends = values.quantile(torch.tensor([0.01, 0.995], dtype=torch.float64))
    low, high = map(float, ends)
    largest = max(abs(low), abs(high))
    if high - low <= _FLAT * largest:
        return Scale(low, low, False, colormap)
    paleness = max(0.0, 1 - (high - low) / (_PALE * largest))
    return Scale(low, high, False, colormap, paleness, extremes)


def overlay(
    image: Tensor,
    heat: Tensor,
    *,
    alpha: float = 0.75,
    colormap: str | None = None,
    signed: bool | None = None,
    scale: Scale | None = None,
) -> Image.Image:
    """Draw a map over an image.

    Args:
        image: Raw pixels [3, H, W] in [0, 1].
        heat: A map [h, w] of any resolution.
        alpha: Opacity of the strongest values.
        colormap: A colormap of matplotlib.
        signed: Whether the map diverges around zero; None decides by its values.
        scale: The range to draw, instead of the map's own.
    """
    scale = scale or scale_of(heat, signed=signed, colormap=colormap)
    shown = display_image(image)
    size = shown.size[::-1]
    enlarged = F.interpolate(heat[None, None].float().cpu(), size=size, mode="bilinear")[0, 0]
    calm = Image.blend(shown, shown.convert("L").convert("RGB"), 0.5).convert("RGBA")
    return Image.alpha_composite(calm, heat_layer(enlarged, scale, alpha=alpha)).convert("RGB")


def display_image(image: Tensor) -> Image.Image:
    """Raw pixels [3, H, W] in [0, 1] as an image, enlarged by a whole factor if it is small."""
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        what = f"tensor of shape {list(image.shape)}"
        raise BadImage(what, "expected raw pixels [3, H, W] in [0, 1]", "see model.preprocess.raw")
    shown = to_pil(image.expand(3, -1, -1))
    least = MIN_DISPLAY // 2 if is_long(*shown.size) else MIN_DISPLAY
    factor = -(-least // min(shown.size))
    if factor <= 1:
        return shown
    size = (shown.width * factor, shown.height * factor)
    return shown.resize(size, Image.Resampling.LANCZOS)


def is_long(width: int, height: int) -> bool:
    """Whether an image (frames of a film) is shown in a row of its own."""
    return width >= LONG * height


def heat_layer(heat: Tensor, scale: Scale, *, alpha: float = 1.0) -> Image.Image:
    """A map [h, w] as an RGBA image of the same resolution, opaque where it is strong."""
    rgba = _colours(heat, scale, pale=False)
    rgba[..., 3] = (alpha * scale.strength(heat).cpu().numpy() ** 0.65 * 255).round()
    return Image.fromarray(rgba)


def grid_image(heat: Tensor, scale: Scale) -> Image.Image:
    """A map [h, w] alone, one opaque pixel for each value."""
    return Image.fromarray(_colours(heat, scale)).convert("RGB")


def _colours(heat: Tensor, scale: Scale, *, pale: bool = True) -> np.ndarray:
    """[h, w, 4] bytes. Without `pale`, the colours around zero are left out: over a dark image they
    would look like fog."""
    from matplotlib import colormaps

    unit = scale.unit(heat.detach().float().cpu())
    if scale.signed and not pale:
        aside = 2 * unit - 1
        unit = unit + PALE * (1 - aside.abs()) * aside.sign()
    return colormaps[scale.colormap](unit.numpy(), bytes=True).copy()


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
    draw, font = ImageDraw.Draw(layer), ImageFont.load_default(15)
    across, down = size[0] / region.shape[1], size[1] / region.shape[0]
    for name, (x0, y0, x1, y1) in (boxes or {}).items():
        place = (x0 * across, y0 * down, max(x0, x1) * across, max(y0, y1) * down)
        draw.rectangle(place, outline=PAPER, width=1)
        corner = (max(2, place[0] + 4), max(1, place[1] + 2))
        draw.rectangle(draw.textbbox(corner, name, font=font), fill=INK)
        draw.text(corner, name, font=font, fill=PAPER)
    inside = Image.fromarray((region.cpu() > 0).numpy()).resize(size, Image.Resampling.NEAREST)
    wide = max(3, min(size) // 120)
    framed = ImageOps.expand(inside.convert("L"), 2 * wide, fill=0)  # edges of the image, too
    for line, depth in ((INK, wide + 1), (colour, wide - 1)):
        core = framed.filter(ImageFilter.MinFilter(2 * depth + 1))
        edge = ImageOps.crop(ImageChops.subtract(framed, core), 2 * wide)
        layer.paste(Image.new("RGBA", size, line), mask=edge)
    return layer


def panel(
    images: Sequence[Image.Image], titles: Sequence[str], scales: Sequence[Scale | None]
) -> Image.Image:
    """Images of one size side by side on white, each under its title and above a colour bar of its
    scale; long images one below the other."""
    gap, head, foot = 16, 34, 60 if any(scales) else 0
    wide, high = images[0].size
    columns = 1 if is_long(wide, high) else len(images)
    rows, step = -(-len(images) // columns), head + high + foot + gap
    canvas = Image.new("RGB", (columns * (wide + gap) + gap, rows * step + gap), PAPER)
    draw, font, small = ImageDraw.Draw(canvas), *map(ImageFont.load_default, (18, 15))
    for place, (image, title, scale) in enumerate(zip(images, titles, scales, strict=True)):
        left, top = gap + place % columns * (wide + gap), gap + place // columns * step
        while font.getlength(title) > wide:
            title = title[:-2].rstrip("… ") + "…"
        draw.text((left, top), title, font=font, fill=INK)
        canvas.paste(image, (left, top + head))
        if scale is not None:
            below = top + head + high + 12
            canvas.paste(colour_bar(scale).resize((wide, 12)), (left, below))
            draw.text((left, below + 20), scale.ends[0], font=small, fill=INK)
            draw.text((left + wide, below + 20), scale.ends[1], font=small, fill=INK, anchor="ra")
    return canvas


def colour_bar(scale: Scale) -> Image.Image:
    """The colours of a scale from low to high, one pixel high."""
    return grid_image(torch.linspace(0, 1, 128)[None], Scale(0, 1, scale.signed, scale.colormap))


@cache
def colour_bar_uri(colormap: str, signed: bool) -> str:
    return data_uri(colour_bar(Scale(0, 1, signed, colormap)))


def data_uri(image: Image.Image, *, photo: bool = False, quality: int = 90) -> str:
    """An image as a data URI: PNG, or JPEG for photos."""
    buffer = io.BytesIO()
    if photo:
        image.convert("RGB").save(buffer, "JPEG", quality=quality)
    else:
        image.save(buffer, "PNG", optimize=True)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{'jpeg' if photo else 'png'};base64,{encoded}"


def thumbnail(raw: Tensor) -> str:
    """Raw pixels [3, H, W] as a small photo in a data URI."""
    size = (THUMBNAIL, round(THUMBNAIL * raw.shape[1] / raw.shape[2]))
    return data_uri(display_image(raw.clamp(0, 1).cpu()).resize(size), photo=True)


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
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))  # also without colour
_TEXT = "#62626c"  # becomes the page's own text colour


@dataclass(frozen=True)
class Line:
    """A line of a chart, with a band of errors where they are known. One point is a dot with an
    error bar; `marker` draws dots instead of a line."""

    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] = ()
    control: bool = False
    marker: str = ""


def mean_line(rows: Tensor, x: Sequence[float] | None = None, *, control: bool = False) -> Line:
    """The mean of rows [N, P] with its standard error, along `x` or their places."""
    from seecause.metrics.statistics import standard_error

    along = list(range(rows.shape[1])) if x is None else x
    return Line(along, rows.mean(dim=0).tolist(), standard_error(rows).tolist(), control)


def chart(
    lines: Mapping[str, Line],
    *,
    title: str,
    x: str,
    y: str,
    share: bool = False,
    log: bool = False,
) -> Markup:
    """Lines by name on one pair of axes.

    Args:
        lines: What is drawn; controls are grey and dashed.
        title: Stands above the chart.
        x: Title of the x axis.
        y: Title of the y axis.
        share: The y axis begins at 0, and ends at 1 where all values are 0.
        log: The x axis is logarithmic.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    coloured = [name for name, line in lines.items() if not line.control]
    for name, line in lines.items():
        place = 0 if line.control else coloured.index(name)
        look = {"color": GREY if line.control else COLOURS[place % len(COLOURS)], "label": name}
        error = np.nan_to_num(np.asarray(line.error, float))
        values = np.asarray(line.y, float)
        if line.marker:
            axes.plot(line.x, values, line.marker, alpha=0.45, markersize=4, **look)
        elif len(line.x) == 1:
            bars = error if len(error) else None
            axes.errorbar(line.x, values, bars, fmt="o", capsize=3, **look)
        else:
            dash = DASHES[1] if line.control else DASHES[place % len(DASHES)]
            axes.plot(line.x, values, linestyle=dash, linewidth=1.8, **look)
            if len(error):
                band = (values - error, values + error)
                axes.fill_between(line.x, *band, color=look["color"], alpha=0.15, linewidth=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    elif all(float(value).is_integer() for line in lines.values() for value in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if share:
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low) if low < -0.02 else 0.0, high if high > 0.06 else 1.0)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        figure.legend(loc="outside lower center", ncols=min(3, len(lines)), frameon=False)
    return figure_markup(figure, title)


def figure_markup(figure: Figure, title: str) -> Markup:
    """A figure of matplotlib as inline SVG whose text has the font and colour of the page."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_color(_TEXT)
    for axes in figure.axes:
        axes.tick_params(colors=_TEXT, labelcolor=_TEXT)
        axes.spines[:].set_color(_TEXT)
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 11}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_TEXT, "currentColor")
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{Markup.escape(title)}"', 1)
    drawn = Markup('<figure class="chart"><figcaption>{}</figcaption>{}</figure>')
    return drawn.format(title, Markup(svg))


def charts(drawn: Sequence[Markup]) -> Markup:
    """Charts side by side."""
    return Markup('<div class="charts">{}</div>').format(Markup("").join(drawn))
