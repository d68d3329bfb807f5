"""Head scores, selection of the heads to prune, and evaluation of the pruned model.

A selector is a decorated function in `scoring`, or in another package (entry points
`seecause.selectors`):

    @selector("name", cost="1 forward", needs="labels")
    def name(model, data, *, option=default) -> HeadScores: ...

`data` is a `LabelledImages` on the model's device with labels (where the data has none, the model's
predictions). A higher score means more worth removing.

`score_heads` scores on correctly predicted images of training data; `prune_and_test` removes the
highest and measures on other images: accuracy, groups, BIR and flips before and after, against the
number of removed heads, and for random sets of the same size.

DivPrune (Alvar et al. 2025, 2503.02175), the token-level baseline, keeps the patch tokens that
differ most from one another, by max-min diversity over cosine distance d = 1 - cos:

    first   the token whose nearest neighbour is farthest
    then    argmax_j min_{s in S} d(j, s), until round(keep * N) tokens are in S

Here it acts before the first block of a vision transformer; in the paper, before the first layer of
a language model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.background.gains import Erased, Fill, Gains, jensen_shannon, log_probs
from seecause.background.images import (
    Advance,
    LabelledImages,
    Masks,
    MaskSource,
    Progress,
    correct_images,
    images_of,
    logits_of,
    model_for,
    no_advance,
    no_progress,
)
from seecause.data.dataset import Dataset, SkippedImage, as_data
from seecause.engine.canary import gates_of, once, prove_gates
from seecause.engine.chunks import run_in_chunks
from seecause.engine.forks import logits_of_sets
from seecause.engine.trace import kept_logits
from seecause.errors import BadOption, NotDefined
from seecause.metrics.statistics import calibration, nll, standard_error
from seecause.models.base import ImageModel, in_eval_mode
from seecause.models.block import wide
from seecause.models.view import VisionModel
from seecause.options import (
    Count,
    Share,
    check_options,
    checked,
    keyword_options,
    summary_of,
)
from seecause.registry import Registry

Head = tuple[int, int]  # (layer, head), both from 0
WORSE = 0.005  # change of accuracy, worst group, flips or BIR from which a model is called worse
DRAWS = 5  # random sets of heads beside the chosen ones, for each count
TOGETHER = 16  # images whose versions are made at once; progress is reported after each batch


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores:
    """A score for each head; a higher score means that removing the head helps more.

    A head that a block does not have, or that was not scored, is NaN.

    Attributes:
        value: [L, H], the scores, float64.
        error: [L, H], standard error of the mean over images, or None.
        after: Metrics [L, H] of the model without each head, by name.
        before: Metrics of the whole model, by name.
        protocol: The options that decide the scores.
        effects: [B, L, H], the scores of each image, or None.
        fig_drops: [B, L, H], the drop of each image's FIG, or None if it was not measured.
        data: The images, where the selector chose them.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> data = sc.data.open_data("critters:clean:test", limit=4)
        >>> scores = sc.background.score_heads(model, data, selector="taylor")
        >>> scores.value.shape, len(scores.top(3))
        (torch.Size([6, 8]), 3)
    """

    value: Tensor  # [L, H] float64, on the CPU
    error: Tensor | None = None  # [L, H], standard error of the mean over images
    after: dict[str, Tensor] = field(default_factory=dict)  # [L, H] metrics without each head
    before: dict[str, float] = field(default_factory=dict)  # metrics of the whole model
    protocol: dict[str, Any] = field(default_factory=dict)
    effects: Tensor | None = None  # [B, L, H], of each image; `value` is their mean
    fig_drops: Tensor | None = None  # [B, L, H], drop of each image's FIG, if it was measured
    data: LabelledImages | None = None  # the images, where `score_heads` chose them

    def __repr__(self) -> str:
        scored = int(self.value.isfinite().sum())
        return f"HeadScores({scored} heads, highest: {self.top(3)})"

    def order(self, *, positive: bool = True) -> list[Head]:
        """Heads from the highest score down; with `positive`, only those above zero."""
        flat = self.value.flatten().nan_to_num(nan=-torch.inf)
        least = 0 if positive else -torch.inf
        order = flat.argsort(descending=True, stable=True).tolist()
        return [divmod(place, self.value.shape[1]) for place in order if flat[place] > least]

    def top(self, k: int, *, positive: bool = True) -> list[Head]:
        """The `k` highest heads; fewer when fewer were scored or are above zero."""
        return self.order(positive=positive)[:k]


def penalised(scores: HeadScores) -> HeadScores:
    """Subtract from each score what the object loses without the head:
    score - max(0, mean(FIG - FIG^(-h))). Without this guard, a head whose removal makes all
    predictions alike gets the highest CIGMA score.

    Args:
        scores: Scores of `select("cigma", ...)`, measured without a guard.

    Returns:
        Other `HeadScores`.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=4)
        >>> data = sc.background.read_images(model, data)
        >>> data = data.with_masks(data.truth)
        >>> scores = sc.background.select("cigma", model, data, guard=False)
        >>> bool((sc.background.penalised(scores).value <= scores.value).all())
        True
    """
    if scores.effects is None or scores.fig_drops is None:
        reason = "FIG without each head was not measured"
        raise NotDefined("the guard", reason, "Score with masks and guard=True")
    drop = scores.after["fig_drop"]
    # the mean over images is clamped: clamped values of single images would have another mean
    effects = scores.effects - (drop > 0) * scores.fig_drops
    value, error = scores.value - drop.clamp_min(0), standard_error(effects)
    return replace(scores, value=value, error=error, effects=effects)


@dataclass(frozen=True)
class Selector:
    """One entry of the registry."""

    name: str
    run: Callable[..., HeadScores]
    cost: str  # of one image
    needs: str
    summary: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options and their defaults."""
        return keyword_options(self.run, leave_out=("progress",))


