"""Repair a model that relies on the background: remedies side by side, chosen without group labels.

    train        three fifths of the images: remedies learn from versions of these
    validation   a fifth: chooses the remedy, and its rank, count or epoch, by transplant-worst
    test         a fifth, or data of its own: the numbers that are reported before and after

Of pairs, validation has two fifths, training two: remedies of pairs learn few numbers, and the
choice between them needs images. Pairs need no labels: without any, what the model predicts for the
second version is the target of both.

First an audit of training and validation images: if its verdict is "no", nothing is done unless
`force` is set. Otherwise the remedy with the best transplant-worst is taken (with `groups`, the
best worst group), if versions of validation images are predicted better than by chance. This also
holds if too few predictions are correct for a verdict: a model that is nearly always wrong has few.
Among equals the cheapest is taken, in the order of `REMEDIES`. By default the cheap ones are tried,
and fine-tuning if the audit said "yes", there are few versions (`AFFORDED`), and the best of them
leaves something to repair: an audit of validation images says "yes" or "cannot tell", or `STILL`
of the predictions flip and transplant-worst is below 1 - `SOME`.

What a remedy costs on plain images is its `loss`, on validation images or on those of `keep`. One
that loses more than `max_loss` is not taken. By default that is `MAX_LOSS`, and no limit where the
plain images share the shortcut (the audit says "yes", no pairs, no `keep`): a shortcut is right on
these, and every repair loses that. New last layers are tried part of the way from the old one, too.
Remedies that learn classes are tried only if every class has images, or if `keep` shows what they
do to the others.

A remedy is a function `fit(model, splits, **options) -> Candidate`, listed in `REMEDIES`. It learns
from `splits.train` and makes its own choices by `splits.best`, on `splits.validation`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seecause import __version__
from seecause._random import bits
from seecause.background._export import export as export_model, rendered, zero
from seecause.background.audit import (
    ENOUGH,
    PER_IMAGE,
    SOME,
    BackgroundAudit,
    audit_part,
    masked_or_paired,
    settled,
)
from seecause.background.heads import HeadScores
from seecause.background.images import (
    LabelledImages,
    Masks,
    MaskSource,
    Progress,
    images_of,
    no_progress,
)
from seecause.background.last_layer import (
    MOST,
    STRENGTH,
    LastLayer,
    balanced_layer,
    change_directions,
    corrected_layer,
    fine_tune,
    last_layer,
    new_layer,
    with_last_layer,
)
from seecause.background.masks import object_masks
from seecause.background.scoring import interchange
from seecause.background.transplant import (
    Predictions,
    Versions,
    origins,
    versions_to_learn,
    versions_to_test,
)
from seecause.data.dataset import Dataset, SkippedImage, as_data
from seecause.engine.verify import verify
from seecause.errors import BadOption, NotDefined, SeecauseError, UnknownName
from seecause.files import digest_json, write_atomic, write_json
from seecause.metrics.statistics import bootstrap_interval
from seecause.models.base import ImageModel, content_keys, in_eval_mode, pixels_digest
from seecause.models.view import VisionModel
from seecause.options import Count, Fraction, Positive, check_options
from seecause.results import Result

log = logging.getLogger(__name__)

CHEAP = ("directions", "least-squares", "last-layer")  # the default
PAIRED = (*CHEAP, "heads")  # the default for pairs
EVERY = "all"  # selects every remedy that the data allows
SHARES, PAIR_SHARES = (0.6, 0.2, 0.2), (0.4, 0.4, 0.2)
MAX_LOSS = 0.01  # accuracy on plain images that a remedy may cost
TRUST = (1.0, 0.75, 0.5, 0.25, 0.1)  # how far a new last layer may be from the old one
RIDGES = (10.0, 1.0, 0.1, 0.01)  # penalties of a corrected last layer
FEW = 5  # images of a class that is split by itself
JUDGED = 400  # maximum number of images for the verdict
SCORED = 64  # maximum number of pairs for head scores
HEAD_COUNTS = (1, 2, 4, 8)  # numbers of removed heads that are tried
PASSES = 4  # of pairs, so that an epoch of fine-tuning has eight versions of an image
STILL = 0.025  # share of flips from which a low transplant-worst is taken for a shortcut
AFFORDED = {"cuda": 16384}  # versions in an epoch of fine-tuning unasked; elsewhere 1,024
IN_WORDS = "predicts words, and all its other answers share their weights: no last layer to repair"
ASKED_INSTEAD = (
    "Audit it (seecause audit --classify name_ll), prune its heads (seecause heads prune"
    " --classify name_ll), or repair its vision tower as a classifier"
)
CARD = "README.md"
NOT_TESTED = (
    "Shortcuts other than the background, or other than the difference between the pairs.",
    "Images unlike those of the data named here: other cameras, places and times.",
    "Calibration: probabilities may mean something else than before.",
)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model after a remedy, or why the remedy cannot be applied."""

    name: str
    done: str  # a sentence about the change
    details: dict[str, Any] = field(default_factory=dict)  # as JSON takes them
    seconds: float = 0.0
    validation: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    model: VisionModel | None = None
    layer: LastLayer | None = None  # if nothing but the last layer was changed

    def judge(self, original: VisionModel, part: Versions) -> Predictions:
        """Predict images and their versions. If only the last layer changed, cached features are
        reused."""
        if self.layer is not None:
            return part.predict_under(original, self.layer)
        return part.predict(original if self.model is None else self.model)


