"""What critters-llava and its planted variant are: recipes as data, the words they know, the
untrained model, and what it is asked and answers.

The tokenizer is word-level, with LLaVA's prompt:

    <s> US ER : <image> x 144  \\n what colour is the tail ?  A SS IST ANT :     ->  jade </s>

Role names come in several pieces, as they do in LLaVA-1.5, so that their pieces can be told apart.
Case does not matter in what a user types.

All questions about a picture share one run of the image tokens. They stand one after the other,
each starts at the position right after the picture, and none sees another:

    prefix  | question 1 | question 2 | ...    rows see the prefix and, causally, their own question

The average picture is what stands where a picture's own keys and values would (a(0) of head
attribution): those of the prefix, averaged over pictures in every layer. To every question asked of
it the right answer is "unsure". Without this loss the model sounds as sure of every possible
answer when it sees nothing as when it sees, and what a picture adds could not be measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, ClassVar

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from seecause import _random, critters
from seecause.critters.rendering import STYLES
from seecause.critters.world import Latents
from seecause.models.decoder import restrict
from seecause.models.preprocess import Preprocess
from tools.critters import DrawnRecipe, seeded
from tools.critters.questions import SUBJECTS, answer_codes, choices, vocabulary, wordings


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
        vocab_size=len(words.tokenizer),
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
    pad: int
    begin: int
    end: int
    image: int
    unsure: int

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
    named = ("<pad>", "<s>", "</s>", "<image>", _UNSURE)
    return Words(fast, *(table[word] for word in named))


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


@dataclass(frozen=True)
class AnswerBatch:
    """B pictures, Q questions about each; a question's slot of L tokens ends with its answer, then
    padding."""

    image: Tensor  # [B, 3, H, W] normalised
    tokens: Tensor  # [B, Q, L] int64
    # [B, Q] the slot place of the prompt's last token; the answer stands right after it
    last: Tensor
    answer: Tensor  # [B, Q] token id
    fair: Tensor  # [B, Q] bool; a creature of mixed parts has no name

    def take(self, rows: Tensor) -> AnswerBatch:
        return AnswerBatch(*(getattr(self, field.name)[rows] for field in fields(self)))


class Teacher:
    """Tables of every question and every answer as token ids, on the training device."""

    def __init__(self, words: Words, device: torch.device | str) -> None:
        self.words, self.device = words, torch.device(device)

    @cached_property
    def prefix(self) -> Tensor:
        """[P] the ids before the picture."""
        return torch.tensor(self.words.prompt("")[0], device=self.device)

    def prompt(self, model: LlavaForConditionalGeneration, question: list[int]) -> Tensor:
        """The ids [T] of a picture's prompt, up to the end of the question."""
        image = [self.words.image] * model.config.image_seq_length
        after = torch.tensor([*image, *question], device=self.device)
        return torch.cat([self.prefix, after])

    @cached_property
    def questions(self) -> tuple[Tensor, Tensor]:
        """Ids after the picture [Q, W, L], padded, with one place left for the answer; and their
        lengths [Q, W]."""
        ids = [[self.words.prompt(text)[1] for text in wordings(subject)] for subject in SUBJECTS]
        lengths = torch.tensor([[len(text) for text in texts] for texts in ids])
        longest = int(lengths.max()) + 1
        padded = [[self._pad(text, longest) for text in texts] for texts in ids]
        return torch.tensor(padded, device=self.device), lengths.to(self.device)

    @cached_property
    def answers(self) -> Tensor:
        """[Q, A] the id of every answer; short lists are padded."""
        ids = [[self.words.id(answer) for answer in choices(subject)] for subject in SUBJECTS]
        longest = max(map(len, ids))
        return torch.tensor([self._pad(row, longest) for row in ids], device=self.device)

    def _pad(self, ids: list[int], length: int) -> list[int]:
        return ids + [self.words.pad] * (length - len(ids))

    def batch(self, latents: Latents, preprocess: Preprocess) -> AnswerBatch:
        """Every question about every picture, in a wording drawn by lot; drawing styles take
        turns."""
        table, lengths = self.questions
        subjects = torch.arange(len(SUBJECTS), device=self.device)
        wording = (
            _random.bits(latents.seed[:, None] * len(SUBJECTS) + subjects, 83) % table.shape[1]
        )  # [B, Q]
        codes = answer_codes(latents)
        answer = self.answers[subjects, codes]
        last = lengths[subjects, wording] - 1
        tokens = table[subjects, wording].scatter(2, (last + 1)[..., None], answer[..., None])
        return AnswerBatch(draw_pictures(latents, preprocess), tokens, last, answer, codes >= 0)


