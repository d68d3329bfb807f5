"""Classifiers that read selected patches only: iFAM, its training, evaluation and interventions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
