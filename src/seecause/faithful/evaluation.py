"""Evaluation of a trained iFAM network on the data it was made for, as it is and with an
intervention that is given or recommended by validation.

Key points of birds (Kp, NMI and ARI) are those of PDiscoFormer and iFAM, as defined in
`metrics/annotations.py`. The regression is fitted on CUB's training images, also where Waterbird200
is tested, whose images are CUB's birds on other backgrounds. Tokens that an intervention rejects
are background in the maps of both sets; a part that is dropped from the mask stays in the maps.

The Backgrounds Challenge (Xiao et al. 2020) asks how much accuracy another background costs:

    BG-gap = accuracy(mixed_same) - accuracy(mixed_rand)

on ImageNet-9, whose nine classes each gather some of ImageNet-1k's. An ImageNet-1k model predicts
the class its largest logit belongs to; 630 of 1,000 classes belong to none (-1) and are always
wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

from seecause.background.images import Progress, no_progress
from seecause.data.dataset import Dataset, Size, open_data, to_pil
from seecause.data.shortcuts import MINORITY
from seecause.errors import BadOption
from seecause.faithful.data import (
    Split,
    batches_of,
    match_classes,
    open_split,
)
from seecause.faithful.interventions import (
    Trial,
    best_of,
    calibrate,
    evaluating,
    intervene,
    prove,
    try_interventions,
)
from seecause.faithful.net import IFAM, By, IFAMOutput, Intervention
from seecause.files import recover_folder, write_json
from seecause.loading import ZOO, only_card, read_json, saved
from seecause.metrics.annotations import (
    Overlap,
    foreground,
    keypoint_error,
    locate,
    overlap,
    part_agreement,
)
from seecause.metrics.statistics import GroupAccuracy, auroc, group_accuracy
from seecause.models.block import Named

CONFIG, BEST, EVALUATION = "config.json", "best", "evaluation.json"  # files of a training run
MIXED_SAME, MIXED_RAND = ":mixed_same", ":mixed_rand"  # of ImageNet-9
TILE = 192  # minimum side in pixels of a drawing of parts
_ALPHA, _DIM = 0.6, 0.35
# Okabe and Ito, also for the colour-blind
_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#999999"]


@dataclass(frozen=True, eq=False)
class Examination:
    """Predictions of a network for N samples, on the CPU."""

    logits: Tensor  # [N, C]
    stage1: Tensor  # [N, C] the mean vote of the parts
    labels: Tensor  # [N]
    groups: Tensor | None  # [N, 2], where every sample has one
    kept: Tensor  # [N] share of patches that are selected
    overlap: Overlap = Overlap()  # noqa: RUF009 (frozen): foreground of the maps and object
    mapping: Tensor | None = None  # [C] the ImageNet-9 class of each prediction

    @property
    def by_group(self) -> GroupAccuracy:
        """By group where every sample has one, else by class."""
        groups = self.labels if self.groups is None else self.groups
        return group_accuracy(self._right(self.logits), groups)

    def table(self) -> dict[str, float]:
        """Accuracies; AUC where all classes occur; mIoU of the foreground where there are masks;
        the share of patches kept, and the number of images of which none is selected."""
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
        kept = self.kept
        return {**numbers, "kept": float(kept.mean()), "empty": float((kept == 0).sum())}

    def public_worst(self, name: str) -> dict[str, float]:
        """`worst_public`, the number that iFAM's released code reports for a dataset called `name`:
        the worst of the two minority groups of Waterbirds, or of the classes of MetaShift."""
        kind, groups = name.partition(":")[0], self.by_group
        if self.groups is None:
            return {}
        if kind == "metashift":
            return {"worst_public": groups.by_class.worst}
        if kind == "waterbirds" and set(MINORITY) <= set(groups.groups):
            return {"worst_public": groups.worst_among(MINORITY)}
        return {}

    def _right(self, logits: Tensor) -> Tensor:
        """[N] bool; a class that belongs to none of the nine (-1) is wrong."""
        predicted = logits.argmax(dim=1)
        return (predicted if self.mapping is None else self.mapping[predicted]) == self.labels


@torch.no_grad()
def examine(
    net: IFAM,
    data: Dataset,
    matched: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    batch: int = 32,
    rows: Sequence[int] | None = None,
    autocast: torch.dtype | None = None,
    workers: int = 0,
    advance: Callable[[int], None] = lambda done: None,
) -> Examination:
    """Run the network on these rows of a dataset, or on all, under its current intervention.
    `matched` is what `match_classes` returns."""
    (classes, mapping), kind = matched, net.device.type
    nothing = torch.empty(0, net.classes)
    empty = torch.empty(0, dtype=torch.int64)
    examined = [Examination(nothing, nothing, empty, empty.view(0, 2), empty.double())]
    batches = batches_of(net, data, batch=batch, rows=rows, workers=workers)
    with evaluating(net), torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
        for images, labels, groups, masks in batches:
            given = masks is not None and net.options.selects == "given"
            mask = net.on_patches((masks == 1).float()) if given else None
            out, shared = net(images, mask=mask), Overlap()
            if masks is not None:
                shared = overlap(foreground(out.maps, (masks.shape[1], masks.shape[2])), masks)
            labels = labels.cpu()
            examined.append(
                Examination(
                    logits=out.logits.float().cpu(),
                    stage1=out.stage1_logits.float().cpu(),
                    labels=labels if classes is None else classes[labels],
                    groups=groups,
                    kept=out.mask.double().mean(dim=(1, 2)).cpu(),
                    overlap=shared,
                )
            )
            advance(len(labels))
    return replace(merge(examined), mapping=mapping)


def merge(parts: Sequence[Examination]) -> Examination:
    """The examinations of several batches or processes, as one."""
    groups = [part.groups for part in parts if part.groups is not None]
    joined: Named = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("logits", "stage1", "labels", "kept")
    }
    shared = sum((part.overlap for part in parts), start=Overlap())
    known = torch.cat(groups) if len(groups) == len(parts) else None
    return Examination(**joined, groups=known, overlap=shared, mapping=parts[0].mapping)


def keypoint_fit_data(name: str) -> str | None:
    """The images that the key points of a test set called `name` are fitted on; None for datasets
    without key points, and for other splits."""
    kind, _, rest = name.partition(":")
    if kind == "waterbird200":
        return f"cub:{rest}:trainval"
    if kind == "cub" and rest.endswith(":test"):
        return f"cub:{rest.removesuffix(':test')}:trainval"
    return None


def key_points(net: IFAM, fit: Dataset, test: Dataset) -> dict[str, float]:
    """`keypoints`: the mean error in percent of the bird's box, lower is better. `nmi` and `ari`:
    the agreement of parts and key points. Empty where no key point is visible in both sets."""
    with evaluating(net):
        fitted, tested = (locate(net, data, net.maps) for data in (fit, test))
    if not (fitted.visible.any(dim=0) & tested.visible.any(dim=0)).any():
        return {}
    nmi, ari = part_agreement(tested)
    return {"keypoints": keypoint_error(fitted, tested), "nmi": nmi, "ari": ari}


def part_colours(parts: int) -> Tensor:
    """[K, 3] in [0, 1]; up to eight are distinct for colour-blind readers."""
    import matplotlib
    from matplotlib.colors import to_rgb

    table = _COLOURS if parts <= len(_COLOURS) else cast(Any, matplotlib.colormaps["tab20"]).colors
    return torch.tensor([to_rgb(table[part % len(table)]) for part in range(parts)])


def part_image(image: Tensor, maps: Tensor, removed: Sequence[int] = ()) -> Image.Image:
    """A raw image [3, H, W] whose background is dimmed and whose parts have a colour each; maps are
    [K + 1, gh, gw]. Removed parts are dimmed too."""
    scale = max(1, -(-TILE // min(image.shape[1:])))
    raw = _enlarged(image.detach().float().cpu().clamp(0, 1), scale, scale)  # [3, H, W]
    # patch by patch: smooth outlines would show hidden pixels
    winner, background = maps.argmax(dim=0).cpu(), len(maps) - 1
    down, across = raw.shape[1] // winner.shape[0], raw.shape[2] // winner.shape[1]
    label = _enlarged(winner, down, across)  # [H, W]
    hidden = torch.isin(label, torch.tensor([background, *removed], dtype=label.dtype))
    colours = torch.cat([part_colours(background), torch.zeros(1, 3)])
    paint = colours[label].permute(2, 0, 1)  # [3, H, W]
    # on grey, so that a part has the colour of the legend whatever it covers
    grey = raw.mean(dim=0, keepdim=True)
    return to_pil(torch.where(hidden, raw * _DIM, grey * (1 - _ALPHA) + paint * _ALPHA))


def part_sheet(images: Tensor, maps: Tensor) -> Image.Image:
    """Raw images [B, 3, H, W], each above its parts [B, K + 1, gh, gw], eight in a row."""
    pairs = zip(images, maps, strict=True)
    drawn = torch.stack([pil_to_tensor(part_image(*pair)) for pair in pairs])
    plain = F.interpolate(images.cpu().float() * 255, drawn.shape[2:]).round().to(torch.uint8)
    both = torch.cat([plain, drawn], dim=2)  # [B, 3, 2 H, W]
    return to_pil_image(make_grid(both, nrow=8, padding=0, pad_value=255))


def mask_pixels(mask: Tensor, size: Size) -> Tensor:
    """Selected patches [B, gh, gw] as pixels [B, H, W], bool."""
    return F.interpolate(mask[:, None].float(), size, mode="nearest")[:, 0] > 0


def _enlarged(image: Tensor, down: int, across: int) -> Tensor:
    """Repeat every pixel of [..., H, W]."""
    return image.repeat_interleave(down, dim=-2).repeat_interleave(across, dim=-1)


@dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """A network in eval mode and the images it was made for, as its card names them."""

    name: str
    net: IFAM
    data: str | None = None  # the training dataset, without the split
    val: str | None = None  # other images to choose interventions by, with their split
    test: str | None = None  # other images to test on, with their split
    run: Path | None = None  # the folder of its training run

    def images(self, split: Split, limit: int | None = None) -> Dataset:
        """A split of the data it was trained on, or the dataset that its card names instead."""
        instead = {"val": self.val, "test": self.test}.get(split)
        if instead is not None:
            return open_data(instead, limit=limit)
        if self.data is None:
            expected = "a network whose card names its training data, or no interventions"
            raise BadOption("network", self.name, expected)
        return open_split(self.data, split, limit=limit)

    def export(self, folder: Path) -> Path:
        """Write the network into a new or empty folder, which `sc.load` reads; returns its card."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadOption("folder", str(folder), "a new or empty folder")
        return self.net.save(folder, data=self.data, val=self.val, test=self.test)


