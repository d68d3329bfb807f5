"""An `explain_func` for Quantus. Quantus is under the GPL and is not imported here.

    explain = sc.integrations.quantus.explain_func(model)
    metric(model=model.module, x_batch=images, y_batch=labels, a_batch=None, explain_func=explain)

Quantus hands the module over with every call, and some of its metrics hand over another one (with
random weights, for one): that one is explained, seen as `model` is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find
from seecause.loading import as_view, rewrap
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel

ExplainFunction = Callable[..., np.ndarray]


def explain_func(
    model: ImageModel | nn.Module, method: str = "caap", **options: Any
) -> ExplainFunction:
    """A function (model, inputs, targets, **more) -> maps [B, 1, H, W] as Quantus calls it. Inputs
    are normalised images [B, 3, H, W]; `options` are the method's own, and what Quantus adds
    (`device` and others) is not needed.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> explain = explain_func(model, "rollout")
    >>> explain(model.module, np.zeros((1, 3, 96, 96)), np.array([2])).shape
    (1, 1, 96, 96)
    """
    view = as_view(model)
    find(method, view.architecture).check(options)

    def explain(model: Any, inputs: Any, targets: Any, **_: Any) -> np.ndarray:
        seen = _seen_as(view, model)
        images = torch.as_tensor(np.asarray(inputs))
        result = attribute(
            seen, images.to(seen.dtype), target=_labels(targets), method=method, **options
        )
        return result.pixels("nearest")[:, None].cpu().numpy()

    return explain


def _seen_as(view: ImageModel, module: Any) -> ImageModel:
    """The view of another module of its kind; of its own module, itself."""
    if module is None or module is view.module or module is view:
        return view
    if isinstance(view, VisionModel) and type(module) is type(view.module):
        return rewrap(view, module, check=False, freeze=False)
    return as_view(module)


def _labels(targets: Any) -> Any:
    return None if targets is None else np.asarray(targets).reshape(-1)
