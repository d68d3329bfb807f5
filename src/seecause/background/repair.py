"""Repair a model that relies on the background: remedies side by side, chosen without group labels.

    train        three fifths of the images: remedies learn from versions of these
    validation   a fifth: chooses the remedy, and its rank, count or epoch, by transplant-worst
    test         a fifth, or data of its own: the numbers that are reported before and after

First an audit of training and validation images: if its verdict is "no", nothing is done unless
`force` is set. Otherwise the remedy with the best transplant-worst is taken (with `groups`, the
best worst group), if versions of validation images are predicted better than by chance. This also
holds if too few predictions are correct for a verdict: a model that is nearly always wrong has few.

A remedy is a function `fit(model, splits, **options) -> Candidate`, listed in `REMEDIES`. It learns
from `splits.train` and makes its own choices on `splits.validation`.
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
from seecause.background._export import export as export_model, zero
from seecause.background.audit import PER_IMAGE, BackgroundAudit, audit_part, masked_or_paired
from seecause.background.heads import HeadScores
from seecause.background.images import LabelledImages, Masks, MaskSource, Progress, no_progress
from seecause.background.last_layer import (
    MOST,
    STRENGTH,
    LastLayer,
    balanced_layer,
    change_directions,
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
from seecause.data.dataset import Dataset, SkippedImage, as_data, evenly
from seecause.engine.verify import verify
from seecause.errors import BadOption, NotDefined, SeecauseError, UnknownName
from seecause.files import digest_json, write_atomic, write_json
from seecause.metrics.statistics import bootstrap_interval
from seecause.models.base import ImageModel, in_eval_mode, pixels_digest
from seecause.models.view import VisionModel
from seecause.options import Count, Positive, check_options
from seecause.results import Result

log = logging.getLogger(__name__)

CHEAP = ("last-layer", "directions")
EVERY = "all"  # selects every remedy that the data allows
SHARES = (0.6, 0.2, 0.2)
JUDGED = 400  # maximum number of images for the verdict
SCORED = 64  # maximum number of pairs for head scores
HEAD_COUNTS = (1, 2, 4, 8)  # numbers of removed heads that are tried
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
class Splits:
    """Training and validation images with their versions, for remedies."""

    train: Versions
    validation: Versions
    seed: int = 0
    groups: bool = False  # whether group labels may be used
    cache: Path | None = None  # a folder for the state of long trainings
    progress: Progress = no_progress


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


def nothing(model: VisionModel, splits: Splits) -> Candidate:
    """The model as it is."""
    try:
        layer = last_layer(model)
    except NotDefined:
        layer = None
    return Candidate("nothing", "Nothing was changed.", model=model, layer=layer)


def fit_last_layer(
    model: VisionModel, splits: Splits, *, strength: Positive = STRENGTH
) -> Candidate:
    """A new last layer on versions, classes balanced, ridge. It stays near the old layer if some
    class has no image, which a new layer would forget."""
    features, labels = splits.train.features(model)[1], splits.train.labels
    anchored = len(labels.unique()) < model.n_classes
    old = last_layer(model) if anchored else None
    layer = new_layer(features, labels, classes=model.n_classes, strength=strength, anchor=old)
    near = ", held near the old one" if anchored else ""
    done = f"A new last layer (C = {strength:g}{near}) on {len(features)} versions."
    details = {"versions": len(features), "anchored": anchored}
    return _with_layer("last-layer", model, layer, done, details)


def fold_directions(model: VisionModel, splits: Splits, *, rank: Count | None = None) -> Candidate:
    """Directions in which versions differ, folded out of the old last layer."""
    old, seen = last_layer(model), splits.train.features(model)[1]
    directions = change_directions(seen, splits.train.source)
    available = len(directions.values)
    if rank is not None and rank > available:
        raise BadOption("rank", rank, f"1 to {available} directions")
    ranks = range(1, min(MOST, available) + 1) if rank is None else [rank]
    layers = {r: directions.fold(old, r) for r in ranks}
    worst = {
        r: splits.validation.predict_under(model, layer).transplant_worst
        for r, layer in layers.items()
    }
    # among equally good ranks, the rank of the spectrum, otherwise the lowest
    chosen = max(worst, key=lambda r: (worst[r], r == directions.rank, -r))
    spectrum = (directions.values / directions.values[0])[: MOST + 1].tolist()
    details = {
        "rank": chosen,
        "rank of the spectrum": directions.rank,
        "transplant-worst by rank": {str(r): round(value, 4) for r, value in worst.items()},
        "spectrum": [round(value, 4) for value in spectrum],
    }
    done = f"{chosen} of {seen.shape[1]} directions folded out of the last layer."
    return _with_layer("directions", model, layers[chosen], done, details)


def remove_heads(model: VisionModel, splits: Splits) -> Candidate:
    """The heads that carry most of the change between versions removed; how many, by validation
    images."""
    order = interchange_effects(model, splits).order()
    if not order:
        done = "No head was removed: none carries the change between versions."
        return Candidate("heads", done, model=model)
    counts, views = sorted({min(count, len(order)) for count in HEAD_COUNTS}), {}
    with splits.progress("removing heads", len(counts)) as advance:
        for count in counts:
            pruned = zero(model, order[:count])
            views[count] = pruned, splits.validation.predict(pruned).transplant_worst
            advance(1)
    worst = {count: score for count, (_, score) in views.items()}
    best = max(worst, key=worst.__getitem__)  # the smallest of equally good counts
    tried = {str(count): round(value, 4) for count, value in worst.items()}
    details = {"heads": order[:best], "transplant-worst by count": tried}
    done = f"{best} heads removed: {', '.join(map(str, order[:best]))}."
    return Candidate("heads", done, details, model=views[best][0])


def interchange_effects(model: VisionModel, splits: Splits) -> HeadScores:
    """Effect of exchanging each head between an image and its last version, [L, H]; of up to
    `SCORED` training images, spread over all."""
    versions = splits.train
    last = {image: row for row, image in enumerate(versions.source.tolist())}
    places = torch.linspace(0, len(last) - 1, min(SCORED, len(last))).round().long()
    images = torch.tensor(sorted(last))[places]
    others = versions[torch.tensor([last[image] for image in images.tolist()])]
    plain = versions.data.images[images]
    with splits.progress("scoring heads", len(plain)) as advance:
        pairs = LabelledImages(plain, other_background=others)
        return interchange(model, pairs, progress=advance)


def train_on(
    model: VisionModel,
    splits: Splits,
    *,
    epochs: Count = 5,
    rate: Positive = 5e-5,
    batch: Count = 64,
) -> Candidate:
    """All weights trained on versions; stopped early by transplant-worst."""
    versions, checkpoint = splits.train, None
    settings = {"epochs": epochs, "rate": rate, "batch": batch, "seed": splits.seed}
    if splits.cache is not None:
        contents = [_content(splits.train), _content(splits.validation), model.fingerprint()]
        key = digest_json([*contents, settings, __version__])
        checkpoint = splits.cache / f"fine-tune-{key}.pt"
    with splits.progress("fine-tuning", epochs * len(versions)) as advance:
        view, curve = fine_tune(
            model,
            versions,
            lambda view: splits.validation.predict(view).transplant_worst,
            checkpoint=checkpoint,
            progress=advance,
            **settings,
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
    options = {"classes": model.n_classes, "seed": splits.seed}
    layer, tried = balanced_layer(features, data.need_labels(), groups, **options)
    strength = max(tried, key=tried.__getitem__)
    done = f"DFR: a new last layer on {len(features)} images with group labels (C = {strength})."
    return _with_layer("dfr", model, layer, done, {})


def _with_layer(
    name: str, model: VisionModel, layer: LastLayer, done: str, details: dict[str, Any]
) -> Candidate:
    """The model with another last layer; the view is verified when it is chosen."""
    view = with_last_layer(model, layer, check=False)
    return Candidate(name, done, details, model=view, layer=layer)


@dataclass(frozen=True)
class Remedy:
    """A way to repair; its first docstring line is its summary, its keywords are its options."""

    name: str
    fit: Callable[..., Candidate]
    cost: str
    needs_groups: bool = False


REMEDIES = {
    remedy.name: remedy
    for remedy in (
        Remedy("nothing", nothing, "nothing"),
        Remedy("last-layer", fit_last_layer, "1 forward of each version"),
        Remedy("directions", fold_directions, "1 forward of each version"),
        Remedy("heads", remove_heads, "1 forward per head of 64 pairs"),
        Remedy("fine-tune", train_on, "about 15 forwards of each version"),
        Remedy("dfr", retrain_by_groups, "1 forward of each image", needs_groups=True),
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
    record: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[SkippedImage, ...] = ()  # images that could not be read

    def __repr__(self) -> str:
        return f"Repair({self.sentence})"

    @property
    def sentence(self) -> str:
        """What was done, in one sentence. Only a gain on test images whose whole interval is above
        zero is called a repair."""
        first, second = self.before.judged.numbers(), self.after.judged.numbers()
        name = self.original.name
        if self.remedy == "nothing":
            return f"{name}: {_NOTHING.get(self.verdict, _NO_GAIN)}"
        low, high = self.gain_interval
        done = "repaired" if low > 0 else "changed, but not shown to be repaired,"
        return (
            f"{name}, {done} by {self.remedy}: on other backgrounds"
            f" {first['transplants']:.0%} -> {second['transplants']:.0%} correct (gain"
            f" {float(self.gain.mean()):+.0%} for an image, 95 % interval {low:+.0%} to"
            f" {high:+.0%}), predictions that flip {first['flips']:.0%} -> {second['flips']:.0%};"
            f" on plain images {first['accuracy']:.0%} -> {second['accuracy']:.0%} correct."
        )

    @cached_property
    def gain(self) -> Tensor:
        """[m]: for each test image with versions, the change of the accuracy over them."""
        judged = (self.before.judged, self.after.judged)
        before, after = (each.accuracy_by_image() for each in judged)
        return (after - before)[~before.isnan()]

    @cached_property
    def gain_interval(self) -> tuple[float, float]:
        """95 % of the mean of `gain`."""
        return bootstrap_interval(self.gain)

    def numbers(self) -> dict[str, float]:
        """The numbers of the audits before and after, on test images, and the gain."""
        before = {f"before {name}": value for name, value in self.before.numbers().items()}
        after = {f"after {name}": value for name, value in self.after.numbers().items()}
        low, high = self.gain_interval
        gain = {"gain": float(self.gain.mean()), "gain low 95%": low, "gain high 95%": high}
        return before | after | gain

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
            "verdict": self.verdict,
            "chosen by": self.chosen_by,
            "sentence": self.sentence,
            "before": self.before.numbers(),
            "after": self.after.numbers(),
            "gain": {"mean": float(self.gain.mean()), "95%": list(self.gain_interval)},
            "candidates": candidates,
            "run": self.record,
            "skipped": [asdict(image) for image in self.skipped],
        }


_NO_GAIN = "no remedy improves validation images by more than chance; nothing was changed."
_NOTHING = {
    "no": "nothing to repair: its predictions hardly follow the background.",
    "too few": (
        "too few correct predictions to tell whether there is something to repair, and no remedy"
        " improves validation images by more than chance; nothing was changed."
    ),
}


@in_eval_mode
def repair(
    model: ImageModel,
    data: Dataset | LabelledImages | str,
    *,
    masks: MaskSource = None,
    test: Dataset | LabelledImages | str | None = None,
    remedies: Sequence[str] | str = CHEAP,
    options: Mapping[str, Mapping[str, Any]] | None = None,
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
        remedies: Names from `sc.background.REMEDIES`, or "all".
        options: Options of each remedy, by its name.
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
    view = _repairable(model)
    entries = _entries(remedies, options or {}, groups=groups)
    folder = None if cache is None else Path(cache)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(masks, str) and masks != "given":
            masks = partial(object_masks, view, source=masks, cache=folder / "masks")
    everything = masked_or_paired(view, as_data(data), masks, progress)
    unknown = len(everything) - sum(group is not None for group in everything.groups)
    if groups and unknown:
        got = f"{unknown} of {len(everything)} images without a group"
        raise BadOption("groups", got, "data with a group for every image")
    tested = None
    if test is not None:
        own = None if isinstance(masks, Tensor | Masks) else masks  # masks are of their images
        tested = masked_or_paired(view, as_data(test), own, progress)
    train, validation, report, judged = _split(everything, tested, seed)
    splits = Splits(
        versions_to_learn(train, per_image, seed=seed),
        versions_to_test(view, validation, PER_IMAGE, seed=seed),
        seed,
        groups,
        folder,
        progress,
    )
    unreported = versions_to_test(view, judged, PER_IMAGE, seed=seed)
    verdict = audit_part(view, unreported, fills=()).verdict
    candidates = dict[str, Candidate]()
    with progress("trying remedies", len(entries)) as advance:
        for remedy, settings in entries:
            candidates[remedy.name] = _try(view, remedy, settings, splits)
            advance(1)
    chosen_by = "worst group" if groups else "transplant-worst"
    name = _choice(view, candidates, splits, chosen_by, verdict, force)
    part, tests = versions_to_test(view, report, PER_IMAGE, seed=seed + 1), {}
    for known, candidate in candidates.items():
        if not candidate.failed:
            tests[known] = candidate.judge(view, part)
            numbers = tests[known].numbers(groups=True)
            candidates[known] = replace(candidate, test=numbers)
    repaired = candidates[name].model
    assert repaired is not None
    before = after = audit_part(view, part, tests["nothing"])
    if name != "nothing":
        verify(repaired)
        after = audit_part(repaired, part, tests[name])
    counts = {"train": train, "validation": validation, "test": report}
    record = _record(view, everything, counts, per_image, seed)
    skipped = (*everything.skipped, *(() if tested is None else tested.skipped))
    return Repair(
        repaired, view, name, verdict, before, after, candidates, chosen_by, record, skipped
    )


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
            raise BadOption("remedies", name, "groups=True (--groups) for a remedy that needs them")
        tried[name] = REMEDIES[name], dict(options.get(name, {}))
        check_options(name, REMEDIES[name].fit, tried[name][1])
    for name in options:
        if name not in tried:
            raise BadOption("options", name, f"options of remedies that are tried: {[*tried]}")
    return [*tried.values()]


def _split(
    data: LabelledImages, test: LabelledImages | None, seed: int
) -> tuple[LabelledImages, LabelledImages, LabelledImages, LabelledImages]:
    """Training, validation and test images; and up to `JUDGED` of the first two, for the
    verdict."""
    labels, shares = data.need_labels(), SHARES if test is None else SHARES[:2]
    rows = split_rows(labels, shares, seed=seed, images=origins(data.ids))
    if any(len(labels[part].unique()) < 2 for part in rows):
        expected = "at least five images of each class, for three splits"
        raise BadOption("data", f"{len(data)} images of {data.name}", expected)
    unreported = torch.cat(rows[:2]).sort().values.tolist()
    judged = data.take(torch.tensor(evenly(unreported, JUDGED)))
    train, validation = data.take(rows[0]), data.take(rows[1])
    return train, validation, data.take(rows[2]) if test is None else test, judged


def split_rows(
    labels: Tensor, shares: tuple[float, ...], *, seed: int, images: Tensor | None = None
) -> list[Tensor]:
    """Rows of each share, drawn class by class. Rows of the same image (`images` [n], by default
    each its own) stay together."""
    labels, place = labels.cpu(), torch.arange(len(labels))
    which = (place if images is None else images.cpu()).unique(return_inverse=True)[1]
    first = torch.full((int(which.max()) + 1,), len(labels)).scatter_reduce(0, which, place, "amin")
    chance = bits(first, 8 * seed + 5).double()
    ends = torch.tensor(shares).cumsum(0) / sum(shares)
    part_of = torch.zeros(len(first), dtype=torch.long)
    for kind in labels.unique().tolist():
        members = (labels[first] == kind).nonzero()[:, 0]
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
    numbers = result.judge(model, splits.validation).numbers(groups=splits.groups)
    return replace(result, seconds=seconds, validation=numbers)


def _choice(
    model: VisionModel,
    candidates: Mapping[str, Candidate],
    splits: Splits,
    chosen_by: str,
    verdict: str,
    force: bool,
) -> str:
    """The remedy to take: the best on validation images, if it gains more than chance would."""
    names = [name for name, each in candidates.items() if name != "nothing" and not each.failed]
    if not names or (verdict == "no" and not force):
        return "nothing"

    def key(name: str) -> tuple[float, float, float]:
        numbers = candidates[name].validation
        return numbers[chosen_by], numbers["transplants"], -numbers["flips"]

    best = max(names, key=key)
    if force:
        return best
    before, after = (
        candidates[name].judge(model, splits.validation).accuracy_by_image()
        for name in ("nothing", best)
    )
    low, _ = bootstrap_interval(after - before)
    return best if key(best) > key("nothing") and low > 0 else "nothing"


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
    record, chosen = result.record, result.candidates[result.remedy]
    first, second = result.before.numbers(), result.after.numbers()
    rows = [
        f"| {name} | {value:.3f} | {second[name]:.3f} |"
        for name, value in first.items()
        if name in second and name != "compared images"
    ]
    return "\n\n".join(
        [
            f"# {record['model']}, repaired",
            result.sentence,
            f"## What was done\n\n{chosen.done} Object masks: {record['masks']}.",
            *record["notes"],
            f"## On which data\n\n{record['data']}: {record['train']} training images,"
            f" {record['validation']} validation images; reported on {record['test']} images of"
            f" {record['test data']}. Seed {record['seed']}, seecause {record['seecause']}.",
            "## What it cost",
            "| on test images | before | after |\n|---|---|---|\n" + "\n".join(rows),
            "## What was not tested\n\n" + "\n".join(f"- {line}" for line in NOT_TESTED),
            usage[usage.index("## Load it") :],
        ]
    )
