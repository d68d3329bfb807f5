"""Heads that see something else while the model speaks: edits that last through the native
`generate`, with its cache.

    with edited_heads(lvlm, [(0, 4), (1, 1)], blind=bank):
        lvlm.module.generate(**inputs)

What the text rows of the chosen heads read of the image tokens is changed where the native model
attends; every other row and head is left to the native attention:

blind      keys and values of the average picture, as masks of `MaskEngine` do
redirect   keys and values of another picture: what does the model say if these heads look there?
boost      the picture weighs so many times as much in the softmax, 0: nothing

The native model's own attention registry is asked for (`AttentionInterface`), for this model only
and until the block ends. Nothing of the weights changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from PIL import Image
from torch import Tensor, nn

from seecause.errors import BadOption, BankMismatch
from seecause.lvlm._cache import KeyValue, run_prefix
from seecause.lvlm.activations import heads_mask
from seecause.lvlm.attribute import Head
from seecause.lvlm.bank import QUESTION, MeanBank
from seecause.lvlm.model import LVLM
from seecause.lvlm.prompt import Prompt, read
from seecause.models.layout import At

ATTENTION = "seecause_edited"  # in transformers' registry
# what `generate` gives a forward beside the processor's inputs
_RUNNING = (
    *("past_key_values", "use_cache", "cache_position", "position_ids", "return_dict"),
    *("logits_to_keep", "labels", "inputs_embeds", "output_attentions", "output_hidden_states"),
)


@dataclass(eq=False)
class _Edit:
    """One edit of one model, and the prompt that is spoken about now."""

    lvlm: LVLM
    heads: Tensor  # [L, H] bool
    native: Any  # the attention function that was there before
    blind: MeanBank | None = None
    redirect: Image.Image | None = None
    boost: float | None = None
    size: tuple[int, int] | None = None  # of the picture that is asked about
    at: At | None = None  # positions of the prompt; None: no picture is spoken about
    image: slice | None = None
    other: list[KeyValue] = field(default_factory=list)  # rotated, for each block
    length: int = 0  # tokens that a cache must hold by now
    reading: bool = False

    def meet(self, inputs: dict[str, Any]) -> None:
        """Notice what the native forward is given: a prompt, or what is said behind it."""
        ids, past = inputs.get("input_ids"), inputs.get("past_key_values")
        old = 0 if past is None else past.get_seq_length()
        if old:
            self.length = old + (0 if ids is None else ids.shape[1])
            return
        self.at, self.length = None, 0
        if ids is None or inputs.get("pixel_values") is None:
            return
        self.reading = True
        try:
            native = {n: v for n, v in inputs.items() if n not in _RUNNING and v is not None}
            prompt = read(self.lvlm, self.lvlm.send(native), size=self.size)
            self.other = self._seen_instead(prompt)
        finally:
            self.reading = False
        self.at, self.image, self.length = prompt.at, prompt.image, len(prompt.ids)

    def _seen_instead(self, prompt: Prompt) -> list[KeyValue]:
        """Keys at the prompt's own positions, and values, of what the heads see instead of its
        picture."""
        lvlm = self.lvlm
        at = prompt.at.take(prompt.at.index[prompt.image])
        if self.blind is not None:
            keys, values = self.blind.means(lvlm, prompt)
            pairs = [(k[None], v[None]) for k, v in zip(keys, values, strict=True)]
        elif self.redirect is not None:
            donor = lvlm.prompt(self.redirect, QUESTION)
            if donor.tokens != prompt.tokens:
                raise BankMismatch(
                    f"a picture with image tokens {donor.tokens}",
                    f"the model is asked about one with {prompt.tokens}",
                    "give pictures of one size",
                )
            prefix = run_prefix(lvlm.decoder, [donor])
            pairs = [(k[:, :, donor.image], v[:, :, donor.image]) for k, v in prefix]
        else:
            return []
        turns = [block.rotate for block in lvlm.blocks]
        return [(k if t is None else t(k, at), v) for t, (k, v) in zip(turns, pairs, strict=True)]

    def change(self, module: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Tensor:
        """`out` [B, R, H, dh] with what the edited heads bring to text rows instead."""
        layer, keys = int(module.layer_idx), key.shape[2]
        heads = self.heads[layer].nonzero()[:, 0]
        if self.at is None or self.image is None or len(heads) == 0:
            return out
        if keys != self.length:
            raise BadOption(
                "cache",
                f"{keys} keys where {self.length} tokens were read",
                "a cache that holds every token and no more, as `generate` has without options",
            )
        index = torch.arange(keys, device=query.device)
        skipped = max(0, self.image.stop - (keys - query.shape[2]))  # rows that are no text
        q = query[:, heads, skipped:]  # [B, E, R', dh]
        if q.shape[2] == 0:
            return out
        block, groups = self.lvlm.blocks[layer], query.shape[1] // key.shape[1]
        k, v = key[:, heads // groups], value[:, heads // groups]  # copies, [B, E, K, dh]
        if self.other:
            for mine, instead in zip((k, v), self.other[layer], strict=True):
                mine[:, :, self.image] = instead[:, heads // groups].to(mine)
        rows = self.at.take(index[keys - q.shape[2] :])
        bias = block.bias(rows, self.at.take(index))
        assert bias is not None  # decoders look back only
        if bias.shape[1] > 1:
            bias = bias[:, heads]
        if self.boost is not None:
            weight = math.log(self.boost) if self.boost else -math.inf
            bias = bias.clone()
            bias[..., self.image] += weight
        o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=block.scale)
        out = out.clone()
        out[:, skipped:, heads] = o.transpose(1, 2)
        return out


_EDITS: WeakKeyDictionary[nn.Module, _Edit] = WeakKeyDictionary()  # by attention module


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
) -> tuple[Tensor, None]:
    """For transformers' registry: the native attention, then the edit of this module."""
    edit = _EDITS[module]
    out = edit.native(module, query, key, value, attention_mask, **more)[0]
    return edit.change(module, query, key, value, out), None


