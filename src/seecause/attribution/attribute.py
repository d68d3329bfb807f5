"""`sc.attribute` and `sc.explain`: maps of images, whatever the images come as."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from PIL import Image
from torch import Tensor, nn

from seecause.attribution.registry import Maps, find, join, size_of
from seecause.attribution.result import Attribution, MapResult
from seecause.data.dataset import (
    IGNORE,
    ImageFacts,
    ImageOpener,
    Size,
    SkippedImage,
    find_images,
    read_ahead,
)
from seecause.engine.chunks import beside, budget, fit, memory, plain_logits
from seecause.engine.trace import need_gradients, special_rows
from seecause.errors import (
    BadImage,
    BadOption,
    DataMissing,
    NotDefined,
    ViewMismatch,
)
from seecause.files import digest
from seecause.loading import as_view
from seecause.models.base import ImageModel, pixels_digest, protocol
from seecause.models.block import wide
from seecause.models.preprocess import (
    Images,
    OneImage,
    Preprocess,
    as_images,
    check_range,
    file_names,
)
from seecause.models.view import VisionModel
from seecause.options import checked
from seecause.target import Answer, Region, Spec, best_answers, need_class, parse, spread

if TYPE_CHECKING:
    from seecause.attribution.evidence import Evidence, Interactions

BATCH, GPU_BATCH = 16, 128
RUNS = 4  # of one image, which a sweep holds at once
Inputs = Images | Iterable[Any]
ModelLike = ImageModel | nn.Module
Options = Mapping[str, Any]
Also = Collection[Literal["evidence", "interactions"]]


@checked
def attribute(
    model: ModelLike,
    images: Inputs,
    target: Spec = None,
    method: str = "caap",
    *,
    skipped: list[SkippedImage] | None = None,
    **options: Any,
) -> Attribution:
    """Compute an attribution map for each image.

    Args:
        model: A model returned by `sc.load` or `sc.wrap`, or an `nn.Module` that `sc.wrap` takes.
        images: A normalised tensor [B, 3, H, W], PIL images or arrays of raw pixels; or files,
            folders, globs, samples of datasets ("critters:clean:test#0"), a generator, or a
            DataLoader of batches.
        target: The class to explain: an index, a name, one for each image, a pair `(a, b)` for the
            difference of two logits, or a function of logits. `sc.Box` or `sc.Region` for detectors
            and models of pixels. None explains the predicted class.
        method: A name from `seecause list methods`.
        skipped: A list that receives the images that cannot be read; without it they are errors.
        **options: Options of the method, such as `tail="patched"`.

    Returns:
        An `Attribution` with `maps` [B, rows, columns], signed and not normalised, and the protocol
        that produced them.

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
    """
    model = as_view(model)
    in_memory = isinstance(images, Tensor) or (
        model.preprocess.kind != "images" and isinstance(images, OneImage | list | tuple | Mapping)
    )
    if in_memory:
        given = cast(Any, images)
        late = isinstance(given, Tensor) and given.is_cuda and model.aimed  # it waits for a GPU
        names, tensor = file_names(given), as_images(model, given, check=not late)
        found = attribute_batch(model, tensor, target, method, options, late=late)
        return replace(found, names=names)
    return explain(
        model, images, methods=[method], target=target, options={method: options}, skipped=skipped
    ).first


def attribute_batch(
    model: ImageModel,
    images: Tensor,
    spec: Spec,
    method: str,
    options: Options,
    *,
    late: bool = False,
) -> Attribution:
    """The attribution of a normalised batch [B, 3, H, W] by one method; `late` checks the range of
    its pixels beside the maps."""
    if not model.aimed:
        return _attribute_rows(model, images, spec, method, options)
    entry = find(method, model.architecture)
    entry.check(options)
    with model.eval_mode(frozen=True), budget(memory().limit) as held:
        images = images.clone() if images.is_inference() else images
        model.check(images)
        goal, aside = parse(model, spec, len(images)), beside(model.device)
        try:
            maps = entry.run(model, images, goal, **options)
        except RuntimeError as failure:
            if "Inference tensors cannot be saved for backward" not in str(failure):
                raise
            reason = f"weights of {model.name}, or the images, were made under torch.inference_mode"
            remedy = "Make them outside of it, or use method='caap', which takes no gradient"
            raise NotDefined(method, reason, remedy) from failure
        cells = model.layout_at(*size_of(images)).cells
        shape = [*getattr(getattr(maps, "scores", maps), "shape", ())]
        if not isinstance(maps, Maps) or shape != [len(images), math.prod(cells)]:
            expected = f"a method that returns Maps with scores [{len(images)}, {math.prod(cells)}]"
            raise BadOption(
                "method", f"{method}, which returned {type(maps).__name__} {shape}", expected
            )
        logits = maps.target.logits  # of the plain run that the method made, or one more
        if logits is None or len(logits) != len(images):
            logits = plain_logits(model, images)
    logits = logits.detach()
    probabilities = spread(wide(logits), "prob", sigmoid=model.sigmoid)
    with aside:  # while the GPU is busy with the maps
        if late:
            check_range(model, images)
        shown, record = model.preprocess.shown(images), protocol(model, images)
    if not maps.scores.cpu().isfinite().all():
        if logits.isfinite().all():
            reason = "its map has NaN or infinity, though the model's logits are finite"
            raise NotDefined(method, reason, "Use other options, another image or another method")
        reason = "the map is not finite; the model's logits contain NaN or infinity"
        raise ViewMismatch("maps", method, reason)
    target = maps.target.bind(logits)
    target = target.given(*(tensor.cpu() for tensor in target.tensors))

    def on_grid(values: Tensor | None) -> Tensor | None:
        return None if values is None else wide(values).unflatten(1, cells)

    every = {**entry.options, **options}
    return Attribution(
        maps=wide(maps.scores).unflatten(1, cells),
        images=shown,
        native=None if maps.native is None else wide(maps.native),
        class_maps=on_grid(maps.class_maps),
        errors=on_grid(maps.errors),
        probabilities=probabilities,
        labels=target.labels(model),
        answers=best_answers(model, probabilities.cpu(), target),
        manifest={
            "method": method,
            "options": {name: _for_manifest(value) for name, value in every.items()},
            "target": target.record(model),
            **({"used": maps.used} if maps.used else {}),
            **record,
            "memory_halvings": list(held.halvings),
        },
    )


def _attribute_rows(
    model: ImageModel, images: Tensor, spec: Spec, method: str, options: Options
) -> Attribution:
    """Attributions of a detector or segmentation model, computed image by image."""
    specs = _listed(spec)
    specs = specs if isinstance(specs, list) else [specs] * len(images)
    aims = [model.aim(image, row) for image, row in zip(images.split(1), specs, strict=True)]
    parts = []
    for place, (image, aim) in enumerate(zip(images.split(1), aims, strict=True)):
        own = {  # an option may hold images, such as blanks, one for each image
            name: value[place : place + 1]
            if isinstance(value, Tensor) and value.ndim == 4 and len(value) == len(images)
            else value
            for name, value in options.items()
        }
        part = attribute_batch(aim.model, image, aim.target, method, own)
        label = f"{aim.model.class_name(aim.target)} of {aim.name}"
        target = {**part.manifest["target"], **aim.record, "name": [label]}
        manifest = {**part.manifest, "target": target, "readout": model.readout_name}
        regions = aim.pixels.to(torch.uint8)[None]
        parts.append(replace(part, labels=[label], manifest=manifest, regions=regions))
    return Attribution.join(parts, pixels_digest(images))


def _for_manifest(value: Any) -> Any:
    if isinstance(value, Tensor):
        values = value.detach().cpu().float().numpy().tobytes()
        return f"tensor {list(value.shape)} {digest(values, length=12)}"
    return list(value) if isinstance(value, tuple) else value


# ---------------------------------------------------------------- explanations


@dataclass(frozen=True, eq=False)
class Explanation(MapResult):
    """Predictions and maps of some images.

    Attributes:
        names: Names of the images.
        answers: The most probable classes of each image, and the explained one.
        runs: Attributions of the same images, by method.
        fingerprint: A digest of these images and all that were explained before them.
        evidence: Evidence in the order of mosaic's maps (or the first method's), if asked for.
        interactions: Interactions, if asked for.
        places: Indices of the images among all that were given; some cannot be read.
        truths: The class of each image, where it is known.
        background: The share of the first method's map, above its median, outside of the object,
            where there are masks.
        background_area: The share of an even map outside of the object.
    """

    names: Sequence[str]
    answers: Sequence[Sequence[Answer]]
    runs: Mapping[str, Attribution]
    fingerprint: str = ""
    evidence: Evidence | None = None
    interactions: Interactions | None = None
    places: Sequence[int] = ()
    truths: Sequence[str | None] = ()
    background: Sequence[float | None] = ()
    background_area: Sequence[float | None] = ()

    @property
    def first(self) -> Attribution:
        """The attribution of the first method."""
        return next(iter(self.runs.values()))

    def save(self, folder: str | Path) -> Path:
        """Write a folder with the page (index.html), its images and maps (safetensors)."""
        from seecause.report.explain import write_explanations

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_explanations(folder, [self], self.names)
        return folder


@checked
def explain(
    model: ModelLike,
    images: Inputs,
    *,
    methods: Sequence[str] | None = None,
    target: Spec = None,
    also: Also = (),
    others: Inputs | None = None,
    options: Mapping[str, Options] | None = None,
    skipped: list[SkippedImage] | None = None,
) -> Explanation:
    """Explain predictions: what does the model predict, and which patches caused it?

    Args:
        model: A model returned by `sc.load` or `sc.wrap`, or an `nn.Module` that `sc.wrap` takes.
        images: Any number of what `sc.attribute` takes.
        methods: Names of methods. None means CAAP, and mosaic where it is defined.
        target: The class to explain, as for `sc.attribute`. None explains the predicted class (of a
            detector the box with the highest score).
        also: "evidence" (in the order of mosaic's maps, or the first method's without
            mosaic) and "interactions".
        others: A second version of each image that should get the same prediction, for instance
            without a mark. It is used as the image's blank, so maps show what of the difference
            caused the prediction.
        options: Options by method.
        skipped: A list that receives the images that cannot be read; without it they are errors.

    Returns:
        An `Explanation`; `.page(path)` writes one HTML file, `.save(folder)` page, images and maps.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> found = sc.explain(model, "critters:clean:test#0", also=["evidence"])
        >>> list(found.runs), found.answers[0][0].name, int(found.evidence.enough.count)
        (['caap', 'mosaic'], 'quillow', 2)
    """
    parts = list(
        explain_batches(
            model, images, methods=methods, target=target, others=others, options=options,
            also=also, skipped=skipped, batch=sys.maxsize,
        )
    )  # fmt: skip
    if not parts:
        raise DataMissing("images", "none can be read", "give at least one")
    if len(parts) > 1:
        sizes = [list(part.first.images.shape[2:]) for part in parts]
        raise BadOption("images", sizes, "images of one size in each call")
    return parts[0]


def explain_batches(
    model: ModelLike,
    images: Inputs,
    *,
    methods: Sequence[str] | None = None,
    target: Spec = None,
    also: Also = (),
    others: Inputs | None = None,
    options: Mapping[str, Options] | None = None,
    names: Sequence[str] | None = None,
    batch: int | None = None,
    workers: int = 0,
    skipped: list[SkippedImage] | None = None,
) -> Iterator[Explanation]:
    """The explanations of `explain`, one for each batch: memory does not grow with the number of
    images.

    Args:
        model, images, methods, target, also, others, options, skipped: As for `explain`.
        names: Names of the images, instead of those of their files.
        batch: Images that are explained at once; None for as many as suit the device.
        workers: Processes that read `images`, then a list of files, with the same results. Give
            the list `skipped`, too: errors keep their kind in one process only.
    """
    model = as_view(model)
    if also and not model.aimed:
        reason = f"{model.name} predicts many rows"
        raise NotDefined(" and ".join(sorted(also)), reason, "Omit this option")
    if model.aimed:
        need_class(model, target.region if isinstance(target, FileRegion) else target)
    methods = default_methods(model) if methods is None else methods
    if not methods:
        raise BadOption("methods", [], "at least one method, or None for the usual ones")
    for method in methods if others is not None else ():
        if "blank" not in find(method, model.architecture).options:
            expected = "methods with a blank, such as caap: the other version is the image's blank"
            raise BadOption("others", f"other versions for {method}", expected)
    total = ""
    for part in image_batches(
        model, images, batch=batch or batch_size(model), workers=workers, names=names,
        others=others, skipped=skipped, target=target,
    ):  # fmt: skip
        tensor, rows = part.images.to(model.device, model.dtype), part.targets(target)
        total = pixels_digest(tensor, total)
        other = {} if part.others is None else {"blank": part.others.to(tensor)}
        runs = {}
        for method in methods:
            own = {**(options or {}).get(method, {}), **other}
            run = attribute_batch(model, tensor, rows, method, own)
            runs[method] = replace(run, names=part.names)
        first = runs[methods[0]]
        enough, pairs = None, None
        if also:
            from seecause.attribution.evidence import evidence, interactions

            ranked = runs.get("mosaic", first).maps  # the order that `sc.evidence` takes
            enough = evidence(model, tensor, rows, maps=ranked) if "evidence" in also else None
            pairs = interactions(model, tensor, rows) if "interactions" in also else None
        shares = [_outside(first, i, known.mask) for i, known in enumerate(part.facts)]
        yield Explanation(
            part.names,
            first.answers,
            runs,
            total,
            enough,
            pairs,
            places=part.places,
            truths=[_truth(model, known.label) for known in part.facts],
            background=[share for share, _ in shares],
            background_area=[area for _, area in shares],
        )


def _truth(model: ImageModel, label: str | None) -> str | None:
    """The model's name of the class that a folder or a dataset names; None if it has none."""
    if label is None or label.isdigit():  # a folder called 7 need not be class 7
        return None
    called = model.classes_called(label)
    return model.class_name(called[0]) if len(called) == 1 else None


