"""A model inside of somebody's own module, alone (a Lightning module) or below a head:
`Wrapper(backbone, head)`.

Nothing is guessed: what holds a model is compared with what would be read instead (`loading.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from seecause.errors import UnsupportedModel
from seecause.models.parts import (
    Parts,
    find_parts,
    is_known,
    native_model,
    readable_pools,
    unwrapped,
)
from seecause.models.view import Kind

DEPTH = 3  # how deep a model may lie in what holds it


@dataclass(frozen=True, eq=False)
class Container:
    """A model we know inside of another module: where it is, and what lies beside it."""

    outer: nn.Module
    place: str
    inner: nn.Module
    parts: Any  # Parts | StagedParts
    rest: tuple[tuple[str, nn.Module], ...]

    def readings(self) -> Iterator[dict[str, Any]]:
        """What the answer may be: options of `wrap` for the inner model, the likeliest first."""
        parts, pools = self.parts, [None]
        tokens = isinstance(parts, Parts)
        classifies = parts.head is not None if tokens else parts.classifies
        if classifies:
            yield {}
        if tokens:
            own: list[Kind] = [parts.pool] if parts.pool else []
            pools = [*own, *(kind for kind in readable_pools(parts) if kind not in own)]
        elif classifies:  # a convolutional network is read by its own classifier
            return
        for head in self._heads():
            yield from ({"head": head, "pool": pool} for pool in pools)

    def _heads(self) -> Iterator[nn.Module]:
        """All that is beside the model, in its order; without what has no weights; the last."""
        every = [part for _, part in self.rest if callable(getattr(part, "forward", None))]
        learnt = [part for part in every if any(True for _ in part.parameters())]
        pooler: Any = getattr(unwrapped(self.inner), "pooler", None)
        first = [pooler.dense, pooler.activation] if hasattr(pooler, "dense") else []
        tried: list[list[nn.Module]] = []
        for steps in (every, learnt, learnt[-1:], [*first, *every], [*first, *learnt]):
            if any(part in learnt for part in steps) and steps not in tried:
                tried.append(steps)
                yield steps[0] if len(steps) == 1 else _sequence(steps)

    def refusal(self, reason: str) -> UnsupportedModel:
        """An error that names the inner model and the head to give."""
        heads = [name for name, part in self.rest if any(True for _ in part.parameters())]
        head = f", head=module.{heads[-1]}, pool='cls'" if heads else ""
        return UnsupportedModel(
            type(self.outer).__name__,
            f"{reason}; it holds a {type(unwrapped(self.inner)).__name__} at .{self.place}",
            f"wrap that, and what turns its features into classes: sc.wrap(module.{self.place}"
            f"{head}), where head may be any module on pooled features",
        )


def _sequence(steps: list[nn.Module]) -> nn.Module:
    head = nn.Sequential(*steps)
    head.training = steps[0].training
    return head


def container_of(module: nn.Module) -> Container | None:
    """The one model we know in `module`; None if there is none, an error if there are several."""
    inside = list(_models_in(module, "", DEPTH))
    if not inside:
        return None
    if len(inside) > 1:
        places = " and ".join(f".{place}" for place, *_ in inside[:4])
        raise UnsupportedModel(
            type(module).__name__,
            f"it holds several models, at {places}",
            f"wrap the one that answers, as in sc.wrap(module{'.' + inside[0][0]})",
        )
    ((place, inner, parts),) = inside
    return Container(module, place, inner, parts, tuple(_modules_beside(module, place)))


def _models_in(module: nn.Module, path: str, depth: int) -> Iterator[tuple[str, nn.Module, Any]]:
    for name, child in module.named_children():
        place, native = f"{path}{name}", native_model(child)[0]
        if is_known(native):
            try:
                parts = find_parts(native)
            except UnsupportedModel:
                parts = None
            if parts is not None:
                yield place, child, parts
                continue
        if depth > 1:
            yield from _models_in(child, f"{place}.", depth - 1)


def _modules_beside(module: nn.Module, place: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules that lie beside the path to `place`, in the order they were made."""
    path = place.split(".")
    for level in range(len(path)):
        start = ".".join(path[:level])
        for name, child in module.get_submodule(start).named_children():
            if name != path[level]:
                yield f"{start}.{name}".lstrip("."), child


def answer_of(module: Callable[[Tensor], Any], images: Tensor) -> Tensor | None:
    """Logits of any module, however it gives them; None if it does not take a batch of images."""
    try:
        answer: Any = module(images)
    except Exception:  # whatever a stranger's module raises
        return None
    if isinstance(answer, Mapping):
        answer = answer.get("logits")
    elif isinstance(answer, tuple | list) and answer:
        answer = answer[0]
    answer = getattr(answer, "logits", answer)
    return answer if isinstance(answer, Tensor) and answer.ndim == 2 else None
