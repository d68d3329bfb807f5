"""The cache shared by all masks, and the attention of many masked copies of the text rows.

Everything up to the last image token depends on no mask. The copies differ in which heads see the
image, so they read two banks of keys and values that all of them share, the image's and the average
image's, and their own text. Copies are folded into rows, so a bank is read by one large product and
never copied:

    o = merge(choose(image, average), own text)    by log-sum-exp: one softmax over chosen keys

A soft mask lets a head see both, m of the image and 1 - m of the average, each already merged with
its own text; an image token likewise inside the softmax, by weights of its two keys:

    o = m merge(image, own text) + (1 - m) merge(average, own text)
    exp(score) times v for the image's key, times 1 - v for the average's

At 0 and 1 both equal the hard mask; between, they can be differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.attend import Bank, Mask, Part, attend, has_slope, merge_pair
from seecause.engine.walk import HasBlocks, walk
from seecause.lvlm.prompt import Prompt
from seecause.models.block import At, Block, Fn, wide
from seecause.models.decoder import SWAP, TABLE, Decoder, rotate, run, sees_all_before

_HALF = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)  # the first compute capability with the fused kernel
_HOPPER = 9
_LEAST = 1e-20  # lower bound of soft weights: log(0) has no finite gradient


def read_shared(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, bias: Tensor | None = None
) -> Part:
    """Rows q [B, H, R, dh] over keys all of them share, k and v [1, Hkv, K, dh]; bias [1, H, R, K]
    hides some of them."""
    if bias is not None:
        return attend(q, [Bank(k, v, bias=bias)], scale=scale)
    batch, _, rows, _ = q.shape
    folded = q.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)  # [1, H, B*R, dh]
    if has_fused_read(q):
        o, lse = (
            _SharedRead.apply(folded, k, v, scale) if has_slope(q) else _flash(folded, k, v, scale)
        )
    else:
        o, lse = attend(folded, [Bank(k, v)], scale=scale)
    return o[0].unflatten(0, (batch, rows)), lse[0].unflatten(0, (batch, rows))


def read_own(q: Tensor, k: Tensor, v: Tensor, *, scale: float, keep: Tensor | None = None) -> Part:
    """The last R rows of each copy over its own text q [B, H, R, dh], k and v [B, Hkv, K, dh],
    looking back only, or at what `keep` [R, K] says."""
    rows, keys = q.shape[2], k.shape[2]
    if keep is None:
        if has_fused_read(q) and not has_slope(q) and rows in (1, keys):
            return _flash(q, k, v, scale, causal=rows == keys)
        keep = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    return attend(q, [Bank(k, v, Mask(keep[None, None]))], scale=scale)


def text_keep(index: Tensor, prefix: int) -> Tensor:
    """[R, R] bool: which text tokens `index` [R] see each other where the first `prefix` tokens of
    a sequence do so both ways."""
    return (index <= index[:, None]) | (index < prefix)


def blend(own: Part, image: Part, average: Part, choose: Tensor) -> Tensor:
    """Each row and head [B, R, H] takes the image where `choose` says so, else the average; then
    its own text is merged in. A soft `choose` is the weight of the image. Returns [B, R, H,
    dh]."""
    if choose.is_floating_point():
        seeing, blind = (wide(merge_pair(own, part)) for part in (image, average))
        return torch.lerp(blind, seeing, choose[..., None].to(blind)).to(own[0].dtype)
    seen = torch.where(choose[..., None], image[0], average[0])
    return merge_pair(own, (seen, torch.where(choose, image[1], average[1])))


def kernel_for(x: Tensor) -> Any:
    """The kernels, where they take rows of heads like x [.., dh]; else None. They are imported only
    where they may run."""
    if x.dtype not in _HALF:
        return None
    from seecause.engine import kernel

    return kernel if kernel.fits_rows(x) else None


def rotate_rows(x: Tensor, at: At, *, table: str = TABLE) -> Tensor:
    """The decoder's rotation of rows x [B, H, R, dh], in one kernel where there is one."""
    kernel = None if SWAP in at.memo else kernel_for(x)
    if kernel is not None:
        return kernel.rotate(x, at.memo[table][:, at.index])
    return rotate(x, at, table=table)


