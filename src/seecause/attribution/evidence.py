"""Sets of patches: which are enough for a prediction, which it needs, and which act together.

Evidence takes patches in the order of a map, the highest first: S_k are the first k. Everything
else is replaced by the pixels of a blank, and the model predicts the class of that image:

    enough   the shortest S_k that, alone on the blank, keeps the prediction
    needed   the shortest S_k that, replaced by the blank, breaks it

The prediction is kept while the explained class has the highest logit (of a pair: a higher one than
the other class; of a function of logits: while it is above 0). Both are found by bisection,
`points` lengths at a time: about 2 points log N / log(points + 1) forwards instead of 2 N. The set
that is returned was run and keeps (or breaks) the prediction, and the same set without its last
patch was run and does not. A shorter S_k may exist, since the prediction may come and go along the
order; more `points` make a shorter one harder to miss (docs/explain.md: how often one is missed).

Interactions put regions of patches into a blank image, by the sweep of CAAP. With f(S) the class
score when the regions of S are put in,

    single       e_a  = f({a}) - f({})
    joint        e_ab = f({a, b}) - f({})
    interaction  I_ab = e_ab - e_a - e_b

I > 0: the regions need each other. I < 0: either one is enough. I = 0: their effects add up on the
scale of `score`; effects that add up in logits do not in probabilities. All 49
singles and 1,176 pairs of 7 x 7 regions are 1,225 class rows: six forwards of 197 tokens. No pair
is left out or estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from seecause.attribution.attribute import ModelLike, attribute
from seecause.attribution.caap import make_plan, sweep, sweep_features
from seecause.attribution.gradients import bind_target
from seecause.attribution.registry import BlankLike, blanks, find, size_of
from seecause.attribution.result import Record
from seecause.data.dataset import Size
from seecause.engine.chunks import batched, budget, fit, memory, run_in_chunks
from seecause.engine.trace import special_rows
from seecause.errors import BadOption, NotDefined
from seecause.loading import as_view
from seecause.models.base import ImageModel, protocol
from seecause.models.block import spread_out, wide
from seecause.models.preprocess import Images, as_images
from seecause.models.view import VisionModel
from seecause.options import Count, checked
from seecause.results import Result
from seecause.target import Score, Spec, Target, parse

RegionPlace = tuple[int, int]  # row and column among the regions, from 0


@dataclass(frozen=True, eq=False)
class PatchSet:
    """One set of patches of each image, and what the model predicted when it was run.

    Attributes:
        patches: The set [B, rows, columns] bool; empty if no set was found.
        exists: Whether a set was found, [B] bool.
        probability: Probability of the explained class, [B] (of a pair or function: its value).
        labels: The predicted classes.
    """

    patches: Tensor
    exists: Tensor
    probability: Tensor
    labels: list[str]

    @property
    def count(self) -> Tensor:
        """Patches of each image, [B]."""
        return self.patches.flatten(1).sum(dim=1)


@dataclass(frozen=True, eq=False, repr=False)
class Evidence(Result):
    """Patches that are enough for the predictions of some images, and patches that they need.

    Attributes:
        images: Raw pixels [B, 3, H, W] in [0, 1].
        maps: The maps [B, rows, columns] whose order was taken.
        enough: The sets that keep the prediction alone.
        needed: The sets without which the prediction changes.
        probability: Probability [B] of the explained class in the whole image.
        answered: Whether the explained class is predicted for the whole image, [B] bool.
        labels: The explained classes; none for a function.
        manifest: Method, options, target, model, data and versions.
    """

    images: Tensor
    maps: Tensor
    enough: PatchSet
    needed: PatchSet
    probability: Tensor
    answered: Tensor
    labels: list[str]
    manifest: Record

    def rows(self) -> list[Record]:
        """One row for each image: how many patches are enough and needed, of how many."""
        enough, needed = self.enough.count.tolist(), self.needed.count.tolist()
        return [
            {
                "explained": self.labels[place] if self.labels else "",
                "probability": float(self.probability[place]),
                "patches": self.maps[0].numel(),
                "enough": count if self.enough.exists[place] else None,
                "needed": needed[place] if self.needed.exists[place] else None,
            }
            for place, count in enumerate(enough)
        ]

    def numbers(self) -> dict[str, float]:
        """Mean numbers of patches, over the images that have such a set."""
        found = {}
        for name, sets in (("enough", self.enough), ("needed", self.needed)):
            found[f"images with {name}"] = float(sets.exists.sum())
            found[f"mean patches {name}"] = float(sets.count[sets.exists].double().mean())
        return found


@checked
@torch.no_grad()
def evidence(
    model: ModelLike,
    images: Images,
    target: Spec = None,
    *,
    maps: Tensor | None = None,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    blank: BlankLike = "mean",
    points: Count = 7,
    seed: int = 0,
) -> Evidence:
    """The shortest sets of patches, in the order of a map, that keep the prediction and that break
    it.

    Args:
        model: A model returned by `sc.load` or `sc.wrap`, or an `nn.Module` that `sc.wrap` takes.
        images: What `sc.attribute` takes in memory: a normalised tensor, PIL images, or paths.
        target: The class, as for `sc.attribute`. None means the predicted class.
        maps: Maps [B, rows, columns] whose order is taken.
        method: Otherwise, the method whose maps are taken, with its `options`. None means mosaic;
            libra-ixg+ where no class token is read; CAAP where these are not defined.
        options: Options of the method.
        blank: What stands in place of hidden patches; one image for all, or one for each.
        points: Lengths that are tried at once.
        seed: Of the blank, and of the method unless its options name one.

    Returns:
        An `Evidence` with `enough` and `needed`, a `PatchSet` each.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> data = sc.data.open_data("critters:clean", limit=2)
        >>> sets = sc.evidence(model, sc.data.to_batch(model, list(data)).images)
        >>> sets.enough.exists.all(), sets.enough.patches.shape
        (tensor(True), torch.Size([2, 12, 12]))
    """
    model = as_view(model)
    with model.eval_mode(frozen=True), budget(memory().limit) as held:
        images = as_images(model, images)
        layout, order = model.check(images), "maps that were given"
        if maps is None:
            order = method or "caap"
            if method is None and isinstance(model, VisionModel):  # docs/results/mosaic.md
                order = "mosaic" if special_rows(model, layout) else "libra-ixg+"
            drawn = {"seed": seed} if "seed" in find(order, model.architecture).options else {}
            maps = attribute(model, images, target, order, **{**drawn, **(options or {})}).maps
        if tuple(maps.shape[1:]) == layout.cells:  # frames of a film, one below the other
            maps = maps.flatten(1, -2)
        if tuple(maps.shape) != (len(images), *layout.grid) or not maps.isfinite().all():
            expected = f"finite numbers {[len(images), *layout.grid]}: one map an image"
            raise BadOption("maps", list(maps.shape), expected)
        empty = blanks(model, images, blank, seed)
        chunk = fit(len(images), model.forward_bytes(layout), images.device, share=0.5)
        whole = batched(model, images, chunk)  # [B, C]
        bare = batched(model, empty, chunk).expand_as(whole)
        goal = parse(model, target, len(images)).bind(whole)
        places = maps.to(images.device).flatten(1).argsort(dim=1, descending=True, stable=True)
        ranks = places.argsort(dim=1).unflatten(1, layout.grid)  # [B, gh, gw]
        search = _Search(model, images, empty, ranks, goal, chunk)
        settings = {"order": order, "blank": blank if isinstance(blank, str) else "given"}
        return Evidence(
            images=model.preprocess.shown(images),
            maps=wide(maps).cpu(),
            enough=search.shortest(bare, whole, keep=True, points=points),
            needed=search.shortest(whole, bare, keep=False, points=points),
            probability=goal.score(whole, "prob").double().cpu(),
            answered=search.kept(whole).cpu(),
            labels=goal.labels(model),
            manifest={
                "method": "evidence",
                "options": {**settings, "points": points, "seed": seed},
                "target": goal.record(model),
                **protocol(model, images),
                "memory_halvings": list(held.halvings),
            },
        )


@dataclass(frozen=True, eq=False)
class _Search:
    """Images between a blank and themselves: the first k patches of a map shown, or hidden."""

    model: ImageModel
    images: Tensor
    empty: Tensor
    ranks: Tensor  # [B, gh, gw]: the place of each patch in the order
    goal: Target
    chunk: int  # images that run at once

    def shortest(self, none: Tensor, every: Tensor, *, keep: bool, points: int) -> PatchSet:
        """The shortest beginning of the order that keeps the prediction alone, or breaks it when it
        is hidden. `none` and `every` are logits [B, C] with no and with all patches taken."""
        begins, patches = self.kept(none) == keep, self.ranks[0].numel()

        def passes(rows: Tensor, lengths: Tensor) -> Tensor:
            return self.kept(self.logits(rows, lengths, keep), rows) == keep

        left = (~begins).nonzero()[:, 0]
        ends = (self.kept(every) == keep)[left]
        lengths = torch.zeros_like(begins, dtype=torch.long)
        lengths[left] = bisect(passes, left, patches, ends, points=min(points, patches))
        exists, lengths = lengths >= 0, lengths.clamp(min=0)
        rows = torch.arange(len(self.images), device=self.images.device)
        logits = self.logits(rows, lengths, keep)
        score = self.goal.score(logits, "prob")
        return PatchSet(
            patches=(self.ranks < lengths[:, None, None]).cpu(),
            exists=(exists & (self.kept(logits) == keep)).cpu(),
            probability=score.double().cpu(),
            labels=[self.model.class_name(c) for c in logits.argmax(dim=-1).tolist()],
        )

    def kept(self, logits: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Whether logits [m, C] of some images give the explained prediction, [m]."""
        goal = self.goal.take(rows)
        if goal.function is not None or goal.against is not None:
            return goal.score(logits, "logit") > 0
        assert goal.classes is not None
        return logits.argmax(dim=-1) == goal.classes.to(logits.device)

    def logits(self, rows: Tensor, lengths: Tensor, keep: bool) -> Tensor:
        """Logits [m, C] of images `rows` with their first patches shown on the blank, or hidden by
        it; as many at a time as fit."""
        size = size_of(self.images)

        def run_items(items: Tensor) -> Tensor:
            own = rows[items]
            first = self.ranks[own] < lengths[items][:, None, None]  # [m, gh, gw]
            shown = spread_out(first == keep, size)[:, None]
            empty = self.empty if len(self.empty) == 1 else self.empty[own]
            return self.model(torch.where(shown, self.images[own], empty))

        return batched(run_items, torch.arange(len(rows), device=rows.device), self.chunk)


