"""The result of an attribution: maps, images, targets, and the protocol."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.attribution.registry import is_signed, join
from seecause.files import write_atomic, write_json
from seecause.results import Result
from seecause.target import Answer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]  # plain values by name: a manifest, or a row of a table
MAPS, MANIFEST = "maps.safetensors", "manifest.json"
TENSORS = ("maps", "images", "native", "class_maps", "errors", "probabilities", "regions")
LISTS = ("labels", "names", "answers")  # one entry for each image


class MapResult(Result):
    """Base class of the results of `sc.attribute` and `sc.explain`."""

    runs: Mapping[str, Attribution]  # of the same images, by method

    def rows(self) -> list[Record]:
        """One row for each method and image: the prediction, and where the map is highest."""
        return [row for run in self.runs.values() for row in run.rows()]

    def numbers(self) -> dict[str, float]:
        """Means over images, by method: the probability of what is explained, and the extremes of
        maps."""
        found = {}
        for method, run in self.runs.items():
            rows = run.rows()
            for name in ("probability", "lowest", "highest"):
                found[f"{method} {name}"] = sum(row[name] for row in rows) / len(rows)
        return found

    def plot(self) -> Figure:
        """Draw images beside their maps with matplotlib; `plot().savefig("maps.pdf")` writes a
        file."""
        from seecause.report.explain import plot

        return plot(self.runs)

    def page(self, path: str | Path) -> Path:
        """Write one HTML file, like the page of `seecause explain`; `path` may be a folder."""
        from seecause.report.explain import write_runs_page

        return write_runs_page(Path(path), self.runs)

    def _repr_html_(self) -> str:
        from seecause.report.explain import notebook_html

        return notebook_html(self.runs)


@dataclass(eq=False, repr=False)
class Attribution(MapResult):
    """Maps of some images. Values are signed and not normalised.

    `att[2]` is the result of one image, `att[:8]` of several, and iterating gives one `Attribution`
    for each image.

    Attributes:
        maps: Maps [B, rows, columns], of a film [B, time, rows, columns].
        images: Raw pixels [B, 3, H, W] in [0, 1].
        manifest: Method, options, target, model, data and versions.
        native: Maps [B, H, W] of methods that work on pixels.
        class_maps: Maps [B, rows, columns, classes], if the option `classes` was given.
        errors: Standard errors [B, rows, columns], of methods that average random draws.
        probabilities: Probabilities [B, C] of all classes.
        regions: Boxes or regions [B, H, W] uint8 that are explained.
        labels: What is explained, for each image.
        answers: The most probable classes of each image.
        names: Names of the images.
    """

    maps: Tensor
    images: Tensor
    manifest: Record
    native: Tensor | None = None
    class_maps: Tensor | None = None
    errors: Tensor | None = None
    probabilities: Tensor | None = None
    regions: Tensor | None = None
    labels: list[str] = field(default_factory=list)
    answers: list[list[Answer]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"Attribution({self.manifest.get('method')} on {self.manifest.get('model')}, maps"
            f" {list(self.maps.shape)}, {', '.join(self.labels[:3])})"
        )

    def __len__(self) -> int:
        return len(self.maps)

    def __getitem__(self, which: int | slice | Sequence[int] | Tensor) -> Attribution:
        """The result of some of the images: an index, a slice, indices, or a mask [B]."""
        rows = torch.arange(len(self))[which].reshape(-1)
        manifest, places = dict(self.manifest), rows.tolist()
        if "target" in manifest:
            manifest["target"] = {
                key: [values[row] for row in places]
                if isinstance(values, list) and values
                else values
                for key, values in manifest["target"].items()
            }
        if "images" in manifest:
            manifest["images"] = [len(places), *manifest["images"][1:]]
        earlier = manifest.get("rows")  # of the whole batch, whose fingerprint stays
        manifest["rows"] = places if earlier is None else [earlier[row] for row in places]
        fields: Record = {"manifest": manifest}
        for name in TENSORS:
            tensor = getattr(self, name)
            fields[name] = None if tensor is None else tensor[rows.to(tensor.device)]
        for name in LISTS:
            values = getattr(self, name)
            fields[name] = [values[row] for row in places] if values else []
        return replace(self, **fields)

    def pixels(self) -> Tensor:
        """Maps at image resolution, [B, H, W]: the method's own pixels if it has them, else the
        upsampled patch grid."""
        if self.native is not None:
            return self.native
        frames = self.maps.flatten(0, -3)  # [B, gh, gw]; of a film [B * t, gh, gw]
        times = self.maps.shape[1] if self.maps.ndim == 4 else 1
        size = (self.images.shape[-2] // times, self.images.shape[-1])
        pixels = F.interpolate(frames[:, None], size=size, mode="bilinear")[:, 0]
        return pixels.unflatten(0, (len(self), times)).flatten(1, 2)

    @property
    def signed(self) -> bool | None:
        """True if values are for and against the class by the method's definition."""
        known = self.manifest
        return is_signed(known.get("method", ""), known.get("architecture", "transformer"))

    def overlay(self, index: int = 0) -> Image.Image:
        """One image with its map on top."""
        from seecause.report.explain import upright
        from seecause.report.figures import overlay

        alone = upright(self[index])
        return overlay(alone.images[0], alone.pixels()[0], signed=self.signed)

    def name(self, index: int) -> str:
        """The name of an image."""
        return self.names[index] if self.names else f"image {index}"

    def rows(self) -> list[Record]:
        """One row for each image: the prediction, and where the map is highest."""
        tops = self.maps.flatten(1).argmax(dim=1)
        places = torch.stack(torch.unravel_index(tops, self.maps.shape[1:]), dim=1).tolist()
        axes = [f"{axis} of highest" for axis in ("time", "row", "column")][1 - self.maps.ndim :]
        rows = []
        for index, place in enumerate(places):
            answers = self.answers[index] if self.answers else [Answer("", math.nan)]
            explained = [answer.probability for answer in answers if answer.explained]
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
                }
            )
        return rows

    def save(self, folder: str | Path) -> Path:
        """Write maps (safetensors) and manifest (JSON) into a folder. The manifest is written last,
        so a folder that has one is complete."""
        writer = AttributionWriter(Path(folder))
        writer.add(self)
        writer.close(self.manifest["data_fingerprint"])
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> Attribution:
        """Read what `save` wrote.

        Raises:
            DataMissing: If a file is missing or damaged.
        """
        from seecause.loading import reading
        from seecause.models.preprocess import read_image

        folder = Path(folder)
        with reading(folder, MAPS, MANIFEST, writer="Attribution.save"):
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            lists = {name: manifest.pop(name) for name in LISTS}
            parts = [load_file(file) for file in [folder / MAPS, *sorted(folder.glob("maps-*"))]]
            tensors: Record = {n: torch.cat([p[n] for p in parts]) for n in parts[0]}
            if photos := manifest.pop("photos", ()):
                size = tuple(manifest["images"][:1:-1])  # width and height
                images = [np.asarray(read_image(folder / photo).resize(size)) for photo in photos]
                tensors["images"] = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
            counts = {
                len(entries) for entries in (*tensors.values(), *lists.values()) if len(entries)
            }
            if len(counts) > 1:
                raise ValueError("its files are of different numbers of images")
            lists["answers"] = [[Answer(**entry) for entry in row] for row in lists["answers"]]
            tensors["images"] = tensors["images"].to(tensors["maps"].dtype) / 255
            return cls(manifest=manifest, **lists, **tensors)

    @classmethod
    def join(cls, parts: Sequence[Attribution], fingerprint: str) -> Attribution:
        """Join batches of one method; `fingerprint` is the digest of all their pixels."""
        manifest = joined_manifest([part.manifest for part in parts], fingerprint)
        return replace(join(parts), manifest=manifest)

    @property
    def runs(self) -> dict[str, Attribution]:  # type: ignore[override]
        """This attribution under the name of its method."""
        return {str(self.manifest.get("method", "map")): self}


