"""Head attribution by definition: the native model on the whole sequence, with keys and values
replaced for every (text query, head).

Nothing is shared between masks and nothing is kept from one run to the next. `Blinded` runs one
mask literally, pair by pair; `softly_blinded` lets everything see a share of the picture, for
derivatives; `blinded_batch` is the plain way to run many at once, every mask with
its whole sequence, as an everyday user of the library would. `cached_batch` is what a careful one
would write: keys and values up to the last image token are computed once, and text rows alone run
for every mask.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

Means = list[
    tuple[Tensor, Tensor]
]  # for each layer, unrotated keys and values [Hkv, N, dh] of the average picture


def image_span(module: Any, inputs: dict[str, Any]) -> tuple[int, int]:
    shown = inputs["input_ids"][0] == module.config.image_token_id
    if "image_grids" in inputs:  # of Molmo 2: marks see the picture as its tokens do
        shown = inputs["mm_token_type_ids"][0] == 1
    places = shown.nonzero()[:, 0]
    return int(places[0]), int(places[-1]) + 1


@torch.no_grad()
def average_picture(module: Any, calibration: Sequence[dict[str, Any]]) -> Means:
    """Keys before rotation and values of the image tokens, averaged over pictures, listened to
    where the native model makes them."""
    totals: list[list[Tensor]] = []
    layers = module.get_decoder().layers
    for inputs in calibration:
        heard: list[dict[int, Tensor]] = [{} for _ in layers]
        handles = []
        for index, layer in enumerate(layers):
            attention = layer.self_attn
            sources = (getattr(attention, "k_norm", attention.k_proj), attention.v_proj)
            for slot, source in enumerate(sources):
                handles.append(
                    source.register_forward_hook(
                        lambda _, __, out, mine=heard[index], slot=slot: mine.update({slot: out})
                    )
                )
        module(**inputs, use_cache=False)
        for handle in handles:
            handle.remove()
        (start, stop), length = image_span(module, inputs), inputs["input_ids"].shape[1]
        # a norm may come before or behind the swap of heads and rows
        pairs = [
            [t if t.shape[1] == length else t.transpose(1, 2) for t in (both[0], both[1])]
            for both in heard
        ]
        found = [
            [
                t.reshape(length, -1, layers[0].self_attn.head_dim)[start:stop].transpose(0, 1)
                for t in pair
            ]
            for pair in pairs
        ]
        totals = (
            found
            if not totals
            else [
                [a + b for a, b in zip(old, new, strict=True)]
                for old, new in zip(totals, found, strict=True)
            ]
        )
    return [(k / len(calibration), v / len(calibration)) for k, v in totals]


@dataclass
class Blinded:
    """Which (head, text query, image token) triples are true: x [L, H], u [T], v [N]; everything
    else sees the average."""

    module: Any
    inputs: dict[str, Any]
    means: Means

    @torch.no_grad()
    def logits(self, x: Tensor, u: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """The last row's logits [V]."""
        start, stop = image_span(self.module, self.inputs)
        length = self.inputs["input_ids"].shape[1]
        rows = torch.ones(length - stop, dtype=torch.bool) if u is None else u
        tokens = torch.ones(stop - start, dtype=torch.bool) if v is None else v

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float,
            **_: Any,
        ) -> tuple[Tensor, None]:  # fmt: skip
            layer, groups = module.layer_idx, module.num_key_value_groups
            mean_keys, mean_values = self.rotated[layer]
            out = torch.empty_like(query)
            for head in range(query.shape[1]):
                for row in range(length):
                    keys, values = key[0, head // groups].clone(), value[0, head // groups].clone()
                    if row >= stop:
                        for token in range(stop - start):
                            if not (x[layer, head] and rows[row - stop] and tokens[token]):
                                keys[start + token] = mean_keys[head // groups, token]
                                values[start + token] = mean_values[head // groups, token]
                    seen = slice(row + 1) if mask is None else mask[0, 0, row] == 0
                    scores = keys[seen] @ query[0, head, row] * scaling
                    out[0, head, row] = torch.softmax(scores, dim=0) @ values[seen]
            return out.transpose(1, 2), None

        with replaced_attention(self.module, attention), rotations(self.module) as tables:
            self.rotated = _Lazily(self.means, tables, start, stop)
            return self.module(**self.inputs, use_cache=False).logits[0, -1]


def softly_blinded(
    module: Any,
    inputs: dict[str, Any],
    means: Means,
    x: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor:
    """The last row's logits [V] where heads x [L, H], text rows u [T] and image tokens v [N] see a
    share of the picture, differentiable in all three.

    Head n at text row i mixes two whole attentions, x_n u_i of one that sees the picture and the
    rest of one that sees the average. The one that sees the picture has both keys of image token
    j, weighing v_j and 1 - v_j.
    """
    start, stop = image_span(module, inputs)
    length = inputs["input_ids"].shape[1]
    rows = torch.ones(length - stop, dtype=x.dtype) if u is None else u
    tokens = torch.ones(stop - start, dtype=x.dtype) if v is None else v
    weights = torch.cat([x.new_ones(start), tokens, x.new_ones(length - stop)])  # of the keys

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        layer, groups = module.layer_idx, module.num_key_value_groups
        mean_keys, mean_values = rotated[layer]
        back = torch.ones(length, length, dtype=torch.bool).tril()
        heads = []
        for head in range(query.shape[1]):
            q, keys, values = query[0, head], key[0, head // groups], value[0, head // groups]
            other_keys, other_values = mean_keys[head // groups], mean_values[head // groups]
            true = torch.exp(q @ keys.T * scaling) * back  # [S, S]
            other = torch.exp(q @ other_keys.T * scaling)  # [S, N]
            plain = true @ values / true.sum(dim=1, keepdim=True)
            text_only = true * torch.cat(
                [x.new_ones(start), x.new_zeros(stop - start), x.new_ones(length - stop)]
            )
            blind = text_only @ values + other @ other_values
            blind = blind / (text_only.sum(dim=1) + other.sum(dim=1))[:, None]
            seen, unseen = true * weights, other * (1 - tokens)
            seeing = seen @ values + unseen @ other_values
            seeing = seeing / (seen.sum(dim=1) + unseen.sum(dim=1))[:, None]
            gate = (x[layer, head] * rows)[:, None]  # [T, 1]
            mixed = gate * seeing[stop:] + (1 - gate) * blind[stop:]
            heads.append(torch.cat([plain[:stop], mixed]))
        return torch.stack(heads, dim=1)[None], None

    with replaced_attention(module, attention), rotations(module) as tables:
        rotated = _Lazily(means, tables, start, stop)
        return module(**inputs, use_cache=False).logits[0, -1]


@torch.no_grad()
def blinded_batch(
    module: Any,
    inputs: dict[str, Any],
    means: Means,
    x: Tensor,
    given: dict[str, Any] | None = None,
) -> Tensor:
    """Final states [B, D] of the last row for head masks x [B, L, H]: every mask runs its whole
    sequence, with fused attention. The tower runs once (`given`, from `arriving`, spares even
    that)."""
    start, stop = image_span(module, inputs)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        groups = module.num_key_value_groups
        before = scaled_dot_product_attention(
            query[:, :, :stop], key[:, :, :stop], value[:, :, :stop], is_causal=True,
            scale=scaling, enable_gqa=groups > 1,
        )  # fmt: skip
        keys, values = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        on = x[:, module.layer_idx, :, None, None]
        for mixed, mean in zip((keys, values), rotated[module.layer_idx], strict=True):
            mixed[:, :, start:stop] = torch.where(
                on, mixed[:, :, start:stop], mean.repeat_interleave(groups, dim=0)
            )
        length = key.shape[2]
        back = torch.ones(length - stop, length, dtype=torch.bool, device=query.device).tril(stop)
        after = scaled_dot_product_attention(
            query[:, :, stop:], keys, values, attn_mask=back, scale=scaling
        )
        return torch.cat([before, after], dim=2).transpose(1, 2), None

    many = _repeated(given or arriving(module, inputs), len(x))
    with replaced_attention(module, attention), rotations(module) as tables:
        rotated = _Lazily(means, tables, start, stop)
        return module.get_decoder()(**many, use_cache=False).last_hidden_state[:, -1]


@dataclass
class Prefix:
    """Keys and values up to the last image token, of every layer, [1, H, stop, dh] each: with the
    picture, and with its average in the picture's place."""

    seen: Means
    unseen: Means


@torch.no_grad()
def remembered(
    module: Any, inputs: dict[str, Any], means: Means, given: dict[str, Any] | None = None
) -> Prefix:
    """One native run of the whole sequence, listened to."""
    start, stop = image_span(module, inputs)
    seen: Means = []
    unseen: Means = []

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        both = [x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value)]
        keys, values = (x[:, :, :stop] for x in both)
        seen.append((keys, values))
        other = [x.clone() for x in (keys, values)]
        for mixed, mean in zip(other, rotated[module.layer_idx], strict=True):
            mixed[0, :, start:] = mean.repeat_interleave(module.num_key_value_groups, dim=0)
        unseen.append((other[0], other[1]))
        out = scaled_dot_product_attention(query, *both, is_causal=True, scale=scaling)
        return out.transpose(1, 2), None

    with replaced_attention(module, attention), rotations(module) as tables:
        rotated = _Lazily(means, tables, start, stop)
        module.get_decoder()(**_repeated(given or arriving(module, inputs), 1), use_cache=False)
    return Prefix(seen, unseen)


@torch.no_grad()
def cached_batch(
    module: Any, inputs: dict[str, Any], prefix: Prefix, x: Tensor, given: dict[str, Any]
) -> Tensor:
    """The final states [B, D] of `blinded_batch`, from text rows alone."""
    stop = image_span(module, inputs)[1]
    embeds = given["inputs_embeds"][:, stop:]
    rows = embeds.shape[1]
    back = torch.ones(rows, stop + rows, dtype=torch.bool, device=x.device).tril(stop)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        on = x[:, module.layer_idx, :, None, None]
        banks = (prefix.seen[module.layer_idx], prefix.unseen[module.layer_idx])
        both = [
            torch.cat([torch.where(on, true, mean), own], dim=2)
            for true, mean, own in zip(
                *banks,
                (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (key, value)),
                strict=True,
            )
        ]
        out = scaled_dot_product_attention(query, *both, attn_mask=back, scale=scaling)
        return out.transpose(1, 2), None

    places = given.get("position_ids")
    if places is None:
        places = torch.arange(stop + rows, device=x.device)[None]
    with replaced_attention(module, attention):
        out = module.get_decoder()(
            inputs_embeds=embeds.expand(len(x), -1, -1),
            position_ids=places[..., stop:].expand(*places.shape[:-2], len(x), -1),
            use_cache=False,
        )
    return out.last_hidden_state[:, -1]


@torch.no_grad()
def arriving(module: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the native model hands to its decoder."""
    heard: list[dict[str, Any]] = []
    handle = module.get_decoder().register_forward_pre_hook(
        lambda _, __, given: heard.append(given), with_kwargs=True
    )
    module(**inputs, use_cache=False, logits_to_keep=1)
    handle.remove()
    return heard[0]


def _repeated(given: dict[str, Any], times: int) -> dict[str, Any]:
    """The decoder's arguments for many copies of one sequence."""
    made = {"inputs_embeds": given["inputs_embeds"].expand(times, -1, -1)}
    if given.get("position_ids") is not None:
        made["position_ids"] = given["position_ids"].expand(-1, times, -1)
    if given.get("deepstack_visual_embeds") is not None:
        made["visual_pos_masks"] = given["visual_pos_masks"].expand(times, -1)
        made["deepstack_visual_embeds"] = [
            features.repeat(times, 1) for features in given["deepstack_visual_embeds"]
        ]
    return made


class _Lazily:
    """Average keys rotated by the table of their layer, once the native run has made it."""

    def __init__(
        self, means: Means, tables: dict[int, tuple[Tensor, Tensor]], start: int, stop: int
    ):
        self.means, self.tables, self.span = means, tables, slice(start, stop)

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self.means[layer]
        if layer not in self.tables:
            return keys, values
        cos, sin = (table[0, self.span] for table in self.tables[layer])
        width = cos.shape[-1]
        turned, still = keys[..., :width], keys[..., width:]
        paired = torch.equal(cos[..., 0::2], cos[..., 1::2])  # of Cohere
        if paired or width < keys.shape[-1]:  # of GLM: neighbours are pairs
            if not torch.equal(cos[..., 0::2], cos[..., 1::2]):  # transformers before 5.17
                cos, sin = (x[..., : width // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))
            other = torch.stack([-turned[..., 1::2], turned[..., 0::2]], dim=-1).flatten(-2)
        else:
            other = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], dim=-1)
        return torch.cat([turned * cos + other * sin, still], dim=-1), values


@contextmanager
def rotations(module: Any) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """The cosines and sines each attention layer is given; none where it does not use them."""
    tables: dict[int, tuple[Tensor, Tensor]] = {}

    def hear(attention: Any, _: Any, given: dict[str, Any]) -> None:
        if type(attention).__name__ != "Cohere2Attention" or attention.sliding_window:
            tables[attention.layer_idx] = given["position_embeddings"]

    handles = [
        layer.self_attn.register_forward_pre_hook(hear, with_kwargs=True)
        for layer in module.get_decoder().layers
    ]
    try:
        yield tables
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replaced_attention(module: Any, attention: Any) -> Iterator[None]:
    """Another attention function in the decoder only."""
    AttentionInterface.register("hear_twin", attention)
    AttentionMaskInterface.register("hear_twin", eager_mask)
    before = module.get_decoder().config._attn_implementation
    module.set_attn_implementation({"text_config": "hear_twin"})
    try:
        yield
    finally:
        module.set_attn_implementation({"text_config": before})
