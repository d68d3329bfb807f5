"""A classifier that cannot look elsewhere: iFAM, its losses, and what can be changed at test
time."""

from seecause._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
