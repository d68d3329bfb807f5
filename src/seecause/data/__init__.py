"""Pictures and what is known about them.

    pets = sc.data.open("pets:PATH", limit=100)
    images, labels, masks = sc.data.to_batch(model, [pets[0], pets[1]])

Loaders make samples of any size; `to_batch` brings them into a model's frame. `docs/data.md` lists
the datasets and says how to add one: `register`. `answers(model, data)` runs a model over one;
`select_true_positives` draws from what it answers right.
"""

from seecause.data.answers import (
    Answers,
    answers,
    group_shares,
    select_true_positives,
    true_positives,
)
from seecause.data.batch import Batch, class_places, to_batch
from seecause.data.dataset import (
    CAPABILITIES,
    IGNORE,
    Counterfactuals,
    Dataset,
    Paired,
    Sample,
    Subset,
    capabilities,
    has_counterfactuals,
    has_pairs,
    sample_digests,
    sample_ids,
    sample_labels,
)
from seecause.data.images import open_picture, read_image, to_pil
from seecause.data.pairs import PairedData, paired
from seecause.data.photos import Photo, Photos
from seecause.data.registry import datasets, open_data, register
from seecause.data.registry import open_data as open

__all__ = [
    "CAPABILITIES",
    "IGNORE",
    "Answers",
    "Batch",
    "Counterfactuals",
    "Dataset",
    "Paired",
    "PairedData",
    "Photo",
    "Photos",
    "Sample",
    "Subset",
    "answers",
    "capabilities",
    "class_places",
    "datasets",
    "group_shares",
    "has_counterfactuals",
    "has_pairs",
    "open",
    "open_data",
    "open_picture",
    "paired",
    "read_image",
    "register",
    "sample_digests",
    "sample_ids",
    "sample_labels",
    "select_true_positives",
    "to_batch",
    "to_pil",
    "true_positives",
]