@dataclass(frozen=True, eq=False)
class Judge:
    """Held-out images, and what the original model predicts for them."""

    model: VisionModel
    part: Versions
    keep: Versions | None = None  # plain images that show the loss, instead of those of `part`
    groups: bool = False

    @cached_property
    def _before(self) -> Predictions:
        plain = self.part if self.keep is None else self.keep
        return nothing(self.model).judge(self.model, plain)

    def loss(self, candidate: Candidate, judged: Predictions) -> Tensor:
        """[n]: what each plain image loses by a candidate."""
        if self.keep is not None:
            judged = candidate.judge(self.model, self.keep)
        return judged.losses(self._before)

    def numbers(self, candidate: Candidate) -> tuple[Predictions, dict[str, float]]:
        """Predictions of a candidate, and their numbers with the loss and its 95 % interval."""
        judged = candidate.judge(self.model, self.part)
        numbers = judged.numbers(groups=self.groups)
        return judged, numbers | _mean_of("loss", self.loss(candidate, judged))


def _mean_of(name: str, values: Tensor) -> dict[str, float]:
    """A mean over images and its interval, which does not depend on their order."""
    low, high = bootstrap_interval(values.sort().values)
    return {name: float(values.mean()), f"{name} low": low, f"{name} high": high}


@dataclass(frozen=True, eq=False)
class Splits:
    """Training and validation images with their versions, for remedies."""

    train: Versions
    validation: Versions
    seed: int = 0
    groups: bool = False  # whether group labels may be used
    cache: Path | None = None  # a folder for the state of long trainings
    progress: Progress = no_progress
    keep: Versions | None = None  # plain images that show the loss
    max_loss: float | None = None  # accuracy on plain images that a remedy may cost

    @property
    def chosen_by(self) -> str:
        return "worst group" if self.groups else "transplant-worst"

    def judge(self, model: VisionModel) -> Judge:
        return Judge(model, self.validation, self.keep, self.groups)

    def allows(self, numbers: Mapping[str, float]) -> bool:
        """Whether the loss is within its limit."""
        return self.max_loss is None or not numbers["loss"] > self.max_loss

    def order(self, numbers: Mapping[str, float]) -> tuple[float, ...]:
        """What is compared, rounded, so that what differs by less is chosen by its cost."""
        names = {self.chosen_by: 3, "other accuracy": 2, "flips": 2}
        values = [round(numbers[name], digits) for name, digits in names.items()]
        values[2] = -values[2]
        return tuple(-torch.inf if value != value else value for value in values)

    def best(
        self, model: VisionModel, trials: Mapping[Any, Candidate]
    ) -> tuple[Any, dict[str, float]]:
        """The best of some candidates within the limit of the loss, else the one with the least
        loss; and by trial the number that decides. Trials are in order of cost."""
        judge = self.judge(model)
        numbers = {key: judge.numbers(trial)[1] for key, trial in trials.items()}
        within = [key for key in trials if self.allows(numbers[key])]
        chosen = min(trials, key=lambda key: numbers[key]["loss"])
        if within:
            chosen = max(within, key=lambda key: self.order(numbers[key]))
        return chosen, {str(key): round(n[self.chosen_by], 4) for key, n in numbers.items()}

    def need_classes(self, model: VisionModel, what: str) -> bool:
        """Whether some class has no training image; refused unless `keep` shows the effect."""
        absent = model.n_classes - len(self.train.labels.unique())
        if (absent or self.train.data.own_labels) and self.keep is None:
            reason = f"{absent} of {model.n_classes} classes have no image here"
            if self.train.data.own_labels:
                reason = "the images have no labels"
            remedy = "Give images of all classes that show what it costs (keep, --keep)"
            raise NotDefined(what, reason, remedy)
        return absent > 0


