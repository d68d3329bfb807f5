"""A block whose attention has lost its last head: what is left is the bias of its output
projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from seecause.models.block import Block, Fn


class Constant(nn.Module):
    """In place of an attention module: its output bias, [D], for every row. Some libraries return
    the attention weights too, as a `pair`."""

    def __init__(self, bias: Tensor, *, pair: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.pair = pair

    def forward(self, x: Tensor | None = None, *args: Any, **options: Any) -> Any:
        rows = self.rows(options["hidden_states"] if x is None else x)
        return (rows, None) if self.pair else rows

    def rows(self, x: Tensor) -> Tensor:
        """[B, R, anything] -> [B, R, D]."""
        return self.bias.expand(*x.shape[:-1], -1)


def silent(mix: Fn) -> dict[str, Any]:
    """What a `Block` needs for such an attention. One head of width one stays, which says nothing:
    engines and methods need no special case."""
    return {
        "heads": 1,
        "head_dim": 1,
        "scale": 1.0,
        "project": _nothing,
        "mix": lambda heads: mix(heads[..., :0]),
    }


def is_silent(block: Block) -> bool:
    """Whether a block has no head left."""
    return block.project is _nothing


def _nothing(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    nothing = x.new_zeros(*x.shape[:-1], 1, 1)  # [B, R, 1, 1]
    return nothing, nothing, nothing
