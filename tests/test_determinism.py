"""Other kernels of the processor, and a GPU, move results by less than docs/reliability.md
states; chance starts from the same seed everywhere."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import seecause as sc
from seecause import critters
from seecause.critters import latents, picture
from seecause.metrics.fidelity import random_subsets
from seecause.models.base import ImageModel

LIMITS = {"logits": 1e-5, "caap": 1e-4, "mosaic": 1e-4, "gae": 1e-4}  # of the largest value
METHODS = tuple(LIMITS)[1:]
PROGRAM = """
import sys, torch, seecause as sc
torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = False
path, methods, device = sys.argv[1:]
model = sc.load("builtin:critters-vit", device=device)
data = sc.data.open_data("critters:clean:test", limit=4)
images, _, _ = sc.data.to_batch(model, [data[place] for place in range(4)])
results = {"logits": model(images).detach()}
for method in methods.split(","):
    results[method] = sc.attribute(model, images, target=3, method=method).maps
torch.save({name: value.cpu() for name, value in results.items()}, path)
"""


def results_of(path: Path, *, kernels: str = "", device: str = "cpu") -> dict[str, torch.Tensor]:
    """Of a process of its own."""
    chosen = {"ATEN_CPU_CAPABILITY": kernels} if kernels else {}
    words = [sys.executable, "-c", PROGRAM, str(path), ",".join(METHODS), device]
    subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", **chosen})
    return torch.load(path, weights_only=True)


def agree(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, limit in LIMITS.items():
        apart = (other[name] - own[name]).abs().max() / own[name].abs().max()
        assert apart < limit, f"{name}: {apart:.1e}"


@pytest.mark.parametrize("module", [sc, sc.heads, sc.metrics, sc.lvlm], ids=lambda m: m.__name__)
def test_the_seed_is_0_wherever_none_is_given(module):
    public = {name: getattr(module, name) for name in module.__all__}
    functions = {name: part for name, part in public.items() if inspect.isfunction(part)}
    seeds = {name: inspect.signature(part).parameters.get("seed")
             for name, part in functions.items()}  # fmt: skip
    defaults = {name: seed.default for name, seed in seeds.items() if seed is not None}
    assert defaults and set(defaults.values()) == {0}, defaults


@pytest.fixture
def double_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def maps_and_draws(model: ImageModel) -> dict[str, torch.Tensor]:
    """What is drawn or computed from no tensor of the caller's."""
    for kept in (latents, picture):  # tables that a process keeps
        for table in vars(kept).values():
            getattr(table, "cache_clear", lambda: None)()
    data = sc.data.open_data("critters:clean:test", limit=2)
    images, _, masks = sc.data.to_batch(model, list(data))
    drawn, grey = critters.draw("clean", "test", 2), critters.Do(move=(3, 0), fill=(0.5,) * 3)
    moved = critters.render(drawn, do=grey)
    results = {"images": images, "masks": masks, "moved": moved.image}
    for method in ("caap", "random", "center", "sobel"):
        results[method] = sc.attribute(model, images, target=3, method=method).maps
    options = {"method": "smoothgrad", "samples": 2}
    results["smoothgrad"] = sc.attribute(model, images, target=3, **options).maps
    results["heads"] = sc.lvlm.draw_masks(8, 12)
    results["patches"] = random_subsets([0.3], 4, (3, 5), 0)
    return results


def test_the_default_dtype_of_a_process_changes_nothing(request):
    model = sc.load("builtin:critters-vit")
    usual = maps_and_draws(model)
    request.getfixturevalue("double_by_default")
    double = maps_and_draws(model)
    for name, value in usual.items():
        assert double[name].dtype == value.dtype and torch.equal(double[name], value), name


@pytest.mark.slow
def test_kernels_of_other_processors_agree(tmp_path):
    """And the same kernels give the same bits in another process."""
    own, again = (results_of(tmp_path / name) for name in ("own.pt", "again.pt"))
    assert all(torch.equal(own[name], again[name]) for name in LIMITS)
    for kernels in ("default", "avx2"):
        agree(own, results_of(tmp_path / f"{kernels}.pt", kernels=kernels))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_agrees_with_the_processor(tmp_path):
    agree(results_of(tmp_path / "cpu.pt"), results_of(tmp_path / "gpu.pt", device="cuda"))
