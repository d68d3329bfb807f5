"""The two stages of iFAM (arXiv 2506.08915) as modules: parts from patch features, and a classifier
that reads selected patches only. Each has its own copy of a backbone, a native vision transformer
that is read through its view, so that any family works.

Attention of stage 2 reads some keys only. A gradient reaches the selection in one of three ways,
and in packed rows hidden tokens cost nothing:

none   hidden keys are masked; the selection is a constant (as in the released code)
ste    a_ij = s_j e^{q_i.k_j} / sum_l s_l e^{q_i.k_l} with s in {0, 1}: exact, also for hidden keys,
           d out_i / d s_j = e^{q_i.k_j} (v_j - out_i) / Z_i
soft   bias log(f_j + 1e-10): every key is read a little (an ablation)

Views of networks of these stages make every method and metric work on them.
Two stages: the mask of stage 1 is a fact about tokens (models/block.py), which goes into the blocks
of stage 2 and hides keys wherever a method puts them. It is recomputed when a method changes the
pixels, but no gradient flows through it. One stage (PDiscoFormer): the shares of a patch in all
parts depend on that patch alone, so its features times its shares are a row, the mean over patches
is the part embeddings, and the votes are a head.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seecause.background.masks import otsu
from seecause.engine.attend import Groups
from seecause.engine.chunks import fit
from seecause.engine.graphs import ModuleOwner, captured
from seecause.engine.trace import probabilities
from seecause.engine.walk import walk
from seecause.errors import NotDefined, UnsupportedModel
from seecause.faithful.parts import Assignment, Modulation
from seecause.models.block import Named, TokenLayout, chain, fused, hiding, wide
from seecause.models.parts import Parts, find_parts
from seecause.models.transformers import tower_of

if TYPE_CHECKING:
    from seecause.faithful.net import IFAM

Gradient = Literal["ste", "none", "soft"]
# q, k, v [B, H, T, dh], scale -> [B, T, H, dh]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]

# the largest log odds of a hidden key; beyond it, products with zero would overflow
_HOTTEST = 30.0


def reads_only(visible: Tensor) -> Attend:
    """Attention to the visible keys [B, T] (bool) only."""
    return lambda q, k, v, scale: fused(q, k, v, scale, visible[:, None, None])


def reads_straight_through(weights: Tensor) -> Attend:
    """Attention to the keys with weight 1 of [B, T]; the weights get the gradient of the relaxed
    attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k = q.to(v.dtype), k.to(v.dtype)  # norms widen them under autocast
        return _Relaxed.apply(q, k, v, weights, scale).transpose(1, 2)

    return attend


def reads_softly(share: Tensor) -> Attend:
    """Attention to every key j in proportion to its share [B, T]."""
    bias = torch.log(share + 1e-10)[:, None, None]
    return lambda q, k, v, scale: fused(q, k, v, scale, bias.to(q.dtype))


