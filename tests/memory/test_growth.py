"""Memory does not grow with the number of pictures explained."""

import gc
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

from seecause.attribution.attribute import explain_batches
from tests.helpers import view
from tests.tiny import tiny


def live_tensor_bytes() -> int:
    gc.collect()
    return sum(
        t.numel() * t.element_size() for t in gc.get_objects() if issubclass(type(t), torch.Tensor)
    )


@pytest.mark.slow
def test_a_stream_of_files_holds_one_batch_at_a_time(tmp_path):
    """What is alive after 120 files is what was alive after 40, whatever the results were used
    for."""
    native = tiny("timm_registers", dtype=torch.float32)
    model = view(native)
    noise = np.random.default_rng(0).integers(0, 255, (120, 40, 50, 3), np.uint8)
    files = []
    for place, pixels in enumerate(noise):
        files.append(tmp_path / f"{place:03d}.png")
        Image.fromarray(pixels).save(files[-1])
    held: list[tuple[int, int]] = []
    count = 0
    tracemalloc.start()
    try:
        for part in explain_batches(model, iter(files), methods=["caap"], batch=10):
            count += len(part.names)
            if count % 20 == 0:
                held.append((live_tensor_bytes(), tracemalloc.get_traced_memory()[0]))
    finally:
        tracemalloc.stop()
    assert count == 120 and len(held) == 6
    first, rest = held[1], held[2:]
    assert all(tensors <= first[0] for tensors, _ in rest)
    assert all(objects - first[1] < 40_000 for _, objects in rest)
