"""The same numbers on a GPU: fused half-precision attention, padded blocks."""

from __future__ import annotations

import pytest
import torch

from seecause.lvlm import MaskEngine, draw_masks, make_bank, wrap
from tests.families.lvlm import photo, tiny_lvlm
from tests.lvlm.scenes import QUESTION, TOKEN, calibration, scene, some

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def engine_on_gpu(family: str, dtype: torch.dtype, **options) -> MaskEngine:
    native = tiny_lvlm(family, torch.float32)
    lvlm = wrap(native.module.to("cuda", dtype), native.processor, check=dtype != torch.bfloat16)
    return MaskEngine(
        lvlm,
        photo(native.size),
        QUESTION,
        make_bank(lvlm, calibration(native.size)),
        answer=[TOKEN],
        floor=None,
        **options,
    )


@pytest.mark.parametrize("family", ["llava", "llava_grouped", "qwen2_vl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_gives_the_same_responses(family, dtype):
    here, there = scene(family, torch.float32).engine, engine_on_gpu(family, dtype)
    close = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}[dtype]
    heads, text, image = draw_masks(50, 16), some(50, here.n_text), some(50, here.n_image)
    for given in ((heads,), (heads, text), (heads, text, image)):
        assert (there.adjusted(*given).cpu().float() - here.adjusted(*given)).abs().max() < close
