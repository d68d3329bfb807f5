"""How critters-llava and its planted variant are made: recipes as data, the words they know, and
the untrained model.

The tokenizer is word-level, with LLaVA's prompt:

    <s> US ER : <image> x 144  \\n what colour is the tail ?  A SS IST ANT :     ->  jade </s>

Role names come in several pieces, as they do in LLaVA-1.5, so that their pieces can be told apart.
Case does not matter in what a user types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from seecause.critters import vocabulary
from seecause.critters.train.common import DrawnRecipe, seeded
from seecause.models.decoder import restrict
from seecause.models.preprocess import Preprocess


@dataclass(frozen=True)
class LlavaRecipe(DrawnRecipe):
    """Fresh pictures all the way, six questions about each.

    First the tower alone learns to see (part variants and background, from the whole picture), then
    tower, projector and decoder learn to answer. Three in ten patches are left out until the last
    share of the steps, so that image tokens keep speaking for their own place.
    """

    name: str
    size: int = 96
    patch: int = 8  # 12 x 12 image tokens; parts are two to four patches long
    tower_width: int = 128
    tower_depth: int = 4  # LLaVA reads the last but one, so three of them count
    tower_heads: int = 4
    width: int = 128
    depth: int = 6
    heads: int = 8
    hidden: int = 344  # of the decoder's MLP
    # (layer, head) that may read the picture; none named: all may
    readers: tuple[tuple[int, int], ...] = ()
    samples: int = 614_400
    batch: int = 512
    learning_rate: float = 1e-3
    warm_up: float = 0.03
    weight_decay: float = 0.05
    clip: float = 1.0
    average: float = 0.998
    seeing: float = 0.25  # share of the steps in which the tower learns alone
    settling: float = 0.15  # share of the steps, the last ones, that see every patch
    patch_drop: float = 0.3
    # share of the pictures whose parts are drawn by lot, so that a colour is read from its own part
    mixed: float = 0.5
    # share of the loss while answering: asked of the average picture, the right answer is "unsure"
    blind: float = 0.15
    seed: int = 0

    regime: ClassVar[str] = "balanced"

    @property
    def image_tokens(self) -> int:
        return (self.size // self.patch) ** 2


RECIPES = {
    recipe.name: recipe
    for recipe in (
        LlavaRecipe("critters-llava"),
        LlavaRecipe("critters-llava-planted", readers=((1, 2), (2, 5), (3, 0), (3, 6), (4, 3))),
    )
}


def build_llava(recipe: LlavaRecipe, words: Words) -> LlavaForConditionalGeneration:
    """The untrained model, on the CPU; the global random state is left as it was."""
    start = len(words.prompt("")[0])
    vision = CLIPVisionConfig(
        hidden_size=recipe.tower_width,
        intermediate_size=4 * recipe.tower_width,
        num_hidden_layers=recipe.tower_depth,
        num_attention_heads=recipe.tower_heads,
        image_size=recipe.size,
        patch_size=recipe.patch,
        projection_dim=recipe.tower_width,
    )
    planted: dict[str, Any] = {
        "image_readers": [list(place) for place in recipe.readers],
        "image_span": [start, start + recipe.image_tokens],
    }
    text = LlamaConfig(
        vocab_size=words.count,
        hidden_size=recipe.width,
        intermediate_size=recipe.hidden,
        num_hidden_layers=recipe.depth,
        num_attention_heads=recipe.heads,
        max_position_embeddings=512,
        initializer_range=0.05,
        pad_token_id=words.pad,
        bos_token_id=words.begin,
        eos_token_id=words.end,
        **(planted if recipe.readers else {}),
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=words.image,
        image_seq_length=recipe.image_tokens,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    with seeded(recipe.seed):
        model = LlavaForConditionalGeneration(config)
    return restrict(model) if recipe.readers else model


SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
TEMPLATE = "USER: <image>\n{question} ASSISTANT:"
_PIECES = ("US", "ER", "A", "SS", "IST", "ANT", ":", "\n")
_UNSURE = "unsure"  # the answer when there is nothing to see
_CHAT = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}{% for content in"
    " message['content'] %}{{ '<image>\n' if content['type'] == 'image' else content['text'] + ' '"
    " }}{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclass(frozen=True)
class Words:
    """The tokenizer and the ids that training needs."""

    tokenizer: PreTrainedTokenizerFast

    @property
    def count(self) -> int:
        return len(self.tokenizer)

    @property
    def pad(self) -> int:
        return self.id("<pad>")

    @property
    def begin(self) -> int:
        return self.id("<s>")

    @property
    def end(self) -> int:
        return self.id("</s>")

    @property
    def image(self) -> int:
        return self.id("<image>")

    @property
    def unsure(self) -> int:
        return self.id(_UNSURE)

    def id(self, word: str) -> int:
        token: Any = self.tokenizer.convert_tokens_to_ids(word)
        return int(token)

    def prompt(self, question: str) -> tuple[list[int], list[int]]:
        """The ids before and after the picture."""
        ids: list[int] = self.tokenizer(TEMPLATE.format(question=question))["input_ids"]
        place = ids.index(self.image)
        return ids[:place], ids[place + 1 :]


def make_words() -> Words:
    """Built from the Critters vocabulary; there is nothing to learn."""
    table = {word: index for index, word in enumerate((*SPECIAL, *_PIECES, _UNSURE, *vocabulary()))}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    roles = [normalizers.Replace(f"{role.lower()}:", f"{role}:") for role in ("USER", "ASSISTANT")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *roles])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" +"), "removed"),
            pre_tokenizers.Split(Regex(r"US|ER|ANT|SS|IST|A|[a-z]+|\n|[^a-z]"), "isolated"),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", table["<s>"])]
    )
    # words with spaces between them
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        clean_up_tokenization_spaces=False,
    )
    return Words(fast)


def make_processor(words: Words, preprocess: Preprocess, *, patch: int) -> LlavaProcessor:
    """Pictures and text to tensors, the way LLaVA does."""
    height, width = preprocess.size
    pictures = CLIPImageProcessor(
        size={"shortest_edge": height},
        crop_size={"height": height, "width": width},
        image_mean=list(preprocess.mean),
        image_std=list(preprocess.std),
    )
    return LlavaProcessor(
        image_processor=pictures,
        tokenizer=words.tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        chat_template=_CHAT,
        num_additional_image_tokens=1,
    )
