"""`sc.explain`: pictures in; answers and maps out, batch by batch where there are many."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find
from seecause.attribution.result import MANIFEST, MAPS, Attribution
from seecause.engine.blanks import blank_image, blank_trace
from seecause.engine.mixture import need_gradients, special_rows
from seecause.errors import BadOption, NotDefined
from seecause.loading import as_view
from seecause.models.base import ImageModel, pixels_digest
from seecause.models.inputs import Picture, Pictures, as_images
from seecause.models.view import VisionModel
from seecause.target import Answer, spread

if TYPE_CHECKING:
    from seecause.attribution.evidence import Evidence
    from seecause.attribution.interactions import Interactions

BATCH = 16
ALSO = ("evidence", "interactions")
_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.uint8: "U8"}  # as safetensors says


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

    @property
    def first(self) -> Attribution:
        return next(iter(self.runs.values()))


def explain(
    model: ImageModel | nn.Module,
    pictures: Pictures | Iterable[Picture],
    *,
    names: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    target: int | str | None = None,
    others: Pictures | Iterable[Picture] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    also: Collection[str] = (),
    batch: int = BATCH,
    advance: Callable[[int], None] = lambda done: None,
) -> Explanation:
    """What does the model answer, and which patches caused it?

    `pictures`: any number of what `sc.attribute` takes, a generator too. `target` None
    explains each predicted class; without `methods`, `default_methods` are meant. `others`: another
    version of each picture that should be answered alike (without a mark, for one); it is the
    picture's blank, so maps show what of the difference caused the answer. `options` are by method;
    `also` may hold "evidence" (in the order of the first method's maps) and "interactions";
    `advance` hears of every finished map.
    """
    parts = explain_batches(
        model,
        pictures,
        names=names,
        methods=methods,
        target=target,
        others=others,
        options=options,
        also=also,
        batch=batch,
        advance=advance,
    )
    return _joined(list(parts))


def explain_batches(
    model: ImageModel | nn.Module,
    pictures: Pictures | Iterable[Picture],
    *,
    names: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    target: int | str | None = None,
    others: Pictures | Iterable[Picture] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    also: Collection[str] = (),
    batch: int = BATCH,
    advance: Callable[[int], None] = lambda done: None,
) -> Iterator[Explanation]:
    """The same, a few pictures at a time: memory does not grow with their number."""
    unknown = set(also) - set(ALSO)
    if unknown:
        raise BadOption("also", sorted(unknown), f"some of {', '.join(ALSO)}")
    model = as_view(model)
    explained = None if target is None else model.class_index(target)
    methods = default_methods(model) if methods is None else methods
    if others is not None:
        _need_blanks(model, methods)
    total, count = "", 0
    blanks = None if others is None else _batches(model, others, batch)
    for images in _batches(model, pictures, batch):
        other = _other_versions(blanks, images)
        total = pixels_digest(images, total)
        answers = top_answers(model, images, target=explained)
        runs = {}
        for method in methods:
            own = {**(options or {}).get(method, {}), **other}
            runs[method] = attribute(model, images, explained, method, **own)
            advance(len(images))
        places = range(count, count + len(images))
        count += len(images)
        part_names = [names[place] if names else f"picture {place}" for place in places]
        more = _beside(model, images, explained, runs[methods[0]].maps, also)
        yield Explanation(part_names, answers, runs, total, *more)


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
            with model.settled(frozen=True):
                blank = blank_image(model, model.preprocess.size)
                need_gradients(model, blank_trace(model, blank, states={0}, kv=()))
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


def _other_versions(blanks: Iterator[Tensor] | None, images: Tensor) -> dict[str, Tensor]:
    """The option that makes the next of `blanks` those of `images`."""
    if blanks is None:
        return {}
    other = next(blanks, None)
    if other is None or other.shape != images.shape:
        shape = "fewer" if other is None else list(other.shape)
        raise BadOption("others", shape, f"one for each picture, {list(images.shape)} here")
    return {"blank": other.to(images)}


@torch.no_grad()
def top_answers(
    model: ImageModel, images: Tensor, *, target: int | None = None, count: int = 3
) -> list[list[Answer]]:
    """The `count` most probable classes of each picture, then `target` if it is not among them."""
    probabilities = spread(model(images).double(), "prob", sigmoid=model.sigmoid).cpu()
    answers = []
    for row in probabilities:
        best = row.topk(min(count, len(row))).indices.tolist()
        explained = best[0] if target is None else target
        shown = best if explained in best else [*best, explained]
        answers.append([Answer(model.class_name(c), float(row[c]), c == explained) for c in shown])
    return answers


class AttributionWriter:
    """`Attribution.save` for results that come in batches: each is written and let go. The files
    are the same."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifests: list[dict[str, Any]] = []
        self.labels: list[str] = []
        self._files: dict[str, BinaryIO] = {}
        self._shapes: dict[str, list[int]] = {}
        self._dtypes: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, part: Attribution) -> None:
        tensors = {
            "maps": part.maps,
            "images": (part.images * 255).round().to(torch.uint8),
            "native": part.native,
            "class_maps": part.class_maps,
            "errors": part.errors,
        }
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if name not in self._files:
                self._files[name] = (self.folder / f".{name}.partial").open("w+b")
                self._shapes[name] = [0, *tensor.shape[1:]]
                self._dtypes[name] = _DTYPES[tensor.dtype]
            self._shapes[name][0] += len(tensor)
            plain = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            self._files[name].write(plain.numpy().data)
        self.manifests.append(part.manifest)
        self.labels += part.labels

    def close(self, fingerprint: str) -> None:
        """Join the pieces; the manifest comes last, so a folder that has one is complete."""
        header, place = {}, 0
        for name, file in self._files.items():
            end = place + file.tell()
            header[name] = {
                "dtype": self._dtypes[name],
                "shape": self._shapes[name],
                "data_offsets": [place, end],
            }
            place = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (self.folder / MAPS).open("wb") as whole:
            whole.write(len(text).to_bytes(8, "little") + text)
            for file in self._files.values():
                file.seek(0)
                shutil.copyfileobj(file, whole)
        self.discard()
        manifest = _joined_manifest(self.manifests, self._shapes["images"], fingerprint)
        written = json.dumps({**manifest, "labels": self.labels}, indent=2)
        (self.folder / MANIFEST).write_text(written + "\n", encoding="utf-8")

    def discard(self) -> None:
        """Let go of the pieces."""
        for name, file in self._files.items():
            file.close()
            (self.folder / f".{name}.partial").unlink(missing_ok=True)


