"""The words critters-llava knows: a word-level tokenizer with LLaVA's prompt, and the processor
around it.

    <s> US ER : <image> x 144  \\n what colour is the tail ?  A SS IST ANT :     ->  jade </s>

Role names come in several pieces, as they do in LLaVA-1.5, so that their pieces can be told apart.
Case does not matter in what a user types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

from seecause.critters import vocabulary
from seecause.models.preprocess import Preprocess

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
        found: Any = self.tokenizer.convert_tokens_to_ids(word)
        return int(found)

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
    tokenizer.decoder = decoders.WordPiece(
        prefix="##", cleanup=False
    )  # words with spaces between them
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
