"""Which pixels a model answers from, found by optimisation (CIGMA, phase 1; after Fong & Vedaldi
2017).

A mask on a coarse grid is fitted to each image so that what it shows keeps the answer, and little
is shown (see `mask_search`). Its rho largest pixels are the foreground S.

Read with care: M keeps the model's own answer. If the model reads the background, S may well be
background. Where true masks exist, compare: `iou`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.attribution.attribute import digest, protocol
from seecause.data.dataset import IGNORE
from seecause.engine.chunks import fit, in_chunks
from seecause.errors import BadOption, NotDefined
from seecause.heads._mask_search import MaskSearch, Param, Rule, harden
from seecause.heads.erase import Fill, Masks, describe, fill, part
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel


def discover_masks(
    model: ImageModel,
    images: Tensor,
    *,
    steps: int = 250,
    grid: int = 32,
    rate: float = 0.05,
    weights: tuple[float, float, float] = (1.0, 0.01, 0.1),
    param: Param = "clamp",
    init: float = 0.5,
    rho: float = 0.35,
    binarise: Rule = "topk",
    baseline: Fill | Tensor = "mean",
    temperature: float = 1.0,
    early_stop: float | None = None,
    inside: Tensor | None = None,
    cache: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Masks:
    """Masks of normalised images [B, 3, H, W]; the defaults are the paper's.

    `weights` are those of JS, area and TV. `early_stop`: finish an image when less than this share
    of its pixels changed sides in 25 steps (0.005 is a good choice). `inside` [B, H, W] is False on
    padding. `cache`: a folder where masks are kept, by weights, image and options. `progress` is
    told how many images are done, each time some are.
    """
    _check(
        model,
        steps=steps,
        grid=grid,
        param=param,
        init=init,
        weights=weights,
        rate=rate,
        early_stop=early_stop,
    )
    images = images.to(model.device, model.dtype)
    layout, size = model.check(images), (images.shape[-2], images.shape[-1])
    if inside is not None and inside.shape != (len(images), *size):
        raise BadOption(
            "inside", list(inside.shape), f"True where the picture is, {[len(images), *size]}"
        )
    inside = None if inside is None else inside.to(model.device)
    if isinstance(baseline, Tensor):
        baseline = fill(model, images, baseline)  # as many as there are images, or one
    if binarise not in get_args(Rule) or not 0 < rho < 1:
        raise BadOption(
            "binarise, rho",
            (binarise, rho),
            f"one of {', '.join(get_args(Rule))}, and a share of the pixels between 0 and 1",
        )
    search = MaskSearch(
        model, steps, rate, weights, param, init, temperature, early_stop, grid, rho, binarise
    )
    options = {**search.record(), "baseline": describe(baseline)}
    kept = MaskCache(cache, model, options) if cache is not None else None
    known = {} if kept is None else kept.read(images, inside, baseline)
    if progress is not None and known:
        progress(len(known))
    todo = [i for i in range(len(images)) if i not in known]
    graph = (model.n_layers + 1) if isinstance(model, VisionModel) else 4

    def some(a: int, b: int) -> dict[int, tuple[Tensor, ...]]:
        rows = todo[a:b]
        mine = None if inside is None else inside[rows]
        base = fill(
            model,
            images[rows],
            baseline[rows] if isinstance(baseline, Tensor) and len(baseline) > 1 else baseline,
            inside=mine,
        )
        found = zip(*search.run(images[rows], base, mine), strict=True)
        return dict(zip(rows, found, strict=True))

    for found in in_chunks(
        some,
        len(todo),
        fit(max(1, len(todo)), graph * model.forward_bytes(layout), images.device),
        what="masks",
    ):
        known.update(found)
        if kept is not None:
            kept.write(images, inside, baseline, found)
        if progress is not None:
            progress(len(found))
    soft, losses, taken = (
        torch.stack(parts) for parts in zip(*(known[i] for i in range(len(images))), strict=True)
    )
    hard, ties = harden(soft, size, rho=rho, rule=binarise, inside=inside)
    said = {
        "source": "discovered",
        "rho": rho,
        "binarise": binarise,
        **options,
        **protocol(model, images),
    }
    return Masks(hard, soft, ties, losses, taken, inside, said)


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


def _check(
    model: ImageModel,
    *,
    steps: int,
    grid: int,
    param: str,
    init: float,
    weights: tuple[float, float, float],
    rate: float,
    early_stop: float | None,
) -> None:
    if model.sigmoid:
        raise NotDefined(
            "discover_masks",
            "classes answer independently, so there is no distribution to keep",
            "Wrap the model with sigmoid=False",
        )
    if param not in get_args(Param):
        raise BadOption("param", param, f"one of {', '.join(get_args(Param))}")
    if steps < 1 or grid < 2 or rate <= 0:
        raise BadOption(
            "steps, grid, rate",
            (steps, grid, rate),
            "at least one step, a grid of 2 x 2 cells, and a rate above 0",
        )
    if not 0 <= init <= 1 or (param == "sigmoid" and init in (0, 1)):
        raise BadOption("init", init, "a value in [0, 1]; inside it for param='sigmoid'")
    if len(weights) != 3 or min(weights) < 0:
        raise BadOption("weights", weights, "three numbers of at least 0: for JS, area and TV")
    if early_stop is not None and not 0 < early_stop < 1:
        raise BadOption("early_stop", early_stop, "None, or a share of the pixels between 0 and 1")


log = logging.getLogger(__name__)


_NAMES = ("soft", "losses", "steps")


class MaskCache:
    """Reads and writes (soft [g, g], losses [3], steps []) by image."""

    def __init__(self, folder: str | Path, model: ImageModel, options: Mapping[str, Any]):
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise BadOption("cache", str(folder), "a folder; this is a file")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.device = model.device
        self.stem = json.dumps(
            [model.fingerprint(), str(model.dtype), dict(options)], sort_keys=True
        )

    def read(
        self, images: Tensor, inside: Tensor | None, baseline: Fill | Tensor
    ) -> dict[int, tuple[Tensor, ...]]:
        """What is known, by place in the batch."""
        found = {}
        for place in range(len(images)):
            file = self._file(images, inside, baseline, place)
            if file.is_file() and (tensors := self._load(file)) is not None:
                found[place] = tensors
        return found

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
        found: Mapping[int, tuple[Tensor, ...]],
    ) -> None:
        """Each file is written beside its place and moved, so it is whole or not there."""
        for place, tensors in found.items():
            file = self._file(images, inside, baseline, place)
            partial = file.with_suffix(f".{os.getpid()}.partial")
            partial.write_bytes(
                save(
                    {
                        name: t.detach().cpu().contiguous()
                        for name, t in zip(_NAMES, tensors, strict=True)
                    }
                )
            )
            partial.replace(file)

    def _file(
        self, images: Tensor, inside: Tensor | None, baseline: Fill | Tensor, place: int
    ) -> Path:
        rows = slice(place, place + 1)
        own = part(baseline, len(images), rows)
        key = [
            self.stem,
            digest(images[rows]),
            "" if inside is None else digest(inside[rows].float()),
            digest(own) if isinstance(own, Tensor) else "",
        ]
        return (
            self.folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.safetensors"
        )
