"""How much a model relies on the background, which heads carry it, and how to repair the model."""

from seecause._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
