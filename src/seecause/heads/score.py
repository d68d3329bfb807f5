"""What a response loses when a head goes (CIGMA, phase 3), for every head, by exact suffix runs.

    score(h) = mean over images of  R - R^(-h),          CIGMA(h): R = BIG

A head with a positive CIGMA score made the answer hang on the background. The score alone can be
fooled: a head whose removal makes all answers alike has BIG^(-h) = 0 and the highest score there
is. So accuracy, NLL, entropy and (with `guard`) FIG without the head come along: see `guard`.

    zero       the head carries nothing (the paper)
    mean       what it carries on average over the images, token by token
    resample   what it carries in another image (a seeded derangement); the same donor for all
    versions of an image
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from seecause.engine.forks import inert
from seecause.errors import BadOption
from seecause.heads.erase import Baseline
from seecause.heads.masks import Masks
from seecause.heads.responses import OF_MASKS, Response
from seecause.heads.result import Head, HeadScores
from seecause.heads.study import Operator, Study, check_heads
from seecause.models.view import VisionModel
from seecause.target import Spec


@torch.no_grad()
def score(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None = None,
    *,
    response: Response | Callable[[Tensor], Tensor] = "big",
    target: Spec = None,
    operator: Operator = "zero",
    baseline: Baseline = "grey",
    guard: bool = True,
    temperature: float = 1.0,
    entropy_match: bool = False,
    heads: Sequence[Head] | None = None,
    per_image: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> HeadScores:
    """Scores [L, H] of every head (or of `heads`; the others are NaN) on normalised images [B, 3,
    H, W].

    `target` is the class that `prob`, `logit` and `nll` speak of, and what accuracy and NLL are
    measured against: None for the model's own answers, or labels. `temperature` is that of the
    answers that BIG, FIG and entropy compare. `guard` also runs the pictures without foreground
    (half as much again). `entropy_match` measures each ablated model at the temperature that gives
    it the whole model's mean entropy, so that flatter answers do not pass for fewer background
    cues; it keeps all logits. `progress` is told how many (image, head) pairs are done, each time
    some are.
    """
    if entropy_match and response not in OF_MASKS:
        raise BadOption(
            "entropy_match",
            True,
            "False: only response='big' and 'fig' compare answers at a temperature",
        )
    study = Study(
        model,
        images,
        masks,
        response=response,
        target=target,
        operator=operator,
        baseline=baseline,
        guard=guard,
        temperature=temperature,
        seed=seed,
    )
    chosen = study.heads if heads is None else check_heads(model, heads)
    silent = inert(model)
    running = [head for head in chosen if head not in silent]
    table = study.run(running, progress=progress, entropy_match=entropy_match)
    for head in chosen:
        if head in silent:
            table.copy_plain(head)
    if progress is not None and len(running) < len(chosen):
        progress((len(chosen) - len(running)) * len(study.images))
    said = {
        "operator": operator,
        "temperature": temperature,
        "entropy_match": entropy_match,
        "guard": guard,
        "seed": seed,
        "heads_run": len(running),
    }
    return table.scores(
        total=len(study.heads), per_image=per_image, protocol={**study.record(), **said}
    )