def nothing(model: VisionModel, splits: Splits | None = None) -> Candidate:
    """The model as it is."""
    return Candidate("nothing", "Nothing was changed.", model=model, layer=_layer_or_none(model))


def _layer_or_none(model: VisionModel) -> LastLayer | None:
    try:
        return last_layer(model)
    except NotDefined:
        return None


def _best_layer(
    name: str, model: VisionModel, splits: Splits, layers: Mapping[Any, LastLayer], by: str
) -> tuple[Any, Candidate]:
    """The best of some last layers, and its key, which details call `by`; views are verified when
    they are chosen."""
    trials = {
        key: Candidate(name, "", model=with_last_layer(model, layer, check=False), layer=layer)
        for key, layer in layers.items()
    }
    key, tried = splits.best(model, trials)
    return key, replace(trials[key], details={by: key, f"{splits.chosen_by} by {by}": tried})


def fit_last_layer(model: VisionModel, splits: Splits) -> Candidate:
    """A new last layer on versions, classes balanced, ridge; or part of the way to it."""
    anchored = splits.need_classes(model, "a new last layer")
    features, labels = splits.train.features(model)[1], splits.train.labels
    old = last_layer(model) if anchored else _layer_or_none(model)
    layer = new_layer(features, labels, classes=model.n_classes, anchor=old if anchored else None)
    layers = {1.0: layer}
    if old is not None and old.weight.shape == layer.weight.shape:
        layers = {share: old.towards(layer, share) for share in TRUST}
    near = ", held near the old one" if anchored else ""
    share, found = _best_layer("last-layer", model, splits, layers, "share")
    part = "" if share == 1 else f", {share:.0%} of the way from the old one"
    done = f"A new last layer (C = {STRENGTH:g}{near}{part}) on {len(features)} versions."
    details = {"versions": len(features), "anchored": anchored, **found.details}
    return replace(found, done=done, details=details)


def fold_directions(model: VisionModel, splits: Splits) -> Candidate:
    """Directions in which versions differ, folded out of the old last layer."""
    old, seen = last_layer(model), splits.train.features(model)[1]
    directions = change_directions(seen, splits.train.source)
    most = min(MOST, len(directions.vectors))
    layers = {rank: directions.fold(old, rank) for rank in range(1, most + 1)}
    chosen, found = _best_layer("directions", model, splits, layers, "rank")
    done = f"{chosen} of {seen.shape[1]} directions folded out of the last layer."
    return replace(found, done=done)


def correct_last_layer(model: VisionModel, splits: Splits) -> Candidate:
    """The old last layer corrected by least squares towards its own logits of plain images."""
    old, versions = last_layer(model), splits.train
    plain, moved = versions.features(model)
    clean = versions.clean(plain, moved)
    layers = {r: corrected_layer(old, clean, moved, versions.source, ridge=r) for r in RIDGES}
    chosen, found = _best_layer("least-squares", model, splits, layers, "ridge")
    done = f"The last layer corrected towards its logits of plain images (ridge {chosen:g})."
    return replace(found, done=done)


def remove_heads(model: VisionModel, splits: Splits) -> Candidate:
    """The heads that carry most of the change between versions removed; how many, by validation
    images."""
    order = interchange_effects(model, splits).order()
    if not order:
        done = "No head was removed: none carries the change between versions."
        return Candidate("heads", done, model=model)
    counts, trials = sorted({min(count, len(order)) for count in HEAD_COUNTS}), {}
    with splits.progress("removing heads", len(counts)) as advance:
        for count in counts:
            trials[count] = Candidate("heads", "", model=zero(model, order[:count]))
            advance(1)
        best, tried = splits.best(model, trials)
    details = {"heads": order[:best], f"{splits.chosen_by} by count": tried}
    done = f"{best} heads removed: {', '.join(map(str, order[:best]))}."
    return replace(trials[best], done=done, details=details)


def interchange_effects(model: VisionModel, splits: Splits) -> HeadScores:
    """Effect of exchanging each head between an image and its last version, [L, H]; of up to
    `SCORED` training images, spread over all."""
    versions = splits.train
    last = {image: row for row, image in enumerate(versions.source.tolist())}
    places = torch.linspace(0, len(last) - 1, min(SCORED, len(last))).round().long()
    images = torch.tensor(sorted(last))[places]
    others = versions[torch.tensor([last[image] for image in images.tolist()])]
    with splits.progress("scoring heads", len(images)) as advance:
        pairs = LabelledImages(versions.data.images[images], other_background=others)
        return interchange(model, pairs, progress=advance)


