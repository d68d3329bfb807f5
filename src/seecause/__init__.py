"""See what causes a vision transformer's prediction, and change it.

What it offers is listed in `__init__.pyi` and imported on first use: `import seecause` loads
neither torch nor a model library.
"""

import lazy_loader

__version__ = "0.3.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
