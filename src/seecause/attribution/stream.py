"""Pictures in any number, a few at a time: what comes in as files, PIL pictures, tensors or the
batches of a DataLoader goes out as normalised batches, or as results. Memory does not grow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

from PIL import Image
from torch import Tensor, nn

from seecause.attribution.attribute import attribute
from seecause.attribution.registry import join
from seecause.attribution.result import Attribution, Attributions
from seecause.data.dataset import Hole
from seecause.data.images import PictureFacts, PictureOpener
from seecause.errors import BadImage, BadOption, DataMissing
from seecause.loading import as_view
from seecause.models.base import ImageModel
from seecause.models.preprocess import ENTRIES, Picture, Pictures, Preprocess, as_images
from seecause.target import Spec

BATCH = 16


@dataclass(frozen=True, eq=False)
class PictureBatch:
    """Normalised pictures [B, 3, H, W]: their places among all that came in, what they are called
    and what is known about them; `others` [B, 3, H, W], a second version of each."""

    images: Tensor
    places: list[int]
    names: list[str]
    facts: list[PictureFacts]
    others: Tensor | None = None

    def take(self, rows: list[int]) -> PictureBatch:
        """Some of them."""
        if len(rows) == len(self.places):
            return self
        return PictureBatch(
            self.images[rows],
            [self.places[row] for row in rows],
            [self.names[row] for row in rows],
            [self.facts[row] for row in rows],
            None if self.others is None else self.others[rows],
        )


def attribute_stream(
    model: ImageModel | nn.Module,
    pictures: Pictures | Iterable[Any],
    target: Spec = None,
    method: str | Sequence[str] = "caap",
    *,
    batch: int = BATCH,
    holes: list[Hole] | None = None,
    **options: Any,
) -> Iterator[Attribution | Attributions]:
    """`sc.attribute` for any number of pictures, `batch` at a time: each result is yielded and let
    go.

    `pictures`: any number of what `sc.attribute` takes, samples (`folder:PATH#0`), a generator, or
    a DataLoader of batches (alone, with labels behind it, or under `pixel_values`). A picture that
    cannot be read is an error, or goes into the list `holes`, and the others go on. A `target` is
    one for all of them. Options are those of the method.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> files = [f"critters:clean:test#{place}" for place in range(5)]
    >>> for part in sc.attribute_stream(model, files, method="rollout", batch=2):
    ...     print(part.names, tuple(part.maps.shape))
    ['critters:clean:test#0', 'critters:clean:test#1'] (2, 12, 12)
    ['critters:clean:test#2', 'critters:clean:test#3'] (2, 12, 12)
    ['critters:clean:test#4'] (1, 12, 12)
    """
    if _one_each(target):
        raise BadOption("target", f"{len(target)} classes", "one for all pictures of a stream")
    model = as_view(model)
    for part in picture_batches(model, pictures, batch=batch, holes=holes):
        result = attribute(model, part.images, target, method, **options)
        yield named(result, part.names)


def _one_each(target: Spec) -> bool:
    """Whether a target has one class for each picture: a list, array, series or tensor with an
    axis, or a tuple that is no contrast."""
    if isinstance(target, tuple):
        return len(target) != 2
    return isinstance(target, list) or getattr(target, "ndim", 0) > 0


def named(result: Attribution | Attributions, names: list[str]) -> Attribution | Attributions:
    """A result whose pictures have names."""
    if isinstance(result, Attributions):
        return Attributions({key: replace(run, names=names) for key, run in result.items()})
    return replace(result, names=names)


def picture_batches(
    model: ImageModel,
    pictures: Pictures | Iterable[Any],
    *,
    batch: int = BATCH,
    names: Sequence[str] | None = None,
    others: Pictures | Iterable[Any] | None = None,
    holes: list[Hole] | None = None,
    facts: bool = False,
) -> Iterator[PictureBatch]:
    """Normalised pictures and second versions, `batch` at a time; originals are let go one by one.
    A batch ends early where pictures of another size follow. `facts`: also what is known about
    files and samples, masks in the frame of the model."""
    if batch < 1:
        raise BadOption("batch", batch, "at least one picture")
    opener = PictureOpener()
    rows: list[PictureBatch] = []  # of one picture each
    seconds = None if others is None else _singles(model, others)
    for place, item in enumerate(_singles(model, pictures)):
        other = None if seconds is None else _second(seconds, place)
        name = names[place] if names else _name(item, place)
        try:
            opened = _opened(model, item, opener)
            image = _prepared(model, opened)
            known = _facts(model, item, opened, opener) if facts else PictureFacts()
            version = None
            if other is not None:
                version = _prepared(model, _opened(model, other, opener, second=True))
        except (BadImage, DataMissing) as bad:
            if holes is None:
                raise
            holes.append(Hole(name, str(bad)))
            continue
        if version is not None and version.shape != image.shape:
            raise BadOption("others", list(version[0].shape), f"pictures of {list(image[0].shape)}")
        if rows and rows[0].images.shape != image.shape:
            yield join(rows)
            rows = []
        rows.append(PictureBatch(image, [place], [name], [known], version))
        if len(rows) == batch:
            yield join(rows)
            rows = []
    if seconds is not None and next(seconds, None) is not None:
        raise BadOption("others", "more than pictures", "one for each picture")
    if rows:
        yield join(rows)


def _singles(model: ImageModel, pictures: Any) -> Iterator[Any]:
    """One picture after the other, whatever batches they come in."""
    unpacked = model.preprocess.unpacked
    items: Iterable[Any] = cast("Iterable[Any]", unpacked(pictures))
    if isinstance(items, Picture | Mapping) and getattr(items, "ndim", 0) < 4:
        items = [items]
    return chain.from_iterable(_rows_of(item, unpacked) for item in items)


def _rows_of(item: Any, unpacked: Callable[[Any], Any]) -> Iterable[Any]:
    """The pictures of one element: a picture, a list of them, or a batch (alone, first with labels
    behind it, or under the name that processors give it)."""
    if isinstance(item, Mapping):
        item = next((item[key] for key in ENTRIES if key in item), item)
    item = unpacked(item)
    if isinstance(item, tuple | list) and item:
        is_pair = isinstance(item, tuple) or getattr(item[0], "ndim", 0) >= 4
        return _rows_of(item[0], unpacked) if is_pair else item
    batch: Any = item
    dimensions = getattr(batch, "ndim", 0)
    if dimensions == 5 and batch.shape[1] == 1:  # a DataLoader over `model.preprocess`
        return batch[:, 0]
    return batch if dimensions == 4 else [batch]


def _second(others: Iterator[Any], place: int) -> Any:
    other = next(others, None)
    if other is None:
        raise BadOption("others", f"fewer than pictures ({place})", "one for each picture")
    return other


def _name(item: Any, place: int) -> str:
    return str(item) if isinstance(item, str | Path) else f"picture {place}"


def _opened(model: ImageModel, item: Any, opener: PictureOpener, *, second: bool = False) -> Any:
    if not isinstance(item, str | Path) or not _takes_pictures(model):
        return item
    return opener(str(item), second=second)


def _takes_pictures(model: ImageModel) -> bool:
    return model.preprocess.kind == Preprocess.kind


def _prepared(model: ImageModel, opened: Any) -> Tensor:
    """One picture, [1, 3, H, W], normalised."""
    if isinstance(opened, Image.Image):  # stays on the CPU until its batch is full
        return model.preprocess(opened)[:1]
    return as_images(model, opened)[:1]


def _facts(
    model: ImageModel, item: Any, opened: Image.Image, opener: PictureOpener
) -> PictureFacts:
    """What is known about a file or a sample; its mask as the model sees it."""
    if not isinstance(item, str | Path):
        return PictureFacts()
    if not _takes_pictures(model):
        return PictureFacts(Path(item).absolute().parent.name)
    height, width = opened.size[::-1]
    known, size = replace(opener.facts(str(item)), size=(height, width)), [height, width]
    if known.mask is None:
        return known
    if list(known.mask.shape) != size:
        raise BadImage(
            f"the mask of {item}",
            f"{list(known.mask.shape)} pixels for a picture of {size}",
            "give masks of the pictures' own size",
        )
    return replace(known, mask=model.preprocess.mask(known.mask))
