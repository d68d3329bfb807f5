from .batch import to_batch as to_batch
from .dataset import (
    IGNORE as IGNORE,
    Dataset as Dataset,
    Sample as Sample,
    Subset as Subset,
    capabilities as capabilities,
    datasets as datasets,
    open_data as open_data,
    open_image as open_image,
    register as register,
    to_pil as to_pil,
)
from .photos import paired as paired
