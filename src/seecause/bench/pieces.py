"""Audits, scores of heads and discoveries in pieces that are kept, and that workers may do.

What these jobs do to many pictures goes through `in_pieces`. Here every piece is named by a digest
of its function, the weights, its pictures and options, our code and the libraries: a finished one
is read from the store, the others are done by a pool of workers. Models travel whole, once to each
worker.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from safetensors.torch import load
from torch import Tensor

from seecause._pieces import Ended, Piece, Tensors, Work, pieces_run_by
from seecause._software import (
    arithmetic,
    model_code_digest,
    plugin_digest,
    set_arithmetic,
    versions,
)
from seecause.bench.shard_files import EncodedShard, ShardResult, encoded
from seecause.bench.store import ShardStore
from seecause.bench.workers import (
    SerialPool,
    WorkerPool,
    Workers,
    WorkersFailed,
    open_pool,
    record_result,
)
from seecause.engine.chunks import budget, memory
from seecause.errors import BadOption, MissingExtra, NotDefined, UnknownName
from seecause.files import digest, place
from seecause.models.base import ImageModel

MODELS = 3  # that a worker holds: the one that is judged, an eye, and one that was mended


@contextmanager
def resumable(
    folder: Path | str | None, command: str, workers: Workers | int | None = None
) -> Iterator[None]:
    """Inside the block long work is kept in `folder`, piece by piece, and done by `workers`.

    Killed, the same call goes on where it was. `folder` is a path or a URL, or None to keep
    nothing; `command` names the job, so that no other one is kept in its folder.

        with sc.bench.resumable("audit.work", "audit", sc.bench.Workers(ray="auto")):
            result = sc.audit(model, data, eye=eye)
    """
    store = None if folder is None else ShardStore(place(folder), f"{command} --work")
    if store is not None:
        store.check()
    with ExitStack() as stack, pieces_run_by(_PieceRunner(store, Workers.of(workers), stack)):
        yield


class _PieceRunner:
    """Reads the pieces that are finished, and has the others done."""

    def __init__(self, store: ShardStore | None, workers: Workers, stack: ExitStack):
        self.store, self.workers, self.stack = store, workers, stack
        self.pool: SerialPool | WorkerPool | None = None
        self.device = ""  # of workers elsewhere: that of the first model, for all
        self.begun = False
        self.shared_models: dict[str, Callable[[], bytes]] = {}  # by their digest

    def __call__(
        self, work: Work, model: Any, pieces: Iterable[Piece], ended: Ended
    ) -> list[Tensors]:
        results: dict[int, Tensors] = {}
        numbered = enumerate(pieces)
        pool = self._pool(model)
        device, sums = self.device or model.device.type, _arithmetic_of(self.workers)
        keys = _PieceKeys.of(work, model, device, sums)

        def next_item() -> _PieceItem | None:
            for number, piece in numbered:
                key = keys.key(piece)
                kept = None if self.store is None or not key else self.store.read(key)
                if kept is None and key:
                    return self._item(number, key, work, model, piece)
                results[number] = (
                    work(model, **piece) if kept is None else _in_order(kept.tensors, kept.metadata)
                )
                ended(number, results[number])
            return None

        for item, answer in pool.run(next_item):
            if answer.failure:
                raise WorkersFailed(answer.failure)
            if self.store is not None:
                record_result(self.store, item.key, answer)
            tensors = load(answer.value.contents["safetensors"])
            results[item.number] = _in_order(tensors, answer.value.metadata)
            ended(item.number, results[item.number])
        return [results[number] for number in sorted(results)]

    def _pool(self, model: Any) -> SerialPool | WorkerPool:
        """The same for all models, on one kind of device."""
        if self.pool is None:
            if self.workers.elsewhere:
                self.device = _device_of(self.workers, model)
            job = PieceJob(self.device or model.device.type, _arithmetic_of(self.workers))
            pool = open_pool(job, self.workers, perform=_perform_here)
            self.pool = self.stack.enter_context(pool)
        return self.pool

    def _begin(self) -> None:
        """With the first piece that is to be done the store is begun: a command that is refused
        leaves nothing behind."""
        if self.store is not None and not self.begun:
            self.stack.enter_context(self.store.locked())
            self.store.write_manifest({"versions": versions()})
        self.begun = True

    def _item(self, number: int, key: str, work: Work, model: Any, piece: Piece) -> _PieceItem:
        assert self.pool is not None
        limit = memory().limit
        if isinstance(self.pool, SerialPool):
            self._begin()
            return _PieceItem(number, key, work, piece, limit, model=model)
        model_id = digest(*_spelled(_state(model)))
        if model_id not in self.shared_models:
            self.shared_models[model_id] = self.pool.share(pack_model(model))
        self._begin()
        there = {name: _on_cpu(value) for name, value in piece.items()}
        fetch = self.shared_models[model_id]
        return _PieceItem(number, key, work, there, limit, model_id=model_id, fetch_model=fetch)


@dataclass(frozen=True, eq=False)
class _PieceItem:
    """A piece on its way to a worker: with its model, or with how that is fetched."""

    number: int
    key: str
    work: Work
    piece: Piece
    limit: int | None  # bytes of activations
    model: Any = None
    model_id: str = ""
    fetch_model: Callable[[], bytes] | None = None


@dataclass(frozen=True)
class PieceJob:
    """Pieces of anything."""

    device: str
    arithmetic: Sequence[Any] = field(default_factory=arithmetic)
    versions: Mapping[str, str] = field(default_factory=versions)
    # none: an error ends the job, as it would without workers
    failures: ClassVar[tuple[type[Exception], ...]] = ()

    @property
    def threads(self) -> int:
        return self.arithmetic[0]

    def open(self) -> Callable[[_PieceItem], EncodedShard]:
        models: OrderedDict[str, Any] = OrderedDict()
        set_arithmetic(self.arithmetic)

        def perform(item: _PieceItem) -> EncodedShard:
            if item.model_id not in models:
                assert item.fetch_model is not None
                models[item.model_id] = _unpack_model(item.fetch_model(), self.device)
                if len(models) > MODELS:
                    models.popitem(last=False)
            return _perform_here(dataclasses.replace(item, model=models[item.model_id]))

        return perform


def _arithmetic_of(workers: Workers) -> list[Any]:
    """Of this process; workers elsewhere have one thread each, or as many as the cores that are
    set aside for them. How sums are split changes last bits, so it is part of a piece's name."""
    threads, *rest = arithmetic()
    if workers.elsewhere:
        threads = max(1, int(workers.cpus or 1))
    return [threads, *rest]


