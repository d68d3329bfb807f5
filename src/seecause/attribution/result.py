"""The result of an attribution: maps, what they are maps of, and how they were made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.attribution.registry import is_signed, join
from seecause.errors import BadOption, MissingExtra
from seecause.files import write_atomic, write_json
from seecause.models.base import Architecture
from seecause.target import Answer

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Upsampling = Literal["nearest", "bilinear", "bicubic"]
MAPS, MANIFEST = "maps.safetensors", "manifest.json"
TENSORS = (  # rows by picture
    *("maps", "images", "native", "class_maps", "errors", "probabilities", "regions"),
)
LISTS = ("labels", "names", "answers")  # entries by picture


class Looks:
    """What one result and results of several methods have in common: ways to look at them."""

    def _runs(self) -> dict[str, Attribution]:
        raise NotImplementedError

    def plot(self, ax: Any = None, **options: Any) -> Figure:
        """Pictures and their maps as a matplotlib figure; a single map also into axes of your own,
        `ax`. `options` are those of `seecause.report.figures.overlay`."""
        if isinstance(ax, str | Path):
            file = f"axes of matplotlib; to write a file: att.plot().savefig({str(ax)!r})"
            raise BadOption("ax", str(ax), file)
        from seecause.report.explain import plot

        return plot(self._runs(), ax, **options)

    def show(self) -> None:
        """The same on the screen: in a notebook below the cell, else in a window."""
        from seecause.report.explain import show

        show(self)

    def page(self, path: str | Path) -> Path:
        """Write the page that `seecause explain` writes, as one HTML file: `path`, or index.html in
        a folder."""
        from seecause.report.explain import write_runs_page

        return write_runs_page(Path(path), self._runs())

    def to_frame(self) -> pandas.DataFrame:
        """One row for each picture and method: answers, and where the map is highest. Needs
        pandas."""
        try:
            import pandas
        except ImportError:
            raise MissingExtra("pandas", "tools") from None
        return pandas.DataFrame([row for run in self._runs().values() for row in run.rows()])

    def _repr_html_(self) -> str:
        """What notebooks show: the first pictures, each beside its maps."""
        from seecause.report.explain import notebook_html

        return notebook_html(self._runs())


@dataclass(eq=False, repr=False)
class Attribution(Looks):
    """Maps of a batch of images. Signed, never normalised.

    `maps` [B, gh, gw], of a film [B, t, gh, gw]; `native` [B, H, W] where the method works on
    pixels; `class_maps` [B, gh, gw, C'] on request; `errors` [B, gh, gw], standard errors, where a
    method averages draws; `images` [B, 3, H, W] raw pixels in [0, 1]; `probabilities` [B, C] of all
    classes; `regions` [B, H, W] (uint8) the box or the pixels that were asked about; `labels` what
    is explained, `answers` the most probable classes, `names` what pictures are called; `manifest`
    names method, options, model, data, versions.

    `att[2]` is the result of one picture, `att[:8]` of several, `for one in att` goes through them:
    each an `Attribution` again.
    """

    maps: Tensor
    images: Tensor
    manifest: dict[str, Any]
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
        """The result of some of the pictures: an index, a slice, indices, or a mask [B]."""
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
        """True where values are for and against the class by the method's definition."""
        known = self.manifest
        return is_signed(known.get("method", ""), known.get("architecture", "transformer"))

    def overlay(self, index: int = 0, **options: Any) -> Image.Image:
        """One picture with its map on top; see `seecause.report.figures.overlay`."""
        from seecause.report.explain import upright
        from seecause.report.figures import overlay

        alone = upright(self[index])
        if options.get("scale") is None:
            options.setdefault("signed", self.signed)
        return overlay(alone.images[0], alone.pixels()[0], **options)

    def name(self, index: int) -> str:
        """What a picture is called."""
        return self.names[index] if self.names else f"picture {index}"

    def rows(self) -> list[dict[str, Any]]:
        """What `to_frame` and `--json` say of each picture."""
        tops = self.maps.flatten(1).max(dim=1)
        sides = self.maps.shape[1:]
        lists = zip(tops.values.tolist(), tops.indices.tolist(), strict=True)
        rows = []
        for index, (highest, top) in enumerate(lists):
            answers = self.answers[index] if self.answers else []
            explained = [answer.probability for answer in answers if answer.explained]
            best = answers[0] if answers else Answer("", float("nan"))
            checks = self.manifest.get("checks", {}).items()
            rows.append(
                {
                    "picture": self.name(index),
                    "method": self.manifest.get("method"),
                    "model": self.manifest.get("model"),
                    "answer": best.name,
                    "answer probability": best.probability,
                    "explained": self.labels[index] if self.labels else "",
                    "probability": explained[0] if explained else float("nan"),
                    "lowest": float(self.maps[index].min()),
                    "highest": highest,
                    **_place(top, sides),
                    **{name: values[index] for name, values in checks},
                }
            )
        return rows

    def saved_tensors(self) -> dict[str, Tensor]:
        """What is written of it. Pictures are for looking at: they are kept in 8 bits, a quarter of
        the space."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        tensors["images"] = (self.images * 255).round().to(torch.uint8)
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in present.items()}

    def save(self, folder: str | Path) -> Path:
        """Write maps (safetensors) and manifest (JSON); the manifest comes last, so a folder that
        has one is complete."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        write_atomic(folder / MAPS, save(self.saved_tensors()))
        write_json(folder / MANIFEST, {**self.manifest, **saved_lists([self])})
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Attribution:
        """Read what `save` wrote."""
        from seecause.models.load import reading

        folder = Path(folder)
        with reading(folder, MAPS, MANIFEST, writer="Attribution.save"):
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            lists = {name: manifest.pop(name, []) for name in LISTS}
            tensors: dict[str, Any] = load_file(folder / MAPS)
            _check_read(tensors, lists)
            _check_manifest(manifest, len(tensors["maps"]))
            lists["answers"] = [[Answer(**entry) for entry in row] for row in lists["answers"]]
        images = tensors.pop("images").to(tensors["maps"].dtype) / 255
        return cls(images=images, manifest=manifest, **lists, **tensors)

    @classmethod
    def join(cls, parts: Sequence[Attribution], fingerprint: str) -> Attribution:
        """Batches of one method as one result over all pictures, whose pixels have this
        fingerprint."""
        joined = join(parts)
        shape, manifests = joined.images.shape, [part.manifest for part in parts]
        return replace(joined, manifest=joined_manifest(manifests, shape, fingerprint))

    def _runs(self) -> dict[str, Attribution]:
        return {str(self.manifest.get("method", "map")): self}


class Attributions(dict[str, Attribution], Looks):
    """Results of several methods on the same pictures, by method: a dictionary that can also be
    looked at, put into a frame and saved (a folder for each method)."""

    def save(self, folder: str | Path) -> Path:
        for method, run in self.items():
            run.save(Path(folder) / method)
        return Path(folder)

    def __repr__(self) -> str:
        return f"Attributions({', '.join(map(repr, self.values()))})"

    def _runs(self) -> dict[str, Attribution]:
        return self


def _place(index: int, sides: Sequence[int]) -> dict[str, int]:
    """Row and column of a patch; of a film the time before them."""
    places = [int(place) for place in torch.unravel_index(torch.tensor(index), tuple(sides))]
    names = ("time", "row", "column")[-len(places) :]
    return {f"{name} of highest": place for name, place in zip(names, places, strict=True)}


def saved_lists(parts: Iterable[Attribution]) -> dict[str, list[Any]]:
    """What manifests say of each picture, of batches that follow each other."""
    lists: dict[str, list[Any]] = {name: [] for name in LISTS}
    for part in parts:
        lists["labels"] += part.labels
        lists["names"] += part.names
        lists["answers"] += [[asdict(answer) for answer in row] for row in part.answers]
    return {name: values for name, values in lists.items() if values or name == "labels"}


def joined_manifest(
    manifests: Sequence[Mapping[str, Any]], shape: Sequence[int], fingerprint: str
) -> dict[str, Any]:
    """One manifest of batches that follow each other."""
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


def _rows(which: int | slice | Sequence[int] | Tensor, count: int) -> Tensor:
    """Places [n] that an index names."""
    try:
        rows = torch.arange(count)[
            which if isinstance(which, int | slice) else torch.as_tensor(which)
        ]
    except (IndexError, TypeError, ValueError, RuntimeError):
        if isinstance(which, int):  # what ends a loop over indices
            raise IndexError(f"picture {which} of {count}") from None
        raise BadOption(
            "index", which, f"an index below {count}, a slice, several indices, or a mask [{count}]"
        ) from None
    return rows.reshape(-1)


def _part_of(manifest: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """The manifest of some pictures. The fingerprint stays that of the batch they were explained
    in; `rows` says which of it they are."""
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


def _check_read(tensors: dict[str, Tensor], lists: Mapping[str, Any]) -> None:
    """Refuse tensors that are not those of one attribution."""
    maps, images = tensors["maps"], tensors["images"]
    native, class_maps, errors, probabilities, regions = (tensors.get(n) for n in TENSORS[2:])
    shapes = (
        maps.ndim in (3, 4) and maps.is_floating_point() and maps.numel() > 0,
        images.ndim == 4 and images.dtype == torch.uint8 and images.shape[1] == 3,
        len(maps) == len(images) and images.numel() > 0,
        native is None or native.shape == (len(maps), *images.shape[2:]),
        class_maps is None or class_maps.shape[:-1] == maps.shape,
        errors is None or errors.shape == maps.shape,
        probabilities is None or probabilities.shape[:-1] == maps.shape[:1],
        regions is None or regions.shape == (len(maps), *images.shape[2:]),
        tensors.keys() <= set(TENSORS),
        all(isinstance(lists[name], list) for name in LISTS),
        all(isinstance(text, str) for name in ("labels", "names") for text in lists[name]),
        all(len(lists[name]) in (0, len(maps)) for name in LISTS),
        all(isinstance(row, list) and row for row in lists["answers"]),
        all(_is_answer(entry) for row in lists["answers"] for entry in row),
    )
    if not all(shapes):
        raise ValueError("shapes or kinds are not those of an attribution")


def _check_manifest(manifest: Mapping[str, Any], count: int) -> None:
    """Refuse entries that are not of the kinds they were saved with, or of another number of
    pictures."""
    kinds = {"method": str, "target": dict, "checks": dict, "images": list, "rows": list}
    for name, kind in kinds.items():
        if not isinstance(manifest.get(name, kind()), kind):
            raise ValueError(f"{name} is no {kind.__name__}")
    if manifest.get("architecture", "transformer") not in get_args(Architecture):
        raise ValueError("no architecture that is known")
    by_picture = [*manifest.get("target", {}).values(), *manifest.get("checks", {}).values()]
    counts = {len(values) for values in by_picture if isinstance(values, list)}
    if not counts <= {0, count} or len(manifest.get("rows", range(count))) != count:
        raise ValueError("entries of another number of pictures")


def _is_answer(entry: Any) -> bool:
    return (
        set(entry) == {"name", "probability", "explained"}
        and isinstance(entry["name"], str)
        and isinstance(entry["probability"], int | float)
        and isinstance(entry["explained"], bool)
    )