def _outside(
    run: Attribution, index: int, mask: Tensor | None
) -> tuple[float | None, float | None]:
    """The share of a map, above its median (its floor), that lies outside of the object, and the
    share of the pixels; None without a mask, and the first None without an object or a value above
    the median."""
    counted = None if mask is None else mask != IGNORE
    if mask is None or counted is None or not counted.any():
        return None, None
    alone = run[index]
    floor = (alone.maps if alone.native is None else alone.native).median().clamp(min=0)
    pixels = (alone.pixels()[0].double() - floor).clamp(min=0).to(mask.device)  # [H, W]
    area = float((mask == 0).sum() / counted.sum())
    share = float(pixels[mask == 0].sum() / pixels[counted].sum())
    return None if area == 1 or math.isnan(share) else share, area


@torch.no_grad()
def default_methods(model: ImageModel) -> tuple[str, ...]:
    """CAAP (where is it?) and mosaic (what does the prediction depend on?). CAAP alone where mosaic
    is not defined or is known to be poor (no class token is read), or where no gradient passes."""
    try:
        find("mosaic", model.architecture)
        if isinstance(model, VisionModel):
            if not special_rows(model, model.layout):
                return ("caap",)
            with model.eval_mode():
                need_gradients(model, "mosaic")
    except (NotDefined, RuntimeError):  # torch raises the latter for inference tensors
        return ("caap",)
    return ("caap", "mosaic")


