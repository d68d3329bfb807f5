"""Heads that see something else while the model speaks: single words (`blind_logits`), and edits
that last through the native `generate`, with its cache.

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

import functools
import inspect
import math
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from PIL import Image
from torch import Tensor, nn

from seecause.errors import BadInput, BadOption, UnsupportedModel
from seecause.lvlm._cache import KeyValue, prefix_cache, run_prefix
from seecause.lvlm.analysis import Head, head_activations
from seecause.lvlm.bank import QUESTION, MeanBank, asked_alike
from seecause.lvlm.model import LVLM
from seecause.lvlm.prompt import Prompt, read
from seecause.models.layout import At
from seecause.types import wide

ATTENTION = "seecause_edited"  # in transformers' registry
FEATURES = "mm_encoder_outputs"
PIXELS = ("pixel_values", "pixel_values_videos")
# what `generate` gives a forward beside the processor's inputs
_RUNNING = (
    *("past_key_values", "use_cache", "cache_position", "position_ids", "return_dict"),
    *("logits_to_keep", "labels", "inputs_embeds", "output_attentions", "output_hidden_states"),
)


def heads_mask(lvlm: LVLM, heads: Sequence[Head]) -> Tensor:
    """[L, H] bool: these heads (layer, head)."""
    mask = torch.zeros(lvlm.n_layers, lvlm.n_heads, dtype=torch.bool)
    pairs = {(layer, head) for layer in range(lvlm.n_layers) for head in range(lvlm.n_heads)}
    for pair in heads:
        try:
            place = tuple(map(operator.index, pair))
        except TypeError:
            place = None
        if place not in pairs:
            most = f"(layer, head) up to ({lvlm.n_layers - 1}, {lvlm.n_heads - 1})"
            raise BadOption("heads", pair, most)
        mask[place] = True
    return mask


@torch.no_grad()
def blind_logits(
    lvlm: LVLM,
    image: Image.Image,
    question: str,
    bank: MeanBank,
    heads: Sequence[Head] = (),
    *,
    answer_start: Sequence[int] = (),
) -> Tensor:
    """[V] float32 or float64: the next word of an answer that begins with the tokens
    `answer_start`, where `heads` (layer, head) see the bank's average picture."""
    on = ~heads_mask(lvlm, heads)
    prompt = lvlm.prompt(bank.resized(image), question, list(answer_start) or None)
    cache = prefix_cache(lvlm.decoder, prompt, *bank.means(lvlm, prompt, image))
    states = head_activations(lvlm, cache, on.to(lvlm.device)).states
    return wide(lvlm.decoder.head(lvlm.decoder.norm(states[-1, -1:])))[0]


def speak_blind(
    lvlm: LVLM,
    image: Image.Image,
    question: str,
    bank: MeanBank,
    heads: Sequence[Head] = (),
    *,
    length: int = 12,
) -> list[int]:
    """What the model says, the likeliest token each time, where `heads` (layer, head) see the
    bank's average picture: `lvlm.speak` with some heads blind.

        ids = sc.lvlm.speak_blind(lvlm, picture, "Which critter is this?", bank, [(0, 4), (1, 1)])
    """
    ids: list[int] = []
    for _ in range(length):
        token = int(blind_logits(lvlm, image, question, bank, heads, answer_start=ids).argmax())
        if token in lvlm.end_tokens:
            break
        ids.append(token)
    return ids


@dataclass(eq=False)
class _Spoken:
    """A prompt that was read in this block, and how much has been said behind it."""

    length: int  # tokens that a cache must hold by now
    at: At | None = None  # positions of the prompt; None: no picture is spoken about
    image: slice = field(default_factory=lambda: slice(0, 0))
    other: list[KeyValue] = field(default_factory=list)  # rotated, for each block
    # the picture's own, where its tokens read words, which an edit changes: every head reads these
    own: list[KeyValue] = field(default_factory=list)


