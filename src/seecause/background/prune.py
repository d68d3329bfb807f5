"""Which heads go, what that does, and a model without them on disk.

`score_heads` scores on correctly predicted images of training data; `prune_and_test` removes the
highest and measures on other images: accuracy, groups, BIR and flips before and after, against how
many go, and beside random sets of as many.

A head is multiplied by zero at the input of the output projection W_O, which is the same as zeroing
its columns of W_O, or its rows of W_V and b_V (CIGMA, sections 1.7 and 1.8):
    W_O concat_h(o_h) + b_O = sum_h W_O[:, S_h] o_h + b_O           b_O belongs to no head

    zeroed   (to ship) the same architecture with zeros in the output projections: plain timm,
             transformers, torchvision or open_clip load it
    sliced   rows of Q, K and V and columns of O are gone, the file is smaller, and
             `sc.load(folder)` loads it. At the usual sizes this saves little (16 of a ViT-B/16's
             144 heads are 4 % of its arithmetic): the point is a model without the heads

Both compute what the ablated model computes. A README names the removed heads and how to load what
is left; `seecause.json` holds the same for programs. A module that brings its own view and writes
itself (iFAM: `save`) does so.

DivPrune (Alvar et al. 2025, 2503.02175), the token-level baseline, keeps the patch tokens that
differ most from one another, by max-min diversity over cosine distance d = 1 - cos:
    first   the token whose nearest neighbour is farthest
    then    argmax_j min_{s in S} d(j, s), until round(keep * N) tokens are in S
Here it acts after `after` blocks of a vision transformer; in the paper, before the first layer of a
language model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from seecause import __version__
from seecause.background.erase import SWAP, Erased, Fill
from seecause.background.gains import Gains, jensen_shannon, log_probs
from seecause.background.heads import (
    SELECTORS,
    Head,
    HeadScores,
    Selector,
    all_heads,
    checked_heads,
    gates_without,
    head_count,
    need_heads,
    over_images,
    random_sets,
    select,
)
from seecause.background.images import (
    LabelledImages,
    Progress,
    correct_images,
    images_of,
    logits_of,
    model_for,
    no_progress,
)
from seecause.background.masks import check_search, mask_options as deciding
from seecause.background.objects import MaskSource, object_masks
from seecause.data.batch import Group, group_shares
from seecause.data.dataset import Dataset, SkippedImage
from seecause.data.registry import as_data
from seecause.engine.forks import logits_of_sets
from seecause.engine.trace import kept_logits
from seecause.engine.walk import walk
from seecause.errors import BadOption, NotDefined, UnsupportedModel
from seecause.files import write_atomic, write_json
from seecause.loading import need_own_classes, rewrap
from seecause.metrics.accuracy import GroupAccuracy, background_gap, calibration, nll
from seecause.models.base import ImageModel
from seecause.models.block import ZEROED, slice_heads, zero_heads
from seecause.models.eval_mode import in_eval_mode
from seecause.models.load import CARD, HEAD, PLAIN, SLICED
from seecause.models.parts import CosineHead, UnitLinear
from seecause.models.preprocess import Preprocess
from seecause.models.view import VisionModel
from seecause.options import Count, Share, check_options
from seecause.types import wide

log = logging.getLogger(__name__)
Form = Literal["zeroed", "sliced"]
ELSEWHERE = "elsewhere"
TOGETHER = 16  # images whose versions are made at once, between two reports of progress
SHOWN = 6  # images


@dataclass(frozen=True, eq=False)
class Outcome:
    """A model without `heads`, measured. NaN: the data does not tell."""

    heads: list[Head]
    accuracy: float
    worst: float  # accuracy of the worst group
    nll: float
    ece: float
    flips: float  # share of predictions that change with the background (other versions only)
    gains: Mapping[str, Gains] = field(default_factory=dict)  # by the name of the erasure
    averages: Mapping[str, float] = field(default_factory=dict)  # over groups, by their own names

    def numbers(self) -> dict[str, float]:
        """By name, for tables, without what the data does not tell. BIR is the ratio of means, one
        half where neither region matters."""
        numbers = {
            "removed": len(self.heads),
            "accuracy": self.accuracy,
            "worst group": self.worst,
            **self.averages,
            "NLL": self.nll,
            "ECE": self.ece,
            "flips": self.flips,
        }
        for name, gains in self.gains.items():
            ratio = gains.bir_ratio_of_means
            numbers |= {
                f"FIG, {name}": float(gains.fig.mean()),
                f"BIG, {name}": float(gains.big.mean()),
                f"BIR, {name}": ratio if ratio == ratio else 0.5,
            }
        return {name: value for name, value in numbers.items() if value == value}


@in_eval_mode
@torch.no_grad()
def logits_without(model: ImageModel, images: Tensor, sets: Sequence[Sequence[Head]]) -> Tensor:
    """Logits [S, N, C] of images [N, 3, H, W] without each set of heads. Any model will do where no
    set has a head."""
    if not any(sets):
        return logits_of(model, images).expand(len(sets), -1, -1)
    view = need_heads(model, "head ablation")
    gates = torch.stack([gates_without(view, heads) for heads in sets])
    return logits_of_sets(view, images, gates)


@in_eval_mode
def outcomes(
    model: VisionModel,
    data: LabelledImages,
    sets: Sequence[Sequence[Head]],
    fills: Sequence[Fill | Tensor] = (),
    *,
    train: Mapping[Group, float] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Measure the model without each set of heads.

    The erased images are the same for all sets, so the numbers are paired.

    Args:
        model: A vision transformer.
        data: Images, with masks for fills.
        sets: Sets of heads.
        fills: FIG and BIG are measured with each of these ("swap" for exact counterfactuals).
        train: Shares of the groups in training, for the average with these weights.
        progress: Called with the number of images that are finished.
    """
    train = _usable_shares(train, data)
    erased = {each.name: each for each in (Erased(model, data, fill) for fill in fills)}
    parts = []
    for start in range(0, len(data), TOGETHER):
        rows = slice(start, min(start + TOGETHER, len(data)))
        parts.append(_measure_rows(model, data, rows, sets, erased))
        if progress is not None:
            progress(rows.stop - rows.start)
    logits, flips, *gains = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    measured = []
    for place, heads in enumerate(sets):
        by_name = {
            name: Gains(gains[2 * i][place], gains[2 * i + 1][place], 0.0)
            for i, name in enumerate(erased)
        }
        moved = float(flips[place].mean())
        measured.append(_outcome(list(heads), logits[place], data, moved, by_name, train))
    return measured


