"""Critters: a generated world with known causes.

Small creatures made of parts on textured backgrounds; every image comes with its mask, its part
map and its exact counterfactuals.

    from seecause import critters

    latents = critters.draw("certified", "test", 16)
    drawn = critters.render(latents)
    elsewhere = critters.render(latents, do=critters.Do(background=2))  # the creature is the same
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
