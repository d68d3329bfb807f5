"""A folder of masks that were found once: one small safetensors file for each image.

The name holds everything that decides the mask: weights (and gates) of the model, pixels, padding,
baseline and options. What is derived from a soft mask (rho, the rule) is not part of it, so
changing those costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.attribution.attribute import digest
from seecause.errors import BadOption
from seecause.heads.erase import Fill, part
from seecause.models.base import ImageModel

log = logging.getLogger(__name__)
_NAMES = ("soft", "losses", "steps")


class MaskCache:
    """Reads and writes (soft [g, g], losses [3], steps []) by image."""

    def __init__(self, folder: str | Path, model: ImageModel, options: Mapping[str, Any]):
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise BadOption("cache", str(folder), "a folder; this is a file")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.device = model.device
        self.stem = json.dumps(
            [model.fingerprint(), str(model.dtype), dict(options)], sort_keys=True
        )

    def read(
        self, images: Tensor, inside: Tensor | None, baseline: Fill | Tensor
    ) -> dict[int, tuple[Tensor, ...]]:
        """What is known, by place in the batch."""
        found = {}
        for place in range(len(images)):
            file = self._file(images, inside, baseline, place)
            if file.is_file() and (tensors := self._load(file)) is not None:
                found[place] = tensors
        return found

    def _load(self, file: Path) -> tuple[Tensor, ...] | None:
        """None for a damaged file: the mask is searched again, and the file written anew."""
        try:
            tensors = load_file(file, device=str(self.device))
        except SafetensorError as damage:
            log.warning("%s is damaged and will be written again: %s", file, damage)
            return None
        return tuple(tensors[name] for name in _NAMES) if set(tensors) == set(_NAMES) else None

    def write(
        self,
        images: Tensor,
        inside: Tensor | None,
        baseline: Fill | Tensor,
        found: Mapping[int, tuple[Tensor, ...]],
    ) -> None:
        """Each file is written beside its place and moved, so it is whole or not there."""
        for place, tensors in found.items():
            file = self._file(images, inside, baseline, place)
            partial = file.with_suffix(f".{os.getpid()}.partial")
            partial.write_bytes(
                save(
                    {
                        name: t.detach().cpu().contiguous()
                        for name, t in zip(_NAMES, tensors, strict=True)
                    }
                )
            )
            partial.replace(file)

    def _file(
        self, images: Tensor, inside: Tensor | None, baseline: Fill | Tensor, place: int
    ) -> Path:
        rows = slice(place, place + 1)
        own = part(baseline, len(images), rows)
        key = [
            self.stem,
            digest(images[rows]),
            "" if inside is None else digest(inside[rows].float()),
            digest(own) if isinstance(own, Tensor) else "",
        ]
        return (
            self.folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.safetensors"
        )
