"""What a number was computed on, for pages and records."""

from __future__ import annotations

import platform

import torch


def machine(device: torch.device | str) -> str:
    """The name of a GPU, or the kind of processor."""
    where = torch.device(device)
    return (
        torch.cuda.get_device_name(where) if where.type == "cuda" else f"{platform.machine()} CPU"
    )
