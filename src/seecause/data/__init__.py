"""Pictures and what is known about them.

pets = open_data("pets:PATH", limit=100)
images, labels, masks = to_batch(model, [pets[0], pets[1]])

Loaders make samples of any size; `to_batch` brings them into a model's frame. `docs/data.md` lists
the datasets. `answers(model, data)` runs a model over one; `select_true_positives` draws from what
it answers right.
"""

from seecause.data.answers import (
    Answers,
    answers,
    group_shares,
    select_true_positives,
    true_positives,
)
from seecause.data.batch import Batch, to_batch
from seecause.data.dataset import IGNORE, Dataset, Sample
from seecause.data.registry import open_data

__all__ = [
    "IGNORE",
    "Answers",
    "Batch",
    "Dataset",
    "Sample",
    "answers",
    "group_shares",
    "open_data",
    "select_true_positives",
    "to_batch",
    "true_positives",
]
