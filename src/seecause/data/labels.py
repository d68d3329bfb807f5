"""Which class of a model a dataset's label means."""

from __future__ import annotations

from collections.abc import Sequence

from seecause.data.dataset import Dataset
from seecause.errors import OtherClasses, UnknownClass
from seecause.models.base import ImageModel


def class_places(model: ImageModel, data: Dataset) -> tuple[int, ...]:
    """The model's class for each label of `data`, by name.

    By position only where names cannot tell: the model or the data has none, ImageNet's classes
    (one order, many spellings), or as many classes as the model's of which not one has a name it
    knows. One known name among unknown ones is a mistake, not another spelling.
    """
    count = model.n_classes
    if in_order(data, model.classes, count) or (
        count == len(data.classes) and not any(_knows(model, name) for name in data.classes)
    ):
        return tuple(model.class_index(place) for place in range(len(data.classes)))
    unknown = next((name for name in data.classes if not _knows(model, name)), None)
    if unknown is not None:
        raise OtherClasses(data.name, model.name, unknown, model.classes)
    return tuple(model.class_index(name) for name in data.classes)


def in_order(data: Dataset, names: Sequence[str], count: int) -> bool:
    """Whether label c means the c-th of `count` classes: by the same names, without any, or as
    ImageNet's classes, which have one order and many spellings."""
    return (
        not names
        or data.classes == tuple(names)
        or (data.name.startswith("imagenet") and count == len(data.classes))
    )


def _knows(model: ImageModel, name: str) -> bool:
    try:
        model.class_index(name)
    except UnknownClass:
        return False
    return True