def reads_packed(groups: Groups) -> Attend:
    """Attention of rows of all images end to end, [1, H, R, dh], within each image: by a kernel for
    sequences of different lengths where there is one, image by image elsewhere."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k = q.to(v.dtype), k.to(v.dtype)  # norms widen them under autocast
        if has_kernel(q.device, q.dtype) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
            from torch.nn.attention.varlen import varlen_attn

            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [R, H, dh]
            starts, longest = groups.starts, groups.longest
            o = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale)
            assert isinstance(o, Tensor)
            return o[None]
        sizes = groups.sizes.tolist()
        images = zip(q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2), strict=True)
        return torch.cat([fused(q, k, v, scale) for q, k, v in images], dim=1)

    return attend


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for sequences of different lengths: in half precision, on GPUs from
    Ampere on."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


class _Relaxed(Function):
    """Forward: the fused kernel with a mask. Backward: the probabilities are recomputed, a few
    images at a time, for the rows that have a gradient. Those are few: no row reads a hidden token,
    and only the class token of the last block is read."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, scale: float) -> Tensor:
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=(weights > 0)[:, None, None], scale=scale
        )
        ctx.save_for_backward(q, k, v, weights, o)
        ctx.scale = scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        q, k, v, weights, o = ctx.saved_tensors
        sloping = slope.ne(0).any(dim=3).any(dim=1)  # [B, T], rows with a gradient
        most = max(1, int(sloping.sum(dim=1).max()))
        order = sloping.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        # [B, H, n, dh]; images with fewer rows add rows whose gradient is zero
        rows = order[:, None, :most, None].expand(-1, q.shape[1], -1, q.shape[3])
        each = 5 * q.shape[1] * most * k.shape[2] * wide(q[:0]).element_size()
        size = fit(len(q), each, q.device)
        tensors = (q.gather(2, rows), k, v, weights, o.gather(2, rows), slope.gather(2, rows))
        chunks = zip(*(tensor.split(size) for tensor in tensors), strict=True)
        grads = [_relaxed_grads(*chunk, scale=ctx.scale) for chunk in chunks]
        d_rows, *others = (torch.cat(pieces) for pieces in zip(*grads, strict=True))
        return torch.zeros_like(q).scatter_(2, rows, d_rows), *others, None


