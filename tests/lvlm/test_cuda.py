"""The same numbers on a GPU: fused half-precision attention, padded blocks."""

import pytest
import torch

from seecause.engine import kernel
from seecause.lvlm import MaskEngine, make_bank, wrap
from seecause.lvlm.attribute import draw_masks
from tests.families.lvlm import _llava, photo, tiny_lvlm
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


@pytest.mark.parametrize("grouped", [False, True])
def test_slopes_by_kernels_are_as_exact_as_plain_ones(grouped, monkeypatch):
    """Heads wide enough for the kernels, with and without keys that heads share."""
    sizes = {"hidden_size": 128, "num_key_value_heads": 2 if grouped else 4}
    native = tiny_lvlm(lambda: _llava(**sizes), torch.float32)
    pictures = calibration(native.size)
    draw = torch.Generator().manual_seed(0)
    heads = 0.1 + 0.8 * torch.rand(5, 16, generator=draw)

    def slopes(device: str, dtype: torch.dtype) -> torch.Tensor:
        lvlm = wrap(native.module.to(device, dtype), native.processor, check=False)
        options = {"answer": [TOKEN], "floor": None}
        bank = make_bank(lvlm, pictures)
        engine = MaskEngine(lvlm, photo(native.size), QUESTION, bank, **options)
        return (engine.slopes(heads)[1] * engine.span).double().cpu()

    exact = slopes("cpu", torch.float32)
    fast = slopes("cuda", torch.float16)
    monkeypatch.setattr(kernel, "fits_rows", lambda x: False)
    plain = slopes("cuda", torch.float16)
    assert not torch.equal(fast, plain)  # other kernels, other roundings
    assert (fast - exact).norm() < 2 * (plain - exact).norm() + 1e-3 * exact.norm()


@torch.no_grad()
def test_one_mask_of_heads_serves_many_of_image_tokens():
    """With heads wide enough for the kernels: every copy has an answer of its own."""
    native = tiny_lvlm(lambda: _llava(hidden_size=128), torch.float32)
    pictures, heads = calibration(native.size), some(1, 16)
    answers = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float16)):
        lvlm = wrap(native.module.to(device, dtype), native.processor, check=False)
        options = {"answer": [TOKEN], "floor": None}
        engine = MaskEngine(
            lvlm, photo(native.size), QUESTION, make_bank(lvlm, pictures), **options
        )
        image = some(6, engine.n_image, seed=1)
        soft = 0.1 + 0.8 * image.float()
        slopes = engine.slopes(heads.float(), None, soft, of="image")[1] * engine.span
        answers.append((engine.adjusted(heads, None, image).float().cpu(), slopes.float().cpu()))
    for ours, exact in zip(answers[1], answers[0], strict=True):
        assert (ours - exact).norm() < 0.1 * exact.norm()
