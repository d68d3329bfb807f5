"""What shapes the parts (PDiscoFormer, ECCV 2024; iFAM, arXiv 2506.08915). All on the soft maps A
[B, K + 1, gh, gw] of the plain image.

presence        every part is somewhere in the batch, on 3 x 3 patches        1 - mean_k max_{b, i,
j} pool(A_k)
background      the background is at the border of every image                -log max_ij m_ij
pool(A_bg)
total variation maps are of one piece                                         sum |A(i+1, j) - A(i,
j)| + |A(i, j+1) - A(i, j)|, per patch
entropy         every patch decides                                           -sum_k A_k log A_k
orthogonality   parts say different things (on their embeddings, or on the prototypes)
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from seecause.errors import BadOption

Orthogonality = Literal["parts", "ifam_code", "prototypes"]


def presence_loss(maps: Tensor, *, across: Literal["global", "local"] = "global") -> Tensor:
    """1 - the mean over foreground parts of their strongest 3 x 3 neighbourhood in the batch.

    `global`: the batch of all processes, with gradient to the process that has the strongest;
    `local`: of this process.
    """
    best = _pooled(maps[:, :-1]).flatten(2).max(dim=2).values.max(dim=0).values  # [K]
    if (
        across == "global"
        and dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
    ):
        best = _MaxOverProcesses.apply(best)
    return 1 - best.mean()


def background_loss(maps: Tensor) -> Tensor:
    """-log of the background's strongest 3 x 3 neighbourhood, weighed by how near it is to the
    border; logarithms end at -100."""
    pooled = _pooled(maps[:, -1:])[:, 0]
    strongest = (pooled * border(*pooled.shape[1:], like=pooled)).flatten(1).max(dim=1).values
    strongest = strongest.nan_to_num(0.0).clamp(
        0, 1
    )  # no number fails here otherwise, without a name; the other losses still show it
    return F.binary_cross_entropy(strongest, torch.ones_like(strongest))


def border(rows: int, columns: int, *, like: Tensor) -> Tensor:
    """(x^2 + y^2) / 2 for x, y in [-1, 1]: 1 in corners, 0.5 in the middle of edges, 0 in the
    centre."""
    y, x = (torch.linspace(-1, 1, n, dtype=like.dtype, device=like.device) for n in (rows, columns))
    return (y[:, None].square() + x.square()) / 2


def total_variation_loss(maps: Tensor) -> Tensor:
    """Absolute differences of neighbours, summed over all K + 1 maps, per patch."""
    down, across = maps.diff(dim=2).abs().sum(), maps.diff(dim=3).abs().sum()
    return (down + across) / (maps.shape[0] * maps.shape[2] * maps.shape[3])


def entropy_loss(maps: Tensor) -> Tensor:
    """Mean entropy of a patch's assignment, in nats."""
    sure = maps.clamp_min(torch.finfo(maps.dtype).eps)
    return -(maps * sure.log()).sum(dim=1).mean()


def orthogonality_loss(
    embeddings: Tensor, *, form: Literal["parts", "ifam_code"] = "parts"
) -> Tensor:
    """How much the modulated embeddings [B, D, K + 1] overlap, background included.

    `parts`: the mean square of U^T U - I for unit columns U (PDiscoFormer). `ifam_code`: the
    trainer of iFAM hands over the transpose, so that features are normalised over parts and the
    Gram matrix is D x D; computed here as (|V V^T|^2 - D) / D^2 with V (K + 1) x D.
    """
    if form == "parts":
        unit = F.normalize(embeddings, dim=1)
        gram = unit.transpose(1, 2) @ unit
        return (
            (gram - torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)).square().mean()
        )
    unit, width = F.normalize(embeddings, dim=2), embeddings.shape[1]
    gram = unit.transpose(1, 2) @ unit  # [B, K + 1, K + 1], the same squares as the D x D one
    return ((gram.square().sum(dim=(1, 2)) - width) / width**2).mean()


def check_grid(grid: tuple[int, int]) -> None:
    """Refuse pictures of too few patches to learn from."""
    if min(grid) < 3:
        raise BadOption(
            "grid",
            grid,
            "at least 3 x 3 patches, over which presence is pooled: give a larger size, or a"
            " backbone of smaller patches",
        )


def _pooled(maps: Tensor) -> Tensor:
    """3 x 3 means, without padding."""
    check_grid((maps.shape[2], maps.shape[3]))
    return F.avg_pool2d(maps, 3, stride=1)


class _MaxOverProcesses(Function):
    """The maximum [K] over processes. Every process adds the same loss and gradients are averaged
    afterwards, so the owner gets the sum."""

    @staticmethod
    def forward(ctx: Any, best: Tensor) -> Tensor:
        every = [torch.empty_like(best) for _ in range(dist.get_world_size())]
        dist.all_gather(every, best.contiguous())
        top, owner = torch.stack(every).max(dim=0)
        ctx.save_for_backward(owner == dist.get_rank())
        return top

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        (mine,) = ctx.saved_tensors
        slope = slope.contiguous()
        dist.all_reduce(slope)
        return slope * mine
