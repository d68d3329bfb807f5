"""Datasets: images and what is known about them.

    pets = sc.data.open_data("pets:PATH", limit=100)
    images, labels, masks = sc.data.to_batch(model, pets)

Samples have images of any size; `to_batch` brings them into a model's frame. `docs/data.md` lists
the datasets and says how to add one with `register`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
