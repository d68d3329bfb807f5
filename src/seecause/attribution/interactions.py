"""Pairs of places: what two regions cause together that neither causes alone.

CAAP puts one place into a blank image, so evidence that needs two places is invisible to it. Here
the grid is cut into `regions` x `regions` regions, and every pair of them is put into the blank at
once, by the same sweep of class rows. With f(S) the class score when the regions of S are put in,

    single       e_a  = f({a}) - f({})
    joint        e_ab = f({a, b}) - f({})
    interaction  I_ab = e_ab - e_a - e_b

I > 0: the two need each other. I < 0: each will do without the other. I = 0: they add up. That
holds on the scale of `score`: evidence that adds up in logits does not in probabilities.

All 49 singles and 1,176 pairs of 7 x 7 regions are 1,225 class rows: six forwards of 197 tokens. No
pair is left out or estimated. Sets of three and more are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seecause.attribution.caap import Layers, Swept, make_plan, sweep, sweep_features
from seecause.engine.blanks import Blank, blank_image
from seecause.engine.chunks import budget, memory, run_in_chunks
from seecause.engine.sweep import Tail
from seecause.errors import BadOption, NotDefined
from seecause.loading import as_view
from seecause.models.base import ImageModel, protocol
from seecause.models.preprocess import Pictures, as_images
from seecause.models.staged import StagedModel
from seecause.models.view import VisionModel
from seecause.options import checked
from seecause.results import Result
from seecause.target import Score, Spec, Target, parse

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RegionPlace = tuple[int, int]  # row and column among the regions, from 0


@dataclass(frozen=True)
class Pair:
    """Two regions, what they cause together, and how much of that is more than their sum."""

    first: RegionPlace
    second: RegionPlace
    interaction: float
    joint: float
    singles: tuple[float, float]


@dataclass(frozen=True, eq=False)
class Interactions(Result):
    """Effects of all regions and of all pairs of them, for each image. Signed, never normalised."""

    singles: Tensor  # [B, R] e_a, region by region, row by row
    joint: Tensor  # [B, R, R] e_ab; its diagonal is the singles
    regions: int  # in each direction: R is its square
    grid: tuple[int, int]  # of patches
    images: Tensor  # [B, 3, H, W] raw pixels in [0, 1]
    labels: list[str]
    manifest: dict[str, Any]

    def __len__(self) -> int:
        return len(self.singles)

    def __repr__(self) -> str:
        return (
            f"Interactions({self.manifest['model']}, {len(self)} images,"
            f" {self.regions} x {self.regions} regions, {', '.join(self.labels[:3])})"
        )

    @property
    def values(self) -> Tensor:
        """I_ab, [B, R, R]: symmetric, 0 on the diagonal."""
        inner = self.joint - self.singles[:, :, None] - self.singles[:, None, :]
        return inner * ~torch.eye(inner.shape[-1], dtype=torch.bool)

    @property
    def maps(self) -> Tensor:
        """What each region causes alone, at its patches: [B, gh, gw]."""
        return self.singles[:, region_of(self.grid, self.regions)]

    @property
    def pair_maps(self) -> Tensor:
        """How much each region takes part in pairs, sum_b I_ab, at its patches: [B, gh, gw]."""
        return self.values.sum(dim=2)[:, region_of(self.grid, self.regions)]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each pair of regions and image."""
        every = self.values.shape[-1] ** 2
        return [
            {"image": place, **asdict(pair)}
            for place in range(len(self))
            for pair in self.pairs(place, every)
        ]

    def numbers(self) -> dict[str, float]:
        """Mean sizes of the effects, over regions, pairs and images."""
        first, second = torch.triu_indices(*self.values.shape[1:], offset=1)
        return {
            "mean single effect": float(self.singles.mean()),
            "mean size of interactions": float(self.values[:, first, second].abs().mean()),
        }

    def pairs(self, index: int = 0, count: int = 10) -> list[Pair]:
        """The pairs of one image, the largest interaction of either sign first."""
        values = self.values[index]
        first, second = torch.triu_indices(*values.shape, offset=1)
        order = values[first, second].abs().argsort(descending=True, stable=True)[:count]
        chosen = zip(first[order].tolist(), second[order].tolist(), strict=True)
        return [
            Pair(
                divmod(a, self.regions),
                divmod(b, self.regions),
                float(values[a, b]),
                float(self.joint[index, a, b]),
                (float(self.singles[index, a]), float(self.singles[index, b])),
            )
            for a, b in chosen
        ]

    def plot(self, ax: Axes, index: int = 0, count: int = 10) -> None:
        """Lines between the regions of the strongest pairs, over the image: thicker is stronger,
        red needs both, blue will do with either."""
        from seecause.report.explain import pairs_image

        ax.imshow(pairs_image(self, index, count=count))
        ax.set_axis_off()