def _measure_rows(
    model: VisionModel,
    data: LabelledImages,
    rows: slice,
    sets: Sequence[Sequence[Head]],
    erased: Mapping[str, Erased],
) -> tuple[Tensor, ...]:
    """Of some images, for every set: logits [S, b, C], whether the other background changes the
    prediction [S, b] (NaN without one), then FIG and BIG [S, b] of every erasure."""
    versions = [data.images[rows]]
    for each in erased.values():
        versions += each.versions(rows)
    swapped_at = 1 + 2 * list(erased).index(SWAP) if SWAP in erased else len(versions)
    if data.other_background is not None and swapped_at == len(versions):
        versions.append(data.other_background[rows])
    logits = logits_without(model, torch.cat(versions), sets)
    logits = logits.unflatten(1, (len(versions), -1)).cpu()  # [S, V, b, C]
    log_p = log_probs(logits)
    gains = []
    for place in range(len(erased)):
        gains.append(jensen_shannon(log_p[:, 0], log_p[:, 2 + 2 * place]).double())
        gains.append(jensen_shannon(log_p[:, 0], log_p[:, 1 + 2 * place]).double())
    predicted = logits[:, 0].argmax(dim=-1)
    flips = torch.full_like(predicted, torch.nan, dtype=torch.float64)
    if data.other_background is not None:
        flips = (logits[:, swapped_at].argmax(dim=-1) != predicted).double()
    return logits[:, 0], flips, *gains


def _usable_shares(
    train: Mapping[Group, float] | None, data: LabelledImages
) -> Mapping[Group, float] | None:
    """Shares of groups in training; None, with a warning, where the images lack a group."""
    if not train or not data.grouped:
        return train
    missing = [group for group, share in train.items() if share > 0 and group not in data.groups]
    if not missing:
        return train
    names = ", ".join(map(str, missing))
    log.warning(
        "%s has no image of group %s: no average with the weights of training", data.name, names
    )
    return None


def _outcome(
    heads: list[Head],
    logits: Tensor,
    data: LabelledImages,
    flips: float,
    gains: dict[str, Gains],
    train: Mapping[Group, float] | None,
) -> Outcome:
    if data.labels is None:
        return Outcome(heads, torch.nan, torch.nan, torch.nan, torch.nan, flips, gains)
    labels = data.labels.cpu()
    correct = logits.argmax(dim=1) == labels
    groups = data.by_group(correct)
    return Outcome(
        heads,
        float(correct.double().mean()),
        torch.nan if groups is None else groups.worst,
        float(nll(logits, labels).mean()),
        calibration(logits, labels).error,
        flips,
        gains,
        {} if groups is None else over_groups(groups, train),
    )


def over_groups(
    groups: GroupAccuracy, train: Mapping[Group, float] | None = None
) -> dict[str, float]:
    """What papers call worst-group accuracy and adjusted average, by names that tell them apart,
    where the data has what each needs."""
    averages = {"mean of groups": groups.unweighted_average}  # SubpopBench's adjusted accuracy
    if train:  # Sagawa et al.
        weighted = groups.train_weighted_average(dict(train.items()))
        averages["groups weighted as in training"] = weighted
    if set(groups.groups) == {(0, 0), (0, 1), (1, 0), (1, 1)}:
        averages["worst of groups (0, 1) and (1, 0)"] = groups.worst_among([(0, 1), (1, 0)])
    return averages