@torch.no_grad()
def top_answers(
    model: ImageModel, images: Tensor, *, target: int | Tensor | None = None, count: int = 3
) -> list[list[Answer]]:
    """The `count` most probable classes of each image, then `target` if it is not among them."""
    probabilities = spread(model(images).double(), "prob", sigmoid=model.sigmoid)
    goal = None if target is None else parse(model, target, len(images))
    return best_answers(model, probabilities, goal, count=count)


# ---------------------------------------------------------------- reading images


@dataclass(frozen=True, eq=False)
class FileRegion:
    """A region in the pixels of files, each of its own size."""

    region: Region
    steps: Preprocess

    def framed(self, size: Size | None) -> Region:
        """The part of the region that lies inside the model's input crop of an image of `size`;
        raises if it is empty."""
        if size is None:
            raise BadOption("target", "a region of files", "images that are files or samples")
        region = self.region.framed(self.steps, *size)
        if region.where is not None:
            region.mask(self.steps.size)
        return region


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images that were read: their indices among all that were given, and what is known about
    them."""

    images: Tensor  # [B, 3, H, W], normalised
    places: list[int]
    names: list[str]
    facts: list[ImageFacts]
    others: Tensor | None = None  # [B, 3, H, W], a second version of each
    regions: list[Region] = field(default_factory=list)  # the target, where it is a `FileRegion`

    def targets(self, target: Spec) -> Spec:
        """The target of these images: of a list with one for each image, their own."""
        if self.regions:
            return self.regions
        target = _listed(target)
        if not isinstance(target, list):
            return target
        if max(self.places) >= len(target):
            raise BadOption("target", f"a list of {len(target)}", "one for each image")
        return [target[place] for place in self.places]


def _listed(target: Spec) -> Spec:
    """Targets with one class for each image, which may be tensors, arrays or tuples, as a list."""
    if getattr(target, "ndim", 0) > 0:
        return target.tolist()
    return list(target) if isinstance(target, tuple) and len(target) != 2 else target


def batch_size(model: ImageModel) -> int:
    """How many images fill the device."""
    if model.device.type != "cuda" or not model.aimed:
        return BATCH
    each = model.forward_bytes(model.layout_at(*model.preprocess.size))
    return fit(GPU_BATCH, RUNS * each, model.device)


def image_batches(
    model: ImageModel,
    images: Inputs,
    *,
    batch: int,
    workers: int = 0,
    names: Sequence[str] | None = None,
    others: Inputs | None = None,
    skipped: list[SkippedImage] | None = None,
    target: Any = None,
) -> Iterator[ImageBatch]:
    """Read and normalise images, `batch` at a time; each is released when its batch is made.

    A batch ends early where images of another size follow. Images that cannot be read, or that a
    region of files does not reach, are added to `skipped`, or are errors without it.
    """
    reader = _Reader(model, names, target, skipped is None)
    if workers:
        files: Any = images
        read = replace(reader, model=_Frame(model.preprocess), files=files, others=others)
        reads: Iterable[Any] = read_ahead(read, len(files), workers)
    else:
        versions = repeat(None) if others is None else _singles(model, others)
        pairs = zip(_singles(model, images), versions, strict=others is not None)
        reads = (reader.read(place, *pair) for place, pair in enumerate(pairs))
    rows: list[ImageBatch] = []  # of one image each
    for row in reads:
        if isinstance(row, SkippedImage):
            assert skipped is not None
            skipped.append(row)
            continue
        if row.others is not None and row.others.shape != row.images.shape:
            expected = f"images of {list(row.images[0].shape)}"
            raise BadOption("others", list(row.others[0].shape), expected)
        if rows and rows[0].images.shape != row.images.shape:
            yield join(rows)
            rows = []
        rows.append(row)
        if len(rows) == batch:
            yield join(rows)
            rows = []
    if rows:
        yield join(rows)


@dataclass(frozen=True)
class _Frame:
    """What reading a file needs of a model, for processes that have none."""

    preprocess: Preprocess


@dataclass(frozen=True, eq=False)
class _Reader:
    """Reads one image at a time: any, or by its place one of `files`."""

    model: ImageModel | _Frame
    names: Sequence[str] | None
    target: Any
    strict: bool  # an image that cannot be read is an error
    files: Sequence[str | Path] = ()
    others: Any = None

    @cached_property
    def opener(self) -> ImageOpener:
        return ImageOpener()

    def __call__(self, place: int) -> ImageBatch | SkippedImage:
        return self.read(place, self.files[place], self.others and self.others[place])

    def read(self, place: int, item: Any, other: Any) -> ImageBatch | SkippedImage:
        file = str(item) if isinstance(item, str | Path) else getattr(item, "filename", "")
        name = self.names[place] if self.names else file or f"image {place}"
        steps, version, regions = self.model.preprocess, None, []
        try:
            image, opened = _read(self.model, item, self.opener)
            known = _facts(steps, item, opened, self.opener)
            if other is not None:
                version, _ = _read(self.model, other, self.opener, second=True)
            if isinstance(self.target, FileRegion):
                regions = [self.target.framed(known.size)]
        except (BadImage, BadOption, DataMissing) as bad:
            if self.strict:
                raise
            return SkippedImage(name, str(bad) if name in str(bad) else f"{name}: {bad}")
        return ImageBatch(image, [place], [name], [known], version, regions)


def _singles(model: ImageModel, images: Any) -> Iterator[Any]:
    """One image after the other, whatever batches they come in."""
    items = model.preprocess.unpacked(images)
    if isinstance(items, str | Path) and model.preprocess.kind == "images":
        items = find_images([str(items)])
    elif isinstance(items, OneImage | Mapping) and getattr(items, "ndim", 0) < 4:
        items = [items]
    return chain.from_iterable(_rows_of(model, item) for item in cast(Any, items))


def _rows_of(model: ImageModel, item: Any) -> Iterable[Any]:
    """The images of one element: an image, a list of them, or a batch (alone, first with labels
    behind it, or under the name that processors give it)."""
    if isinstance(item, Mapping):
        item = item["pixel_values"]
    item = model.preprocess.unpacked(item)
    if isinstance(item, tuple | list) and item:
        is_pair = isinstance(item, tuple) or getattr(item[0], "ndim", 0) >= 4
        return _rows_of(model, item[0]) if is_pair else item
    dimensions, batch = getattr(item, "ndim", 0), cast(Any, item)
    if dimensions == 5 and batch.shape[1] == 1:  # a DataLoader over `model.preprocess`
        return batch[:, 0]
    return item if dimensions == 4 else [item]


def _read(
    model: ImageModel | _Frame, item: Any, opener: ImageOpener, *, second: bool = False
) -> tuple[Tensor, Any]:
    """One image, [1, 3, H, W], normalised, and what was opened. Files stay on the CPU until their
    batch is full."""
    if isinstance(item, str | Path):
        is_image = model.preprocess.kind == "images"
        item = opener(str(item), second=second) if is_image else item
        return model.preprocess(item)[:1], item
    if isinstance(item, Image.Image):
        return model.preprocess(item)[:1], item
    return as_images(model, item)[:1], item


def _facts(steps: Preprocess, item: Any, opened: Any, opener: ImageOpener) -> ImageFacts:
    """What is known about a file or a sample; its mask in the model's frame."""
    if not isinstance(item, str | Path):
        return ImageFacts()
    if steps.kind != "images":
        return ImageFacts(Path(item).absolute().parent.name)
    height, width = opened.size[::-1]
    known = replace(opener.facts(str(item)), size=(height, width))
    if known.mask is None:
        return known
    if tuple(known.mask.shape) != (height, width):
        raise BadImage(
            f"the mask of {item}",
            f"{list(known.mask.shape)} pixels for an image of {[height, width]}",
            "give masks of the images' own size",
        )
    return replace(known, mask=steps.mask(known.mask))
