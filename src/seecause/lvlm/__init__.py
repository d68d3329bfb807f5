"""Head attribution of vision-language models: heads that carry the image into words, from which
image tokens."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