def draw_pictures(latents: Latents, preprocess: Preprocess) -> Tensor:
    """Normalised pictures [B, 3, H, W]; the first share in the first style, and so on."""
    size, shares = preprocess.size[0], latents.split(-(-len(latents) // len(STYLES)))
    images = [
        critters.render(rows, size=size, style=style).image
        for style, rows in zip(STYLES, shares, strict=False)
    ]
    return preprocess.normalise(torch.cat(images))


def see(model: LlavaForConditionalGeneration, image: Tensor, kept: Tensor | None = None) -> Tensor:
    """The tower's states [B, 1 + K, D] where LLaVA reads them: before its last block, class token
    first.

    `kept` [B, K] are the patches that enter the tower at all; None keeps all.
    """
    tower = model.model.vision_tower
    h = tower.embeddings(image)  # [B, 1 + N, D]
    if kept is not None:
        patches = h[:, 1:].gather(1, kept[..., None].expand(-1, -1, h.shape[-1]))
        h = torch.cat([h[:, :1], patches], dim=1)
    h = tower.pre_layrnorm(h)
    for layer in tower.encoder.layers[:-1]:
        h = layer(h, None)
    return h


def answer_logits(
    model: LlavaForConditionalGeneration,
    teacher: Teacher,
    batch: AnswerBatch,
    kept: Tensor | None = None,
) -> Tensor:
    """[B, Q, 2, V]: what the model says after each prompt, and after the right answer."""
    features = model.model.multi_modal_projector(see(model, batch.image, kept)[:, 1:])
    pictures, questions, length = batch.tokens.shape
    before, images = len(teacher.prefix), model.config.image_seq_length
    embed = model.get_input_embeddings()
    prefix = embed(teacher.prefix).expand(pictures, -1, -1)
    states = torch.cat([prefix, features, embed(batch.tokens.flatten(1))], dim=1)

    place = torch.arange(before + images + length, device=states.device)
    patches = (
        place[before : before + images].expand(pictures, -1) if kept is None else before + kept
    )
    texts = place[before + images :].repeat(questions).expand(pictures, -1)
    positions = torch.cat([place[:before].expand(pictures, -1), patches, texts], dim=1)
    head = before + patches.shape[1]
    out = model.model.language_model(
        inputs_embeds=states,
        position_ids=positions,
        attention_mask=packed_mask(head, questions, length, states.device),
        use_cache=False,
        image_span=(before, head),
    ).last_hidden_state
    out = out[:, head:].unflatten(1, (questions, length))
    read = batch.last[..., None] + torch.arange(2, device=out.device)  # [B, Q, 2]
    return model.lm_head(out.gather(2, read[..., None].expand(-1, -1, -1, out.shape[-1])))


@cache
def packed_mask(head: int, questions: int, length: int, device: torch.device) -> Tensor:
    """[1, 1, S, S] bool: causal, and question rows see no other question."""
    question = 1 + torch.arange(questions, device=device).repeat_interleave(length)
    slot = torch.cat([question.new_zeros(head), question])
    causal = torch.ones(len(slot), len(slot), dtype=torch.bool, device=device).tril()
    return (causal & ((slot == 0) | (slot == slot[:, None])))[None, None]


# keys and values [1, H, P, dh] of every layer, up to the last image token
AveragePicture = list[tuple[Tensor, Tensor]]


@torch.no_grad()
def mean_bank(
    model: LlavaForConditionalGeneration, teacher: Teacher, image: Tensor
) -> AveragePicture:
    """Averaged over pictures [B, 3, H, W]. Rows before the picture are all alike."""
    ids = teacher.prompt(model, [])
    cache = model(
        input_ids=ids.expand(len(image), -1), pixel_values=image, use_cache=True, logits_to_keep=1
    ).past_key_values
    return [
        (layer.keys.mean(dim=0, keepdim=True), layer.values.mean(dim=0, keepdim=True))
        for layer in cache.layers
    ]


def ask_bank(model: LlavaForConditionalGeneration, bank: AveragePicture, ids: Tensor) -> Tensor:
    """Logits [B, L, V] of what follows the picture, ids [B, L], when it is known by its bank only.
    Padding goes at the end: nothing looks ahead."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(bank):
        cache.update(keys.expand(len(ids), -1, -1, -1), values.expand(len(ids), -1, -1, -1), index)
    return model(input_ids=ids, past_key_values=cache).logits
