"""What a network answers and selects on a dataset, how well its parts find key points, and
pictures of parts in colour. Pictures cut at random are how iFAM's public code measures mIoU.

Key points of birds: Kp, NMI and ARI as PDiscoFormer and iFAM report them
(`seecause.metrics.keypoints` has the definitions). The regression is fitted on the photos that CUB
releases for training, also where Waterbird200 is tested: its photos are CUB's birds, elsewhere.
Tokens that an intervention rejects are background in the maps, of both sets; a part left out of the
mask is still a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from seecause.data.batch import raw_in_frame
from seecause.data.birds import MINORITY
from seecause.data.dataset import IGNORE, Dataset, Sample, sample_labels
from seecause.data.images import to_pil
from seecause.errors import BadOption
from seecause.faithful.data import batches_of, chunked, frame_of, read_batches, seeded
from seecause.faithful.interventions import evaluating, packing
from seecause.faithful.net import IFAM
from seecause.metrics._localization import Overlap, foreground, iou, overlap
from seecause.metrics.accuracy import GroupAccuracy, auroc, group_accuracy, in9_right
from seecause.metrics.keypoints import (
    Located,
    Marks,
    keypoint_error,
    located,
    marks_of,
    part_agreement,
    together as merge_located,
)
from seecause.models.preprocess import Preprocess

Group = tuple[int, int]
Advance = Callable[[int], None]  # so many pictures more are done
TILE = 192  # pixels of a picture of parts, at least
_ALPHA, _DIM = 0.6, 0.35
# Okabe and Ito, also for the colour-blind
_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#999999"]


@dataclass(frozen=True, eq=False)
class Examination:
    """Of every sample asked for, on the CPU."""

    logits: Tensor  # [N, C]
    stage1: Tensor  # [N, C] the parts' own answer
    labels: Tensor  # [N]
    groups: tuple[Group | None, ...]
    overlap: Overlap  # of the maps' foreground and the object, where the dataset has masks
    kept: float  # share of patches that are selected
    empty: int  # pictures of which nothing was selected
    # [C] which of ImageNet-9's classes each answer stands for, where the dataset is that
    mapping: Tensor | None = None
    # IoU of `overlap`, of every picture in a batch with masks
    picture_ious: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    mask_overlap: Overlap = field(default_factory=Overlap)  # of selected patches and the object

    @property
    def by_group(self) -> GroupAccuracy:
        """By group where every sample has one, else by class."""
        groups = self.labels if None in self.groups else list(self.groups)
        return group_accuracy(self._right(self.logits), groups)

    def table(self) -> dict[str, float]:
        """Every number there is. AUC where all classes occur; where there are masks, IoU with the
        object of the maps' foreground (`miou`: over all pixels; `miou_pictures`: the mean of
        pictures), which leaving parts out does not change, and of the patches that are read
        (`mask_iou`).
        """
        accuracy = self.by_group
        numbers = {
            "average": accuracy.average,
            "worst": accuracy.worst,
            "stage1_average": float(self._right(self.stage1).double().mean()),
        }
        if self.mapping is None and len(self.labels.unique()) == self.logits.shape[1] > 1:
            numbers["auc"] = auroc(self.logits, self.labels)
        if not math.isnan(self.overlap.iou):
            numbers["miou"] = self.overlap.iou
            numbers["miou_pictures"] = float(self.picture_ious.nanmean())
            numbers["mask_iou"] = self.mask_overlap.iou
        return {**numbers, "kept": self.kept, "empty": float(self.empty)}

    def public_worst(self, name: str) -> dict[str, float]:
        """`worst_public`, what iFAM's public code reports of a dataset called `name`: the two
        minority groups of Waterbirds, the classes of MetaShift. Nothing for other datasets."""
        kind, groups = name.partition(":")[0], self.by_group
        if None in self.groups:
            return {}
        if kind == "metashift":
            return {"worst_public": groups.by_class.worst}
        if kind == "waterbirds" and set(MINORITY) <= set(groups.groups):
            return {"worst_public": groups.worst_among(MINORITY)}
        return {}

    def _right(self, logits: Tensor) -> Tensor:
        """[N] bool"""
        if self.mapping is None:
            return logits.argmax(dim=1) == self.labels
        return in9_right(logits, self.labels, self.mapping)


@torch.no_grad()
def examine(
    net: IFAM,
    data: Dataset,
    *,
    batch: int = 32,
    places: Sequence[int] | None = None,
    autocast: torch.dtype | None = None,
    mapping: Tensor | None = None,
    workers: int = 0,
    advance: Advance = lambda done: None,
) -> Examination:
    """Run the network as it is, with any intervention it is under. A GPU without a kernel for
    packed tokens (`attention.has_kernel`) runs all of them."""
    device = net.stage1.prototypes.device
    logits, labels = torch.empty(0, net.classes), torch.empty(0, dtype=torch.int64)
    examined = [Examination(logits, logits, labels, (), Overlap(), 0.0, 0, mapping)]
    with evaluating(net), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        for images, labels, groups, masks in batches_of(
            net, data, batch=batch, places=places, workers=workers
        ):
            out = net(images, packed=packing(net))
            examined.append(
                Examination(
                    logits=out.logits.float().cpu(),
                    stage1=out.stage1_logits.float().cpu(),
                    labels=labels.cpu(),
                    groups=tuple(groups),
                    kept=float(out.mask.double().mean()),
                    empty=int(out.empty.sum()),
                    mapping=mapping,
                    **_overlaps(out.maps, out.mask, masks),
                )
            )
            advance(len(labels))
    return merge(examined)


def _overlaps(maps: Tensor, mask: Tensor, objects: Tensor | None) -> dict[str, Any]:
    """Of maps [B, K + 1, gh, gw] and mask [B, gh, gw] with objects [B, H, W], where there are
    some."""
    if objects is None:
        return {"overlap": Overlap()}
    size = (objects.shape[1], objects.shape[2])
    parts = foreground(maps, size)
    return {
        "overlap": overlap(parts, objects),
        "picture_ious": iou(parts, objects).cpu(),
        "mask_overlap": overlap(mask_pixels(mask, size), objects),
    }


def merge(parts: Sequence[Examination]) -> Examination:
    """What was examined in several batches or processes, as one."""
    weighted = sum(part.kept * len(part.labels) for part in parts)
    count = sum(len(part.labels) for part in parts)
    return Examination(
        logits=torch.cat([part.logits for part in parts]),
        stage1=torch.cat([part.stage1 for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        groups=tuple(group for part in parts for group in part.groups),
        overlap=sum((part.overlap for part in parts), start=Overlap()),
        kept=weighted / max(1, count),
        empty=sum(part.empty for part in parts),
        mapping=parts[0].mapping,
        picture_ious=torch.cat([part.picture_ious for part in parts]),
        mask_overlap=sum((part.mask_overlap for part in parts), start=Overlap()),
    )


def check_select(select: str, val: Dataset) -> None:
    """Refuse AUC where validation lacks a class, before training. Datasets of photos know their
    labels without reading them."""
    if select != "auc":
        return
    if set(sample_labels(val)) != set(range(len(val.classes))) or len(val.classes) < 2:
        expected = "average or worst: AUC needs pictures of every class"
        raise BadOption("select", select, f"{expected}, and {val.name} lacks some")


def keypoint_fit_data(name: str) -> str | None:
    """The photos that the key points of a test set called `name` are fitted on; None for datasets
    without key points, and for other splits."""
    kind, _, rest = name.partition(":")
    if kind == "waterbird200":
        return f"cub:{rest}:trainval"
    if kind == "cub" and rest.endswith(":test"):
        return f"cub:{rest.removesuffix(':test')}:trainval"
    return None


def key_points(net: IFAM, fit: Dataset, test: Dataset, **options: Any) -> dict[str, float]:
    """`keypoints`: the mean error in percent of the bird's box, lower is better. `nmi` and `ari`:
    how well parts and key points agree.

    Empty where no key point is visible in both sets. `options` are those of `locate_parts`.
    """
    fitted, tested = (locate_parts(net, data, **options) for data in (fit, test))
    if not (fitted.visible.any(dim=0) & tested.visible.any(dim=0)).any():
        return {}
    nmi, ari = part_agreement(tested)
    return {"keypoints": keypoint_error(fitted, tested).mean, "nmi": nmi, "ari": ari}


@torch.no_grad()
def locate_parts(
    net: IFAM,
    data: Dataset,
    *,
    batch: int = 32,
    workers: int = 0,
    advance: Advance = lambda done: None,
) -> Located:
    """Parts and key points of every photo, by stage 1 as it is; `workers` processes read ahead."""
    frame, batches = frame_of(net), []
    keys, collate = chunked(range(len(data)), batch), partial(_marked_batch, frame.preprocess)
    pin = frame.device.type == "cuda"
    with evaluating(net):
        for images, marks in read_batches(data, keys, collate, workers=workers, pin=pin):
            maps = net.maps(images.to(frame.device, frame.dtype)).double().cpu()
            batches.append(located(maps, Marks(*marks), frame.preprocess.size))
            advance(len(images))
    return merge_located(batches)


def _marked_batch(frame: Preprocess, samples: list[Sample]) -> tuple[Tensor, Marks]:
    """Normalised images [B, 3, h, w], and what is marked in them."""
    images = torch.stack([raw_in_frame(frame, sample.image) for sample in samples])
    return frame.normalise(images), marks_of(frame, samples)


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
        with seeded(self.seed, 0, index):
            top, left = places[int(torch.randint(len(places), ()))].tolist()
        height, width = self.frame.size
        rows, columns = slice(top, top + height), slice(left, left + width)
        cut = {"image": image[:, rows, columns], "mask": mask[rows, columns]}
        return replace(sample, **cut, parts=None, box=None, points=None)


def cuts_with_object(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """[n, 2]: top and left of every cut of this size in which mask [H, W] has object; of every cut
    where it has none at all."""
    there = ((mask != 0) & (mask != IGNORE)).float()[None]
    there = F.max_pool2d(there, (size[0], 1), stride=1)
    held = F.max_pool2d(there, (1, size[1]), stride=1)[0]  # [H - h + 1, W - w + 1]
    return (held > 0).nonzero() if held.any() else torch.ones_like(held).nonzero()


def _covering(image: Tensor, mask: Tensor, frame: Preprocess) -> tuple[Tensor, Tensor]:
    """Raw image [3, H, W] and mask [H, W], the smallest that cover the frame in their own shape."""
    height, width = mask.shape
    scale = max(frame.size[0] / height, frame.size[1] / width)
    high, wide = max(frame.size[0], round(height * scale)), max(frame.size[1], round(width * scale))
    picture = to_pil(image).resize((wide, high), getattr(Image.Resampling, frame.filter.upper()))
    ids = F.interpolate(mask.to(torch.float64)[None, None], (high, wide), mode="nearest-exact")
    return pil_to_tensor(picture).float() / 255, ids[0, 0].to(torch.int32)


def part_colours(parts: int) -> Tensor:
    """[K, 3] in [0, 1], as far apart as so many can be; up to eight also for the colour-blind."""
    import matplotlib
    from matplotlib.colors import to_rgb

    if parts <= len(_COLOURS):
        colours = [to_rgb(colour) for colour in _COLOURS[:parts]]
    else:
        table = matplotlib.colormaps["tab20"]
        colours = [table(part % table.N)[:3] for part in range(parts)]
    return torch.tensor(colours, dtype=torch.float32)


def part_picture(image: Tensor, maps: Tensor, removed: Sequence[int] = ()) -> Image.Image:
    """A raw picture [3, H, W] whose background is dimmed and whose parts have a colour each; maps
    are [K + 1, gh, gw]. Removed parts are dimmed too."""
    scale = max(1, -(-TILE // min(image.shape[1:])))
    raw = _enlarged(image.detach().float().cpu().clamp(0, 1), scale, scale)  # [3, H, W]
    # patch by patch: smooth outlines would show what is not seen
    winner, background = maps.argmax(dim=0).cpu(), len(maps) - 1
    down, across = raw.shape[1] // winner.shape[0], raw.shape[2] // winner.shape[1]
    label = _enlarged(winner, down, across)  # [H, W]
    hidden = torch.isin(label, torch.tensor([background, *removed], dtype=label.dtype))
    colours = torch.cat([part_colours(background), torch.zeros(1, 3)])
    paint = colours[label].permute(2, 0, 1)  # [3, H, W]
    # on grey, so that a part has the colour of the legend, whatever it covers
    grey = raw.mean(dim=0, keepdim=True)
    return to_pil(torch.where(hidden, raw * _DIM, grey * (1 - _ALPHA) + paint * _ALPHA))


def part_sheet(images: Tensor, maps: Tensor, *, columns: int = 8) -> Image.Image:
    """Raw pictures [B, 3, H, W], each above its parts [B, K + 1, gh, gw]."""
    tiles = [part_picture(image, its_maps) for image, its_maps in zip(images, maps, strict=True)]
    wide, high = tiles[0].size
    columns = min(columns, len(tiles))
    canvas = Image.new("RGB", (columns * wide, 2 * high * -(-len(tiles) // columns)), "white")
    for place, (image, tile) in enumerate(zip(images, tiles, strict=True)):
        left, top = place % columns * wide, place // columns * 2 * high
        plain = to_pil(image).resize((wide, high), Image.Resampling.NEAREST)
        canvas.paste(plain, (left, top))
        canvas.paste(tile, (left, top + high))
    return canvas


def mask_pixels(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Selected patches [B, gh, gw] as pixels [B, H, W], bool."""
    return F.interpolate(mask[:, None].float(), size, mode="nearest")[:, 0] > 0


def _enlarged(image: Tensor, down: int, across: int) -> Tensor:
    """Every pixel of [..., H, W] so many times."""
    return image.repeat_interleave(down, dim=-2).repeat_interleave(across, dim=-1)
