"""Tiny models with a picture, a question and a bank, made once for all tests."""

from dataclasses import dataclass
from functools import cache

import torch

from seecause.lvlm import LVLM, MaskEngine, MeanBank, make_bank, wrap
from tests.families.lvlm import NativeLVLM, photo, tiny_lvlm

QUESTION = "what is this ?"
TOKEN = 7  # the answer that is explained; a scrambled model has nothing to say
GRID = (4, 4)  # layers, heads


@dataclass
class Scene:
    native: NativeLVLM
    lvlm: LVLM
    bank: MeanBank
    engine: MaskEngine

    @property
    def pictures(self):
        return calibration(self.native.size)


def calibration(size: tuple[int, int]):
    return [photo(size, seed) for seed in (1, 2, 3)]


@cache
def scene(family: str, dtype: torch.dtype = torch.float64) -> Scene:
    native = tiny_lvlm(family, dtype)
    lvlm = wrap(native.module, native.processor)
    bank = make_bank(lvlm, calibration(native.size))
    return Scene(
        native,
        lvlm,
        bank,
        MaskEngine(lvlm, photo(native.size), QUESTION, bank, answer=[TOKEN], floor=None),
    )


def some(*shape: int, share: float = 0.5, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
