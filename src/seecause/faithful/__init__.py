"""Classifiers that read selected patches only: iFAM, its training, evaluation and interventions."""

from seecause._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
