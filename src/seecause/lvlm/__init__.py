"""Which heads of a vision-language model carry the image into its words, from which image tokens
into which words (head attribution)."""

from seecause._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
