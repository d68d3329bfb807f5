"""How much a model relies on the background, which heads carry it, and how to repair the model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
