"""`sc.attribute`: one call for one image or a thousand."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from seecause import __version__
from seecause.attribution.registry import Maps, find
from seecause.attribution.result import Attribution
from seecause.engine.chunks import budget, memory
from seecause.errors import ViewMismatch
from seecause.models.base import ImageModel
from seecause.target import Spec, parse
from seecause.types import wide


def attribute(
    model: ImageModel, images: Tensor, target: Spec = None, method: str = "caap", **options: Any
) -> Attribution:
    """Which patches caused the answer?

    `images` are normalised [B, 3, H, W] (`model.preprocess`). `target`: None for the predicted
    class; an index or a name; one per image; a pair (a, b) for the contrast of two logits; or a
    function of logits. `options` are the method's own.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> data = sc.data.open_data("critters:clean:test", limit=2)
    >>> images = sc.data.to_batch(model, list(data)).images
    >>> sc.attribute(model, images, target="mossling", method="rollout").maps.shape
    torch.Size([2, 12, 12])
    """
    entry = find(method, model.architecture)
    entry.check(options)
    images = images.to(model.device, model.dtype)
    model.check(images)
    with budget(memory().limit) as held:
        goal = parse(model, target, len(images))
        found = entry.run(model, images, goal, **options)
        if isinstance(found, Tensor):  # scores alone: the target is bound here
            with torch.no_grad():
                found = Maps(found.flatten(1), goal.bind(model(images)))
    if not torch.isfinite(found.scores).all():
        raise ViewMismatch(
            "maps", method, "the map is not finite; the model's answers contain NaN or infinity"
        )
    grid = model.check(images).grid
    return Attribution(
        maps=wide(found.scores).unflatten(1, grid),
        images=wide(model.preprocess.raw(images)).clamp(0, 1).cpu(),
        native=None if found.native is None else wide(found.native),
        class_maps=None if found.class_maps is None else wide(found.class_maps).unflatten(1, grid),
        labels=_labels(model, found.target.classes),
        manifest={
            "method": method,
            "options": {
                name: _plain(value) for name, value in {**entry.options, **options}.items()
            },
            "target": found.target.record(model),
            **({"used": found.said} if found.said else {}),
            **protocol(model, images),
            "memory_halvings": list(held.halvings),
        },
    )


def protocol(model: ImageModel, images: Tensor) -> dict[str, Any]:
    """What every result says about how it came about."""
    layout = model.check(images)
    return {
        "model": model.name,
        "family": model.family,
        "architecture": model.architecture,
        "model_fingerprint": model.fingerprint(),
        "random_weights": model.random_weights,
        "readout": model.readout_name,
        "grid": list(layout.grid),
        "prefix_tokens": layout.prefix,
        "images": list(images.shape),
        "data_fingerprint": digest(images),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of Python, this package and the libraries that decide numbers."""
    return {
        "python": platform.python_version(),
        "seecause": __version__,
        **{p: version(p) for p in ("torch", "timm", "transformers", "torchvision")},
    }


def digest(images: Tensor) -> str:
    """A short name for the exact pixels."""
    return hashlib.sha256(
        images.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    ).hexdigest()[:16]


def _labels(model: ImageModel, classes: Tensor | None) -> list[str]:
    return [] if classes is None else [model.class_name(c) for c in classes.tolist()]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            f"tensor {list(value.shape)}"
            f" {hashlib.sha256(value.detach().cpu().float().numpy().tobytes()).hexdigest()[:12]}"
        )
    return list(value) if isinstance(value, tuple) else value
