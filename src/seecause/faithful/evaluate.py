"""What a network answers and selects on a dataset, and which intervention validation recommends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.data.batch import to_batch
from seecause.data.dataset import Dataset, sample_labels
from seecause.data.waterbirds import MINORITY
from seecause.errors import BadOption
from seecause.faithful.interventions import evaluating, leave_one_out, packing
from seecause.faithful.net import IFAM
from seecause.faithful.output import By
from seecause.faithful.reading import read
from seecause.metrics.calibration import auroc
from seecause.metrics.groups import GroupAccuracy, group_accuracy, in9_right
from seecause.metrics.segmentation import Overlap, foreground, iou, overlap
from seecause.models.preprocess import Preprocess

Group = tuple[int, int]
Choose = Literal["worst", "auc"]


@dataclass(frozen=True)
class Frame:
    """Into what pictures are brought: `to_batch` asks no more of a model."""

    preprocess: Preprocess
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Examined:
    """Of every sample asked for, on the CPU."""

    logits: Tensor  # [N, C]
    stage1: Tensor  # [N, C] the parts' own answer
    labels: Tensor  # [N]
    groups: tuple[Group | None, ...]
    overlap: Overlap  # of the maps' foreground and the object, where the dataset has masks
    kept: float  # share of patches that are selected
    empty: int  # pictures of which nothing was selected
    mapping: Tensor | None = (
        None  # [C] which of ImageNet-9's classes each answer stands for, where that is asked
    )
    each: Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.float64)
    )  # IoU of `overlap`, of every picture in a batch with masks
    chosen: Overlap = field(
        default_factory=Overlap
    )  # of the patches that are selected and the object

    @property
    def by_group(self) -> GroupAccuracy:
        """By group where every sample has one, else by class."""
        return group_accuracy(
            self._right(self.logits), self.labels if None in self.groups else list(self.groups)
        )

    def table(self) -> dict[str, float]:
        """Every number there is. AUC where all classes occur; where there are masks, IoU with the
        object of the maps' foreground (`miou`: over all pixels; `miou_pictures`: the mean of
        pictures), which leaving parts out does not change, and of the patches that are read
        (`mask_iou`).
        """
        found = self.by_group
        numbers = {
            "average": found.average,
            "worst": found.worst,
            "stage1_average": float(self._right(self.stage1).double().mean()),
        }
        if self.mapping is None and len(self.labels.unique()) == self.logits.shape[1] > 1:
            numbers["auc"] = auroc(self.logits, self.labels)
        if not math.isnan(self.overlap.iou):
            numbers |= {
                "miou": self.overlap.iou,
                "miou_pictures": float(self.each.nanmean()),
                "mask_iou": self.chosen.iou,
            }
        return {**numbers, "kept": self.kept, "empty": float(self.empty)}

    def _right(self, logits: Tensor) -> Tensor:
        """[N] bool"""
        return (
            logits.argmax(dim=1) == self.labels
            if self.mapping is None
            else in9_right(logits, self.labels, self.mapping)
        )


def frame_of(net: IFAM) -> Frame:
    if net.preprocess is None:
        raise BadOption(
            "preprocess",
            None,
            "IFAM(..., preprocess=...): the backbone does not tell how pictures are prepared",
        )
    return Frame(net.preprocess, net.stage1.prototypes.device, net.stage1.prototypes.dtype)


def batches_of(
    net: IFAM,
    data: Dataset,
    *,
    batch: int = 32,
    places: Sequence[int] | None = None,
    workers: int = 0,
) -> Iterator[tuple[Tensor, Tensor, list[Any], Tensor | None]]:
    """Normalised images, labels, groups and masks (in the network's frame) of these places, or of
    all; `workers` processes read ahead."""
    frame, chosen = frame_of(net), range(len(data)) if places is None else places
    keys = [list(chosen[start : start + batch]) for start in range(0, len(chosen), batch)]
    framed = partial(
        _framed, Frame(frame.preprocess, torch.device("cpu"), torch.float32), data.name
    )
    for images, labels, groups, masks in read(
        data, keys, framed, workers=workers, pin=frame.device.type == "cuda"
    ):
        yield (
            images.to(frame.device, frame.dtype),
            labels.to(frame.device),
            groups,
            None if masks is None else masks.to(frame.device),
        )


def _framed(
    frame: Frame, name: str, samples: list[Any]
) -> tuple[Tensor, Tensor, list[Any], Tensor | None]:
    images, labels, masks = to_batch(frame, samples)
    if labels is None:
        raise BadOption("data", name, "a dataset with labels")
    return images, labels, [sample.group for sample in samples], masks


def labelled_batches(
    net: IFAM, data: Dataset, *, batch: int = 32, workers: int = 0
) -> Iterator[tuple[Tensor, ...]]:
    """(images, labels, groups) as `leave_one_out` takes them; without groups where the dataset has
    none."""
    for images, labels, groups, _ in batches_of(net, data, batch=batch, workers=workers):
        yield (images, labels) if None in groups else (images, labels, torch.tensor(groups))


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
    advance: Callable[[int], None] = lambda done: None,
) -> Examined:
    """Run the network as it is, with any intervention it is under. A GPU without a kernel for
    packed tokens (`packed.has_kernel`) runs all of them."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    groups: list[Group | None] = []
    each: list[Tensor] = []
    shared, chosen, kept, empty = Overlap(), Overlap(), 0.0, 0
    device = net.stage1.prototypes.device
    with evaluating(net), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        for images, labels, codes, masks in batches_of(
            net, data, batch=batch, places=places, workers=workers
        ):
            out = net(images, packed=packing(net))
            rows.append((out.logits.float().cpu(), out.stage1_logits.float().cpu(), labels.cpu()))
            groups += codes
            kept += float(out.mask.double().mean(dim=(1, 2)).sum())
            empty += int(out.empty.sum())
            if masks is not None:
                size = (masks.shape[1], masks.shape[2])
                found = foreground(out.maps, size)
                shared, chosen = (
                    shared + overlap(found, masks),
                    chosen + overlap(patches(out.mask, size), masks),
                )
                each.append(iou(found, masks).cpu())
            advance(len(labels))
    if not rows:
        return Examined(
            torch.empty(0, net.classes),
            torch.empty(0, net.classes),
            torch.empty(0, dtype=torch.int64),
            (),
            shared,
            0.0,
            0,
            mapping,
        )
    logits, stage1, truth = (torch.cat(found) for found in zip(*rows, strict=True))
    single = torch.cat(each) if each else torch.empty(0, dtype=torch.float64)
    return Examined(
        logits,
        stage1,
        truth,
        tuple(groups),
        shared,
        kept / len(truth),
        empty,
        mapping,
        single,
        chosen,
    )


def patches(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Selected patches [B, gh, gw] as pixels [B, H, W], bool."""
    return F.interpolate(mask[:, None].float(), size, mode="nearest")[:, 0] > 0


def together(parts: Sequence[Examined]) -> Examined:
    """What several processes examined, as one."""
    counts = [len(part.labels) for part in parts]
    return Examined(
        logits=torch.cat([part.logits for part in parts]),
        stage1=torch.cat([part.stage1 for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        groups=tuple(group for part in parts for group in part.groups),
        overlap=sum((part.overlap for part in parts), start=Overlap()),
        kept=sum(part.kept * count for part, count in zip(parts, counts, strict=True))
        / max(1, sum(counts)),
        empty=sum(part.empty for part in parts),
        mapping=parts[0].mapping,
        each=torch.cat([part.each for part in parts]),
        chosen=sum((part.chosen for part in parts), start=Overlap()),
    )


def check_select(select: str, val: Dataset) -> None:
    """Refuse AUC where validation lacks a class, before training. Labels of photos are known
    without reading them."""
    if select != "auc":
        return
    if set(sample_labels(val)) != set(range(len(val.classes))) or len(val.classes) < 2:
        raise BadOption(
            "select",
            select,
            f"average or worst: AUC needs pictures of every class, and {val.name} lacks some",
        )


def public_worst(found: Examined, name: str) -> dict[str, float]:
    """`worst_public`, what iFAM's public code reports: the two minority groups of Waterbirds, the
    classes of MetaShift. Nothing for other datasets."""
    kind = name.partition(":")[0]
    if kind not in ("waterbirds", "metashift") or None in found.groups:
        return {}
    if kind == "metashift":
        return {"worst_public": found.by_group.by_class.worst}
    return (
        {"worst_public": found.by_group.worst_among(MINORITY)}
        if set(MINORITY) <= set(found.by_group.groups)
        else {}
    )


@dataclass(frozen=True)
class Tried:
    """One intervention and what it does to validation pictures."""

    drop: tuple[int, ...]
    quantile: float | None
    average: float
    worst: float
    auc: float | None = None  # of two classes that both occur
    by: By = "distance"  # what tokens are rejected by


def try_interventions(
    net: IFAM,
    batches: Callable[[], Iterable[Sequence[Tensor]]],
    quantiles: Sequence[float] = (),
    *,
    by: By = "distance",
) -> list[Tried]:
    """Nothing, every part left out in turn, every calibrated quantile, and both together; `batches`
    as `leave_one_out` takes them."""
    tried = []
    for quantile in (None, *quantiles):
        found = leave_one_out(net, batches(), quantile=quantile, by=by)
        for drop, logits in [
            ((), found.logits),
            *(((part,), without) for part, without in enumerate(found.without)),
        ]:
            tried.append(Tried(drop, quantile, **found.numbers(logits), by=by))
    return tried


def sensible_choice(tried: Sequence[Tried], data: Dataset) -> Choose:
    """AUC for two classes without groups, such as SIIM's, where an accuracy depends on where the
    line is drawn; else the worst group."""
    return "auc" if all(one.auc is not None for one in tried) and data[0].group is None else "worst"


def best_of(tried: Sequence[Tried], choose: Choose = "worst") -> Tried:
    """By worst-group accuracy or AUC, then by average; the first of equals, so that nothing is
    changed without a gain."""
    if choose == "auc" and any(one.auc is None for one in tried):
        raise BadOption(
            "choose", choose, "worst: AUC needs two classes, and validation pictures of both"
        )
    return max(
        tried,
        key=lambda one: (
            one.auc if choose == "auc" and one.auc is not None else one.worst,
            one.average,
        ),
    )
