"""Datasets: sequences of samples that are read or generated when they are indexed, and their names.
Images by name: files, folders, globs, or one sample of a dataset, `DATA#INDEX`.

A new dataset is an `open_...` function and a line in `_OURS`. Other packages call `register`, or
name their function as an entry point of the group `seecause.datasets`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, overload

import numpy as np
from PIL import Image

from seecause.errors import (
    BadImage,
    BadOption,
    DataMissing,
    SeecauseError,
    UnknownName,
    nearest,
)
from seecause.files import digest
from seecause.models.preprocess import (
    SUFFIXES,
    check_there,
    decode_image as decode_image,
    kinds,
    read_grey,
    read_ids,
    read_image,
)
from seecause.options import Count, checked, keyword_options
from seecause.registry import Registry

if TYPE_CHECKING:  # torch is not loaded before a path is known to exist
    from torch import Tensor

UNREADABLE = (".heic", ".heif", ".avif")  # listed, so that they are reported as skipped
MASKS = "masks"  # a folder beside images that holds masks with the same stems
LOSSY = (".jpg", ".jpeg")
FEW = 16  # a mask with more distinct values has soft edges
TOGETHER = 8  # images that a worker reads at a time
MOST_WORKERS = 16
T = TypeVar("T")
Size = tuple[int, int]  # height, width
Group = tuple[int, int]  # codes of object and attribute
Box = tuple[float, float, float, float]  # x, y, width and height in pixels
Labels = tuple[int | None, ...]
Names = tuple[str, ...]  # of classes, in the order of their labels, or of images
IGNORE = 255  # the value of pixels in integer masks that are neither object nor background
HELD_OUT = 10  # every tenth training image of each class is `val` where a release has no such split


@dataclass(frozen=True)
class Sample:
    """One labelled image of a dataset.

    Images have their own size; `to_batch` brings them and their masks into a model's frame. A field
    that a dataset does not know is None.

    Attributes:
        image: Raw pixels [3, H, W], float32 in [0, 1], not normalised.
        label: An index of the dataset's classes.
        group: Codes of (object, attribute) where an attribute is correlated with the class in the
            training data, such as bird and place.
        mask: [H, W] bool, True on the object; or integers: 1 object, 0 background, IGNORE neither.
        parts: [H, W] uint8: 0 background, 1 body, 2 and more other parts.
        box: x, y, width and height of the object in pixels.
        points: [P, 3] float32: x and y of each key point in pixels, and 1 where it is visible.
        id: A name that is unique in the dataset.
        normalised: Whether the image is already what a model takes, in place of raw pixels.

    Example:
        >>> import torch, seecause as sc
        >>> sc.data.Sample(torch.zeros(3, 96, 96), label=1, id="first").label
        1
    """

    image: Tensor
    label: int | None
    group: Group | None = None
    mask: Tensor | None = None
    parts: Tensor | None = None
    box: Box | None = None
    points: Tensor | None = None
    id: str = ""
    normalised: bool = False


@dataclass(frozen=True)
class SkippedImage:
    """An image that was skipped because it could not be read, and why."""

    name: str
    reason: str


class Dataset(Protocol):
    """What every dataset has. An index beyond the end raises IndexError, so that iterating works.

    The attributes after `fingerprint` are optional.

    Attributes:
        name: The name that `open_data` takes.
        classes: The names of the labels, in order.
        fingerprint: A digest that changes when the samples do.
        capabilities: Some of "masks", "counterfactuals" and "pairs".
        ids: Names of all samples, known without reading them; likewise `labels`.
        digests: `digests(a, b)` of samples a to b: each changes when its sample does.
        latents: `latents(a, b)`, with "counterfactuals": the latents of samples a to b.
        other: `other(index)`, with "pairs": the second image of a pair, for which the model should
            predict the same class.
        places: Names of the second code of groups.
        take: `take(rows)`, some samples as a dataset; `Subset` is used without it.

    Example:
        >>> import seecause as sc
        >>> data = sc.data.open_data("critters:clean:test", limit=2)
        >>> len(data), len(data.classes), data[0].image.shape
        (2, 8, torch.Size([3, 96, 96]))
    """

    @property
    def name(self) -> str:
        """The name that `open_data` takes."""
        ...

    @property
    def classes(self) -> Names:
        """The names of the labels, in order; empty for a dataset without labels."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest that changes when the samples do."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


