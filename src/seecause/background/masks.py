"""Where is the object of each image? `object_masks` takes masks from one of four sources:

    given       masks that came with the data
    network     another model (the backbone that the model was fine-tuned from, or any other): its
                attribution maps, enlarged to pixels and binarised by Otsu's threshold
    own         the model's own maps: a biased model marks the background, so this warns
    discovered  the pixels that keep the model's own prediction (`discover_masks`)

Smooth outlines matter: cut along patches, each token is all object or all background, and a model
that is trained on such cuts learns to tell them from images. Where images have masks of their own,
`overlap` is the intersection over union with these.

Masks are discovered by optimisation (CIGMA, phase 1; after Fong & Vedaldi 2017). For each image a
mask M in [0, 1] on a coarse grid is fitted so that what it shows keeps the prediction, and little
is shown:

    L(M) = a JS(p(I), p(U(M) I + (1 - U(M)) B)) + b mean(M) + c TV(M),
    TV(M) = mean |M_{i+1,j} - M_{ij}| + mean |M_{i,j+1} - M_{ij}|

by Adam on M, clamped to [0, 1] after each step; U enlarges, B is the fill. Then the rho largest
pixels are the foreground S. Area and TV are means: as sums they would outweigh JS, which is at most
ln 2, and the empty mask would win.

    topk        keeps exactly round(rho H W) pixels, in order of their value, then of their 5 x 5
                neighbourhood's mean, then row by row
    percentile  those above the (1 - rho) percentile, strictly: the paper's rule. It keeps none when
                more than rho of the pixels saturate at 1, and fewer when more than 1 - rho are 0

Read discovered masks with care: they keep the model's own prediction. If the model reads the
background, S may well be background.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find
from seecause.background.gains import (
    ByMask,
    fill_images,
    jensen_shannon,
    log_probs,
    need_distribution,
)
from seecause.background.images import (
    Advance,
    LabelledImages,
    Masks,
    MaskSource,
    images_of,
    no_advance,
)
from seecause.data.dataset import IGNORE, Dataset
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.trace import need_gradients
from seecause.errors import BadOption
from seecause.files import digest_json, write_atomic
from seecause.loading import load
from seecause.models.base import ImageModel, in_eval_mode, pixels_digest, protocol
from seecause.models.block import wide, wide_dtype
from seecause.models.view import VisionModel
from seecause.options import Count, Limit, Positive, checked

log = logging.getLogger(__name__)
Rule = Literal["topk", "percentile"]
PixelShare = Annotated[
    float, Limit(lambda share: 0 < share < 1, "a share of the pixels between 0 and 1")
]
Weights = Annotated[
    tuple[float, float, float],
    Limit(lambda weights: min(weights) >= 0, "three numbers of at least 0: for JS, area and TV"),
]
Grid = Annotated[int, Limit(lambda cells: cells >= 2, "at least 2 cells a side")]
# values are rounded to 1 / DIGITS, so that interpolation noise does not break ties in a flat mask
DIGITS = 1e6
BETAS = (0.9, 0.999)  # of Adam, which is written out: torch.optim.Adam rounds differently
TOGETHER = 64  # images per cache file
OWN_MAPS = (
    "masks are the own maps of {}: a model that relies on the background marks the background; give"
    " masks or another network"
)
SEARCHED = {"cuda": 128, "cpu": 32}  # images per search; on a GPU, fewer are not faster


def object_masks(
    model: ImageModel,
    data: LabelledImages | Dataset | str,
    source: MaskSource = None,
    *,
    method: str = "caap",
    cache: str | Path | None = None,
    progress: Advance = no_advance,
    **options: Any,
) -> Masks:
    """Find the object of each image.

    Args:
        model: The model under study; masks are on the pixels of its images.
        data: Images, a dataset, or its name.
        source: "given" (or None) for masks that the data brings, masks themselves ([N, H, W] or on
            patches), a network, loaded or by name ("timm:NAME", "hf:NAME", "builtin:NAME", a
            folder), "own" for the model's own maps, or "discovered".
        method: Attribution method of a network's maps.
        cache: A folder where maps or discovered masks are kept, by weights, pixels and options.
        progress: Called with the number of images that are finished.
        **options: Options of the attribution method, or of `discover_masks`.

    Returns:
        `Masks`, on the pixels of the model's frame.

    Raises:
        BadOption: If the data has no masks, or an option has no use with this source.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=4)
        >>> masks = object_masks(model, data, "builtin:critters-vit")
        >>> masks.hard.shape, masks.overlap.shape
        (torch.Size([4, 96, 96]), torch.Size([4]))
    """
    data = images_of(model, data)
    if callable(source) and not isinstance(source, ImageModel):
        source = source(data)
    if source is None or source == "given" or isinstance(source, Tensor | Masks):
        if options or method != "caap":
            unused = ", ".join([method, *options])
            raise BadOption("method", unused, "no value: given masks have no method")
        given = source if isinstance(source, Tensor | Masks) else data.truth
        if given is None:
            expected = "data with masks, or another network, such as masks='timm:NAME'"
            raise BadOption("masks", f"given, and {data.name} has none", expected)
        return data.with_masks(given).masks  # checks the shape
    if source == "discovered":
        found = discover_masks(model, data.images, cache=cache, progress=progress, **options)
        return replace(found, overlap=_overlap(found.hard, data.truth))
    network: Any = model if source == "own" else source
    network = load(network, device=model.device) if isinstance(network, str) else network
    options = {"score": "logit", **options} if method == "caap" else options
    find(method, network.architecture).check(options)
    return _by_network(model, network, data, method, options, cache, progress)


def _overlap(hard: Tensor, truth: Masks | None) -> Tensor | None:
    """[N] float64 on the CPU: IoU of masks [N, H, W] with those of the data; NaN where nothing is
    known."""
    if truth is None:
        return None
    codes = truth.hard.int()
    if truth.inside is not None:
        codes = codes.masked_fill(~truth.inside, IGNORE)
    from seecause.metrics.annotations import iou

    overlap = iou(hard, codes.to(hard.device)).double().cpu()
    return torch.where(truth.known.cpu(), overlap, torch.nan)


def _by_network(
    model: ImageModel,
    network: ImageModel,
    data: LabelledImages,
    method: str,
    options: dict[str, Any],
    cache: str | Path | None,
    progress: Advance,
) -> Masks:
    """Otsu's masks of a network's maps, on the pixels of the images."""
    run = find(method, network.architecture).run
    from seecause._software import plugin_digest

    facts = [method, options, plugin_digest(run)]
    facts += [model.preprocess.record(), network.preprocess.record()]
    parts = []
    for images in data.images.split(TOGETHER):
        asked = partial(network_maps, model, network, images, method, options)
        maps = _kept(cache, network, facts, images, asked)[:, None].to(model.device)
        maps = maps - maps.amin(dim=(2, 3), keepdim=True)  # a constant map stays constant
        # a few at a time, because sorting pixels takes memory
        parts += map(otsu, F.interpolate(maps, data.size, mode="bicubic")[:, 0].split(8))
        progress(len(images))
    hard = torch.cat(parts)
    same = network.module is model.module or network.weights_digest() == model.weights_digest()
    notes = (OWN_MAPS.format(network.name),) * same
    for note in notes:
        log.warning(note)
    source = f"{'own ' if same else ''}maps of {network.name} ({method}, Otsu's threshold)"
    return Masks(
        hard=hard,
        kind="own" if same else "network",
        source=source,
        overlap=_overlap(hard, data.truth),
        notes=notes,
        protocol={"source": source},
    )


def network_maps(
    model: ImageModel,
    network: ImageModel,
    images: Tensor,
    method: str,
    options: dict[str, Any],
) -> Tensor:
    """A network's maps [n, rows, columns] of the model's images, on the CPU."""
    frame = network.preprocess
    raw = wide(model.preprocess.raw(images)).clamp(0, 1)
    if raw.shape[-2:] != frame.size:
        raw = F.interpolate(raw, frame.size, mode="bilinear", antialias=True)
    seen = frame.normalise(raw).to(network.device, network.dtype)
    return wide(attribute(network, seen, method=method, **options).maps).cpu()


def _kept(
    cache: str | Path | None,
    model: ImageModel,
    facts: list[Any],
    images: Tensor,
    compute: Callable[[], Tensor],
) -> Tensor:
    """The result of `compute` for some images, cached in a file of the folder `cache`. Its name is
    a digest of everything that decides the content: weights and gates of a model, options, pixels
    and software. A damaged file is written again."""
    if cache is None:
        return compute()
    from seecause._software import arithmetic, versions

    facts = [*facts, model.fingerprint(), str(model.dtype), model.device.type]
    facts += [pixels_digest(images), versions(), arithmetic()]
    file = Path(cache) / f"{digest_json(facts, length=32)}.safetensors"
    try:
        return load_file(file)["masks"]
    except FileNotFoundError:
        pass
    except SafetensorError as damage:
        log.warning("%s is damaged and will be written again: %s", file, damage)
    masks = compute().cpu().contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, save({"masks": masks}))
    return masks


def otsu(maps: Tensor) -> Tensor:
    """Maps [n, gh, gw] -> masks, True above the threshold that maximises the variance between the
    two parts (Otsu 1979). A constant map gives an empty mask."""
    values = maps.flatten(1).double()
    ordered = values.sort(dim=1).values
    count = ordered.shape[1]
    below = torch.arange(1, count, device=maps.device, dtype=torch.float64)  # [P - 1]
    total = ordered.sum(dim=1, keepdim=True)
    low = ordered.cumsum(dim=1)[:, :-1]
    gap = (total - low) / (count - below) - low / below
    between = below * (count - below) * gap.square()
    between = between.masked_fill(ordered[:, :-1] == ordered[:, 1:], -1.0)  # equals stay together
    threshold = ordered.gather(1, between.argmax(dim=1, keepdim=True))
    masks = (values > threshold) & (ordered[:, :1] < ordered[:, -1:])
    return masks.unflatten(1, maps.shape[1:])


@checked
@in_eval_mode
def discover_masks(
    model: ImageModel,
    images: Tensor,
    *,
    fill: ByMask = "mean",
    steps: Count = 250,
    grid: Grid = 32,
    rate: Positive = 0.05,
    weights: Weights = (1.0, 0.01, 0.1),
    rho: PixelShare = 0.35,
    binarise: Rule = "topk",
    temperature: Positive = 1.0,
    cache: str | Path | None = None,
    progress: Advance = no_advance,
) -> Masks:
    """Find the pixels that preserve each prediction, by optimisation.

    Defaults are the paper's, except that exactly `rho` of the pixels are kept (the paper:
    binarise="percentile") and that area and total variation are means (the paper: norms).

    Args:
        model: A classifier whose classes exclude each other.
        images: [N, 3, H, W], normalised.
        fill: What replaces the hidden pixels: "mean", "grey", "blur" or "noise".
        steps: Steps of Adam.
        grid: Cells of a mask on each side.
        rate: Learning rate.
        weights: Weights of JS, area and TV.
        rho: Share of the pixels that is kept.
        binarise: The rule that keeps them.
        temperature: Of the predictions that are compared.
        cache: A folder where masks are kept, by weights, pixels and options. A search that was
            stopped continues from there.
        progress: Called with the number of images that are finished.

    Returns:
        `Masks` on the pixels of the model's frame.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> images, _, truth = sc.data.to_batch(model, sc.data.open_data("critters:clean", limit=2))
        >>> sc.background.discover_masks(model, images, steps=2).hard.shape
        torch.Size([2, 96, 96])
    """
    need_distribution(model, "discover_masks")
    need_gradients(model, "discover_masks", remedy="Give the model that it was quantised from")
    images = images.to(model.device, model.dtype)
    layout, size = model.check(images), (images.shape[-2], images.shape[-1])
    search: dict[str, Any] = {"fill": fill, "steps": steps, "grid": grid, "rate": rate}
    search |= {"weights": weights, "temperature": temperature}

    def run_chunk(a: int, b: int) -> Tensor:
        part = images[a:b]
        found = _kept(cache, model, [search], part, lambda: _search(model, part, **search))
        progress(b - a)
        return found.to(model.device)

    graph = (model.n_layers + 1) if isinstance(model, VisionModel) else 4  # for gradients
    most = SEARCHED["cuda" if images.is_cuda else "cpu"]
    at_once = min(most, fit(len(images), graph * model.forward_bytes(layout), images.device))
    soft = torch.cat(list(in_chunks(run_chunk, len(images), at_once, what="masks")))
    about = {"source": "discovered", "rho": rho, "binarise": binarise, **search}
    return Masks(
        hard=harden(soft, size, rho=rho, rule=binarise),
        kind="discovered",
        source=f"discovered masks of {model.name}",
        soft=soft,
        protocol={**about, **protocol(model, images)},
    )


@torch.inference_mode(False)
@torch.enable_grad()
def _search(
    model: ImageModel,
    images: Tensor,
    *,
    fill: ByMask,
    steps: int,
    grid: int,
    rate: float,
    weights: Sequence[float],
    temperature: float,
) -> Tensor:
    """Soft masks [B, grid, grid]. Images are independent, so the batch does not matter."""
    images = images.clone()  # may be an inference tensor
    base = fill_images(model, images, fill)
    with torch.no_grad():
        plain = log_probs(model(images), temperature)
    shape, kind = (len(images), grid, grid), wide_dtype(model.dtype)
    mask = torch.full(shape, 0.5, dtype=kind, device=images.device)
    first, second = torch.zeros_like(mask), torch.zeros_like(mask)  # Adam's moments
    for step in range(1, steps + 1):
        mask.requires_grad_()
        show = enlarge(mask, (images.shape[-2], images.shape[-1]))[:, None]
        shown = (show * images + (1 - show) * base).to(images.dtype)
        divergence = jensen_shannon(plain, log_probs(model(shown), temperature))
        losses = torch.stack([divergence, mask.mean(dim=(1, 2)), total_variation(mask)], dim=1)
        total = (losses @ losses.new_tensor(weights)).sum()  # each mask's gradient is its own
        (slope,) = torch.autograd.grad(total, mask)
        first = BETAS[0] * first + (1 - BETAS[0]) * slope
        second = BETAS[1] * second + (1 - BETAS[1]) * slope.square()
        scale = (second / (1 - BETAS[1] ** step)).sqrt() + 1e-8
        mask = mask.detach() - rate * first / (1 - BETAS[0] ** step) / scale
        mask = mask.clamp(0, 1)
    return mask


def total_variation(masks: Tensor) -> Tensor:
    """[B, g, g] -> [B]: the mean step between neighbours, down and across."""
    down, across = masks.diff(dim=1), masks.diff(dim=2)
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
) -> Tensor:
    """Soft masks [B, g, g] -> kept pixels [B, H, W] (bool)."""
    large = (enlarge(soft.double(), size) * DIGITS).round() / DIGITS
    near = F.avg_pool2d(large[:, None], 5, stride=1, padding=2, count_include_pad=False)[:, 0]
    near = (near * DIGITS).round()
    values, near = large.flatten(1), near.flatten(1)
    if rule == "percentile":
        return large > torch.stack([row.quantile(1 - rho) for row in values])[:, None, None]
    order = near.argsort(dim=1, descending=True, stable=True)
    by_value = values.gather(1, order).argsort(dim=1, descending=True, stable=True)
    kept = order.gather(1, by_value)[:, : round(rho * values.shape[1])]
    return torch.zeros_like(values, dtype=torch.bool).scatter(1, kept, True).view(large.shape)