@dataclass(eq=False)
class _Edit:
    """One edit of one model, and the prompts that are spoken about."""

    lvlm: LVLM
    heads: Tensor  # [L, H] bool
    native: Any  # the attention function that was there before
    masks: Any  # and the function of its masks
    blind: MeanBank | None = None
    redirect: Image.Image | None = None
    boost: float | None = None
    size: tuple[int, int] | None = None  # of the picture that is asked about
    picture: Image.Image | None = None  # itself, to be left out of the average
    now: _Spoken | None = None  # what the forward that runs is about
    caches: WeakKeyDictionary[Any, _Spoken] = field(default_factory=WeakKeyDictionary)
    reading: bool = False
    # by modality: features that the native model has made, and the inputs that it made them of
    encoded: dict[str, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)  # edited layers whose attention was changed
    met: bool = False  # whether a prompt with an image came

    def meet(self, inputs: Mapping[str, Any]) -> None:
        """Notice what the native forward is given: a prompt, or what is said behind it."""
        ids, past = inputs.get("input_ids"), inputs.get("past_key_values")
        self.ran.clear()
        if ids is not None:
            inputs = self._with_pixels(inputs)
        pixels = [name for name in PIXELS if inputs.get(name) is not None]
        if ids is None:
            raise BadInput(
                "embeddings without token ids",
                "they do not tell where the picture is",
                "give input_ids and the picture's pixels",
            )
        old = 0 if past is None else past.get_seq_length()
        if old:
            self.now = self._continued(past, old, pixels)
            self.now.length = old + ids.shape[1]
        elif pixels:
            self.now = self._prompted(inputs)
        else:
            self.now = _Spoken(ids.shape[1])
        if self.now.at is None:
            self._need_text(ids)
        if past is not None:
            self.caches[past] = self.now

    def _with_pixels(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Native inputs with the image itself. From 5.18 on, transformers' `generate` encodes it
        first and passes its features (`mm_encoder_outputs`) instead."""
        features = {n: v for n, v in (inputs.get(FEATURES) or {}).items() if v is not None}
        found: dict[str, Any] = {}
        for modality, output in features.items():
            made, source = self.encoded.get(modality, (None, {}))
            if made is not output:
                raise BadInput(
                    f"features of an {modality} that was encoded elsewhere ({_library()})",
                    "the edit does not know which image they show, and would change nothing",
                    "pass pixel_values, or call generate inside the block",
                )
            found |= source
        return {**{n: v for n, v in inputs.items() if n != FEATURES}, **found}

    def _need_text(self, ids: Tensor) -> None:
        """Refuse image tokens whose image was not seen: they would be taken for text."""
        known = getattr(self.lvlm.module.config, "image_token_id", None)
        if known is not None and bool((ids == known).any()):
            raise BadInput(
                f"{int((ids == known).sum())} image tokens without an image ({_library()})",
                "the forward was called with no inputs of an image that this edit knows, so the"
                " edit would change nothing",
                "pass pixel_values; if you did, this version of the library is not supported",
            )

    def _continued(self, past: Any, old: int, pixels: list[str]) -> _Spoken:
        """What a cache that holds tokens is about."""
        if pixels:
            raise BadInput(
                f"{pixels[0]} behind {old} tokens of a cache",
                "heads are edited for one picture, which a prompt begins with",
                "give the whole conversation without a cache",
            )
        spoken = self.caches.get(past)
        if spoken is None or not spoken.image.stop <= old <= spoken.length:
            raise BadInput(
                f"a cache of {old} tokens",
                "not all of them were read inside this block, so its picture is not known",
                "read the whole prompt inside the block",
            )
        return spoken

    def _prompted(self, inputs: Mapping[str, Any]) -> _Spoken:
        self.reading = self.met = True
        try:
            native = {n: v for n, v in inputs.items() if n not in _RUNNING and v is not None}
            prompt = read(self.lvlm, self.lvlm.send(native), size=self.size)
            other = self._seen_instead(prompt)
            own = self._image_keys(prompt, prompt) if prompt.read_words else []
            return _Spoken(len(prompt.ids), prompt.at, prompt.image, other, own)
        finally:
            self.reading = False

    def leave(self, out: Any) -> None:
        """The forward has ended: check that the edit ran in every layer that it is for, and
        remember what the cache that it made is about."""
        missing = set(self.heads.any(dim=1).nonzero()[:, 0].tolist()) - self.ran
        if self.now is not None and self.now.at is not None and out is not None and missing:
            self.now = None
            raise UnsupportedModel(
                f"{type(self.lvlm.module).__name__} of {_library()}",
                f"layers {sorted(missing)} attended without their edit, so that its output would"
                " be reported as edited and is not",
            )
        parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else ()
        for part in parts:
            if self.now is not None and hasattr(part, "get_seq_length"):
                self.caches[part] = self.now
        self.now = None

    def _seen_instead(self, prompt: Prompt) -> list[KeyValue]:
        """Keys at the prompt's own positions, and values, of what the heads see instead of its
        picture."""
        lvlm = self.lvlm
        if self.blind is not None:
            keys, values = self.blind.means(lvlm, prompt, self.picture)
            return self._rotated(
                [(k[None], v[None]) for k, v in zip(keys, values, strict=True)], prompt
            )
        if self.redirect is None:
            return []
        donor = lvlm.prompt(self.redirect, QUESTION)
        if donor.tokens != prompt.tokens:
            raise BadInput(
                f"a picture with image tokens {donor.tokens}",
                f"the model is asked about one with {prompt.tokens}",
                "give pictures of one size",
            )
        return self._image_keys(asked_alike(donor, prompt), prompt)

    def _image_keys(self, donor: Prompt, prompt: Prompt) -> list[KeyValue]:
        """Keys and values of the donor's image tokens, where everybody sees its picture."""
        prefix = run_prefix(self.lvlm.decoder, [donor])
        pairs = [(k[:, :, donor.image], v[:, :, donor.image]) for k, v in prefix]
        return self._rotated(pairs, prompt)

    def _rotated(self, pairs: list[KeyValue], prompt: Prompt) -> list[KeyValue]:
        at = prompt.at.take(prompt.at.index[prompt.image])
        turns = [block.rotate for block in self.lvlm.blocks]
        return [(k if t is None else t(k, at), v) for t, (k, v) in zip(turns, pairs, strict=True)]

    def change(self, module: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Tensor:
        """`out` [B, R, H, dh] with what the edited heads bring to text rows instead."""
        layer, keys, now = int(module.layer_idx), key.shape[2], self.now
        edited = self.heads[layer].to(query.device)  # [H]
        if now is None and not self.reading:
            raise BadInput(
                "a run of the decoder alone",
                "its edit is not told which tokens are the picture's",
                "call the whole model",
            )
        if now is None or now.at is None:
            return out
        self.ran.add(layer)
        if not bool(self.heads.any()):
            return out
        heads = (torch.ones_like(edited) if now.own else edited).nonzero()[:, 0]
        edited = edited[heads]
        if len(heads) == 0:
            return out
        if keys != now.length:
            raise BadOption(
                "cache",
                f"{keys} keys where {now.length} tokens were read",
                "a cache that holds every token and no more, as `generate` has without options",
            )
        index = torch.arange(keys, device=self.lvlm.device)
        skipped = max(0, now.image.stop - (keys - query.shape[2]))  # rows that are no text
        q = query[:, heads, skipped:]  # [B, E, R', dh]
        if q.shape[2] == 0:
            return out
        block, groups = self.lvlm.blocks[layer], query.shape[1] // key.shape[1]
        k, v = key[:, heads // groups], value[:, heads // groups]  # copies, [B, E, K, dh]
        for banks, which in ((now.own, torch.ones_like(edited)), (now.other, edited)):
            for mine, instead in zip((k, v), banks[layer] if banks else (), strict=False):
                mine[:, which, now.image] = instead.to(mine)[:, heads[which] // groups]
        rows = now.at.take(index[keys - q.shape[2] :])
        bias = block.bias(rows, now.at.take(index))
        assert bias is not None  # decoders look back only
        bias = bias.to(query.device)
        if bias.shape[1] > 1:
            bias = bias[:, heads]
        if self.boost is not None:
            weight = math.log(self.boost) if self.boost else -math.inf
            bias = bias.repeat(1, len(heads) // bias.shape[1], 1, 1)
            bias[:, edited, :, now.image] += weight
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
    picture: Image.Image | None = None,
) -> Iterator[LVLM]:
    """Inside the block, some heads see something else than the picture, in the native `generate`
    and in every other forward; afterwards the model is as before.

        other = sc.data.open_image("critters:clean:test#5")
        with sc.lvlm.edited_heads(lvlm, [(0, 4), (1, 1)], redirect=other):
            ids = lvlm.speak(lvlm.prompt(picture, "Which critter is this?"), 8)

    heads       pairs (layer, head), both from 0
    blind       a bank: these heads see its average picture
    redirect    another picture of the same size: they see that one
    boost       a factor: the picture weighs so many times as much for them; 0 hides it
    picture     the picture that is asked about, which the bank's average then leaves out
    size        or its (height, width) alone. One of both places tiles (InternVL, Idefics 3, Ovis
                2), which native inputs do not tell

    Give exactly one of blind, redirect and boost. One sequence at a time; its prompt is read inside
    the block.
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
    for known in (picture, redirect):
        if known is not None and size is None:
            size = (known.height, known.width)  # they are alike
    native, masks = _native(lvlm.blocks[0].native.self_attn, before)
    if any(edit.masks is not masks for edit in _EDITS.values()):
        raise BadOption("edit", "a second model", "models with one attention, or one at a time")
    edit = _Edit(lvlm, mask, native, masks, blind, redirect, boost, size, picture)
    natives: list[Any] = [block.native for block in lvlm.blocks]
    attentions: list[nn.Module] = [native.self_attn for native in natives]
    with ExitStack() as stack:
        stack.enter_context(_heard(lvlm.module, edit))
        stack.enter_context(_encoders(lvlm.module, edit))
        stack.callback(lambda: [_EDITS.pop(attention, None) for attention in attentions])
        _EDITS.update(dict.fromkeys(attentions, edit))
        _register(masks)
        stack.callback(lvlm.module.set_attn_implementation, {"text_config": before})
        lvlm.module.set_attn_implementation({"text_config": ATTENTION})
        yield lvlm
        if not edit.met:
            raise BadInput(
                "an edit that never ran",
                f"no forward of {type(lvlm.module).__name__} inside the block was about an image"
                f" ({_library()})",
                "call the model, or its generate, inside the block",
            )


@contextmanager
def _encoders(module: nn.Module, edit: _Edit) -> Iterator[None]:
    """Notice which inputs the features of an image are made of, since `generate` may call the
    encoder by itself and hand only its features on."""
    base: Any = getattr(module, "base_model", module)
    names = {kind: f"get_{kind}_features" for kind in ("image", "video")}
    found = {kind: getattr(base, name, None) for kind, name in names.items()}

    def noticed(kind: str, native: Any) -> Any:
        @functools.wraps(native)
        def encode(*args: Any, **given: Any) -> Any:
            out = native(*args, **given)
            if not edit.reading:
                inputs = inspect.signature(native).bind_partial(*args, **given).arguments
                edit.encoded[kind] = (out, {n: v for n, v in inputs.items() if n != "kwargs"})
            return out

        return encode

    kinds = [kind for kind, native in found.items() if native is not None]
    for kind in kinds:
        setattr(base, names[kind], noticed(kind, found[kind]))
    try:
        yield
    finally:
        for kind in kinds:
            delattr(base, names[kind])  # the class's own shows again


@contextmanager
def _heard(module: nn.Module, edit: _Edit) -> Iterator[None]:
    """Tell an edit of every forward of the whole model: what it is given, and that it ended."""
    signature = inspect.signature(module.forward)
    rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]

    def hear(_: nn.Module, positional: tuple[Any, ...], given: dict[str, Any]) -> None:
        if not edit.reading:
            inputs = signature.bind_partial(*positional, **given).arguments
            for name in rest:
                inputs |= inputs.pop(name, {})
            edit.meet(inputs)

    def leave(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
        if not edit.reading:
            edit.leave(out)

    before = module.register_forward_pre_hook(hear, with_kwargs=True)
    after = module.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _library() -> str:
    import transformers

    return f"transformers {transformers.__version__}"


def _native(attention: nn.Module, name: str | None) -> tuple[Any, Any]:
    """The attention function of a native block, and the one that makes its masks. Each modeling
    file has an eager one of its own."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    masks = dict(ALL_MASK_ATTENTION_FUNCTIONS.items())
    if name in ("eager", None):
        own = sys.modules[type(attention).__module__]
        return own.eager_attention_forward, masks["eager"]
    return AttentionInterface()[name], masks.get(name, sdpa_mask)


def _register(masks: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, masks)