def train_on(
    model: VisionModel,
    splits: Splits,
    *,
    epochs: Count = 5,
    rate: Positive = 5e-5,
    batch: Count = 64,
) -> Candidate:
    """All weights trained on versions; stopped early by transplant-worst. Of pairs, both versions
    learn what the model predicts for the second."""
    versions, checkpoint = splits.train, None
    settings: dict[str, Any] = {"epochs": epochs, "rate": rate, "batch": batch, "seed": splits.seed}
    told = {}
    if versions.paired:  # no label is needed, and classes without images keep their predictions
        own = versions.predict(model)
        clean = versions.clean(own.plain, own.moved).double().softmax(dim=1)
        told = {"targets": clean[versions.source.cpu()], "passes": PASSES}
    else:
        splits.need_classes(model, "fine-tuning")
    if splits.cache is not None:
        contents = [_content(splits.train), _content(splits.validation), model.fingerprint()]
        key = digest_json([*contents, settings, __version__])
        checkpoint = splits.cache / f"fine-tune-{key}.pt"
    count = epochs * told.get("passes", 1) * len(versions)
    with splits.progress("fine-tuning", count) as advance:
        view, curve = fine_tune(
            model,
            versions,
            lambda view: splits.validation.predict(view).transplant_worst,
            checkpoint=checkpoint,
            progress=advance,
            **settings,
            **told,
        )
    details = {"epochs": len(curve), "rate": rate, "versions": len(versions)}
    details["transplant-worst by epoch"] = [round(value, 4) for value in curve]
    best = 1 + curve.index(max(curve))
    done = f"Fine-tuned on {len(versions)} versions: epoch {best} of {len(curve)} (rate {rate:g})."
    return Candidate("fine-tune", done, details, model=view)


def _content(versions: Versions) -> list[Any]:
    """The data that decides the versions, for digests."""
    data = versions.data
    parts = [data.images, data.other_background]
    parts.append(None if data.masks is None else data.masks.hard[:, None].float())
    drawn = (versions.source, versions.donor, versions.number, versions.labels)
    pixels = [pixels_digest(part) for part in parts if part is not None]
    return [*pixels, *(part.tolist() for part in drawn), versions.seed]


def retrain_by_groups(model: VisionModel, splits: Splits) -> Candidate:
    """DFR (Kirichenko et al. 2023): a new last layer on group-balanced images."""
    data, features = splits.train.data, splits.train.features(model)[0]
    groups = torch.tensor(data.groups)
    options: dict[str, Any] = {"classes": model.n_classes, "seed": splits.seed}
    layer, tried = balanced_layer(features, data.need_labels(), groups, **options)
    strength = max(tried, key=tried.__getitem__)
    done = f"DFR: a new last layer on {len(features)} images with group labels (C = {strength})."
    return Candidate("dfr", done, model=with_last_layer(model, layer, check=False), layer=layer)


@dataclass(frozen=True)
class Remedy:
    """A way to repair; its first docstring line is its summary, its keywords are its options."""

    name: str
    fit: Callable[..., Candidate]
    cost: str
    needs_groups: bool = False


REMEDIES = {  # the remedies that `sc.repair` can try, by name, the cheapest first
    remedy.name: remedy
    for remedy in (
        Remedy("nothing", nothing, "nothing"),
        Remedy("directions", fold_directions, "1 forward of each version"),
        Remedy("least-squares", correct_last_layer, "1 forward of each version"),
        Remedy("last-layer", fit_last_layer, "1 forward of each version"),
        Remedy("dfr", retrain_by_groups, "1 forward of each image", needs_groups=True),
        Remedy("heads", remove_heads, "1 forward per head of 64 pairs"),
        Remedy("fine-tune", train_on, "about 15 forwards of each version"),
    )
}


