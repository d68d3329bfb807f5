"""Small native models of every supported family, scrambled so that no part of them is idle."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from tests.families import hf, open_clip, timm, torchvision
from tests.families.native import Native

LIBRARIES = [timm, hf, torchvision, *([open_clip] if find_spec("open_clip") else [])]
FAMILIES: dict[str, Callable[[], Native]] = {
    name: make for library in LIBRARIES for name, make in library.FAMILIES.items()
}


def scramble(module: nn.Module, seed: int = 0) -> nn.Module:
    """Redraw every parameter (biases, LayerScale, norms, tokens, head) so that each of them
    matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim >= 2 and min(parameter.shape[0], parameter[0].numel()) > 1:
                value = noise * 1.2 / parameter[0].numel() ** 0.5
            elif parameter.ndim == 1 and name.endswith("weight"):  # norms
                value = 1 + 0.3 * noise
            elif name.endswith("logit_scale"):  # of a cosine
                value = 3 + 0.5 * noise
            else:
                value = 0.5 * noise
            parameter.copy_(value.reshape(parameter.shape))
    return module.eval()


def tiny(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Native:
    """A scrambled model of one family."""
    torch.manual_seed(seed)
    native = FAMILIES[family]()
    scramble(native.module, seed)
    native.module.to(dtype)
    native.module.requires_grad_(False)
    return native


def pictures(native: Native, batch: int = 2, seed: int = 1) -> Tensor:
    """Normalised noise [B, 3, H, W] in the model's dtype."""
    generator = torch.Generator().manual_seed(seed)
    like = next(native.module.parameters())
    return torch.randn(batch, 3, *native.size, generator=generator, dtype=torch.float64).to(
        like.dtype
    )
