"""Pairs in a model's frame: two versions of a picture that should be answered alike.

They come from data with a second version (`pairs:WITH:WITHOUT`, `sc.data.paired`, Critters by their
exact swaps), or from transplants: each picture beside itself on another background.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seecause.data.dataset import Dataset
from seecause.errors import BadOption
from seecause.heads.erase import Swapped
from seecause.heads.pictures import Pictures, logits_of, read_pictures
from seecause.models.base import ImageModel
from seecause.repair.transplant import Transplants


@dataclass(frozen=True, eq=False)
class Pairs:
    """n pictures and their other versions, normalised, on the model's device."""

    name: str
    ids: tuple[str, ...]
    images: Tensor  # [n, 3, H, W]
    others: Tensor  # [n, 3, H, W], to be answered alike
    labels: Tensor | None = None  # [n] classes of the model

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: Tensor) -> Pairs:
        """Some of them, by place."""
        here = rows.to(self.images.device)
        return replace(
            self,
            ids=tuple(self.ids[place] for place in rows.tolist()),
            images=self.images[here],
            others=self.others[here],
            labels=None if self.labels is None else self.labels[here],
        )

    @property
    def pictures(self) -> Pictures:
        """As what audits and repairs read: pictures whose other versions are known."""
        swapped = Swapped(self.others)
        return Pictures(self.name, self.ids, self.images, self.labels, swapped=swapped)

    def flips(self, model: ImageModel) -> Tensor:
        """[n] bool on the CPU: another version, another answer."""
        first, second = (logits_of(model, x).argmax(dim=1) for x in (self.images, self.others))
        return (first != second).cpu()


def pairs_of(
    model: ImageModel,
    data: Dataset | Pictures | Pairs,
    *,
    progress: Callable[[int], None] | None = None,
) -> Pairs:
    """Pairs of data that has a second version of each picture."""
    if isinstance(data, Pairs):
        return data
    pictures = data
    if not isinstance(pictures, Pictures):
        pictures = read_pictures(model, pictures, progress=progress)
    if pictures.swapped is None:
        raise BadOption(
            "data",
            pictures.name,
            "two versions of each picture: pairs:WITH:WITHOUT, sc.data.paired(data, change), or"
            " masks or an eye to transplant by",
        )
    return Pairs(
        pictures.name, pictures.ids, pictures.images, pictures.swapped.background, pictures.labels
    )


def transplant_pairs(moved: Transplants, *, name: str = "transplants") -> Pairs:
    """Each picture beside its transplants: one pair for each of them, in their order."""
    if len(moved) == 0:
        raise BadOption("transplants", "none", "at least one")
    places = zip(moved.source_index.tolist(), moved.donor_index.tolist(), strict=True)
    ids = tuple(f"{source} on the background of {donor}" for source, donor in places)
    others = torch.cat(list(moved.batches(64)))
    return Pairs(name, ids, moved.images[moved.source_index], others, moved.labels)
