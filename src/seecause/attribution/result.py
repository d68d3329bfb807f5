"""The result of an attribution: maps, what they are maps of, and how they were made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.attribution.registry import KINDS, is_signed, join
from seecause.errors import BadOption
from seecause.files import write_atomic, write_json
from seecause.results import Result
from seecause.target import Answer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Upsampling = Literal["nearest", "bilinear", "bicubic"]
MAPS, MANIFEST = "maps.safetensors", "manifest.json"
SHARD = 256  # images of one file of tensors
TENSORS = ("maps", "images", "native", "class_maps", "errors", "probabilities", "regions")
LISTS = ("labels", "names", "answers")  # one entry for each image


class Viewable(Result):
    """What a result of one method and results of several have in common."""

    def _runs(self) -> Mapping[str, Attribution]:
        raise NotImplementedError

    def numbers(self) -> dict[str, float]:
        """Means over images, by method: the probability of what is explained, the extremes of maps,
        and the method's own checks."""
        found = {}
        for method, run in self._runs().items():
            rows = run.rows()
            names = ("probability", "lowest", "highest", *run.manifest.get("checks", {}))
            for name in names if rows else ():
                found[f"{method} {name}"] = sum(row[name] for row in rows) / len(rows)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One row for each method and image: the prediction, and where the map is highest."""
        return [row for run in self._runs().values() for row in run.rows()]

    def plot(self) -> Figure:
        """Draw images beside their maps with matplotlib; `plot().savefig("maps.pdf")` writes a
        file."""
        from seecause.report.explain import plot

        return plot(self._runs())

    def page(self, path: str | Path) -> Path:
        """Write one HTML file, like the page of `seecause explain`; `path` may be a folder."""
        from seecause.report.explain import write_runs_page

        return write_runs_page(Path(path), self._runs())

    def _repr_html_(self) -> str:
        from seecause.report.explain import notebook_html

        return notebook_html(self._runs())


@dataclass(eq=False, repr=False)
class Attribution(Viewable):
    """Maps of some images. Values are signed and not normalised.

    `att[2]` is the result of one image, `att[:8]` of several, and iterating gives one `Attribution`
    for each image.
    """

    maps: Tensor  # [B, gh, gw], of a film [B, t, gh, gw]
    images: Tensor  # [B, 3, H, W] raw pixels in [0, 1]
    manifest: dict[str, Any]  # method, options, target, model, data, versions
    native: Tensor | None = None  # [B, H, W], of methods that work on pixels
    class_maps: Tensor | None = None  # [B, gh, gw, C'], on request
    errors: Tensor | None = None  # [B, gh, gw] standard errors, of methods that average draws
    probabilities: Tensor | None = None  # [B, C] of all classes
    regions: Tensor | None = None  # [B, H, W] uint8: the box or the pixels that are explained
    labels: list[str] = field(default_factory=list)  # what is explained
    answers: list[list[Answer]] = field(default_factory=list)  # the most probable classes
    names: list[str] = field(default_factory=list)  # of the images

    def __repr__(self) -> str:
        return (
            f"Attribution({self.manifest.get('method')} on {self.manifest.get('model')}, maps"
            f" {list(self.maps.shape)}, {', '.join(self.labels[:3])})"
        )

    def __len__(self) -> int:
        return len(self.maps)

    def __getitem__(self, which: int | slice | Sequence[int] | Tensor) -> Attribution:
        """The result of some of the images: an index, a slice, indices, or a mask [B]."""
        rows = _rows(which, len(self))
        fields: dict[str, Any] = {"manifest": _part_of(self.manifest, rows.tolist())}
        for name in TENSORS:
            tensor = getattr(self, name)
            fields[name] = None if tensor is None else tensor[rows.to(tensor.device)]
        for name in LISTS:
            values = getattr(self, name)
            fields[name] = [values[row] for row in rows.tolist()] if values else []
        return replace(self, **fields)

    def __iter__(self) -> Iterator[Attribution]:
        return (self[place] for place in range(len(self)))

    def pixels(self, mode: Upsampling = "bilinear") -> Tensor:
        """Maps at image resolution, [B, H, W]: the method's own pixels if it has them, else the
        upsampled patch grid."""
        if self.native is not None:
            return self.native
        if mode not in ("nearest", "bilinear", "bicubic"):
            raise BadOption("mode", mode, "nearest, bilinear or bicubic")
        frames = self.maps.flatten(0, -3)  # [B, gh, gw]; of a film [B * t, gh, gw]
        times = self.maps.shape[1] if self.maps.ndim == 4 else 1
        size = (self.images.shape[-2] // times, self.images.shape[-1])
        smooth = {} if mode == "nearest" else {"align_corners": False}
        pixels = F.interpolate(frames[:, None], size=size, mode=mode, **smooth)[:, 0]
        return pixels.unflatten(0, (len(self), times)).flatten(1, 2)

    @property
    def signed(self) -> bool | None:
        """True if values are for and against the class by the method's definition."""
        known = self.manifest
        return is_signed(known.get("method", ""), known.get("architecture", "transformer"))

    def overlay(self, index: int = 0, **options: Any) -> Image.Image:
        """One image with its map on top; options of `seecause.report.figures.overlay`."""
        from seecause.report.explain import upright
        from seecause.report.figures import overlay

        alone = upright(self[index])
        if options.get("scale") is None:
            options.setdefault("signed", self.signed)
        return overlay(alone.images[0], alone.pixels()[0], **options)

    def name(self, index: int) -> str:
        """The name of an image."""
        return self.names[index] if self.names else f"image {index}"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each image: the prediction, and where the map is highest."""
        tops = self.maps.flatten(1).argmax(dim=1)
        places = torch.stack(torch.unravel_index(tops, self.maps.shape[1:]), dim=1).tolist()
        axes = [f"{axis} of highest" for axis in ("time", "row", "column")][1 - self.maps.ndim :]
        rows = []
        for index, place in enumerate(places):
            answers = self.answers[index] if self.answers else [Answer("", math.nan)]
            explained = [answer.probability for answer in answers if answer.explained]
            checks = self.manifest.get("checks", {})
            rows.append(
                {
                    "image": self.name(index),
                    "method": self.manifest.get("method"),
                    "model": self.manifest.get("model"),
                    "prediction": answers[0].name,
                    "prediction probability": answers[0].probability,
                    "explained": self.labels[index] if self.labels else "",
                    "probability": explained[0] if explained else math.nan,
                    "lowest": float(self.maps[index].min()),
                    "highest": float(self.maps[index].max()),
                    **dict(zip(axes, place, strict=True)),
                    **{name: values[index] for name, values in checks.items()},
                }
            )
        return rows

    def save(self, folder: str | Path) -> Path:
        """Write maps (safetensors) and manifest (JSON) into a folder. The manifest is written last,
        so a folder that has one is complete."""
        writer = AttributionWriter(Path(folder))
        writer.add(self)
        writer.close(self.manifest)
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> Attribution:
        """Read what `save` wrote.

        Raises:
            DataMissing: If a file is missing or damaged.
        """
        from seecause.models.load import reading

        folder = Path(folder)
        with reading(folder, MAPS, MANIFEST, writer="Attribution.save"):
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            lists = {name: manifest.pop(name, []) for name in LISTS}
            parts = [load_file(file) for file in [folder / MAPS, *sorted(folder.glob("maps-*"))]]
            tensors: dict[str, Any] = join(parts)
            _check_read(tensors, lists, manifest)
            lists["answers"] = [[Answer(**entry) for entry in row] for row in lists["answers"]]
        images = tensors.pop("images").to(tensors["maps"].dtype) / 255
        return cls(images=images, manifest=manifest, **lists, **tensors)

    @classmethod
    def join(cls, parts: Sequence[Attribution], fingerprint: str) -> Attribution:
        """Join batches of one method; `fingerprint` is the digest of all their pixels."""
        manifest = joined_manifest([part.manifest for part in parts], fingerprint)
        return replace(join(parts), manifest=manifest)

    def _runs(self) -> dict[str, Attribution]:
        return {str(self.manifest.get("method", "map")): self}


class Attributions(dict[str, Attribution], Viewable):
    """Results of several methods on the same images, by method."""

    def save(self, folder: str | Path) -> Path:
        """Write a folder for each method, as `Attribution.save` does."""
        for method, run in self.items():
            run.save(Path(folder) / method)
        return Path(folder)

    def __repr__(self) -> str:
        return f"Attributions({', '.join(map(repr, self.values()))})"

    def _runs(self) -> dict[str, Attribution]:
        return self


class AttributionWriter:
    """Writes an attribution that comes in batches, `SHARD` images to a file of tensors, so that
    memory does not grow with the number of images."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifests: list[dict[str, Any]] = []
        self.lists: dict[str, list[Any]] = {name: [] for name in LISTS}
        self._parts: list[dict[str, Tensor]] = []
        self._shards = 0
        folder.mkdir(parents=True, exist_ok=True)
        for file in (folder / MANIFEST, *folder.glob("maps-*.safetensors")):
            file.unlink(missing_ok=True)

    def add(self, part: Attribution) -> None:
        """Add one batch. Images are for looking at: they are kept in 8 bits."""
        tensors = {name: getattr(part, name) for name in TENSORS}
        tensors["images"] = (part.images * 255).round().to(torch.uint8)
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._parts.append({name: t.detach().cpu().contiguous() for name, t in present.items()})
        self.manifests.append(part.manifest)
        self.lists["labels"] += part.labels
        self.lists["names"] += part.names
        self.lists["answers"] += [[asdict(answer) for answer in row] for row in part.answers]
        if sum(len(shard["maps"]) for shard in self._parts) >= SHARD:
            self._write_shard()

    def close(self, manifest: Mapping[str, Any] | str) -> None:
        """Write the rest, then the manifest: as given, or joined, with this data fingerprint."""
        if self._parts:
            self._write_shard()
        if isinstance(manifest, str):
            manifest = joined_manifest(self.manifests, manifest)
        lists = {name: values for name, values in self.lists.items() if values or name == "labels"}
        write_json(self.folder / MANIFEST, {**manifest, **lists})

    def _write_shard(self) -> None:
        name = f"maps-{self._shards:05d}.safetensors" if self._shards else MAPS
        write_atomic(self.folder / name, save(join(self._parts)))
        self._shards, self._parts = self._shards + 1, []


