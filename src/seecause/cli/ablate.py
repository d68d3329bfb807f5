"""`seecause bench ablate`: do CAAP's blank, selection, layers, tail or score decide the result?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from seecause.cli.bench_run import (
    INCOMPLETE,
    Cluster,
    DataName,
    Explained,
    MemoryLimit,
    MetricOption,
    RunFolder,
    ShardSize,
    Target,
    Threads,
    Workers,
    go,
    open_bench,
)
from seecause.cli.options import (
    DEFAULT_MODEL,
    Device,
    DeviceOption,
    Dtype,
    DtypeOption,
    ModelName,
    Quiet,
    Seed,
    Weights,
)

EXAMPLE = (
    "Example: seecause bench ablate layers --data critters:clean:test --limit 64 --metric-option"
    " order=patch --out layers"
)


class Study(StrEnum):
    blank = "blank"
    select = "select"
    layers = "layers"
    tail = "tail"
    score = "score"


def ablate(
    study: Annotated[
        Study, typer.Argument(help="Which setting of CAAP to change.", show_default=False)
    ],
    model: ModelName = DEFAULT_MODEL,
    weights: Weights = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting that is the same for all, such as score=logit; repeat for more.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    data: DataName = "critters:clean:test",
    limit: Annotated[int, typer.Option(help="Use so many images, spread evenly.", min=1)] = 64,
    metric_option: MetricOption = None,
    target: Target = Explained.label,
    out: RunFolder = Path("ablation"),
    workers: Workers = 1,
    cluster: Cluster = None,
    threads: Threads = 1,
    memory: MemoryLimit = None,
    shard_size: ShardSize = 16,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Change one setting of CAAP at a time: the paper's metrics, paired differences from the
    default, and how alike the maps are.

    Writes OUT/report.html, table.csv, table.tex, table.md and agreement.csv; the same command again
    continues where it stopped.
    """
    from seecause.bench.depth import save_depth
    from seecause.bench.plan import Request, Store
    from seecause.cli.options import pick_device
    from seecause.report.ablate import write_report

    store = Store(out)
    store.check()
    request = Request(
        model=model,
        weights=weights,
        data=data,
        limit=limit,
        methods={"caap": {}},
        study=study.value,
        metrics=("paper",),
        target=target.value,
        seed=seed,
        dtype=dtype.value,
        device=pick_device(device),
        shard_size=shard_size,
        memory=None if memory is None else memory << 20,
        threads=threads,
    )
    worker = open_bench(request, option or [], metric_option or [], quiet=quiet)
    complete = go(store, worker, workers=workers, cluster=cluster, quiet=quiet)
    if study is Study.layers:
        save_depth(store, worker)
    for path in write_report(store):
        if not quiet:
            typer.echo(str(path))
    if not complete:
        raise typer.Exit(INCOMPLETE)
