"""Find shortcuts that nobody named: which kinds of patches turn images into which class?

    evidence   attribution maps of each image's own prediction, z-scored; its highest patches
    tokens     tokens of these patches at several layers, less the mean token of their position
    kinds      clusters of tokens, each within one predicted class C

1. A kind is pasted in two ways: all patches of it that an image has (a background), and the image's
   most typical patch with those around it (a mark is small, and its tokens cluster by its parts).
2. Patches are pasted, in their own places, into images with another prediction. The share
   that is then predicted as C is measured. As a control, patches of images that are not predicted
   as C either are pasted in the same places. Objects are spared where masks are known; otherwise a
   paste covers at most a quarter of an image: whole images would turn anything.
3. A few trials screen the kinds by how far they raise the log odds of C more than their control: a
   weak cue changes log odds before it flips a prediction. New trials measure the rest. Findings are
   ranked by flips less control. Kinds that are mostly the same patches count as one.

Clusters may be parts of the object. If masks are known, patches on and off the object are clustered
separately, and half of the candidates are reserved for patches off the object; otherwise patches of
the object would fill the top of the ranking. Pasting or covering a cluster gives pairs of images
that should get the same prediction, which `repair` needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause._random import bits
from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find
from seecause.background.images import (
    Advance,
    LabelledImages,
    Masks,
    PerImage,
    Progress,
    images_of,
    logits_of,
    no_progress,
    on_pixels,
)
from seecause.data.dataset import Dataset
from seecause.engine.chunks import run_in_chunks
from seecause.engine.trace import record
from seecause.errors import BadOption, NotDefined
from seecause.metrics.statistics import bootstrap_interval
from seecause.models.base import ImageModel, in_eval_mode, protocol
from seecause.models.view import VisionModel
from seecause.options import Count, Limit, checked
from seecause.results import Result

SklearnSeed = Annotated[int, Limit(lambda s: 0 <= s < 2**32, "a whole number from 0 to 2^32 - 1")]
Extent = Literal["all", "spot"]
MAPPED = 32  # images per batch of attribution maps
PASTED = 96  # pastes per batch of predictions
QUARTER = 0.25  # maximum share of an image that a paste covers, if there are no object masks
SAME = 0.5  # clusters whose patches overlap (IoU) by more than this are merged
TOUCHING = 0.25  # clusters that share more than this fraction of the smaller one are merged
MOSTLY = 0.5  # a cluster with more than this share of patches on the object is part of it
TRIED = 3  # measured clusters per requested finding
SCREENED = 24  # screened clusters per requested finding
SCREEN = 6  # trials of the screening; results do not count them
FEWEST = 3  # minimum number of images that show a cluster
DRAWS = 4  # candidate images per trial; the one whose object is covered least is used
AROUND = 1  # width in patches of the border that is pasted with a spot
_SOURCE, _RECIPIENT, _CONTROL = 11, 12, 13  # stream identifiers for the random hash


@dataclass(frozen=True, eq=False)
class Trials(PerImage):
    """n pastes of `sets` from images `sources` into images `recipients`; the control of each pastes
    the same patches of `controls`."""

    sources: Tensor  # [n]
    recipients: Tensor  # [n]
    controls: Tensor  # [n]
    sets: Tensor  # [n, gh, gw] bool
    flipped: Any = None  # [n] bool: predicted as C with the paste; None until measured
    control_flipped: Any = None  # [n] bool: predicted as C with the control

    def __len__(self) -> int:
        return len(self.sources)

    def paste(self, images: Tensor, lenders: Tensor, receivers: Tensor) -> Tensor:
        """Images [N, 3, H, W] at `receivers` [n] with the patches of those at `lenders` [n]."""
        device, size = images.device, (images.shape[-2], images.shape[-1])
        shown = on_pixels(self.sets.to(device)[:, None], size)
        return torch.where(shown, images[lenders.to(device)], images[receivers.to(device)])


def _join(parts: Sequence[Trials]) -> Trials:
    """Trials without results, concatenated."""
    names = ("sources", "recipients", "controls", "sets")
    return Trials(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True, eq=False)
class Finding:
    """A kind of patch: a cluster of tokens within one predicted class, how it is pasted, and once
    its trials are measured, what it does to images with another prediction."""

    predicted: int  # C
    layer: int  # whose tokens were clustered
    extent: Extent  # all patches of it that an image has are pasted, or a spot
    tokens: Tensor  # [m, 2] image and patch of its examples, the most typical first
    sets: Tensor  # [n, N] bool: patches that each image lends
    trials: Trials
    evidence: float  # mean z-score of its examples
    on_object: float | None  # share of its patches on the object, where masks are known
    name: str = ""  # of the class

    @property
    def effects(self) -> Tensor:
        """[n] float64: of each trial, whether the paste flips less whether the control does."""
        return self.trials.flipped.double() - self.trials.control_flipped.double()

    @property
    def flips(self) -> float:
        """Share of images that are predicted as C with the kind pasted in."""
        return float(self.trials.flipped.double().mean())

    @property
    def effect(self) -> float:
        return float(self.effects.mean())

    @property
    def control(self) -> float:
        """Share of images that are predicted as C with the control pasted in."""
        return float(self.trials.control_flipped.double().mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the effect, by the bootstrap over trials."""
        return bootstrap_interval(self.effects)

    @property
    def patches(self) -> float:
        """Mean number of patches of a paste."""
        return float(self.trials.sets.flatten(1).sum(dim=1).double().mean())

    @property
    def is_object(self) -> bool:
        """Whether it is part of the object, by object masks."""
        return self.on_object is not None and self.on_object >= MOSTLY

    def sentence(self) -> str:
        low, high = self.interval
        return (
            f"{self.patches:.0f} patches of this kind turn {self.flips:.0%} of other images into"
            f" {self.name!r}; other patches in the same places {self.control:.0%}"
            f" (difference {self.effect:+.0%}, 95 %: {low:+.0%} to {high:+.0%})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Discovery(Result):
    """Kinds of patches that turn images into a class, the strongest first."""

    model: ImageModel
    data: LabelledImages
    predictions: Tensor  # [n] predicted classes
    findings: tuple[Finding, ...]
    protocol: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Discovery({len(self.findings)} kinds in {len(self.data)} images)"

    def numbers(self) -> dict[str, float]:
        """Number of findings, and the largest effect."""
        largest = {"largest effect": self.findings[0].effect} if self.findings else {}
        return {"findings": len(self.findings), **largest}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each finding."""
        rows = []
        for rank, finding in enumerate(self.findings, 1):
            low, high = finding.interval
            rows.append(
                {
                    "rank": rank, "class": finding.name, "flips": finding.flips,
                    "control": finding.control, "low": low, "high": high,
                    "patches": finding.patches, "extent": finding.extent,
                    "layer": finding.layer, "on the object": finding.on_object,
                    "evidence": finding.evidence, "trials": len(finding.trials),
                }
            )  # fmt: skip
        return rows

    def pairs(self, places: Sequence[int] | None = None) -> LabelledImages:
        """Findings as pairs that should get the same prediction.

        Args:
            places: Indices of the findings; all of them by default.

        Returns:
            Images whose `other_background` has the kind pasted in; and images predicted as C in
            whose `other_background` other patches cover it. Ids end in ~NUMBER, so that a repair
            keeps pairs of one image together.
        """
        chosen = self.findings if places is None else [self.findings[place] for place in places]
        if not chosen:
            raise BadOption("places", places, "the index of at least one finding")
        trials, images = [finding.trials for finding in chosen], self.data.images
        others = [part.paste(images, part.sources, part.recipients) for part in trials]
        others += [part.paste(images, part.controls, part.sources) for part in trials]
        rows = torch.cat([part.recipients for part in trials] + [part.sources for part in trials])
        labels = self.predictions if self.data.labels is None else self.data.labels
        here = rows.to(images.device)
        return LabelledImages(
            images[here],
            labels.to(images.device)[here],
            name=f"discovered in {self.data.name}",
            ids=tuple(f"{self.data.ids[row]}~{n}" for n, row in enumerate(rows.tolist())),
            other_background=torch.cat(others),
        )


@checked
@in_eval_mode
@torch.no_grad()
def discover(
    model: ImageModel,
    data: Dataset | LabelledImages | str,
    *,
    method: str = "caap+mosaic",
    layers: Sequence[int] | None = None,
    kinds: Count = 24,
    top: Count = 8,
    trials: Count = 32,
    most: Count = 12,
    seed: SklearnSeed = 0,
    progress: Progress = no_progress,
    **options: Any,
) -> Discovery:
    """Find kinds of patches that turn images into a class.

    Args:
        model: A vision transformer classifier.
        data: Images with different predictions, or the name of a dataset (`"folder:PATH"`).
        method: Attribution method of the maps, which explain logits.
        layers: Layers whose tokens are clustered, and from which maps start if the method can; by
            default the first, and those at a quarter, half and three quarters of the depth.
        kinds: Clusters at each layer, on objects and off them if the data has masks.
        top: Highest patches of each image that are clustered.
        trials: Pastes of each kind.
        most: Largest number of findings.
        seed: Of clusters and pastes.
        progress: Shows progress.
        **options: Options of the method.

    Returns:
        A `Discovery` with `findings` and `pairs()`.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=8)
        >>> findings = sc.discover(model, data, kinds=4, trials=2, layers=[2]).findings
        >>> all(0 <= finding.flips <= 1 for finding in findings)
        True
    """
    if not isinstance(model, VisionModel):
        raise NotDefined("discover", f"{model.family} has no tokens", "Use a vision transformer")
    if layers is None:
        layers = [1, *(round(model.n_layers * quarter / 4) for quarter in (1, 2, 3))]
    layers = tuple(dict.fromkeys(layers))
    if not layers or not all(0 <= layer <= model.n_layers for layer in layers):
        raise BadOption("layers", list(layers), f"layers from 0 to {model.n_layers}")
    options = {"score": "logit", **options}
    known = find(method, model.architecture)
    if "score" not in known.options:
        del options["score"]
    known.check(options)
    data = images_of(model, data, progress)
    predictions = logits_of(model, data.images).argmax(dim=1).cpu()
    if len(predictions.unique()) < 2:
        got = f"{len(data)} images, all predicted {model.class_name(int(predictions[0]))!r}"
        raise BadOption("data", got, "images with different predictions")
    parts = []
    with progress("looking for evidence", len(data)) as advance:
        for images in data.images.split(MAPPED):
            parts.append(evidence(model, images, method, layers, options).cpu())
            advance(len(images))
    grid, share = model.layout.grid, QUARTER if data.truth is None else 1.0
    search = Search(
        torch.cat(parts),
        predictions,
        grid,
        *(None, None) if data.truth is None else object_patches(data.truth, grid),
        kinds=kinds,
        top=top,
        trials=trials,
        most=max(1, round(share * parts[0].shape[1])),
        seed=seed,
    )
    candidates = list[Finding]()
    for layer in layers:
        candidates += search.kinds_at(tokens_at(model, data.images, layer), layer)
    candidates = _spread_over(_in_turn(candidates), SCREENED * most)
    likely = _screened(model, data.images, candidates, TRIED * most, progress)
    findings = _measured(model, data.images, likely, progress)
    options |= {"kinds": kinds, "top": top, "trials": trials, "seed": seed}
    about = {"method": f"discover ({method})", "options": {**options, "layers": list(layers)}}
    about |= protocol(model, data.images)
    return Discovery(model, data, predictions, _ranked(findings, most), about)


def evidence(
    model: VisionModel, images: Tensor, method: str, layers: Sequence[int], options: dict[str, Any]
) -> Tensor:
    """Mean over starting layers of z-scored maps of each image's own prediction, [b, N]."""
    starts = list[int | None]([None])
    if "layers" in find(method, model.architecture).options and "layers" not in options:
        starts += [layer for layer in layers if 0 < layer < model.n_layers]
    total = torch.zeros(())
    for start in starts:
        own = options if start is None else {**options, "layers": (start, None)}
        maps = attribute(model, images, method=method, **own).maps.flatten(1).double()
        spread = maps.std(dim=1, keepdim=True).clamp_min(1e-12)
        total = total.to(maps) + (maps - maps.mean(dim=1, keepdim=True)) / spread
    return total / len(starts)


