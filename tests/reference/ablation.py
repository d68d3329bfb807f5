"""Head removal by editing native weights, in two ways that must agree: columns of O, or rows of V
with their bias."""

import copy
from collections.abc import Sequence

from torch import Tensor, nn


def edited(
    module: nn.Module, heads: Sequence[tuple[int, int]], head_dim: int, *, way: str
) -> nn.Module:
    """A copy whose heads (layer, head) say nothing. `way`: "output" zeroes columns of W_O, "value"
    zeroes rows of W_V and b_V."""
    module = copy.deepcopy(module)
    for layer, head in heads:
        part = slice(head * head_dim, (head + 1) * head_dim)
        weight, bias, out = _projections(_stack(module)[layer])
        if way == "output":
            out[:, part] = 0
        else:
            weight[part] = 0
            if bias is not None:
                bias[part] = 0
    return module


def _stack(module: nn.Module) -> Sequence[nn.Module]:
    stacks = [
        m
        for m in module.modules()
        if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) and _names(m[0])
    ]
    return max(stacks, key=len)


def _names(block: nn.Module) -> dict[str, Tensor]:
    """The attention's own parameters, by the end of their name."""
    return {
        name: value
        for name, value in block.named_parameters()
        if any(part in name for part in ("attn.", "attention."))
    }


def _projections(block: nn.Module) -> tuple[Tensor, Tensor | None, Tensor]:
    """W_V [H*dh, D], b_V, and W_O [D, H*dh], as views that can be written to."""
    named = _names(block)

    def find(*ends: str) -> Tensor | None:
        return next((value for name, value in named.items() if name.endswith(ends)), None)

    out = find("attn.proj.weight", "o_proj.weight", "out_proj.weight", "output.dense.weight")
    packed = find("qkv.weight", "in_proj_weight")
    if packed is not None:
        last, bias = slice(2 * len(packed) // 3, None), find("qkv.bias", "in_proj_bias")
        return packed[last], None if bias is None else bias[last], out
    return find("v_proj.weight", "value.weight"), find("v_proj.bias", "value.bias"), out
