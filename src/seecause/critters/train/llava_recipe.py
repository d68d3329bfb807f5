"""How critters-llava and its planted variant are made: recipes as data, and the untrained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from seecause.critters.train.drawn import Drawn
from seecause.critters.train.steps import seeded
from seecause.models.image_readers import restrict

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration

    from seecause.critters.train.llava_words import Words


@dataclass(frozen=True)
class LlavaRecipe(Drawn):
    """Fresh pictures all the way, six questions about each.

    First the tower alone learns to see (part variants and background, from the whole picture), then
    tower, projector and decoder learn to answer. Three in ten patches are left out until the last
    share of the steps, so that image tokens keep speaking for their own place.
    """

    name: str
    size: int = 96
    patch: int = (
        8  # 12 x 12 image tokens, as in the classifiers; parts are two to four patches long
    )
    tower_width: int = 128
    tower_depth: int = 4  # LLaVA reads the last but one, so three of them count
    tower_heads: int = 4
    width: int = 128
    depth: int = 6
    heads: int = 8
    hidden: int = 344  # of the decoder's MLP
    readers: tuple[
        tuple[int, int], ...
    ] = ()  # (layer, head) that may read the picture; none named: all may
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


def build(recipe: LlavaRecipe, words: Words) -> LlavaForConditionalGeneration:
    """The untrained model, on the CPU; the global random state is left as it was."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

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
