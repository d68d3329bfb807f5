"""Enough, and needed: how much of the image does the prediction depend on?

Patches are taken in the order of a map, the highest first: S_k are the first k. Everything else is
replaced by the pixels of a blank, and the model itself answers:

    enough   the shortest S_k that, alone on the blank, keeps the prediction
    needed   the shortest S_k that, replaced by the blank, breaks it

The prediction is kept while the explained class has the highest logit (of a pair: a higher one than
the other class; of a function of logits: while it is above 0).

Both are found by bisection, `points` lengths at a time: about 2 points log N / log(points + 1)
forwards instead of 2 N. What it promises: the set it returns was run and keeps (or breaks) the
answer, and the same set without its last patch was run and does not. What it does not promise: that
no shorter S_k does. Adding a patch can undo a prediction, so the prediction may come and go along
the order; more `points` make a shorter one harder to miss (docs/explain.md: how often one is
missed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find
from seecause.engine.blanks import Blank, blank_image
from seecause.engine.chunks import batched, budget, fit, memory
from seecause.engine.mixture import special_rows
from seecause.errors import BadOption
from seecause.loading import as_view
from seecause.metrics.pixels import spread_out
from seecause.models.base import ImageModel, protocol
from seecause.models.layout import TokenLayout
from seecause.models.preprocess import Pictures, as_images
from seecause.models.view import VisionModel
from seecause.options import Count, checked
from seecause.results import Result
from seecause.target import Spec, Target, parse
from seecause.types import wide

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class PatchSet:
    """One set of patches of each image, and what the model said when it was run."""

    patches: Tensor  # [B, gh, gw] bool; none where no set that does it was found
    exists: Tensor  # [B] bool: the image below was run, and does what the set is for
    probability: Tensor  # [B] of the explained class there (a pair or function: its value)
    labels: list[str]  # the model's prediction there
    pictures: Tensor  # [B, 3, H, W] raw pixels that were run

    @property
    def count(self) -> Tensor:
        """Patches of each image, [B]."""
        return self.patches.flatten(1).sum(dim=1)


@dataclass(frozen=True, eq=False)
class Evidence(Result):
    """What is enough for the predictions of some images, and what they need."""

    images: Tensor  # [B, 3, H, W] raw pixels in [0, 1]
    maps: Tensor  # [B, gh, gw] whose order was taken
    enough: PatchSet
    needed: PatchSet
    probability: Tensor  # [B] of the explained class in the whole image
    answered: Tensor  # [B] bool: the whole image gets the explained class
    labels: list[str]  # the explained classes; none for a function
    manifest: dict[str, Any]

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        total = self.maps[0].numel()
        enough, needed = self.enough.count.tolist(), self.needed.count.tolist()
        return f"Evidence(of {total} patches, enough: {enough}, needed: {needed})"

    def rows(self) -> list[dict[str, Any]]:
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

    def overlay(self, index: int = 0) -> tuple[Image.Image, Image.Image]:
        """The two sets outlined, on the image that keeps the prediction and on the one without
        it."""
        from seecause.report.explain import evidence_image

        return evidence_image(self, index, "enough"), evidence_image(self, index, "needed")

    def sentence(self, index: int = 0) -> tuple[str, str]:
        """Both findings in words."""
        from seecause.report.explain import evidence_sentences

        return evidence_sentences(self, index)

    def plot(self, axes: tuple[Axes, Axes], index: int = 0) -> None:
        """Both outlined images on two axes of matplotlib."""
        shown = zip(axes, self.overlay(index), self.sentence(index), strict=True)
        for axis, picture, words in shown:
            axis.imshow(picture)
            axis.set_title(words, fontsize=8, wrap=True)
            axis.axis("off")


@checked
@torch.no_grad()
def evidence(
    model: ImageModel | nn.Module,
    images: Pictures,
    target: Spec = None,
    *,
    maps: Tensor | None = None,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    blank: Blank | Tensor = "mean",
    points: Count = 7,
    seed: int = 0,
) -> Evidence:
    """The shortest sets of patches, in the order of a map, that keep the prediction and that break
    it.

    Args:
        model: A model returned by `sc.load` or `sc.wrap`, or an `nn.Module` that `sc.wrap` takes.
        images: What `sc.attribute` takes in memory: a normalised tensor, PIL images, or paths.
        target: The class, as for `sc.attribute`. None means the predicted class.
        maps: Maps [B, gh, gw] whose order is taken.
        method: Otherwise, the method whose maps are taken, with its `options`. None means mosaic;
            libra-ixg+ where no class token is read; CAAP where these are not defined.
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
        order = "maps that were given"
        if maps is None:
            order = default_order(model) if method is None else method
            drawn = {"seed": seed} if "seed" in find(order, model.architecture).options else {}
            maps = attribute(model, images, target, order, **{**drawn, **(options or {})}).maps
        maps = _laid_out(maps, images, model.check(images))
        size = (images.shape[-2], images.shape[-1])
        empty = blank_image(model, size, blank, seed=seed, count=len(images))
        chain = _Chain(model, images, empty, maps.to(images.device), target)
        record = chain.target.record(model)
        settings = {"order": order, "blank": blank if isinstance(blank, str) else "given"}
        return Evidence(
            images=model.preprocess.shown(images),
            maps=wide(maps).cpu(),
            enough=chain.shortest(keep=True, points=points),
            needed=chain.shortest(keep=False, points=points),
            probability=chain.score(chain.whole).double().cpu(),
            answered=chain.kept(chain.whole).cpu(),
            labels=list(record.get("name", [])),
            manifest={
                "method": "evidence",
                "options": {**settings, "points": points, "seed": seed},
                "target": record,
                **protocol(model, images),
                "memory_halvings": list(held.halvings),
            },
        )