def open_network(name: str, *, device: str | torch.device = "cpu") -> TrainedNetwork:
    """Open a trained network with the data it was made for.

    Args:
        name: The folder of a run or one that `seecause faithful export` wrote, or `builtin:NAME`.
        device: Where the network computes.

    Returns:
        A `TrainedNetwork`, for `evaluate`; `.net` is the network.

    Example:
        >>> import seecause as sc
        >>> network = sc.faithful.open_network("builtin:critters-ifam")
        >>> network.net.parts, network.data
        (4, 'critters:simplicity')
    """
    library, _, builtin = name.partition(":")
    run = Path(name) if (Path(name) / CONFIG).is_file() else None
    if library == "builtin":
        folder, stem = ZOO, builtin
    else:
        folder = Path(name) if run is None else run / BEST
        recover_folder(folder)
        stem = only_card(folder).stem
    net = saved(folder, stem, kind="builtin model").module
    if not isinstance(net, IFAM):
        expected = "an iFAM network, such as builtin:critters-ifam"
        raise BadOption("network", name, f"{expected}; this is a {type(net).__name__}")
    card = read_json(folder / f"{stem}.json")
    data, val, test = (card.get(field) for field in ("data", "val", "test"))
    return TrainedNetwork(name, net.eval().to(device), data, val, test, run)


