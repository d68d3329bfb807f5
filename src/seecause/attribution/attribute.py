"""`sc.attribute`: attribution maps of images, whatever the images come as."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from seecause.attribution.registry import Maps, Method, find, join
from seecause.attribution.result import Attribution, Attributions
from seecause.data.dataset import SkippedImage
from seecause.data.images import ImageFacts, ImageOpener, find_images
from seecause.engine.chunks import budget, memory, plain_logits
from seecause.errors import BadImage, BadOption, DataMissing, NotDefined, ViewMismatch
from seecause.files import digest
from seecause.loading import as_view
from seecause.models.base import ImageModel, pixels_digest, protocol
from seecause.models.preprocess import Picture, Pictures, as_images, file_names
from seecause.options import Count, checked
from seecause.target import Spec, Target, best_answers, parse, spread
from seecause.types import wide

BATCH = 16


@overload
def attribute(
    model: ImageModel | nn.Module,
    images: Pictures | Iterable[Any],
    target: Spec = None,
    method: str = "caap",
    **options: Any,
) -> Attribution: ...
@overload
def attribute(
    model: ImageModel | nn.Module,
    images: Pictures | Iterable[Any],
    target: Spec = None,
    *,
    method: list[str] | tuple[str, ...],
    **options: Any,
) -> Attributions: ...
@checked
def attribute(
    model: ImageModel | nn.Module,
    images: Pictures | Iterable[Any],
    target: Spec = None,
    method: str | Sequence[str] = "caap",
    *,
    batch: Count = BATCH,
    skipped: list[SkippedImage] | None = None,
    **options: Any,
) -> Any:
    """Compute an attribution map for each image.

    Args:
        model: A model returned by `sc.load` or `sc.wrap`, or an `nn.Module` that `sc.wrap` takes.
        images: A normalised tensor [B, 3, H, W], PIL images or arrays of raw pixels; or files,
            folders, globs, samples of datasets ("critters:clean:test#0"), a generator, or a
            DataLoader of batches, which are read `batch` at a time.
        target: The class to explain: an index, a name, one for each image, a pair `(a, b)` for the
            difference of two logits, or a function of logits. `sc.Box` or `sc.Region` for detectors
            and models of pixels. None explains the predicted class.
        method: A name from `seecause list methods`, or several.
        batch: Images that are read at once, where they are read one by one.
        skipped: A list that receives the images that cannot be read; without it they are errors.
        **options: Options of the method, such as `tail="patched"`. With several methods each option
            goes to every method that has it.

    Returns:
        An `Attribution` with `maps` [B, rows, columns], signed and not normalised, and the protocol
        that produced them; with several methods a dictionary of them (`Attributions`).

    Raises:
        UnknownName: If no method or class has that name.
        BadOption: If an option does not exist or has an impossible value.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> files = [f"critters:clean:test#{place}" for place in range(3)]
        >>> att = sc.attribute(model, files, target="mossling", method="rollout")
        >>> att.maps.shape, att[0].maps.shape, att.answers[0][0].name
        (torch.Size([3, 12, 12]), torch.Size([1, 12, 12]), 'quillow')
        >>> sorted(sc.attribute(model, files, method=["caap", "mosaic"]))
        ['caap', 'mosaic']
    """
    model = as_view(model)
    own = {method: options} if isinstance(method, str) else by_method(method, options, model)
    if read_one_by_one(model, images):
        runs = _attribute_stream(model, images, target, own, batch=batch, skipped=skipped)
    else:
        names, tensor = file_names(images), as_images(model, images)
        runs = {
            name: replace(attribute_batch(model, tensor, target, name, chosen), names=names)
            for name, chosen in own.items()
        }
    return runs[method] if isinstance(method, str) else Attributions(runs)


def by_method(
    methods: Sequence[str], options: Mapping[str, Any], model: ImageModel
) -> dict[str, dict[str, Any]]:
    """Options that several methods share, for each method that has them."""
    entries = {name: find(name, model.architecture) for name in methods}
    if not entries:
        raise BadOption("method", [], "at least one method; `seecause list methods` lists them")
    known = sorted({key for entry in entries.values() for key in entry.options})
    for key in options.keys() - known:
        expected = f"an option of {', '.join(entries)}: {', '.join(known) or 'there are none'}"
        raise BadOption(key, options[key], expected)
    return {
        name: {key: value for key, value in options.items() if key in entry.options}
        for name, entry in entries.items()
    }


def _attribute_stream(
    model: ImageModel,
    images: Any,
    target: Spec,
    own: Mapping[str, dict[str, Any]],
    *,
    batch: int,
    skipped: list[SkippedImage] | None,
) -> dict[str, Attribution]:
    """Attributions of images that are read a batch at a time."""
    runs: dict[str, list[Attribution]] = {name: [] for name in own}
    total = ""
    for part in image_batches(model, images, batch=batch, skipped=skipped):
        tensor = part.images.to(model.device, model.dtype)
        total = pixels_digest(tensor, total)
        for name, options in own.items():
            run = attribute_batch(model, tensor, part.targets(target), name, options)
            runs[name].append(replace(run, names=part.names))
    check_one_size(next(iter(runs.values())))
    return {name: Attribution.join(parts, total) for name, parts in runs.items()}


def check_one_size(parts: Sequence[Attribution]) -> None:
    """Refuse batches that are not one result: none, or images of several sizes."""
    if not parts:
        raise DataMissing("images", "none can be read", "give at least one")
    sizes = {tuple(part.images.shape[2:]) for part in parts}
    if len(sizes) > 1:
        listed = ", ".join(f"{height} x {width}" for height, width in sorted(sizes))
        raise BadOption("images", listed, "one size; explain images of each size by themselves")


def attribute_batch(
    model: ImageModel, images: Tensor, spec: Spec, method: str, options: dict[str, Any]
) -> Attribution:
    """The attribution of a normalised batch [B, 3, H, W] by one method."""
    if not model.aimed:
        return _attribute_rows(model, images, spec, method, options)
    entry = find(method, model.architecture)
    entry.check(options)
    with model.eval_mode(frozen=True), budget(memory().limit) as held:
        images = images.clone() if images.is_inference() else images
        model.check(images)
        maps = _run(entry, model, images, parse(model, spec, len(images)), options)
        logits = maps.target.logits  # of the plain run that the method made, or one more
        if logits is None or len(logits) != len(images):
            logits = plain_logits(model, images)
    if not torch.isfinite(maps.scores).all():
        reason = "the map is not finite; the model's logits contain NaN or infinity"
        raise ViewMismatch("maps", method, reason)
    logits = logits.detach()
    target = maps.target.bind(logits)
    probabilities = spread(wide(logits), "prob", sigmoid=model.sigmoid)
    cells = model.layout_at(images.shape[-2], images.shape[-1]).cells

    def on_grid(values: Tensor | None) -> Tensor | None:
        return None if values is None else wide(values).unflatten(1, cells)

    every = {**entry.options, **options}
    return Attribution(
        maps=wide(maps.scores).unflatten(1, cells),
        images=model.preprocess.shown(images),
        native=None if maps.native is None else wide(maps.native),
        class_maps=on_grid(maps.class_maps),
        errors=on_grid(maps.errors),
        probabilities=probabilities,
        labels=target.labels(model),
        answers=best_answers(model, probabilities, target),
        manifest={
            "method": method,
            "options": {name: _for_manifest(value) for name, value in every.items()},
            "target": target.record(model),
            **({"used": maps.used} if maps.used else {}),
            **({"checks": {n: v.tolist() for n, v in maps.checks.items()}} if maps.checks else {}),
            **protocol(model, images),
            "memory_halvings": list(held.halvings),
        },
    )


def _attribute_rows(
    model: ImageModel, images: Tensor, spec: Spec, method: str, options: dict[str, Any]
) -> Attribution:
    """Attributions of a model that predicts many rows: image by image, each for its own row."""
    if getattr(spec, "ndim", 0) > 0:  # tensors and arrays have one class for each image
        spec = spec.tolist()
    specs = list(spec) if isinstance(spec, list) else [spec] * len(images)
    if len(specs) != len(images):
        expected = f"one, or one for each of the {len(images)} images"
        raise BadOption("target", f"{len(specs)} rows", expected)
    aims = [model.aim(image, row) for image, row in zip(images.split(1), specs, strict=True)]
    parts = []
    for place, (image, aim) in enumerate(zip(images.split(1), aims, strict=True)):
        own = {
            name: value[place : place + 1] if _one_for_each(value, len(images)) else value
            for name, value in options.items()
        }
        part = attribute_batch(aim.model, image, aim.target, method, own)
        label = f"{aim.model.class_name(aim.target)} of {aim.name}"
        target = {**part.manifest["target"], **aim.record, "name": [label]}
        manifest = {**part.manifest, "target": target, "readout": model.readout_name}
        regions = aim.pixels.to(torch.uint8)[None]
        parts.append(replace(part, labels=[label], manifest=manifest, regions=regions))
    return Attribution.join(parts, pixels_digest(images))


def _one_for_each(value: Any, count: int) -> bool:
    """Whether an option holds images, such as blanks, one for each of `count` images."""
    return isinstance(value, Tensor) and value.ndim == 4 and len(value) == count


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


def _for_manifest(value: Any) -> Any:
    if isinstance(value, Tensor):
        values = value.detach().cpu().float().numpy().tobytes()
        return f"tensor {list(value.shape)} {digest(values, length=12)}"
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images that were read: their places among all that came in, and what is known about them."""

    images: Tensor  # [B, 3, H, W], normalised
    places: list[int]
    names: list[str]
    facts: list[ImageFacts]
    others: Tensor | None = None  # [B, 3, H, W], a second version of each

    def targets(self, target: Spec) -> Spec:
        """The target of these images: of a list with one for each image, their own."""
        if getattr(target, "ndim", 0) > 0:
            target = target.tolist()
        if isinstance(target, tuple) and len(target) != 2:
            target = list(target)
        if not isinstance(target, list):
            return target
        if max(self.places) >= len(target):
            raise BadOption("target", f"a list of {len(target)}", "one for each image")
        return [target[place] for place in self.places]

    def take(self, rows: list[int]) -> ImageBatch:
        """Some of them."""
        lists = ([values[row] for row in rows] for values in (self.places, self.names, self.facts))
        others = None if self.others is None else self.others[rows]
        return ImageBatch(self.images[rows], *lists, others)


