"""Every table of the papers and of our own evidence, by name.

    sc.experiments.experiments()                       # what there is, and what each asks
    status = sc.experiments.run("caap", "out/caap")    # out/caap/table.csv; the same call goes on

base   the registry, and `run`: cells of an experiment on the runner of `sc.bench`
caap   Background-Aware Relevance Maps (CAAP): every reading of it, and every other method
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
