"""Maps against the truth: the importance of each part of a Critter for the model is measured by
rendering the image without it.

The protocol is that of FunnyBirds (Hesse et al. 2023), on crest, wings, tail and feet (the body is
the same for all classes and is always drawn). All 16 sets of visible parts are rendered for each
latent, so every number below is read from one table of exact counterfactuals.

    true importance of a part   target logit - target logit without the part
    the map's importance        attribution summed over the part's pixels, dilated by 5 x 5
    correctness                 (1 + Spearman's correlation of the two over the parts) / 2
    contrastivity               for two other classes a and b that share disjoint pairs of parts
                                with the creature: the pair shared with a must be more important in
                                the map of a than in that of b, and the other way round; counted
                                where the model agrees
    completeness                1/2 [(CSDC + PC + DC) / 3 + D], where a part is declared important
                                if its importance exceeds t times the sum of the map

    CSDC  the largest share of a minimal sufficient set of parts that is declared important
    PC    keeping only the important parts keeps the prediction
    DC    removing them changes the prediction
    D     1 - the share of irrelevant parts that is declared important; a part is irrelevant if the
          logit without it falls by less than 5 % of itself, or rises

t is the one of 80 values in [0.01, 0.5] with the best completeness over all images. Everything is 0
to 1, higher is better.

The background counts as one more part in D: it is irrelevant if no other background lowers the
logit by 5 %, and its pixels are those of the background. `background-independence` is a number of
the model: 1 - the share of other backgrounds that lower the logit so much. The target is the class
of the creature shown; CSDC, PC and DC are counted where the model predicts it (NaN elsewhere),
because they are about the prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.critters.rendering import Do, render
from seecause.critters.world import (
    BACKGROUNDS,
    CLASSES,
    CODEWORDS,
    PARTS,
    Latents,
    minimal_sufficient_sets,
)
from seecause.engine.chunks import plain_logits
from seecause.errors import BadOption
from seecause.metrics.pixels import to_pixels
from seecause.metrics.registry import Explain, Scores, metric
from seecause.metrics.statistics import rank_correlation
from seecause.models.base import ImageModel

REMOVABLE = PARTS[1:]
# which parts are removed; the first set removes none
SETS = tuple(itertools.product((False, True), repeat=len(REMOVABLE)))
DILATION = 5
NEGLIGIBLE = 0.05  # smaller drops, relative to the target logit, count as none
THRESHOLDS = torch.linspace(0.01, 0.5, 80, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class PartTruth:
    """The logits of every counterfactual, float64 on the CPU."""

    removed: Tensor  # [B, 16, C] logits without each of SETS
    elsewhere: Tensor  # [B, backgrounds - 1, C] logits on every other background
    creature: Tensor  # [B]

    @property
    def predicted(self) -> Tensor:
        return self.removed[:, 0].argmax(dim=-1)

    def logit_without(self, gone: Tensor, classes: Tensor) -> Tensor:
        """The logit [B] of `classes` [B] without the parts `gone` [B, P] bool."""
        return self.removed[torch.arange(len(gone)), _set_index(gone), classes]

    @property
    def drops(self) -> Tensor:
        """True importances [B, P] for the creature's class."""
        alone = _set_index(torch.eye(len(REMOVABLE)).bool())
        return self._logits(self.removed[:, :1]) - self._logits(self.removed[:, alone])

    @property
    def background_drops(self) -> Tensor:
        """[B, backgrounds - 1]."""
        return self._logits(self.removed[:, :1]) - self._logits(self.elsewhere)

    def matters(self, drops: Tensor) -> Tensor:
        """Whether drops [B, k] are 5 % of the logit or more."""
        return drops >= NEGLIGIBLE * self._logits(self.removed[:, :1]).abs()

    def _logits(self, logits: Tensor) -> Tensor:
        return logits[torch.arange(len(logits)), :, self.creature]


