"""Metrics of attribution maps and of models, as functions of tensors.

    scores = sc.metrics.insertion_deletion(model, images, maps, target)     # Scores
    scores["ins-del"]                                                       # [B]
    sc.metrics.summarise(scores["ins-del"])                                 # mean and its error

`metrics()` lists all metrics of maps, what each needs and which direction is better, and
`measure(name, MetricInputs(...))` computes one by its name. `@metric` adds one.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
