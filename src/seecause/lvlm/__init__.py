"""Which heads of a vision-language model carry the image into its words, from which image tokens
into which words (head attribution)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
