"""A trained network with the data it is tested on, and its evaluation: as it is, and with the
intervention that is asked for or that validation recommends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from seecause.background.images import Progress, no_progress
from seecause.data.dataset import Dataset
from seecause.data.registry import open_data
from seecause.errors import BadOption, DataMissing
from seecause.faithful.data import (
    batches_of,
    frame_of,
    labelled_batches,
    match_classes,
    open_test,
    open_train,
    open_validation,
)
from seecause.faithful.interventions import (
    Trial,
    best_of,
    calibrate,
    evaluating,
    intervene,
    sensible_criterion,
    try_interventions,
)
from seecause.faithful.metrics import (
    Examination,
    RandomCuts,
    examine,
    key_points,
    keypoint_fit_data,
)
from seecause.faithful.net import IFAM, By, IFAMOutput, Intervention
from seecause.faithful.run import (
    CONFIG,
    keep_evaluation,
    keep_thresholds,
    open_run,
    read_evaluations,
)
from seecause.models.sources import ZOO, only_card, saved

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
    """By name: the folder of a run, one that `faithful export` or `zoo train` wrote, or
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
    if regime is not None:  # of the zoo
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
