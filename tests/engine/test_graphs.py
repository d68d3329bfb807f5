"""CUDA graphs compute the same bits as plain runs, whatever changes in between."""

import threading
import warnings
from types import SimpleNamespace

import pytest
import timm
import torch
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

import seecause as sc
from seecause.attribution.caap import make_plan, sweep
from seecause.engine import graphs
from seecause.engine.graphs import captured
from seecause.engine.sweep import selection
from seecause.engine.trace import blank_image
from seecause.loading import wrap
from tests.helpers import without_graphs

SETTINGS = [
    {"tail": "source"},
    {"tail": "blank"},
    {"tail": "patched"},
    {"tail": "all"},
    {"tail": "source", "direction": "delete"},
    {"tail": "patched", "direction": "delete"},
    {"tail": "source", "approx": "e-caap"},
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda:0")


def tiny(dtype=torch.float32, device=CUDA, seed=0, width=48):
    torch.manual_seed(seed)
    module = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, embed_dim=width, num_heads=3, depth=3, num_classes=7
    )
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0, 0.2)
    return wrap(
        module.to(device, dtype).eval(), name=f"tiny-{seed}", mean=(0.5,) * 3, std=(0.5,) * 3
    )


def pictures(count=2, dtype=torch.float32, device=CUDA, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 64, 64, generator=draw).to(device, dtype)


class Counted:
    """A model's logits by a graph; `calls` counts how often the function itself ran."""

    def __init__(self, model, key="logits"):
        self.model, self.key, self.calls = model, key, 0

    def __call__(self, images):
        def prepare():
            def function(x):
                self.calls += 1
                return self.model(x)

            return function

        with torch.no_grad():
            return captured(self.model, self.key, prepare, images)


def test_on_a_cpu_the_function_is_called():
    model, images = tiny(device="cpu"), pictures(device="cpu")
    run = Counted(model)
    for _ in range(3):
        assert_close(run(images), model(images), rtol=0, atol=0)
    assert run.calls == 3


def test_graphs_have_a_part_in_plain_runs_on_cuda_only(monkeypatch):
    there, here = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    with torch.no_grad():
        assert graphs.usable((there, there))
        assert not graphs.usable((there, here)) and not graphs.usable(())
        torch.set_autocast_enabled("cuda", True)
        assert not graphs.usable((there,))
        torch.set_autocast_enabled("cuda", False)
        monkeypatch.setattr(graphs, "is_recording", lambda: True)
        assert not graphs.usable((there,))
        monkeypatch.undo()
        monkeypatch.setenv(graphs.SWITCH, "0")
        assert not graphs.usable((there,))
        monkeypatch.undo()
    assert not graphs.usable((there,))
    with torch.inference_mode():
        assert not graphs.usable((there,))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_third_call_replays_and_its_bits_are_those_of_a_plain_run(dtype):
    model = tiny(dtype)
    run = Counted(model)
    for seed in range(4):
        images = pictures(dtype=dtype, seed=seed)
        assert torch.equal(run(images), model(images).detach())
    assert run.calls == 3  # two plain, one recorded


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(setting.values()))
def test_caap_by_graph_has_the_bits_of_a_plain_run(dtype, setting):
    model = tiny(dtype)
    for seed in range(4):
        images = pictures(dtype=dtype, seed=seed)
        got = sc.attribute(model, images, 3, **setting).maps
        with without_graphs():
            assert torch.equal(got, sc.attribute(model, images, 3, **setting).maps)
    held = model.memo["graphs"].values()
    assert any(call.graph for call in held)