def _batches(
    model: ImageModel, pictures: Pictures | Iterable[Picture], batch: int
) -> Iterator[Tensor]:
    """Normalised pictures, a few at a time; originals are let go one by one."""
    if isinstance(pictures, Tensor) and pictures.ndim == 4:
        yield from (as_images(model, part) for part in pictures.split(batch))
        return
    left: Iterator[Any] = iter([pictures] if isinstance(pictures, Picture | Mapping) else pictures)
    while prepared := [as_images(model, picture) for picture in islice(left, batch)]:
        yield torch.cat(prepared)


def _joined(parts: Sequence[Explanation]) -> Explanation:
    if len(parts) == 1:
        return parts[0]
    runs = {}
    for method in parts[0].runs:
        runs[method] = _joined_runs([part.runs[method] for part in parts], parts[-1].fingerprint)
    return replace(
        parts[-1],
        names=[name for part in parts for name in part.names],
        answers=[answers for part in parts for answers in part.answers],
        runs=runs,
        evidence=_joined_extras([part.evidence for part in parts], parts[-1].fingerprint),
        interactions=_joined_extras([part.interactions for part in parts], parts[-1].fingerprint),
    )


def _joined_extras(parts: Sequence[Any], fingerprint: str) -> Any:
    """Results of several batches as one, field by field; None where there are none."""
    if parts[0] is None:
        return None
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(parts[0])):
        column = [getattr(part, name) for part in parts]
        if isinstance(column[0], Tensor):
            values[name] = torch.cat(column)
        elif isinstance(column[0], list):
            values[name] = [entry for value in column for entry in value]
        elif is_dataclass(column[0]):
            values[name] = _joined_extras(column, fingerprint)
        elif name == "manifest":
            count = sum(manifest["images"][0] for manifest in column)
            values[name] = _joined_manifest(column, [count, *column[0]["images"][1:]], fingerprint)
    return replace(parts[0], **values)


def _joined_runs(parts: Sequence[Attribution], fingerprint: str) -> Attribution:
    """Batches of one method as one result over all pictures."""
    tensors = {}
    for name in ("maps", "images", "native", "class_maps", "errors"):
        values = [getattr(part, name) for part in parts]
        tensors[name] = None if values[0] is None else torch.cat(values)
    shape = list(tensors["images"].shape)
    return Attribution(
        **tensors,
        labels=[label for part in parts for label in part.labels],
        manifest=_joined_manifest([part.manifest for part in parts], shape, fingerprint),
    )


def _joined_manifest(
    manifests: Sequence[Mapping[str, Any]], shape: Sequence[int], fingerprint: str
) -> dict[str, Any]:
    joined = {
        name: {
            key: _joined_values([manifest[name][key] for manifest in manifests])
            for key in manifests[0][name]
        }
        for name in ("target", "checks")
        if name in manifests[0]
    }
    return {
        **manifests[0],
        **joined,
        "images": list(shape),
        "data_fingerprint": fingerprint,
        "memory_halvings": [line for m in manifests for line in m["memory_halvings"]],
    }


def _joined_values(values: list[Any]) -> Any:
    """Lists of one entry a picture become one list; what is the same for all batches stays."""
    if not isinstance(values[0], list):
        return values[0]
    return [entry for value in values for entry in value]
