"""Compare attribution methods over a dataset: methods x images x metrics on one model.

    request = sc.bench.Request("builtin:critters-vit", "critters:clean:test",
                               methods=["caap", "rollout"], metrics=("paper",), limit=64)
    sc.bench.run("runs/first", request).complete
    sc.bench.table("runs/first").cells["caap"]["ins-del"].mean

runner    runs grids of cells in this process, in others or on Ray; one Parquet file for each
cells     a benchmark cut into cells named by a digest; the rows of one cell
tables    runs a benchmark; means, errors, intervals and paired differences; CSV, LaTeX and Markdown
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