@contextmanager
def edited_heads(
    lvlm: LVLM,
    heads: Sequence[Head],
    *,
    blind: MeanBank | None = None,
    redirect: Image.Image | None = None,
    boost: float | None = None,
    size: tuple[int, int] | None = None,
) -> Iterator[LVLM]:
    """Inside the block, `heads` (layer, head) of the native model see something else than the
    picture, in `generate` and in every other forward. Give one of `blind` (a bank: its average
    picture), `redirect` (another picture of the same size) and `boost` (how many times as much the
    picture weighs; 0 hides it). One sequence at a time. `size` (height, width) of the picture that
    is asked about places tiles (InternVL, Idefics 3, Ovis 2), which native inputs do not tell.

        other = sc.data.open_picture("critters:clean:test#5")
        with sc.lvlm.edited_heads(lvlm, [(0, 4), (1, 1)], redirect=other):
            ids = lvlm.speak(lvlm.prompt(picture, "Which critter is this?"), 8)
    """
    chosen = [name for name in (blind, redirect, boost) if name is not None]
    if len(chosen) != 1:
        raise BadOption("edit", len(chosen), "one of blind=, redirect= and boost=")
    if boost is not None and not 0 <= boost < math.inf:
        raise BadOption("boost", boost, "a factor from 0 on")
    mask = heads_mask(lvlm, heads).to(lvlm.device)
    before = lvlm.decoder.native.config._attn_implementation
    if before == ATTENTION:
        raise BadOption("edit", "a second one", "one edit of a model at a time")
    if redirect is not None:
        size = size or (redirect.height, redirect.width)  # they are alike
    edit = _Edit(
        lvlm, mask, _native(before), blind=blind, redirect=redirect, boost=boost, size=size
    )
    natives: list[Any] = [block.native for block in lvlm.blocks]
    attentions: list[nn.Module] = [native.self_attn for native in natives]

    def hear(_: nn.Module, positional: tuple[Any, ...], given: dict[str, Any]) -> None:
        if not edit.reading:
            first = {"input_ids": positional[0]} if positional else {}
            edit.meet({**first, **given})

    _register(before)
    handle = lvlm.module.register_forward_pre_hook(hear, with_kwargs=True)
    _EDITS.update(dict.fromkeys(attentions, edit))
    lvlm.module.set_attn_implementation({"text_config": ATTENTION})
    try:
        yield lvlm
    finally:
        handle.remove()
        lvlm.module.set_attn_implementation({"text_config": before})
        for attention in attentions:
            _EDITS.pop(attention, None)


def _native(name: str) -> Any:
    """An attention function of transformers. Its eager ones are in no registry: the fused one does
    the same."""
    from transformers import AttentionInterface

    table = AttentionInterface()
    return table["sdpa" if name in ("eager", None) else name]


def _register(before: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    plain = before in ("eager", None) or before not in ALL_MASK_ATTENTION_FUNCTIONS
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(
        ATTENTION, sdpa_mask if plain else ALL_MASK_ATTENTION_FUNCTIONS[before]
    )
