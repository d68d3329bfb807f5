"""Every table and figure of the papers, and our own evidence, by name.

    sc.experiments.experiments()                       # what there is, and what each asks
    sc.experiments.run("caap/table-1", "out", data={"imagenet-s": PATH})    # out/caap/table-1/

base        the registry, and `run`: cells of an experiment on the runner of `sc.bench`
caap        patch attribution by activation patching (CAAP), and every other method
cigma       heads that read the background (CIGMA), their removal, and what it is compared with
published   a file for each paper: printed values, and what computes each table and figure
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