def read_one_by_one(model: ImageModel, images: Any) -> bool:
    """Whether images are read from disk or come from an iterator; the others are in memory, or
    files that only the model's preprocessing can read (films)."""
    if isinstance(images, str | Path):
        return model.preprocess.kind == "images"
    if isinstance(images, list | tuple):
        return any(isinstance(image, str | Path) for image in images) and read_one_by_one(model, "")
    return not isinstance(images, Image.Image | np.ndarray | Tensor | bytes | Mapping)


def image_batches(
    model: ImageModel,
    images: Pictures | Iterable[Any],
    *,
    batch: int = BATCH,
    names: Sequence[str] | None = None,
    others: Pictures | Iterable[Any] | None = None,
    skipped: list[SkippedImage] | None = None,
    facts: bool = False,
) -> Iterator[ImageBatch]:
    """Read and normalise images, `batch` at a time; each is released when its batch is made.

    Args:
        others: A second version of each image.
        skipped: Receives the images that cannot be read.
        facts: Whether labels, masks and sizes of files and samples are read, too.

    A batch ends early where images of another size follow.
    """
    opener = ImageOpener()
    rows: list[ImageBatch] = []  # of one image each
    seconds = None if others is None else _singles(model, others)
    for place, item in enumerate(_singles(model, images)):
        other = None if seconds is None else next(seconds, None)
        if seconds is not None and other is None:
            raise BadOption("others", f"fewer than images ({place})", "one for each image")
        file = str(item) if isinstance(item, str | Path) else getattr(item, "filename", "")
        name = names[place] if names else file or f"image {place}"
        try:
            opened = _opened(model, item, opener)
            image = _prepared(model, opened)
            known = _facts(model, item, opened, opener) if facts else ImageFacts()
            version = None
            if other is not None:
                version = _prepared(model, _opened(model, other, opener, second=True))
        except (BadImage, DataMissing) as bad:
            if skipped is None:
                raise
            skipped.append(SkippedImage(name, str(bad)))
            continue
        if version is not None and version.shape != image.shape:
            raise BadOption("others", list(version[0].shape), f"images of {list(image[0].shape)}")
        if rows and rows[0].images.shape != image.shape:
            yield join(rows)
            rows = []
        rows.append(ImageBatch(image, [place], [name], [known], version))
        if len(rows) == batch:
            yield join(rows)
            rows = []
    if seconds is not None and next(seconds, None) is not None:
        raise BadOption("others", "more than images", "one for each image")
    if rows:
        yield join(rows)