def capabilities(data: Dataset) -> frozenset[str]:
    """What a dataset has besides images and labels.

    Args:
        data: A dataset. If it does not declare its capabilities, its first eight samples are read.

    Returns:
        Some of "masks" (object masks), "counterfactuals" (samples can be rendered again with one
        thing changed) and "pairs" (samples have a second version).

    Example:
        >>> import seecause as sc
        >>> sorted(sc.data.capabilities(sc.data.open_data("critters:clean:test")))
        ['counterfactuals', 'masks']
    """
    declared = getattr(data, "capabilities", None)
    if declared is not None:
        return frozenset(declared)
    for index in range(min(len(data), 8)):
        with contextlib.suppress(SeecauseError):  # a file that cannot be read
            if data[index].mask is not None:
                return frozenset({"masks"})
    return frozenset()


def sample_ids(data: Dataset) -> Names:
    """The id of each sample, without reading it."""
    ids = getattr(data, "ids", None)
    return tuple(ids) if ids else tuple(f"{data.name}:{index}" for index in range(len(data)))


def sample_labels(data: Dataset) -> Labels:
    """The label of each sample; samples are read only if the dataset has no attribute `labels`."""
    labels = getattr(data, "labels", None)
    return tuple(labels if labels is not None else (data[i].label for i in range(len(data))))


def sample_digests(data: Any, start: int = 0, stop: int | None = None) -> list[str]:
    """A digest of each sample from `start` to `stop`, which does not depend on other samples."""
    stop = len(data) if stop is None else stop
    if hasattr(data, "digests"):
        return list(data.digests(start, stop))
    digests = []
    for index in range(start, stop):
        try:
            sample = data[index]
        except (BadImage, DataMissing) as error:
            digests.append(digest(str(error)))
            continue
        tensors = (sample.image, sample.mask, sample.parts, sample.points)
        pixels = [b"" if tensor is None else tensor.cpu().numpy().tobytes() for tensor in tensors]
        facts = repr((sample.id, sample.label, sample.group, sample.box))
        digests.append(digest(facts, *pixels))
    return digests