_NAMES: tuple[str, ...] = (
    "attention-mass", "cigma", "gating", "interchange", "taylor",
)  # fmt: skip
_HOMES: dict[str, str] = dict.fromkeys(_NAMES, "seecause.background.scoring")
SELECTORS: Registry[Selector] = Registry("head selector", group="seecause.selectors", homes=_HOMES)


def selector(
    name: str, *, cost: str, needs: str
) -> Callable[[Callable[..., HeadScores]], Callable[..., HeadScores]]:
    """Register a function under `name`.

    Args:
        name: What `select` is called with.
        cost: What it costs, for `seecause list selectors`.
        needs: What its images must have: "masks", "labels", "pairs" or "".

    Returns:
        A decorator of a function (model, data, **options) that returns `HeadScores`.

    Example:
        >>> from dataclasses import replace
        >>> @selector("reversed", cost="as taylor", needs="labels")
        ... def reverse(model, data):
        ...     scores = select("taylor", model, data)
        ...     return replace(scores, value=-scores.value)
    """

    def register(run: Callable[..., HeadScores]) -> Callable[..., HeadScores]:
        SELECTORS.add(name, Selector(name, run, cost, needs, summary_of(run)))
        return run

    return register


def selectors() -> dict[str, Selector]:
    """All ways to choose heads, by name.

    Returns:
        A `Selector` for each name.

    Example:
        >>> sorted(selectors())[:3]
        ['attention-mass', 'cigma', 'gating']
    """
    return SELECTORS.all()


def select(by: str, model: ImageModel, data: LabelledImages, **options: Any) -> HeadScores:
    """Score all heads by a selector; `scores.top(k)` are those to remove first.

    Args:
        by: A name of `selectors()`.
        model: A vision transformer.
        data: Images, with labels, masks or other versions as the selector needs them.
        **options: Options of the selector.

    Returns:
        `HeadScores`.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=4)
        >>> data = sc.background.read_images(model, data)
        >>> len(select("taylor", model, data).top(2))
        2
    """
    chosen = SELECTORS.get(by)
    check_options(by, chosen.run, options)
    view = need_heads(model, f"choosing heads by {by}")
    with view.eval_mode(frozen=True):
        data = images_of(view, data)
        view.check(data.images)
        if data.labels is None:
            if "labels" in chosen.needs:
                raise BadOption("data", data.name, f"data with labels: {by} needs them")
            data = replace(data, labels=logits_of(view, data.images).argmax(dim=1))
        scores = chosen.run(view, data, **options)
    return replace(scores, protocol={**scores.protocol, "selector": by})


