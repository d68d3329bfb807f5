"""Which pixels keep a prediction, by optimisation (CIGMA, phase 1; after Fong & Vedaldi 2017).

For each image a mask M in [0, 1] on a coarse grid is fitted so that what it shows keeps the
prediction, and little is shown:
    L(M) = a JS(p(I), p(U(M) I + (1 - U(M)) B)) + b mean(M) + c TV(M),
    TV(M) = mean |M_{i+1,j} - M_{ij}| + mean |M_{i,j+1} - M_{ij}|
by Adam on M, clamped to [0, 1] after each step; U enlarges, B is the fill. Then the rho
largest pixels are the foreground S. Area and TV are means: as sums they would outweigh JS, which is
at most ln 2, and the empty mask would win.

topk        keeps exactly round(rho H W) pixels, in order of their value, then of their 5 x 5
            neighbourhood's mean, then row by row
percentile  those above the (1 - rho) percentile, strictly: the paper's rule. It keeps none when
            more than rho of the pixels saturate at 1, and fewer when more than 1 - rho are 0

Read with care: M keeps the model's own prediction. If the model reads the background, S may well
be background. Where true masks exist, compare: `iou`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from seecause._software import arithmetic, versions
from seecause.background.erase import Fill, describe, fill_images, fill_of
from seecause.background.gains import jensen_shannon, log_probs, need_distribution
from seecause.background.images import Masks, PerImage
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.mixture import need_gradients
from seecause.errors import BadOption
from seecause.files import digest_json, write_atomic
from seecause.models.base import ImageModel, pixels_digest, protocol
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel
from seecause.options import Count, Limit, Positive, check_options
from seecause.types import wide_dtype

log = logging.getLogger(__name__)
Param = Literal["clamp", "sigmoid"]
Rule = Literal["topk", "percentile"]
PixelShare = Annotated[
    float, Limit(lambda share: 0 < share < 1, "a share of the pixels between 0 and 1")
]
Weights = Annotated[
    tuple[float, float, float],
    Limit(lambda weights: min(weights) >= 0, "three numbers of at least 0: for JS, area and TV"),
]
CHECK_EVERY = 25  # steps, for the early stop
BETAS, EPSILON = (0.9, 0.999), 1e-8  # Adam's own
DIGITS = 1e6  # values closer than one part of this are ties: a flat mask stays flat when enlarged
KEPT = ("soft", "losses", "steps")  # what a search gives for each image, and a cache keeps
AT_ONCE = {"cuda": 128, "cpu": 32}  # images searched together: on a GPU, fewer take as long


@in_eval_mode
def discover_masks(
    model: ImageModel,
    images: Tensor,
    *,
    fill: Fill | Tensor = "mean",
    inside: Tensor | None = None,
    cache: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
    **search: Any,
) -> Masks:
    """Find the pixels that keep each prediction, by optimisation; the defaults are the paper's.

    Args:
        model: A classifier whose classes exclude each other.
        images: [N, 3, H, W], normalised.
        fill: What replaces the hidden pixels ("mean", "grey", "blur", "noise", or images).
        inside: [N, H, W], False on padding.
        cache: A folder where masks are kept, by weights, pixels and options. A search that was
            stopped goes on from there.
        progress: Called with the number of images that are finished.
        **search: Options of `MaskSearch`: `steps`, `grid`, `rate`, `weights`, `param`, `init`,
            `rho`, `binarise`, `temperature`, `early_stop`.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> images, _, truth = sc.data.to_batch(model, sc.data.open_data("critters:clean", limit=2))
        >>> sc.background.discover_masks(model, images, steps=2).hard.shape
        torch.Size([2, 96, 96])
    """
    need_distribution(model, "discover_masks")
    check_search(search)
    options = MaskSearch(**search)
    images = images.to(model.device, model.dtype)
    model.check(images)
    size = (images.shape[-2], images.shape[-1])
    if inside is not None:
        if inside.shape != (shape := (len(images), *size)):
            raise BadOption(
                "inside", list(inside.shape), f"True on the image, False off it, {shape}"
            )
        inside = inside.to(model.device)
    if isinstance(fill, Tensor):
        fill = fill_images(model, images, fill)
    record = {**options.record(), "fill": describe(fill)}
    files = list[Path]()
    if cache is not None:
        files = mask_files(Path(cache), model, record, images, inside, fill)
    read = ((place, _read(file, model.device)) for place, file in enumerate(files))
    found = {place: masks for place, masks in read if masks is not None}
    if progress is not None and found:
        progress(len(found))
    todo = [place for place in range(len(images)) if place not in found]
    graph = (model.n_layers + 1) if isinstance(model, VisionModel) else 4  # what gradients keep
    each = graph * model.forward_bytes(model.check(images))
    together = AT_ONCE["cuda" if images.is_cuda else "cpu"]

    def run_chunk(a: int, b: int) -> None:
        rows = todo[a:b]
        padding = None if inside is None else inside[rows]
        own = fill_of(fill, len(images), rows)
        base = fill_images(model, images[rows], own, inside=padding)
        columns = options.run(model, images[rows], base, padding)
        for place, masks in zip(rows, zip(*columns, strict=True), strict=True):
            found[place] = masks
            if files:
                named = zip(KEPT, masks, strict=True)
                tensors = {name: value.cpu().contiguous() for name, value in named}
                write_atomic(files[place], save(tensors))
        if progress is not None:
            progress(len(rows))

    at_once = min(together, fit(len(todo), each, images.device))
    list(in_chunks(run_chunk, len(todo), at_once, what="masks"))
    rows = [found[place] for place in range(len(images))]
    soft, losses, taken = (torch.stack(parts) for parts in zip(*rows, strict=True))
    hard, ties = harden(soft, size, rho=options.rho, rule=options.binarise, inside=inside)
    about = {"source": "discovered", "rho": options.rho, "binarise": options.binarise, **record}
    return Masks(
        hard=hard,
        kind="discovered",
        source=f"discovered masks of {model.name}",
        inside=inside,
        soft=soft,
        ties=ties,
        losses=losses,
        steps=taken,
        protocol={**about, **protocol(model, images)},
    )


def check_search(options: Mapping[str, Any]) -> None:
    """Refuse options that the mask search does not have, before any image is read."""
    search = {n: value for n, value in options.items() if n not in ("fill", "cache")}
    check_options("the mask search", MaskSearch, search)
    MaskSearch(**search)


def mask_options(search: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a search other than its cost and its cache: what decides masks."""
    return {name: value for name, value in search.items() if name not in ("steps", "cache")}


