"""Audit, transplants, repair and discovery on critters-biased."""

import seecause as sc
from seecause.background.transplant import transplant
from tests.golden.record import Named, batch, golden, model

BIASED = "critters-biased"


@golden("background")
def transplants(dtype) -> Named:
    images, labels, masks = batch(BIASED, dtype, "critters:certified:train", 8)
    grid = masks[:, 4::8, 4::8] == 1  # one pixel of each patch stands for it
    data = sc.background.LabelledImages(images, labels, grid)
    yield "images", transplant(data, per_image=2, seed=1)[:]


def numbers(judged) -> Named:
    """Flips as they were recorded: of all predictions, not of correct ones alone."""
    every = {"flips": False, "control flips": True}
    for name, value in judged.numbers().items():
        if name in every:
            value = float(judged.flips_by_image(control=every[name]).nanmean())
        yield name, value


@golden("background")
def audit(dtype) -> Named:
    data = sc.data.open_data("critters:certified:test", limit=16)
    found = sc.audit(model(BIASED, dtype), data, per_image=2)
    yield from numbers(found.judged)
    yield "interval", found.interval
    yield "extra", found.extra_flips_by_image
    if found.gains is not None:
        yield "fig", found.gains.fig
        yield "big", found.gains.big


@golden("background")
def repair(dtype) -> Named:
    """The last-layer remedies: numbers before and after, and the new layer."""
    data = sc.data.open_data("critters:certified:train", limit=40)
    found = sc.repair(
        model(BIASED, dtype), data, per_image=2, remedies=["last-layer", "directions"]
    )
    for when in ("before", "after"):
        for name, value in numbers(getattr(found, when).judged):
            yield f"{when}/{name}", value
    images, _, _ = batch(BIASED, dtype, "critters:certified:test", 4)
    yield "logits", found.model(images)


@golden("background", slow=True)
def discover(dtype) -> Named:
    data = sc.data.open_data("critters:certified:train", limit=24)
    found = sc.discover(model(BIASED, dtype), data, method="gae", kinds=8, top=4, trials=8, most=4)
    yield "count", len(found.findings)
    for number, each in enumerate(found.findings):
        yield f"{number}/flips", each.flips
        yield f"{number}/control", each.control
