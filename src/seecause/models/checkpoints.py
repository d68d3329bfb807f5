"""Files of weights as trainings write them: a state dict, alone or beside other things, under names
that a wrapper began; with the names of the classes, where they were kept.

Nothing of a file runs: classes that are no tensors become inert dictionaries (`Inert`).
"""

from __future__ import annotations

import json
import logging
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from seecause.errors import BadOption, DataMissing

log = logging.getLogger(__name__)
# what callers name classes by; one text is the path of a file
ClassNames = Sequence[str] | Mapping[int, str] | Mapping[str, int] | str | Path
# where a file keeps its weights; averages first, as timm's own loader takes them
AVERAGES = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema")
PLACES = (*AVERAGES, "state_dict", "model_state_dict", "model", "net", "module", "weights")
RECORDS = ("meta", "hyper_parameters", "hparams", "config", "args", "datamodule_hyper_parameters")
LISTS = ("classes", "class_names", "label_names", "labels", "categories")
MAPPINGS = ("idx_to_class", "id2label", "class_to_idx", "label2id")
WHOLE = "model.safetensors", "pytorch_model.bin"  # in folders
NAMED = 3  # names in an error
EXTRAS = ("criterion", "loss", "optim", "metric")  # how parts begin that no answer goes through
_BROKEN = (
    *(OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, AssertionError, MemoryError, SafetensorError, UnpicklingError, struct.error),
)


@contextmanager
def reading_saved(folder: Path, *files: str, writer: str) -> Iterator[None]:
    """Inside the block, what `writer` saved is read: a file that is missing or damaged is said in
    words."""
    if not all((folder / name).is_file() for name in files):
        remedy = f"give a folder that {writer} wrote"
        raise DataMissing(str(folder), f"no {' and '.join(files)} there", remedy)
    try:
        yield
    except (*_BROKEN, RecursionError) as damage:
        reason = f"{' or '.join(files)} is damaged"
        raise DataMissing(str(folder), reason, f"give a folder as {writer} wrote it") from damage


class Inert:
    """Stands for any class of a file that is no tensor: an ordered dictionary, which torch's reader
    fills with the object's items and attributes, and which does nothing."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return OrderedDict()


class Nothing:
    """Stands for numpy's arrays and scalars, whose state is no dictionary."""

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Named weights, and what else the file tells."""

    state: dict[str, Tensor]
    classes: tuple[str, ...] = ()
    architecture: str = ""  # as timm names it

    def names_for(self, count: int) -> tuple[str, ...]:
        """Class names, if there are as many as the model has classes."""
        return self.classes if len(self.classes) == count else ()

    def count_classes(self, heads: Sequence[str]) -> int | None:
        """Rows of the classifier, which is called like one of `heads`."""
        for head in heads:
            named = [name for name in self.state if f".{name}".endswith(f".{head}")]
            if named:
                return len(self.state[min(named, key=len)])
        return None


def read_weights(path: Path) -> dict[str, Tensor]:
    """The named weights of a file."""
    return read_checkpoint(path).state


def read_checkpoint(path: Path) -> Checkpoint:
    """A safetensors file or a torch file of weights; half-precision ones are widened when copied.
    Of a folder, the file that libraries write there."""
    path = next((path / name for name in WHOLE if (path / name).is_file()), path)
    if not path.is_file():
        raise DataMissing(
            str(path),
            f"no {' or '.join(WHOLE)} there" if path.is_dir() else "the file does not exist",
            "Give the path of a .safetensors or torch file",
        )
    try:
        content = _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)
    except _BROKEN as broken:
        raise DataMissing(
            str(path),
            "it is cut off, damaged, or no file of weights",
            "Give an intact .safetensors file, or a torch file with a state dict",
        ) from broken
    if not isinstance(content, dict):
        raise DataMissing(
            str(path),
            f"it holds a {type(content).__name__}, not a state dict",
            "Give a file of named weights",
        )
    state = _weights_in(content)
    if not state:
        what = "a whole pickled object" if _attributes(content) else "no named weights"
        raise DataMissing(
            str(path),
            f"it holds {what}; keys: {', '.join(map(str, [*content][:8])) or 'none'}",
            "Save the state dict: torch.save(model.state_dict(), PATH)",
        )
    for place in AVERAGES:
        if place in content and any(other in content for other in PLACES if other not in AVERAGES):
            log.warning("%s: the averaged weights (%s) are taken", path.name, place)
            break
    architecture = content.get("arch")
    return Checkpoint(
        {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()},
        _names_in(content),
        architecture if isinstance(architecture, str) else "",
    )


def _safetensors(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        notes = file.metadata() or {}
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no iterator
    return {"state_dict": state, **{key: _parsed(notes[key]) for key in notes if key in _NOTES}}


_NOTES = {*LISTS, *MAPPINGS}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _torch_file(path: Path) -> Any:
    """What the file holds; torch's own reader of weights, which calls nothing that is not named.
    Of files that are no archive, as torch wrote them until 2020, only plain ones are read."""
    listed = zipfile.is_zipfile(path)
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path) if listed else ()
    inert = [(Nothing if name.startswith("numpy") else Inert, name) for name in foreign]
    with torch.serialization.safe_globals(cast(Any, inert)):
        return torch.load(path, map_location="cpu", weights_only=True)


def _weights_in(content: Mapping[Any, Any], depth: int = 3) -> dict[str, Tensor]:
    """The state dict in what a training saved."""
    for place in PLACES if depth else ():
        inner = content.get(place)
        if isinstance(inner, Mapping):
            state = _weights_in(inner, depth - 1)
            if state:
                return state
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _names_in(content: Mapping[Any, Any]) -> tuple[str, ...]:
    """Class names from a file, a card or a record inside of one; empty where there are none."""
    inner = (content.get(record) for record in RECORDS)
    for record in (content, *(entry for entry in inner if isinstance(entry, Mapping))):
        entries = {**record, **_attributes(record)}
        for key in (*LISTS, *MAPPINGS):
            names = class_list(entries.get(key))
            if names:
                return names
    return ()


def _attributes(record: Mapping[Any, Any]) -> dict[str, Any]:
    """Of an object that `Inert` stands for."""
    return vars(record) if isinstance(record, OrderedDict) else {}


def class_list(value: Any) -> tuple[str, ...]:
    """Names in the order of their indices: of a list, or of a mapping either way; empty for
    anything else."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
        if pairs and all(isinstance(name, int) for _, name in pairs):
            pairs = [(name, key) for key, name in pairs]
        try:
            by_index = {int(index): name for index, name in pairs}
        except (TypeError, ValueError):
            return ()
        value = [by_index.get(index) for index in range(len(by_index))]
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        return ()
    return tuple(value)


