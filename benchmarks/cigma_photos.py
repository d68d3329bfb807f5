"""CIGMA's tables 3 to 6, and its settings one at a time, for a real ViT-Ti/16 on photos.

    python benchmarks/cigma_photos.py REAL OUT          # about three minutes on one H200
    python benchmarks/cigma_photos.py REAL OUT pets     # pets alone, a third of that

REAL holds vit_tiny_patch16_224.safetensors, pets/ (photos with trimaps, and ImageNet's class of
each breed) and imagenet/val/. As printed, but with 4 of the 36 heads instead of 16 (a tenth, as of
ViT-B's 144). All tables run in one process, which searches for each kind of masks once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

import seecause as sc
from seecause.engine.chunks import budget

TABLES = ("table-6", "table-5", "table-4", "table-3")
MEMORY = 5 * 2**30  # bytes of activations; others may use the same GPU
DATA = {"pets": "pets:{}/pets:test", "imagenet": "imagenet:{}/imagenet"}


def main(real: str, out: str, *names: str, limit: int | None = None, **options: Any) -> None:
    common: dict[str, Any] = {
        "models": ["vit-ti"],
        "weights": {"vit-ti": f"{real}/vit_tiny_patch16_224.safetensors"},
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "limit": limit,
    }
    for name in names or DATA:
        common["data"] = {name: DATA[name].format(real)}
        for table in (*TABLES, "defaults") if name == "pets" else TABLES:
            began, folder = time.perf_counter(), Path(out) / name
            printed = table != "defaults"
            own = {"top": 4, **options} if printed else options
            common |= {"as_printed": printed, "options": own}
            with budget(MEMORY):
                status = sc.experiments.run(f"cigma/{table}", folder, **common)
            print(f"{name} {table}: {status.done} of {status.total}", *status.failed.values())
            print(f"{time.perf_counter() - began:.1f} s", flush=True)
            print((folder / "cigma" / table / "table.md").read_text(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