@checked
@torch.no_grad()
def interactions(
    model: ImageModel | nn.Module,
    images: Pictures,
    target: Spec = None,
    *,
    regions: int = 7,
    score: Score = "logit",
    blank: Blank | Tensor = "white",
    tail: Tail | None = None,
    layers: Layers = None,
    seed: int = 0,
) -> Interactions:
    """Exact effects of all pairs of regions, beside those of single ones.

    Args:
        model: A model returned by `sc.load` or `sc.wrap`, or an `nn.Module` that `sc.wrap` takes.
        images: What `sc.attribute` takes in memory: a normalised tensor, PIL images, or paths.
        target: The class, as for `sc.attribute`. None means the predicted class.
        regions: Regions in each direction.
        score: The scale on which effects add up.
        blank: The context, as for CAAP.
        tail: As for CAAP; networks of stages have none.
        layers: As for CAAP; networks of stages are patched at two thirds of their depth.
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
        sets = pair_sets(grid, regions)
        goal = parse(model, target, len(images))
        size = (images.shape[-2], images.shape[-1])
        empty = blank_image(model, size, blank, seed=seed, count=len(images))
        put_in = _sweeper(model, images, tail, layers)
        effects, bound = _effects(model, images, empty, sets, goal, score, put_in)
    count = regions * regions
    first, second = torch.triu_indices(count, count)
    joint = effects.new_zeros(len(images), count, count)
    joint[:, first, second] = joint[:, second, first] = effects
    record = bound.record(model)
    return Interactions(
        singles=joint.diagonal(dim1=1, dim2=2).clone(),
        joint=joint,
        regions=regions,
        grid=grid,
        images=model.preprocess.shown(images),
        labels=list(record.get("name", [])),
        manifest={
            "method": "interactions",
            "options": {
                "regions": regions,
                "score": score,
                "blank": blank if isinstance(blank, str) else "given",
                "seed": seed,
                "tail": tail,
                "layers": layers,
            },
            "target": record,
            **protocol(model, images),
            "memory_halvings": list(held.halvings),
        },
    )


def _effects(
    model: ImageModel,
    images: Tensor,
    empty: Tensor,
    sets: Tensor,
    goal: Target,
    score: Score,
    put_in: Callable[[Tensor, Tensor, Tensor], Swept],
) -> tuple[Tensor, Target]:
    """f(S) - f({}) of every set [B, n] on the CPU, and the target with predicted classes filled in.

    Logits of all sets are many more numbers than scores: as many images run as their logits fit."""
    classes: list[Tensor] = []

    def run_images(a: int, b: int) -> Tensor:
        own_blank = empty if len(empty) == 1 else empty[a:b]
        swept = put_in(images[a:b], own_blank, sets)
        own = (goal if goal.open else goal.take(slice(a, b))).bind(swept.source)
        alone, none = (
            own.score(logits, score, sigmoid=model.sigmoid)
            for logits in (swept.interventions, swept.blank.expand_as(swept.source))
        )
        if own.classes is not None:
            classes.append(own.classes)
        return (alone - none[:, None]).cpu()

    each = len(sets) * model.n_classes * 4 * 3
    effects = run_in_chunks(run_images, len(images), each, images.device, what="images")
    return effects, Target(torch.cat(classes)) if goal.open else goal


def _sweeper(
    model: ImageModel, images: Tensor, tail: Tail | None, layers: Layers
) -> Callable[[Tensor, Tensor, Tensor], Swept]:
    """What puts sets of patches of images into blanks."""
    if isinstance(model, VisionModel):
        plan = make_plan(model, model.check(images), tail=tail, layers=layers)
        return partial(sweep, model, plan=plan)
    if not isinstance(model, StagedModel):
        reason = f"there is no class row to patch in a model of architecture {model.architecture!r}"
        raise NotDefined("interactions", reason, "Use a classifier, or sc.evidence")
    if tail is not None or layers is not None:
        raise BadOption("tail, layers", (tail, layers), "None: a network of stages has neither")
    return partial(sweep_features, model, stage=model.cells)


def region_of(grid: tuple[int, int], regions: int) -> Tensor:
    """The region of each patch, [gh, gw], counted row by row. Sizes differ by one patch at most."""
    row, column = (torch.arange(side) * regions // side for side in grid)
    return row[:, None] * regions + column


@lru_cache(maxsize=32)
def pair_sets(grid: tuple[int, int], regions: int) -> Tensor:
    """The patches of every pair a <= b of regions, bool [R (R + 1) / 2, N]; a = b is one region
    alone. The same tensor each time: what is captured for it is found again."""
    most = min(grid)
    if isinstance(regions, bool) or not isinstance(regions, int) or not 2 <= regions <= most:
        raise BadOption(
            "regions", regions, f"2 to {most}: the grid has {grid[0]} x {grid[1]} patches"
        )
    count = regions * regions
    members = region_of(grid, regions).flatten() == torch.arange(count)[:, None]  # [R, N]
    first, second = torch.triu_indices(count, count)
    return members[first] | members[second]