@dataclass(frozen=True, eq=False, repr=False)
class Repair(Result):
    """The result of `sc.repair`: `model` is the repaired one, or `original` if nothing was done."""

    model: VisionModel
    original: VisionModel
    remedy: str
    verdict: str  # of the audit that decided whether to repair
    before: BackgroundAudit
    after: BackgroundAudit
    candidates: Mapping[str, Candidate]
    chosen_by: str
    verdict_after: str  # of an audit of the new model on test images, with cuts of its own
    record: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[SkippedImage, ...] = ()  # images that could not be read

    def __repr__(self) -> str:
        return f"Repair({self.sentence})"

    @property
    def outcome(self) -> str:
        """ "repaired" if the whole interval of the gain on test images is above zero, the loss is
        not shown to exceed its limit, and an audit of the new model has enough images and does
        not say "yes"."""
        if self.remedy == "nothing":
            return "unchanged"
        if not self.numbers()["gain low"] > 0:
            return "changed, but not shown to be repaired,"
        limit = self.record.get("max loss")
        if limit is not None and self.candidates[self.remedy].test["loss low"] > limit:
            return "improved, but at a loss above its limit,"
        return _OUTCOMES.get(self.verdict_after, "repaired")

    @property
    def sentence(self) -> str:
        """What was done, in one sentence, of numbers of `numbers()`."""
        name = self.original.name
        if self.remedy == "nothing":
            why = self.record.get("refused") or _NOTHING.get(self.verdict, _NO_GAIN)
            return f"{name}: {why.format(counted=self.record.get('counted'), enough=ENOUGH)}"
        n = self.numbers()
        where = "both versions" if self.before.paired else "other backgrounds"
        return (
            f"{name}, {self.outcome} by {self.remedy}: other accuracy (correct on {where})"
            f" {n['before other accuracy']:.1%} -> {n['after other accuracy']:.1%}, gain"
            f" {n['gain']:+.1%} (95 % interval {n['gain low']:+.1%} to {n['gain high']:+.1%},"
            f" {n['gain images']} test images); flips {n['before flips']:.1%} ->"
            f" {n['after flips']:.1%}; loss on plain images {n['loss']:+.1%} (95 % interval"
            f" {n['loss low']:+.1%} to {n['loss high']:+.1%})."
        )

    @cached_property
    def gain_by_image(self) -> Tensor:
        """[m]: for each test image with versions, the change of the accuracy over them; the mean is
        the difference of other accuracy after and before."""
        judged = (self.before.judged, self.after.judged)
        before, after = (each.accuracy_by_image() for each in judged)
        return (after - before)[~before.isnan()]

    def numbers(self) -> dict[str, float]:
        """The numbers of the audits before and after, on test images, the gain and the loss."""
        before = {f"before {name}": value for name, value in self.before.numbers().items()}
        after = {f"after {name}": value for name, value in self.after.numbers().items()}
        gain = _mean_of("gain", self.gain_by_image) | {"gain images": len(self.gain_by_image)}
        test = self.candidates[self.remedy].test
        loss = {name: test[name] for name in ("loss", "loss low", "loss high") if name in test}
        return before | after | gain | loss

    def export(self, folder: str | Path) -> Path:
        """Write the checkpoint (plain timm, transformers, torchvision or open_clip load it), a page
        with images before and after, and a model card."""
        from seecause.report import write_page
        from seecause.report.background import repair_sections

        folder = export_model(self.model, [], folder)
        usage = (folder / CARD).read_text(encoding="utf-8")
        write_atomic(folder / CARD, model_card(self, usage))
        write_json(folder / "repair.json", self.facts())
        title = f"{self.original.name}: before and after"
        write_page(folder / "index.html", title, repair_sections(self), lead=self.sentence)
        return folder

    def facts(self) -> dict[str, Any]:
        """All numbers and settings, as JSON takes them."""
        candidates = []
        for candidate in self.candidates.values():
            facts = {**vars(candidate)}
            del facts["model"], facts["layer"]
            for part in ("validation", "test"):  # JSON cannot hold NaN
                facts[part] = {name: v for name, v in facts[part].items() if v == v}
            candidates.append(facts)
        return {
            "remedy": self.remedy,
            "outcome": self.outcome,
            "verdict": self.verdict,
            "verdict after": self.verdict_after,
            "chosen by": self.chosen_by,
            "sentence": self.sentence,
            "before": self.before.numbers(),
            "after": self.after.numbers(),
            "numbers": self.numbers(),
            "candidates": candidates,
            "run": self.record,
            "skipped": [asdict(image) for image in self.skipped],
        }


_NO_GAIN = "no remedy improves validation images by more than chance; nothing was changed."
_OUTCOMES = {  # by the verdict on the new model
    "yes": "improved, but still predicting from the background,",
    "too few": "improved, but on too few test images for a verdict,",
}
_NOTHING = {
    "no": "nothing to repair: its predictions hardly depend on what was exchanged.",
    "too few": (
        "too few: {counted} of at least {enough} correct predictions, to tell whether there is"
        " something to repair; no remedy improves validation images by more than chance, and"
        " nothing was changed."
    ),
}