def default_order(model: ImageModel) -> str:
    """The method whose sets were smallest on such a model (docs/results/mosaic.md)."""
    if not isinstance(model, VisionModel):
        return "caap"
    return "mosaic" if special_rows(model, model.layout) else "libra-ixg+"


def _laid_out(maps: Tensor, images: Tensor, layout: TokenLayout) -> Tensor:
    """Maps on the grid [B, gh, gw]; those of a film one below the other."""
    grid = layout.grid
    if tuple(maps.shape[1:]) == layout.cells:
        maps = maps.flatten(1, -2)
    if tuple(maps.shape) != (len(images), *grid) or not maps.isfinite().all():
        expected = f"finite numbers [{len(images)}, {grid[0]}, {grid[1]}]: one map an image"
        raise BadOption("maps", list(maps.shape), expected)
    return maps


class _Chain:
    """Images between a blank and themselves: the first k patches of a map shown, or hidden."""

    def __init__(
        self, model: ImageModel, images: Tensor, empty: Tensor, maps: Tensor, target: Spec
    ):
        self.model, self.images, self.empty = model, images, empty
        self.grid, self.patches = maps.shape[1:], maps[0].numel()
        order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
        self.ranks = order.argsort(dim=1).unflatten(1, self.grid)  # [B, gh, gw]
        each = model.forward_bytes(model.check(images))
        self.chunk = fit(len(images), each, images.device, share=0.5)
        self.whole = batched(model, images, self.chunk)  # [B, C]
        self.blank = batched(model, empty, self.chunk).expand_as(self.whole)
        self.target: Target = parse(model, target, len(images)).bind(self.whole)

    def shortest(self, *, keep: bool, points: int) -> PatchSet:
        """The shortest beginning of the order that keeps the prediction alone, or breaks it when it
        is hidden."""
        points = min(points, self.patches)
        none, every = (self.blank, self.whole) if keep else (self.whole, self.blank)
        begins = self.kept(none) == keep  # with no patch at all

        def passes(rows: Tensor, lengths: Tensor) -> Tensor:
            return self.kept(self._run(rows, lengths, keep), rows) == keep

        left = (~begins).nonzero()[:, 0]
        ends = (self.kept(every) == keep)[left]
        lengths = torch.zeros_like(begins, dtype=torch.long)
        lengths[left] = bisect(passes, left, self.patches, ends, points=points)
        exists = lengths >= 0
        lengths = lengths.clamp(min=0)
        rows = torch.arange(len(self.images), device=self.images.device)
        pictures, logits = self._mixed(rows, lengths, keep), self._run(rows, lengths, keep)
        shown = exists[:, None, None, None] | torch.tensor(keep, device=exists.device)
        return PatchSet(
            patches=(self.ranks < lengths[:, None, None]).cpu(),
            exists=(exists & (self.kept(logits) == keep)).cpu(),
            probability=self.score(logits).double().cpu(),
            labels=[self.model.class_name(c) for c in logits.argmax(dim=-1).tolist()],
            pictures=self.model.preprocess.shown(torch.where(shown, pictures, self.images)),
        )

    def kept(self, logits: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Whether logits [m, C] of some images give the explained answer, [m]."""
        goal = self.target.take(rows)
        if goal.function is not None or goal.against is not None:
            return goal.score(logits, "logit") > 0
        assert goal.classes is not None
        return logits.argmax(dim=-1) == goal.classes.to(logits.device)

    def score(self, logits: Tensor) -> Tensor:
        return self.target.score(logits, "prob", sigmoid=self.model.sigmoid)

    def _mixed(self, rows: Tensor, lengths: Tensor, keep: bool) -> Tensor:
        """Images [m, 3, H, W] with the first patches shown on the blank, or hidden by it."""
        first = self.ranks[rows] < lengths[:, None, None]  # [m, gh, gw]
        height, width = self.images.shape[-2:]
        shown = spread_out(first == keep, (height, width))[:, None]
        empty = self.empty if len(self.empty) == 1 else self.empty[rows]
        return torch.where(shown, self.images[rows], empty)

    def _run(self, rows: Tensor, lengths: Tensor, keep: bool) -> Tensor:
        """Logits [m, C] of those images, as many at a time as fit."""

        def run_items(items: Tensor) -> Tensor:
            return self.model(self._mixed(rows[items], lengths[items], keep))

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
