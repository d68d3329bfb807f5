"""Maps as pictures. What is scaled here is scaled for the eye only; maps themselves are never
changed.

A map of one sign is drawn from its low to its high values (dark to bright, and more opaque); a map
with both signs, and every map of a method whose values are for and against, diverges around zero
(blue against, red for). The range drawn leaves out the outermost values, so that one patch cannot
darken all others; the legend names it, and `clipped` says where they end. A map that is
nearly the same everywhere is pale, and says so.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont, ImageOps
from torch import Tensor

from seecause.data.images import to_pil
from seecause.errors import BadImage, UnknownName

SEQUENTIAL, DIVERGING = "inferno", "RdBu_r"
PALE = 0.22  # of a diverging colormap, on either side of zero
MIN_DISPLAY = 384  # pixels of the short side: smaller pictures are enlarged to be looked at
THUMBNAIL = 192  # pixels across
# a map that varies by less, relative to its values, is rounding: it is shown without colour
_FLAT = 1e-3
_PALE = 0.1  # one that varies by less than this share of its values is shown pale, in proportion
_CLIPPED = 0.05  # values this share of the range beyond it are worth a word
_SLIGHT = 1e-5  # and so is one of both signs that stays below this
LONG = 4  # times as wide as high
_INK, _PAPER, _MARK = (38, 38, 43), (255, 255, 255), (64, 224, 255)


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
    def clipped(self) -> str:
        """Where the values end that are drawn like the ends of the range, if they are far out."""
        if self.extremes is None or self.high <= self.low:
            return ""
        (lowest, highest), slack = self.extremes, _CLIPPED * (self.high - self.low)
        if lowest >= self.low - slack and highest <= self.high + slack:
            return ""
        first, last = (number(value, self.digits) for value in (lowest, highest))
        if (first, last) == self.ends:  # nothing to read off the legend
            return ""
        return f"clipped: values run from {first} to {last}"

    @property
    def digits(self) -> int:
        """Of a number that is written: three, or as many as tell the ends apart."""
        largest, apart = max(abs(self.low), abs(self.high)), self.high - self.low
        return max(3, 2 + math.floor(math.log10(largest / apart))) if apart > 0 else 3

    @property
    def ends(self) -> tuple[str, str]:
        """The values it runs between, as they are written."""
        return number(self.low, self.digits), number(self.high, self.digits)

    @property
    def remark(self) -> str:
        """What a reader must know about a pale map."""
        if self.high <= self.low:
            return "no differences: the same everywhere"
        if not self.paleness:
            return ""
        if self.signed:
            return f"pale: no value is beyond {number(self.high)}"
        share = (self.high - self.low) / max(abs(self.low), abs(self.high))
        return f"pale: nearly the same everywhere, values differ by {100 * share:.2g} %"

    def unit(self, heat: Tensor) -> Tensor:
        """Values as positions in the colormap, 0 to 1."""
        if self.high <= self.low:
            return torch.full_like(heat, 0.5 if self.signed else 0.0)
        return ((heat - self.low) / (self.high - self.low)).clamp(0, 1)

    def strength(self, heat: Tensor) -> Tensor:
        """How much of the picture a value may cover, 0 to 1: little values leave it visible."""
        unit = self.unit(heat)
        return (1 - self.paleness) * ((2 * unit - 1).abs() if self.signed else unit)


def scale_of(*heats: Tensor, signed: bool | None = None, colormap: str | None = None) -> Scale:
    """One scale for some maps of any shape. `signed` None: diverging if values of both signs occur;
    True, for methods whose values are for and against: always."""
    values = torch.cat([heat.detach().double().flatten().cpu() for heat in heats])
    extremes = float(values.min()), float(values.max())
    signed = extremes[0] < 0 < extremes[1] if signed is None else signed
    colormap = colormap or (DIVERGING if signed else SEQUENTIAL)
    if colormap not in matplotlib.colormaps:
        raise UnknownName("colormap", colormap, matplotlib.colormaps)
    if signed:
        reach = float(values.abs().quantile(0.995))
        if extremes[1] - extremes[0] <= _FLAT * max(map(abs, extremes)):
            return Scale(extremes[0], extremes[0], True, colormap)
        return Scale(-reach, reach, True, colormap, max(0.0, 1 - reach / _SLIGHT), extremes)
    low, high = (
        float(q) for q in values.quantile(torch.tensor([0.01, 0.995], dtype=torch.float64))
    )
    differs, largest = high - low, max(abs(low), abs(high))
    if differs <= _FLAT * largest:
        return Scale(low, low, False, colormap)
    return Scale(low, high, False, colormap, max(0.0, 1 - differs / (_PALE * largest)), extremes)


def overlay(
    image: Tensor,
    heat: Tensor,
    *,
    alpha: float = 0.75,
    colormap: str | None = None,
    signed: bool | None = None,
    scale: Scale | None = None,
) -> Image.Image:
    """A raw picture [3, H, W] in [0, 1] with a map [h, w] of any resolution on top."""
    scale = scale or scale_of(heat, signed=signed, colormap=colormap)
    shown = picture(image)
    layer = heat_layer(
        F.interpolate(heat[None, None].float().cpu(), size=shown.size[::-1], mode="bilinear")[0, 0],
        scale,
        alpha=alpha,
    )
    return Image.alpha_composite(_calm(shown).convert("RGBA"), layer).convert("RGB")


def picture(image: Tensor) -> Image.Image:
    """A raw tensor [3, H, W] in [0, 1] as a picture, enlarged by a whole factor if it is small."""
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise BadImage(
            f"tensor of shape {list(image.shape)}",
            "expected raw pixels [3, H, W] in [0, 1]",
            "see model.preprocess.raw",
        )
    shown = to_pil(image.expand(3, -1, -1))
    least = MIN_DISPLAY // 2 if is_long(*shown.size) else MIN_DISPLAY
    factor = -(-least // min(shown.size))
    return (
        shown
        if factor <= 1
        else shown.resize((shown.width * factor, shown.height * factor), Image.Resampling.LANCZOS)
    )


def is_long(width: int, height: int) -> bool:
    return width >= LONG * height


def outline_layer(
    size: tuple[int, int], region: Tensor, boxes: Mapping[str, Sequence[float]]
) -> Image.Image:
    """A layer of width x height with a line around pixels [H, W], and thin, named boxes x0, y0, x1,
    y1 in these pixels."""
    layer = Image.new("RGBA", size)
    draw, font = ImageDraw.Draw(layer), _font(15)
    across, down = size[0] / region.shape[1], size[1] / region.shape[0]
    for name, (x0, y0, x1, y1) in boxes.items():
        place = (x0 * across, y0 * down, max(x0, x1) * across, max(y0, y1) * down)
        draw.rectangle(place, outline=_PAPER, width=1)
        corner = (max(2, place[0] + 4), max(1, place[1] + 2))
        draw.rectangle(draw.textbbox(corner, name, font=font), fill=_INK)
        draw.text(corner, name, font=font, fill=_PAPER)
    inside = Image.fromarray((region.cpu() > 0).numpy()).resize(size, Image.Resampling.NEAREST)
    wide = max(3, min(size) // 120)
    framed = ImageOps.expand(inside.convert("L"), 2 * wide, fill=0)  # edges of the picture, too
    for colour, depth in ((_INK, wide + 1), (_MARK, wide - 1)):
        core = framed.filter(ImageFilter.MinFilter(2 * depth + 1))
        edge = ImageOps.crop(ImageChops.subtract(framed, core), 2 * wide)
        layer.paste(Image.new("RGBA", size, (*colour, 255)), mask=edge)
    return layer


def heat_layer(heat: Tensor, scale: Scale, *, alpha: float = 1.0) -> Image.Image:
    """A map [h, w] as an RGBA picture of the same resolution, opaque where it is strong."""
    rgba = _colour(heat, scale, pale=False)
    rgba[..., 3] = (alpha * scale.strength(heat).cpu().numpy() ** 0.65 * 255).round()
    return Image.fromarray(rgba)


def grid_image(heat: Tensor, scale: Scale) -> Image.Image:
    """A map [h, w] alone, one opaque pixel for each value."""
    return Image.fromarray(_colour(heat, scale)).convert("RGB")


def legend(scale: Scale, *, width: int = MIN_DISPLAY) -> Image.Image:
    """A colour bar with the values it runs between."""
    font = _font(15)
    canvas = Image.new("RGB", (width, 52), _PAPER)
    bar = torch.linspace(scale.low, scale.high, width)[None].expand(12, -1)
    canvas.paste(
        grid_image(bar if scale.high > scale.low else torch.zeros(12, width), scale), (0, 4)
    )
    draw = ImageDraw.Draw(canvas)
    low, high = scale.ends
    draw.text((0, 24), low, font=font, fill=_INK)
    draw.text((width, 24), high, font=font, fill=_INK, anchor="ra")
    if scale.signed:
        draw.text((width / 2, 24), "0", font=font, fill=_INK, anchor="ma")
    return canvas


def panel(
    images: Sequence[Image.Image],
    *,
    titles: Sequence[str] = (),
    below: Sequence[Image.Image | None] = (),
    gap: int = 16,
) -> Image.Image:
    """Pictures side by side on white, each with a title above and something (a legend) below; long
    ones one below the other."""
    if len(images) > 1 and is_long(*images[0].size):
        rows = [
            panel([image], titles=titles[i : i + 1], below=below[i : i + 1], gap=gap)
            for i, image in enumerate(images)
        ]
        canvas = Image.new("RGB", (rows[0].width, sum(row.height for row in rows)), _PAPER)
        for place, row in enumerate(rows):
            canvas.paste(row, (0, sum(above.height for above in rows[:place])))
        return canvas
    head = 34 if titles else 0
    foot = max((extra.height + gap // 2 for extra in below if extra is not None), default=0)
    high = max(image.height for image in images)
    canvas = Image.new(
        "RGB",
        (sum(i.width for i in images) + gap * (len(images) + 1), high + head + foot + 2 * gap),
        _PAPER,
    )
    draw, left, font = ImageDraw.Draw(canvas), gap, _font(18)
    for index, image in enumerate(images):
        if index < len(titles):
            draw.text((left, gap), _fitted(titles[index], font, image.width), font=font, fill=_INK)
        canvas.paste(image, (left, gap + head))
        extra = below[index] if index < len(below) else None
        if extra is not None:
            canvas.paste(extra, (left, gap + head + high + gap // 2))
        left += image.width + gap
    return canvas


def data_uri(image: Image.Image, *, photo: bool = False) -> str:
    """A picture inside an HTML attribute: PNG, or JPEG for photos."""
    buffer = io.BytesIO()
    if photo:
        image.convert("RGB").save(buffer, "JPEG", quality=90)
    else:
        image.save(buffer, "PNG", optimize=True)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{'jpeg' if photo else 'png'};base64,{encoded}"


def thumbnail(raw: Tensor) -> str:
    """A raw picture [3, H, W], small, as a photo inside an HTML attribute."""
    size = (THUMBNAIL, round(THUMBNAIL * raw.shape[1] / raw.shape[2]))
    return data_uri(picture(raw.clamp(0, 1).cpu()).resize(size), photo=True)


def number(value: float, digits: int = 3) -> str:
    """So many digits, however large or small."""
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e")


def fixed(value: float, digits: int, sign: str = "") -> str:
    """So many decimals, never minus zero; a dash for NaN. `sign` "+" writes a plus."""
    return "-" if value != value else f"{value:{sign}z.{digits}f}"


def _colour(heat: Tensor, scale: Scale, *, pale: bool = True) -> np.ndarray:
    """[h, w, 4] bytes, opaque. Without `pale`, colours around zero are left out: on a dark picture
    they would lie like fog."""
    unit = scale.unit(heat.detach().float().cpu())
    if scale.signed and not pale:
        aside = 2 * unit - 1
        unit = unit + PALE * (1 - aside.abs()) * aside.sign()
    return matplotlib.colormaps[scale.colormap](unit.numpy(), bytes=True).copy()


def _calm(shown: Image.Image) -> Image.Image:
    """A little less colour and light, so that the map stands out and the picture stays readable."""
    return Image.blend(shown, shown.convert("L").convert("RGB"), 0.5)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _fitted(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """The text, cut with an ellipsis where it is wider than its picture."""
    while text and font.getlength(text) > width:
        text = text.removesuffix("…")[:-1].rstrip() + "…" if len(text) > 2 else ""
    return text
