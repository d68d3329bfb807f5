"""A trained network with the data it is tested on, and its evaluation: as it is, and with the
intervention that is asked for or that validation recommends.

Key points of birds (Kp, NMI and ARI) are those of PDiscoFormer and iFAM (`metrics/keypoints.py` has
the definitions). The regression is fitted on the photos that CUB releases for training, also where
Waterbird200 is tested: its photos are CUB's birds on other backgrounds. Tokens that an intervention
rejects are background in the maps of both sets; a part left out of the mask is still a part. Random
crops are how iFAM's public code measures mIoU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from seecause.background.images import Progress, no_progress
from seecause.data.batch import raw_in_frame
from seecause.data.dataset import IGNORE, Dataset, Sample, sample_labels
from seecause.data.images import to_pil
from seecause.data.registry import open_data
from seecause.data.shortcuts import MINORITY
from seecause.errors import BadOption, DataMissing
from seecause.faithful.data import (
    batches_of,
    chunked,
    frame_of,
    labelled_batches,
    match_classes,
    open_test,
    open_train,
    open_validation,
    read_batches,
    seeded,
)
from seecause.faithful.interventions import (
    Trial,
    best_of,
    calibrate,
    evaluating,
    intervene,
    packing,
    sensible_criterion,
    try_interventions,
)
from seecause.faithful.net import IFAM, By, IFAMOutput, Intervention
from seecause.faithful.run import (
    CONFIG,
    keep_evaluation,
    keep_thresholds,
    open_run,
    read_evaluations,
)
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
from seecause.models.load import ZOO, only_card, saved
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


# every creature on every background equally often: in its own regime, some groups have hardly a
# picture
BALANCED = "critters:balanced"
MIXED_SAME, MIXED_RAND = ":mixed_same", ":mixed_rand"  # of ImageNet-9
# which pictures a network is trained and tested on: what its card keeps of a `TrainedNetwork`
_PICTURES = ("data", "val", "test", "limit", "val_limit")

Choose = Literal["auto", "worst", "auc"]  # by what, on validation


@dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """A network in eval mode, by its `name`. `data` is what it was trained on, without the split;
    None where nothing tells."""

    name: str
    net: IFAM
    data: str | None = None
    val: str | None = None  # other pictures to choose by, with their split
    test: str | None = None  # other pictures to test on, with their split
    limit: int | None = None  # training pictures
    val_limit: int | None = None
    workers: int = 0
    run: Path | None = None  # where results are kept

    def train_pictures(self, limit: int | None = None) -> Dataset:
        data = self._trained_on("thresholds from training pictures")
        return open_train(data, limit=limit or self.limit)

    def val_pictures(self) -> Dataset:
        """What interventions are chosen by."""
        data = self._trained_on("choosing an intervention")
        return open_validation(data, self.val, limit=self.val_limit)

    def test_pictures(self, limit: int | None = None) -> Dataset:
        if self.test is not None:
            return open_data(self.test, limit=limit)
        return open_test(self._trained_on("its test pictures"), limit=limit)

    def matched(self, data: str | None, limit: int | None) -> tuple[Dataset, Tensor | None]:
        """The pictures to test on (its own, or `data`), with labels as the network counts its
        classes, and the map of its answers where the dataset has classes of its own."""
        pictures = self.test_pictures(limit) if data is None else open_data(data, limit=limit)
        return match_classes(self.net, pictures)

    def card_fields(self) -> dict[str, Any]:
        """What a card says about the pictures, so that a copy is tested on the same ones."""
        return {name: getattr(self, name) for name in _PICTURES}

    def export(self, folder: Path) -> Path:
        """Write the network into a new or empty folder, which `sc.load` reads; returns its card."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadOption("folder", str(folder), "a new or empty folder")
        return self.net.save(folder, **self.card_fields())

    def _trained_on(self, need: str) -> str:
        if self.data is None:
            expected = f"one that tells what it was trained on, for {need}"
            raise BadOption("network", self.name, f"{expected}, such as the folder of its run")
        return self.data