@in_eval_mode
def repair(
    model: ImageModel,
    data: Dataset | LabelledImages | str,
    *,
    masks: MaskSource = None,
    test: Dataset | LabelledImages | str | None = None,
    remedies: Sequence[str] | str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    keep: Dataset | LabelledImages | str | None = None,
    max_loss: Fraction | None = None,
    groups: bool = False,
    force: bool = False,
    per_image: int = 8,
    seed: int = 0,
    cache: str | Path | None = None,
    progress: Progress = no_progress,
) -> Repair:
    """Repair a model that relies on the background. Remedies learn from objects on other
    backgrounds; the best on validation images is taken and reported on test images. No group label
    is needed.

    Args:
        model: A vision transformer classifier.
        data: Labelled images of at least two classes, or the name of a dataset (`"folder:PATH"`).
        masks: Source of the object masks, as for `sc.audit`.
        test: Images to report on instead of a fifth of `data`.
        remedies: Names from `sc.background.REMEDIES`, or "all". None: last layers, for pairs heads,
            and fine-tuning if these are not enough and it takes minutes.
        options: Options of each remedy, by its name.
        keep: Plain images that show what remedies cost, such as images of all classes. None: the
            plain images of `data`.
        max_loss: Share of the plain images that a remedy may cost. None: 0.01, without a limit
            where plain images share the shortcut.
        groups: Whether remedies may use group labels; the worst group chooses then.
        force: Repair even if the audit finds nothing to repair.
        per_image: Transplants of each image to learn from.
        seed: Of splits, transplants and training.
        cache: A folder that keeps maps of the objects and the state of fine-tuning, so that a
            killed repair continues.
        progress: Shows progress, such as `sc.background.no_progress`.

    Returns:
        A `Repair` with `model`, `remedy`, the audits `before` and `after`, and `export(folder)`.

    Raises:
        NotDefined: If the model has no last layer of its own.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:train", limit=48)
        >>> repaired = sc.repair(model, data, per_image=2, remedies="directions")
        >>> repaired.after.flips < repaired.before.flips
        True
    """
    view, options = _repairable(model), options or {}
    asked = (*CHEAP, *PAIRED, *options) if remedies is None else remedies
    entries = _entries(asked, options, groups=groups)
    folder = None if cache is None else Path(cache)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(masks, str) and masks != "given":
            masks = partial(object_masks, view, source=masks, cache=folder / "masks")
    everything = masked_or_paired(view, as_data(data), masks, progress)
    if remedies is None:
        usual = {"nothing", *(PAIRED if everything.masks is None else CHEAP), *options}
        entries = [entry for entry in entries if entry[0].name in usual]
    unknown = len(everything) - sum(group is not None for group in everything.groups)
    if groups and unknown:
        got = f"{unknown} of {len(everything)} images without a group"
        raise BadOption("groups", got, "data with a group for every image")
    tested = None
    if test is not None:
        own = None if isinstance(masks, Tensor | Masks) else masks  # masks are of their images
        tested = masked_or_paired(view, as_data(test), own, progress)
    train, validation, report, judged = _split(everything, tested, seed)
    kept = None if keep is None else images_of(view, keep, progress)
    plain = [None, None] if kept is None else _halves(kept)
    result = BackgroundAudit(settled(view, judged, None, seed=seed, progress=progress))
    verdict = result.verdict
    if max_loss is None and (verdict != "yes" or keep is not None or everything.masks is None):
        max_loss = MAX_LOSS
    splits = Splits(
        versions_to_learn(train, per_image, seed=seed),
        versions_to_test(view, validation, PER_IMAGE, seed=seed),
        seed,
        groups,
        folder,
        progress,
        plain[0],
        max_loss,
    )
    if verdict == "no" and not force:
        entries = entries[:1]  # nothing
    candidates = dict[str, Candidate]()
    with progress("trying remedies", len(entries)) as advance:
        for remedy, settings in entries:
            candidates[remedy.name] = _try(view, remedy, settings, splits)
            advance(1)
    (name, refused), left_out = _choice(view, candidates, splits, verdict, force), []
    if remedies is None and verdict == "yes" and "fine-tune" not in candidates:
        best = candidates[name]
        low = best.validation[splits.chosen_by] < 1 - SOME and best.validation["flips"] > STILL
        found = BackgroundAudit(best.judge(view, splits.validation))
        left = low or found.verdict in ("yes", "cannot tell")
        most = AFFORDED.get(view.device.type, 1024)
        count = len(splits.train) * (PASSES if splits.train.paired else 1)
        if left and count <= most:
            candidates["fine-tune"] = _try(view, REMEDIES["fine-tune"], {}, splits)
            name, refused = _choice(view, candidates, splits, verdict, force)
        elif left:
            left_out = [
                "fine-tune could do better and was not tried unasked: there are"
                f" {count} versions in an epoch, more than {most} (--remedies last-layer,fine-tune)"
            ]
    part, tests = versions_to_test(view, report, PER_IMAGE, seed=seed + 1), {}
    reported = Judge(view, part, plain[1], groups=True)
    for known, candidate in candidates.items():
        if not candidate.failed:
            tests[known], numbers = reported.numbers(candidate)
            candidates[known] = replace(candidate, test=numbers)
    repaired = candidates[name].model
    assert repaired is not None
    before = after = audit_part(view, part, tests["nothing"])
    verdict_after = before.verdict
    if name != "nothing":
        verify(repaired)
        after = audit_part(repaired, part, tests[name])
        again = settled(repaired, report, None, seed=seed + 1, progress=progress)
        verdict_after = BackgroundAudit(again).verdict
    counts = {"train": train, "validation": validation, "test": report}
    record = _record(view, everything, counts, per_image, seed)
    record["notes"] += left_out
    record |= {"max loss": max_loss, "keep": None if kept is None else kept.name}
    record |= {"counted": result.compared_images} | ({"refused": refused} if refused else {})
    skipped = (*everything.skipped, *(() if tested is None else tested.skipped))
    about = (candidates, splits.chosen_by, verdict_after, record, skipped)
    return Repair(repaired, view, name, verdict, before, after, *about)