def need_heads(model: ImageModel, what: str = "choosing heads") -> VisionModel:
    """The model, if it is a vision transformer; other models are refused."""
    if not isinstance(model, VisionModel):
        raise NotDefined(
            what,
            f"{model.family} is read by its stages, not by heads",
            "Use a vision transformer; sc.attribute maps this one (caap, mosaic, grad-cam ...)",
        )
    return model


def all_heads(model: VisionModel) -> list[Head]:
    """Every head of the model."""
    return [
        (layer, head) for layer, block in enumerate(model.blocks) for head in range(block.heads)
    ]


def gates_without(model: VisionModel, heads: Iterable[Head]) -> Tensor:
    """Ones [L, H], zero at `heads`."""
    return gates_of(model, checked_heads(model, heads))


@contextmanager
def ablate(model: VisionModel, heads: Iterable[Head]) -> Iterator[VisionModel]:
    """Inside the block, `model` runs without `heads`, pairs (layer, head) from 0: in
    `model(images)` and in every method.

    Args:
        model: A vision transformer.
        heads: Pairs (layer, head), both from 0.

    Yields:
        The model.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> with sc.background.ablate(model, [(2, 1)]):
        ...     logits = model(model.zeros((96, 96)))
    """
    gates = gates_without(model, heads)
    once(model, "gates", partial(prove_gates, model))
    with model.gated(gates):
        yield model


def checked_heads(model: ImageModel, heads: Iterable[Head]) -> list[Head]:
    """`heads` in order and without repeats; heads that the model does not have are refused."""
    view = need_heads(model, "head ablation")
    given, known = list(heads), set(all_heads(view))
    for head in given:
        if not isinstance(head, tuple | list) or tuple(head) not in known:
            expected = f"layers 0-{view.n_layers - 1}, heads 0-{view.n_heads - 1}"
            raise BadOption("heads", head, f"pairs (layer, head): {expected}")
    return sorted({(int(layer), int(head)) for layer, head in given})


def absent(model: VisionModel) -> Tensor:
    """[L, H], true where a block has no such head."""
    need_heads(model)
    heads = torch.tensor([block.heads for block in model.blocks])
    return torch.arange(model.n_heads) >= heads[:, None]


def over_images(
    run: Callable[[int, int], Tensor], model: VisionModel, images: Tensor, *, holds: int
) -> Tensor:
    """Calls `run(start, stop)` in chunks of images that fit in memory. `holds` is the memory of a
    run relative to a plain forward pass."""
    each = model.forward_bytes(model.check(images)) * holds
    return run_in_chunks(run, len(images), each, images.device, what="images")


@selector("random", cost="none", needs="nothing")
def random_heads(model: VisionModel, data: LabelledImages, *, seed: int = 0) -> HeadScores:
    """Random scores: the control for all selectors."""
    missing, generator = absent(model), torch.Generator().manual_seed(seed)
    value = torch.rand(missing.shape, generator=generator, dtype=torch.float64) + 1e-9
    return HeadScores(value.masked_fill(missing, torch.nan), protocol={"seed": seed})


def random_sets(model: VisionModel, k: int, *, draws: int = 20, seed: int = 0) -> list[list[Head]]:
    """`draws` independent sets of `k` heads."""
    none, first = LabelledImages(torch.empty(0, 3, 1, 1)), seed * 1_000_003
    return [sorted(random_heads(model, none, seed=first + i).top(k)) for i in range(draws)]


@dataclass(frozen=True, eq=False)
class Outcome:
    """Metrics of a model without `heads`, by name; metrics that the data does not allow are
    absent."""

    heads: list[Head]
    numbers: dict[str, float]