def norm_of_rows(native: Any) -> Fn:
    """A native RMS norm, in torch's one kernel on a GPU."""

    def run(x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype == native.weight.dtype:
            return F.rms_norm(x, native.weight.shape, native.weight, native.variance_epsilon)
        return native(x)

    return (
        run
        if type(native).__name__.endswith("RMSNorm") and hasattr(native, "variance_epsilon")
        else native
    )


def with_own_text(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    image: Part,
    average: Part,
    choose: Tensor,
    *,
    scale: float,
    keep: Tensor | None = None,
) -> Tensor:
    """`blend` with what rows q [1|B, H, R, dh] read of their own text, k and v [1|B, Hkv, K, dh],
    as in `read_own`; one kernel where there is one."""
    kernel = kernel_for(q) if q.shape[2] == k.shape[2] and keep is None else None
    if kernel is not None and q.shape[2] <= kernel.MOST_ROWS:
        return kernel.own_text(q, k, v, image, average, choose, scale=scale)
    return blend(read_own(q, k, v, scale=scale, keep=keep), image, average, choose)


class _SharedRead(torch.autograd.Function):
    """The fused read of shared keys with a derivative, also of its log-sum-exp, which torch's own
    lacks. Keys and values need none:

        dS = P * (dO V' - rowsum(dO * O) + dlse),    dq = scale dS K
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Part:
        o, lse = _flash(q, k, v, scale)  # [1, R, H, dh], [1, R, H]
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale = scale
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        q, k, v, o, lse = ctx.saved_tensors
        d_o, d_lse = grads
        if (kernel := kernel_for(q)) is not None:
            read, scale = (o, lse), ctx.scale
            d_q = kernel.shared_read_slope(q, k, v, read, (d_o, d_lse), scale=scale)
            return d_q, None, None, None
        share = (k.shape[1], q.shape[1] // k.shape[1])  # key heads, queries that share one
        level = (wide(d_o) * wide(o)).sum(dim=-1) - d_lse  # [1, R, H]
        rows, d_rows = (x[0].unflatten(0, share).flatten(1, 2) for x in (q, d_o.transpose(1, 2)))
        lse, level = (x[0].T.unflatten(0, share).flatten(1, 2)[..., None] for x in (lse, level))
        probs = torch.exp(wide(rows * ctx.scale) @ wide(k[0]).mT - lse)  # [Hkv, g R, K]
        d_scores = probs * (wide(d_rows @ v[0].mT) - level)
        d_q = (d_scores.to(k.dtype) @ k[0]) * ctx.scale
        return d_q.unflatten(1, (share[1], -1)).flatten(0, 1)[None], None, None, None


def has_fused_read(q: Tensor) -> bool:
    """Whether rows like q [.., dh] have the fused kernel."""
    if not q.is_cuda:
        return q.device.type == "cpu"  # no fused kernel on mps and xpu
    right_width = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    new = torch.cuda.get_device_capability(q.device) >= _AMPERE
    return q.dtype in _HALF and right_width and new


@cache
def _has_cudnn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether cuDNN reads many rows here, and faster: on Hopper, where it needs two thirds of the
    time."""
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return False
    x = torch.zeros(1, 2, 128, 64, dtype=dtype, device=device)
    try:
        torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, False, False)
    except RuntimeError:  # a build without it
        return False
    return True


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False) -> Part:
    """The fused kernels under torch's attention, called by name because they also return the
    log-sum-exp. They take fewer key heads than query heads."""
    if q.is_cuda and not causal and q.shape[1] == k.shape[1] and _has_cudnn(q.device, q.dtype):
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, False, False, scale=scale
        )
        lse = lse.reshape(q.shape[:3])
    elif q.is_cuda:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    else:
        # before torch 2.12 the CPU kernel is wrong for keys that heads share
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    return o.transpose(1, 2), lse.transpose(1, 2)


KeyValue = tuple[Tensor, Tensor]  # [1, Hkv, K, dh]


@torch.no_grad()
def run_prefix(decoder: Decoder, prompt: Prompt) -> list[KeyValue]:
    """For each block, keys (before rotation) and values [1, Hkv, P, dh] of every row up to the last
    image token. In a prefix language model they depend on the question, which runs along."""
    keys_values = list[KeyValue]()
    last, end = prompt.image.stop, max(prompt.image.stop, prompt.prefix)
    run(
        decoder,
        prompt.embeddings[:, :end],
        prompt.at.take(prompt.at.index[:end]),
        deepstack=prompt.deepstack,
        image=prompt.image,
        record=lambda _, k, v: keys_values.append((k[:, :, :last], v[:, :, :last])),
    )
    return keys_values