def _relaxed_grads(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, o: Tensor, slope: Tensor, *, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of q [B, H, n, dh], k, v [B, H, T, dh] and of weights [B, T], from the slope at the
    output o."""
    keys = weights[:, None, None]
    # rounding scores to bfloat16 would bias every probability
    scores = (wide(q) @ wide(k).transpose(-1, -2)).mul_(scale)
    total = scores.masked_fill(keys == 0, -torch.inf).logsumexp(dim=-1, keepdim=True)
    odds = scores.sub_(total).clamp_(max=_HOTTEST).exp_()  # a_ij / s_j
    probs = (odds * keys).to(q.dtype)
    # slope_i . (v_j - o_i)
    spread = odds.mul_(slope @ v.transpose(-1, -2) - wide(slope * o).sum(dim=-1, keepdim=True))
    d_scores = (spread * (keys * scale)).to(q.dtype)
    return (
        d_scores @ k,
        d_scores.transpose(-1, -2) @ q,
        probs.transpose(-1, -2) @ slope,
        spread.sum(dim=(1, 2)).to(weights.dtype),
    )


_TOKENS = re.compile(
    r"(^|\.)((cls|class|reg|register|dist|distillation)_(tokens?|embedding)"
    r"|pos(ition|itional)?_embed\w*)(\.weight)?$"
)
_STEP = 32  # numbers of packed rows are rounded up to multiples of at least this
# up to this many rows, all are run and not counted (that would synchronise with the device):
# smaller batches are not faster
_FEW = 512
# parameters that no patch or class token depends on
_UNUSED = re.compile(r"(^|\.)(pooler|mask_token)(\.|$)")


class Backbone(nn.Module):
    """A copy of `backbone` without its classifier, always in eval mode, because its own dropout is
    not part of the method."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        # a classifier that is never run must not be trained, saved or counted
        native: Any = copy.deepcopy(backbone)
        if hasattr(native, "reset_classifier"):  # timm
            native.reset_classifier(0)
        elif hasattr(native, "classifier"):  # transformers
            native = tower_of(native)
        elif hasattr(native, "heads"):  # torchvision
            native.heads = nn.Sequential(nn.Identity())
        self.native: nn.Module = native
        self.train(False)
        for name, parameter in self.native.named_parameters():
            parameter.requires_grad_(_UNUSED.search(name) is None)
        name, remedy = type(backbone).__name__, "use a plain vision transformer"
        if self.parts.facts is not None or not self.parts.blocks:
            raise UnsupportedModel(name, "it decides by itself what each token sees", remedy)
        block = self.parts.blocks[0]
        if block.additive is not None or block.kv_heads != block.heads:
            reason = "its attention has a bias of its own or shares keys between heads"
            raise UnsupportedModel(name, reason, remedy)

    @cached_property
    def parts(self) -> Parts:
        """The view of the native module. It refers to that module, so every copy of a tower makes
        its own."""
        parts = find_parts(self.native)
        if not isinstance(parts, Parts):
            name = type(self.native).__name__
            raise UnsupportedModel(name, "it has no tokens", "use a vision transformer")
        return parts

    def __getstate__(self) -> Named:
        return {name: value for name, value in self.__dict__.items() if name != "parts"}

    def train(self, mode: bool = True) -> Backbone:
        super().train(False)
        return self

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.parts.blocks[0].heads * self.parts.blocks[0].head_dim

    def layout(self, images: Tensor) -> TokenLayout:
        """The tokens of these images."""
        return self.parts.layout_at(*images.shape[-2:])

    def features(self, images: Tensor) -> Tensor:
        """Patch tokens after the final norm, [B, N, D], by the module's own forward."""
        return self.parts.native_tokens(images)[:, self.layout(images).patches]

    def freeze(self) -> None:
        """Only special tokens and positions stay trainable."""
        for name, parameter in self.native.named_parameters():
            parameter.requires_grad_(is_token(name))


def _classifier(width: int, classes: int) -> nn.Linear:
    head = nn.Linear(width, classes, bias=False)
    nn.init.trunc_normal_(head.weight, std=0.02)
    return head


class PartStage(nn.Module):
    """Stage 1: K parts and the background."""

    def __init__(self, backbone: nn.Module, *, parts: int, classes: int, joint: bool):
        super().__init__()
        self.tower = Backbone(backbone)
        bound = self.tower.width**-0.5  # as a 1 x 1 convolution's weights
        prototypes = torch.empty(parts + 1, self.tower.width).uniform_(-bound, bound)
        self.prototypes = nn.Parameter(prototypes)
        self.modulation = Modulation(self.tower.width, parts + 1, joint=joint)
        self.classifier = _classifier(self.tower.width, classes)

    def assign(self, features: Tensor) -> Assignment:
        """Patch features [B, N, D] against every prototype, never in half precision, because small
        differences of distances decide."""
        with torch.autocast(features.device.type, enabled=False):
            z, p = wide(features), wide(self.prototypes)
            squares, own = (each.square().sum(dim=-1) for each in (z, p))
            dots = p @ z.transpose(1, 2)  # [B, K + 1, N]
            return Assignment(dots, squares[:, None] - 2 * dots + own[:, None])


class MaskedStage(nn.Module):
    """Stage 2: the class token of a backbone whose rows see special tokens and selected patches
    only, from the first block on."""

    prefix: Tensor

    def __init__(self, backbone: nn.Module, *, classes: int):
        super().__init__()
        self.tower = Backbone(backbone)
        layout = self.tower.parts.layout_at(*(self.tower.parts.size or self.tower.parts.patch))
        if layout.class_index is None:
            reason = "stage 2 is read from a class token, and it has none"
            remedy = "use a backbone with one, or stages=1"
            raise UnsupportedModel(type(backbone).__name__, reason, remedy)
        self.fc_norm = nn.LayerNorm(self.tower.width)
        self.head = _classifier(self.tower.width, classes)
        # outputs of blocks, for the verification of a view
        self.taps = nn.ModuleList(nn.Identity() for _ in self.tower.parts.blocks)
        self.graphs = ModuleOwner(self)
        # special tokens are always visible
        self.register_buffer("prefix", torch.ones(layout.prefix, dtype=torch.bool))

    def tokens(self, images: Tensor, attend: Attend) -> Tensor:
        """Every token after the last block, [B, T, D]; hidden tokens are not read."""
        at = self.tower.layout(images).at(images.device)
        steps = walk(self.tower.parts, self.tower.parts.embed(images), at)
        for step, tap in zip(steps, self.taps, strict=True):
            step.o = attend(step.q, step.k, step.v, step.block.scale)
            step.out = tap(step.out)
        return steps.h

    def masked(self, images: Tensor, attend: Attend) -> Tensor:
        """Logits [B, C] of a run on all tokens."""
        index = cast(int, self.tower.layout(images).class_index)
        return self.read(self.tokens(images, attend)[:, index])

    def late(self, images: Tensor, mask: Tensor) -> Tensor:
        """Logits [B, C] of the mean of the last tokens of patches [B, N] (bool), which have seen
        the whole image (iFAM, Eq. 2)."""
        share = mask.double() / mask.sum(dim=1, keepdim=True).clamp(min=1)
        tokens = self.tower.features(images)  # [B, N, D]
        return self.head(self.fc_norm(torch.einsum("bn,bnd->bd", share.to(tokens), tokens)))

    def packed(self, images: Tensor, places: Tensor, sizes: Tensor, total: Tensor) -> Tensor:
        """Logits [B, C] of a run on visible tokens alone, the rows of all images end to end, from
        their `packed_places`. Equal to the masked run, whatever else is in the batch."""
        layout = self.tower.layout(images)
        if torch.is_grad_enabled() or not has_kernel(images.device, images.dtype):
            return self.filled(images, places[: int(total)], sizes)
        if len(places) > _FEW:
            # the only synchronisation, before anything of this stage runs; rows of no image fill up
            # the last group, so that totals repeat and their graphs can be replayed
            step = min(layout.tokens, max(_STEP, len(places) // 64))
            places = places[: -(-int(total) // step) * step]
        return captured(self.graphs, "packed", lambda: self.filled, images, places, sizes)

    def at_once(self, images: Tensor) -> bool:
        """Whether so few tokens run that all of them may, without asking how many are selected."""
        few = len(images) * self.tower.layout(images).tokens <= _FEW
        return few and not torch.is_grad_enabled() and has_kernel(images.device, images.dtype)

    def filled(self, images: Tensor, places: Tensor, sizes: Tensor) -> Tensor:
        """A packed run; places beyond the sum of the sizes are a group of their own."""
        layout = self.tower.layout(images)
        rest = len(places) - sizes.sum(dim=0, keepdim=True)
        bound = max(layout.tokens, min(_FEW, len(places)))
        groups = Groups(torch.cat([sizes, rest]), images.device, bound=bound)
        rows = self.tower.parts.embed(images).flatten(0, 1)[places]  # [R, D]
        at = layout.at(rows.device).take(places % layout.tokens)
        class_rows = groups.starts[: len(images)].long() + cast(int, layout.class_index)
        attend, last = reads_packed(groups), len(self.tower.parts.blocks) - 1
        steps = walk(self.tower.parts, rows[None], at)
        for step in steps:
            step.o = attend(step.q, step.k, step.v, step.block.scale)
            if step.index == last:  # no other row is read
                step.take(class_rows)
        return self.read(steps.h[0])

    def read(self, rows: Tensor) -> Tensor:
        """Class rows [B, D] of the last block -> logits."""
        return self.head(self.fc_norm(self.tower.parts.norm(rows[:, None])[:, 0]))


@torch.no_grad()
def found_objects(tower: Backbone, images: Tensor) -> Tensor:
    """Objects without labels [B, gh, gw] (bool), after FOUND (Simeoni et al., CVPR 2023): the patch
    that the class token attends to least is background, and so are those with keys like its keys in
    the last block. Otsu's threshold divides them, and FOUND's second, learned step is left out."""
    layout, blocks = tower.layout(images), tower.parts.blocks
    at = layout.at(images.device)
    h = walk(tower.parts, tower.parts.embed(images), at, stop=len(blocks) - 1).end()
    step = next(iter(walk(tower.parts, h, at, start=len(blocks) - 1)))
    keys = F.normalize(step.k[:, :, layout.patches].transpose(1, 2).flatten(2).float(), dim=-1)
    step.take([cast(int, layout.class_index)])
    seen = probabilities(step)[:, :, 0, layout.patches].mean(dim=1)  # [B, N]
    least, each = seen.argmin(dim=1), torch.arange(len(keys), device=keys.device)
    seed = keys[each, least]  # [B, D]
    alike = torch.einsum("bnd,bd->bn", keys, seed)
    return ~otsu(alike.unflatten(1, layout.grid))


def is_token(name: str) -> bool:
    """Whether a parameter of a backbone is a special token or a position embedding."""
    return _TOKENS.search(name) is not None


def visible_tokens(mask: Tensor, prefix: Tensor) -> Tensor:
    """Patches [B, N] and the special tokens [P] before them, as one key mask [B, P + N]."""
    return torch.cat([prefix.expand(len(mask), -1), mask], dim=1)


def packed_places(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of visible tokens [B, T] (bool): all places [B * T], the visible ones first, the number of
    each image [B], and the total. No synchronisation."""
    places = (~visible).flatten().to(torch.uint8).argsort(stable=True)
    sizes = visible.sum(dim=1)
    return places, sizes, sizes.sum()


def two_stage_parts(net: IFAM) -> Parts:
    """The view of iFAM: the blocks of stage 2, with the mask of stage 1 as a fact about tokens."""
    stage = net.stage2
    assert stage is not None
    if net.options.gradient == "soft":
        reason = "every token is read a little, so none is hidden"
        raise NotDefined("a view of a soft mask", reason, "Use gradient='ste' or 'none'")
    tower = stage.tower.parts

    def visible(images: Tensor) -> Tensor:
        return visible_tokens(net.select(images), stage.prefix)  # [B, T]

    blocks = [hiding(block) for block in tower.blocks]
    for block, tap in zip(blocks, stage.taps, strict=True):
        block.native, block.holder = tap, block.native
    return Parts(
        family=f"iFAM on {tower.family}",
        embed=tower.embed,
        layout_at=tower.layout_at,
        blocks=blocks,
        norm=tower.norm,
        patch=tower.patch,
        native_tokens=lambda images: tower.norm(stage.tokens(images, reads_only(visible(images)))),
        preprocess=net.preprocess,
        pool="cls",
        head=chain(stage.fc_norm, stage.head),
        native_logits=lambda images: net(images, packed=False).logits,
        classes=net.class_names,
        fixed_size=tower.fixed_size,
        size=tower.size,
        facts=lambda images: ~visible(images)[..., None],
    )


def one_stage_parts(net: IFAM) -> Parts:
    """The view of PDiscoFormer: what each patch adds to each part is a row, votes are the head."""
    tower, width = net.stage1.tower.parts, net.stage1.tower.width
    if net.options.eval_noise:
        reason = "the noise of a patch depends on its place"
        raise NotDefined("a view of PDiscoFormer with eval_noise", reason, "Use eval_noise=False")

    def shares(features: Tensor) -> Tensor:
        """Features [B, R, D] -> what each adds to every part, [B, R, (K + 1) D]."""
        _, maps = net.assign(features)  # [B, K + 1, R]
        return (maps.transpose(1, 2)[..., None] * features[:, :, None]).flatten(2)

    def head(pooled: Tensor) -> Tensor:
        embeddings = pooled.unflatten(-1, (net.parts + 1, width)).transpose(-1, -2)
        votes = net.votes(net.stage1.modulation(embeddings.flatten(0, -3)))
        return net.mean_vote(votes).unflatten(0, embeddings.shape[:-2])

    return Parts(
        family=f"PDiscoFormer on {tower.family}",
        embed=tower.embed,
        layout_at=tower.layout_at,
        blocks=tower.blocks,
        norm=lambda rows: shares(tower.norm(rows)),
        patch=tower.patch,
        native_tokens=lambda images: shares(tower.native_tokens(images)),
        preprocess=net.preprocess,
        pool="mean",
        head=head,
        native_logits=lambda images: net(images).logits,
        classes=net.class_names,
        fixed_size=tower.fixed_size,
        size=tower.size,
    )
