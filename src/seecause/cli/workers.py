"""Who does the work of a long command."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from seecause.errors import BadOption

_option = functools.partial(typer.Option, rich_help_panel="Many processes, many machines")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Who does the work."""

    workers: Annotated[
        int | None,
        _option(
            help="Processes; any number gives the same results. On a CPU, one for each core.",
            min=1,
            show_default="1; with --ray, as many as the cluster holds",
        ),
    ] = None
    ray: Annotated[
        str | None,
        _option(
            help="Work on a Ray cluster: auto for the one that is running, local, or HOST:PORT.",
            metavar="auto|local|HOST:PORT",
            show_default="processes here",
        ),
    ] = None
    cpus_per_worker: Annotated[
        float | None,
        _option(
            help="CPU cores that the cluster sets aside for each worker.",
            min=0.01,
            show_default="its threads: 1",
        ),
    ] = None
    gpus_per_worker: Annotated[
        float | None,
        _option(
            help="GPUs likewise; 0.5 lets two workers share one.",
            min=0,
            show_default="1 on a GPU",
        ),
    ] = None
    memory_per_worker: Annotated[
        float | None,
        _option(
            help="GiB of main memory likewise.",
            min=0.01,
            show_default="not counted",
        ),
    ] = None

    def made(self) -> dict[str, Any]:
        """Options of `sc.bench.run`."""
        memory = self.memory_per_worker
        asked = {
            "num_cpus": self.cpus_per_worker,
            "num_gpus": self.gpus_per_worker,
            "memory": None if memory is None else round(memory * (1 << 30)),
        }
        resources = {name: value for name, value in asked.items() if value is not None}
        if resources and self.ray is None:
            raise BadOption("--ray", None, "a cluster; processes of this machine share what it has")
        return {"workers": self.workers, "ray": self.ray, "resources": resources}
