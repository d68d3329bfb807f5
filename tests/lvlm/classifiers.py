"""Tiny vision-language models asked as classifiers, for tests."""

from functools import cache, partial

import seecause as sc
from seecause.lvlm.prompt import render
from tests.families.lvlm import internvl, llava_next, llava_siglip, photo, tiny_lvlm
from tests.helpers import noise

QUESTION = "what is this ?"
NAMES = ("cat", "red dog", "a red dog", "blue")  # 1, 2, 3 and 1 tokens
FAMILIES = {
    "llava": "llava",
    "grouped": "llava_grouped",
    "internvl": "internvl",
    "normed": partial(internvl, use_qk_norm=True),
    "siglip": llava_siglip,
    "next": partial(llava_next, [[32, 32]]),
}


@cache
def lvlm(family: str) -> sc.lvlm.LVLM:
    native = tiny_lvlm(FAMILIES[family])
    return sc.lvlm.wrap(native.module, native.processor)


@cache
def asked(family: str, by: str = "name_ll") -> sc.lvlm.PromptClassifier:
    names = NAMES if by == "name_ll" else ("cat", "dog", "blue")
    return sc.lvlm.classifier(lvlm(family), names, question=QUESTION, by=by)


def ids(family: str, text: str = QUESTION) -> list[int]:
    view = lvlm(family)
    return view.processor(
        images=photo((32, 32)), text=render(view.processor, text), return_tensors="pt"
    )["input_ids"][0].tolist()


def words(family: str, text: str) -> list[int]:
    return lvlm(family).processor.tokenizer(text, add_special_tokens=False)["input_ids"]


def pictures(count: int = 2):
    return noise(count, 3, 32, 32)


def objects(count: int = 2):
    return noise(count, 32, 32, seed=5) > 0