def bisect(
    passes: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    longest: int,
    ends: Tensor,
    *,
    points: int,
) -> Tensor:
    """A length [m] for each of `rows` [m] that passes, where one less does not; -1 where none of
    the first `points` does, nor the longest. `passes(rows, lengths)` is known to be false at 0 and
    to be `ends` [m] at `longest`."""
    low, high = torch.zeros_like(rows), torch.full_like(rows, longest)
    steps = torch.arange(1, points + 1, device=rows.device)
    known = ends.clone()  # whether `high` passes; if not, no length that does is known
    while len(left := ((high - low > 1) & (high > 0)).nonzero()[:, 0]):
        a, b = low[left, None], high[left, None]
        tried = (a + (b - a) * steps // (points + 1)).clamp(min=a + 1)  # [m, points], rising
        good = passes(rows[left].repeat_interleave(points), tried.flatten()).view_as(tried)
        between = torch.cat([a, tried, b], dim=1)
        good = torch.cat([good, known[left, None]], dim=1)
        first, known[left] = good.int().argmax(dim=1), good.any(dim=1)
        low[left] = between.gather(1, first[:, None])[:, 0]
        high[left] = torch.where(known[left], between.gather(1, first[:, None] + 1)[:, 0], -1)
    return torch.where(known, high, -1)


@dataclass(frozen=True)
class Pair:
    """Two regions, their joint effect, and its difference from the sum of the single effects."""

    first: RegionPlace
    second: RegionPlace
    interaction: float
    joint: float
    singles: tuple[float, float]


@dataclass(frozen=True, eq=False, repr=False)
class Interactions(Result):
    """Effects of all regions and of all pairs of them, for each image. Signed, never normalised.

    Attributes:
        joint: e_ab, [B, R, R], region by region, row by row; its diagonal is the single effects.
        regions: Regions in each direction: R is its square.
        grid: The grid of patches.
        images: Raw pixels [B, 3, H, W] in [0, 1].
        labels: The explained classes.
        manifest: Method, options, target, model, data and versions.
    """

    joint: Tensor
    regions: int
    grid: Size
    images: Tensor
    labels: list[str]
    manifest: Record

    @property
    def singles(self) -> Tensor:
        """Effects of single regions e_a, [B, R]."""
        return self.joint.diagonal(dim1=1, dim2=2)

    @property
    def values(self) -> Tensor:
        """Interactions I_ab, [B, R, R]: symmetric, 0 on the diagonal."""
        inner = self.joint - self.singles[:, :, None] - self.singles[:, None, :]
        return inner * ~torch.eye(inner.shape[-1], dtype=torch.bool)

    def rows(self) -> list[Record]:
        """One row for each pair of regions and image."""
        every = self.joint.shape[-1] ** 2
        return [
            {"image": place, **asdict(pair)}
            for place in range(len(self.joint))
            for pair in self.pairs(place, every)
        ]

    def numbers(self) -> dict[str, float]:
        """Mean sizes of the effects, over regions, pairs and images."""
        first, second = torch.triu_indices(*self.joint.shape[1:], offset=1)
        return {
            "mean single effect": float(self.singles.mean()),
            "mean size of interactions": float(self.values[:, first, second].abs().mean()),
        }

    def pairs(self, index: int = 0, count: int = 10) -> list[Pair]:
        """The pairs of one image, the largest interaction of either sign first."""
        values, joint = self.values[index], self.joint[index]
        first, second = torch.triu_indices(*values.shape, offset=1)
        order = values[first, second].abs().argsort(descending=True, stable=True)[:count]
        return [
            Pair(
                divmod(a, self.regions),
                divmod(b, self.regions),
                float(values[a, b]),
                float(joint[a, b]),
                (float(joint[a, a]), float(joint[b, b])),
            )
            for a, b in zip(first[order].tolist(), second[order].tolist(), strict=True)
        ]


@checked
@torch.no_grad()
def interactions(
    model: ModelLike,
    images: Images,
    target: Spec = None,
    *,
    regions: int = 7,
    score: Score = "logit",
    blank: BlankLike = "white",
    seed: int = 0,
) -> Interactions:
    """Exact effects of all pairs of regions, beside those of single ones.

    Networks of stages are patched at two thirds of their depth.

    Args:
        model: A model returned by `sc.load` or `sc.wrap`, or an `nn.Module` that `sc.wrap` takes.
        images: What `sc.attribute` takes in memory: a normalised tensor, PIL images, or paths.
        target: The class, as for `sc.attribute`. None means the predicted class.
        regions: Regions in each direction.
        score: The scale on which effects add up.
        blank: The context, as for CAAP.
        seed: Of the blank.

    Returns:
        `Interactions` with `singles`, `joint` and `values`.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> data = sc.data.open_data("critters:clean", limit=1)
        >>> pairs = sc.interactions(model, sc.data.to_batch(model, list(data)).images, regions=4)
        >>> pairs.values.shape, len(pairs.pairs(0, count=3))
        (torch.Size([1, 16, 16]), 3)
    """
    model = as_view(model)
    with model.eval_mode(frozen=True), budget(memory().limit) as held:
        images = as_images(model, images)
        grid = model.check(images).grid
        if not 2 <= regions <= min(grid):
            expected = f"2 to {min(grid)}: the grid has {grid[0]} x {grid[1]} patches"
            raise BadOption("regions", regions, expected)
        sets = pair_sets(grid, regions)
        goal = bind_target(model, images, parse(model, target, len(images)))
        empty = blanks(model, images, blank, seed)
        if isinstance(model, VisionModel):
            plan = make_plan(model, model.check(images), tail=None, layers=None)
            put_in = partial(sweep, model, plan=plan)
        elif model.architecture == "staged":
            put_in = partial(sweep_features, model, stage=cast(Any, model).cells)
        else:
            reason = f"a model of architecture {model.architecture!r} has no class row to patch"
            raise NotDefined("interactions", reason, "Use a classifier, or sc.evidence")

        def run_images(a: int, b: int) -> Tensor:
            own_blank = empty if len(empty) == 1 else empty[a:b]
            swept, own = put_in(images[a:b], own_blank, sets), goal.take(slice(a, b))
            alone, none = (
                own.score(logits, score)
                for logits in (swept.interventions, swept.blank.expand_as(swept.source))
            )
            return (alone - none[:, None]).cpu()

        each = len(sets) * model.n_classes * 4 * 3  # logits of all sets
        effects = run_in_chunks(run_images, len(images), each, images.device, what="images")
    count = regions * regions
    first, second = torch.triu_indices(count, count)
    joint = effects.new_zeros(len(images), count, count)
    joint[:, first, second] = joint[:, second, first] = effects
    given = blank if isinstance(blank, str) else "given"
    return Interactions(
        joint=joint,
        regions=regions,
        grid=grid,
        images=model.preprocess.shown(images),
        labels=goal.labels(model),
        manifest={
            "method": "interactions",
            "options": {"regions": regions, "score": score, "blank": given, "seed": seed},
            "target": goal.record(model),
            **protocol(model, images),
            "memory_halvings": list(held.halvings),
        },
    )


def region_of(grid: Size, regions: int) -> Tensor:
    """The region of each patch, [gh, gw], counted row by row. Sizes differ by one patch at most."""
    row, column = (torch.arange(side) * regions // side for side in grid)
    return row[:, None] * regions + column


@lru_cache(maxsize=32)
def pair_sets(grid: Size, regions: int) -> Tensor:
    """The patches of every pair a <= b of regions, bool [R (R + 1) / 2, N]; a = b is one region
    alone. Cached, so that CUDA graphs recorded with this tensor are reused."""
    count = regions * regions
    members = region_of(grid, regions).flatten() == torch.arange(count)[:, None]  # [R, N]
    first, second = torch.triu_indices(count, count)
    return members[first] | members[second]