def part_completeness(details: Mapping[str, Tensor]) -> dict[str, float]:
    """Summarise the metric "parts" over all images, at the threshold with the best completeness.

    Args:
        details: The details of the metric, of all images (concatenated over batches).

    Returns:
        "completeness", its "threshold" (the smallest of equals), the means "correctness" and
        "contrastivity", and "overall", the mean of the three. Completeness is NaN if the model
        predicts no image correctly.
    """
    checks = torch.stack([details[name] for name in ("csdc", "preservation", "deletion")])
    kept = details["distractibility"].nanmean(dim=0)
    values = (checks.nanmean(dim=1).mean(dim=0) + kept) / 2  # [80]
    best = values.nan_to_num(nan=-1.0).argmax()
    known = not values.isnan().all()
    means = {name: float(details[name].nanmean()) for name in ("correctness", "contrastivity")}
    completeness = float(values[best])
    return {
        "completeness": completeness,
        "threshold": float(THRESHOLDS[best]) if known else torch.nan,
        **means,
        "overall": (completeness + sum(means.values())) / 3,
    }


@metric("parts")
def part_truth(
    model: ImageModel, latents: Latents, explain: Explain, *, truth: PartTruth | None = None
) -> Scores:
    """Compare a map of Critters with the measured importance of their parts.

    Args:
        model: A classifier of Critters.
        latents: The latents of the images.
        explain: The method: images, target -> maps.
        truth: The result of `measure_truth`, to share it between methods.

    Returns:
        `Scores` with three columns. Details are [B, 80], one value for each of `THRESHOLDS`;
        `part_completeness` summarises them over all images.
    """
    truth = measure_truth(model, latents) if truth is None else truth
    part_map, images = _images(model, latents)
    creature, (first, second) = truth.creature, neighbours(truth.creature)

    def importances(classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps = explain(images, classes.to(model.device))
        pixels = to_pixels(maps, (part_map.shape[1], part_map.shape[2])).to(part_map.device)
        parts, background, total = part_importances(pixels, part_map)
        return parts.cpu(), background.cpu(), total.cpu()

    parts, background, total = importances(creature)
    bar = (total[:, None] * THRESHOLDS)[..., None]  # [B, 80, 1]
    important = parts[:, None] > bar  # [B, 80, P]
    everywhere = torch.cat([important, background[:, None, None] > bar], dim=2)  # [B, 80, P + 1]
    right = truth.predicted == creature
    batch, predictions = torch.arange(len(right))[:, None], truth.removed.argmax(dim=-1)  # [B, 16]
    checks = {  # [B, 80]: CSDC, PC and DC
        "csdc": torch.stack(list(map(_best_overlap, important, creature.tolist()))),
        "preservation": predictions[batch, _set_index(~important)] == truth.predicted[:, None],
        "deletion": predictions[batch, _set_index(important)] != truth.predicted[:, None],
    }
    wrong = ~right[:, None]
    matter = truth.matters(truth.background_drops)
    idle = ~torch.cat([truth.matters(truth.drops), matter.any(dim=1, keepdim=True)], dim=1)[:, None]
    columns = {
        "part-correctness": (1 + rank_correlation(parts, truth.drops)) / 2,
        "part-contrastivity": _contrast(
            truth, importances(first)[0], importances(second)[0], first, second
        ),
        "background-independence": 1 - matter.double().mean(dim=1),
    }
    details = {
        "correctness": columns["part-correctness"],
        "contrastivity": columns["part-contrastivity"],
        **{name: x.double().masked_fill(wrong, torch.nan) for name, x in checks.items()},
        "distractibility": 1 - (everywhere & idle).sum(dim=2) / idle.sum(dim=2).double(),
        "right": right,
    }
    return Scores(columns, details)


@torch.no_grad()
def measure_truth(model: ImageModel, latents: Latents) -> PartTruth:
    """Render and run every counterfactual: 16 sets of parts and all other backgrounds."""

    def logits(do: Do) -> Tensor:
        return plain_logits(model, _images(model, latents, do)[1]).double().cpu()

    removed = [logits(Do(without=tuple(itertools.compress(REMOVABLE, chosen)))) for chosen in SETS]
    if removed[0].shape[1] != len(CLASSES):
        raise BadOption("model", model.name, f"a classifier of the {len(CLASSES)} Critters")
    elsewhere = [
        logits(Do(background=(latents.background + step) % len(BACKGROUNDS)))
        for step in range(1, len(BACKGROUNDS))
    ]
    return PartTruth(
        torch.stack(removed, dim=1), torch.stack(elsewhere, dim=1), latents.creature.cpu()
    )


def part_importances(pixels: Tensor, part_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attribution [B, H, W] summed over each dilated part [B, P], over the background [B], and over
    all [B]."""
    # numbers in the part map
    names = 1 + torch.tensor([PARTS.index(part) for part in REMOVABLE], device=part_map.device)
    masks = (part_map[:, None] == names[:, None, None]).to(pixels)  # [B, P, H, W]
    wide = F.max_pool2d(masks, DILATION, stride=1, padding=DILATION // 2)
    return (
        (wide * pixels[:, None]).sum(dim=(2, 3)),
        (pixels * (part_map == 0)).sum(dim=(1, 2)),
        pixels.sum(dim=(1, 2)),
    )


def neighbours(creature: Tensor) -> tuple[Tensor, Tensor]:
    """Two classes [B] that share parts with each creature, but not the same ones."""
    pairs = torch.tensor([_pair(index) for index in range(len(CLASSES))])
    return pairs[creature, 0], pairs[creature, 1]


def _best_overlap(important: Tensor, creature: int) -> Tensor:
    """[80]: the largest share of a minimal sufficient set that lies in `important` [80, P]."""
    sets = [
        [REMOVABLE.index(part) for part in chosen] for chosen in minimal_sufficient_sets(creature)
    ]
    return torch.stack([important[:, chosen].double().mean(dim=1) for chosen in sets]).amax(dim=0)


def _contrast(
    truth: PartTruth, of_first: Tensor, of_second: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """Contrastivity [B] from the importances [B, P] in the maps of the two neighbours; NaN where
    the model itself does not tell them apart."""
    words = torch.tensor(CODEWORDS)
    # [B, P]: the parts in which the creature looks like the neighbour
    with_first, with_second = (words[truth.creature] == words[each] for each in (first, second))
    agrees = (truth.logit_without(with_first, first) < truth.logit_without(with_second, first)) & (
        truth.logit_without(with_second, second) < truth.logit_without(with_first, second)
    )
    gap = of_first - of_second
    hits = torch.stack([(gap * with_first).sum(dim=1) > 0, (gap * with_second).sum(dim=1) < 0])
    return hits.double().mean(dim=0).masked_fill(~agrees, torch.nan)


def _pair(creature: int) -> tuple[int, int]:
    """The first two classes whose shared parts with `creature` exist and are disjoint."""
    alike = {}
    for other, word in enumerate(CODEWORDS):
        same = [x == y for x, y in zip(CODEWORDS[creature], word, strict=True)]
        alike[other] = set(itertools.compress(range(len(word)), same))
    others = [other for other, places in alike.items() if places and other != creature]
    return next(
        pair for pair in itertools.combinations(others, 2) if not alike[pair[0]] & alike[pair[1]]
    )


def _set_index(gone: Tensor) -> Tensor:
    """The index in SETS of parts removed [..., P] bool."""
    return (gone.long() * 2 ** torch.arange(len(REMOVABLE) - 1, -1, -1)).sum(dim=-1)


def _images(model: ImageModel, latents: Latents, do: Do | None = None) -> tuple[Tensor, Tensor]:
    """Part maps [B, H, W], and normalised images as the model takes them."""
    drawn = render(latents, size=model.preprocess.size[0], do=do)
    images = model.preprocess.normalise(drawn.image)
    return drawn.parts, images.to(model.device, model.dtype)