def open_network(name: str, *, device: str | torch.device = "cpu") -> TrainedNetwork:
    """By name: the folder of a run, one that `faithful export` or `tools/critters` wrote, or
    `builtin:NAME`."""
    library, _, builtin = name.partition(":")
    if library == "builtin":
        return _from_card(name, ZOO, builtin, device)
    folder = Path(name)
    if (folder / CONFIG).is_file():
        config, net = open_run(folder)
        pictures = {field: getattr(config, field) for field in _PICTURES if field != "test"}
        net.to(device)
        return TrainedNetwork(name, net, **pictures, workers=config.workers, run=folder)
    if not any(folder.glob("*.json")):
        remedy = "Give a folder of `faithful train` or `faithful export`, or builtin:critters-ifam"
        raise DataMissing(name, f"no run ({CONFIG}) and no network there", remedy)
    return _from_card(name, folder, only_card(folder).stem, device)


def _from_card(name: str, folder: Path, stem: str, device: str | torch.device) -> TrainedNetwork:
    net = saved(folder, stem, kind="builtin model").module
    if not isinstance(net, IFAM):
        expected = "an iFAM network, such as builtin:critters-ifam"
        raise BadOption("network", name, f"{expected}; this is a {type(net).__name__}")
    net.eval().to(device)
    card = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
    regime = card.get("recipe", {}).get("regime")
    if regime is not None:  # an embedded model
        val, test = f"{BALANCED}:val", f"{BALANCED}:test"
        return TrainedNetwork(name, net, f"critters:{regime}", val, test)
    return TrainedNetwork(name, net, **{field: card.get(field) for field in _PICTURES})


@dataclass(frozen=True)
class Evaluation:
    """Every number about a test set (`Examination.table`, key points), `plain` and `changed` by an
    intervention. Where validation chose it: by what, of which trials, on which pictures."""

    data: str
    pictures: int
    plain: dict[str, float]
    changed: dict[str, float] | None = None
    intervention: Intervention | None = None
    chosen_on: str | None = None
    chosen_by: str | None = None
    chosen: Trial | None = None
    trials: Sequence[Trial] = field(default=())

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"data": self.data, "pictures": self.pictures, "plain": self.plain}
        if self.chosen is None:
            return row
        return row | {
            "chosen_on": self.chosen_on,
            "chosen_by": self.chosen_by,
            "chosen": asdict(self.chosen),
            "tried": [asdict(trial) for trial in self.trials],
            "changed": self.changed,
        }


def evaluate(
    network: TrainedNetwork,
    *,
    data: str | None = None,
    interventions: bool = True,
    quantiles: Sequence[float] = (0.97, 0.99),
    calibration: int | None = None,
    by: By = "distance",
    choose: Choose = "auto",
    keypoints: bool = True,
    random_cuts: bool = False,
    limit: int | None = None,
    batch: int = 32,
    progress: Progress = no_progress,
) -> Evaluation:
    """The test pictures, plain and with the intervention that validation recommends: one part left
    out, a quantile of tokens trusted, both or neither.

    `network` is `open_network(RUN)`; `data` are other pictures than those of its training. A run
    keeps it in RUN/evaluation.json, with an entry for each dataset. `calibration` training
    pictures decide thresholds and key points (None: all); `limit` is of test pictures.
    """
    if interventions:
        _check_choice(network, quantiles, choose)
    if network.run is not None:
        read_evaluations(network.run)  # a broken file is said now, not when all is done
    pictures, mapping = network.matched(data, limit)
    test = _Test(network, pictures, mapping, batch, calibration, random_cuts, progress)
    # a quick look does not replace a whole test
    name = pictures.name if limit is None else f"{pictures.name} --limit {limit}"
    plain = test.numbers() | (test.key_points() if keypoints else {})
    evaluation = Evaluation(name, len(pictures), plain)
    if interventions:
        test.calibrate(quantiles, by)
        evaluation = test.with_best_intervention(evaluation, quantiles, by, choose)
    if network.run is not None:
        keep_evaluation(network.run, evaluation.to_json())
    return evaluation


