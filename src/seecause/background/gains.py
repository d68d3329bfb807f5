"""How much a prediction depends on the object, and how much on the background (CIGMA, phase 2).

Images without their background, and without their object, for a mask S and a fill B:

    I_-bg = S I + (1 - S) B,      I_-fg = (1 - S) I + S B

    mean     each image's own mean colour (the paper); padding does not count. Most of it is the
             background's colour, so it can reveal the background: on Critters BIG is near 0 with
             it and large with any other fill. Compare before trusting a small BIR
    grey     the mean colour of the training set, which normalisation makes 0: the default here
    blur     the image blurred by a Gaussian of about 10 pixels at 224
    noise    pixels with the mean and deviation the model expects, the same for every image
    swap     no mask: the data's own `other_background` and `other_object`

Fills may be mixed after normalisation: it is affine per channel and commutes with means. Padding
(`inside` is False) is never touched.

    FIG = JS(p(I), p(I_-fg)),   BIG = JS(p(I), p(I_-bg)),   BIR = BIG / (FIG + BIG)
    (eq. 41 averages BIR over images)

JS is the Jensen-Shannon divergence, in nats, from 0 to ln 2:

    JS(p, q) = KL(p | m) / 2 + KL(q | m) / 2,     m = (p + q) / 2

Textbook forms subtract numbers that are nearly equal: in float32 they lose every digit below 1e-7
and turn negative, which is where the effects of single heads are. With u = (log q - log p) / 2 and
s = sqrt(p q), so that p = s exp(-u) and q = s exp(u), each class adds

    s (u sinh u - cosh u log cosh u),   log cosh u = log1p(2 sinh(u/2)^2)             for small |u|
    u (q - p) / 2 - m log cosh u,       log cosh u = |u| + log1p(exp(-2|u|)) - ln 2   for large |u|

which is never negative and loses no digits; the same in exact arithmetic.

With discovered masks, BIG measures evidence outside the model's own evidence, not outside the
object: see `masks`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from seecause.background.images import LabelledImages, images_of
from seecause.engine.chunks import run_in_chunks
from seecause.engine.trace import blank_image
from seecause.errors import BadOption, NotDefined
from seecause.metrics.statistics import ratio_interval
from seecause.models.base import ImageModel, in_eval_mode, protocol
from seecause.models.block import wide
from seecause.options import Positive, checked
from seecause.target import need_aimed

ByMask = Literal["mean", "grey", "blur", "noise"]
Fill = Literal[ByMask, "swap"]
ErasedView = Literal["no_background", "no_object"]
ERASED: tuple[ErasedView, ...] = ("no_background", "no_object")
SWAP = "exact swap"
BLUR = 10 / 224  # deviation of the Gaussian, as a share of the longer side
DEGENERATE = 1e-8  # FIG + BIG below this: nothing was lost either way, and BIR is undefined
SMALL = 1.0  # |u| at which the two forms are switched; both are accurate there


@checked
def erase(
    model: ImageModel,
    images: Tensor,
    masks: Tensor,
    fill: ByMask = "grey",
    *,
    inside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Erase the background, and the object.

    Args:
        model: The model whose normalisation the images have.
        images: [B, 3, H, W], normalised.
        masks: [B, H, W] bool, True on the object.
        fill: What replaces the erased pixels: "mean", "grey", "blur" or "noise".
        inside: [B, H, W] bool, False on padding, which is not changed.

    Returns:
        Images without their background and images without their object, [B, 3, H, W] each.

    Example:
        >>> import seecause as sc
        >>> import torch
        >>> model = sc.load("builtin:critters-vit")
        >>> images, masks = torch.randn(2, 3, 96, 96), torch.zeros(2, 96, 96, dtype=torch.bool)
        >>> no_background, no_object = erase(model, images, masks)
        >>> bool((no_background == 0).all()), bool((no_object == images).all())
        (True, True)
    """
    base = fill_images(model, images, fill, inside=inside)
    padding = torch.zeros_like(masks) if inside is None else ~inside
    no_background = torch.where((masks | padding)[:, None], images, base)
    return no_background, torch.where((masks & ~padding)[:, None], base, images)


def fill_images(
    model: ImageModel, images: Tensor, fill: ByMask, *, inside: Tensor | None = None
) -> Tensor:
    """The pixels that replace the erased ones of each image, [1|B, 3, 1|H, 1|W], in their dtype."""
    from torchvision.transforms.functional import gaussian_blur

    if fill == "grey":
        return images.new_zeros(1, 1, 1, 1).expand(1, images.shape[1], 1, 1)
    if fill == "noise":
        return blank_image(model, (images.shape[-2], images.shape[-1]), "noise").to(images)
    pixels = wide(images)
    if fill == "blur":
        sigma = BLUR * max(images.shape[-2:])
        reach = min(2 * round(2 * sigma) + 1, 2 * min(images.shape[-2:]) - 1)  # reflection must fit
        return gaussian_blur(pixels, [reach, reach], [sigma, sigma]).to(images.dtype)
    weight = torch.ones_like(pixels[:, :1]) if inside is None else inside[:, None].to(pixels)
    total, area = (x.sum(dim=(2, 3), keepdim=True) for x in (pixels * weight, weight))
    return (total / area).to(images.dtype)