def _halves(data: LabelledImages) -> list[Versions]:
    """Two halves of plain images, by content."""
    order = content_keys(data.images).argsort()
    bare = replace(data, masks=None, truth=None, other_background=None, other_object=None)
    none = order[:0]
    parts = (bare.take(half) for half in order.tensor_split(2))
    return [Versions(part, none, none, none, none.bool()) for part in parts]


def _repairable(model: ImageModel) -> VisionModel:
    if model.architecture == "prompt":
        raise NotDefined("repair", f"{model.name} {IN_WORDS}", ASKED_INSTEAD)
    if not isinstance(model, VisionModel):
        raise NotDefined(
            "repair", f"{model.name} is not a vision transformer classifier", "Use sc.audit"
        )
    if model.merged or model.gates is not None:
        raise NotDefined("repair", "this view changes the predictions", "Use the plain model")
    return model


def _entries(
    names: Sequence[str] | str, options: Mapping[str, Mapping[str, Any]], *, groups: bool
) -> list[tuple[Remedy, dict[str, Any]]]:
    """Remedies with their checked options, "nothing" always first."""
    names = [names] if isinstance(names, str) else [*names]
    if names == [EVERY]:
        names = [name for name, each in REMEDIES.items() if groups or not each.needs_groups]
    tried = {}
    for name in dict.fromkeys(["nothing", *names]):
        if name not in REMEDIES:
            raise UnknownName("remedy", name, REMEDIES)
        if REMEDIES[name].needs_groups and not groups:
            raise BadOption("remedies", name, "groups=True (--option groups=true) for this one")
        tried[name] = REMEDIES[name], dict(options.get(name, {}))
        check_options(name, REMEDIES[name].fit, tried[name][1])
    for name in options:
        if name not in tried:
            raise BadOption("options", name, f"options of remedies that are tried: {[*tried]}")
    return [tried[name] for name in REMEDIES if name in tried]


def _split(
    data: LabelledImages, test: LabelledImages | None, seed: int
) -> tuple[LabelledImages, LabelledImages, LabelledImages, LabelledImages]:
    """Training, validation and test images; and up to `JUDGED` of the first two, for the
    verdict."""
    labels, whole = data.need_labels(), PAIR_SHARES if data.masks is None else SHARES
    shares, keys = whole if test is None else whole[:2], content_keys(data.images).cpu()
    rows = split_rows(labels, shares, seed=seed, images=origins(data.ids), keys=keys)
    fewest = 1 if data.masks is None else 2  # backgrounds are exchanged between classes
    if any(len(labels[part].unique()) < fewest for part in rows):
        expected = "at least five images of each class, for three splits"
        raise BadOption("data", f"{len(data)} images of {data.name}", expected)
    unreported = torch.cat(rows[:2])
    judged = data.take(unreported[keys[unreported].argsort()[:JUDGED]].sort().values)
    train, validation = data.take(rows[0]), data.take(rows[1])
    return train, validation, data.take(rows[2]) if test is None else test, judged


