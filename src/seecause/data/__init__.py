"""Pictures and what is known about them.

    pets = sc.data.open("pets:PATH", limit=100)
    images, labels, masks = sc.data.to_batch(model, [pets[0], pets[1]])

Loaders make samples of any size; `to_batch` brings them into a model's frame. `docs/data.md` lists
the datasets and says how to add one: `register`. `answers(model, data)` runs a model over one;
`select_true_positives` draws from what it answers right.
"""

from seecause._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
