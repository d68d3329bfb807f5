"""A scrambled LLaVA that knows Critters' words, at a size for tests; as a folder on disk and ready
to be asked."""

from functools import cache
from pathlib import Path

import seecause as sc
from seecause import critters
from seecause.data.dataset import to_pil
from tests.tiny import scramble
from tools.critters.llava_model import LlavaRecipe, build_llava, make_processor, make_words

RECIPE = LlavaRecipe(
    "tiny",
    size=32,
    tower_width=32,
    tower_depth=2,
    tower_heads=2,
    width=32,
    depth=3,
    heads=4,
    hidden=64,
)
QUESTION = "What colour is the tail?"


def native():
    words = make_words()
    return scramble(build_llava(RECIPE, words)).eval(), make_processor(
        words, RECIPE.preprocess, patch=RECIPE.patch
    )


def save_toy(folder: Path) -> str:
    module, processor = native()
    module.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def pictures(count: int, *, start: int = 0):
    return [
        to_pil(image)
        for image in critters.render(
            critters.draw("balanced", "test", count, start=start), size=32
        ).image
    ]


@cache
def toy_engine() -> sc.lvlm.MaskEngine:
    module, processor = native()
    lvlm = sc.lvlm.wrap(module.double(), processor)
    return sc.lvlm.MaskEngine(
        lvlm, pictures(1)[0], QUESTION, sc.lvlm.make_bank(lvlm, pictures(6, start=1)), floor=None
    )
