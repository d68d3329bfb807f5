"""Which heads carry the background, or whatever two versions of a picture differ in, by exchange
between them: the gold score where exact counterfactuals exist (Critters, pairs).

x = (f, b), x' = (f, b') has another background, x'' = (f', b) another foreground. One head of the
run on x is given what it carries in the run on x':
    NIE_bg(h) = E JS(p(x), p_{h <- x'}(x)),    NIE_fg(h) = E JS(p(x), p_{h <- x''}(x)),
    selectivity(h) = NIE_bg / (NIE_bg + NIE_fg)
Nothing leaves the distribution, unlike zeros. For a set of heads, the share of the whole effect
JS(p(x), p(x')) that they mediate:
    mediated(set) = E JS(p(x), p_{set <- x'}(x)) / E JS(p(x), p(x'))
Where E JS(p(x), p(x')) is within its own error over pairs there is no such share: a ratio whose
denominator may be zero has no bounds (Fieller).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from seecause.background.erase import Baseline, Masks, Swapped
from seecause.background.gains import jensen_shannon, log_probs, need_distribution
from seecause.background.heads import (
    Head,
    HeadScores,
    all_heads,
    gates_without,
    need_heads,
    over_images,
    selector,
)
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.forks import HELD, fork, gated_logits
from seecause.errors import BadOption
from seecause.metrics.statistics import standard_error
from seecause.models.base import protocol
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel

Cue = Literal["background", "foreground"]
TOGETHER = (1, 2, 4, 8)  # heads that are exchanged together
UNMOVED = 1e-9  # nats: versions that differ by less are answered alike
BEYOND_ZERO = 1.96  # standard errors: a smaller mean effect cannot be told from none, at 95 %


@dataclass(frozen=True, eq=False)
class Interchange:
    """Effects of exchanging each head, [L, H] float64 on the CPU; NaN where a block has no such
    head."""

    background: Tensor  # NIE_bg
    background_error: Tensor  # standard error over pairs
    foreground: Tensor | None = None  # NIE_fg
    foreground_error: Tensor | None = None
    # JS between the answers of the whole pictures, by cue
    total: dict[str, float] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)
    total_error: dict[str, float] = field(default_factory=dict)  # NaN for one pair

    @property
    def selectivity(self) -> Tensor:
        """NIE_bg / (NIE_bg + NIE_fg), [L, H]; NaN where neither matters."""
        if self.foreground is None:
            raise BadOption(
                "swapped",
                "no foreground",
                "Swapped(background=..., foreground=...) for selectivity",
            )
        return self.background / (self.background + self.foreground)


@in_eval_mode
@torch.no_grad()
def interchange(
    model: VisionModel,
    images: Tensor,
    swapped: Swapped,
    *,
    temperature: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> Interchange:
    """Exchange every head between images [B, 3, H, W] and their counterfactuals. `progress` is told
    how many images are done, each time some are."""
    cues = _cues(model, images, swapped)
    images = images.to(model.device, model.dtype)
    layout, n, kinds = model.check(images), len(images), len(cues)
    heads = all_heads(model)
    effects = torch.full((n, kinds, model.n_layers, model.n_heads), torch.nan, dtype=torch.float64)
    totals = torch.empty(n, kinds, dtype=torch.float64)

    def run_chunk(a: int, b: int) -> int:
        rows = torch.cat(
            [*[images[a:b]] * kinds, *(other[a:b].to(images) for other in cues.values())]
        )  # each image for every cue, then its counterfactuals
        half = kinds * (b - a)
        whole, other = log_probs(model(rows), temperature).split(half)
        totals[a:b] = jensen_shannon(whole, other).double().cpu().unflatten(0, (kinds, b - a)).T

        def each(layer: int, at: list[int], logits: Tensor) -> None:
            moved = jensen_shannon(whole, log_probs(logits, temperature))  # [k, kinds * b]
            by_cue = moved.double().cpu().unflatten(1, (kinds, b - a))  # [k, kinds, b]
            effects[a:b, :, layer, at] = by_cue.permute(2, 1, 0)

        def content(layer: int, carried: Tensor, tokens: Tensor) -> Tensor:
            return carried[half:]

        fork(model, rows, heads, each, content=content, forking=half)
        return b - a

    size = fit(n, 2 * kinds * model.forward_bytes(layout), images.device, share=HELD)
    for done in in_chunks(run_chunk, n, size, what="images"):
        if progress is not None:
            progress(done)
    means, errors = effects.mean(dim=0), standard_error(effects)
    record = {"temperature": temperature, "cues": list(cues), **protocol(model, images)}
    total, total_error = (
        dict[str, float](zip(cues, values.tolist(), strict=True))
        for values in (totals.mean(dim=0), standard_error(totals))
    )
    foreground = (means[1], errors[1]) if kinds == 2 else (None, None)
    return Interchange(means[0], errors[0], *foreground, total, record, total_error)


@in_eval_mode
@torch.no_grad()
def mediated(
    model: VisionModel,
    images: Tensor,
    others: Tensor,
    heads: Sequence[Head],
    *,
    temperature: float = 1.0,
) -> float:
    """The share of the whole effect of `others` (counterfactuals of images, [B, 3, H, W]) that
    passes through `heads`, all exchanged together.

    It may exceed 1: answers need not move by the same path. NaN if the counterfactuals change no
    answer.
    """
    _cues(model, images, Swapped(others))
    images, others = images.to(model.device, model.dtype), others.to(model.device, model.dtype)
    gates = gates_without(model, heads).to(model.device)

    def run_chunk(a: int, b: int) -> Tensor:
        rows = torch.cat([images[a:b], others[a:b]])
        plain = log_probs(model(rows), temperature).unflatten(0, (2, b - a))
        mixed = gated_logits(
            model,
            rows,
            gates.expand(b - a, -1, -1),
            content=lambda layer, carried, tokens: carried[b - a :],
        )
        answers = (log_probs(mixed, temperature), plain[1])
        moved = [jensen_shannon(plain[0], answer) for answer in answers]
        return torch.stack(moved, dim=1).double().cpu()

    through, whole = over_images(run_chunk, model, images, holds=2).mean(dim=0)
    return float(through / whole)


@selector("interchange", cost="about L * H / 2 forwards for each pair", needs="pairs")
@torch.no_grad()
def interchange_scores(
    model: VisionModel,
    images: Tensor,
    labels: Tensor,
    *,
    masks: Masks | Tensor | None = None,
    baseline: Baseline | None = None,
    temperature: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> HeadScores:
    """Share of what two versions of a picture change that passes through each head.

    `baseline`: Swapped(others), the other version of each image; there is nothing to mask. The
    protocol has `mediated`, the share that the 1, 2, 4 and 8 highest carry together. Where the
    whole effect cannot be told from none, scores are nats and nothing is mediated.
    """
    if not isinstance(baseline, Swapped):
        raise BadOption(
            "baseline",
            "no other versions",
            "Swapped(others), or data with them: pairs:WITH:WITHOUT, or Critters",
        )
    others = Swapped(baseline.background)
    heads = all_heads(model)
    done = None if progress is None else lambda images: progress(images * len(heads))
    effects = interchange(model, images, others, temperature=temperature, progress=done)
    whole = effects.total["background"]
    if whole < UNMOVED:
        raise BadOption(
            "baseline",
            f"versions that move the answer by {whole:.2g} nats",
            "pairs whose answers differ: these are answered alike already",
        )
    spread = effects.total_error["background"]
    about = {**effects.protocol, "effect": whole}
    about["effect error"] = None if math.isnan(spread) else spread
    if not whole > BEYOND_ZERO * spread:
        about["mediated"] = {}
        return HeadScores(
            effects.background, effects.background_error, total=len(heads), protocol=about
        )
    value, error = effects.background / whole, effects.background_error / whole
    scores = HeadScores(value, error, total=len(heads))
    sets = {count: scores.top(count) for count in TOGETHER if count <= len(heads)}
    shares = {
        count: mediated(model, images, others.background, chosen, temperature=temperature)
        for count, chosen in sets.items()
    }
    return replace(scores, protocol={**about, "mediated": shares})


def _cues(model: VisionModel, images: Tensor, swapped: Swapped) -> dict[Cue, Tensor]:
    need_heads(model, "interchange")
    need_distribution(model, "interchange")
    swapped.check(images)
    cues: dict[Cue, Tensor] = {"background": swapped.background}
    return cues if swapped.foreground is None else {**cues, "foreground": swapped.foreground}
