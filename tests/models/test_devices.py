"""Models whose blocks lie on several devices answer as on one.

With a GPU, the numbers; without, two GPUs of tensors that have a shape and a device, but no values:
torch refuses there, too, whatever joins two devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import seecause as sc
from seecause import loading
from seecause.engine.trace import record
from seecause.errors import UnsupportedModel
from seecause.lvlm import MaskEngine, edited_heads, make_bank, model as lvlm_model, wrap
from seecause.models.decoder import run
from tests.families.lvlm import photo, tiny_lvlm
from tests.lvlm.scenes import QUESTION, TOKEN, calibration
from tests.tiny import pictures, tiny

accelerate = pytest.importorskip("accelerate")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() == 1 or Version(torch.__version__) < Version("2.7"),
    reason="needs a torch (not 2.6) that makes up both GPUs, or two of them",
)
# class token; latent pool; rotary positions; relative biases and a mean
FAMILIES = ["hf_vit", "hf_siglip_tower", "hf_dinov3", "hf_beit"]


def device_map(
    module: nn.Module, blocks: Sequence[nn.Module], inside, outside
) -> dict[str, object]:
    """Every second block `inside`, everything else `outside`."""
    names = {id(part): name for name, part in module.named_modules()}
    placed = {names[id(block)]: (inside, outside)[i % 2] for i, block in enumerate(blocks)}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    others = [name.rpartition(".")[0] or name for name, _ in tensors]
    return {
        name: outside for name in others if not any(f"{name}.".startswith(f"{b}.") for b in placed)
    } | placed


def without_values(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Parameters and buffers without values on two GPUs, every second block on the other."""
    places = device_map(module, blocks, "cuda:1", "cuda:0")
    for name, part in module.named_modules():
        around = [at for at in places if f"{name}.".startswith(f"{at}.")]
        for held in (part._parameters, part._buffers):
            for key, tensor in held.items():
                if tensor is None:
                    continue
                device = places[max(around, key=len)] if around else "cuda:0"
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                frozen = nn.Parameter(empty, requires_grad=False)
                held[key] = frozen if isinstance(tensor, nn.Parameter) else empty


@two_gpus
@pytest.mark.parametrize("family", ["hf_vit", "hf_clip_classifier"])
def test_every_part_gets_its_input_on_its_own_device(family):
    native = tiny(family, torch.float32)
    with FakeTensorMode():
        without_values(native.module, native.blocks)
        images = torch.empty(2, 3, *native.size, device="cuda:0")
        model = sc.wrap(native.module, check=False, **native.options)
        trace = record(model, images, states=range(3), kv=range(2))
        kept = [trace.logits, *trace.states.values(), *trace.kv[0], *trace.kv[1]]
    assert model.apart and [block.owner for block in model.blocks] == list(native.blocks)
    assert {tensor.device for tensor in kept} == {torch.device("cuda:0")}


@two_gpus
def test_every_block_of_a_decoder_gets_its_input_on_its_own_device():
    native = tiny_lvlm("llava_grouped", torch.float32)
    with FakeTensorMode():
        without_values(native.module, native.module.get_decoder().layers)
        decoder = wrap(native.module, native.processor, check=False).decoder
        states = torch.empty(1, 5, 32, device="cuda:0")
        at = decoder.at(torch.arange(5, device="cuda:0")[None], states)
        out = decoder.norm(run(decoder, states, at))
    assert out.device == torch.device("cuda:0")


def test_weights_that_are_not_in_memory_are_refused():
    native = tiny("hf_vit")
    accelerate.cpu_offload(native.blocks[1])
    with pytest.raises(UnsupportedModel, match="not in memory"):
        sc.wrap(native.module, **native.options)


PLACES = [
    pytest.param(None, id="one device"),  # and hooks, and every part as if it lay elsewhere
    pytest.param("cpu", id="blocks on a GPU", marks=on_gpu),
    pytest.param(0, id="blocks on a CPU", marks=on_gpu),
]


@pytest.fixture
def place(request, monkeypatch):
    """Puts every second block of a module on another device than `request.param`."""
    if request.param is None:
        monkeypatch.setattr(loading, "lie_apart", lambda module: hasattr(module, "_hf_hook"))
        monkeypatch.setattr(lvlm_model, "lie_apart", lambda module: hasattr(module, "_hf_hook"))
    outside = "cpu" if request.param is None else request.param
    inside = 0 if request.param == "cpu" else "cpu"

    def spread(module: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        places = device_map(module, blocks, inside, outside)
        return accelerate.dispatch_model(
            module, device_map=places, main_device="cpu", force_hooks=True
        )

    return spread


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_two_devices_answers_as_on_one(family, place):
    native, other = tiny(family), tiny(family)
    module = place(other.module, other.blocks)
    here, there = sc.wrap(native.module, **native.options), sc.wrap(module, **other.options)
    images = 0.2 * pictures(native)
    assert there.apart and not here.apart
    masks = torch.rand(2, *native.size, generator=torch.Generator().manual_seed(0)) > 0.5
    for options in (
        {"method": "caap", "tail": "patched"}, {"method": "caap", "tail": "all"},
        {"method": "caap", "tail": "source"}, {"method": "mosaic", "masks": 4},
        {"method": "mosaic", "masks": 2, "tail": "all"},
    ):  # fmt: skip
        both = [sc.attribute(m, images, target=1, **options).maps.cpu() for m in (here, there)]
        assert (both[0] - both[1]).abs().max() < 1e-10, options
    data = sc.background.LabelledImages(images, masks=masks)
    both = [sc.background.score(m, data, target=1).value.cpu() for m in (here, there)]
    assert (both[0] - both[1]).abs().max() < 1e-10
    assert "graphs" not in there.memo


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("family", ["llava_grouped", "qwen2_vl", "qwen3_vl"])
def test_a_vision_language_model_on_two_devices_answers_as_on_one(family, place, request):
    on_other = request.node.callspec.params["place"] == 0  # embeddings and angles, on a GPU
    if on_other and family == "qwen3_vl":
        pytest.skip("its native forward joins two devices when all inputs start on a CPU")
    # angles are float32 natively, and another device rounds their sines another way
    limit = 1e-6 if on_other else 1e-10
    engines, said = [], []
    for apart in (False, True):
        native = tiny_lvlm(family)
        if apart:
            place(native.module, native.module.get_decoder().layers)
        lvlm = wrap(native.module, native.processor)
        bank, picture = make_bank(lvlm, calibration(native.size)), photo(native.size)
        engines.append(MaskEngine(lvlm, picture, QUESTION, bank, answer=[TOKEN], floor=None))
        with edited_heads(lvlm, [(0, 1), (1, 3)], blind=bank):
            prompt = lvlm.prompt(picture, QUESTION)
            said.append(lvlm.module(**prompt.inputs, use_cache=False).logits.cpu())
    here, there = engines
    heads = torch.rand(9, here.n_components, generator=torch.Generator().manual_seed(0))
    for ask in (
        lambda engine: engine.adjusted(heads > 0.5),
        lambda engine: engine.slopes(heads)[1],
        lambda engine: engine.slopes(heads, of="image")[1],
        lambda engine: engine.activations().written(),
    ):
        assert (ask(here).cpu() - ask(there).cpu()).abs().max() < limit
    assert (said[0] - said[1]).abs().max() < limit
