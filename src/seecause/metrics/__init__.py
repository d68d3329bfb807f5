"""How good is a map, and how good is a model? Functions of tensors; none knows a method.

    curves = sc.metrics.insertion_deletion(model, images, maps, target)
    places = sc.metrics.localization(maps, masks)
    sc.metrics.summarise(curves.difference), sc.metrics.bootstrap_interval(places.aupr1)

Every number is given for each image first; means, errors and intervals come from `statistics`.
`metrics()` lists what there is: what each needs, and which way is better. Metrics that explain
again take the method as a function, `explain(images, target) -> maps`. `@metric` adds one.
"""

from seecause._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