def class_names_of(classes: ClassNames | None) -> tuple[str, ...] | None:
    """Names in the order of the outputs, from whatever a caller gives."""
    if classes is None:
        return None
    if isinstance(classes, str | Path):
        return read_class_names(classes)
    given = classes if isinstance(classes, Mapping) else list(classes)
    names = class_list(given)
    if len(names) != len(given):
        expected = "names in the order of the outputs, {index: name}, or a file of them"
        raise BadOption("classes", classes, expected)
    return names


def read_class_names(path: str | Path) -> tuple[str, ...]:
    """Names of a file: one a line, or a JSON list or mapping (index to name, or name to index)."""
    remedy = "give names in a list, or a file with one a line or a JSON list"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as broken:
        why = "it is no text" if isinstance(broken, ValueError) else broken.strerror
        reason = f"class names cannot be read from there: {why}"
        raise DataMissing(str(path), reason, remedy) from broken
    if not text.lstrip().startswith(("[", "{")):
        names = tuple(line.strip() for line in text.splitlines() if line.strip())
    else:
        try:
            names = class_list(json.loads(text))
        except (ValueError, RecursionError):
            names = ()
    if not names:
        raise DataMissing(str(path), "it holds no class names", remedy)
    return names


def fill(
    module: nn.Module, state: Mapping[str, Tensor], source: str, *, resized: bool = False
) -> None:
    """Load weights into a module, or say what does not fit. What a wrapper put in front of all
    names is taken off (`module.`, `model.`, `backbone.`); a head beside the backbone is found. A
    module of timm that was `resized` gets its positions interpolated."""
    own = dict(module.state_dict())
    counts = _prefix_counts(state, own)
    prefix = _best_prefix(counts, len(own), source)
    below = {name[len(prefix) :]: v for name, v in state.items() if name.startswith(prefix)}
    fitting, layer = _with_head(below, state, own)
    copies = [other for other, count in counts.items() if 2 * count >= len(own)]
    beside = [
        name
        for name in state
        if not name.startswith(prefix) and not (layer and name.startswith(f"{layer}."))
    ]
    _check_beside([n for n in beside if not _is_copy(n, copies, own)], state, own, source)
    if resized and "pos_embed" in fitting:
        fitting["pos_embed"] = _interpolated(module, fitting["pos_embed"])
    absent = [name for name in own if name not in fitting]
    foreign = [name for name in fitting if name not in own]
    shaped = [name for name in fitting if name in own and own[name].shape != fitting[name].shape]
    if absent or foreign or shaped:
        shapes = [f"{n} {list(fitting[n].shape)}, not {list(own[n].shape)}" for n in shaped]
        problems = [
            f"{len(names)} of {len(own)} weights {what} ({_few(names)})"
            for what, names in (("are missing", absent), ("have another shape", shapes))
            if names
        ]
        problems += [f"{len(foreign)} are not of it ({_few(foreign)})"] if foreign else []
        other = any("pos_embed" in name for name in shaped)
        raise DataMissing(
            source,
            f"the file does not fit {type(module).__name__}: {'; '.join(problems)}",
            "Give the weights of this architecture"
            + (", or the size they are for: size= (--size)" if other else ""),
        )
    if beside:
        log.warning(
            "%s: %d weights beside the model are not used (%s)", source, len(beside), _few(beside)
        )
    module.load_state_dict(fitting)


