"""Kinds of patches that answers hang on: candidates that `discover` puts to the trial.

    evidence   maps of every picture's own answer, z-scored; the highest patches of each picture
    tokens     of these patches, at several layers, less the mean token of their place: what a
               patch shows, not where it is
    kinds      clusters of tokens, each within one answer C

Where objects are known, patches that show some of them and patches that show none are two worlds,
each with highest patches and clusters of its own: an object is evidence by right, and would leave
a mark beside it no place among the highest.

A kind is pasted in two ways: all that a picture has of it (a background is many patches), and the
patch of a picture that is most like it with those around it (a mark is few, and tokens cluster by
its parts).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause._random import bits
from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find
from seecause.background.images import Masks
from seecause.background.transplant import on_pixels
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.trace import record
from seecause.models.view import VisionModel

Extent = Literal["all", "spot"]
FEWEST = 3  # pictures that show a kind
SCREEN = 6  # trials that sort out kinds, and are not counted afterwards
DRAWS = 4  # recipients of which the one whose object is covered least gets a paste
AROUND = 1  # patches around a spot that are pasted with it
_SOURCE, _RECIPIENT, _CONTROL = 11, 12, 13  # what a hash is for


@dataclass(frozen=True)
class KindPlan:
    """How kinds are sorted and tried."""

    kinds: int
    top: int
    trials: int
    most: int  # patches of a paste
    seed: int


@dataclass(frozen=True, eq=False)
class Trials:
    """n pastes: `sets` [n, gh, gw] (bool) of pictures `sources` into `recipients`; controls paste
    the same places of `controls`."""

    sources: Tensor  # [n]
    recipients: Tensor  # [n]
    controls: Tensor  # [n]
    sets: Tensor  # [n, gh, gw]
    flipped: Tensor | None = None  # [n] bool: answered C with the paste
    control_flipped: Tensor | None = None  # [n] bool: answered C with the control

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def covering(self) -> Trials:
        """The other way round: sources whose patches of the kind are covered by the controls'."""
        return Trials(self.controls, self.sources, self.recipients, self.sets)

    @property
    def pasting_controls(self) -> Trials:
        """The same places of the controls instead."""
        return Trials(self.controls, self.recipients, self.sources, self.sets)

    def take(self, rows: slice) -> Trials:
        """Some of those that were not made yet."""
        own = (self.sources, self.recipients, self.controls, self.sets)
        return Trials(*(values[rows] for values in own))


def join(parts: Sequence[Trials]) -> Trials:
    """Trials that were not made yet, one after the other."""
    names = ("sources", "recipients", "controls", "sets")
    return Trials(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True, eq=False)
class Kind:
    """A candidate: a cluster of tokens within one answer, and how it is pasted."""

    answer: int  # C, as a class of the model
    layer: int  # whose tokens told the kind
    extent: Extent  # all that a picture has of it is pasted, or a spot
    tokens: Tensor  # [m, 2] picture and patch of its examples, the most typical first
    sets: Tensor  # [n, N] bool: what pictures answered C lend
    trials: Trials
    evidence: float  # mean z-score of its examples in their maps
    on_object: float | None  # share of its patches on the object, where masks are known


def evidence_of(
    model: VisionModel, images: Tensor, method: str, layers: Sequence[int], options: dict[str, Any]
) -> Tensor:
    """Mean over starting layers of z-scored maps of each picture's own answer, [b, N]."""
    starts = [None]
    if "layers" in find(method, model.architecture).options and "layers" not in options:
        starts = [None, *((layer, None) for layer in layers if 0 < layer < model.n_layers)]
    total = torch.zeros(())
    for start in starts:
        own = options if start is None else {**options, "layers": start}
        maps = attribute(model, images, method=method, **own).maps.flatten(1).double()
        spread = maps.std(dim=1, keepdim=True).clamp_min(1e-12)
        total = total.to(maps) + (maps - maps.mean(dim=1, keepdim=True)) / spread
    return total / len(starts)