class AttributionWriter:
    """Writes an attribution that comes in batches, one file of tensors for each, so that memory
    does not grow with the number of images."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifests: list[Record] = []
        self.lists: dict[str, list[Any]] = {name: [] for name in LISTS}
        self.photos: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        for file in (folder / MANIFEST, *folder.glob("maps-*.safetensors")):
            file.unlink(missing_ok=True)

    def add(self, part: Attribution, photos: Sequence[str] = ()) -> None:
        """Add one batch. Images are for display: they are stored with 8 bits, or `photos` are the
        names of their files, relative to the folder."""
        tensors = {name: getattr(part, name) for name in TENSORS}
        tensors["images"] = None if photos else (part.images * 255).round().to(torch.uint8)
        self.photos += photos
        present = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in tensors.items()
            if tensor is not None
        }
        number = len(self.manifests)
        name = f"maps-{number:05d}.safetensors" if number else MAPS
        write_atomic(self.folder / name, save(present))
        self.manifests.append(part.manifest)
        self.lists["labels"] += part.labels
        self.lists["names"] += part.names
        self.lists["answers"] += [[astuple(answer) for answer in row] for row in part.answers]

    def close(self, fingerprint: str) -> None:
        """Write the manifest of all batches, with the digest of all their pixels."""
        manifest = joined_manifest(self.manifests, fingerprint)
        photos = {"photos": self.photos} if self.photos else {}
        for row in self.lists["answers"]:
            row[:] = [asdict(Answer(*answer)) for answer in row]
        write_json(self.folder / MANIFEST, {**manifest, **self.lists, **photos})


def joined_manifest(manifests: Sequence[Mapping[str, Any]], fingerprint: str) -> Record:
    """The manifest of consecutive batches: lists with one entry for each image are concatenated."""
    first = manifests[0]
    target = {
        key: [entry for m in manifests for entry in m["target"][key]]
        if isinstance(value, list)
        else value
        for key, value in first["target"].items()
    }
    return {
        **first,
        "target": target,
        "images": [sum(m["images"][0] for m in manifests), *first["images"][1:]],
        "data_fingerprint": fingerprint,
        "memory_halvings": [line for m in manifests for line in m["memory_halvings"]],
    }
