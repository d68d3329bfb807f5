"""Pictures and what is known about them.

pets = open_data("pets:PATH", limit=100)
images, labels, masks = to_batch(model, [pets[0], pets[1]])

Loaders make samples of any size; `to_batch` brings them into a model's frame.
"""

from seecause.data.batch import Batch, to_batch
from seecause.data.dataset import Dataset
from seecause.data.registry import open_data
from seecause.data.sample import IGNORE, Sample

__all__ = ["IGNORE", "Batch", "Dataset", "Sample", "open_data", "to_batch"]
