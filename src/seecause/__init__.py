"""See what causes a vision transformer's prediction, and change it.

    import seecause as sc

    model = sc.load("builtin:critters-vit")
    sc.attribute(model, "critters:clean:test#7").maps.shape          # [1, 12, 12]

The names below are imported on first use: `import seecause` alone loads neither torch nor a model
library.
"""

import lazy_loader

__version__ = "0.3.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
