"""`sc.attribute`: one call for one image or a thousand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from seecause._files import digest
from seecause.attribution.registry import Maps, Method, find
from seecause.attribution.result import Attribution
from seecause.engine.chunks import budget, memory
from seecause.errors import NotDefined, ViewMismatch
from seecause.loading import as_view
from seecause.models.base import ImageModel, protocol
from seecause.models.inputs import Pictures, as_images
from seecause.target import Spec, Target, parse
from seecause.types import wide


def attribute(
    model: ImageModel | nn.Module,
    images: Pictures,
    target: Spec = None,
    method: str = "caap",
    **options: Any,
) -> Attribution:
    """Which patches caused the answer?

    `model` is a view, or a module that `sc.wrap` takes as it is. `images`: PIL pictures, paths, raw
    pixels (uint8), a list of these, or a normalised tensor [B, 3, H, W]. `target`: None for the
    predicted class; an index or a name; one per image; a pair (a, b) for the contrast of two
    logits; or a function of logits. `options` are the method's own.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> data = sc.data.open_data("critters:clean:test", limit=2)
    >>> images = sc.data.to_batch(model, list(data)).images
    >>> sc.attribute(model, images, target="mossling", method="rollout").maps.shape
    torch.Size([2, 12, 12])
    """
    model = as_view(model)
    entry = find(method, model.architecture)
    entry.check(options)
    with model.settled(frozen=True), budget(memory().limit) as held:
        images = as_images(model, images)
        images = images.clone() if images.is_inference() else images
        model.check(images)
        goal = parse(model, target, len(images))
        maps = _run(entry, model, images, goal, options)
    if not torch.isfinite(maps.scores).all():
        raise ViewMismatch(
            "maps", method, "the map is not finite; the model's answers contain NaN or infinity"
        )
    grid = model.layout_at(images.shape[-2], images.shape[-1]).grid
    return Attribution(
        maps=wide(maps.scores).unflatten(1, grid),
        images=wide(model.preprocess.raw(images)).clamp(0, 1).cpu(),
        native=None if maps.native is None else wide(maps.native),
        class_maps=None if maps.class_maps is None else wide(maps.class_maps).unflatten(1, grid),
        errors=None if maps.errors is None else wide(maps.errors).unflatten(1, grid),
        labels=_labels(model, maps.target.classes),
        manifest={
            "method": method,
            "options": {
                name: _plain(value) for name, value in {**entry.options, **options}.items()
            },
            "target": maps.target.record(model),
            **({"used": maps.used} if maps.used else {}),
            **_checks(maps),
            **protocol(model, images),
            "memory_halvings": list(held.halvings),
        },
    )


def _run(
    entry: Method, model: ImageModel, images: Tensor, goal: Target, options: dict[str, Any]
) -> Maps:
    try:
        maps = entry.run(model, images, goal, **options)
    except RuntimeError as failure:
        if "Inference tensors cannot be saved for backward" not in str(failure):
            raise
        raise NotDefined(
            entry.name,
            f"the weights of {model.name}, or a tensor it was given, were made under"
            " torch.inference_mode and can have no part in gradients",
            "Make them outside of it, or use method='caap', which takes no gradient",
        ) from failure
    if isinstance(maps, Maps):
        return maps
    with torch.no_grad():  # scores alone: the target is bound here
        return Maps(maps.flatten(1), goal.bind(model(images)))


def _checks(maps: Maps) -> dict[str, Any]:
    """What a method says about its own exactness, one number for each picture."""
    if not maps.checks:
        return {}
    return {"checks": {name: values.tolist() for name, values in maps.checks.items()}}


def _labels(model: ImageModel, classes: Tensor | None) -> list[str]:
    return [] if classes is None else [model.class_name(c) for c in classes.tolist()]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        values = value.detach().cpu().float().numpy().tobytes()
        return f"tensor {list(value.shape)} {digest(values, length=12)}"
    return list(value) if isinstance(value, tuple) else value