def iou(masks: Masks | Tensor, truth: Masks | Tensor) -> Tensor:
    """Intersection over union of masks [N, h, w] with true ones, [N] float64; NaN where both are
    empty. Pixels of which nothing is known do not count."""
    hard = masks.hard if isinstance(masks, Masks) else masks
    truth = truth if isinstance(truth, Masks) else Masks.given(truth)
    if hard.shape != truth.hard.shape:
        expected = f"masks of the same images, {list(hard.shape)}"
        raise BadOption("truth", list(truth.hard.shape), expected)
    real = truth.hard.to(hard.device)
    known = torch.ones_like(hard) if truth.inside is None else truth.inside.to(hard.device)
    both, either = (hard & real & known), ((hard | real) & known)
    return both.flatten(1).sum(dim=1).double() / either.flatten(1).sum(dim=1)


def mask_files(
    folder: Path,
    model: ImageModel,
    options: Mapping[str, Any],
    images: Tensor,
    inside: Tensor | None,
    fill: Fill | Tensor,
) -> list[Path]:
    """Where the mask of each image is kept: soft [g, g], losses [3] and steps [] in a small
    safetensors file.

    The name is a digest of everything that decides the mask: weights (and gates) of the model,
    pixels, padding, fill, options and software. What is derived from a soft mask (rho, the rule) is
    not part of it, so changing those costs nothing.
    """
    if folder.exists() and not folder.is_dir():
        raise BadOption("cache", str(folder), "a folder; this is a file")
    folder.mkdir(parents=True, exist_ok=True)
    facts = [model.fingerprint(), str(model.dtype), model.device.type, dict(options)]
    stem = digest_json([*facts, versions(), arithmetic()], length=32)
    files = []
    for place in range(len(images)):
        rows = slice(place, place + 1)
        own = fill_of(fill, len(images), rows)
        key = [
            stem,
            pixels_digest(images[rows]),
            "" if inside is None else pixels_digest(inside[rows].float()),
            pixels_digest(own) if isinstance(own, Tensor) else "",
        ]
        files.append(folder / f"{digest_json(key, length=32)}.safetensors")
    return files