@needs_gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(setting.values()))
def test_a_sweep_neither_copies_from_the_host_nor_waits(setting, gated):
    model, images = tiny(), pictures()
    if gated:
        model.gates = torch.rand(model.n_layers, model.n_heads, device=model.device)
    layout = model.check(images)
    chosen, blank = selection(layout.grid), blank_image(model, (64, 64))
    options = dict(setting)
    plan = make_plan(model, layout, tail=options.pop("tail"), layers=None)
    with without_graphs(), torch.no_grad():
        for _ in range(2):
            sweep(model, images, blank, chosen, plan, **options)
        with profile(
            activities=[ProfilerActivity.CUDA], acc_events=True
        ):  # its own start waits, too
            torch.cuda.synchronize()
        with warnings.catch_warnings():  # torch says that it does not see all of them
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
                sweep(model, images, blank, chosen, plan, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    copies = [event.key for event in profiled.key_averages() if "HtoD" in event.key]
    assert not copies and not any("DtoH" in event.key for event in profiled.key_averages())


@needs_gpu
@pytest.mark.parametrize("change", ["in place", "replaced", "loaded", "gates", "dtype"])
def test_a_change_of_the_model_is_noticed(change):
    model = tiny()
    run = Counted(model)
    images = pictures()
    for _ in range(3):
        before = run(images)
    if change == "in place":
        with torch.no_grad():
            model.module.head.weight.mul_(2)
    elif change == "replaced":
        model.module.head.weight = torch.nn.Parameter(model.module.head.weight * 2)
    elif change == "loaded":
        model.module.load_state_dict(tiny(seed=5).module.state_dict(), assign=True)
    elif change == "gates":
        model.gates = torch.zeros(model.n_layers, model.n_heads)
    else:
        model.module.to(torch.bfloat16)
        images = images.bfloat16()
    for _ in range(4):
        after = run(images)
        assert torch.equal(after, model(images).detach())
    assert not torch.equal(after, before)


@needs_gpu
def test_threads_with_streams_of_their_own_share_the_pool():
    models = [tiny(seed=0), tiny(seed=1)]
    expected = {
        (m, seed): models[m](pictures(seed=seed)).detach() for m in range(2) for seed in range(4)
    }
    torch.cuda.synchronize()
    wrong = []

    def work(thread):
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(40):
                m, seed = (thread + turn) % 2, turn % 4
                got = Counted(models[m])(pictures(seed=seed))
                torch.cuda.current_stream().synchronize()
                if not torch.equal(got, expected[m, seed]):
                    wrong.append((thread, turn))

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_gpu
def test_what_cannot_be_captured_runs_plainly_and_the_reason_is_logged(caplog):
    model = tiny()

    def prepare():
        return lambda images: images * images.sum().item()  # waits for the device

    images = pictures()
    caplog.set_level("INFO")
    for _ in range(4):
        with torch.no_grad():
            got = captured(model, "waits", prepare, images)
        assert torch.equal(got, images * images.sum().item())
    assert "no CUDA graph of waits" in caplog.text
    run = Counted(model)  # the failure harms nothing that comes later
    for _ in range(4):
        assert torch.equal(run(images), model(images).detach())
    assert run.calls == 3
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@needs_gpu
def test_number_and_memory_of_graphs_are_bounded(monkeypatch):
    graphs.clear()
    monkeypatch.setattr(graphs, "MOST", 3)
    model, images = tiny(), pictures(8)
    held = []
    for key in range(12):
        run = Counted(model, key)
        for _ in range(3):
            run(images)
        held.append(torch.cuda.memory_reserved())
    assert len(graphs._pools[CUDA].calls) == 3
    assert held[-1] <= held[3] + (8 << 20)
    monkeypatch.setattr(graphs, "SHARE", 0.0)
    run = Counted(model, "large")
    for _ in range(3):
        assert torch.equal(run(images), model(images).detach())
    assert graphs.pool_bytes(CUDA) == 0


@needs_gpu
def test_a_blank_that_is_gone_leaves_no_graph_to_another_with_its_id():
    model, images = tiny(), pictures()
    for seed in [*range(24), *range(24)]:  # more blanks than any cache holds
        options = {"blank": "noise", "seed": seed}
        with without_graphs():
            plain = sc.attribute(model, images, **options).maps
        for _ in range(3):
            assert torch.equal(sc.attribute(model, images, **options).maps, plain), seed
