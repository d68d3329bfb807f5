"""Models that lose gradients (layers without one, weights of inference mode): every method that
needs one says so and names CAAP, which answers; nothing is wrong in silence."""

from functools import cache

import pytest
import torch
from torch import nn

import seecause as sc
from seecause.attribution.registry import methods
from seecause.errors import NotDefined
from tests.helpers import view
from tests.tiny import pictures, tiny

FEW = {
    "bt": {"steps": 2}, "tam": {"steps": 2}, "mosaic": {"masks": 2}, "caap+mosaic": {"masks": 2},
    "integrated-gradients": {"steps": 2}, "smoothgrad": {"samples": 2},
}  # fmt: skip
LOST = r"(blocks\.\d.*quantised|inference).*caap"


def in_need(architecture):
    """Names of methods that take gradients."""
    return [name for name, entry in methods(architecture).items() if "gradients" in entry.needs]


class Detached(nn.Module):
    """A layer that computes without a graph, as kernels of other libraries do."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.detach())


@cache
def broken(how):
    """A model that loses gradients, and pictures for it."""
    if how == "weights of inference mode":
        with torch.inference_mode():
            native = tiny("timm_deit3", dtype=torch.float32)
        return view(native, check=False), pictures(native)
    native = tiny("timm_deit3", dtype=torch.float32)
    part = native.module.blocks[-1].attn
    part.proj = Detached(part.proj)
    return view(native, check=False), pictures(native)


@pytest.mark.parametrize("how", ["detached", "weights of inference mode"])
@pytest.mark.parametrize("name", in_need("transformer"))
def test_every_method_that_takes_gradients_names_caap(name, how):
    model, images = broken(how)
    with pytest.raises(NotDefined, match=LOST):
        sc.attribute(model, images, 0, name, **FEW.get(name, {}))


@pytest.mark.parametrize("how", ["detached", "weights of inference mode"])
def test_caap_answers_where_gradients_are_lost(how):
    model, images = broken(how)
    assert sc.attribute(model, images, 0, "caap").maps.isfinite().all()
