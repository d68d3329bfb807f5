"""Scores of heads, pruning, masks and gains on critters-biased."""

from dataclasses import replace

import torch

import seecause as sc
from tests.golden.record import Named, batch, golden, model

BIASED = "critters-biased"
SELECTORS = {
    "taylor": {},
    "attention-mass": {},
    "cigma": {"guard": False},
    "random": {},
}


def labelled(dtype) -> sc.background.LabelledImages:
    images, labels, masks = batch(BIASED, dtype, "critters:certified:test", 4)
    return sc.background.LabelledImages(images, labels, masks == 1)


@golden("heads")
def scores(dtype) -> Named:
    """Scores [L, H] of each selector."""
    data = labelled(dtype)
    for name, options in SELECTORS.items():
        found = sc.background.selectors()[name].run(model(BIASED, dtype), data, **options)
        yield name, found.value


@golden("heads", slow=True)
def cigma(dtype) -> Named:
    """Scores with each response and operator."""
    view, data = model(BIASED, dtype), replace(labelled(dtype), labels=None)
    labels = labelled(dtype).labels[:2]
    for operator in ("zero", "mean", "resample"):
        found = sc.background.score(view, data.take(torch.arange(3)), operator=operator)
        yield f"{operator}/value", found.value
        yield f"{operator}/error", found.error
    for response in ("fig", "prob"):
        given = {"response": response, "target": labels, "guard": False}
        yield response, sc.background.score(view, data.take(torch.arange(2)), **given).value


@golden("heads")
def gains(dtype) -> Named:
    """FIG and BIG by fill."""
    view, data = model(BIASED, dtype), labelled(dtype)
    for fill in ("mean", "grey", "blur", "noise"):
        found = sc.background.information_gains(view, data, fill=fill)
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
    train = sc.data.open_data("critters:certified:train", limit=8)
    test = sc.data.open_data("critters:balanced:test", limit=12)
    found = sc.background.prune_and_test(view, train, test, top=4, draws=2, masks="given")
    yield "heads", torch.tensor(found.heads)
    yield from found.changes().items()
    images, _, _ = batch(BIASED, dtype, "critters:certified:test", 4)
    with sc.background.ablate(view, found.heads):
        yield "ablated", view(images)
    yield "pruned", sc.background.prune_heads(view, found.heads)(images)


@golden("heads")
def audit(dtype) -> Named:
    """FIG and BIG of correct predictions by every erasure, and flips by exact swaps."""
    view, data = model(BIASED, dtype), sc.data.open_data("critters:certified:test", limit=8)
    data = sc.background.read_images(view, data)
    data, predicted = data.with_masks(data.truth), view(data.images).argmax(dim=1)
    yield "flips", view(data.other_background).argmax(dim=1) != predicted
    correct = data.take(predicted == data.labels)
    names = {"mean": "true masks, mean", "grey": "true masks, grey", "swap": "exact swap"}
    for fill, name in names.items():
        each = sc.background.information_gains(view, correct, fill=fill)
        yield f"{name}/fig", each.fig
        yield f"{name}/big", each.big
