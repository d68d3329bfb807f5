"""`sc.explain`: pictures in; answers and maps out, batch by batch where there are many."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find, join
from seecause.attribution.result import (
    MANIFEST,
    MAPS,
    Attribution,
    joined_manifest,
    saved_lists,
)
from seecause.attribution.stream import BATCH, PictureBatch, picture_batches
from seecause.data.dataset import IGNORE, Hole
from seecause.engine.mixture import need_gradients, special_rows
from seecause.errors import BadOption, DataMissing, NotDefined, SeecauseError
from seecause.loading import as_view
from seecause.metrics.pixels import to_pixels
from seecause.models.base import ImageModel, pixels_digest
from seecause.models.preprocess import Picture, Pictures, Preprocess
from seecause.models.rows import Region
from seecause.models.view import VisionModel
from seecause.target import Answer, Spec, best_answers, need_class, parse, spread

if TYPE_CHECKING:
    from seecause.attribution.evidence import Evidence
    from seecause.attribution.interactions import Interactions

ALSO = ("evidence", "interactions")
_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.uint8: "U8"}  # as safetensors says


@dataclass(frozen=True, eq=False)
class PictureRegion:
    """A region in pixels of pictures as files have them, each of its own size."""

    region: Region
    steps: Preprocess

    def framed(self, size: tuple[int, int] | None) -> Region:
        """In the model's frame of a picture of `size`, of which it holds a pixel or more."""
        if size is None:
            raise BadOption("target", "a region of files", "pictures that are files or samples")
        region = self.region.framed(self.steps, *size)
        if region.where is not None:
            region.mask(self.steps.size)
        return region


@dataclass(frozen=True, eq=False)
class Explanation:
    """Answers and maps of some pictures. `runs` holds one attribution for each method, all over the
    same pictures."""

    names: Sequence[str]
    # the most probable classes of each picture, and the explained one
    answers: Sequence[Sequence[Answer]]
    runs: Mapping[str, Attribution]
    fingerprint: str = ""  # of these pictures and all that were explained before them
    evidence: Evidence | None = None  # by the order of the first method's maps
    interactions: Interactions | None = None
    places: Sequence[int] = ()  # among all pictures that came in: some cannot be read
    truths: Sequence[str | None] = ()  # the class each picture is of, where it is known
    # share of the first method's map outside of the object, where there are masks
    background: Sequence[float | None] = ()
    background_area: Sequence[float | None] = ()  # the same of an even map

    @property
    def first(self) -> Attribution:
        return next(iter(self.runs.values()))