@torch.no_grad()
def evidence_piece(model: VisionModel, images: Tensor, **how: Any) -> Tensor:
    """`evidence_of` on the CPU."""
    return evidence_of(model, images.to(model.device), **how).cpu()


def tokens_at(model: VisionModel, images: Tensor, layer: int) -> Tensor:
    """Patch tokens of every picture at one layer, [n, N, D] float32 on the CPU, of unit length once
    the mean token of their place is taken away."""
    layout = model.check(images)

    def run_chunk(a: int, b: int) -> Tensor:
        until = None if layer == model.n_layers else layer
        states = record(model, images[a:b], states={layer}, until=until).states[layer]
        return states[:, layout.patches].float().cpu()

    size = fit(len(images), model.forward_bytes(layout), images.device)
    tokens = torch.cat(list(in_chunks(run_chunk, len(images), size, what="images")))
    tokens -= tokens.mean(dim=0)
    return F.normalize(tokens, dim=-1)


@dataclass(frozen=True, eq=False)
class ObjectPatches:
    """Patches that show some of the object, and those that it covers by half, [n, N] (bool). What
    is told apart is by the first; a background that is pasted whole reaches up to the second, for
    around the outline the old one would go on to speak."""

    shown: Tensor
    covered: Tensor


def object_patches(truth: Masks, grid: tuple[int, int]) -> ObjectPatches:
    """Of the masks that come with the data."""
    shown = F.adaptive_max_pool2d(truth.hard.float()[:, None], grid).flatten(1) > 0
    return ObjectPatches(shown.cpu(), truth.on_patches(grid).flatten(1).cpu())


def kinds_at(
    tokens: Tensor,
    scores: Tensor,
    answers: Tensor,
    objects: ObjectPatches | None,
    grid: tuple[int, int],
    layer: int,
    plan: KindPlan,
) -> Iterator[Kind]:
    """Kinds of high-evidence tokens [n, N, D] at one layer: clusters, each within one answer, and
    where objects are known, on them or off them."""
    every = torch.ones_like(scores, dtype=torch.bool)
    sides = [(every, every)]
    if objects is not None:
        sides = [(objects.shown, objects.shown), (~objects.shown, ~objects.covered)]
    shown = None if objects is None else objects.shown
    for side, whole in sides:
        if not bool(side.any()):
            continue
        for rows, sets, extent, answer in _lent(tokens, scores, answers, side, whole, grid, plan):
            spared = objects.covered if objects is not None and extent == "all" else shown
            trials = _drawn(sets, answers, answer, spared, grid, plan)
            evidence = float(scores[rows[:, 0], rows[:, 1]].mean())
            share = _on_object(rows, sets, shown, extent)
            yield Kind(answer, layer, extent, rows, sets, trials, evidence, share)


def _lent(
    tokens: Tensor,
    scores: Tensor,
    answers: Tensor,
    side: Tensor,
    whole: Tensor,
    grid: tuple[int, int],
    plan: KindPlan,
) -> Iterator[tuple[Tensor, Tensor, Extent, int]]:
    """Of the patches [n, N] (bool) on one side: examples of each kind [m, 2], and what pictures
    lend of it [n, N], in which way and for which answer. All of a kind may be of `whole` [n, N]."""
    picture, patch, distance = _clusters(tokens, scores, side, plan)
    nearest = distance.argmin(dim=2)
    for kind in range(distance.shape[2]):
        far = distance[..., kind]
        rank = far.masked_fill(~whole, torch.inf).argsort(dim=1).argsort(dim=1)
        typical = (nearest == kind) & whole & (rank < plan.most)  # [n, N]
        of_best = nearest[picture, patch] == kind
        for answer in answers.unique().tolist():
            member = of_best & (answers[picture] == answer)
            if len(picture[member].unique()) < FEWEST:
                continue
            rows = torch.stack([picture[member], patch[member]], dim=1)
            rows = rows[far[rows[:, 0], rows[:, 1]].argsort(stable=True)]
            every = typical & (answers == answer)[:, None]
            spots = _spots(rows, grid, len(scores), plan) & side
            if bool(every.any()):
                yield rows, every, "all", answer
            if bool(spots.any()):
                yield rows, spots, "spot", answer


