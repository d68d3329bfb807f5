"""What a network answers and selects on a dataset, and how well its parts find key points.

Key points of birds: Kp, NMI and ARI as PDiscoFormer and iFAM report them
(`seecause.metrics.keypoints` has the definitions). The regression is fitted on the photos that CUB
releases for training, also where Waterbird200 is tested: its photos are CUB's birds, elsewhere.
Tokens that an intervention rejects are background in the maps, of both sets; a part left out of the
mask is still a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from seecause.data.batch import raw_in_frame
from seecause.data.birds import MINORITY
from seecause.data.dataset import Dataset, Sample, sample_labels
from seecause.errors import BadOption
from seecause.faithful.data import batches_of, chunked, frame_of, read_batches
from seecause.faithful.images import mask_pixels
from seecause.faithful.interventions import evaluating, packing
from seecause.faithful.net import IFAM
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
from seecause.metrics.segmentation import Overlap, foreground, iou, overlap
from seecause.models.preprocess import Preprocess

Group = tuple[int, int]
Advance = Callable[[int], None]  # so many pictures more are done


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
    examined = [_nothing(net, mapping)]
    with evaluating(net), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        for images, labels, groups, masks in batches_of(
            net, data, batch=batch, places=places, workers=workers
        ):
            out = net(images, packed=packing(net))
            on_objects = {} if masks is None else _overlaps(out.maps, out.mask, masks)
            examined.append(
                Examination(
                    logits=out.logits.float().cpu(),
                    stage1=out.stage1_logits.float().cpu(),
                    labels=labels.cpu(),
                    groups=tuple(groups),
                    kept=float(out.mask.double().mean()),
                    empty=int(out.empty.sum()),
                    mapping=mapping,
                    **{"overlap": Overlap(), **on_objects},
                )
            )
            advance(len(labels))
    return merge(examined)


def _overlaps(maps: Tensor, mask: Tensor, objects: Tensor) -> dict[str, object]:
    """Of maps [B, K + 1, gh, gw] and mask [B, gh, gw] with objects [B, H, W]."""
    size = (objects.shape[1], objects.shape[2])
    parts = foreground(maps, size)
    return {
        "overlap": overlap(parts, objects),
        "picture_ious": iou(parts, objects).cpu(),
        "mask_overlap": overlap(mask_pixels(mask, size), objects),
    }


def _nothing(net: IFAM, mapping: Tensor | None) -> Examination:
    logits, labels = torch.empty(0, net.classes), torch.empty(0, dtype=torch.int64)
    return Examination(logits, logits, labels, (), Overlap(), 0.0, 0, mapping)


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


def key_points(
    net: IFAM,
    fit: Dataset,
    test: Dataset,
    *,
    batch: int = 32,
    workers: int = 0,
    advance: Advance = lambda done: None,
) -> dict[str, float]:
    """`keypoints`: the mean error in percent of the bird's box, lower is better. `nmi` and `ari`:
    how well parts and key points agree.

    Empty where no key point is visible in both sets.
    """
    fitted, tested = (
        locate_parts(net, data, batch=batch, workers=workers, advance=advance)
        for data in (fit, test)
    )
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
