"""Pictures without their background, and without their foreground (CIGMA, phase 2).

    I_-bg = S I + (1 - S) B,      I_-fg = (1 - S) I + S B        for a mask S and a baseline B

    mean     each picture's own mean colour (the paper); padding does not count. Most of it is the
             background's colour, so it can give the background away: on Critters BIG is near 0
             with it and large with any other (benchmarks/heads.py). Compare before trusting a
             small BIR
    grey     the mean colour of the training set, which normalisation makes 0. The default of
             scores and gains here
    blur     the picture blurred by a Gaussian of about 10 pixels at 224
    noise    pixels with the mean and deviation the model expects, the same for every picture
    tensor   any pictures [1|B, 3, H, W]
    Swapped  whole counterfactual pictures, used as they are: another background behind the same
             object, another object on the same background

Colours may be mixed after normalisation: it is affine per channel and commutes with means. Padding
(`inside` is False) is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from seecause.data.dataset import IGNORE
from seecause.engine.blanks import blank_image
from seecause.errors import BadOption
from seecause.models.base import ImageModel
from seecause.types import wide

Fill = Literal["mean", "grey", "blur", "noise"]
ErasedView = Literal["no_background", "no_foreground"]
ERASED: tuple[ErasedView, ...] = ("no_background", "no_foreground")
SWAPS = {"no_background": "background", "no_foreground": "foreground"}  # of a `Swapped`
BLUR = 10 / 224  # deviation, as a share of the longer side


@dataclass(frozen=True, eq=False)
class OfImages:
    """Facts about some images: every tensor [B, ...] has a row for each."""

    def take(self, rows: Tensor) -> Self:
        """Those of some images, by place or by mask."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{n: value[rows.to(value.device)] for n, value in tensors.items()})


@dataclass(frozen=True, eq=False)
class Swapped(OfImages):
    """Counterfactual pictures [B, 3, H, W], normalised like the images. They need no mask."""

    background: Tensor  # the same objects elsewhere: what I_-bg is
    foreground: Tensor | None = None  # other objects in the same places: what I_-fg is

    def to(self, device: torch.device, dtype: torch.dtype) -> Swapped:
        foreground = None if self.foreground is None else self.foreground.to(device, dtype)
        return Swapped(self.background.to(device, dtype), foreground)

    def check(self, images: Tensor) -> None:
        for name in SWAPS.values():
            pictures: Tensor | None = getattr(self, name)
            if pictures is not None and pictures.shape != images.shape:
                expected = f"one picture for each image, {list(images.shape)}"
                raise BadOption(f"baseline.{name}", list(pictures.shape), expected)


Baseline = Fill | Tensor | Swapped