@in_eval_mode
@torch.no_grad()
def logits_without(model: ImageModel, images: Tensor, sets: Sequence[Sequence[Head]]) -> Tensor:
    """Logits [S, N, C] of images [N, 3, H, W] without each set of heads. If all sets are
    empty, the model may be of any kind."""
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
    progress: Advance = no_advance,
) -> list[Outcome]:
    """Measure the model without each set of heads.

    The erased images are the same for all sets, so the numbers are paired.

    Args:
        model: A vision transformer.
        data: Images, with masks for fills.
        sets: Sets of heads.
        fills: FIG and BIG are measured with each of these ("swap" for exact counterfactuals).
        progress: Called with the number of images that are finished.
    """
    erased = [Erased(model, data, fill) for fill in fills]
    parts = list[tuple[Tensor, ...]]()
    for start in range(0, len(data), TOGETHER):
        rows = slice(start, start + TOGETHER)
        versions = [data.images[rows]]
        for each in erased:
            versions += each.versions(rows)
        if data.other_background is not None:  # its prediction may flip
            versions.append(data.other_background[rows])
        logits = logits_without(model, torch.cat(versions), sets)
        logits = logits.unflatten(1, (len(versions), -1)).cpu()  # [S, V, b, C]
        log_p, predicted = log_probs(logits), logits.argmax(dim=-1)
        moved = jensen_shannon(log_p[:, :1], log_p[:, 1:]).double()
        parts.append((logits[:, 0], predicted[:, 0] != predicted[:, -1], moved.mT))
        progress(len(versions[0]))
    logits, flipped, moved = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    measured = []
    for place, heads in enumerate(sets):
        numbers = dict[str, float]()
        if data.labels is not None:
            own, labels = logits[place], data.labels.cpu()
            correct = own.argmax(dim=1) == labels
            numbers["accuracy"] = float(correct.double().mean())
            if (groups := data.by_group(correct)) is not None:
                numbers["worst group"] = groups.worst
                numbers["mean of groups"] = groups.unweighted_average
            numbers["NLL"] = float(nll(own, labels).mean())
            numbers["ECE"] = calibration(own, labels).error
        if data.other_background is not None:
            numbers["flips"] = float(flipped[place].double().mean())
        for i, each in enumerate(erased):
            big, fig = moved[place, :, 2 * i : 2 * i + 2].unbind(1)
            gains = Gains(fig, big, 0.0)
            values = (float(fig.mean()), float(big.mean()), gains.bir_ratio_of_means)
            names = (f"{name}, {each.name}" for name in ("FIG", "BIG", "BIR"))
            numbers |= zip(names, values, strict=True)
        measured.append(Outcome(list(heads), numbers))
    return measured


@dataclass(frozen=True, eq=False)
class Curve:
    """Outcomes against the number of heads that may be removed: by scores, and at random."""

    ks: list[int]
    chosen: list[Outcome]
    random: list[list[Outcome]]  # draws for each k

    def at(self, k: int) -> Outcome:
        """The outcome of the chosen heads if at most `k` are removed."""
        return self.chosen[self.ks.index(k)]

    def band(self, name: str) -> list[tuple[float, float]]:
        """Mean and standard deviation over draws of a number, for each k."""
        rows = [[draw.numbers[name] for draw in draws] for draws in self.random]  # [ks][draws]
        return [(fmean(row), pstdev(row)) for row in rows]