def explain(
    model: ImageModel | nn.Module,
    pictures: Pictures | Iterable[Picture],
    *,
    names: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    target: Spec = None,
    others: Pictures | Iterable[Picture] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    also: Collection[str] = (),
    batch: int = BATCH,
    holes: list[Hole] | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> Explanation:
    """What does the model answer, and which patches caused it?

    `pictures`: any number of what `sc.attribute` takes, a generator too; one that cannot be read is
    an error, or goes into the list `holes`. `target` None explains each predicted class (of a
    detector the surest box); of boxes and pixels it may be `sc.Box` or `sc.Region`, or a list with
    one for each picture. Without `methods`, `default_methods` are meant. `others`: another version
    of each picture that should be answered alike (without a mark, for one); it is the picture's
    blank, so maps show what of the difference caused the answer. `options` are by method; `also`
    may hold "evidence" (in the order of the first method's maps) and "interactions";
    `advance` hears of every finished map.
    """
    parts = explain_batches(
        model, pictures, names=names, methods=methods, target=target, others=others,
        options=options, also=also, batch=batch, holes=holes, advance=advance,
    )  # fmt: skip
    return _joined(list(parts))


def explain_batches(
    model: ImageModel | nn.Module,
    pictures: Pictures | Iterable[Picture],
    *,
    names: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    target: Spec = None,
    others: Pictures | Iterable[Picture] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    also: Collection[str] = (),
    batch: int = BATCH,
    holes: list[Hole] | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> Iterator[Explanation]:
    """The same, a few pictures at a time: memory does not grow with their number."""
    unknown = set(also) - set(ALSO)
    if unknown:
        raise BadOption("also", sorted(unknown), f"some of {', '.join(ALSO)}")
    model = as_view(model)
    if also and not model.aimed:
        raise NotDefined(
            " and ".join(sorted(also)), f"{model.name} answers for many rows", "Leave it away"
        )
    explained = _explained(model, target)
    methods = default_methods(model) if methods is None else methods
    if not methods:
        raise BadOption("methods", [], "at least one method, or None for the usual ones")
    if others is not None:
        _need_blanks(model, methods)
    total = ""
    for part in picture_batches(
        model, pictures, batch=batch, names=names, others=others, holes=holes, facts=True
    ):
        part, rows = _rows_of(explained, part, holes)
        if not part.places:
            continue
        images = part.images.to(model.device, model.dtype)
        total = pixels_digest(images, total)
        other = {} if part.others is None else {"blank": part.others.to(images)}
        runs = {}
        for method in methods:
            own = {**(options or {}).get(method, {}), **other}
            run = attribute(model, images, rows, method, **own)
            runs[method] = replace(run, names=part.names)
            advance(len(images))
        first = runs[methods[0]]
        yield Explanation(
            part.names,
            first.answers,
            runs,
            total,
            *_beside(model, images, explained, first.maps, also),
            places=part.places,
            truths=[_truth(model, known.label) for known in part.facts],
            background=[_outside(first, i, known.mask) for i, known in enumerate(part.facts)],
            background_area=[_area_outside(known.mask) for known in part.facts],
        )


def _explained(model: ImageModel, target: Spec) -> Any:
    """A class, or of a detector or a model of pixels a row, or a list with one for each picture."""
    if not model.aimed:
        return target.tolist() if getattr(target, "ndim", 0) > 0 else target
    spec: Spec = target.region if isinstance(target, PictureRegion) else target
    need_class(model, spec)
    return None if spec is None else model.class_index(spec)


def _rows_of(
    explained: Any, part: PictureBatch, holes: list[Hole] | None
) -> tuple[PictureBatch, Any]:
    """What is explained in the pictures of a batch, some of those that came in. Of a region of
    files, those that do not reach so far are holes."""
    if isinstance(explained, list):
        if max(part.places) >= len(explained):
            raise BadOption("target", f"a list of {len(explained)}", "one for each picture")
        return part, [explained[place] for place in part.places]
    if not isinstance(explained, PictureRegion):
        return part, explained
    rows, inside = [], []
    for index, known in enumerate(part.facts):
        try:
            rows.append(explained.framed(known.size))
        except BadOption as outside:
            if holes is None:
                raise
            holes.append(Hole(part.names[index], f"{part.names[index]}: {outside}"))
        else:
            inside.append(index)
    return part.take(inside), rows


def _truth(model: ImageModel, label: str | None) -> str | None:
    """The model's name of a class that a folder or a dataset names; None if it has none such."""
    if label is None or label.isdigit():  # a folder called 7 need not be class 7
        return None
    try:
        return model.class_name(model.class_index(label))
    except SeecauseError:
        return None


def _area_outside(mask: Tensor | None) -> float | None:
    """What an even map would have outside of the object, of the pixels that are one or the other;
    None without any."""
    if mask is None or not (mask != IGNORE).any():
        return None
    return float((mask[mask != IGNORE] == 0).double().mean())


def _outside(run: Attribution, index: int, mask: Tensor | None) -> float | None:
    """How much of a map, above its lowest value, lies outside of its object; None without a mask,
    an object or values above 0."""
    if mask is None or not ((mask != 0) & (mask != IGNORE)).any():
        return None
    values = (run.maps if run.native is None else run.native)[index]
    above = values - values.min().clamp(min=0)
    pixels = to_pixels(above[None], (mask.shape[0], mask.shape[1]))[0].clamp(min=0).to(mask.device)
    counted = pixels * (mask != IGNORE)
    on_object = float((counted * (mask != 0)).sum() / counted.sum())
    return None if math.isnan(on_object) else 1 - on_object


def _beside(
    model: ImageModel, images: Tensor, target: int | None, maps: Tensor, also: Collection[str]
) -> tuple[Evidence | None, Interactions | None]:
    """What is wanted beside the maps, imported where it is."""
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
    """Where is it (CAAP), and what does the answer hang on (mosaic)? CAAP alone where mosaic is not
    defined or does no good (no class token is read), or no gradient passes the model."""
    try:
        find("mosaic", model.architecture)
        if isinstance(model, VisionModel):
            if not special_rows(model, model.layout):
                return ("caap",)
            with model.eval_mode():
                need_gradients(model, "mosaic")
    except (NotDefined, RuntimeError):  # of inference tensors torch says so
        return ("caap",)
    return ("caap", "mosaic")


def _need_blanks(model: ImageModel, methods: Sequence[str]) -> None:
    """Refuse other versions where a method reads no blank."""
    for method in methods:
        if "blank" not in find(method, model.architecture).options:
            raise BadOption(
                "others",
                f"other versions for {method}",
                "methods that read a blank, such as caap: the other version is the picture's blank",
            )


@torch.no_grad()
def top_answers(
    model: ImageModel, images: Tensor, *, target: int | None = None, count: int = 3
) -> list[list[Answer]]:
    """The `count` most probable classes of each picture, then `target` if it is not among them."""
    probabilities = spread(model(images).double(), "prob", sigmoid=model.sigmoid)
    goal = None if target is None else parse(model, target, len(images))
    return best_answers(model, probabilities, goal, count=count)


class AttributionWriter:
    """`Attribution.save` for results that come in batches: each is written and let go. The files
    are the same."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifests: list[dict[str, Any]] = []
        self.lists: dict[str, list[Any]] = {}
        self._files: dict[str, BinaryIO] = {}
        self._header: dict[str, dict[str, Any]] = {}  # of the whole file, as safetensors has it
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, part: Attribution) -> None:
        for name, tensor in part.saved_tensors().items():
            if name not in self._files:
                self._files[name] = (self.folder / f".{name}.partial").open("w+b")
                shape = [0, *tensor.shape[1:]]
                self._header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape}
            self._header[name]["shape"][0] += len(tensor)
            self._files[name].write(tensor.flatten().view(torch.uint8).numpy().data)
        self.manifests.append(part.manifest)
        for name, values in saved_lists([part]).items():
            self.lists.setdefault(name, []).extend(values)

    def close(self, fingerprint: str) -> None:
        """Join the pieces; the manifest comes last, so a folder that has one is complete."""
        place = 0
        for name, file in self._files.items():
            end = place + file.tell()
            self._header[name]["data_offsets"] = [place, end]
            place = end
        text = json.dumps(self._header).encode()
        text += b" " * (-len(text) % 8)
        with (self.folder / MAPS).open("wb") as whole:
            whole.write(len(text).to_bytes(8, "little") + text)
            for file in self._files.values():
                file.seek(0)
                shutil.copyfileobj(file, whole)
        self.discard()
        manifest = joined_manifest(self.manifests, self._header["images"]["shape"], fingerprint)
        written = json.dumps({**manifest, **self.lists}, indent=2)
        (self.folder / MANIFEST).write_text(written + "\n", encoding="utf-8")

    def discard(self) -> None:
        """Let go of the pieces."""
        for name, file in self._files.items():
            file.close()
            (self.folder / f".{name}.partial").unlink(missing_ok=True)


def _joined(parts: Sequence[Explanation]) -> Explanation:
    if not parts:
        raise DataMissing("pictures", "there is none that can be read", "give at least one")
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    sizes = {tuple(part.first.images.shape[2:]) for part in parts}
    if len(sizes) > 1:
        listed = ", ".join(f"{height} x {width}" for height, width in sorted(sizes))
        raise BadOption("pictures", listed, "one size; `sc.attribute_stream` takes several")
    runs = {
        method: Attribution.join([part.runs[method] for part in parts], last.fingerprint)
        for method in last.runs
    }
    beside: dict[str, Any] = {}
    for name in ALSO:
        if (joined := join([getattr(part, name) for part in parts])) is not None:
            manifests = [getattr(part, name).manifest for part in parts]
            shape = [len(joined), *manifests[0]["images"][1:]]
            manifest = joined_manifest(manifests, shape, last.fingerprint)
            beside[name] = replace(joined, manifest=manifest)
    return replace(join(parts), runs=runs, fingerprint=last.fingerprint, **beside)
