"""Where is the object of each image? `object_masks` takes masks from one of four sources:

    given       masks that came with the data
    network     another model (the backbone that the model was fine-tuned from, or any other): its
                attribution maps, binarised by Otsu's threshold
    own         the model's own maps: a biased model marks the background, so this warns
    discovered  the model's own evidence by optimisation (`masks.discover_masks`)

Maps of a network are brought to the patches of the model under study. Their confidence is the
network's probability of its predicted class. Where images have masks of their own, `overlap` is the
intersection over union with these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from seecause._software import arithmetic, plugin_digest, versions
from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find
from seecause.background.images import (
    LabelledImages,
    Masks,
    Progress,
    as_labelled,
    images_of,
    logits_of,
    no_progress,
)
from seecause.background.masks import discover_masks, iou
from seecause.data.dataset import Dataset
from seecause.errors import BadOption
from seecause.files import digest, digest_json, write_atomic
from seecause.loading import load
from seecause.models.base import ImageModel
from seecause.types import wide

log = logging.getLogger(__name__)
TOGETHER = 64  # images whose maps are kept in one file

# "given", "own", "discovered", the name of a network, a network, masks, or a function of the images
MaskSource = str | ImageModel | Tensor | Masks | Callable[[LabelledImages], Masks] | None


def object_masks(
    model: ImageModel,
    data: LabelledImages | Dataset | Tensor,
    source: MaskSource = None,
    *,
    method: str = "caap",
    cache: str | Path | None = None,
    weights: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Masks:
    """Find the object of each image.

    Args:
        model: The model under study; masks are on its pixels or patches.
        data: Images, a dataset, or a tensor of normalised images [N, 3, H, W].
        source: "given" (or None) for masks that the data brings, masks themselves ([N, H, W] or on
            patches), a network, loaded or by name ("timm:NAME", "hf:NAME", "builtin:NAME", a
            folder), "own" for the model's own maps, or "discovered".
        method: Attribution method of a network's maps.
        cache: A folder where maps or discovered masks are kept, by weights, pixels and options.
        weights: A weights file for a network that is loaded by name.
        progress: Called with the number of images that are finished.
        **options: Options of the attribution method, or of `discover_masks`.

    Raises:
        BadOption: If the data has no masks, or an option has no use with this source.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=4)
        >>> masks = object_masks(model, data, "builtin:critters-vit")
        >>> masks.hard.shape, masks.overlap.shape
        (torch.Size([4, 12, 12]), torch.Size([4]))
    """
    if isinstance(data, Tensor):
        data = as_labelled(model, data)
    data = images_of(model, data)
    by_name = isinstance(source, str) and source not in ("given", "own", "discovered")
    if weights is not None and not by_name:
        raise BadOption("weights", str(weights), "a network that is loaded by name")
    if callable(source) and not isinstance(source, ImageModel):
        source = source(data)
    if source is None or source == "given" or isinstance(source, Tensor | Masks):
        if options or method != "caap":
            unused = ", ".join([method, *options])
            raise BadOption("method", unused, "no value: given masks have no method")
        return _given(data, source if isinstance(source, Tensor | Masks) else data.truth)
    if isinstance(source, str) and source == "discovered":
        found = discover_masks(model, data.images, cache=cache, progress=progress, **options)
        overlap = None if data.truth is None else iou(found, data.truth).cpu()
        return replace(found, overlap=overlap)
    if isinstance(source, str):
        network = model if source == "own" else load(source, weights=weights, device=model.device)
    else:
        assert isinstance(source, ImageModel)
        network = source
    options = {"score": "logit", **options} if method == "caap" else options
    find(method, network.architecture).check(options)
    return _by_network(model, network, data, method, options, cache, progress)


def find_masks(
    model: ImageModel,
    data: LabelledImages,
    source: MaskSource,
    progress: Progress = no_progress,
) -> LabelledImages:
    """The images with object masks in use, from a source of `object_masks`."""
    with progress("finding objects", len(data)) as advance:
        return data.with_masks(object_masks(model, data, source, progress=advance))


def _given(data: LabelledImages, masks: Tensor | Masks | None) -> Masks:
    if masks is None:
        raise BadOption(
            "masks",
            f"given, and {data.name} has none",
            "data with masks, or another network, such as masks='timm:NAME'",
        )
    masks = Masks.given(masks) if isinstance(masks, Tensor) else masks
    found = data.with_masks(masks.take(torch.arange(len(masks)))).masks  # checks the shape
    assert found is not None
    if masks.kind != "given":
        return masks
    some = masks.hard.flatten(1).any(dim=1)
    if bool(some.all()):
        return replace(masks, confidence=some.float())
    note = f"{int((~some).sum())} of {len(masks)} masks are empty: no object to transplant"
    log.warning("%s", note)
    return replace(masks, confidence=some.float(), notes=(note,))


def _by_network(
    model: ImageModel,
    network: ImageModel,
    data: LabelledImages,
    method: str,
    options: dict[str, Any],
    cache: str | Path | None,
    progress: Callable[[int], None] | None,
) -> Masks:
    """Otsu's masks of a network's maps, on the patches of the model."""
    with model.eval_mode():
        grid = model.check(data.images).grid
    parts = []
    for images in data.images.split(TOGETHER):
        file = None
        if cache is not None:
            file = _cache_file(Path(cache), model, network, images, grid, method, options)
        kept = None if file is None else _read(file)
        if kept is None:
            kept = network_maps(model, network, images, grid, method, options)
            if file is not None:
                write_atomic(file, save({name: v.contiguous() for name, v in kept.items()}))
        parts.append(kept)
        if progress is not None:
            progress(len(images))
    maps, sure = (torch.cat([part[name] for part in parts]) for name in ("maps", "confidence"))
    hard, overlap = otsu(maps.to(model.device)), None
    if data.truth is not None:
        overlap = iou(hard, data.truth.on_patches(grid)).cpu()
        overlap = torch.where(data.truth.known.cpu(), overlap, torch.nan)
    same = network.module is model.module or network.weights_digest() == model.weights_digest()
    note = _doubt(model, network, same, float(sure.mean()))
    if note:
        log.warning("%s", note)
    whose = "own maps of" if same else "maps of"
    source = f"{whose} {network.name} ({method}, Otsu's threshold)"
    return Masks(
        hard=hard,
        kind="own" if same else "network",
        source=source,
        confidence=sure.to(model.device),
        overlap=overlap,
        notes=(note,) if note else (),
        protocol={"source": source},
    )


def network_maps(
    model: ImageModel,
    network: ImageModel,
    images: Tensor,
    grid: tuple[int, int],
    method: str,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """A network's maps [n, gh, gw] of the model's images, and its confidence [n], on the CPU."""
    frame = network.preprocess
    raw = wide(model.preprocess.raw(images)).clamp(0, 1)
    smooth: Any = {"mode": "bilinear", "antialias": True, "align_corners": False}
    if raw.shape[-2:] != frame.size:
        raw = F.interpolate(raw, frame.size, **smooth)
    seen = frame.normalise(raw).to(network.device, network.dtype)
    maps = wide(attribute(network, seen, method=method, **options).maps)[:, None]
    logits = wide(logits_of(network, seen))
    chances = logits.sigmoid() if network.sigmoid else logits.softmax(dim=1)
    if maps.shape[-2:] != grid:
        maps = F.interpolate(maps, grid, **smooth)
    return {"maps": maps[:, 0].cpu(), "confidence": chances.amax(dim=1).cpu()}


def _cache_file(
    folder: Path,
    model: ImageModel,
    network: ImageModel,
    images: Tensor,
    grid: tuple[int, int],
    method: str,
    options: dict[str, Any],
) -> Path:
    """Named by a digest of everything that decides the maps."""
    if folder.exists() and not folder.is_dir():
        raise BadOption("cache", str(folder), "a folder; this is a file")
    folder.mkdir(parents=True, exist_ok=True)
    facts = [network.fingerprint(), str(network.dtype), network.device.type, method, options]
    facts += [grid, model.preprocess.mean, model.preprocess.std]
    run = find(method, network.architecture).run
    facts += [versions(), arithmetic(), plugin_digest(run)]
    pixels = images.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    name = digest(digest_json(facts), repr(list(images.shape)), pixels, length=32)
    return folder / f"{name}.safetensors"


def _read(file: Path) -> dict[str, Tensor] | None:
    """None for a file that is missing or damaged, which is made again."""
    try:
        return load_file(file) if file.is_file() else None
    except SafetensorError as damage:
        log.warning("%s is damaged and will be written again: %s", file, damage)
        return None


def _doubt(model: ImageModel, network: ImageModel, same: bool, confidence: float) -> str:
    """What a reader must know of masks that a network found; empty if nothing."""
    if same:
        return (
            f"masks are the own maps of {network.name}: a model that relies on the background marks"
            " the background; give masks or another network"
        )
    known, wanted = set(network.classes), set(model.classes)
    if not known or not wanted or known & wanted:
        return ""
    return (
        f"{network.name} knows none of the {len(wanted)} classes of {model.name}; its mean"
        f" confidence in what it predicts instead is {confidence:.2f}. Look at the sheet of"
        " transplants, or check it on images with masks"
    )


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
