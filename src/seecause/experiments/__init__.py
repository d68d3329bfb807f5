"""Tables of the papers and of this project's own evidence, by name.

    sc.experiments.experiments()                       # names and descriptions
    status = sc.experiments.run("caap", "out/caap")    # out/caap/table.csv; the same call resumes

base   the registry, and `run`: cells of an experiment on the runner of `sc.bench`
caap   Causal Attribution via Activation Patching (CAAP): its variants, and all other methods
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
