"""Memory does not grow with the number of pictures explained."""

from __future__ import annotations

import gc
import tracemalloc

import torch

import seecause as sc
from tests.helpers import view
from tests.tiny import pictures, tiny


def live_tensor_bytes() -> int:
    gc.collect()
    return sum(
        t.numel() * t.element_size() for t in gc.get_objects() if issubclass(type(t), torch.Tensor)
    )


def test_five_hundred_pictures_leave_nothing_behind():
    native = tiny("timm_registers", dtype=torch.float32)
    model, images = view(native), pictures(native, batch=10)
    for seed in range(3):
        sc.attribute(model, images + seed, target=1)
    tracemalloc.start()
    try:
        before, held = live_tensor_bytes(), tracemalloc.get_traced_memory()[0]
        for seed in range(50):
            sc.attribute(model, images + seed, target=1)
        assert live_tensor_bytes() <= before
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - held < 200_000
    finally:
        tracemalloc.stop()
