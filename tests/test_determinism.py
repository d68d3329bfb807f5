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
