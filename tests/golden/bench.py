"""One table of the benchmark."""

import tempfile
from pathlib import Path

import seecause as sc
from tests.golden.record import Named, golden

METHODS = {"caap": {}, "rollout": {}, "gae": {}, "random": {}}
METRICS = ("ins-del", "aupr1", "pointing")


@golden("bench", dtypes=("float32",))
def table(dtype) -> Named:
    with tempfile.TemporaryDirectory() as folder:
        request = sc.bench.Request(
            "builtin:critters-vit",
            "critters:clean:test",
            methods=METHODS,
            metrics=METRICS,
            limit=6,
            cell_size=4,
        )
        place = Path(folder, "run")
        sc.bench.run(place, request)
        found = sc.bench.table(place)
    for method, columns in found.cells.items():
        for metric, cell in columns.items():
            yield f"{method}/{metric}", [cell.mean, cell.error]
