"""Scores of heads, pruning, masks and gains on critters-biased."""

from __future__ import annotations

import torch

import seecause as sc
from tests.golden.record import Named, batch, golden, model

BIASED = "critters-biased"
SELECTORS = {
    "weight-norm": {},
    "output-norm": {},
    "taylor": {},
    "attention-mass": {},
    "loss-gain": {},
    "cigma": {"guard": "none"},
    "regression": {"draws": 24},
    "random": {},
}


@golden("heads")
def scores(dtype) -> Named:
    """Scores [L, H] of each selector."""
    view = model(BIASED, dtype)
    images, labels, masks = batch(BIASED, dtype, "critters:certified:test", 4)
    for name, options in SELECTORS.items():
        given = {"masks": masks == 1} if name in ("attention-mass", "cigma", "regression") else {}
        found = sc.background.selectors()[name].run(view, images, labels, **given, **options)
        yield name, found.value


@golden("heads", slow=True)
def cigma(dtype) -> Named:
    """Scores with each response and operator."""
    view = model(BIASED, dtype)
    images, labels, masks = batch(BIASED, dtype, "critters:certified:test", 4)
    for operator in ("zero", "mean", "resample"):
        found = sc.background.score(view, images[:3], masks[:3] == 1, operator=operator)
        yield f"{operator}/value", found.value
        yield f"{operator}/error", found.error
    for response in ("fig", "prob"):
        given = {"response": response, "target": labels[:2], "guard": False}
        yield response, sc.background.score(view, images[:2], masks[:2] == 1, **given).value


@golden("heads")
def gains(dtype) -> Named:
    """FIG and BIG by fill."""
    view = model(BIASED, dtype)
    images, _, masks = batch(BIASED, dtype, "critters:certified:test", 4)
    for fill in ("mean", "grey", "blur", "noise"):
        found = sc.background.information_gains(view, images, masks == 1, baseline=fill)
        yield f"{fill}/fig", found.fig
        yield f"{fill}/big", found.big


@golden("heads")
def discovered_masks(dtype) -> Named:
    view = model(BIASED, dtype)
    images, _, _ = batch(BIASED, dtype, "critters:certified:test", 4)
    found = sc.background.discover_masks(view, images[:2], steps=20)
    yield "soft", found.soft
    yield "hard", found.hard


@golden("heads")
def pruning(dtype) -> Named:
    """Which heads go, logits without them, and outcomes on other pictures."""
    view = model(BIASED, dtype)
    train = sc.data.open("critters:certified:train", limit=8)
    test = sc.data.open("critters:balanced:test", limit=12)
    background = sc.background.Background(masks="oracle")
    found = sc.background.prune_and_test(
        view, train, test, selector="cigma", top=4, draws=2, background=background
    )
    yield "heads", torch.tensor(found.heads)
    yield from found.changes().items()
    images, _, _ = batch(BIASED, dtype, "critters:certified:test", 4)
    with sc.background.ablate(view, found.heads):
        yield "ablated", view(images)
    yield "pruned", sc.background.prune_heads(view, found.heads)(images)


@golden("heads")
def audit(dtype) -> Named:
    found = sc.background.heads_audit(
        model(BIASED, dtype), sc.data.open("critters:certified:test", limit=8), masks="oracle"
    )
    yield "share", found.background_share
    yield "flips", found.flips
    for name, each in found.means.items():
        yield f"{name}/fig", each.fig
        yield f"{name}/big", each.big