def _read(file: Path, device: torch.device) -> tuple[Tensor, ...] | None:
    """What is kept of an image; None where nothing is, or for a damaged file, which is replaced."""
    if not file.is_file():
        return None
    try:
        tensors = load_file(file, device=str(device))
    except SafetensorError as damage:
        log.warning("%s is damaged and will be written again: %s", file, damage)
        return None
    return tuple(tensors[name] for name in KEPT) if set(tensors) == set(KEPT) else None


@dataclass(frozen=True, kw_only=True)
class MaskSearch:
    """The optimisation of a batch of masks. Images are independent, so the batch does not matter.
    The defaults are the paper's.

    `weights` are those of JS, area and TV. `early_stop`: finish an image when less than this share
    of its pixels changed sides in 25 steps (0.005 is a good choice).
    """

    steps: Count = 250
    grid: Annotated[int, Limit(lambda cells: cells >= 2, "at least 2 cells a side")] = 32
    rate: Positive = 0.05
    weights: Weights = (1.0, 0.01, 0.1)
    param: Param = "clamp"
    init: float = 0.5
    rho: PixelShare = 0.35
    binarise: Rule = "topk"
    temperature: Positive = 1.0
    early_stop: PixelShare | None = None

    def __post_init__(self) -> None:
        check_options("the mask search", MaskSearch, asdict(self))
        if not 0 <= self.init <= 1 or (self.param == "sigmoid" and self.init in (0, 1)):
            raise BadOption("init", self.init, "a value in [0, 1]; inside it for param='sigmoid'")

    def record(self) -> dict[str, Any]:
        """Everything that decides the soft masks."""
        options = asdict(self)
        if self.early_stop is None:
            del options["rho"], options["binarise"]
        return options

    @torch.inference_mode(False)
    @torch.enable_grad()
    def run(
        self, model: ImageModel, images: Tensor, base: Tensor, inside: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Images and their fills -> soft masks [B, g, g], losses [B, 3], steps taken [B]."""
        need_gradients(model, "discover_masks", remedy="Give the model that it was quantised from")
        kind = wide_dtype(model.dtype)
        images, base = images.clone(), base.expand(len(images), -1, -1, -1).clone()
        with torch.no_grad():
            plain = log_probs(model(images), self.temperature)
        start = self.init
        if self.param == "sigmoid":
            start = torch.logit(torch.tensor(self.init, dtype=torch.float64)).item()
        shape = (len(images), self.grid, self.grid)
        raw = torch.full(shape, start, dtype=kind, device=images.device)
        moments = torch.zeros_like(raw), torch.zeros_like(raw)
        search = _Search(images, base, plain, raw, *moments, inside)
        live = torch.arange(len(images), device=images.device)
        soft, losses = torch.empty_like(raw), raw.new_empty(len(images), 3)
        taken = torch.full_like(live, self.steps)
        before: Tensor | None = None
        for step in range(1, self.steps + 1):
            losses[live], search = self._step(model, step, search)
            soft[live] = self._mask(search.raw)
            if self.early_stop is None or step % CHECK_EVERY:
                continue
            size = (images.shape[-2], images.shape[-1])
            hard, _ = harden(
                soft[live], size, rho=self.rho, rule=self.binarise, inside=search.inside
            )
            moving = torch.ones_like(live, dtype=torch.bool)
            if before is not None:
                changed = (hard != before).flatten(1).double().mean(dim=1)
                moving = changed >= self.early_stop
            taken[live[~moving]] = step
            search = search.take(moving)
            live, before = live[moving], hard[moving]
            if len(live) == 0:
                break
        return soft, losses, taken

    def _step(self, model: ImageModel, step: int, search: _Search) -> tuple[Tensor, _Search]:
        """One step of Adam -> the losses [B, 3] before it, and everything after it."""
        images, inside = search.images, search.inside
        raw = search.raw.detach().requires_grad_()
        mask = self._mask(raw)
        show = enlarge(mask, (images.shape[-2], images.shape[-1]))
        if inside is not None:
            show = torch.where(inside, show, 1)  # padding stays as it is
        shown = (show[:, None] * images + (1 - show[:, None]) * search.base).to(images.dtype)
        divergence = jensen_shannon(search.plain, log_probs(model(shown), self.temperature))
        losses = torch.stack([divergence, mask.mean(dim=(1, 2)), total_variation(mask)], dim=1)
        total = (losses @ losses.new_tensor(self.weights)).sum()  # each mask's gradient is its own
        (slope,) = torch.autograd.grad(total, raw)
        with torch.no_grad():
            first = BETAS[0] * search.first + (1 - BETAS[0]) * slope
            second = BETAS[1] * search.second + (1 - BETAS[1]) * slope.square()
            scale = (second / (1 - BETAS[1] ** step)).sqrt() + EPSILON
            raw = raw - self.rate * first / (1 - BETAS[0] ** step) / scale
            raw = raw.clamp(0, 1) if self.param == "clamp" else raw
        return losses.detach(), replace(search, raw=raw, first=first, second=second)

    def _mask(self, raw: Tensor) -> Tensor:
        return raw if self.param == "clamp" else raw.sigmoid()


@dataclass(frozen=True, eq=False)
class _Search(PerImage):
    """Everything that goes with an image while its mask is searched."""

    images: Tensor
    base: Tensor
    plain: Tensor  # log-probabilities of the whole image
    raw: Tensor  # [B, g, g], the masks before `param`
    first: Tensor  # Adam's moments of it
    second: Tensor
    inside: Tensor | None


def total_variation(masks: Tensor) -> Tensor:
    """[B, g, g] -> [B]: the mean step between neighbours, down and across."""
    down, across = masks[:, 1:] - masks[:, :-1], masks[:, :, 1:] - masks[:, :, :-1]
    return down.abs().mean(dim=(1, 2)) + across.abs().mean(dim=(1, 2))


def enlarge(soft: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks [B, g, g] at image size, [B, H, W]."""
    return F.interpolate(soft[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def harden(
    soft: Tensor,
    size: tuple[int, int],
    *,
    rho: float = 0.35,
    rule: Rule = "topk",
    inside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Soft masks [B, g, g] -> kept pixels [B, H, W] (bool) and, for each image, the share of pixels
    that tie with the last one kept [B].

    Padding (`inside` [B, H, W] is False there) is never kept and does not count.
    """
    large = (enlarge(soft.double(), size) * DIGITS).round() / DIGITS
    near = F.avg_pool2d(large[:, None], 5, stride=1, padding=2, count_include_pad=False)[:, 0]
    near = (near * DIGITS).round()
    hard = torch.zeros_like(large, dtype=torch.bool)
    ties = soft.new_zeros(len(soft), dtype=torch.float64)
    for i in range(len(soft)):
        pixels = torch.arange(large[i].numel(), device=soft.device)
        if inside is not None:
            pixels = inside[i].flatten().nonzero()[:, 0]
        values = large[i].flatten()[pixels]
        foreground, level = _foreground(values, near[i].flatten()[pixels], rho, rule)
        hard[i].view(-1)[pixels[foreground]] = True
        ties[i] = (values == level).double().mean()
    return hard, ties


def _foreground(values: Tensor, near: Tensor, rho: float, rule: Rule) -> tuple[Tensor, Tensor]:
    """Which of values [P] are kept, as indices or a bool mask, and the value of the last one
    kept."""
    count = round(rho * len(values))
    if rule == "percentile":
        ordered, place = values.sort().values, (1 - rho) * (len(values) - 1)
        low = int(place)
        high = min(low + 1, len(values) - 1)
        level = torch.lerp(ordered[low], ordered[high], place - low)
        return values > level, level
    order = near.sort(descending=True, stable=True).indices
    order = order[values[order].sort(descending=True, stable=True).indices][:count]
    return order, values[order[-1]] if count else values.max()
