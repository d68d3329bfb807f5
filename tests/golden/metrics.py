"""Every registered metric of CAAP maps, and metrics of models."""

import torch

import seecause as sc
from seecause import critters
from seecause.metrics import MetricInputs, measure
from seecause.metrics.registry import HOMES
from seecause.metrics.statistics import auroc, bootstrap_interval, nll
from tests.golden.record import Named, batch, golden, model

OPTIONS = {}
COSTLY = {"parts", "parameter-randomisation", "perturbation"}


def inputs(dtype, count: int) -> MetricInputs:
    view = model("critters-vit", dtype)
    images, labels, masks = (x[:count] for x in batch("critters-vit", dtype))

    def attribute(module, pictures, target):
        return sc.attribute(module, pictures, target, tail="source").maps

    def explain(pictures, target):
        return attribute(view, pictures, target)

    latents = critters.draw("clean", "test", count)
    maps = explain(images, labels)
    return MetricInputs(view, images, maps, labels, masks, explain, attribute, latents)


@golden("metrics")
def of_maps(dtype) -> Named:
    given = inputs(dtype, 4)
    for name in HOMES:  # metrics of the package, not those that another test registers
        if name not in COSTLY:
            for column, value in measure(name, given, **OPTIONS.get(name, {})).items():
                yield f"{name}/{column}", value


@golden("metrics", slow=True)
def costly(dtype) -> Named:
    given = inputs(dtype, 2)
    for name in sorted(COSTLY):
        for column, value in measure(name, given, **OPTIONS.get(name, {})).items():
            yield f"{name}/{column}", value


@golden("metrics")
def of_models(dtype) -> Named:
    noise = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 5, generator=noise, dtype=torch.float64).to(dtype)
    labels = torch.randint(5, (64,), generator=noise)
    groups = torch.randint(4, (64,), generator=noise).tolist()
    yield "nll", nll(logits, labels)
    found = sc.metrics.calibration(logits, labels)
    yield "ece", found.error
    by_group = sc.metrics.group_accuracy(logits.argmax(dim=1) == labels, groups)
    yield "worst", by_group.worst
    yield "auroc", auroc(logits, labels)
    yield "bootstrap", bootstrap_interval(logits[:, 0].double())
