"""The result of an attribution: maps, what they are maps of, and how they were made."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from seecause._files import write_atomic, write_json
from seecause.errors import BadOption, DataMissing

Upsampling = Literal["nearest", "bilinear", "bicubic"]
MAPS, MANIFEST = "maps.safetensors", "manifest.json"


@dataclass(eq=False, repr=False)
class Attribution:
    """Maps of a batch of images. Signed, never normalised.

    `maps` [B, gh, gw]; `native` [B, H, W] where the method works on pixels; `class_maps` [B, gh,
    gw, C'] on request; `errors` [B, gh, gw], standard errors, where a method averages draws;
    `images` [B, 3, H, W] raw pixels in [0, 1]; `manifest` names method, options, model, data,
    versions.
    """

    maps: Tensor
    images: Tensor
    manifest: dict[str, Any]
    native: Tensor | None = None
    class_maps: Tensor | None = None
    errors: Tensor | None = None
    labels: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"Attribution({self.manifest.get('method')} on {self.manifest.get('model')}, maps"
            f" {list(self.maps.shape)}, {', '.join(self.labels[:3])})"
        )

    def __len__(self) -> int:
        return len(self.maps)

    def pixels(self, mode: Upsampling = "bilinear") -> Tensor:
        """Maps at image resolution, [B, H, W]: the method's own pixels if it has them, else the
        upsampled patch grid."""
        if self.native is not None:
            return self.native
        if mode not in ("nearest", "bilinear", "bicubic"):
            raise BadOption("mode", mode, "nearest, bilinear or bicubic")
        size = (self.images.shape[-2], self.images.shape[-1])
        smooth = {} if mode == "nearest" else {"align_corners": False}
        return F.interpolate(self.maps[:, None], size=size, mode=mode, **smooth)[:, 0]

    def overlay(self, index: int = 0, **options: Any) -> Image.Image:
        """One picture with its map on top; see `seecause.report.overlay.overlay`."""
        from seecause.report.overlay import overlay

        return overlay(self.images[index], self.pixels()[index], **options)

    def save(self, folder: str | Path) -> Path:
        """Write maps (safetensors) and manifest (JSON); the manifest comes last, so a folder that
        has one is complete.

        Pictures are for looking at: they are kept in 8 bits, a quarter of the space.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            "maps": self.maps,
            "images": (self.images * 255).round().to(torch.uint8),
            "native": self.native,
            "class_maps": self.class_maps,
            "errors": self.errors,
        }
        kept = {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t is not None}
        (folder / MANIFEST).unlink(missing_ok=True)
        write_atomic(folder / MAPS, save(kept))
        write_json(folder / MANIFEST, {**self.manifest, "labels": self.labels})
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Attribution:
        """Read what `save` wrote."""
        folder = Path(folder)
        if not (folder / MANIFEST).is_file() or not (folder / MAPS).is_file():
            raise DataMissing(
                str(folder),
                f"no {MAPS} and {MANIFEST} there",
                "give a folder that Attribution.save wrote",
            )
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            labels = manifest.pop("labels", [])
            tensors = load_file(folder / MAPS)
            _check_read(tensors, labels)
        except (
            *(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError),
            SafetensorError,
        ) as broken:
            raise DataMissing(
                str(folder),
                f"{MAPS} or {MANIFEST} is damaged ({type(broken).__name__})",
                "give a folder as Attribution.save wrote it",
            ) from broken
        images = tensors.pop("images").to(tensors["maps"].dtype) / 255
        return cls(images=images, manifest=manifest, labels=labels, **tensors)

    def _repr_html_(self) -> str:
        """What notebooks show: the first pictures with their maps."""
        from seecause.report.overlay import data_uri

        shown = "".join(
            f'<img src="{data_uri(self.overlay(i))}" title="{escape(self._label(i))}">'
            for i in range(min(len(self), 8))
        )
        return (
            f"<div>{shown}<p>{escape(str(self.manifest.get('method', '')))} on"
            f" {escape(str(self.manifest.get('model', '')))}</p></div>"
        )

    def _label(self, index: int) -> str:
        return self.labels[index] if index < len(self.labels) else ""


def _check_read(tensors: dict[str, Tensor], labels: Any) -> None:
    """Refuse tensors that are not those of one attribution."""
    maps, images = tensors["maps"], tensors["images"]
    native, class_maps, errors = map(tensors.get, ("native", "class_maps", "errors"))
    shapes = (
        maps.ndim == 3 and maps.is_floating_point() and maps.numel() > 0,
        images.ndim == 4 and images.dtype == torch.uint8 and images.shape[1] == 3,
        len(maps) == len(images) and images.numel() > 0,
        native is None or native.shape == (len(maps), *images.shape[2:]),
        class_maps is None or class_maps.shape[:3] == maps.shape,
        errors is None or errors.shape == maps.shape,
        tensors.keys() <= {"maps", "images", "native", "class_maps", "errors"},
        isinstance(labels, list) and all(isinstance(label, str) for label in labels),
    )
    if not all(shapes):
        raise ValueError("shapes or kinds are not those of an attribution")