@dataclass(frozen=True)
class Evaluation:
    """All numbers about a test set (`Examination.table`, key points), `plain` and `changed` by an
    intervention. Where validation chose it: from which trials, on which images."""

    data: str
    images: int
    plain: dict[str, float]
    changed: dict[str, float] | None = None
    intervention: Intervention | None = None
    chosen_on: str | None = None
    trials: Sequence[Trial] = ()


def evaluate(
    network: TrainedNetwork,
    *,
    data: str | None = None,
    intervention: Intervention | Literal["best"] | None = "best",
    quantiles: Sequence[float] = (0.97, 0.99),
    by: By = "distance",
    calibration: int | None = None,
    keypoints: bool = True,
    limit: int | None = None,
    batch: int = 32,
    workers: int = 0,
    progress: Progress = no_progress,
) -> Evaluation:
    """Measure a trained network on its test images, plain and with an intervention.

    A run keeps the result in RUN/evaluation.json, with an entry for each dataset.

    Args:
        network: What `open_network` returns.
        data: Another dataset to test on, with its split.
        intervention: An `Intervention`, or None. "best" takes the one that validation recommends:
            one dropped part, a quantile of trusted tokens, both or neither. Validation goes by
            AUC where there are two classes without groups, else by worst-group accuracy.
        quantiles: Quantiles of trusted tokens that "best" tries.
        by: What tokens are trusted by in "best": "distance" to the prototype or "dot" product.
        calibration: The number of training images for thresholds and key points; None: all.
        keypoints: Measure key points where the images have some.
        limit: The number of test images, spread evenly; None: all.
        batch: Images at once.
        workers: Processes that read images.
        progress: Called with a description and a total; returns a context manager that gives a
            function, which is called with the number of finished images.

    Returns:
        An `Evaluation` with `plain` and `changed` numbers by name.

    Example:
        >>> import seecause as sc
        >>> network = sc.faithful.open_network("builtin:critters-ifam")
        >>> result = sc.faithful.evaluate(network, intervention=None, limit=16)
        >>> result.images, result.plain["average"]
        (16, 1.0)
    """
    net = network.net
    prove(net)
    images = network.images("test", limit) if data is None else open_data(data, limit=limit)
    matched, name = match_classes(net, images), images.name
    reading: Named = {"batch": batch, "workers": workers}

    def examined(data: Dataset) -> Examination:
        with progress("examining", len(data)) as advance:
            return examine(net, data, matched, advance=advance, **reading)

    def numbers() -> dict[str, float]:
        result = examined(images)
        row = result.table() | result.public_worst(name)
        if name.startswith("imagenet9:") and name.endswith(MIXED_RAND):
            # the drop of accuracy on backgrounds of another class
            same = open_data(name.removesuffix(MIXED_RAND) + MIXED_SAME, limit=len(images))
            row["background_gap"] = examined(same).table()["average"] - row["average"]
        return row

    fit = keypoint_fit_data(name) if keypoints else None

    def points() -> dict[str, float]:
        return {} if fit is None else key_points(net, open_data(fit, limit=calibration), images)

    trials, chosen_on = (), None
    if intervention == "best" and net.options.selects != "parts":
        intervention = None  # a baseline has no parts to drop
    if intervention == "best":
        _calibrated(network, quantiles, by, calibration, progress, reading)
        val = network.images("val")
        batches = partial(batches_of, net, val, **reading)
        trials, chosen_on = try_interventions(net, batches, quantiles, by=by), val.name
        auc = val[0].group is None and all(trial.auc is not None for trial in trials)
        intervention = best_of(trials, by="auc" if auc else "worst").intervention
    elif intervention is not None and intervention.quantile is not None:
        _calibrated(
            network, [intervention.quantile], intervention.by, calibration, progress, reading
        )
    changed: dict[str, float] | None = None if intervention is None else {}
    if intervention:
        with intervene(net, **asdict(intervention)):
            # parts dropped from the mask stay in the maps, where key points come from
            changed = numbers() | ({} if intervention.quantile is None else points())
    plain = numbers() | points()
    changed = None if changed is None else plain | changed
    # a test of fewer images does not replace that of all
    name = name if limit is None else f"{name} --limit {limit}"
    result = Evaluation(name, len(images), plain, changed, intervention, chosen_on, trials)
    if network.run is not None:
        path = network.run / EVALUATION
        kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        write_json(path, {**kept, name: asdict(result)})
    return result