def joined_manifest(manifests: Sequence[Mapping[str, Any]], fingerprint: str) -> dict[str, Any]:
    """The manifest of consecutive batches: lists with one entry for each image are concatenated."""
    first = manifests[0]
    joined = {
        name: {
            key: [entry for m in manifests for entry in m[name][key]]
            if isinstance(value, list)
            else value
            for key, value in first[name].items()
        }
        for name in ("target", "checks")
        if name in first
    }
    return {
        **first,
        **joined,
        "images": [sum(m["images"][0] for m in manifests), *first["images"][1:]],
        "data_fingerprint": fingerprint,
        "memory_halvings": [line for m in manifests for line in m["memory_halvings"]],
    }


def _rows(which: int | slice | Sequence[int] | Tensor, count: int) -> Tensor:
    """The places [n] that an index selects."""
    try:
        index = which if isinstance(which, int | slice) else torch.as_tensor(which)
        return torch.arange(count)[index].reshape(-1)
    except (IndexError, TypeError, ValueError, RuntimeError):
        if isinstance(which, int):  # what ends a loop over indices
            raise IndexError(f"image {which} of {count}") from None
        expected = f"an index below {count}, a slice, several indices, or a mask [{count}]"
        raise BadOption("index", which, expected) from None


def _part_of(manifest: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """The manifest of some images. The fingerprint stays that of the whole batch; `rows` says which
    of its images these are."""
    parts: dict[str, Any] = {}
    for name in ("target", "checks"):
        if name in manifest:
            parts[name] = {
                key: [values[row] for row in rows]
                if isinstance(values, list) and values
                else values
                for key, values in manifest[name].items()
            }
    earlier = manifest.get("rows")
    parts["rows"] = rows if earlier is None else [earlier[row] for row in rows]
    if "images" in manifest:
        parts["images"] = [len(rows), *manifest["images"][1:]]
    return {**manifest, **parts}


def _check_read(
    tensors: dict[str, Tensor], lists: Mapping[str, Any], manifest: Mapping[str, Any]
) -> None:
    """Refuse files that are not those of one attribution."""
    maps, images = tensors["maps"], tensors["images"]
    shapes = {  # what each tensor has beside its own axes
        "native": images.shape[2:],
        "class_maps": (*maps.shape[1:], *tensors.get("class_maps", maps).shape[-1:]),
        "errors": maps.shape[1:],
        "probabilities": tensors.get("probabilities", maps).shape[1:2],
        "regions": images.shape[2:],
    }
    entries = [entry for row in lists["answers"] for entry in row]
    per_image = [*manifest.get("target", {}).values(), *manifest.get("checks", {}).values()]
    counts = [len(values) for values in (*lists.values(), *per_image) if isinstance(values, list)]
    good = (
        maps.ndim in (3, 4) and maps.is_floating_point() and maps.numel() > 0,
        images.ndim == 4 and images.dtype == torch.uint8 and images.shape[1] == 3,
        len(maps) == len(images) and images.numel() > 0,
        tensors.keys() <= set(TENSORS),
        all(t.shape == (len(maps), *shapes.get(n, t.shape[1:])) for n, t in tensors.items()),
        all(isinstance(text, str) for name in ("labels", "names") for text in lists[name]),
        all(isinstance(values, list) for values in (*lists.values(), *lists["answers"])),
        all(len(row) > 0 for row in lists["answers"]),
        all(set(entry) == {"name", "probability", "explained"} for entry in entries),
        all(isinstance(entry["probability"], int | float) for entry in entries),
        isinstance(manifest.get("method", ""), str),
        manifest.get("architecture", "transformer") in KINDS,
        set(counts) <= {0, len(maps)},
        len(manifest.get("rows", maps)) == len(maps),
    )
    if not all(good):
        raise ValueError("shapes or kinds are not those of an attribution")
