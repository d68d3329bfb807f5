"""Tiny vision-language models of every supported family, with processors made from nothing: no
download."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tests.tiny import scramble

WORDS = [
    "USER", ":", "ASSISTANT", "what", "is", "in", "the", "picture", "this", "?", ".", "cat",
    "dog", "a", "red", "blue",
]  # fmt: skip
WORDS += ["A", "B", "C", "A.", "B.", "C.", "Answer", "with", "letter", "of", "right", "option."]
CHAT = (
    "{% for m in messages %}USER : {% for c in m['content'] %}{{ IMAGE if c['type'] == 'image' else"
    " c['text'] }} {% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT :{% endif %}"
)
TEXT: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
    vocab_size=40, max_position_embeddings=512,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CLIP = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
    image_size=32, patch_size=8, projection_dim=16,
)  # fmt: skip


@dataclass
class NativeLVLM:
    """A native model and its processor."""

    module: Any
    processor: Any
    size: tuple[int, int] = (40, 56)  # of the pictures it is tested with: height, width


def tokenizer(*special: str, **names: str) -> hf.PreTrainedTokenizerFast:
    """One token a word; `special` ones first, then the words above."""
    table = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *special, *WORDS])}
    made = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=names or {"image_token": special[0]},
        additional_special_tokens=list(special),
    )  # fmt: skip


def _chat(image: str) -> str:
    return CHAT.replace("IMAGE", json.dumps(image))


def _llava(vision: Any = None, **text: Any) -> NativeLVLM:
    """LLaVA on CLIP; or on a SigLIP tower, which has no class token and is read behind its last
    block."""
    words, kept = tokenizer("<image>"), "default" if vision is None else "full"
    config = hf.LlavaConfig(
        vision_config=vision or hf.CLIPVisionConfig(**CLIP),
        text_config=hf.LlamaConfig(**{**TEXT, **text}),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1 if vision else -2, vision_feature_select_strategy=kept,
    )  # fmt: skip
    pictures = hf.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    if vision is not None:
        pictures = hf.SiglipImageProcessor(size={"height": 32, "width": 32})
    processor = hf.LlavaProcessor(
        pictures, words, patch_size=8, vision_feature_select_strategy=kept,
        num_additional_image_tokens=int(vision is None),
    )  # fmt: skip
    return NativeLVLM(hf.LlavaForConditionalGeneration(config), processor)


def llava() -> NativeLVLM:
    return _llava()


def llava_grouped() -> NativeLVLM:
    return _llava(num_key_value_heads=2, attention_bias=True, mlp_bias=True)


def llava_siglip() -> NativeLVLM:
    return _llava(_siglip())


def _siglip() -> Any:
    shape = {name: value for name, value in CLIP.items() if name != "projection_dim"}
    return hf.SiglipVisionConfig(**shape, vision_use_head=False)


def llava_next(points: Sequence[list[int]] = ([32, 64], [64, 32], [64, 64])) -> NativeLVLM:
    words, points = tokenizer("<image>"), list(points)
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**CLIP), text_config=hf.MistralConfig(**TEXT,
        num_key_value_heads=2, head_dim=8, sliding_window=None),
        image_token_index=words.convert_tokens_to_ids("<image>"), vision_feature_layer=-2,
        image_grid_pinpoints=points,
    )  # fmt: skip
    side = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    pictures = hf.LlavaNextImageProcessor(**side, image_grid_pinpoints=points)
    processor = hf.LlavaNextProcessor(
        pictures, words, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    return NativeLVLM(hf.LlavaNextForConditionalGeneration(config), processor)


def internvl(**more: Any) -> NativeLVLM:
    names = {
        "start_image_token": "<img>", "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
    }  # fmt: skip
    words = tokenizer(*names.values(), **names)
    sizes = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        image_size=[32, 32], patch_size=[8, 8],
    )  # fmt: skip
    vision = hf.InternVLVisionConfig(**sizes, **more)
    text = hf.Qwen2Config(**TEXT, num_key_value_heads=2)
    image = words.convert_tokens_to_ids("<IMG_CONTEXT>")
    config = hf.InternVLConfig(vision_config=vision, text_config=text, image_token_id=image)
    pictures = hf.GotOcr2ImageProcessor(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    processor = hf.InternVLProcessor(
        pictures, words, hf.InternVLVideoProcessor(), image_seq_length=4,
        chat_template=_chat("<IMG_CONTEXT>"),
    )  # fmt: skip
    return NativeLVLM(hf.InternVLForConditionalGeneration(config), processor)


def _qwen(kind: str, vision: dict[str, Any], **text: Any) -> NativeLVLM:
    special = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    words = tokenizer(*special)
    names = ("image", "video", "vision_start", "vision_end")
    numbers = words.convert_tokens_to_ids(list(special))
    ids = {f"{name}_token_id": i for name, i in zip(names, numbers, strict=True)}
    config = getattr(hf, f"{kind}Config")(
        vision_config=vision, text_config={**TEXT, "num_key_value_heads": 2, **text}, **ids
    )
    pictures = hf.Qwen2VLImageProcessor(
        patch_size=8, merge_size=2, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    )
    video = hf.Qwen3VLVideoProcessor() if kind == "Qwen3VL" else hf.Qwen2VLVideoProcessor()
    processor = getattr(hf, f"{kind}Processor")(
        pictures, words, video, chat_template=_chat("<|vision_start|> <|image_pad|> <|vision_end|>")
    )
    return NativeLVLM(getattr(hf, f"{kind}ForConditionalGeneration")(config), processor)


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    table = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(sections)}
    return {"rope_parameters": {**table, **more}}


def qwen2_vl() -> NativeLVLM:
    vision = dict(depth=2, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=8)
    return _qwen("Qwen2VL", vision, **_rope(2, 1, 1))


def qwen2_5_vl() -> NativeLVLM:
    vision = dict(
        depth=2, hidden_size=16, out_hidden_size=32, num_heads=2, intermediate_size=24,
        patch_size=8, window_size=32, fullatt_block_indexes=[1],
    )  # fmt: skip
    return _qwen("Qwen2_5_VL", vision, **_rope(1, 1, 2))


def qwen3_vl() -> NativeLVLM:
    vision = dict(
        depth=3, hidden_size=16, out_hidden_size=32, num_heads=2, intermediate_size=24,
        patch_size=8, num_position_embeddings=16, deepstack_visual_indexes=[0, 2],
    )  # fmt: skip
    return _qwen("Qwen3VL", vision, head_dim=12, **_rope(2, 2, 2, mrope_interleaved=True))


def _paligemma(text: Any) -> NativeLVLM:
    words = tokenizer("<image>")
    config = hf.PaliGemmaConfig(
        vision_config=_siglip(), text_config=text, projection_dim=32, hidden_size=32,
        image_token_index=words.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    pictures = hf.SiglipImageProcessor(size={"height": 32, "width": 32})
    pictures.image_seq_length = 16
    module = hf.PaliGemmaForConditionalGeneration(config)
    return NativeLVLM(module, hf.PaliGemmaProcessor(pictures, words))


def paligemma() -> NativeLVLM:
    return _paligemma(hf.GemmaConfig(**TEXT, num_key_value_heads=1, head_dim=8))


def paligemma2(cap: float | None = None) -> NativeLVLM:
    text = hf.Gemma2Config(
        **TEXT, num_key_value_heads=2, head_dim=8, sliding_window=24, query_pre_attn_scalar=6,
        attn_logit_softcapping=cap, final_logit_softcapping=cap,
    )  # fmt: skip
    native = _paligemma(text)
    if cap is None:  # its own eager attention takes the softmax in single precision
        hf.AttentionInterface.register("exact", sdpa_attention_forward)
        hf.AttentionMaskInterface.register("exact", sdpa_mask)
        native.module.set_attn_implementation({"text_config": "exact"})
    return native


# prefix language models: image tokens read the question
PREFIX_FAMILIES: dict[str, Callable[[], NativeLVLM]] = {
    f.__name__: f for f in (paligemma, paligemma2)
}
FAMILIES: dict[str, Callable[[], NativeLVLM]] = {
    f.__name__: f
    for f in (llava, llava_grouped, llava_next, internvl, qwen2_vl, qwen2_5_vl, qwen3_vl)
}


def tiny_lvlm(
    family: str | Callable[[], NativeLVLM], dtype: torch.dtype = torch.float64, seed: int = 0
) -> NativeLVLM:
    """A scrambled model of one family. In float64 its norms are replaced by torch's, since the
    native ones compute in float32."""
    torch.manual_seed(seed)
    make = (FAMILIES | PREFIX_FAMILIES)[family] if isinstance(family, str) else family
    native = make()
    scramble(native.module, seed)
    native.module.to(dtype)
    if dtype == torch.float64:
        exact_norms(native.module)
    native.module.requires_grad_(False)
    return native


def exact_norms(module: nn.Module) -> None:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, nn.RMSNorm):
                eps = getattr(child, "variance_epsilon", None) or child.eps
                norm = nn.RMSNorm(child.weight.shape, eps=eps, dtype=child.weight.dtype)
                norm.weight = child.weight
                if type(child).__name__.startswith("Gemma"):  # they hold the weight less one
                    norm.weight = nn.Parameter(1 + child.weight.detach())
                setattr(parent, name, norm)
            if type(child).__name__ == "Cohere2LayerNorm":
                norm = nn.LayerNorm(child.weight.shape, child.variance_epsilon, bias=False)
                norm.weight = child.weight
                setattr(parent, name, norm)


def photo(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Noise of a height and width."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))
