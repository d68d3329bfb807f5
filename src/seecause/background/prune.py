"""Which heads go, and what that does.

`score_heads` scores on correctly predicted images of training data; `prune_and_test` removes the
highest and measures on other images: accuracy, groups, BIR and flips before and after, against how
many go, and beside random sets of as many.

DivPrune (Alvar et al. 2025, 2503.02175), the token-level baseline, keeps the patch tokens that
differ most from one another, by max-min diversity over cosine distance d = 1 - cos:

    first   the token whose nearest neighbour is farthest
    then    argmax_j min_{s in S} d(j, s), until round(keep * N) tokens are in S

Here it acts after `after` blocks of a vision transformer; in the paper, before the first layer of a
language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.background._export import Form, export
from seecause.background.gains import Erased, Fill, Gains, jensen_shannon, log_probs
from seecause.background.heads import (
    SELECTORS,
    Head,
    HeadScores,
    all_heads,
    gates_without,
    need_heads,
    over_images,
    random_sets,
    select,
)
from seecause.background.images import (
    LabelledImages,
    Masks,
    Progress,
    correct_images,
    images_of,
    logits_of,
    model_for,
    no_progress,
)
from seecause.background.masks import MaskSource, object_masks
from seecause.data.batch import Group, group_shares
from seecause.data.dataset import Dataset, SkippedImage, as_data
from seecause.engine.forks import logits_of_sets
from seecause.engine.trace import kept_logits
from seecause.engine.walk import walk
from seecause.errors import BadOption, NotDefined
from seecause.metrics.statistics import calibration, nll
from seecause.models.base import ImageModel
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel
from seecause.options import Count, Share, check_options, checked, keyword_options
from seecause.types import wide

TOGETHER = 16  # images whose versions are made at once, between two reports of progress


@dataclass(frozen=True, eq=False)
class Outcome:
    """A model without `heads`, measured: numbers by name, without those that the data does not
    tell."""

    heads: list[Head]
    numbers: dict[str, float]


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
    fills: Sequence[Fill] = (),
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
    erased = [Erased(model, data, fill) for fill in fills]
    # the version whose prediction may flip: that of the exact swap, or one more
    swapped_at = 1 + 2 * (fills.index("swap") if "swap" in fills else len(fills))
    parts = list[tuple[Tensor, ...]]()
    for start in range(0, len(data), TOGETHER):
        rows = slice(start, min(start + TOGETHER, len(data)))
        versions = [data.images[rows]]
        for each in erased:
            versions += each.versions(rows)
        if data.other_background is not None and swapped_at == len(versions):
            versions.append(data.other_background[rows])
        logits = logits_without(model, torch.cat(versions), sets)
        logits = logits.unflatten(1, (len(versions), -1)).cpu()  # [S, V, b, C]
        log_p = log_probs(logits)
        gains = [
            jensen_shannon(log_p[:, :1], log_p[:, 1 + 2 * i : 3 + 2 * i])
            for i in range(len(erased))
        ]
        moved = logits[:, min(swapped_at, len(versions) - 1)].argmax(dim=-1)
        flipped = moved != logits[:, 0].argmax(dim=-1)
        parts.append((logits[:, 0], flipped, *(gain.double().transpose(1, 2) for gain in gains)))
        if progress is not None:
            progress(rows.stop - rows.start)
    logits, flipped, *gains = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    measured = []
    for place, heads in enumerate(sets):
        numbers = {"removed": float(len(heads)), **_accuracy(logits[place], data, train)}
        if data.other_background is not None:
            numbers["flips"] = float(flipped[place].double().mean())
        for each, gain in zip(erased, gains, strict=True):
            big, fig = gain[place].unbind(1)
            ratio = Gains(fig, big, 0.0).bir_ratio_of_means
            numbers |= {f"FIG, {each.name}": float(fig.mean())}
            numbers |= {f"BIG, {each.name}": float(big.mean()), f"BIR, {each.name}": ratio}
        measured.append(Outcome(list(heads), numbers))
    return measured


def _accuracy(
    logits: Tensor, data: LabelledImages, train: Mapping[Group, float] | None
) -> dict[str, float]:
    """Accuracy of logits [N, C], overall and over groups. Papers mean two things by the adjusted
    average: the mean of groups (SubpopBench), and groups weighted as in training (Sagawa et al.),
    which is left out where a group of training has no image."""
    if data.labels is None:
        return {}
    labels = data.labels.cpu()
    correct = logits.argmax(dim=1) == labels
    numbers = {"accuracy": float(correct.double().mean())}
    groups = data.by_group(correct)
    if groups is not None:
        numbers |= {"worst group": groups.worst, "mean of groups": groups.unweighted_average}
        if train and set(train) <= set(groups.groups):
            weighted = groups.train_weighted_average(dict(train))
            numbers["groups weighted as in training"] = weighted
    return {
        **numbers,
        "NLL": float(nll(logits, labels).mean()),
        "ECE": calibration(logits, labels).error,
    }


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
        values = torch.tensor(
            [[draw.numbers[name] for draw in draws] for draws in self.random], dtype=torch.float64
        )  # [ks, draws]
        return list(
            zip(values.mean(dim=1).tolist(), values.std(dim=1, correction=0).tolist(), strict=True)
        )


@in_eval_mode
def curve(
    model: VisionModel,
    data: LabelledImages,
    scores: HeadScores,
    ks: Sequence[int],
    fills: Sequence[Fill] = (),
    *,
    draws: int = 20,
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


@checked
@in_eval_mode
def score_heads(
    model: ImageModel,
    data: Dataset | LabelledImages | str,
    *,
    selector: str = "cigma",
    options: Mapping[str, Any] | None = None,
    masks: MaskSource = None,
    fill: Fill = "grey",
    sampling: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> HeadScores:
    """Score heads on images that the model predicts correctly.

    Args:
        model: A vision transformer, or a vision-language model that is asked for classes.
        data: A dataset, or its name.
        selector: A name of `sc.background.selectors()`.
        options: Options of the selector.
        masks: A source of `object_masks`; None: the data's masks where every image has one, else
            discovered ones.
        fill: What replaces the background; "swap" takes the data's other versions.
        sampling: Which correct images: `share` (0.4), `cap` (512), `stratified`.
        seed: Draws the sample, and what the selector draws.
        progress: Shows what is done (`no_progress` shows nothing).

    Returns:
        The scores; `data` has the images that they were made from, with the masks in use, and
        `protocol["scored"]` the settings.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> sc.background.score_heads(model, "critters:certified:train", selector="taylor").top(1)
        [(5, 3)]
    """
    view, entry = need_heads(model, "choosing heads"), SELECTORS.get(selector)
    keywords = dict(options or {})
    check_options(selector, entry.run, keywords, leave_out=("fill", "seed", "progress"))
    data = as_data(data)
    scorer = need_heads(model_for(view, data), "choosing heads")
    chosen = images_of(scorer, data, progress)
    if entry.needs != "pairs":  # what a change does is seen in wrong predictions too
        chosen = correct_images(scorer, chosen, seed=seed, **(sampling or {}))
    fills = "fill" in entry.options
    if "masks" in entry.needs and not (fills and fill == "swap"):
        chosen = _with_masks(scorer, chosen, masks, progress)
    record: dict[str, Any] = {"data": chosen.name, "images": len(chosen), "by": selector}
    record |= keywords
    if fills:
        keywords["fill"], record["background"] = fill, Erased(scorer, chosen, fill).name
    elif chosen.masks is not None:
        record["masks"] = chosen.masks.source
    keywords |= {"seed": seed} if "seed" in entry.options else {}
    with progress("scoring heads", len(chosen) * len(all_heads(scorer))) as advance:
        if "progress" in keyword_options(entry.run):
            keywords["progress"] = advance
        scores = select(selector, scorer, chosen, **keywords)
    record |= {
        name: scores.protocol[name] for name in ("operator", "guard") if name in entry.options
    }
    return replace(scores, data=chosen, protocol={**scores.protocol, "scored": record})


def _with_masks(
    model: ImageModel, data: LabelledImages, source: MaskSource, progress: Progress
) -> LabelledImages:
    """Images with object masks in use."""
    if source is None and data.masks is not None:
        return data
    complete = data.truth is not None and bool(data.truth.known.all())
    if source is None:
        source = "given" if complete else "discovered"
    if isinstance(source, str) and source == "given" and data.truth is not None and not complete:
        expected = "data with a mask for every image, or masks='discovered'"
        raise BadOption("masks", "given", f"{expected}: {data.name} lacks some")
    with progress("finding objects", len(data)) as advance:
        return data.with_masks(object_masks(model, data, source, progress=advance))


@dataclass(frozen=True, eq=False, repr=False)
class PruneResult:
    """Heads that go, and what that did on other images."""

    model: VisionModel  # whole
    heads: list[Head]
    scores: HeadScores
    test: LabelledImages
    curve: Curve  # against how many heads may go, with random sets beside it

    def __repr__(self) -> str:
        before, after = (outcome.numbers.get("accuracy") for outcome in (self.before, self.after))
        return f"PruneResult(without {self.heads}: accuracy {before} -> {after})"

    @property
    def before(self) -> Outcome:
        return self.curve.at(0)

    @property
    def after(self) -> Outcome:
        return self.curve.at(len(self.heads))

    @property
    def skipped(self) -> tuple[SkippedImage, ...]:
        """Images that could not be read."""
        train = () if self.scores.data is None else self.scores.data.skipped
        return tuple(dict.fromkeys((*train, *self.test.skipped)))

    def changes(self) -> dict[str, tuple[float, float]]:
        """Numbers by name, before and after."""
        return changes(self.before, self.after)

    @property
    def note(self) -> str:
        """For the README of the exported model."""
        scored = self.scores.protocol["scored"]
        return (
            f"Heads were chosen by {scored['by']} on {scored['images']} images of {scored['data']}:"
            f" the {len(self.heads)} highest scores."
        )

    def export(self, folder: str | Path, *, form: Form = "zeroed") -> Path:
        """Write the model without these heads."""
        return export(self.model, self.heads, folder, form=form, note=self.note)


def changes(before: Outcome, after: Outcome) -> dict[str, tuple[float, float]]:
    """Numbers by name, before and after."""
    return {
        name: (value, after.numbers[name])
        for name, value in before.numbers.items()
        if name != "removed"
    }


@checked
@in_eval_mode
def prune_and_test(
    model: ImageModel,
    train: Dataset | LabelledImages | str,
    test: Dataset | LabelledImages | str,
    *,
    top: int | float = 0.1,
    selector: str = "cigma",
    masks: MaskSource = None,
    fill: Fill = "grey",
    draws: Count = 20,
    seed: int = 0,
    progress: Progress = no_progress,
    **options: Any,
) -> PruneResult:
    """Choose heads on correctly predicted images of `train`, remove them, and measure on `test`
    what that did, beside `draws` random sets of as many.

    Args:
        model: A vision transformer, or a vision-language model that is asked for classes.
        train: Data to score heads on.
        test: Other data, to measure on.
        top: Heads to remove at most, a count or a share; heads with scores of 0 or less stay.
        selector: A name of `sc.background.selectors()`.
        masks: A source of `object_masks`, as `score_heads` takes it.
        fill: What replaces the background; "swap" takes the data's other versions.
        draws: Random sets for the band beside the curve.
        seed: Draws the sample and the random sets.
        progress: Shows what is done.
        **options: `options` of the selector and `sampling`, as `score_heads` takes them.

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
    view = need_heads(model, "choosing heads")
    total = len(all_heads(view))
    most = round(top * total) if isinstance(top, float) else top
    if not 1 <= most <= total:
        expected = f"a count from 1 to {total}, or a share of them from {1 / total:.2g} to 1.0"
        raise BadOption("top", top, expected)
    train, test = as_data(train), as_data(test)
    everything = images_of(need_heads(model_for(view, train), "choosing heads"), train, progress)
    asked: dict[str, Any] = {"selector": selector, "fill": fill, "seed": seed, **options}
    scores = score_heads(view, everything, masks=masks, progress=progress, **asked)
    heads = scores.top(most)
    judge = need_heads(model_for(view, test), "choosing heads")
    data, fills = images_of(judge, test, progress), list[Fill]()
    if SELECTORS.get(selector).needs != "pairs":
        own = None if isinstance(masks, Tensor | Masks) else masks  # masks are of their images
        data = _with_masks(judge, data, own, progress)
        fills = ["grey" if fill == "swap" else fill]
    fills += ["swap"] if data.swaps else []
    # a quarter of the heads, half, all and twice as many, where there are
    known = int(scores.value.isfinite().sum())
    quarters = [len(heads) * part // 4 for part in (1, 2, 4, 8)]
    ks = sorted({0, len(heads), *(max(1, part) for part in quarters if part <= known)})
    drawn: dict[str, Any] = {"draws": draws, "seed": seed, "train": group_shares(everything.groups)}
    with progress("measuring", len(data)) as advance:
        removals = curve(judge, data, scores, ks, fills, **drawn, progress=advance)
    return PruneResult(view, heads, scores, data, removals)


@checked
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