def _device_of(workers: Workers, model: Any) -> str:
    """Where workers elsewhere run: where the model is, unless the cluster is asked for GPUs, or
    for none."""
    if workers.gpus is None:
        return model.device.type
    return "cuda" if workers.gpus else "cpu"


def pack_model(model: Any) -> bytes:
    """A model that is to travel, without what it keeps between calls; its gates stay on."""
    if isinstance(model, ImageModel):
        model = copy.copy(model)
        model.memo = {}
    cloudpickle, content = _cloudpickle(), io.BytesIO()

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            name = _global_name(obj) if _is_context(obj) else None
            return super().reducer_override(obj) if name is None else (_global, name)

    try:
        Pickler(content).dump(model)
    except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as failure:
        raise BadOption(
            "workers",
            getattr(model, "name", type(model).__name__),
            "a model that can be sent to other processes; this one works without --workers and"
            f" --ray ({' '.join(str(failure).split())})",
        ) from None
    return content.getvalue()


def _is_context(value: Any) -> bool:
    """A context variable, or a library's object around one (hooks of transformers ask it): it
    cannot be pickled, and would be another one elsewhere."""
    if isinstance(value, type | ModuleType):
        return False
    parts = getattr(value, "__dict__", {}).values()
    return isinstance(value, ContextVar) or any(isinstance(part, ContextVar) for part in parts)


def _global_name(value: Any) -> tuple[str, str] | None:
    """The module and the name by which a worker has the same object."""
    for module, content in list(sys.modules.items()):
        for name, known in list(getattr(content, "__dict__", {}).items()):
            if known is value and module != "__main__":
                return module, name
    return None


def _global(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _cloudpickle() -> Any:
    """Views hold functions that pickle refuses."""
    try:
        import cloudpickle
    except ImportError:
        raise MissingExtra("cloudpickle", "cluster") from None
    return cloudpickle


def _unpack_model(content: bytes, device: str) -> Any:
    """A model that travelled, on the device of this worker."""
    model = _cloudpickle().loads(content)
    return model if model.device.type == torch.device(device).type else model.to(device)


def _perform_here(item: _PieceItem) -> EncodedShard:
    with budget(item.limit):
        tensors = item.work(item.model, **item.piece)
    return encoded(ShardResult(tensors=tensors, metadata={"names": list(tensors)}))


def _in_order(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Tensors:
    """As the work gave them: safetensors forgets the order."""
    return {name: tensors[name] for name in metadata["names"]}


@dataclass(frozen=True)
class _PieceKeys:
    """What all pieces of a call have in common, and what decides them."""

    text: str
    architecture: Any

    @classmethod
    def of(cls, work: Work, model: Any, device: str, sums: Sequence[Any]) -> _PieceKeys:
        about = [f"{work.__module__}.{work.__qualname__}", plugin_digest(work)]
        about.append(model_code_digest(model))
        about += [sorted(versions().items()), sums, device, memory().limit]
        state = digest(*_spelled(_state(model)), length=64)
        return cls(repr([*about, state]), getattr(model, "architecture", None))

    def key(self, piece: Piece) -> str:
        """Empty where a piece holds a function: such work is done here and not kept."""
        try:
            parts = list(_spelled(dict(piece)))
        except TypeError:
            return ""
        return digest(self.text, self._method(piece), *parts, length=32)

    def _method(self, piece: Piece) -> str:
        """The code of a plug-in's method, where the piece names one."""
        if "method" not in piece:
            return ""
        from seecause.attribution.registry import find

        try:
            return plugin_digest(find(piece["method"], self.architecture).run)
        except (UnknownName, NotDefined):  # it has a list of its own
            return ""


def _state(model: Any) -> list[Any]:
    """What tells a model from others with the same weights, too."""
    preprocess = getattr(model, "preprocess", None)
    frame = None if preprocess is None else preprocess.record()
    return [model.fingerprint(), str(model.dtype), frame]


def _spelled(value: Any) -> Iterator[bytes | str]:
    """Everything a value holds, in one order."""
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {list(value.shape)}"
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__qualname__
        for part in dataclasses.fields(value):
            yield part.name
            yield from _spelled(getattr(value, part.name))
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}"
        for name in sorted(value, key=repr):
            yield f"key {name!r}"
            yield from _spelled(value[name])
    elif isinstance(value, list | tuple):
        yield f"list {len(value)}"
        for part in value:
            yield from _spelled(part)
    elif value is None or isinstance(value, str | int | float | bool | Path):
        yield repr(value)
    else:
        raise TypeError(type(value).__name__)


def _on_cpu(value: Any) -> Any:
    """The same with tensors that can travel."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {
            part.name: _on_cpu(getattr(value, part.name)) for part in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **parts)
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(part) for part in value)
    return value
