"""A classifier that cannot look elsewhere: iFAM, its losses, and what can be changed at test
time."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
