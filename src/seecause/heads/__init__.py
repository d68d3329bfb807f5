"""Which attention heads answer from the background, and what happens without them (CIGMA)."""

from seecause._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