def _check_choice(network: TrainedNetwork, quantiles: Sequence[float], choose: str) -> None:
    _check_shares(quantiles)
    if network.data is None:
        expected = "one that tells what it was trained on, such as the folder of its run"
        why = "they are chosen by pictures like those it was trained on"
        raise BadOption("network", network.name, f"{expected}, or no interventions: {why}")
    if choose == "auc" and network.net.classes != 2:
        why = f"AUC needs two classes, and {network.name} has {network.net.classes}"
        raise BadOption("choose", choose, f"worst, or auto: {why}")


def evaluate_intervention(
    network: TrainedNetwork,
    *,
    drop_parts: Sequence[int] = (),
    quantile: float | None = None,
    by: By = "distance",
    data: str | None = None,
    calibration: int | None = None,
    limit: int | None = None,
    batch: int = 32,
    progress: Progress = no_progress,
) -> Evaluation:
    """The test pictures, plain and with `drop_parts` (numbers of parts) left out, with tokens
    rejected that lie beyond a `quantile` of training tokens, or both. Else as `evaluate`."""
    parts = network.net.parts
    if not drop_parts and quantile is None:
        expected = "parts to leave out, or a quantile, or both: nothing would be changed"
        raise BadOption("drop_parts", list(drop_parts), expected)
    if not all(0 <= part < parts for part in drop_parts):
        shown = f"`seecause faithful parts {network.name}` shows them"
        expected = f"parts 0-{parts - 1} of {network.name}; {shown}"
        raise BadOption("drop_parts", list(drop_parts), expected)
    if quantile is not None:
        _check_shares([quantile])
    pictures, mapping = network.matched(data, limit)
    test = _Test(network, pictures, mapping, batch, calibration, False, progress)
    if quantile is not None:
        test.calibrate([quantile], by)
    change = Intervention(tuple(drop_parts), quantile, by)
    plain, changed = test.numbers(), test.changed(change, keypoints=False)
    return Evaluation(pictures.name, len(pictures), plain, changed, change)


def _check_shares(quantiles: Sequence[float]) -> None:
    if not quantiles or not all(0 < share <= 1 for share in quantiles):
        expected = "shares above 0 and up to 1, such as 0.99"
        raise BadOption("quantile", ",".join(f"{share:g}" for share in quantiles), expected)


