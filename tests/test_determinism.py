"""Other kernels of the processor move results by less than docs/reliability.md states."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

LIMITS = {"logits": 1e-5, "caap": 1e-4, "mosaic": 1e-4, "gae": 1e-4}  # of the largest value
METHODS = tuple(LIMITS)[1:]
PROGRAM = """
import sys, torch, seecause as sc
torch.set_num_threads(1)
model, data = sc.load("builtin:critters-vit"), sc.data.open_data("critters:clean:test", limit=4)
images, _, _ = sc.data.to_batch(model, [data[place] for place in range(4)])
results = {"logits": model(images).detach()}
for method in sys.argv[2].split(","):
    results[method] = sc.attribute(model, images, target=3, method=method).maps
torch.save(results, sys.argv[1])
"""


@pytest.mark.slow
def test_kernels_of_other_processors_agree(tmp_path):
    """And the same kernels give the same bits in another process."""
    results = {}
    for name, kernels in (("own", ""), ("again", ""), ("default", "default"), ("avx2", "avx2")):
        chosen = {"ATEN_CPU_CAPABILITY": kernels} if kernels else {}
        path = tmp_path / f"{name}.pt"
        words = [sys.executable, "-c", PROGRAM, str(path), ",".join(METHODS)]
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", **chosen})
        results[name] = torch.load(path, weights_only=True)
    for name, limit in LIMITS.items():
        own = results["own"][name]
        assert torch.equal(own, results["again"][name])
        for kernels in ("default", "avx2"):
            apart = (results[kernels][name] - own).abs().max() / own.abs().max()
            assert apart < limit, f"{name} by {kernels}: {apart:.1e}"