@dataclass(frozen=True, eq=False)
class Curve:
    """Outcomes against how many heads may go: by scores, and at random."""

    ks: list[int]
    chosen: list[Outcome]
    random: list[list[Outcome]]  # draws for each k

    def at(self, k: int) -> Outcome:
        """The outcome of the chosen heads where `k` may go."""
        return self.chosen[self.ks.index(k)]

    def band(self, name: str) -> list[tuple[float, float]]:
        """Mean and standard deviation over draws of a number, for each k."""
        band = []
        for draws in self.random:
            values = torch.tensor([draw.numbers()[name] for draw in draws], dtype=torch.float64)
            band.append((float(values.mean()), float(values.std(correction=0))))
        return band


@in_eval_mode
def curve(
    model: VisionModel,
    data: LabelledImages,
    scores: HeadScores,
    ks: Sequence[int],
    fills: Sequence[Fill | Tensor] = (),
    *,
    draws: Count = 20,
    seed: int = 0,
    train: Mapping[Group, float] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Curve:
    """Remove the best k heads for every k, and beside it `draws` random sets, as large as what was
    really removed: heads with scores of 0 or less stay. Other arguments are those of `outcomes`."""
    chosen = [scores.top(k) for k in ks]
    sets = [*chosen]
    for heads in chosen:
        sets += random_sets(model, len(heads), draws=draws, seed=seed)
    measured = outcomes(model, data, sets, fills, train=train, progress=progress)
    drawn = measured[len(ks) :]
    random = [drawn[i * draws : (i + 1) * draws] for i in range(len(ks))]
    return Curve(list(ks), measured[: len(ks)], random)


def background_gaps(
    model: ImageModel,
    same: LabelledImages,
    random: LabelledImages,
    sets: Sequence[Sequence[Head]] = ((),),
) -> tuple[list[float], tuple[int, int]]:
    """BG-gap of the Backgrounds Challenge without each set of heads: accuracy on mixed_same less
    that on mixed_rand, of objects that could be read in both; and how many images of each."""
    correct = []
    for data, other in ((same, random), (random, same)):
        missing = {_object_named(hole.name) for hole in other.skipped}
        kept = [i for i, name in enumerate(data.ids) if _object_named(name) not in missing]
        data = data if len(kept) == len(data) else data.take(torch.tensor(kept))
        predicted = logits_without(model, data.images, sets).argmax(dim=-1)  # [S, N]
        correct.append((predicted == data.need_labels()).cpu())
    first, second = correct
    gaps = [background_gap(a, b) for a, b in zip(first, second, strict=True)]
    return gaps, (first.shape[1], second.shape[1])


def _object_named(name: str) -> str:
    """The part of an ImageNet-9 file name, `class/fg_<photo>_bg_<photo>.JPEG`, that is the same in
    all variants."""
    from seecause.data.imagenet import object_of

    path = PurePosixPath(name)
    return str(path.with_name(object_of(path.stem)))


@dataclass(frozen=True, eq=False)
class Examples:
    """A few images in several versions, and the logits of each."""

    data: LabelledImages
    erasure: str  # its name; empty where nothing was erased
    versions: dict[str, Tensor]  # [N, 3, H, W] by name
    logits: dict[str, Tensor]  # [S, N, C] by the same names: of every set of heads that was removed


def examples(
    model: ImageModel,
    data: LabelledImages,
    fill: Fill | Tensor = "grey",
    sets: Sequence[Sequence[Head]] = ((),),
) -> Examples:
    """Logits of images as they are, without background, without object (by their masks), and
    elsewhere where other versions exist, by the model without each set of heads."""
    versions, erasure = {"image": data.images}, ""
    if data.masks is not None:
        erased = Erased(model, data, fill)
        versions["no background"], versions["no object"] = erased.versions(slice(None))
        erasure = erased.name
    if data.other_background is not None:
        versions[ELSEWHERE] = data.other_background
    logits = {name: logits_without(model, images, sets) for name, images in versions.items()}
    return Examples(data, erasure, versions, logits)


@dataclass(frozen=True, eq=False)
class ScoredHeads:
    """Scores of every head by a selector, and what they were made from."""

    selector: str
    scores: HeadScores
    data: LabelledImages  # correctly predicted images, with the masks in use
    shares: Mapping[Any, float]  # of the groups in all images that were read
    record: dict[str, Any]  # everything that decided the scores, for a manifest


@in_eval_mode
def score_heads(
    model: ImageModel,
    data: Dataset | LabelledImages | str,
    *,
    selector: str = "cigma",
    options: Mapping[str, Any] | None = None,
    masks: MaskSource = "auto",
    mask_options: Mapping[str, Any] | None = None,
    fill: Fill = "grey",
    sampling: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> ScoredHeads:
    """Score heads on images that the model predicts correctly.

    Args:
        model: A vision transformer, or a vision-language model that is asked for classes.
        data: A dataset, or its name.
        selector: A name of `sc.background.selectors()`.
        options: Options of the selector.
        masks: A source of `object_masks`; "auto": the data's masks where it has them, else
            discovered ones.
        mask_options: Options of `object_masks`, such as `steps` or `cache`.
        fill: What replaces the background; "swap" takes the data's other versions.
        sampling: Which correct images: `share` (0.4), `cap` (512), `stratified`.
        seed: Draws the sample, and what the selector draws.
        progress: Shows what is done (`no_progress` shows nothing).

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> scored = sc.background.score_heads(model, "critters:certified:train", selector="taylor")
    """
    view, options = need_heads(model, "choosing heads"), dict(options or {})
    entry = check_selector(view, selector, options, masks, mask_options or {}, fill)
    data = as_data(data)
    scorer = need_heads(model_for(view, data), "choosing heads")
    everything = images_of(scorer, data, progress)
    if everything.labels is None and "labels" in entry.needs:
        raise BadOption("data", everything.name, f"data with labels: {entry.name} needs them")
    chosen = everything
    if entry.needs != "pairs":  # what a change does is seen in wrong predictions too
        chosen = correct_images(scorer, everything, seed=seed, **(sampling or {}))
    fills = "fill" in entry.options
    if "masks" in entry.needs and not (fills and fill == "swap"):
        chosen = _with_masks(scorer, chosen, masks, mask_options or {}, progress)
    keywords = dict(options)
    keywords |= {"fill": fill} if fills else {}
    keywords |= {"seed": seed} if "seed" in entry.options else {}
    with progress("scoring heads", len(chosen) * len(all_heads(scorer))) as advance:
        if entry.takes_progress:
            keywords["progress"] = advance
        scores = select(entry.name, scorer, chosen, **keywords)
    record: dict[str, Any] = {"data": chosen.name, "images": len(chosen), "by": entry.name}
    if fills:
        record["background"] = Erased(scorer, chosen, fill).name
    elif chosen.masks is not None:
        record["masks"] = chosen.masks.source
    flags = [name for name in ("operator", "guard") if name in entry.options]
    record |= {name: scores.protocol[name] for name in flags}
    record |= options
    record |= {"mask options": others} if (others := deciding(mask_options or {})) else {}
    shares = group_shares(everything.groups)
    return ScoredHeads(entry.name, scores, chosen, shares, record)


def check_selector(
    model: VisionModel,
    name: str,
    options: Mapping[str, Any],
    masks: MaskSource,
    mask_options: Mapping[str, Any],
    fill: str,
) -> Selector:
    """A selector by name, if its options, the masks and the fill can be used: before images are
    read."""
    entry, total = SELECTORS.get(name), len(all_heads(model))
    check_options(name, entry.run, options, leave_out=("fill", "seed", "progress"))
    if fill not in get_args(Fill):
        raise BadOption("fill", fill, f"one of {', '.join(get_args(Fill))}")
    if "fill" not in entry.options and fill != "grey":
        raise BadOption("fill", fill, f"'grey', the default: {name} fills no background")
    screen = options.get("screen")
    if screen is not None and screen > total:
        expected = f"1 to {total}, as many heads as {model.name} has, or none to measure all"
        raise BadOption("screen", screen, expected)
    if isinstance(masks, str) and masks in ("auto", "discovered"):
        check_search(mask_options)
    if (others := deciding(mask_options)) and ("masks" not in entry.needs or fill == "swap"):
        expected = f"masks that are searched: not selector={name!r}, fill={fill!r}"
        raise BadOption("mask_options", others, expected)
    return entry


def _with_masks(
    model: ImageModel,
    data: LabelledImages,
    source: MaskSource,
    options: Mapping[str, Any],
    progress: Progress,
) -> LabelledImages:
    """Images with object masks; "auto" takes the data's where it has them all, else discovers."""
    if isinstance(source, str) and source == "auto":
        source = "discovered" if data.given_masks() is None else "given"
    if isinstance(source, str) and source == "given":
        if others := deciding(options):
            expected = f"none: {data.name} has masks of its own, so give masks='discovered'"
            raise BadOption("mask_options", others, expected)
        if data.truth is not None and data.given_masks() is None:
            expected = "data with a mask for every image, or masks='discovered'"
            raise BadOption("masks", "given", f"{expected}: {data.name} lacks some")
        options = {}
    with progress("finding objects", len(data)) as advance:
        masks = object_masks(model, data, source, progress=advance, **options)
    return data.with_masks(masks)


@dataclass(frozen=True, eq=False, repr=False)
class PruneResult:
    """Heads that go, and what that did on other images."""

    model: VisionModel  # whole
    heads: list[Head]
    scored: ScoredHeads
    test: LabelledImages
    curve: Curve  # against how many heads may go, with random sets beside it
    examples: Examples  # before and after
    gaps: tuple[float, float] | None = None  # BG-gap before and after (ImageNet-9)
    skipped: tuple[SkippedImage, ...] = ()  # images that could not be read, of mixed_same too

    def __repr__(self) -> str:
        shown = ("accuracy", "worst group", "flips")
        numbers = self.changes()
        moved = [f"{n} {numbers[n][0]:.3f} -> {numbers[n][1]:.3f}" for n in shown if n in numbers]
        return f"PruneResult({', '.join([f'without {self.heads}', *moved])})"

    @property
    def before(self) -> Outcome:
        return self.curve.at(0)

    @property
    def after(self) -> Outcome:
        return self.curve.at(len(self.heads))

    def changes(self) -> dict[str, tuple[float, float]]:
        """Numbers by name, before and after, that both have."""
        return changes(self.before, self.after, self.gaps)

    @property
    def note(self) -> str:
        """For the README of the exported model."""
        return (
            f"Heads were chosen by {self.scored.selector} on {len(self.scored.data)} images of"
            f" {self.scored.data.name}: the {len(self.heads)} highest scores."
        )

    def export(self, folder: str | Path, *, form: Form = "zeroed") -> Path:
        """Write the model without these heads."""
        return export(self.model, self.heads, folder, form=form, note=self.note)


def changes(
    before: Outcome, after: Outcome, gaps: tuple[float, float] | None = None
) -> dict[str, tuple[float, float]]:
    """Numbers by name, before and after, that both outcomes have; `gaps` are the BG-gaps."""
    first, second = before.numbers(), after.numbers()
    both = {name: (first[name], second[name]) for name in first if name in second}
    del both["removed"]
    return both if gaps is None else {**both, "BG-gap": gaps}


@in_eval_mode
def prune_and_test(
    model: ImageModel,
    train: Dataset | LabelledImages | str,
    test: Dataset | LabelledImages | str,
    *,
    selector: str = "cigma",
    options: Mapping[str, Any] | None = None,
    top: int | float = 0.1,
    masks: MaskSource = "auto",
    mask_options: Mapping[str, Any] | None = None,
    fill: Fill = "grey",
    sampling: Mapping[str, Any] | None = None,
    draws: Count = 20,
    same: Dataset | LabelledImages | str | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> PruneResult:
    """Choose heads on correctly predicted images of `train`, remove them, and measure on `test`
    what that did, beside `draws` random sets of as many.

    Args:
        model: A vision transformer, or a vision-language model that is asked for classes.
        train: Data to score heads on; arguments up to `sampling` are those of `score_heads`.
        test: Other data, to measure on.
        top: Heads to remove at most, a count or a share; heads with scores of 0 or less stay.
        draws: Random sets for the band beside the curve.
        same: Where `test` is ImageNet-9's mixed_rand, the variant mixed_same, for the BG-gap.
        seed: Draws the sample and the random sets.
        progress: Shows what is done.

    Returns:
        The `heads`, outcomes `before` and `after`, the `curve` against how many go, and `export`.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> train = sc.data.open_data("critters:certified:train", limit=16)
        >>> test = sc.data.open_data("critters:certified:test", limit=16)
        >>> result = sc.background.prune_and_test(model, train, test, top=2, draws=2)
        >>> len(result.heads), result.curve.ks
        (2, [0, 1, 2, 4])
    """
    view, options = need_heads(model, "choosing heads"), dict(options or {})
    entry = check_selector(view, selector, options, masks, mask_options or {}, fill)
    most = _checked_top(view, top, options.get("screen"))
    if "top" in entry.options:
        options = {"top": most, **options}
    finding: dict[str, Any] = {"masks": masks, "mask_options": mask_options}
    asked = {"selector": selector, "options": options, "fill": fill, "sampling": sampling}
    scored = score_heads(view, train, **asked, **finding, seed=seed, progress=progress)
    heads = scored.scores.top(top)
    test = as_data(test)
    judge = need_heads(model_for(view, test), "choosing heads")
    data = images_of(judge, test, progress)
    twin = None if same is None else images_of(judge, same, progress)
    data = _with_masks(judge, data, masks, mask_options or {}, progress)
    # a quarter of the heads, half, all and twice as many, where there are
    scores_known = int(scored.scores.value.isfinite().sum())
    quarters = [len(heads) * part // 4 for part in (1, 2, 4, 8)]
    ks = sorted({0, len(heads), *(max(1, part) for part in quarters if part <= scores_known)})
    fills: list[Fill | Tensor] = ["grey" if fill == "swap" else fill]
    fills += ["swap"] if data.swaps else []
    drawn: dict[str, Any] = {"draws": draws, "seed": seed, "train": scored.shares}
    with progress("measuring", len(data)) as advance:
        removals = curve(judge, data, scored.scores, ks, fills, **drawn, progress=advance)
    gaps = None
    if twin is not None:
        (before, after), _ = background_gaps(judge, twin, data, [[], heads])
        gaps = before, after
    places = torch.linspace(0, len(data) - 1, min(SHOWN, len(data))).round().long()
    shown = examples(judge, data.take(places), fills[0], [[], heads])
    read = [scored.data, data] + ([] if twin is None else [twin])
    skipped = tuple(dict.fromkeys(hole for part in read for hole in part.skipped))
    return PruneResult(view, heads, scored, data, removals, shown, gaps, skipped)


def _checked_top(model: VisionModel, top: int | float, screen: int | None) -> int:
    """How many heads may go."""
    total = len(all_heads(model))
    count = head_count(top, total) if isinstance(top, float) else top
    if not 1 <= count <= total:
        raise BadOption(
            "top",
            top,
            f"a count from 1 to {total}, as many heads as {model.name} has, or a share of them from"
            f" {1 / total:.2g} to 1.0",
        )
    if screen is not None and count > screen:
        expected = f"{count} or more, the number of heads that may go"
        raise BadOption("screen", screen, expected)
    return count


def prune_heads(model: VisionModel, heads: Iterable[Head]) -> VisionModel:
    """A verified view of a copy without `heads`, pairs (layer, head) from 0. Its `module` is
    smaller and works without this package.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> sc.background.prune_heads(model, [(0, 1)]).blocks[0].heads
        7
    """
    removed = _removable(model, heads)
    check_sliceable(model)
    keep = _kept_heads(model, removed)

    def cut(block: nn.Module, layer: int) -> None:
        if len(keep[layer]) < model.blocks[layer].heads:
            slice_heads(block, keep[layer])

    pruned = edited_copy(model, cut)
    pruned.origin = {**model.origin, "kept": _original_heads(model, keep)}
    return pruned


def zero(model: VisionModel, heads: Iterable[Head]) -> VisionModel:
    """A verified view of a copy whose output projections no longer read `heads`; the architecture
    is the same."""
    removed = _removable(model, heads)

    def cut(block: nn.Module, layer: int) -> None:
        gone = [head for at, head in removed if at == layer]
        zero_heads(block, gone, of=model.blocks[layer].heads)

    return edited_copy(model, cut)


def edited_copy(model: VisionModel, edit: Callable[[nn.Module, int], None]) -> VisionModel:
    """A verified view of a copy of the native module, after `edit(native block, layer)` of every
    block."""
    memo: dict[int, Any] = {}
    module = copy.deepcopy(model.module, memo)
    for layer, block in enumerate(model.blocks):
        edit(memo[id(block.owner)], layer)
    return rewrap(model, module)


def check_sliceable(model: VisionModel) -> None:
    """Refuse a model whose heads cannot be cut out, whichever they are."""
    rope = any(getattr(part, "rope_mixed", False) for part in model.module.modules())
    biases = any(block.additive is not None for block in model.blocks)
    reasons = {
        "every head has rotary frequencies of its own": rope,
        "every head has relative position biases of its own": biases,
        "it decides by itself what each head sees": hasattr(model.module, "view_parts"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModel(f"cutting heads out of {model.family}", reason, ZEROED)


def _kept_heads(model: VisionModel, removed: Iterable[Head]) -> list[list[int]]:
    """The heads that stay, layer by layer."""
    gone = set(removed)
    return [
        [head for head in range(block.heads) if (layer, head) not in gone]
        for layer, block in enumerate(model.blocks)
    ]


def _original_heads(model: VisionModel, keep: list[list[int]]) -> list[list[int] | None]:
    """`keep`, numbered as in the module before anything was cut out of it; None where a layer is
    whole."""
    before = model.origin.get("kept", [None] * model.n_layers)
    original: list[list[int] | None] = []
    for earlier, now, block in zip(before, keep, model.blocks, strict=True):
        if earlier is None:
            original.append(None if len(now) == block.heads else now)
        else:
            original.append([earlier[head] for head in now] if earlier else [])
    return original


def _removable(model: VisionModel, heads: Iterable[Head]) -> list[Head]:
    removed = checked_heads(model, heads)
    if model.gates is not None:
        reason = "this model has gates on its heads, which a copy would not have"
        raise NotDefined("cutting heads out", reason, "Leave the `ablate` block first")
    return removed


def export(
    model: VisionModel,
    heads: Iterable[Head],
    folder: str | Path,
    *,
    form: Form = "zeroed",
    note: str = "",
) -> Path:
    """Write a model without some of its heads.

    Args:
        model: A vision transformer.
        heads: Pairs (layer, head) from 0; none writes the whole model.
        folder: A new folder, an empty one, or one with an earlier export.
        form: "zeroed" keeps the architecture, "sliced" makes the file smaller.
        note: A paragraph for the README, such as how the heads were chosen.

    Returns:
        The folder.
    """
    heads = checked_heads(model, heads)
    check_form(model, form)
    origin = _origin(model)
    edited = zero(model, heads) if form == "zeroed" else prune_heads(model, heads)
    head = _head_card(edited.extra)
    folder = Path(folder)
    check_place(folder, CARD, "ifam.json")
    if (folder / (SLICED if form == "zeroed" else PLAIN)).exists():
        expected = f"an empty folder, or one with a model of form={form!r}"
        raise BadOption("folder", str(folder), f"{expected}: it has weights of the other form")
    names = {id(part): name for name, part in edited.module.named_modules()}
    kept = _original_heads(model, _kept_heads(model, heads)) if form == "sliced" else None
    card = {
        "form": form,
        "model": model.name,
        "family": model.family,
        "removed": heads,
        "layers": [block.heads for block in model.blocks],
        "kept": kept,
        "blocks": [names[id(block.owner)] for block in edited.blocks],
        "origin": {key: value for key, value in origin.items() if key != "kept"},
        "classes": list(model.classes),
        "sigmoid": model.sigmoid,
        "preprocess": asdict(model.preprocess),
        "pool": edited.readout.kind,
        "head": head,
        "templates": list(model.texts.get("templates", ())),
        "random_weights": model.random_weights,
        "fingerprint": edited.fingerprint(),
        "seecause": __version__,
    }
    if _writes_itself(model):
        own = ("model", "removed", "layers", "fingerprint", "seecause")
        edited.module.save(folder, **{name: card[name] for name in own})  # type: ignore[operator]
    else:
        folder.mkdir(parents=True, exist_ok=True)
        _save_weights(edited, folder, form, library=origin.get("library"))
        if head is not None:
            _save(edited.extra, folder / HEAD)
        write_json(folder / CARD, card)
    frame = card["preprocess"]
    size, mean, std = (list(frame[name]) for name in ("size", "mean", "std"))
    more = [
        f"Inputs: {size[0]} x {size[1]} pixels, mean {mean}, deviation {std}.",
        f"Weights: {card['fingerprint']} (seecause {card['seecause']}).",
    ]
    if head is not None:
        more.insert(0, "`head.safetensors` holds the classifier, which the library's model lacks.")
    of = f"its {sum(card['layers'])} attention heads"
    write_atomic(folder / "README.md", readme(card, note, of=of, how=_how(card), more=more))
    return folder


def check_place(folder: Path, *cards: str) -> None:
    """Refuse a folder with other files in it, unless it holds one of `cards` of an earlier
    export."""
    if folder.exists() and not folder.is_dir():
        raise BadOption("folder", str(folder), "a folder; this is a file")
    filled = folder.is_dir() and any(folder.iterdir())
    if filled and not any((folder / card).is_file() for card in cards):
        expected = "a new folder, an empty one, or one with an earlier export"
        raise BadOption("folder", str(folder), f"{expected}: this one has other files")


def check_form(model: VisionModel, form: str) -> None:
    """Refuse a form that this model cannot be written in, whatever the heads."""
    if form not in get_args(Form):
        raise BadOption("form", form, " or ".join(get_args(Form)))
    if model.architecture == "prompt":
        remedy = "Use lvlm.export, which zeroes heads in the whole model"
        raise NotDefined("export", f"{model.name} is a vision-language model", remedy)
    need_own_classes(model, "export")
    if form == "zeroed" and "kept" in model.origin:
        reason = "heads were cut out of this model before, so no plain architecture fits it"
        raise NotDefined("form='zeroed'", reason, "Use form='sliced'")
    if form == "sliced":
        check_sliceable(model)
        if not _origin(model):
            remedy = "Load the model by sc.load, or use form='zeroed'"
            raise NotDefined("form='sliced'", "how this module is built is not known", remedy)


def _writes_itself(model: VisionModel) -> bool:
    return hasattr(model.module, "view_parts") and hasattr(model.module, "save")


def _origin(model: VisionModel) -> dict[str, Any]:
    """How the module is built: transformers' and those that write themselves know it, the others if
    `sc.load` made them."""
    if model.preprocess.kind != Preprocess.kind:
        reason = f"{model.name} takes a {model.preprocess.kind}, which the card of a folder lacks"
        raise NotDefined("an export", reason, "Use sc.background.prune_heads and save its module")
    if _writes_itself(model):
        return {"library": "seecause", "class": type(model.module).__name__}
    if hasattr(model.module, "save_pretrained") and hasattr(model.module, "config"):
        return {**model.origin, "library": "transformers", "class": type(model.module).__name__}
    return model.origin if "library" in model.origin else {}


def _save_weights(model: VisionModel, folder: Path, form: Form, *, library: str | None) -> None:
    module: Any = model.module
    if library == "transformers":
        if form == "zeroed":
            module.save_pretrained(folder)
        else:
            module.config.save_pretrained(folder)
        _save_processor(model.preprocess, folder)
        tokenizer: Any = model.texts.get("tokenizer")
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
    if form == "sliced" or library != "transformers":
        _save(module, folder / (PLAIN if form == "zeroed" else SLICED))


def _save(module: Any, path: Path) -> None:
    state = module.state_dict().items()
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in state}
    write_atomic(path, save(copies))


def _save_processor(frame: Preprocess, folder: Path) -> None:
    """What a transformers image processor reads, where it can say it: it knows one short side
    only."""
    scaled = [int(side / frame.crop + 1e-6) for side in frame.size]
    if not frame.squash and scaled[0] != scaled[1]:
        return
    short = {"shortest_edge": scaled[0]}
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"height": scaled[0], "width": scaled[1]} if frame.squash else short,
        "do_center_crop": True,
        "crop_size": {"height": frame.size[0], "width": frame.size[1]},
        "resample": int(getattr(Image.Resampling, frame.filter.upper())),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(frame.mean),
        "image_std": list(frame.std),
    }
    write_json(folder / "preprocessor_config.json", processor)


def _head_card(head: nn.Module | None) -> dict[str, Any] | None:
    """A head that is not part of the native module; a zero-shot head is made again from its
    texts."""
    if isinstance(head, CosineHead):
        return None if head.from_text else {"kind": "cosine", "scale": head.scale}
    if head is None:
        return None
    if isinstance(head, nn.Linear):
        return {"kind": "unit-linear" if isinstance(head, UnitLinear) else "linear"}
    reason = f"the head is a {type(head).__name__}, which no file describes"
    raise NotDefined("export", reason, "Use a linear head or a CosineHead")


def readme(card: Mapping[str, Any], note: str, *, of: str, how: str, more: Sequence[str]) -> str:
    """Markdown for an exported model: how many heads are gone, which, and `how` to load the rest;
    `more` stands at the end."""
    zeroed = "are zero. The architecture is the original one."
    sliced = "were cut out, with their queries, keys and values."
    rows = []
    for layer, heads in enumerate(card["layers"]):
        gone = ", ".join(str(head) for at, head in card["removed"] if at == layer)
        rows += [f"| {layer} | {heads} | {gone} |"] if gone else []
    table = "\n".join(["| layer | heads it had | removed |", "|---|---|---|", *rows])
    parts = [
        f"# {card['model']} without {len(card['removed'])} of {of}",
        "The heads below have no effect: their columns of the output projection "
        + (zeroed if card["form"] == "zeroed" else sliced),
        "The bias of the output projection belongs to no head and is unchanged. Layers and heads"
        " count from 0.",
        table if rows else "No head was removed.",
        note,
        "The weights this model came from were random." if card.get("random_weights") else "",
        f"## Load it\n\n```python\n{how}\n```",
        *more,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _how(card: Mapping[str, Any]) -> str:
    """Python that loads an exported model."""
    ours = "import seecause as sc\nmodel = sc.load(FOLDER)"
    origin = card["origin"]
    if card["form"] == "sliced" or origin.get("library") == "seecause":
        return ours
    imports = "from safetensors.torch import load_file\n"
    filled = "load_state_dict(load_file('model.safetensors'))"
    if not origin:
        return f"{imports}module.{filled}  # a module of the same architecture"
    kind, name = origin.get("class"), repr(origin.get("name"))
    options = "".join(f", {key}={value!r}" for key, value in origin.get("options", {}).items())
    plain = {
        "transformers": f"from transformers import {kind}\nmodel = {kind}.from_pretrained(FOLDER)",
        "torchvision": (
            f"{imports}from torchvision import models\n"
            f"model = models.get_model({name}{options})\nmodel.{filled}\nmodel.eval()"
        ),
        "open_clip": (
            "import open_clip\n"
            f"model = open_clip.create_model({name}, pretrained='model.safetensors').eval()"
        ),
        "timm": (
            f"import timm\nmodel = timm.create_model({name}{options},"
            " checkpoint_path='model.safetensors').eval()"
        ),
    }[origin["library"]]
    if "arguments" in origin:
        arguments = ", ".join(f"{key}={value!r}" for key, value in origin["arguments"].items())
        plain = (
            f"{imports}from timm.models.vision_transformer import VisionTransformer\n"
            f"model = VisionTransformer({arguments})\nmodel.{filled}\nmodel.eval()"
        )
    return f"{plain}\n\n# or, with class names and preprocessing:\n{ours}"


@in_eval_mode
@torch.no_grad()
def divprune(
    model: VisionModel, images: Tensor, *, keep: Share = 0.25, after: int = 0
) -> tuple[Tensor, Tensor]:
    """Predict from the patch tokens that differ most after some blocks.

    Args:
        model: A vision transformer.
        images: [B, 3, H, W], normalised.
        keep: Share of patch tokens that stay.
        after: Blocks that run on all tokens.

    Returns:
        Logits [B, C] and the tokens that stay, [B, patches] bool.
    """
    check_options("divprune", divprune, {"keep": keep, "after": after})
    need_heads(model, "divprune")
    images = images.to(model.device, model.dtype)
    layout = model.check(images)
    if model.architecture != "transformer":
        reason = "this model's tokens are read by a language model"
        raise NotDefined("divprune", reason, "Use a vision transformer")
    if not 0 <= after < model.n_layers:
        raise BadOption("after", after, f"0-{model.n_layers - 1} blocks")
    count = max(1, round(keep * layout.n_patches))

    def run_chunk(start: int, stop: int) -> Tensor:
        at = model.at(images[start:stop])
        h = walk(model, model.embed(images[start:stop]), at, stop=after).end()
        tokens = most_diverse(h[:, layout.patches], count)
        logits = kept_logits(model, h, tokens, at, start=after)
        return torch.cat([logits, tokens.to(h.dtype)], dim=1)

    columns = over_images(run_chunk, model, images, holds=1)
    return columns[:, : -layout.n_patches], columns[:, -layout.n_patches :].bool()


def most_diverse(features: Tensor, count: int) -> Tensor:
    """Which `count` of the tokens features [B, N, D] the greedy rule keeps, [B, N] bool. Ties go to
    the first token."""
    unit = F.normalize(wide(features), dim=-1)
    distance = 1 - unit @ unit.mT  # [B, N, N]
    itself = torch.eye(distance.shape[-1], dtype=torch.bool, device=features.device)
    apart = distance.masked_fill(itself, torch.inf)  # no token is its own neighbour
    rows = torch.arange(len(features), device=features.device)
    nearest = apart.amin(dim=-1)  # [B, N], to the nearest of those chosen; at first, to any other
    taken = torch.zeros(nearest.shape, dtype=torch.bool, device=features.device)
    for step in range(count):
        chosen = nearest.masked_fill(taken, -torch.inf).argmax(dim=-1)
        taken[rows, chosen] = True
        least = distance[rows, chosen]
        nearest = least if step == 0 else torch.minimum(nearest, least)
    return taken
