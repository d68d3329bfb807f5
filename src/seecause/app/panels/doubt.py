"""Doubt: which of several maps predicts what the model does on this image?

Each map's highest tenth of patches is erased (filled with the mean colour of the model's training
data), and the model predicts again: the lower the probability of the explained class, the better
the map predicted what the model needs. As many random patches, drawn `DRAWS` times, stand beside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.app.jobs import Reply
from seecause.app.panels import (
    Names,
    Panel,
    Patching,
    answers,
    as_script,
    checked_target,
    kept,
    photo,
)
from seecause.app.panels.explain import draw
from seecause.app.state import ActionContext
from seecause.engine.chunks import plain_logits
from seecause.errors import BadOption, NotDefined
from seecause.metrics.pixels import filled, image_scorer
from seecause.models.block import spread_out

USUAL = ("mosaic", "caap", "legrad", "grad-cam", "integrated-gradients", "rise")
MOST = 4  # maps at once
SHARE = 0.1  # of the patches that are erased
DRAWS = 20  # random sets of patches
COMPARED = 64  # comparisons that are kept for each model


class Compare(Patching):
    """Without `methods`: the first four of `USUAL` that the model allows."""

    methods: Names = ()


def compare(context: ActionContext, request: Compare) -> Reply:
    """Maps, and what the model predicts without the highest tenth of each. `best` is the map with
    the lowest probability."""
    if len(request.methods) > MOST:
        raise BadOption("methods", len(request.methods), f"at most {MOST} maps")
    owner = context.session.id if context.picture(request.picture).own else ""
    key = (owner, request.model_dump_json())
    return kept(context, "compared", COMPARED, key, lambda: _compared(context, request))


def _compared(context: ActionContext, request: Compare) -> Reply:
    model, image = context.model, context.image(request.picture)
    scorer = image_scorer(model, image, checked_target(model, request.target))
    count = max(1, round(SHARE * model.layout.n_patches))
    maps, tops = list[Reply](), list[Tensor]()
    for method in request.methods or USUAL:
        context.progress(len(maps) / (MOST + 1), f"map {len(maps) + 1} of {MOST}: {method}")
        try:
            drawn = draw(context, request, method)
        except (NotDefined, RuntimeError):  # torch raises the latter where no gradient passes
            if request.methods:
                raise
            continue
        values = torch.tensor(drawn["values"], dtype=torch.double).view(1, *drawn["grid"])
        maps.append(drawn)
        tops.append(scorer.cells(values).flatten().topk(count).indices)
        if len(maps) == MOST:
            break
    context.progress(MOST / (MOST + 1), "erasing patches")
    seeded = torch.Generator().manual_seed(0)
    every = torch.ones(DRAWS, model.layout.n_patches)
    tops += every.multinomial(count, generator=seeded)
    gone = torch.zeros(len(tops), model.layout.n_patches, dtype=torch.bool)
    gone.scatter_(1, torch.stack(tops).cpu(), True)
    gone = gone.unflatten(1, model.layout.grid)
    after = (scorer.plain[:, None] - scorer.drops(gone[None]))[0]
    for drawn, top, chance in zip(maps, tops, after.tolist(), strict=False):
        drawn |= {"after": chance, "top": sorted(top.tolist())}
    best, random = int(after[: len(maps)].argmin()), after[len(maps) :]
    pixels = spread_out(gone[best : best + 1], scorer.size)
    erased = torch.where(pixels.to(image.device), filled(image, 0.0), image)
    whole, without = plain_logits(model, torch.cat([image, erased]))
    return {
        "probability": float(scorer.plain),
        "count": count,
        "maps": maps,
        "best": maps[best]["method"],
        "random": {"after": float(random.mean()), "low": float(random.min()), "draws": DRAWS},
        "erased": {"picture": photo(model, erased), "answers": answers(model, without, whole)},
    }


def copy(context: ActionContext, request: Compare) -> Reply:
    """Python code that computes these results without the app."""
    reply = compare(context, request)
    methods = [drawn["method"] for drawn in reply["maps"]]
    return as_script("doubt", context, request, count=reply["count"], methods=methods)


PANEL = Panel("doubt", "Doubt", "Which map predicts what the model does?", actions=(compare, copy))
