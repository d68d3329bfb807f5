"""Which pixels a model answers from, found by optimisation (CIGMA, phase 1; after Fong & Vedaldi
2017).

A mask on a coarse grid is fitted to each image so that what it shows keeps the answer, and little
is shown (see `_mask_search`). Its rho largest pixels are the foreground S.

Read with care: M keeps the model's own answer. If the model reads the background, S may well be
background. Where true masks exist, compare: `iou`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from seecause._files import digest_json, write_atomic
from seecause._options import check_options
from seecause._pieces import PIECE, in_pieces
from seecause._software import arithmetic, versions
from seecause.data.dataset import IGNORE
from seecause.engine.chunks import fit, in_chunks
from seecause.errors import BadOption
from seecause.heads._mask_search import MaskSearch, harden
from seecause.heads.erase import Fill, Masks, describe, fill, part
from seecause.heads.gains import need_distribution
from seecause.models._settled import settles
from seecause.models.base import ImageModel, pixels_digest, protocol
from seecause.models.view import VisionModel

log = logging.getLogger(__name__)
_NAMES = ("soft", "losses", "steps")


@settles
def discover_masks(
    model: ImageModel,
    images: Tensor,
    *,
    baseline: Fill | Tensor = "mean",
    inside: Tensor | None = None,
    cache: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
    **search: Any,
) -> Masks:
    """Masks of normalised images [B, 3, H, W]; the defaults are the paper's.

    `search` are options of `MaskSearch`: `steps`, `grid`, `rate`, `weights`, `param`, `init`,
    `rho`, `binarise`, `temperature`, `early_stop`. `inside` [B, H, W] is False on padding. `cache`:
    a folder where masks are kept, by weights, image and options. `progress` is told how many images
    are done, each time some are.
    """
    need_distribution(model, "discover_masks")
    check_search(search)
    options = MaskSearch(**search)
    images = images.to(model.device, model.dtype)
    model.check(images)
    size = (images.shape[-2], images.shape[-1])
    if inside is not None and inside.shape != (len(images), *size):
        shape = [len(images), *size]
        raise BadOption("inside", list(inside.shape), f"True where the picture is, {shape}")
    inside = None if inside is None else inside.to(model.device)
    if isinstance(baseline, Tensor):
        baseline = fill(model, images, baseline)  # as many as there are images, or one
    record = {**options.record(), "baseline": describe(baseline)}
    store = None if cache is None else MaskCache(cache, model, record)
    by_place = {} if store is None else store.read(images, inside, baseline)
    if progress is not None and by_place:
        progress(len(by_place))
    todo = [place for place in range(len(images)) if place not in by_place]
    parts = [todo[start : start + PIECE] for start in range(0, len(todo), PIECE)]

    def piece(rows: list[int]) -> dict[str, Any]:
        padding = None if inside is None else inside[rows]
        fills = baseline
        if isinstance(fills, Tensor) and len(fills) > 1:
            fills = fills[rows]
        base = fill(model, images[rows], fills, inside=padding).expand(len(rows), -1, -1, -1)
        return {"images": images[rows], "base": base, "inside": padding, "search": options}

    def ended(number: int, tensors: dict[str, Tensor]) -> None:
        columns = (tensors[name].to(model.device) for name in _NAMES)
        masks = dict(zip(parts[number], zip(*columns, strict=True), strict=True))
        by_place.update(masks)
        if store is not None:
            store.write(images, inside, baseline, masks)
        if progress is not None:
            progress(len(masks))

    in_pieces(search_piece, model, map(piece, parts), ended=ended)
    rows = [by_place[place] for place in range(len(images))]
    soft, losses, taken = (torch.stack(parts) for parts in zip(*rows, strict=True))
    hard, ties = harden(soft, size, rho=options.rho, rule=options.binarise, inside=inside)
    about = {"source": "discovered", "rho": options.rho, "binarise": options.binarise, **record}
    return Masks(hard, soft, ties, losses, taken, inside, {**about, **protocol(model, images)})


@settles
def search_piece(
    model: ImageModel, images: Tensor, base: Tensor, inside: Tensor | None, search: MaskSearch
) -> dict[str, Tensor]:
    """Soft masks, losses and steps of pictures whose baselines are `base`, on the CPU."""
    images, base = images.to(model.device), base.to(model.device)
    padding = None if inside is None else inside.to(model.device)
    graph = (model.n_layers + 1) if isinstance(model, VisionModel) else 4  # what gradients keep
    each = graph * model.forward_bytes(model.check(images))

    def run_chunk(a: int, b: int) -> tuple[Tensor, ...]:
        hidden = None if padding is None else padding[a:b]
        return search.run(model, images[a:b], base[a:b], hidden)

    size = fit(len(images), each, images.device)
    chunks = list(in_chunks(run_chunk, len(images), size, what="masks"))
    columns = (torch.cat(parts).cpu() for parts in zip(*chunks, strict=True))
    return dict(zip(_NAMES, columns, strict=True))


def check_search(options: Mapping[str, Any]) -> None:
    """Refuse options that the mask search does not have, before any picture is read."""
    own = ("baseline", "cache")
    search = {name: value for name, value in options.items() if name not in own}
    check_options("the mask search", MaskSearch, search)


def iou(masks: Masks | Tensor, truth: Tensor) -> Tensor:
    """Intersection over union of masks [B, H, W] with true ones, [B] float64; NaN where both are
    empty. Pixels marked IGNORE do not count."""
    hard = masks.hard if isinstance(masks, Masks) else masks
    if hard.shape != truth.shape:
        raise BadOption(
            "truth", list(truth.shape), f"masks of the same pictures, {list(hard.shape)}"
        )
    truth = truth.to(hard.device)
    counted = torch.ones_like(hard) if truth.dtype == torch.bool else truth != IGNORE
    real = truth == 1
    both, either = (hard & real & counted), ((hard | real) & counted)
    return both.flatten(1).sum(dim=1).double() / either.flatten(1).sum(dim=1)


class MaskCache:
    """A folder of masks that were found once: (soft [g, g], losses [3], steps []), a small
    safetensors file for each image.

    The name holds everything that decides the mask: weights (and gates) of the model, pixels,
    padding, baseline, options and software. What is derived from a soft mask (rho, the rule) is
    not part of it, so changing those costs nothing.
    """

    def __init__(self, folder: str | Path, model: ImageModel, options: Mapping[str, Any]):
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise BadOption("cache", str(folder), "a folder; this is a file")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.device = model.device
        facts = [model.fingerprint(), str(model.dtype), model.device.type, dict(options)]
        self.stem = digest_json([*facts, versions(), arithmetic()], length=32)

    def read(
        self, images: Tensor, inside: Tensor | None, baseline: Fill | Tensor
    ) -> dict[int, tuple[Tensor, ...]]:
        """What is known, by place in the batch."""
        masks = {}
        for place in range(len(images)):
            file = self._file(images, inside, baseline, place)
            if file.is_file() and (tensors := self._load(file)) is not None:
                masks[place] = tensors
        return masks

    def _load(self, file: Path) -> tuple[Tensor, ...] | None:
        """None for a damaged file: the mask is searched again, and the file written anew."""
        try:
            tensors = load_file(file, device=str(self.device))
        except SafetensorError as damage:
            log.warning("%s is damaged and will be written again: %s", file, damage)
            return None
        return tuple(tensors[name] for name in _NAMES) if set(tensors) == set(_NAMES) else None

    def write(
        self,
        images: Tensor,
        inside: Tensor | None,
        baseline: Fill | Tensor,
        masks: Mapping[int, tuple[Tensor, ...]],
    ) -> None:
        """Each file is whole or not there."""
        for place, tensors in masks.items():
            file = self._file(images, inside, baseline, place)
            named = zip(_NAMES, tensors, strict=True)
            write_atomic(file, save({name: t.detach().cpu().contiguous() for name, t in named}))

    def _file(
        self, images: Tensor, inside: Tensor | None, baseline: Fill | Tensor, place: int
    ) -> Path:
        rows = slice(place, place + 1)
        own = part(baseline, len(images), rows)
        key = [
            self.stem,
            pixels_digest(images[rows]),
            "" if inside is None else pixels_digest(inside[rows].float()),
            pixels_digest(own) if isinstance(own, Tensor) else "",
        ]
        return self.folder / f"{digest_json(key, length=32)}.safetensors"
