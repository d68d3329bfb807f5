from seecause.data.batch import (
    Answers as Answers,
    Batch as Batch,
    answers as answers,
    class_places as class_places,
    group_shares as group_shares,
    to_batch as to_batch,
    true_positives as true_positives,
)
from seecause.data.dataset import (
    CAPABILITIES as CAPABILITIES,
    IGNORE as IGNORE,
    Dataset as Dataset,
    Sample as Sample,
    Subset as Subset,
    capabilities as capabilities,
    has_counterfactuals as has_counterfactuals,
    has_pairs as has_pairs,
    sample_digests as sample_digests,
    sample_ids as sample_ids,
    sample_labels as sample_labels,
)
from seecause.data.folder import PairedData as PairedData, paired as paired
from seecause.data.images import (
    open_picture as open_picture,
    read_image as read_image,
    to_pil as to_pil,
)
from seecause.data.photos import Photo as Photo, Photos as Photos
from seecause.data.registry import (
    datasets as datasets,
    open as open,
    open_data as open_data,
    register as register,
)