def _clusters(
    tokens: Tensor, scores: Tensor, side: Tensor, plan: KindPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Picture [m] and patch [m] of the highest patches of each picture on one side, and distances
    of all patches from what these cluster around, [n, N, kinds]."""
    from sklearn.cluster import KMeans

    best = scores.masked_fill(~side, -torch.inf).topk(min(plan.top, scores.shape[1]), dim=1)
    picture = torch.arange(len(scores))[:, None].expand_as(best.indices)
    there = best.values > -torch.inf
    picture, patch = picture[there], best.indices[there]
    chosen = tokens[picture, patch].numpy()
    count = min(plan.kinds, len(chosen))
    clusters = KMeans(count, n_init="auto", random_state=plan.seed).fit(chosen)
    flat = torch.from_numpy(clusters.transform(tokens.flatten(0, 1).numpy()))
    return picture, patch, flat.unflatten(0, tokens.shape[:2])


def _spots(rows: Tensor, grid: tuple[int, int], count: int, plan: KindPlan) -> Tensor:
    """[n, N] bool: of each picture its most typical example and what is around it; nothing where
    that is more than a paste may have."""
    sets = torch.zeros(count, grid[0] * grid[1], dtype=torch.bool)
    if plan.most < (1 + 2 * AROUND) ** 2:
        return sets
    by_picture = rows[rows[:, 0].argsort(stable=True)]
    is_first = by_picture[:, 0].diff(prepend=torch.tensor([-1])) != 0
    middle = by_picture[is_first]
    sets[middle[:, 0], middle[:, 1]] = True
    planes = sets.float().unflatten(1, grid)[:, None]
    side = 1 + 2 * AROUND
    return F.max_pool2d(planes, side, stride=1, padding=AROUND)[:, 0].flatten(1) > 0


def _on_object(rows: Tensor, sets: Tensor, objects: Tensor | None, extent: Extent) -> float | None:
    """Share of what a kind is that lies on the object; of a spot, of its middle."""
    if objects is None:
        return None
    if extent == "spot":
        return float(objects[rows[:, 0], rows[:, 1]].double().mean())
    return float((sets & objects).sum() / sets.sum())


def _drawn(
    sets: Tensor,
    answers: Tensor,
    answer: int,
    objects: Tensor | None,
    grid: tuple[int, int],
    plan: KindPlan,
) -> Trials:
    """Who lends and who gets, by a hash of (seed, answer, number of the trial)."""
    number = torch.arange(SCREEN + plan.trials) + (answer << 32)
    lenders = sets.any(dim=1).nonzero()[:, 0]
    others = (answers != answer).nonzero()[:, 0]
    source = lenders[bits(number, 4 * plan.seed + _SOURCE) % len(lenders)]
    draws = (number << 2)[:, None] + torch.arange(DRAWS)  # [m, DRAWS]
    recipients = others[bits(draws, 4 * plan.seed + _RECIPIENT) % len(others)]
    control = others[bits(number, 4 * plan.seed + _CONTROL) % len(others)]
    chosen, recipient = sets[source], recipients[:, 0]
    if objects is not None:
        left = (chosen[:, None] & ~objects[recipients]).sum(dim=2)  # [m, DRAWS]
        recipient = recipients.gather(1, left.argmax(dim=1, keepdim=True))[:, 0]
        chosen = chosen & ~objects[recipient]
    return Trials(source, recipient, control, chosen.unflatten(1, grid))


def pasted(images: Tensor, trials: Trials) -> Tensor:
    """Recipients [n, 3, H, W] with patches of their sources."""
    sets = trials.sets.to(images.device)[:, None]
    shown = on_pixels(sets, (images.shape[-2], images.shape[-1]))
    sources, recipients = (x.to(images.device) for x in (trials.sources, trials.recipients))
    return torch.where(shown, images[sources], images[recipients])