def _calibrated(
    network: TrainedNetwork,
    quantiles: Sequence[float],
    by: By,
    limit: int | None,
    progress: Progress,
    reading: Named,
) -> None:
    """Thresholds from training images, prepared as test images are.

    Thresholds of all training images are saved in RUN/best. A network without a run keeps the
    thresholds that it was saved with.
    """
    net = network.net
    known = [net.thresholds.get((quantile, by)) for quantile in quantiles]
    if network.run is None and limit is None and None not in known:
        return
    data = network.images("train", limit)
    if all(each is not None and each.images == len(data) for each in known):
        return
    with progress("calibrating", len(data)) as advance:

        def counted() -> Iterator[Tensor]:
            for images, *_ in batches_of(net, data, **reading):
                yield images
                advance(len(images))

        calibrate(net, counted(), list(quantiles), by=by)
    if limit is None and network.run is not None:
        path = only_card(network.run / BEST)
        thresholds = [asdict(each) for each in net.thresholds.values()]
        write_json(path, {**read_json(path), "thresholds": thresholds})


@dataclass(frozen=True, eq=False)
class PartExamples:
    """Images [B, 3, H, W] (normalised), the network's output, and its output without each part."""

    net: IFAM
    images: Tensor
    output: IFAMOutput
    without: dict[int, IFAMOutput]
    titles: Sequence[str]


@torch.no_grad()
def part_examples(net: IFAM, images: Tensor, titles: Sequence[str]) -> PartExamples:
    """Outputs with all parts, and without each part in turn."""
    without = {}
    with evaluating(net):
        for part in range(net.parts):
            with intervene(net, drop_parts=[part], quantile=net.intervention.quantile):
                without[part] = net(images)
        return PartExamples(net, images, net(images), without, titles)


def example_parts(
    network: TrainedNetwork,
    *,
    data: str | None = None,
    limit: int = 12,
    quantile: float | None = None,
) -> tuple[str, PartExamples]:
    """The name of the dataset, and `limit` of its images, spread evenly, without the tokens that a
    quantile of training tokens rejects."""
    images = network.images("test", limit) if data is None else open_data(data, limit=limit)
    pixels, labels, _, _ = next(batches_of(network.net, images, batch=len(images)))
    names = [images.classes[label] for label in labels.tolist()]
    titles = [f"{place}: {name}" for place, name in enumerate(names, start=1)]
    if quantile is not None and (quantile, "distance") not in network.net.thresholds:
        learned = batches_of(network.net, network.images("train"))
        calibrate(network.net, (batch[0] for batch in learned), quantile)
    with intervene(network.net, quantile=quantile):
        return images.name, part_examples(network.net, pixels, titles)