def split_rows(
    labels: Tensor,
    shares: tuple[float, ...],
    *,
    seed: int,
    images: Tensor | None = None,
    keys: Tensor | None = None,
) -> list[Tensor]:
    """Rows of each share, drawn class by class; classes of fewer than `FEW` images are drawn
    together. Rows of the same image (`images` [n], by default each its own) stay together. `keys`
    [n] identify images, by default their rows."""
    labels, place = labels.cpu(), torch.arange(len(labels))
    which = (place if images is None else images.cpu()).unique(return_inverse=True)[1]
    first = torch.full((int(which.max()) + 1,), len(labels)).scatter_reduce(0, which, place, "amin")
    chance = bits(first if keys is None else keys[first], 8 * seed + 5).double()
    kinds = labels[first].clone()
    kinds[torch.bincount(kinds)[kinds] < FEW] = -1
    ends = torch.tensor(shares).cumsum(0) / sum(shares)
    part_of = torch.zeros(len(first), dtype=torch.long)
    for kind in kinds.unique().tolist():
        members = (kinds == kind).nonzero()[:, 0]
        members = members[chance[members].argsort()]
        counts = (ends * len(members)).round().long()
        part_of[members] = torch.bucketize(torch.arange(len(members)), counts, right=True)
    return [(part_of[which] == part).nonzero()[:, 0] for part in range(len(shares))]


def _try(model: VisionModel, remedy: Remedy, settings: dict[str, Any], splits: Splits) -> Candidate:
    """A remedy with its numbers on validation images; or the reason why it cannot be applied."""
    began = time.perf_counter()
    try:
        result = remedy.fit(model, splits, **settings)
    except SeecauseError as reason:
        if isinstance(reason, BadOption) and reason.option in settings:
            raise  # an option of the caller cannot be used with this model
        log.warning("%s cannot be tried: %s", remedy.name, reason)
        return Candidate(remedy.name, "not tried", failed=str(reason))
    seconds = time.perf_counter() - began
    numbers = splits.judge(model).numbers(result)[1]
    return replace(result, seconds=seconds, validation=numbers)


def _choice(
    model: VisionModel,
    candidates: Mapping[str, Candidate],
    splits: Splits,
    verdict: str,
    force: bool,
) -> tuple[str, str]:
    """The remedy to take, and why none was if one was refused for its loss: the best on validation
    images, if it gains more than chance would."""
    names = [name for name, each in candidates.items() if name != "nothing" and not each.failed]
    within = [name for name in names if splits.allows(candidates[name].validation)]
    if not names or (verdict == "no" and not force):
        return "nothing", ""

    def key(name: str) -> tuple[float, ...]:
        return splits.order(candidates[name].validation)

    if not within:
        lost = min(candidates[name].validation["loss"] for name in names)
        return "nothing", (
            f"every remedy loses more than {splits.max_loss:.1%} of the plain validation images"
            f" ({lost:.1%} at least); nothing was changed."
        )
    best = max(within, key=key)  # of equals the first, which is the cheapest
    if force:
        return best, ""
    before, after = (candidates[name].judge(model, splits.validation) for name in ("nothing", best))
    gain = after.accuracy_by_image() - before.accuracy_by_image()
    fewer = before.flips_by_image() - after.flips_by_image()
    sure = _mean_of("gain", gain[~gain.isnan()])["gain low"] > 0
    calmer = _mean_of("fewer", fewer[~fewer.isnan()])["fewer low"] > 0
    taken = key(best) > key("nothing") and (sure or (calmer and float(gain.nanmean()) > 0))
    return best if taken else "nothing", ""


def _record(
    model: VisionModel,
    data: LabelledImages,
    splits: Mapping[str, LabelledImages],
    per_image: int,
    seed: int,
) -> dict[str, Any]:
    masks, notes, overlap = data.masks, list[str](), None
    if masks is not None:
        notes += masks.notes
        overlap = None if masks.overlap is None else float(masks.overlap.nanmean())
    occurring = len(data.need_labels().unique())
    if occurring < model.n_classes:
        notes.append(
            f"{occurring} of the model's {model.n_classes} classes have images here: a repaired"
            " model may predict these for all others too. Test it on the others before you ship it"
        )
    return {
        "model": model.name,
        "fingerprint": model.fingerprint(),
        "data": data.name,
        **{name: len(split) for name, split in splits.items()},
        "test data": splits["test"].name,
        "versions of each image": per_image,
        "masks": "pairs" if masks is None else masks.source,
        "mask IoU": overlap,
        "notes": notes,
        "seed": seed,
        "seecause": __version__,
    }


def model_card(result: Repair, usage: str) -> str:
    """Markdown: what was done, on which data, what it cost, what was not tested. `usage` is the
    card of the exported checkpoint, which says how to load it."""
    return rendered(
        "repair.md.j2",
        record=result.record,
        sentence=result.sentence,
        done=result.candidates[result.remedy].done,
        before=result.before.numbers(),
        after=result.after.numbers(),
        untested=NOT_TESTED,
        usage=usage[usage.index("## Load it") :],
    )
