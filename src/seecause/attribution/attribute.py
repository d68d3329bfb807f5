"""`sc.attribute`: one call for one image or a thousand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from seecause.attribution.registry import Maps, Method, find
from seecause.attribution.result import Attribution, Attributions
from seecause.engine.chunks import budget, memory, plain_logits
from seecause.errors import BadOption, NotDefined, ViewMismatch
from seecause.files import digest
from seecause.loading import as_view
from seecause.models.base import Architecture, ImageModel, pixels_digest, protocol
from seecause.models.preprocess import Pictures, as_images, file_names
from seecause.target import Spec, Target, best_answers, parse, spread
from seecause.types import wide


@overload
def attribute(
    model: ImageModel | nn.Module,
    images: Pictures,
    target: Spec = None,
    method: str = "caap",
    **options: Any,
) -> Attribution: ...
@overload
def attribute(
    model: ImageModel | nn.Module,
    images: Pictures,
    target: Spec = None,
    *,
    method: list[str] | tuple[str, ...],
    **options: Any,
) -> Attributions: ...
@overload
def attribute(
    model: ImageModel | nn.Module,
    images: Pictures,
    target: Spec = None,
    method: str | Sequence[str] = "caap",
    **options: Any,
) -> Attribution | Attributions: ...


def attribute(
    model: ImageModel | nn.Module,
    images: Pictures,
    target: Spec = None,
    method: str | Sequence[str] = "caap",
    **options: Any,
) -> Attribution | Attributions:
    """Which patches caused the answer? Maps [B, gh, gw], signed and not normalised.

    model    a view (`sc.load`, `sc.wrap`), or a module that `sc.wrap` takes as it is
    images   PIL pictures, paths, raw pixels (uint8), a list of these, or a normalised tensor
             [B, 3, H, W]
    target   None: the predicted class; an index or a name, or one for each image; a pair (a, b):
             the contrast of two logits; a function of logits; of a detector or a model of pixels
             `sc.Box` or `sc.Region`
    method   one of `sc.methods()`, or several: then the result is a dictionary (`Attributions`)
    options  the method's own; with several methods each goes to all that have it

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> data = sc.data.open_data("critters:clean:test", limit=2)
    >>> images = sc.data.to_batch(model, list(data)).images
    >>> att = sc.attribute(model, images, target="mossling", method="rollout")
    >>> att.maps.shape, att[0].maps.shape, att.answers[0][0].name
    (torch.Size([2, 12, 12]), torch.Size([1, 12, 12]), 'quillow')
    >>> sorted(sc.attribute(model, images, method=["caap", "mosaic"]))
    ['caap', 'mosaic']
    """
    model = as_view(model)
    names = file_names(images)
    if isinstance(method, str):
        return replace(_attribute(model, images, target, method, options), names=names)
    images = as_images(model, images)
    return Attributions(
        {
            name: replace(_attribute(model, images, target, name, own), names=names)
            for name, own in options_by_method(method, options, model.architecture).items()
        }
    )


def options_by_method(
    methods: Sequence[str], options: Mapping[str, Any], architecture: Architecture
) -> dict[str, dict[str, Any]]:
    """Options that several methods share, to every one that has them; one that none has is
    refused."""
    entries = {name: find(name, architecture) for name in methods}
    if not entries:
        raise BadOption("method", [], "at least one method; `sc.methods()` lists them")
    for key, value in options.items():
        if not any(key in entry.options for entry in entries.values()):
            known = sorted({key for entry in entries.values() for key in entry.options})
            expected = f"an option of {', '.join(entries)}: {', '.join(known) or 'there are none'}"
            raise BadOption(key, value, expected)
    return {
        name: {key: value for key, value in options.items() if key in entry.options}
        for name, entry in entries.items()
    }


def _attribute(
    model: ImageModel, pictures: Pictures, spec: Spec, method: str, options: dict[str, Any]
) -> Attribution:
    if not model.aimed:
        return _attribute_rows(model, pictures, spec, method, options)
    entry = find(method, model.architecture)
    options = _options(entry, model, options)
    entry.check(options)
    with model.eval_mode(frozen=True), budget(memory().limit) as held:
        images = as_images(model, pictures)
        images = images.clone() if images.is_inference() else images
        model.check(images)
        goal = parse(model, spec, len(images))
        maps = _run(entry, model, images, goal, options)
        logits = maps.target.logits  # of the plain run that the method made, or one more
        if logits is None or len(logits) != len(images):
            logits = plain_logits(model, images)
    if not torch.isfinite(maps.scores).all():
        raise ViewMismatch(
            "maps", method, "the map is not finite; the model's answers contain NaN or infinity"
        )
    logits = logits.detach()
    target = maps.target.bind(logits)
    probabilities = spread(wide(logits), "prob", sigmoid=model.sigmoid)
    cells = model.layout_at(images.shape[-2], images.shape[-1]).cells
    checks = {name: values.tolist() for name, values in maps.checks.items()}
    return Attribution(
        maps=wide(maps.scores).unflatten(1, cells),
        images=model.preprocess.shown(images),
        native=None if maps.native is None else wide(maps.native),
        class_maps=None if maps.class_maps is None else wide(maps.class_maps).unflatten(1, cells),
        errors=None if maps.errors is None else wide(maps.errors).unflatten(1, cells),
        probabilities=probabilities,
        labels=target.labels(model),
        answers=best_answers(model, probabilities, target),
        manifest={
            "method": method,
            "options": {
                name: _plain(value) for name, value in {**entry.options, **options}.items()
            },
            "target": target.record(model),
            **({"used": maps.used} if maps.used else {}),
            **({"checks": checks} if checks else {}),
            **protocol(model, images),
            "memory_halvings": list(held.halvings),
        },
    )


def _attribute_rows(
    model: ImageModel, pictures: Pictures, spec: Spec, method: str, options: dict[str, Any]
) -> Attribution:
    """One picture after the other, each with the row that `spec` asks about; a list has one for
    each."""
    images = as_images(model, pictures)
    if getattr(spec, "ndim", 0) > 0:  # tensors and arrays have one class for each picture
        spec = spec.tolist()
    specs = list(spec) if isinstance(spec, list) else [spec] * len(images)
    if len(specs) != len(images):
        raise BadOption(
            "target", f"{len(specs)} rows", f"one, or one for each of the {len(images)} images"
        )
    aims = [model.aim(image, row) for image, row in zip(images.split(1), specs, strict=True)]
    if len({aim.model.values for aim in aims}) > 1:
        raise BadOption("target", spec, "classes for all pictures, or numbers for all")
    parts = []
    for place, (image, aim) in enumerate(zip(images.split(1), aims, strict=True)):
        own = {name: _of_picture(value, place, len(images)) for name, value in options.items()}
        part = _attribute(aim.model, image, aim.target, method, own)
        label = f"{aim.model.class_name(aim.target)} of {aim.name}"
        target = {**part.manifest["target"], **aim.record, "name": [label]}
        if aim.model.values:
            target["values"] = True
            part = replace(part, probabilities=None, answers=[])
        manifest = {**part.manifest, "target": target, "readout": model.readout_name}
        regions = aim.pixels.to(torch.uint8)[None]
        parts.append(replace(part, labels=[label], manifest=manifest, regions=regions))
    return Attribution.join(parts, pixels_digest(images))


def _of_picture(value: Any, place: int, count: int) -> Any:
    """An option for one picture of `count`: of pictures, such as blanks, its own."""
    pictures = isinstance(value, Tensor) and value.ndim == 4 and len(value) == count
    return value[place : place + 1] if pictures else value


def _options(entry: Method, model: ImageModel, options: dict[str, Any]) -> dict[str, Any]:
    """The given options; a model whose outputs are no logits has no probability, so its score is
    the logit."""
    usual = {"score": "logit"} if model.values else {}
    if model.values and "score" in entry.options and options.get("score", "logit") != "logit":
        raise BadOption("score", options["score"], "logit: what is explained is a number itself")
    return {name: value for name, value in usual.items() if name in entry.options} | options


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


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        values = value.detach().cpu().float().numpy().tobytes()
        return f"tensor {list(value.shape)} {digest(values, length=12)}"
    return list(value) if isinstance(value, tuple) else value
