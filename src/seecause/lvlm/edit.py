"""Heads that see something else while the model speaks: edits that last through the native
`generate`, with its cache.

    with edited_heads(lvlm, [(0, 4), (1, 1)], blind=bank):
        lvlm.module.generate(**inputs)

What the text rows of the chosen heads read of the image tokens is changed where the native model
attends; every other row and head is left to the native attention:

blind      keys and values of the average image, as masks of `MaskEngine` do
redirect   keys and values of another image: what does the model say if these heads look there?

The edit is registered with transformers' `AttentionInterface`, for this model only and until the
block ends. The weights stay as they are.

A release of the library may take another path than the edited one. So the first edit of a model
proves through its own `generate` that no heads change nothing, bit for bit, and that half of all
heads move the next word's logits to where `MaskedRows` computes them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from PIL import Image
from torch import Tensor, nn

from seecause.engine.canary import (
    Proof,
    as_computed,
    gates_of,
    once,
    same_bits,
    some_heads,
    used_versions,
)
from seecause.engine.verify import tolerance_of
from seecause.errors import BadInput, BadOption, EditLost
from seecause.lvlm.bank import QUESTION, MeanBank, bank_of_prompts, with_words_of
from seecause.lvlm.cache import KeyValue
from seecause.lvlm.engine import MaskedRows
from seecause.lvlm.model import LVLM, SIDE, Head, noise_image
from seecause.lvlm.prompt import Prompt, read
from seecause.models.block import At, Named, Size

ATTENTION = "seecause_edited"  # in transformers' registry
NAME = "edited heads"
FEATURES, ENCODER = "mm_encoder_outputs", "get_image_features"
# what `generate` gives a forward beside the processor's inputs
_RUNNING = (
    *("past_key_values", "use_cache", "cache_position", "position_ids", "return_dict"),
    *("logits_to_keep", "labels", "inputs_embeds", "output_attentions", "output_hidden_states"),
)


@dataclass(eq=False)
class _Sequence:
    """A prompt that was read in this block, and how many tokens follow it."""

    length: int  # tokens that a cache must hold by now
    at: At | None = None  # positions of the prompt; None: it has no image
    image: slice = field(default_factory=lambda: slice(0, 0))
    other: list[KeyValue] = field(default_factory=list)  # rotated, for each block
    # the image's own, where its tokens read words, which an edit changes: every head reads these
    own: list[KeyValue] = field(default_factory=list)


@dataclass(eq=False)
class _Edit:
    """One edit of one model, and the sequences that it applies to."""

    lvlm: LVLM
    heads: Tensor  # [L, H] bool
    native: Any  # the attention function that was there before
    before: str | None  # and its name
    blind: MeanBank | None
    redirect: Image.Image | None
    image: Image.Image | None  # the image that is asked about, where it is known
    size: Size | None
    now: _Sequence | None = None  # what the forward that runs is about
    caches: WeakKeyDictionary[Any, _Sequence] = field(default_factory=WeakKeyDictionary)
    trial: bool = False  # made to prove that edits reach the model
    reading: bool = False  # the edit itself runs the model
    # features of an image that the native model has made, and the inputs that it made them of
    encoded: tuple[Any, Mapping[str, Any]] = (None, MappingProxyType({}))
    ran: set[int] = field(default_factory=set)  # edited layers whose attention was changed
    met: bool = False  # whether a prompt with an image came

    def lost(self, reason: str) -> EditLost:
        return EditLost(NAME, self.lvlm.family, reason, used_versions())

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Find out what a native forward is about: a prompt, or what follows one."""
        ids, past = inputs.get("input_ids"), inputs.get("past_key_values")
        self.ran.clear()
        if self.now is not None:
            raise self.lost("the hook behind the last forward never ran")
        if ids is None:
            raise BadInput(
                "embeddings without token ids",
                "they do not tell where the image is",
                "give input_ids and the image's pixels",
            )
        inputs = self._with_pixels(inputs)
        pixels = inputs.get("pixel_values") is not None
        old = 0 if past is None else past.get_seq_length()
        if old:
            self.now = self._continued(past, old, pixels)
            self.now.length = old + ids.shape[1]
        else:
            self.now = self._prompted(inputs) if pixels else _Sequence(ids.shape[1])
        image_tokens = int((ids == self.lvlm.module.config.image_token_id).sum())
        if self.now.at is None and image_tokens:  # they would be taken for text
            raise BadInput(
                f"{image_tokens} image tokens without an image ({_library()})",
                "the forward was called with no inputs of an image that this edit knows, so the"
                " edit would change nothing",
                "pass pixel_values; if you did, this version of the library is not supported",
            )
        if past is not None:
            self.caches[past] = self.now

    def _with_pixels(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Native inputs with the image itself. From 5.18 on, transformers' `generate` encodes it
        first and passes its features (`mm_encoder_outputs`) instead."""
        features = (inputs.get(FEATURES) or {}).get("image")
        made, source = self.encoded
        if features is None:
            return inputs
        if made is not features:
            raise BadInput(
                f"features of an image that was encoded elsewhere ({_library()})",
                "the edit does not know which image they show, and would change nothing",
                "pass pixel_values, or call generate inside the block",
            )
        return {**{n: v for n, v in inputs.items() if n != FEATURES}, **source}

    def _continued(self, past: Any, old: int, pixels: bool) -> _Sequence:
        """What a cache that holds tokens is about."""
        if pixels:
            raise BadInput(
                f"pixel_values after {old} tokens of a cache",
                "heads are edited for one image, which a prompt begins with",
                "give the whole conversation without a cache",
            )
        sequence = self.caches.get(past)
        if sequence is None or not sequence.image.stop <= old <= sequence.length:
            raise BadInput(
                f"a cache of {old} tokens",
                "not all of them were read inside this block, so its image is not known",
                "read the whole prompt inside the block",
            )
        return sequence

    def _prompted(self, inputs: Mapping[str, Any]) -> _Sequence:
        self.reading = self.met = True
        try:
            native = {n: v for n, v in inputs.items() if n not in _RUNNING and v is not None}
            prompt = read(self.lvlm, self.lvlm.send(native), size=self.size)
            if not self.trial:
                prove(self, prompt)
            other, own = self._rotated(self._seen_instead(prompt), prompt), list[KeyValue]()
            if prompt.read_words:
                own = self._rotated(bank_of_prompts(self.lvlm, [prompt]), prompt)
            return _Sequence(len(prompt.ids), prompt.at, prompt.image, other, own)
        finally:
            self.reading = False

    def end(self, out: Any) -> None:
        """Check that the edit ran in every layer that it is for, and remember what the cache that
        the forward returned is about."""
        missing = set(self.heads.any(dim=1).nonzero()[:, 0].tolist()) - self.ran
        if self.now is not None and self.now.at is not None and out is not None and missing:
            self.now = None
            raise self.lost(f"layers {sorted(missing)} attended without it")
        parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else ()
        for part in parts:
            if self.now is not None and hasattr(part, "get_seq_length"):
                self.caches[part] = self.now
        self.now = None

    def _seen_instead(self, prompt: Prompt) -> MeanBank:
        """What the heads see instead of the prompt's image."""
        if self.blind is not None:
            return self.blind
        assert self.redirect is not None
        donor = self.lvlm.prompt(self.redirect, QUESTION)
        if donor.tokens != prompt.tokens:
            raise BadInput(
                f"an image with image tokens {donor.tokens}",
                f"the model is asked about one with {prompt.tokens}",
                "give images of one size",
            )
        return bank_of_prompts(self.lvlm, [with_words_of(donor, prompt)])

    def _rotated(self, bank: MeanBank, prompt: Prompt) -> list[KeyValue]:
        """Keys at the prompt's own positions, and values, for each block."""
        blocks: list[Any] = self.lvlm.blocks
        pairs = bank.means(self.lvlm, prompt, self.image)[:, :, None]
        at = prompt.at.take(prompt.at.index[prompt.image])
        return [(b.rotate(k, at), v) for b, k, v in zip(blocks, *pairs, strict=True)]

    def change(self, module: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Tensor:
        """`out` [B, R, H, dh] with what the edited heads bring to text rows instead."""
        layer, keys, now = int(module.layer_idx), key.shape[2], self.now
        if now is None and not self.reading:
            raise BadInput(
                "a run of the decoder alone",
                "the edit cannot know which tokens are image tokens",
                "call the whole model",
            )
        if now is None or now.at is None:
            return out
        self.ran.add(layer)
        edited = self.heads[layer].to(query.device)  # [H]
        changed = torch.ones_like(edited) if now.own and bool(self.heads.any()) else edited
        heads = changed.nonzero()[:, 0]
        if len(heads) == 0:
            return out
        if keys != now.length:
            raise BadOption(
                "cache",
                f"{keys} keys where {now.length} tokens were read",
                "a cache that holds every token and no more, as `generate` has without options",
            )
        skipped = max(0, now.image.stop - (keys - query.shape[2]))  # rows that are no text
        q = query[:, heads, skipped:]  # [B, E, R', dh]
        if q.shape[2] == 0:
            return out
        block, groups = self.lvlm.blocks[layer], query.shape[1] // key.shape[1]
        k, v = key[:, heads // groups], value[:, heads // groups]  # copies, [B, E, K, dh]
        edited = edited[heads]
        for banks, which in ((now.own, torch.ones_like(edited)), (now.other, edited)):
            for mine, instead in zip((k, v), banks[layer] if banks else (), strict=False):
                mine[:, which, now.image] = instead.to(mine)[:, heads[which] // groups]
        index = torch.arange(keys, device=self.lvlm.device)
        bias = block.bias(now.at.take(index[keys - q.shape[2] :]), now.at.take(index))
        assert bias is not None  # decoders look back only
        bias = bias.to(query.device)
        if bias.shape[1] > 1:
            bias = bias[:, heads]
        o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=block.scale)
        out = out.clone()
        out[:, skipped:, heads] = o.transpose(1, 2)
        return out


_EDITS: list[_Edit] = []  # the last is active; one that proves another stands behind it


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
) -> tuple[Tensor, None]:
    """For transformers' registry: the native attention, then the edit."""
    edit = _EDITS[-1]
    out = edit.native(module, query, key, value, attention_mask, **more)[0]
    return edit.change(module, query, key, value, out), None


@contextmanager
def edited_heads(
    lvlm: LVLM,
    heads: Sequence[Head],
    *,
    blind: MeanBank | None = None,
    redirect: Image.Image | None = None,
    image: Image.Image | None = None,
) -> Iterator[LVLM]:
    """Make some heads see something else than the image, in the native `generate` and in every
    other forward inside the block; afterwards the model is as before.

    Give one of `blind` and `redirect`. One sequence at a time; its prompt is read inside the block.

    Args:
        lvlm: A model returned by `sc.lvlm.load` or `sc.lvlm.wrap`.
        heads: Pairs (layer, head), both from 0.
        blind: A bank: these heads see its average image.
        redirect: Another image of the same size: these heads see that one.
        image: The image that is asked about, which is then left out of the bank's average. Models
            whose tiles native inputs do not place (InternVL, Idefics 3, Ovis 2) need it.

    Returns:
        A context manager.

    Yields:
        The model.

    Raises:
        BadInput: If no forward inside the block is about an image, or the edit cannot know which.
        EditLost: If the edit does not reach the model's `generate`. This is tried on the model's
            first edit, at once where an image and a processor are at hand, else on the first
            prompt.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> mine, other = (sc.data.open_image(f"critters:clean:test#{i}") for i in (3, 4))
        >>> prompt, heads = lvlm.prompt(mine, "What is this creature?"), [(0, 4), (1, 1)]
        >>> with sc.lvlm.edited_heads(lvlm, heads, redirect=other):
        ...     ids = lvlm.speak(prompt, 8)
    """
    if (blind is None) == (redirect is None):
        raise BadOption("edit", (blind, redirect), "one of blind= and redirect=")
    if _EDITS:
        raise BadOption("edit", "a second one", "one edit at a time")
    mask = torch.zeros(lvlm.n_layers, lvlm.n_heads, dtype=torch.bool)
    for layer, head in heads:
        if not (0 <= layer < lvlm.n_layers and 0 <= head < lvlm.n_heads):
            most = f"(layer, head) up to ({lvlm.n_layers - 1}, {lvlm.n_heads - 1})"
            raise BadOption("heads", (layer, head), most)
        mask[layer, head] = True
    before = lvlm.decoder.native.config._attn_implementation
    native = _registered(cast(nn.Module, lvlm.blocks[0].native.self_attn), before)
    shown = image or redirect  # which have one size
    size = (shown.height, shown.width) if shown else None
    edit = _Edit(lvlm, mask.to(lvlm.device), native, before, blind, redirect, image, size)
    with ExitStack() as stack:
        _watch(lvlm.module, stack)
        _EDITS.append(edit)
        stack.callback(_EDITS.clear)
        stack.callback(lvlm.module.set_attn_implementation, {"text_config": before})
        lvlm.module.set_attn_implementation({"text_config": ATTENTION})
        prove(edit)
        yield lvlm
        if not edit.met:
            raise BadInput(
                "an edit that never ran",
                f"no forward of {type(lvlm.module).__name__} inside the block was about an image"
                f" ({_library()})",
                "call the model, or its generate, inside the block",
            )


def prove(edit: _Edit, prompt: Prompt | None = None) -> None:
    """Prove on the first edit that edits reach the model: by an image that is at hand, else by the
    `prompt` that arrived."""
    lvlm, shown = edit.lvlm, edit.image or edit.redirect
    if shown is None and edit.blind is not None and edit.blind.images:
        shown = edit.blind.images[0]
    if prompt is not None or (shown is not None and lvlm.processor is not None):
        once(lvlm, edit.before, lambda: _proof(edit, prompt, shown))


@torch.no_grad()
def _proof(edit: _Edit, prompt: Prompt | None, shown: Any) -> Proof:
    """An edit of no heads, and one of half of them, through the library's own `generate`; they see
    the negative of the image."""
    lvlm, seen = edit.lvlm, gates_of(edit.lvlm, some_heads(edit.lvlm)).bool()
    trial = replace(edit, trial=True, reading=True, now=None, ran=set(), redirect=None, image=None)
    _EDITS.append(trial)
    try:
        prompt = prompt or lvlm.prompt(shown, QUESTION)
        negative = {**prompt.inputs, "pixel_values": 1 - prompt.inputs["pixel_values"]}
        bank = bank_of_prompts(lvlm, [read(lvlm, negative, size=prompt.size)])
        masked = MaskedRows(lvlm, prompt, None, bank, None, [0])
        expected = masked.logits(seen.flatten()[None])[0, 0]
        trial.blind, trial.size = bank, prompt.size
        lvlm.module.set_attn_implementation({"text_config": edit.before})
        plain = _next_logits(lvlm, prompt)
        lvlm.module.set_attn_implementation({"text_config": ATTENTION})
        trial.reading, trial.heads = False, torch.zeros_like(edit.heads)
        same_bits(NAME, lvlm.family, _next_logits(lvlm, prompt), plain)
        trial.heads = ~seen.to(edit.heads.device)
        edited = _next_logits(lvlm, prompt)
    except BadInput as refusal:
        if trial.reading:  # of the image itself, not of a forward that the edit does not recognise
            raise
        raise edit.lost(str(refusal).removesuffix(".")) from refusal
    finally:
        _EDITS.pop()
    compared = f"{int((~seen).sum())} heads in generate, against masks of the engine"
    logits = plain, edited, expected.to(edited)
    return as_computed(NAME, lvlm.family, *logits, compared, near=tolerance_of(lvlm.dtype))


def _next_logits(lvlm: LVLM, prompt: Prompt) -> Tensor:
    """[V] in float32: what `generate` chooses the next word from."""
    options = {"return_dict_in_generate": True, "output_logits": True}
    return lvlm.generate(prompt, 1, **options).logits[0][0]


def proofs(lvlm: LVLM) -> list[Proof]:
    """The proof for `sc.doctor`, by an image of noise."""
    image = noise_image(SIDE)
    with edited_heads(lvlm, [], redirect=image):
        lvlm.next_logits(lvlm.prompt(image, QUESTION))
    return list(lvlm.memo["proofs"].values())


def _watch(module: Any, stack: ExitStack) -> None:
    """Call the active edit before and after every forward of the whole model, until the stack ends.
    Also record which inputs the features of an image are made of, since `generate` may call the
    encoder by itself and pass only its features on."""
    base = getattr(module, "base_model", module)
    native, signature = getattr(base, ENCODER, None), inspect.signature(module.forward)
    rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]

    def begin(_: nn.Module, positional: tuple[Any, ...], given: Named) -> None:
        if not (edit := _EDITS[-1]).reading:
            inputs = signature.bind_partial(*positional, **given).arguments
            for name in rest:
                inputs |= inputs.pop(name, {})
            edit.begin(inputs)

    def end(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
        if not (edit := _EDITS[-1]).reading:
            edit.end(out)

    stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(end, always_call=True).remove)
    if native is None:
        return

    @functools.wraps(native)
    def encode(*args: Any, **given: Any) -> Any:
        out = native(*args, **given)
        if not (edit := _EDITS[-1]).reading:
            inputs = inspect.signature(native).bind_partial(*args, **given).arguments
            edit.encoded = (out, {n: v for n, v in inputs.items() if n != "kwargs"})
        return out

    setattr(base, ENCODER, encode)
    stack.callback(delattr, base, ENCODER)  # the class's own is used again


def _library() -> str:
    import transformers

    return f"transformers {transformers.__version__}"


def _registered(attention: nn.Module, name: str | None) -> Any:
    """The attention function of a native block, after registering the edited one with the same
    masks. Each modeling file has an eager one of its own."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    masks = dict(ALL_MASK_ATTENTION_FUNCTIONS.items())
    eager = name in ("eager", None)
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, masks.get("eager" if eager else name, sdpa_mask))
    if eager:
        return sys.modules[type(attention).__module__].eager_attention_forward
    return AttentionInterface()[name]