def _interpolated(module: Any, positions: Tensor) -> Tensor:
    from timm.layers import resample_abs_pos_embed

    prefix = 0 if getattr(module, "no_embed_class", False) else module.num_prefix_tokens
    grid = list(module.patch_embed.grid_size)
    if positions.shape[1] == grid[0] * grid[1] + prefix:
        return positions
    return resample_abs_pos_embed(positions, new_size=grid, num_prefix_tokens=prefix)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def _prefix_counts(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, int]:
    """How many names of the module each prefix gives."""
    counts: dict[str, int] = {"": 0}
    for name in state:
        parts = name.split(".")
        for level in range(len(parts)):
            if ".".join(parts[level:]) in own:
                prefix = "".join(f"{part}." for part in parts[:level])
                counts[prefix] = counts.get(prefix, 0) + 1
    return counts


def _best_prefix(counts: Mapping[str, int], size: int, source: str) -> str:
    """The prefix that gives the most names; averages before others. Two whole models that nothing
    tells apart are refused."""

    def rank(prefix: str) -> tuple[int, bool]:
        return counts[prefix], "ema" in prefix

    best = max(counts, key=lambda prefix: (*rank(prefix), -len(prefix)))
    tied = [prefix for prefix in counts if rank(prefix) == rank(best)]
    if len(tied) > 1 and 2 * counts[best] >= size:
        listed = " and ".join(f"{prefix}*" for prefix in tied)
        raise DataMissing(
            source, f"it holds several models: {listed}", "Save the weights of one of them alone"
        )
    return best


def _is_copy(name: str, prefixes: Sequence[str], own: Mapping[str, Tensor]) -> bool:
    """Whether a weight is of another version of the whole model, such as one before averaging."""
    return any(name.startswith(prefix) and name[len(prefix) :] in own for prefix in prefixes)


def _check_beside(
    beside: Sequence[str], state: Mapping[str, Tensor], own: Mapping[str, Tensor], source: str
) -> None:
    """Refuse weights beside the model that could be the head which really answers."""
    flat = [weight for name, weight in own.items() if weight.ndim == 2 and "weight" in name]
    heads = [
        name
        for name in beside
        if flat and state[name].ndim == 2 and state[name].shape[1] == flat[-1].shape[1]
        if not any(part.startswith(EXTRAS) for part in name.split("."))
    ]
    if heads:
        shapes = [f"{name} {list(state[name].shape)}" for name in heads]
        raise DataMissing(
            source,
            f"beside the model it holds what may be its head: {_few(shapes)}",
            "Build the module with this head, load the file into it and give it to sc.wrap, or save"
            " the weights of the model without it",
        )


def _with_head(
    fitting: dict[str, Tensor], state: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], str]:
    """The same with the classifier of a `Wrapper(backbone, head)`, where it alone is missing and
    one layer beside the backbone has its shapes; and what that layer is called there."""
    absent = [name for name in own if name not in fitting]
    layers = {name.rpartition(".")[0] for name in absent}
    if len(fitting) == len(state) or len(layers) != 1:
        return fitting, ""
    (layer,) = layers
    weight = own.get(f"{layer}.weight")
    beside = [
        name.removesuffix(".weight")
        for name, value in state.items()
        if weight is not None and name.endswith(".weight") and value.shape == weight.shape
    ]
    beside = [name for name in beside if all(f"{name}{n[len(layer) :]}" in state for n in absent)]
    if len(beside) != 1:
        return fitting, ""
    head = {name: state[f"{beside[0]}{name[len(layer) :]}"] for name in absent}
    return fitting | head, beside[0]
