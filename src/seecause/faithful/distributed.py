"""One process or many: who I am, on which device, and what the others know. `torchrun` tells each
process by its environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seecause.errors import BadOption


@dataclass(frozen=True)
class Crew:
    """`world` processes, of which this is `rank`."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    def gather(self, mine: Any) -> list[Any]:
        """What every process has, by rank."""
        if self.world == 1:
            return [mine]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine)
        return found

    def mean(self, values: Tensor) -> Tensor:
        """Over processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values / self.world

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def crew(device: str = "auto") -> Iterator[Crew]:
    """Join the others, where `torchrun` started some; NCCL between GPUs, gloo between CPUs."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind.startswith("cuda") and not torch.cuda.is_available():
        raise BadOption(
            "device", device, "a GPU that torch can use; here there is none, so give 'cpu'"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Crew(0, 1, torch.device(kind))
        return
    where = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if kind.startswith("cuda")
        else torch.device(kind)
    )
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl" if where.type == "cuda" else "gloo",
        device_id=where if where.type == "cuda" else None,
    )
    try:
        yield Crew(dist.get_rank(), dist.get_world_size(), where)
    finally:
        dist.destroy_process_group()
