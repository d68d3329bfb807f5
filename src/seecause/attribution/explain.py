"""`sc.explain`: predictions and maps of images, with evidence and interactions where asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from seecause.attribution.attribute import (
    BATCH,
    ImageBatch,
    attribute_batch,
    check_one_size,
    image_batches,
)
from seecause.attribution.registry import find, join
from seecause.attribution.result import Attribution, Viewable, joined_manifest
from seecause.data.dataset import IGNORE, SkippedImage
from seecause.engine.mixture import need_gradients, special_rows
from seecause.errors import BadOption, NotDefined, SeecauseError
from seecause.loading import as_view
from seecause.metrics.pixels import to_pixels
from seecause.models.base import ImageModel, pixels_digest
from seecause.models.dense import Region
from seecause.models.preprocess import Pictures, Preprocess
from seecause.models.view import VisionModel
from seecause.options import Count, checked
from seecause.target import Answer, Spec, best_answers, need_class, parse, spread

if TYPE_CHECKING:
    from seecause.attribution.evidence import Evidence
    from seecause.attribution.interactions import Interactions

Also = Collection[Literal["evidence", "interactions"]]


@dataclass(frozen=True, eq=False)
class FileRegion:
    """A region in the pixels of files, each of its own size."""

    region: Region
    steps: Preprocess

    def framed(self, size: tuple[int, int] | None) -> Region:
        """The part of the region that lies inside the model's input crop of an image of `size`;
        raises if it is empty."""
        if size is None:
            raise BadOption("target", "a region of files", "images that are files or samples")
        region = self.region.framed(self.steps, *size)
        if region.where is not None:
            region.mask(self.steps.size)
        return region


@dataclass(frozen=True, eq=False)
class Explanation(Viewable):
    """Predictions and maps of some images."""

    names: Sequence[str]
    answers: Sequence[Sequence[Answer]]  # the most probable classes, and the explained one
    runs: Mapping[str, Attribution]  # by method, all over the same images
    fingerprint: str = ""  # of these images and all that were explained before them
    evidence: Evidence | None = None  # in the order of the first method's maps
    interactions: Interactions | None = None
    places: Sequence[int] = ()  # among all images that came in: some cannot be read
    truths: Sequence[str | None] = ()  # the class of each image, where it is known
    # share of the first method's map outside of the object, where there are masks
    background: Sequence[float | None] = ()
    background_area: Sequence[float | None] = ()  # the same of an even map

    @property
    def first(self) -> Attribution:
        """The attribution of the first method."""
        return next(iter(self.runs.values()))

    def save(self, folder: str | Path) -> Path:
        """Write a folder with the page (index.html), overlays (PNG) and maps (safetensors)."""
        from seecause.report.explain import write_explanations

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_explanations(folder, [self], self.names)
        return folder

    def _runs(self) -> Mapping[str, Attribution]:
        return self.runs


@checked
def explain(
    model: ImageModel | nn.Module,
    images: Pictures | Iterable[Any],
    *,
    methods: Sequence[str] | None = None,
    target: Spec = None,
    also: Also = (),
    others: Pictures | Iterable[Any] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    names: Sequence[str] | None = None,
    batch: Count = BATCH,
    skipped: list[SkippedImage] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Explanation:
    """Explain predictions: what does the model predict, and which patches caused it?

    Args:
        model: A model returned by `sc.load` or `sc.wrap`, or an `nn.Module` that `sc.wrap` takes.
        images: Any number of what `sc.attribute` takes.
        methods: Names of methods. None means CAAP, and mosaic where it is defined.
        target: The class to explain, as for `sc.attribute`. None explains the predicted class (of a
            detector the box with the highest score).
        also: "evidence" (in the order of the first method's maps) and "interactions".
        others: A second version of each image that should get the same prediction, for instance
            without a mark. It is used as the image's blank, so maps show what of the difference
            caused the prediction.
        options: Options by method.
        names: Names of the images.
        batch: Images that are explained at once.
        skipped: A list that receives the images that cannot be read; without it they are errors.
        progress: Called after each map with the number of maps finished since the last call.

    Returns:
        An `Explanation`; `.page(path)` writes one HTML file, `.save(folder)` page, overlays and
        maps.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> found = sc.explain(model, "critters:clean:test#0", also=["evidence"])
        >>> list(found.runs), found.answers[0][0].name, int(found.evidence.enough.count)
        (['caap', 'mosaic'], 'quillow', 1)
    """
    parts = list(
        explain_batches(
            model, images, names=names, methods=methods, target=target, others=others,
            options=options, also=also, batch=batch, skipped=skipped, progress=progress,
        )
    )  # fmt: skip
    check_one_size([part.first for part in parts])
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    runs = {
        method: Attribution.join([part.runs[method] for part in parts], last.fingerprint)
        for method in last.runs
    }
    beside: dict[str, Any] = {}
    for name in ("evidence", "interactions"):
        found = [getattr(part, name) for part in parts]
        if found[0] is not None:
            manifest = joined_manifest([one.manifest for one in found], last.fingerprint)
            beside[name] = replace(join(found), manifest=manifest)
    return replace(join(parts), runs=runs, fingerprint=last.fingerprint, **beside)


def explain_batches(
    model: ImageModel | nn.Module,
    images: Pictures | Iterable[Any],
    *,
    methods: Sequence[str] | None = None,
    target: Spec = None,
    also: Also = (),
    others: Pictures | Iterable[Any] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    names: Sequence[str] | None = None,
    batch: int = BATCH,
    skipped: list[SkippedImage] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[Explanation]:
    """The explanations of `explain`, one for each batch: memory does not grow with the number of
    images."""
    model = as_view(model)
    if also and not model.aimed:
        reason = f"{model.name} predicts many rows"
        raise NotDefined(" and ".join(sorted(also)), reason, "Omit this option")
    if model.aimed:
        where = target.region if isinstance(target, FileRegion) else target
        need_class(model, where)
        if isinstance(where, str | int):  # an unknown class is an error before images are read
            model.class_index(where)
    methods = default_methods(model) if methods is None else methods
    if not methods:
        raise BadOption("methods", [], "at least one method, or None for the usual ones")
    for method in methods if others is not None else ():
        if "blank" not in find(method, model.architecture).options:
            expected = "methods with a blank, such as caap: the other version is the image's blank"
            raise BadOption("others", f"other versions for {method}", expected)
    total = ""
    for part in image_batches(
        model, images, batch=batch, names=names, others=others, skipped=skipped, facts=True
    ):
        part, rows = _targets(target, part, skipped)
        if not part.places:
            continue
        tensor = part.images.to(model.device, model.dtype)
        total = pixels_digest(tensor, total)
        other = {} if part.others is None else {"blank": part.others.to(tensor)}
        runs = {}
        for method in methods:
            own = {**(options or {}).get(method, {}), **other}
            run = attribute_batch(model, tensor, rows, method, own)
            runs[method] = replace(run, names=part.names)
            progress(len(tensor))
        first = runs[methods[0]]
        shares = [_outside(first, i, known.mask) for i, known in enumerate(part.facts)]
        yield Explanation(
            part.names,
            first.answers,
            runs,
            total,
            *_beside(model, tensor, rows, first.maps, also),
            places=part.places,
            truths=[_truth(model, known.label) for known in part.facts],
            background=[share for share, _ in shares],
            background_area=[area for _, area in shares],
        )


def _targets(
    target: Any, part: ImageBatch, skipped: list[SkippedImage] | None
) -> tuple[ImageBatch, Any]:
    """The targets of the images of a batch. Images that a region of files does not reach are
    skipped."""
    if not isinstance(target, FileRegion):
        return part, part.targets(target)
    rows, inside = [], []
    for index, known in enumerate(part.facts):
        try:
            rows.append(target.framed(known.size))
            inside.append(index)
        except BadOption as outside:
            if skipped is None:
                raise
            skipped.append(SkippedImage(part.names[index], f"{part.names[index]}: {outside}"))
    return part.take(inside), rows


def _truth(model: ImageModel, label: str | None) -> str | None:
    """The model's name of the class that a folder or a dataset names; None if it has none."""
    if label is None or label.isdigit():  # a folder called 7 need not be class 7
        return None
    try:
        return model.class_name(model.class_index(label))
    except SeecauseError:
        return None


def _outside(
    run: Attribution, index: int, mask: Tensor | None
) -> tuple[float | None, float | None]:
    """The share of a map, above its lowest value, that lies outside of the object, and the share of
    the pixels; None without a mask, and the first None without an object or values above 0."""
    if mask is None or not (mask != IGNORE).any():
        return None, None
    area = float((mask[mask != IGNORE] == 0).double().mean())
    values = (run.maps if run.native is None else run.native)[index]
    above = values - values.min().clamp(min=0)
    pixels = to_pixels(above[None], (mask.shape[0], mask.shape[1]))[0].clamp(min=0).to(mask.device)
    counted = pixels * (mask != IGNORE)
    on_object = float((counted * (mask != 0)).sum() / counted.sum())
    return None if area == 1 or math.isnan(on_object) else 1 - on_object, area


def _beside(
    model: ImageModel, images: Tensor, target: Any, maps: Tensor, also: Also
) -> tuple[Evidence | None, Interactions | None]:
    """Evidence and interactions, where asked for."""
    enough, pairs = None, None
    if "evidence" in also:
        from seecause.attribution.evidence import evidence

        enough = evidence(model, images, target, maps=maps)
    if "interactions" in also:
        from seecause.attribution.interactions import interactions

        pairs = interactions(model, images, target)
    return enough, pairs


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
    model: ImageModel, images: Tensor, *, target: int | None = None, count: int = 3
) -> list[list[Answer]]:
    """The `count` most probable classes of each image, then `target` if it is not among them."""
    probabilities = spread(model(images).double(), "prob", sigmoid=model.sigmoid)
    goal = None if target is None else parse(model, target, len(images))
    return best_answers(model, probabilities, goal, count=count)