def _singles(model: ImageModel, images: Any) -> Iterator[Any]:
    """One image after the other, whatever batches they come in."""
    items: Any = model.preprocess.unpacked(images)
    if isinstance(items, str | Path) and model.preprocess.kind == "images":
        items = find_images([str(items)])
    elif items is None or (isinstance(items, Picture | Mapping) and getattr(items, "ndim", 0) < 4):
        items = [items]
    return chain.from_iterable(_rows_of(model, item) for item in items)


def _rows_of(model: ImageModel, item: Any) -> Iterable[Any]:
    """The images of one element: an image, a list of them, or a batch (alone, first with labels
    behind it, or under the name that processors give it)."""
    if isinstance(item, Mapping):
        item = item["pixel_values"]
    item = model.preprocess.unpacked(item)
    if isinstance(item, tuple | list) and item:
        is_pair = isinstance(item, tuple) or getattr(item[0], "ndim", 0) >= 4
        return _rows_of(model, item[0]) if is_pair else item
    dimensions = getattr(item, "ndim", 0)
    if dimensions == 5 and item.shape[1] == 1:  # a DataLoader over `model.preprocess`
        return item[:, 0]
    return item if dimensions == 4 else [item]


def _opened(model: ImageModel, item: Any, opener: ImageOpener, *, second: bool = False) -> Any:
    if not isinstance(item, str | Path) or model.preprocess.kind != "images":
        return item
    return opener(str(item), second=second)


def _prepared(model: ImageModel, opened: Any) -> Tensor:
    """One image, [1, 3, H, W], normalised."""
    if isinstance(opened, Image.Image):  # stays on the CPU until its batch is full
        return model.preprocess(opened)[:1]
    return as_images(model, opened)[:1]


def _facts(model: ImageModel, item: Any, opened: Image.Image, opener: ImageOpener) -> ImageFacts:
    """What is known about a file or a sample; its mask in the model's frame."""
    if not isinstance(item, str | Path):
        return ImageFacts()
    if model.preprocess.kind != "images":
        return ImageFacts(Path(item).absolute().parent.name)
    height, width = opened.size[::-1]
    known, size = replace(opener.facts(str(item)), size=(height, width)), [height, width]
    if known.mask is None:
        return known
    if list(known.mask.shape) != size:
        raise BadImage(
            f"the mask of {item}",
            f"{list(known.mask.shape)} pixels for an image of {size}",
            "give masks of the images' own size",
        )
    return replace(known, mask=model.preprocess.mask(known.mask))