class Erased:
    """The erased versions of images, made on demand: by the masks and a fill, or "swap"."""

    def __init__(self, model: ImageModel, data: LabelledImages, fill: Fill = "grey"):
        self.model, self.data = model, data
        self.fill: Any = fill
        if fill == "swap" and data.other_background is None:
            expected = "mean, grey, blur or noise: only Critters and pairs have other versions"
            raise BadOption("fill", "swap", expected)
        if fill != "swap" and data.masks is None:
            expected = "masks of the images: object_masks(model, data), or data with fill='swap'"
            raise BadOption("masks", None, expected)

    @property
    def name(self) -> str:
        """In tables: "true masks, grey", "exact swap" ..."""
        if self.fill == "swap" or self.data.masks is None:
            return SWAP
        return f"{self.data.masks.name}, {self.fill}"

    def versions(self, rows: slice, views: Sequence[ErasedView] = ERASED) -> list[Tensor]:
        """These versions of some images."""
        data, masks = self.data, self.data.masks
        if self.fill == "swap" or masks is None:
            whole = {"no_background": data.other_background, "no_object": data.other_object}
            found = [other[rows] for view in views if (other := whole[view]) is not None]
            if len(found) < len(views):
                expected = "data with other objects on the same backgrounds, or guard=False"
                raise BadOption("fill", "swap", expected)
            return found
        images = data.images[rows]
        hard = masks.hard[rows].to(images.device)
        inside = None if masks.inside is None else masks.inside[rows].to(images.device)
        erased = erase(self.model, images, hard, self.fill, inside=inside)
        return [erased[ERASED.index(view)] for view in views]

    def record(self) -> dict[str, Any]:
        """The settings that decide the versions, for the protocol."""
        masks = self.data.masks
        return {
            "masks": None if self.fill == "swap" or masks is None else masks.protocol,
            "fill": self.fill,
        }


def log_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) over the last axis, in float32 or better."""
    return torch.log_softmax(wide(logits) / temperature, dim=-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Log-probabilities [..., C] and [..., C] -> divergence [...]. Differentiable in both; its
    gradient is 0 where they are equal."""
    u = (log_q - log_p) / 2
    p, q = log_p.exp(), log_q.exp()
    near = u.clamp(-SMALL, SMALL)  # both branches must be finite for the gradient
    small = ((log_p + log_q) / 2).exp() * (
        near * near.sinh() - near.cosh() * (2 * (near / 2).sinh().square()).log1p()
    )
    size = u.abs()
    large = u * (q - p) / 2 - (p + q) / 2 * (size + (-2 * size).exp().log1p() - math.log(2))
    return torch.where(size < SMALL, small, large).sum(dim=-1)


@dataclass(frozen=True, eq=False)
class Gains:
    """FIG, BIG and BIR of each image, float64 on the CPU."""

    fig: Tensor  # [B]
    big: Tensor  # [B]
    # mean JS between two runs of the same images in different batches; smaller effects are rounding
    noise_floor: float
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def degenerate(self) -> Tensor:
        """[B] bool: whether neither region has an effect."""
        return self.fig + self.big < DEGENERATE

    @property
    def bir(self) -> Tensor:
        """BIR [B]; one half where it is degenerate."""
        return torch.where(
            self.degenerate, 0.5, self.big / (self.fig + self.big).clamp_min(DEGENERATE)
        )

    @property
    def bir_mean_of_ratios(self) -> float:
        """The mean of BIR over images (equation 41 of the paper)."""
        return float(self.bir.mean())

    @property
    def bir_ratio_of_means(self) -> float:
        """mean(BIG) / mean(FIG + BIG), which the tables of the paper appear to report; one half if
        both are 0."""
        total = float(self.fig.mean() + self.big.mean())
        return float(self.big.mean()) / total if total > 0 else 0.5

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of the ratio of means, over images; NaN for one image."""
        if len(self.big) < 2:
            return torch.nan, torch.nan
        return ratio_interval(self.big, self.fig + self.big)


@checked
@in_eval_mode
@torch.no_grad()
def information_gains(
    model: ImageModel,
    data: LabelledImages,
    *,
    fill: Fill = "grey",
    temperature: Positive = 1.0,
) -> Gains:
    """FIG and BIG of images, erased by their masks and a fill, or swapped.

    Args:
        model: A classifier whose classes exclude each other.
        data: Images with `masks`, or with both other versions for fill="swap".
        fill: What replaces the erased part ("mean", "grey", "blur", "noise"), or "swap".
        temperature: Of the predictions that are compared.

    Returns:
        A `Gains` with `fig`, `big` and `bir` [N].

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=4)
        >>> data = sc.background.read_images(model, data)
        >>> sc.background.information_gains(model, data.with_masks(data.truth)).fig.shape
        torch.Size([4])
    """
    need_distribution(model, "information_gains")
    data = images_of(model, data)
    erased = Erased(model, data, fill)

    def run_chunk(a: int, b: int) -> Tensor:
        rows = slice(a, b)
        images = data.images[rows]
        versions = torch.cat([images, *erased.versions(rows)])
        plain, no_background, no_object = log_probs(model(versions), temperature).chunk(3)
        again = log_probs(model(images.flip(0)), temperature).flip(0)  # in other batches
        others = (no_object, no_background, again)
        return torch.stack([jensen_shannon(plain, other) for other in others], dim=1).cpu()

    each = 3 * model.forward_bytes(model.check(data.images))
    parts = run_in_chunks(run_chunk, len(data), each, data.images.device, what="images")
    fig, big, noise = parts.double().unbind(1)
    record = {"temperature": temperature, **erased.record(), **protocol(model, data.images)}
    return Gains(fig, big, float(noise.mean()), record)


def need_distribution(model: ImageModel, what: str) -> None:
    """Refuse a model whose predictions are no probabilities that sum to one."""
    need_aimed(model)
    if model.sigmoid:
        raise NotDefined(
            what,
            f"the classes of {model.name} are independent, so there is no distribution to compare",
            "Wrap the model with sigmoid=False",
        )