def tokens_at(model: VisionModel, images: Tensor, layer: int) -> Tensor:
    """Patch tokens of every image at one layer, [n, N, D] float32 on the CPU, less the mean token
    of their position and of unit length."""
    layout = model.check(images)

    def run_chunk(a: int, b: int) -> Tensor:
        until = None if layer == model.n_layers else layer
        states = record(model, images[a:b], states={layer}, until=until).states[layer]
        return states[:, layout.patches].float().cpu()

    each = model.forward_bytes(layout)
    tokens = run_in_chunks(run_chunk, len(images), each, images.device, what="images")
    tokens -= tokens.mean(dim=0)
    return F.normalize(tokens, dim=-1)


def object_patches(masks: Masks, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Patches [n, N] bool that show some of the object, and those that it covers by half. The first
    separates clusters on objects from others. A background that is pasted whole includes patches
    that are not in the second; otherwise the old background would be visible around the outline."""
    shown = F.adaptive_max_pool2d(masks.hard.float()[:, None], grid).flatten(1) > 0
    return shown.cpu(), masks.on_patches(grid).flatten(1).cpu()


@dataclass(frozen=True, eq=False)
class Search:
    """Images with their evidence, and the clustering and testing of patches."""

    scores: Tensor  # [n, N]
    predictions: Tensor  # [n]
    grid: tuple[int, int]
    shown: Tensor | None  # [n, N], of `object_patches`, where masks are known
    covered: Tensor | None
    kinds: int
    top: int
    trials: int
    most: int  # patches of a paste
    seed: int

    def kinds_at(self, tokens: Tensor, layer: int) -> Iterator[Finding]:
        """Kinds of high-evidence tokens [n, N, D] of one layer: clusters, each within one predicted
        class, and where objects are known, on them or off them."""
        every = torch.ones_like(self.scores, dtype=torch.bool)
        sides, shown, covered = [(every, every)], self.shown, self.covered
        if shown is not None and covered is not None:
            sides = [(shown, shown), (~shown, ~covered)]
        for side, whole in sides:
            if not bool(side.any()):
                continue
            for rows, sets, extent, predicted in self.lent(
                *self.clusters(tokens, side), side, whole
            ):
                trials = self.drawn(sets, predicted, covered if extent == "all" else shown)
                evidence = float(self.scores[rows[:, 0], rows[:, 1]].mean())
                on_object = None
                if shown is not None:
                    on_object = float((sets & shown).sum() / sets.sum())
                    if extent == "spot":  # its middle counts
                        on_object = float(shown[rows[:, 0], rows[:, 1]].double().mean())
                yield Finding(predicted, layer, extent, rows, sets, trials, evidence, on_object)

    def clusters(self, tokens: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        """The highest patches of each image on one side [n, N] as (image, patch) [m, 2], and the
        distance of every patch from each cluster of these, [n, N, kinds]."""
        from sklearn.cluster import KMeans

        scores = self.scores.masked_fill(~side, -torch.inf)
        best = scores.topk(min(self.top, scores.shape[1]), dim=1)
        image = torch.arange(len(scores))[:, None].expand_as(best.indices)
        there = best.values > -torch.inf
        rows = torch.stack([image[there], best.indices[there]], dim=1)
        chosen = tokens[rows[:, 0], rows[:, 1]].numpy()
        count = min(self.kinds, len(chosen))
        clusters = KMeans(count, n_init="auto", random_state=self.seed).fit(chosen)
        flat = torch.from_numpy(clusters.transform(tokens.flatten(0, 1).numpy()))
        return rows, flat.unflatten(0, tokens.shape[:2])

    def lent(
        self, best: Tensor, distance: Tensor, side: Tensor, whole: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Extent, int]]:
        """Examples of each kind [m, 2], the patches [n, N] that images lend of it, in which way,
        and for which predicted class. Patches of a kind that is lent whole may be anywhere in
        `whole` [n, N], those of a spot in `side` [n, N]."""
        nearest = distance.argmin(dim=2)
        for kind in range(distance.shape[2]):
            far = distance[..., kind]
            rank = far.masked_fill(~whole, torch.inf).argsort(dim=1).argsort(dim=1)
            typical = (nearest == kind) & whole & (rank < self.most)  # [n, N]
            own = best[nearest[best[:, 0], best[:, 1]] == kind]
            for predicted in self.predictions.unique().tolist():
                rows = own[self.predictions[own[:, 0]] == predicted]
                if len(rows[:, 0].unique()) < FEWEST:
                    continue
                rows = rows[far[rows[:, 0], rows[:, 1]].argsort(stable=True)]
                every = typical & (self.predictions == predicted)[:, None]
                spots = self.spots(rows) & side
                if bool(every.any()):
                    yield rows, every, "all", predicted
                if bool(spots.any()):
                    yield rows, spots, "spot", predicted

    def spots(self, rows: Tensor) -> Tensor:
        """[n, N] bool: the most typical example of each image and the patches around it; none if
        that is more than a paste may have."""
        sets, side = torch.zeros(self.scores.shape, dtype=torch.bool), 1 + 2 * AROUND
        if self.most < side**2:
            return sets
        by_image = rows[rows[:, 0].argsort(stable=True)]
        middle = by_image[by_image[:, 0].diff(prepend=torch.tensor([-1])) != 0]
        sets[middle[:, 0], middle[:, 1]] = True
        planes = sets.float().unflatten(1, self.grid)[:, None]
        return F.max_pool2d(planes, side, stride=1, padding=AROUND)[:, 0].flatten(1) > 0

    def drawn(self, sets: Tensor, predicted: int, spared: Tensor | None) -> Trials:
        """Source and recipient images for `sets` [n, N], by a hash of (seed, class, number of the
        trial). What is `spared` [n, N] of a recipient is not covered."""
        number = torch.arange(SCREEN + self.trials) + (predicted << 32)
        lenders = sets.any(dim=1).nonzero()[:, 0]
        others = (self.predictions != predicted).nonzero()[:, 0]
        source = lenders[bits(number, 4 * self.seed + _SOURCE) % len(lenders)]
        draws = (number << 2)[:, None] + torch.arange(DRAWS)  # [m, DRAWS]
        recipients = others[bits(draws, 4 * self.seed + _RECIPIENT) % len(others)]
        control = others[bits(number, 4 * self.seed + _CONTROL) % len(others)]
        chosen, recipient = sets[source], recipients[:, 0]
        if spared is not None:
            left = (chosen[:, None] & ~spared[recipients]).sum(dim=2)  # [m, DRAWS]
            recipient = recipients.gather(1, left.argmax(dim=1, keepdim=True))[:, 0]
            chosen = chosen & ~spared[recipient]
        return Trials(source, recipient, control, chosen.unflatten(1, self.grid))


def _in_turn(kinds: Sequence[Finding]) -> list[Finding]:
    """Clusters by evidence, in turn for each class and for patches on and off the object, so that
    no class and no object fills the top of the list."""
    turns, dealt = Counter[tuple[int, bool]](), list[tuple[int, Finding]]()
    for kind in sorted(kinds, key=lambda kind: -kind.evidence):
        group = (kind.predicted, (kind.on_object or 0.0) < MOSTLY)
        dealt.append((turns[group], kind))
        turns[group] += 1
    return [kind for _, kind in sorted(dealt, key=lambda turn: turn[0])]


def _spread_over(kinds: Sequence[Finding], count: int) -> list[Finding]:
    """The first `count` clusters, half of them off the object."""
    off = [place for place, kind in enumerate(kinds) if (kind.on_object or 0.0) < MOSTLY]
    places = dict.fromkeys([*off[: count // 2], *range(len(kinds))])
    return [kinds[place] for place in list(places)[:count]]


def _screened(
    model: VisionModel, images: Tensor, kinds: Sequence[Finding], count: int, progress: Progress
) -> list[Finding]:
    """The `count` kinds that raise the log odds of their class most in the first `SCREEN` trials,
    with the trials that are left."""
    if not kinds:
        return []
    trials = _join([kind.trials.take(torch.arange(SCREEN)) for kind in kinds])
    with progress("screening", len(trials)) as advance:
        with_kind, control = _pasted_logits(model, images, trials, advance)
    predictions = torch.tensor([kind.predicted for kind in kinds]).repeat_interleave(SCREEN)
    gain = _log_odds(model, with_kind, predictions) - _log_odds(model, control, predictions)
    gains = gain.unflatten(0, (-1, SCREEN)).mean(dim=1).tolist()
    order = sorted(range(len(kinds)), key=lambda place: -gains[place])
    likely = _spread_over([kinds[place] for place in order if gains[place] > 0], count)
    rest = torch.arange(SCREEN, len(kinds[0].trials))
    return [replace(kind, trials=kind.trials.take(rest)) for kind in likely]


def _measured(
    model: VisionModel, images: Tensor, kinds: Sequence[Finding], progress: Progress
) -> list[Finding]:
    """Kinds with the results of their trials."""
    if not kinds:
        return []
    trials, each = _join([kind.trials for kind in kinds]), len(kinds[0].trials)
    with progress("pasting", len(trials)) as advance:
        logits = _pasted_logits(model, images, trials, advance)
    predicted = [part.argmax(dim=1).split(each) for part in logits]
    return [
        replace(
            kind,
            name=model.class_name(kind.predicted),
            trials=replace(
                kind.trials,
                flipped=with_kind == kind.predicted,
                control_flipped=control == kind.predicted,
            ),
        )
        for kind, with_kind, control in zip(kinds, *predicted, strict=True)
    ]


def _pasted_logits(
    model: VisionModel, images: Tensor, trials: Trials, advance: Advance
) -> tuple[Tensor, Tensor]:
    """Logits [n, C] of the pastes, and of their controls."""
    parts = []
    for rows in torch.arange(len(trials)).split(PASTED):
        some = trials.take(rows)
        both = [some.paste(images, of, some.recipients) for of in (some.sources, some.controls)]
        parts.append(logits_of(model, torch.cat(both)).cpu().split(len(some)))
        advance(len(some))
    with_kind, control = zip(*parts, strict=True)
    return torch.cat(with_kind), torch.cat(control)


def _log_odds(model: VisionModel, logits: Tensor, predictions: Tensor) -> Tensor:
    """[n] float64: of each class `predictions` [n] against all others, from logits [n, C]."""
    logits, predictions = logits.double(), predictions[:, None]
    own = logits.gather(1, predictions)[:, 0]
    if model.sigmoid:
        return own
    return own - logits.scatter(1, predictions, -torch.inf).logsumexp(dim=1)


def _ranked(tried: Sequence[Finding], most: int) -> tuple[Finding, ...]:
    """The best findings whose effect is above chance, without those that are mostly the same
    patches as a better one."""
    best = list[Finding]()
    for finding in sorted(tried, key=lambda finding: -finding.effect):
        sure = finding.effect > 0 and finding.interval[0] > 0
        if sure and not any(_is_same(finding, other) for other in best):
            best.append(finding)
    return tuple(best[:most])


def _is_same(first: Finding, second: Finding) -> bool:
    """Whether two kinds are mostly the same patches: of all that they lend, or, if they are pasted
    alike, where an image lends both."""
    if first.predicted != second.predicted:
        return False
    mine, theirs = first.sets, second.sets
    both = mine & theirs
    if bool(both.sum() > SAME * (mine | theirs).sum()):
        return True
    shared = mine.any(dim=1) & theirs.any(dim=1)
    if first.extent != second.extent or int(shared.sum()) < FEWEST:
        return False
    smaller = torch.minimum(mine[shared].sum(dim=1), theirs[shared].sum(dim=1)).sum()
    return bool(both.sum() > TOUCHING * smaller)
