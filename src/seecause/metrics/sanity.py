"""Metrics that compute maps again, for another class or another model. For both lower is better.

random logit              A(x, y) against A(x, y') for another class (Sixt et al. 2020)
parameter randomisation   A(x) against maps of models whose layers are redrawn one after the other,
                          from the head down to the embedding (Adebayo et al. 2018)

Maps are compared by Spearman's correlation, of the signed values and of their sizes. A similarity
near 1 is bad: the map would be the same for another model, or for another class. Each parameter
tensor is redrawn from a normal distribution with its own mean and deviation, so that activations
keep their scale. Buffers stay. The randomised model is a wrapped deep copy; the model itself is not
touched.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict

import torch
from torch import Tensor, nn

from seecause.errors import NotDefined, UnsupportedModel
from seecause.loading import rewrap, wrap
from seecause.metrics.pixels import bound_spec, checked, image_scorer
from seecause.metrics.registry import Attribute, Explain, Scores, metric
from seecause.metrics.statistics import rank_correlation
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel
from seecause.target import Spec


@metric("random-logit")
def random_logit(
    model: ImageModel, images: Tensor, explain: Explain, target: Spec = None, *, seed: int = 0
) -> Scores:
    """Similarity of maps of two classes: high if maps do not depend on the class.

    The other class is drawn once, the same step away from each image's own.
    """
    scorer = image_scorer(model, images, target)
    if scorer.target.classes is None or model.n_classes < 2:
        what = "a function of logits" if scorer.target.classes is None else "a single class"
        raise NotDefined("random logit", f"{what} has no other class", "Give a class as target=")
    step = torch.randint(1, model.n_classes, (), generator=torch.Generator().manual_seed(seed))
    other = (scorer.target.classes + int(step)) % model.n_classes
    signed, absolute = _similarity(
        explain(scorer.images, bound_spec(scorer.target, target)), explain(scorer.images, other)
    )
    return Scores({"random-logit": signed, "random-logit-abs": absolute})


@metric("parameter-randomisation")
def parameter_randomisation(
    model: ImageModel,
    images: Tensor,
    attribute: Attribute,
    target: Spec = None,
    *,
    seed: int = 0,
) -> Scores:
    """Similarity of maps of the model and of randomised copies: high if maps do not depend on
    weights.

    `attribute(model, images, target)` explains the model and each randomised copy, one for each
    layer; in the last one all layers are redrawn.
    """
    scorer = image_scorer(model, images, target)
    spec = bound_spec(scorer.target, target)
    plain, other = attribute(model, scorer.images, spec), copied_view(model)
    generator = torch.Generator().manual_seed(seed)
    by_layer = {}
    for layer, parameters in layer_groups(other).items():
        for parameter in parameters:
            if parameter.numel() > 1:  # a single number has no deviation
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                with torch.no_grad():
                    noise = noise.to(parameter) * parameter.std()
                    parameter.copy_(parameter.mean() + noise)
        by_layer[layer] = _similarity(plain, attribute(other, scorer.images, spec))
    signed, absolute = torch.stack(list(by_layer.values()), dim=-1)  # [B, steps] each
    return Scores(
        {"mprt": signed.mean(dim=1), "mprt-abs": absolute.mean(dim=1)},
        {"layers": tuple(by_layer), "signed": signed, "absolute": absolute},
    )


def copied_view(model: ImageModel) -> ImageModel:
    """A view of a deep copy: no tensor is shared."""
    module = copy.deepcopy(model.module)
    try:
        if not isinstance(model, VisionModel):
            return wrap(
                module, name=model.name, preprocess=model.preprocess, classes=model.classes,
                head=copy.deepcopy(model.extra), sigmoid=model.sigmoid, check=False,
            )  # fmt: skip
        other = rewrap(model, module, check=False)
    except UnsupportedModel as refused:
        reason = f"a copy of {model.name} cannot be wrapped ({refused})"
        raise NotDefined("parameter randomisation", reason, "Use another metric") from refused
    if model.gates is not None:
        other.gates = model.gates.clone()
    return other


def layer_groups(model: ImageModel) -> dict[str, list[nn.Parameter]]:
    """Parameters by layer, last layer first: a block of a numbered list is one layer, and so is any
    other module with parameters of its own."""
    named = list(model.module.named_parameters())
    if model.extra is not None:
        named += [("added head.", parameter) for parameter in model.extra.parameters()]
    groups = defaultdict[str, list[nn.Parameter]](list)
    for name, parameter in reversed(named):
        block = re.match(r"(.*?\.)?\d+(?=\.|$)", name)  # blocks.3 of blocks.3.attn.qkv.weight
        groups[block[0] if block else name.rpartition(".")[0] or name].append(parameter)
    return groups


def _similarity(first: Tensor, second: Tensor) -> Tensor:
    """[2, B] float64: Spearman's correlation of two maps, of signed values and of sizes."""
    x, y = (checked(maps).cpu() for maps in (first, second))
    return torch.stack([rank_correlation(x, y), rank_correlation(x.abs(), y.abs())])