@in_eval_mode
def curve(
    model: VisionModel,
    data: LabelledImages,
    scores: HeadScores,
    ks: Sequence[int],
    fills: Sequence[Fill] = (),
    *,
    draws: int = DRAWS,
    seed: int = 0,
    **options: Any,
) -> Curve:
    """Remove the best k heads for every k, and for comparison `draws` random sets of the same size
    (heads with scores of 0 or less are not removed). `options` are those of `outcomes`."""
    sets = [scores.top(k) for k in ks]
    for heads in sets[:]:
        sets += random_sets(model, len(heads), draws=draws, seed=seed)
    measured = outcomes(model, data, sets, fills, **options)
    random = [measured[len(ks) + i * draws :][:draws] for i in range(len(ks))]
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
        sampling: Which correct images: `share` (0.4), `cap` (512; the paper: None), `stratified`.
        seed: Draws the sample, and what the selector draws.
        progress: Shows what is done (`no_progress` shows nothing).

    Returns:
        The scores; `data` has the images that they were made from, with the masks in use, and
        `protocol["scored"]` the settings.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:train", limit=16)
        >>> len(sc.background.score_heads(model, data, selector="taylor").top(2))
        2
    """
    view, entry = need_heads(model), SELECTORS.get(selector)
    keywords = dict(options or {})
    check_options(selector, entry.run, keywords, leave_out=("fill", "seed", "progress"))
    data = as_data(data)
    scorer = need_heads(model_for(view, data))
    chosen = images_of(scorer, data, progress)
    if entry.needs != "pairs":  # pairs also use wrong predictions
        chosen = correct_images(scorer, chosen, seed=seed, **(sampling or {}))
    fills, masked = "fill" in entry.options, "masks" in entry.needs
    if masked and not (fills and fill == "swap"):
        chosen = masked_images(scorer, chosen, masks, progress)
    record = {"data": chosen.name, "images": len(chosen), "by": selector, **keywords}
    if fills:
        keywords["fill"], record["background"] = fill, Erased(scorer, chosen, fill).name
    elif chosen.masks is not None:
        record["masks"] = chosen.masks.source
    keywords |= {"seed": seed} if "seed" in entry.options else {}
    with progress("scoring heads", len(chosen) * len(all_heads(scorer))) as advance:
        if "progress" in keyword_options(entry.run):
            keywords["progress"] = advance
        scores = select(selector, scorer, chosen, **keywords)
    about = scores.protocol
    record |= {"guard": about["guard"]} if "guard" in entry.options else {}
    return replace(scores, data=chosen, protocol={**about, "scored": record})


def masked_images(
    model: ImageModel,
    data: LabelledImages,
    source: MaskSource,
    progress: Progress = no_progress,
    **options: Any,
) -> LabelledImages:
    """Images with object masks in use; `options` are those of `object_masks`."""
    if source is None and data.masks is not None:
        return data
    complete = data.truth is not None and bool(data.truth.known.all())
    if complete and source in (None, "given"):
        return data.with_masks(data.truth)
    if isinstance(source, str) and source == "given" and data.truth is not None:
        expected = "data with a mask for every image, or masks='discovered'"
        raise BadOption("masks", "given", f"{expected}: {data.name} lacks some")
    from seecause.background.masks import object_masks

    source = "discovered" if source is None else source
    with progress("finding objects", len(data)) as advance:
        return data.with_masks(object_masks(model, data, source, progress=advance, **options))


@dataclass(frozen=True, eq=False, repr=False)
class PruneResult:
    """Removed heads, and the effect of their removal on other images."""

    model: VisionModel  # whole
    heads: list[Head]
    scores: HeadScores
    test: LabelledImages
    curve: Curve  # metrics against the number of removed heads, with random sets

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
        assert self.scores.data is not None
        return tuple(dict.fromkeys((*self.scores.data.skipped, *self.test.skipped)))

    def changes(self) -> dict[str, tuple[float, float]]:
        """Numbers by name, before and after."""
        after = self.after.numbers
        return {name: (value, after[name]) for name, value in self.before.numbers.items()}

    @property
    def warning(self) -> str:
        """What is worse on the test images without the heads; empty if nothing is."""
        worse = []
        for name, (before, after) in self.changes().items():
            better_low = name == "flips" or name.startswith("BIR")
            known = better_low or name in ("accuracy", "worst group")
            if known and (after - before if better_low else before - after) > WORSE:
                worse.append(f"{name} {before:.3f} -> {after:.3f}")
        return f"The model is worse without these heads: {', '.join(worse)}." if worse else ""

    @property
    def note(self) -> str:
        """A paragraph for the README of the exported model."""
        scored = self.scores.protocol["scored"]
        chosen = (
            f"Heads were chosen by {scored['by']} on {scored['images']} images of {scored['data']}:"
            f" the {len(self.heads)} highest scores."
        )
        return f"{chosen} {self.warning}".strip()

    def export(self, folder: str | Path) -> Path:
        """Write the model without these heads."""
        from seecause.background._export import export

        return export(self.model, self.heads, folder, note=self.note)


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
    draws: Count = DRAWS,
    seed: int = 0,
    progress: Progress = no_progress,
    **options: Any,
) -> PruneResult:
    """Choose heads on correctly predicted images of `train`, remove them, and measure the
    effect on `test`, also for `draws` random sets of the same size.

    Args:
        model: A vision transformer, or a vision-language model that is asked for classes.
        train: Data to score heads on.
        test: Other data, to measure on.
        top: Heads to remove at most, a count or a share (the paper: 16); heads with scores of 0 or
            less stay (the paper: they count too).
        selector: A name of `sc.background.selectors()`.
        masks: A source of `object_masks`, as `score_heads` takes it.
        fill: What replaces the background; "swap" takes the data's other versions.
        draws: Random sets for the band beside the curve.
        seed: Draws the sample and the random sets.
        progress: Shows what is done.
        **options: `options` of the selector and `sampling`, as `score_heads` takes them.

    Returns:
        The removed `heads`, outcomes `before` and `after`, their `curve`, and `export`.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> train = sc.data.open_data("critters:certified:train", limit=8)
        >>> test = sc.data.open_data("critters:certified:test", limit=8)
        >>> result = sc.background.prune_and_test(model, train, test, top=2, draws=2)
        >>> len(result.heads), result.curve.ks
        (2, [0, 1, 2, 4])
    """
    view = need_heads(model)
    total = len(all_heads(view))
    most = round(top * total) if isinstance(top, float) else top
    if not 1 <= most <= total:
        expected = f"a count from 1 to {total}, or a share of them from {1 / total:.2g} to 1.0"
        raise BadOption("top", top, expected)
    train, test = as_data(train), as_data(test)
    asked: dict[str, Any] = {"masks": masks, "fill": fill, "seed": seed, "progress": progress}
    scores = score_heads(view, train, selector=selector, **asked, **options)
    heads = scores.top(most)
    judge = need_heads(model_for(view, test))
    data, fills = images_of(judge, test, progress), list[Fill]()
    needs = SELECTORS.get(selector).needs
    there = data.masks is not None or (data.truth is not None and bool(data.truth.known.all()))
    # masks are searched only if they were asked for, or heads are scored by them
    if needs != "pairs" and (there or masks is not None or "masks" in needs):
        own = None if isinstance(masks, Tensor | Masks) else masks  # masks are of their images
        data = masked_images(judge, data, own, progress)
        fills.append("grey" if fill == "swap" else fill)
    if data.swaps:
        fills.append("swap")
    # a quarter of the heads, half, all and twice as many, where there are
    known = int(scores.value.isfinite().sum())
    quarters = [len(heads) * part // 4 for part in (1, 2, 4, 8)]
    ks = sorted({0, len(heads), *(max(1, part) for part in quarters if part <= known)})
    with progress("measuring", len(data)) as advance:
        removals = curve(judge, data, scores, ks, fills, draws=draws, seed=seed, progress=advance)
    return PruneResult(view, heads, scores, data, removals)


@checked
@in_eval_mode
@torch.no_grad()
def divprune(model: VisionModel, images: Tensor, *, keep: Share = 0.25) -> tuple[Tensor, Tensor]:
    """Predict from the patch tokens that differ most.

    Args:
        model: A vision transformer.
        images: [B, 3, H, W], normalised.
        keep: Share of patch tokens that stay.

    Returns:
        Logits [B, C] and the tokens that stay, [B, patches] bool.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> logits, kept = sc.background.divprune(model, model.zeros((96, 96)), keep=0.25)
        >>> logits.shape, int(kept.sum())
        (torch.Size([1, 8]), 36)
    """
    need_heads(model, "divprune")
    images = images.to(model.device, model.dtype)
    layout = model.check(images)
    if model.architecture != "transformer":
        reason = "this model's tokens are read by a language model"
        raise NotDefined("divprune", reason, "Use a vision transformer")
    count = max(1, round(keep * layout.n_patches))

    def run_chunk(start: int, stop: int) -> Tensor:
        at = model.at(images[start:stop])
        h = model.embed(images[start:stop])
        tokens = most_diverse(h[:, layout.patches], count)
        logits = kept_logits(model, h, tokens, at)
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