@dataclass(frozen=True)
class _Test:
    """What is measured, on which pictures."""

    network: TrainedNetwork
    pictures: Dataset
    mapping: Tensor | None
    batch: int
    calibration: int | None
    random_cuts: bool
    progress: Progress

    @property
    def _reading(self) -> dict[str, Any]:
        return {"batch": self.batch, "workers": self.network.workers}

    def _examine(self, what: str, data: Dataset, mapping: Tensor | None = None) -> Examination:
        with self.progress(what, len(data)) as advance:
            options: dict[str, Any] = {"mapping": mapping, "advance": advance, **self._reading}
            return examine(self.network.net, data, **options)

    def numbers(self) -> dict[str, float]:
        """Every number there is about these pictures; with random cuts, also mIoU on those of
        pictures that have masks."""
        name, mapping = self.pictures.name, self.mapping
        result = self._examine("examining", self.pictures, mapping)
        row = result.table() | result.public_worst(name)
        if self.random_cuts and "miou" in row:
            cuts = RandomCuts(self.pictures, frame_of(self.network.net).preprocess)
            row["miou_public"] = self._examine("random cuts", cuts).table()["miou"]
        if name.startswith("imagenet9:") and name.endswith(MIXED_RAND):
            # its twin tells what a background of another class costs
            twin = name.removesuffix(MIXED_RAND) + MIXED_SAME
            same, _ = self.network.matched(twin, len(self.pictures))
            average = self._examine("examining", same, mapping).table()["average"]
            row["background_gap"] = average - row["average"]
        return row

    def with_best_intervention(
        self, evaluation: Evaluation, quantiles: Sequence[float], by: By, choose: Choose
    ) -> Evaluation:
        """The evaluation, and what the intervention does that is best on validation."""
        net, val = self.network.net, self.network.val_pictures()
        batches = partial(labelled_batches, net, val, **self._reading)
        trials = try_interventions(net, batches, quantiles, by=by)
        criterion = sensible_criterion(trials, val) if choose == "auto" else choose
        best = best_of(trials, criterion)
        change = Intervention(best.drop, best.quantile, best.by)
        keypoints = "keypoints" in evaluation.plain
        changed = self.changed(change, keypoints=keypoints) if change else {}
        return replace(
            evaluation,
            changed=evaluation.plain | changed,
            intervention=change,
            chosen_on=val.name,
            chosen_by=criterion,
            chosen=best,
            trials=trials,
        )

    def changed(self, change: Intervention, *, keypoints: bool) -> dict[str, float]:
        """The same under an intervention. Parts left out of the mask stay in the maps, where key
        points come from."""
        drop, quantile = change.drop_parts, change.quantile
        with intervene(self.network.net, drop_parts=drop, quantile=quantile, by=change.by):
            located = self.key_points() if keypoints and change.quantile is not None else {}
            return self.numbers() | located

    def key_points(self) -> dict[str, float]:
        """Nothing for photos without key points."""
        name = keypoint_fit_data(self.pictures.name)
        if name is None:
            return {}
        fit = open_data(name, limit=self.calibration)
        with self.progress("key points", len(fit) + len(self.pictures)) as advance:
            options = {"advance": advance, **self._reading}
            return key_points(self.network.net, fit, self.pictures, **options)

    def calibrate(self, quantiles: Sequence[float], by: By) -> None:
        """Thresholds from training pictures, prepared as test pictures are. Those of all training
        pictures are kept in RUN/best; those of some are not.

        A network that is no run, and so keeps nothing, brings its own.
        """
        network, limit = self.network, self.calibration
        thresholds = [network.net.thresholds.get((quantile, by)) for quantile in quantiles]
        if network.run is None and limit is None and None not in thresholds:
            return
        data = network.train_pictures(limit)
        if all(each is not None and each.pictures == len(data) for each in thresholds):
            return
        calibrate(network.net, self._calibration_images(data), quantiles, by=by)
        if limit is None and network.run is not None:
            keep_thresholds(network.run, network.net)

    def _calibration_images(self, data: Dataset) -> Iterator[Tensor]:
        with self.progress("calibrating", len(data)) as advance:
            for images, *_ in batches_of(self.network.net, data, **self._reading):
                yield images
                advance(len(images))


@dataclass(frozen=True, eq=False)
class PartExamples:
    """Some pictures [B, 3, H, W] (normalised), what the network makes of them, and what it makes of
    them without some parts."""

    net: IFAM
    images: Tensor
    output: IFAMOutput
    without: dict[int, IFAMOutput]
    titles: Sequence[str]


@torch.no_grad()
def part_examples(net: IFAM, images: Tensor, titles: Sequence[str]) -> PartExamples:
    """With every part left out in turn."""
    without = {}
    with evaluating(net):
        for part in range(net.parts):
            with intervene(net, drop_parts=[part]):
                without[part] = net(images)
        return PartExamples(net, images, net(images), without, titles)


def example_parts(
    network: TrainedNetwork, *, data: str | None = None, limit: int = 12
) -> tuple[str, PartExamples]:
    """The name of the dataset, and `limit` of its pictures, spread evenly."""
    pictures, _ = network.matched(data, limit)
    images, labels, _, _ = next(batches_of(network.net, pictures, batch=len(pictures)))
    names = [pictures.classes[label] for label in labels.tolist()]
    titles = [f"{place}: {name}" for place, name in enumerate(names, start=1)]
    return pictures.name, part_examples(network.net, images, titles)