@dataclass(frozen=True, eq=False)
class Subset:
    """Some samples of a dataset.

    Args:
        name: The name of the subset.
        data: The whole dataset.
        rows: Indices of the samples.

    Example:
        >>> import seecause as sc
        >>> data = sc.data.open_data("critters:clean:test")
        >>> len(sc.data.Subset("every second", data, tuple(range(0, len(data), 2))))
        256
    """

    name: str
    data: Any  # Dataset
    rows: tuple[int, ...]

    @property
    def classes(self) -> Names:
        return self.data.classes

    @property
    def places(self) -> Names:
        return getattr(self.data, "places", ())

    @property
    def fingerprint(self) -> str:
        return digest(self.data.fingerprint, repr(self.rows))

    @property
    def capabilities(self) -> frozenset[str]:
        return capabilities(self.data)

    @property
    def ids(self) -> Names:
        ids = sample_ids(self.data)
        return tuple(ids[row] for row in self.rows)

    @property
    def labels(self) -> Labels:
        labels = getattr(self.data, "labels", None)
        return tuple(labels[row] if labels else self.data[row].label for row in self.rows)

    def digests(self, start: int, stop: int) -> list[str]:
        return [sample_digests(self.data, row, row + 1)[0] for row in self.rows[start:stop]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Sample:
        return self.data[self.rows[index]]

    def latents(self, start: int, stop: int, **options: Any) -> Any:
        """The latents of samples `start` to `stop`."""
        rows = self.rows[start:stop]
        first, last = min(rows, default=0), max(rows, default=-1)
        drawn = self.data.latents(first, last + 1, **options)
        return drawn[[row - first for row in rows]]

    def other(self, index: int) -> Sample:
        """The second version of a sample."""
        return self.data.other(self.rows[index])


def evenly(items: Sequence[T], limit: int | None) -> tuple[T, ...]:
    """At most `limit` of the items, evenly spread, because datasets are sorted by class."""
    if limit is None or limit >= len(items):
        return tuple(items)
    return tuple(items[place * len(items) // limit] for place in range(limit))


def path_and_split(rest: str, splits: Sequence[str], default: str = "test") -> tuple[Path, str]:
    """Path and split of `PATH:SPLIT` or `PATH`. A path may contain colons: what follows the last
    colon is a split only if it is the name of one."""
    path, _, last = rest.rpartition(":")
    if path and last in splits:
        return Path(path), last
    if path and Path(path).exists() and not Path(rest).exists():
        raise UnknownName("split", last, splits)
    return Path(rest), default


def part_of_train(items: Sequence[T], classes: Iterable[Hashable], split: str) -> list[T]:
    """The items of a split of the training data: `val` has every tenth of each class, `train` the
    others; all of any other split. Nothing is random, so splits are the same on every machine."""
    if split not in ("train", "val"):
        return list(items)
    seen: Counter[Hashable] = Counter()
    part = []
    for item, of in zip(items, classes, strict=True):
        seen[of] += 1
        if (seen[of] % HELD_OUT == 0) == (split == "val"):
            part.append(item)
    return part


# ---------------------------------------------------------------- datasets by name

Opener = Callable[..., Dataset]  # called with what follows `name:`, and with `limit` if it has that

_OURS = {  # form of a name -> the function that opens the dataset
    "critters:REGIME[:SPLIT]": "seecause.critters.rendering:open_critters",
    "celeba:PATH[:SPLIT]": "seecause.data.shortcuts:open_celeba",
    "cifar10:PATH[:SPLIT]": "seecause.data.labelled:open_cifar10",
    "cifar100:PATH[:SPLIT]": "seecause.data.labelled:open_cifar100",
    "coco:PATH[:SPLIT]": "seecause.data.labelled:open_coco",
    "coco-main:PATH[:SPLIT]": "seecause.data.labelled:open_coco_main",
    "cub:PATH[:SPLIT]": "seecause.data.shortcuts:open_cub",
    "domainnet:PATH[:DOMAIN][:SPLIT]": "seecause.data.shortcuts:open_domainnet",
    "folder:PATH": "seecause.data.photos:open_folder",
    "food101:PATH[:SPLIT]": "seecause.data.labelled:open_food101",
    "imagenet:PATH[:SPLIT]": "seecause.data.imagenet:open_imagenet",
    "imagenet-hard:PATH": "seecause.data.imagenet:open_imagenet_hard",
    "imagenet-s:PATH": "seecause.data.imagenet:open_imagenet_s",
    "imagenet9:PATH[:VARIANT]": "seecause.data.imagenet:open_imagenet9",
    "metashift:PATH[:SPLIT]": "seecause.data.shortcuts:open_metashift",
    "pairs:WITH:WITHOUT": "seecause.data.photos:open_pairs",
    "pets:PATH[:SPLIT]": "seecause.data.labelled:open_pets",
    "siim:PATH[:SPLIT]": "seecause.data.shortcuts:open_siim",
    "tiny-imagenet:PATH[:SPLIT]": "seecause.data.labelled:open_tiny_imagenet",
    "waterbird200:PATH": "seecause.data.shortcuts:open_waterbird200",
    "waterbirds:PATH[:SPLIT]": "seecause.data.shortcuts:open_waterbirds",
}
_FORMS = {form.partition(":")[0]: form for form in _OURS}
_HOMES = dict(zip(_FORMS, _OURS.values(), strict=True))
_REGISTRY: Registry[Opener] = Registry(
    "dataset", group="seecause.datasets", homes=_HOMES, adopts=True
)


def register(name: str, opener: Opener, *, form: str = "PATH") -> None:
    """Add a dataset, so that `open_data` and the command line open `name:...`.

    Args:
        name: A new word, without ":" and "#".
        opener: Called with what follows the colon, and with `limit=` if it has that keyword.
            Returns a `Dataset`.
        form: How the rest of the name is written, for messages.

    Returns:
        None.

    Example:
        >>> import seecause as sc
        >>> sc.data.register("mine", lambda rest: sc.data.open_data(f"critters:{rest}"))
        >>> len(sc.data.open_data("mine:clean:test", limit=4))
        4
    """
    if not name or ":" in name or "#" in name or name in _HOMES:
        raise BadOption("name", name, "a new word without : and #")
    _REGISTRY.add(name, opener)
    _FORMS[name] = f"{name}:{form}"


def datasets() -> Names:
    """How the name of each dataset is written, including those of plug-ins.

    Returns:
        One form such as `pets:PATH[:SPLIT]` for each dataset.

    Example:
        >>> import seecause as sc
        >>> "pets:PATH[:SPLIT]" in sc.data.datasets()
        True
    """
    return tuple(sorted(_FORMS.get(name, f"{name}:PATH") for name in _REGISTRY.names()))


def is_data(text: str) -> bool:
    """Whether a text begins like the name of a dataset."""
    name, colon, _ = text.partition(":")
    return bool(colon) and name in _REGISTRY


@checked
def open_data(spec: str | Path, *, limit: Count | None = None) -> Dataset:
    """Open a dataset by its name.

    Args:
        spec: NAME:PATH, often with a split behind it: `folder:PATH` (your own images, a sub-folder
            for each class), `pets:PATH:test`, `imagenet-s:PATH`. `sc.data.datasets()` lists all.
        limit: Use at most this many samples, spread evenly over the whole dataset.

    Returns:
        A sequence of samples, which are read when they are indexed, as raw pixels of their own
        size; `sc.data.to_batch` brings them into a model's frame.

    Raises:
        UnknownName: If there is no such dataset or split.
        DataMissing: If a file is missing or has another layout.

    Example:
        >>> import seecause as sc
        >>> data = sc.data.open_data("critters:clean:test", limit=4)
        >>> len(data), data.classes[data[0].label], data[0].image.shape
        (4, 'quillow', torch.Size([3, 96, 96]))
    """
    name, _, rest = str(spec).partition(":")
    if name not in _REGISTRY and Path(spec).is_dir():
        raise BadOption("data", str(spec), f"a dataset; for a folder of images give folder:{spec}")
    if not rest or name not in _REGISTRY:
        forms = {form.partition(":")[0]: form for form in datasets()}
        near = [forms[kind] for kind in nearest(name, forms)] or forms.values()
        hint = f"Write {', '.join(near)}, or folder:PATH for a folder of images."
        raise UnknownName("dataset", str(spec) if rest else name, forms, hint)
    opener = _REGISTRY.get(name)
    data = opener(rest, limit=limit) if "limit" in keyword_options(opener) else opener(rest)
    if limit is None or len(data) <= limit:
        return data
    rows = evenly(range(len(data)), limit)
    return cast(Any, data).take(rows) if hasattr(data, "take") else Subset(data.name, data, rows)


class Named(Protocol):
    """A dataset, or images that were read from one."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


@overload
def as_data(data: str | Path, *, limit: int | None = ...) -> Dataset: ...


@overload
def as_data(data: N, *, limit: int | None = ...) -> N: ...


def as_data(data: Any, *, limit: int | None = None) -> Any:
    """A dataset as it is, or the one of that name; of torch's datasets and loaders, one of
    samples. `limit` is that of `open_data`."""
    if isinstance(data, str | Path):
        return open_data(data, limit=limit)
    if not isinstance(getattr(data, "name", None), str) or not hasattr(data, "fingerprint"):
        from seecause.data.batch import TorchData

        data = TorchData(data) if not hasattr(data, "images") else data
    few = limit is not None and len(data) > limit
    return Subset(data.name, data, evenly(range(len(data)), limit)) if few else data


# ---------------------------------------------------------------- images by name


def find_images(texts: Iterable[str | Path]) -> list[str]:
    """Names for `open_image`: of files, of the images in folders, of the files that match globs,
    and of samples of datasets; each once.

    A folder without images gives those of all its sub-folders except masks.
    """
    names: list[str] = []
    for text in map(str, texts):
        path = Path(text)
        if path.is_dir():
            found = images_in(path, {*SUFFIXES, *UNREADABLE})
            if not found:
                images = [p for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES]
                hidden = {p for p in images if any(n[0] == "." for n in p.relative_to(path).parts)}
                masks = {mask_of(p) for p in images}
                found = [p for p in images if p not in hidden | masks and p.is_file()]
            if not found:
                raise BadImage(text, "a folder without images", f"give a folder with {kinds()}")
            names += map(str, found)
        elif sample_of(text) or path.exists():
            names.append(text)
        elif set(text) & set("*?["):
            matches = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
            found = sorted(match for match in matches if match.is_file())
            if not found:
                raise BadImage(text, "no file matches", "check the pattern")
            names += map(str, found)
        else:
            _check_file(text)
    return list(dict.fromkeys(names))


def images_in(folder: Path, suffixes: Collection[str] = SUFFIXES) -> list[Path]:
    """The images of one folder, sorted, without hidden files."""
    files = (path for path in folder.iterdir() if path.suffix.lower() in suffixes)
    return sorted(path for path in files if path.name[0] != "." and path.is_file())


def mask_of(image: Path) -> Path | None:
    """The mask of an image: the file with its stem in the folder `masks` beside it, or in the
    sub-folder of its class of the folder `masks` beside its class folder. None without one."""
    above = image.parent.parent / MASKS / image.parent.name
    for folder in (image.parent / MASKS, above):
        for suffix in sorted(SUFFIXES) if folder.is_dir() else ():
            if (mask := folder / f"{image.stem}{suffix}").is_file():
                return mask
    return None


def read_mask(path: Path) -> Tensor:
    """[H, W] bool, True on the object: where a file of few values is not 0, where one with soft
    edges is brighter than half. JPEG adds small values around edges, so half is the limit there,
    too."""
    import torch

    try:
        values = read_ids(path)
    except BadImage:  # saved in colour
        values = read_grey(path).astype(np.int64)
    few = path.suffix.lower() not in LOSSY and len(np.unique(values)) <= FEW
    return torch.from_numpy(values > 0 if few else values * 2 > values.max())


def open_image(text: str) -> Image.Image:
    """Open one image by its name.

    Args:
        text: A file, or a sample such as `critters:clean:test#3` or `pets:PATH#0`, counted from 0
            in the order of the dataset.

    Returns:
        A PIL image.

    Example:
        >>> import seecause as sc
        >>> sc.data.open_image("critters:clean:test#3").size
        (96, 96)
    """
    return ImageOpener()(text)


@dataclass(frozen=True, eq=False)
class ImageFacts:
    """What is known about an image besides its pixels: the name of its class, the mask [H, W] of
    its object as in `Sample`, and its own height and width."""

    label: str | None = None
    mask: Tensor | None = None
    size: Size | None = None


class ImageOpener:
    """Opens images by name; each dataset is opened once."""

    def __init__(self) -> None:
        self._data = cache(open_data)
        self._sample = lru_cache(maxsize=1)(self._read)  # `facts` uses the same sample

    def __call__(self, text: str, *, second: bool = False) -> Image.Image:
        """A file, or a sample of a dataset. With `second`, the other version of a sample of
        pairs."""
        if (named := sample_of(text)) is None:
            _check_file(text)
            return read_image(text)
        sample, data = self._sample(*named), self._data(named[0])
        if second and "pairs" in capabilities(data):
            sample = data.other(named[1])  # type: ignore[attr-defined]
        return to_pil(sample.image)

    def facts(self, text: str) -> ImageFacts:
        """Class and mask of a sample as its dataset has them; those of a file by the name of its
        folder, and by its mask in a folder `masks`."""
        if (named := sample_of(text)) is None:
            path = Path(text).absolute()
            mask = mask_of(path)
            return ImageFacts(path.parent.name, None if mask is None else read_mask(mask))
        sample, classes = self._sample(*named), self._data(named[0]).classes
        label = classes[sample.label] if classes and sample.label is not None else None
        return ImageFacts(label, sample.mask)

    def _read(self, name: str, index: int) -> Sample:
        data = self._data(name)
        if index >= len(data):
            raise BadOption("sample", f"{name}#{index}", f"an index below {len(data)}")
        return data[index]


def default_workers(count: int) -> int:
    """How many processes read `count` images: as many as SEECAUSE_WORKERS says, or one for each
    core, none for few images."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usual = 0 if count < 4 * TOGETHER else min(cores or 1, MOST_WORKERS)
    given = os.environ.get("SEECAUSE_WORKERS") or str(usual)
    if not given.isdecimal():
        raise BadOption("SEECAUSE_WORKERS", given, "a whole number of processes")
    return int(given)


_readers: ContextVar[int | None] = ContextVar("seecause_readers", default=0)


@contextmanager
def reading_with(workers: int | None) -> Iterator[None]:
    """Datasets that are read as a whole inside the block are read by that many processes, with the
    same results; None is `default_workers`. Elsewhere this process reads them."""
    token = _readers.set(workers)
    try:
        yield
    finally:
        _readers.reset(token)


def readers(data: Dataset, count: int) -> int:
    """How many processes read `count` samples: none of data that is rendered, not decoded."""
    workers = default_workers(count) if (chosen := _readers.get()) is None else chosen
    return workers if workers and "counterfactuals" not in capabilities(data) else 0


def read_ahead(read: Callable[[int], T], count: int, workers: int) -> Iterator[T]:
    """Yield `read(0)`, `read(1)` and so on, in order, made by worker processes a little ahead.

    Workers are those of a torch DataLoader; they end with the iterator. Results come as bytes, not
    in shared memory, of which containers have little.

    Args:
        read: Reads one item. Where processes are not forked it is pickled.
        count: How many items there are.
        workers: How many processes read; 0 reads in this one.

    Example:
        >>> list(read_ahead(lambda place: place * place, 4, 0))
        [0, 1, 4, 9]
    """
    if not workers:
        yield from map(read, range(count))
        return
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(
        range(count),  # type: ignore[arg-type]
        batch_size=TOGETHER,
        num_workers=min(workers, -(-count // TOGETHER)),
        collate_fn=partial(_read_all, read),
        generator=torch.Generator(),  # else a loader draws from the generator of everything
    )
    with uninterrupted():
        answers = iter(loader)  # starts the workers
    try:
        for answer in answers:
            yield from pickle.loads(answer)
    except RuntimeError as failure:
        if "DataLoader worker" not in str(failure):
            raise
        reason = "a worker that reads images was killed, perhaps for its memory"
        raise SeecauseError(f"{reason}; give --workers 0 to read in one process") from failure


def _read_all(read: Callable[[int], Any], places: Iterable[int]) -> bytes:
    return pickle.dumps(list(map(read, places)))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block ends, and never reaches processes that are started in it: the
    main process ends them."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def second_versions(texts: Sequence[str], folder: Path | None) -> list[str] | None:
    """Names of the other versions of images, for `ImageOpener(text, second=True)`: files of the
    same names in `folder`, and samples of pairs themselves. None if there are none.

    For a film that is a folder of frames, it is a folder of its name in `folder`, or `folder`.
    """
    if folder is None and not any(text.startswith("pairs:") for text in texts):
        return None
    others = []
    for text in texts:
        path = Path(text)
        if sample_of(text) and text.startswith("pairs:"):
            others.append(text)
        elif folder is None or sample_of(text):
            expected = "a folder with files of the same names, or samples of pairs:WITH:WITHOUT"
            raise BadOption("image", text, f"another version of each image: {expected}")
        else:
            frame = folder / path.parent.name / path.name
            other = frame if frame.exists() else folder / path.name
            if path.is_dir() and len(texts) == 1 and not other.exists():
                other = folder
            if not other.is_dir():
                check_there(other)
            others.append(str(other))
    return others


def sample_of(text: str) -> tuple[str, int] | None:
    """Dataset and index of `KIND:...#INDEX`; None for other texts, and for a file of that name."""
    name, _, index = text.rpartition("#")
    if ":" in name and index.isdecimal() and not Path(text).exists():
        return name, int(index)
    return None


def _check_file(text: str) -> None:
    """Raises if there is no such file; for a dataset or a misspelt sample, the error says how to
    name one sample."""
    name, _, index = text.rpartition("#")
    if (is_data(text) or (":" in name and index)) and not Path(text).exists():
        example = f"{name or text}#0"
        expected = f"one sample of a dataset, DATA#INDEX, such as {example}"
        raise BadOption("sample", text, f"{expected}; name several one by one")
    check_there(Path(text))


def to_pil(image: Tensor) -> Image.Image:
    """Convert raw pixels to an image of 8 bits.

    Args:
        image: [3, H, W] in [0, 1].

    Returns:
        A PIL image.

    Example:
        >>> import seecause as sc, torch
        >>> sc.data.to_pil(torch.zeros(3, 4, 6)).size
        (6, 4)
    """
    pixels = (image.detach().float().cpu().clamp(0, 1) * 255).round().byte()  # [3, H, W]
    return Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
