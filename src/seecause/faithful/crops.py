"""Random cuts that hold some of the object: where iFAM's public code measures mIoU, instead of on
the test pictures as they are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from seecause.data.dataset import IGNORE, Dataset, Sample
from seecause.data.images import to_pil
from seecause.faithful.augment import keyed
from seecause.models.preprocess import Preprocess


@dataclass(frozen=True)
class RandomCuts:
    """`data` with every picture that has a mask resized until it covers `frame`, and cut at random,
    each place with some object the same.

    A cut depends on (seed, index) alone. Boxes, key points and parts are left behind. Pictures
    without a mask stay as they are.
    """

    data: Dataset
    frame: Preprocess
    seed: int = 0

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes

    @property
    def fingerprint(self) -> str:
        return f"{self.data.fingerprint}-cut-{self.seed}"

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        sample = self.data[index]
        if sample.mask is None:
            return sample
        image, mask = _covering(sample.image, sample.mask, self.frame)
        places = cuts_with_object(mask, self.frame.size)
        with keyed(self.seed, 0, index):
            top, left = places[int(torch.randint(len(places), ()))].tolist()
        rows, columns = (
            slice(start, start + side)
            for start, side in zip((top, left), self.frame.size, strict=True)
        )
        return dataclasses.replace(
            sample,
            image=image[:, rows, columns],
            mask=mask[rows, columns],
            parts=None,
            box=None,
            points=None,
        )


def cuts_with_object(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """[n, 2]: top and left of every cut of this size in which mask [H, W] has object; of every cut
    where it has none at all."""
    there = ((mask != 0) & (mask != IGNORE)).float()[None]
    held = F.max_pool2d(F.max_pool2d(there, (size[0], 1), stride=1), (1, size[1]), stride=1)[
        0
    ]  # [H - h + 1, W - w + 1]
    return (held > 0).nonzero() if held.any() else torch.ones_like(held).nonzero()


def _covering(image: Tensor, mask: Tensor, frame: Preprocess) -> tuple[Tensor, Tensor]:
    """Raw image [3, H, W] and mask [H, W], the smallest that cover the frame in their own shape."""
    height, width = mask.shape
    scale = max(frame.size[0] / height, frame.size[1] / width)
    high, wide = max(frame.size[0], round(height * scale)), max(frame.size[1], round(width * scale))
    picture = to_pil(image).resize((wide, high), getattr(Image.Resampling, frame.filter.upper()))
    ids = F.interpolate(mask.to(torch.float64)[None, None], (high, wide), mode="nearest-exact")[
        0, 0
    ].to(torch.int32)
    return pil_to_tensor(picture).float() / 255, ids
