"""How good is a map, and how good is a model? Metrics are functions of tensors.

    scores = sc.metrics.insertion_deletion(model, images, maps, target)     # Scores
    scores["ins-del"]                                                       # [B]
    sc.metrics.summarise(scores["ins-del"])                                 # mean and its error

`metrics()` lists all of them, what each needs and which direction is better. Metrics that compute
maps again take the method as a function, `explain(images, target) -> maps`. `@metric` adds one.
"""

from seecause._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
