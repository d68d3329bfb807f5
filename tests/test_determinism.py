"""Other kernels of the processor, and a GPU, move results by less than docs/reliability.md
states; the default dtype of a process and a second process change nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import seecause as sc
from seecause.lvlm.attribute import draw_masks

LIMITS = {"logits": 1e-5, "caap": 1e-4, "mosaic": 1e-4, "gae": 1e-4}  # of the largest value
ROOT = Path(__file__).parents[1]


def compute(path: str, device: str = "cpu", dtype: str = "float32") -> None:
    """Save logits, masks and maps of the embedded model; the process has that default dtype."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    model = sc.load("builtin:critters-vit", device=device)
    torch.set_default_dtype(getattr(torch, dtype))
    data = sc.data.open_data("critters:clean:test", limit=4)
    images, _, masks = sc.data.to_batch(model, [data[place] for place in range(4)])
    results = {"logits": model(images).detach(), "masks": masks, "heads": draw_masks(8, 12)}
    for method in ("caap", "mosaic", "gae", "random", "sobel", "smoothgrad"):
        options = {"samples": 2} if method == "smoothgrad" else {}
        results[method] = sc.attribute(model, images, target=3, method=method, **options).maps
    torch.save({name: value.cpu() for name, value in results.items()}, path)


def results_of(path: Path, *, kernels: str = "", **settings: str) -> dict[str, torch.Tensor]:
    """Of a process of its own."""
    code = f"from tests.test_determinism import compute; compute({str(path)!r}, **{settings})"
    chosen = {"ATEN_CPU_CAPABILITY": kernels} if kernels else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **chosen}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> dict[str, torch.Tensor]:
    """Of this process."""
    path = tmp_path_factory.mktemp("own") / "own.pt"
    compute(str(path))
    return torch.load(path, weights_only=True)


def agree(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, limit in LIMITS.items():
        apart = (other[name] - own[name]).abs().max() / own[name].abs().max()
        assert apart < limit, f"{name}: {apart:.1e}"


def test_another_process_and_another_default_dtype_give_the_same_bits(own, tmp_path):
    double = results_of(tmp_path / "double.pt", dtype="float64")
    for name, value in own.items():
        assert double[name].dtype == value.dtype and torch.equal(double[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["default", "avx2"])
def test_kernels_of_other_processors_agree(kernels, own, tmp_path):
    agree(own, results_of(tmp_path / "other.pt", kernels=kernels))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_agrees_with_the_processor(own, tmp_path):
    agree(own, results_of(tmp_path / "gpu.pt", device="cuda"))