# how image keys are read: masks by the number of rows, or log-weights of both banks' keys
Mixed = dict[int, tuple[Mask, Mask]] | tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class PrefixCache:
    """Text rows from `start` on, and two banks for each block: what came before them, with the
    image or with its average."""

    start: int
    states: Tensor  # [1, R, D] entering the first block
    at: At  # their positions, [R]
    keys_at: At  # positions of the keys, [K]
    image: slice  # image tokens among the keys
    image_bank: list[KeyValue]
    average_bank: list[KeyValue]
    prefix: int = 0  # the first tokens of the sequence that see each other both ways

    def own_keep(self, rows: int) -> Tensor | None:
        """[rows, R] bool: what the last `rows` rows see of the text; None: they look back only."""
        if self.prefix <= self.image.stop + self.start:
            return None
        return text_keep(self.at.index, self.prefix)[-rows:]

    def mixed(self, image: Tensor, last: int) -> Mixed:
        """How keys of both banks are read where some image tokens [B, N] are averaged, by all rows
        or by the `last` ones; soft weights instead of truth values can be differentiated."""
        before, behind = self.image.start, len(self.keys_at.index) - self.image.stop
        if image.is_floating_point():
            seen, unseen = (w * (1 - 2 * _LEAST) + _LEAST for w in (image, 1 - image))
            weights = F.pad(seen.log(), (before, behind))
            others = F.pad(unseen.log(), (before, behind), value=-torch.inf)
            return weights[:, None, None], others[:, None, None]
        seen = F.pad(image, (before, behind), value=True)[:, None, None]  # [B, 1, 1, K]
        spread = {rows: seen.expand(-1, 1, rows, -1) for rows in (len(self.at.index), last)}
        return {rows: (Mask(keep), Mask(~keep)) for rows, keep in spread.items()}

    def read_image(
        self, index: int, q: Tensor, mixed: Mixed | None, *, scale: float, bias: Tensor | None
    ) -> Part:
        """Attention of rows q of a block to the image: to all of it, or to the tokens that are not
        averaged."""
        both = (self.image_bank[index], self.average_bank[index])
        if mixed is None:
            return read_shared(q, *both[0], scale=scale, bias=bias)
        if isinstance(mixed, tuple):
            weights = [weight if bias is None else weight + bias for weight in mixed]
            banks = [Bank(*kv, bias=weight) for kv, weight in zip(both, weights, strict=True)]
        else:
            masks = mixed[q.shape[2]]
            banks = [Bank(*kv, keep=keep, bias=bias) for kv, keep in zip(both, masks, strict=True)]
        return attend(q, banks, scale=scale)

    def bias(self, block: Block, *, rows: int) -> Tensor | None:
        """The bias that hides keys from the last `rows` rows, [1, 1|H, rows, K]; None if all keys
        come before all rows and no key is hidden."""
        hidden = None if sees_all_before(block) else block.bias(self.at, self.keys_at)
        return None if hidden is None else hidden[:, :, -rows:]

    @torch.no_grad()
    def from_row(self, lvlm: HasBlocks, row: int) -> PrefixCache:
        """The cache of text rows `row` and later, when no row before may see the image: those run
        once, and their keys join both banks. None of them reads a later one."""
        at = self.at.take(self.at.index[:row])
        first = replace(self, states=self.states[:, :row], at=at)
        keep, banks = first.own_keep(row), ([], [])
        for step in walk(lvlm, first.states, at):
            block, scale = step.block, step.block.scale
            bias = first.bias(block, rows=row)
            seen = read_shared(step.q, *self.average_bank[step.index], scale=scale, bias=bias)
            step.o = merge_pair(read_own(step.q, step.k, step.v, scale=scale, keep=keep), seen)
            for bank, whole in zip(banks, (self.image_bank, self.average_bank), strict=True):
                k, v = whole[step.index]
                bank.append((torch.cat([k, step.k], dim=2), torch.cat([v, step.v], dim=2)))
        return replace(
            self,
            start=self.start + row,
            states=self.states[:, row:],
            at=self.at.take(self.at.index[row:]),
            keys_at=self.at.take(torch.cat([self.keys_at.index, at.index])),
            image_bank=banks[0],
            average_bank=banks[1],
        )


def prefix_cache(
    decoder: Decoder, prompt: Prompt, mean_keys: Tensor, mean_values: Tensor
) -> PrefixCache:
    """Both banks, rotated: keys before the image, then those of the image or of its average
    [L, Hkv, N, dh]."""
    before, image, text = slice(0, prompt.image.start), prompt.image, prompt.text
    at = prompt.at.take(prompt.at.index[: image.stop])
    image_at = prompt.at.take(prompt.at.index[image])
    image_bank, average_bank = [], []
    for index, (unrotated, values) in enumerate(run_prefix(decoder, prompt)):
        turn = decoder.blocks[index].rotate
        assert turn is not None
        keys = turn(unrotated, at)
        image_bank.append((keys, values))
        mean = turn(mean_keys[None, index], image_at)
        keys = torch.cat([keys[:, :, before], mean], dim=2)
        values = torch.cat([values[:, :, before], mean_values[None, index]], dim=2)
        average_bank.append((keys, values))
    return PrefixCache(
        start=0,
        states=prompt.embeddings[:, text],
        at=prompt.at.take(prompt.at.index[text]),
        keys_at=at,
        image=image,
        image_bank=image_bank,
        average_bank=average_bank,
        prefix=prompt.prefix,
    )