def erase(
    model: ImageModel,
    images: Tensor,
    hard: Tensor,
    baseline: Fill | Tensor = "grey",
    *,
    inside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Images [B, 3, H, W] without their background and without their foreground, by masks `hard`
    [B, H, W] (bool)."""
    base = fill(model, images, baseline, inside=inside)
    padding = torch.zeros_like(hard) if inside is None else ~inside
    no_background = torch.where((hard | padding)[:, None], images, base)
    return no_background, torch.where((hard & ~padding)[:, None], base, images)


def fill(
    model: ImageModel,
    images: Tensor,
    baseline: Fill | Tensor = "grey",
    *,
    inside: Tensor | None = None,
) -> Tensor:
    """The baseline picture of each image, [1|B, 3, 1|H, 1|W], in their dtype."""
    from torchvision.transforms.functional import gaussian_blur

    if isinstance(baseline, Tensor):
        if baseline.shape[1:] != images.shape[1:] or len(baseline) not in (1, len(images)):
            raise BadOption(
                "baseline",
                list(baseline.shape),
                f"one picture, or one for each image: {list(images.shape)}",
            )
        return baseline.to(images)
    if baseline not in get_args(Fill):
        raise BadOption(
            "baseline", baseline, f"one of {', '.join(get_args(Fill))}, a tensor, or Swapped"
        )
    if baseline == "grey":
        return images.new_zeros(1, 1, 1, 1).expand(1, images.shape[1], 1, 1)
    if baseline == "noise":
        return blank_image(model, (images.shape[-2], images.shape[-1]), "noise").to(images)
    if baseline == "blur":
        sigma = BLUR * max(images.shape[-2:])
        reach = min(2 * round(2 * sigma) + 1, 2 * min(images.shape[-2:]) - 1)  # reflection must fit
        return gaussian_blur(wide(images), [reach, reach], [sigma, sigma]).to(images.dtype)
    pixels = wide(images)
    if inside is None:
        return pixels.mean(dim=(2, 3), keepdim=True).to(images.dtype)
    weight = inside[:, None].to(pixels)
    total, area = (x.sum(dim=(2, 3), keepdim=True) for x in (pixels * weight, weight))
    return (total / area).to(images.dtype)


def part(baseline: Fill | Tensor, images: int, rows: slice | list[int]) -> Fill | Tensor:
    """The baseline of some of the images."""
    if isinstance(baseline, Tensor) and len(baseline) == images > 1:
        return baseline[rows]
    return baseline


def describe(baseline: Baseline) -> str:
    """What protocols say."""
    if isinstance(baseline, str):
        return baseline
    return "swapped" if isinstance(baseline, Swapped) else f"tensor {list(baseline.shape)}"


@dataclass(frozen=True, eq=False, repr=False)
class Masks(OfImages):
    """The foreground of each image, as the model sees it (`discovered`) or as it is (`oracle`)."""

    hard: Tensor  # [B, H, W] bool
    soft: Tensor | None = None  # [B, g, g] in [0, 1]
    ties: Tensor | None = None  # [B], share of pixels that tie with the last one kept
    losses: Tensor | None = None  # [B, 3]: JS, area and TV when the last step was taken, unweighted
    steps: Tensor | None = None  # [B] int64
    inside: Tensor | None = None  # [B, H, W] bool, False on padding
    protocol: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        share = float(self.hard.double().mean())
        return f"Masks({len(self.hard)} {self.source}, {share:.0%} foreground)"

    @property
    def source(self) -> str:
        return self.protocol["source"]

    @classmethod
    def oracle(cls, truth: Tensor, *, inside: Tensor | None = None) -> Masks:
        """True masks [B, H, W]: bool, or integers with 1 on the object. Pixels that are neither
        (IGNORE) are kept out, like padding."""
        marked = truth != IGNORE if truth.dtype != torch.bool else torch.ones_like(truth)
        inside = marked if inside is None else marked & inside
        return cls(
            hard=truth == 1, inside=None if inside.all() else inside, protocol={"source": "oracle"}
        )


class ErasedViews:
    """Each image beside its erased versions, made when they are asked for."""

    def __init__(
        self, model: ImageModel, images: Tensor, masks: Masks | Tensor | None, baseline: Baseline
    ):
        self.model, self.images = model, images
        self.baseline: Baseline = baseline
        self.masks = Masks.oracle(masks) if isinstance(masks, Tensor) else masks
        expected = [len(images), *images.shape[-2:]]
        if isinstance(baseline, Swapped):
            baseline.check(images)
        elif self.masks is None:
            raise BadOption(
                "masks",
                None,
                "masks of the images (discover_masks, or true ones), or baseline=Swapped(...)",
            )
        elif list(self.masks.hard.shape) != expected:
            raise BadOption(
                "masks", list(self.masks.hard.shape), f"one for each image, at its size: {expected}"
            )

    def erased(self, rows: slice, views: Sequence[ErasedView] = ERASED) -> list[Tensor]:
        """Those versions of some images."""
        if isinstance(self.baseline, Swapped):
            pictures = [getattr(self.baseline, SWAPS[view]) for view in views]
            if any(whole is None for whole in pictures):
                raise BadOption(
                    "baseline",
                    "Swapped without a foreground",
                    "other objects on the same backgrounds too, or guard=False and response='big'",
                )
            return [whole[rows].to(self.images) for whole in pictures]
        assert self.masks is not None
        device, inside = self.images.device, self.masks.inside
        erased = erase(
            self.model,
            self.images[rows],
            self.masks.hard[rows].to(device),
            part(self.baseline, len(self.images), rows),
            inside=None if inside is None else inside[rows].to(device),
        )
        return [erased[ERASED.index(view)] for view in views]

    def record(self) -> dict[str, Any]:
        return {
            "masks": None if self.masks is None else self.masks.protocol,
            "baseline": describe(self.baseline),
        }


@dataclass(frozen=True, eq=False)
class Erasure:
    """One way to take the background away: masks and what fills their outside, or whole
    counterfactual pictures."""

    masks: Masks | None
    baseline: Baseline

    @property
    def name(self) -> str:
        if self.masks is None:
            return "exact swap"
        source = "true" if self.masks.source == "oracle" else "discovered"
        return f"{source} masks, {describe(self.baseline)}"

    def take(self, rows: Tensor) -> Erasure:
        """Of some images; masks with a fill by name only."""
        return Erasure(None if self.masks is None else self.masks.take(rows), self.baseline)
