"""A native model that answers for many rows (boxes of a detector, pixels), cut where its rows read
the picture.

    picture -> places -> rows -> answers

Any row that reads the picture is a class row: a query of a decoder, a pixel of a head. What it
reads are places, the encoder's tokens or feature maps, perhaps of several levels; `run_to` gives
them, `run_from` goes on from them (from another run's, or from a mixture), as stages do.

Nothing of the native forward is written again. It runs in a copy of the module that shares every
weight (`spliced`), in which the module at the `Seam` answers with the places that are put in, and
modules before it with stand-ins that nobody reads. A detector that chooses its queries by what it
sees (RT-DETR) keeps those of the explained picture: modules that are `held` answer as they did
there, so query k stays the same question whatever is put in.

A view answers for one row at a time: `aim` chooses it in a picture. Unaimed, a detector answers for
its surest box, a model of pixels for the mean over all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from seecause.errors import BadOption, UnknownName, UnsupportedModel
from seecause.models.base import Architecture, ImageModel
from seecause.models.dense_families import Call, DenseParts, Places, Seam, answering
from seecause.models.layout import TokenLayout
from seecause.models.parts import WrapOptions
from seecause.models.readings import RowQuestion, RowReading
from seecause.models.rows import Aim

MOST_STRIDE = 32  # pixels of a cell, where levels can be chosen from


@dataclass(eq=False, kw_only=True, repr=False)
class DenseModel(ImageModel):
    """A view of a native detector or model of pixels. `model(images)` gives the answers of the row
    that it is aimed at, [B, C], through the native modules."""

    architecture: ClassVar[Architecture] = "dense"

    seam: Seam
    reading: RowReading
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # beside pictures, [1, ..] each
    question: RowQuestion | None = None
    held: Mapping[str, Any] = field(default_factory=dict)  # outputs in the explained picture's run

    @property
    def aimed(self) -> bool:
        return self.question is not None

    @property
    def n_classes(self) -> int:
        """Of a row: a blank of the usual size cannot be asked, a region is one of its picture."""
        return super().n_classes if self.question is None else self.question.count

    @property
    def cells(self) -> str:
        """The one stage that can be patched."""
        return self.seam.at

    @property
    def readout_name(self) -> str:
        return "a row" if self.question is None else self.question.name

    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images [B, 3, H, W] -> answers [B, C] of the row."""
        with self.settled():
            self.check(images)
            if _alone(images):
                return self._read(self.outputs(images.expand(2, -1, -1, -1)))[:1]
            return self._read(self.outputs(images))

    def outputs(self, images: Tensor) -> Any:
        """What the native module answers to images; what is held stays so."""
        held = {path: answering(copies_of(value, len(images))) for path, value in self.held.items()}
        return self._native(images, held)

    def run_to(self, stage: str, images: Tensor) -> Places:
        """Images -> places that rows read."""
        self.after(stage)
        return self.seam.take(self._record(images, (stage,))[1][stage], _size(images))

    def run_from(self, stage: str, places: Places) -> Tensor:
        """Places -> answers of the row: only what reads them runs."""
        self.after(stage)
        if _alone(places):
            return self._read(self.outputs_from(places.repeated(2)))[:1]
        return self._read(self.outputs_from(places))

    def outputs_from(self, places: Places) -> Any:
        """Native outputs of rows that read these places."""
        count, standing = len(places), self._stand_ins(places.size)
        like = places.maps[0]
        images = like.new_zeros(1, len(self.preprocess.mean), *places.size)
        answers = {path: copies_of(standing[path].output, count) for path in self.seam.before}
        answers |= {path: copies_of(value, count) for path, value in self.held.items()}
        forwards = {path: answering(answer) for path, answer in answers.items()}
        at = self.seam.at
        forwards[at] = self.seam.forward(self.module.get_submodule(at), standing[at], places)
        return self._native(images.expand(count, -1, -1, -1), forwards)

    def after(self, stage: str) -> int:
        """How many stages have run when `stage` is done."""
        if stage != self.seam.at:
            raise UnknownName("stage", stage, [self.seam.at])
        return 1

    def forward_bytes(self, layout: TokenLayout, after: str | None = None) -> int:
        """A working estimate: rows hold a few copies of the places that they read."""
        size = (layout.grid[0] * self.patch[0], layout.grid[1] * self.patch[1])
        read = 24 * sum(level.numel() for level in self._blank_places(size).maps)
        whole = 0 if after else 64 * size[0] * size[1]
        return (read + whole) * torch.finfo(self.dtype).bits // 8

    @torch.no_grad()
    def aim(self, image: Tensor, spec: Any = None) -> Aim:
        """The question that a target asks about one picture [1, 3, H, W] (rows.py), as a view that
        answers it alone."""
        with self.settled():
            self.check(image)
            inputs = {**self.inputs, **self.reading.prompt(self, spec)}
            asked = replace(self, inputs=inputs, memo={})
            outputs, calls = asked._record(image, self.seam.held)
            question = self.reading.ask(self, outputs, spec, _size(image))
        held = {path: call.output for path, call in calls.items()}
        aimed = replace(
            asked,
            question=question,
            held=held,
            classes=question.classes,
            values=question.values,
            sigmoid=self.sigmoid and not question.values,
            memo={},
        )
        value = float(question.read(outputs)[0, question.target])
        return Aim(aimed, question.target, question.name, question.pixels, value, question.boxes)

    def _read(self, outputs: Any) -> Tensor:
        return (self.reading.unaimed if self.question is None else self.question.read)(outputs)

    def _native(self, images: Tensor, forwards: Mapping[str, Callable[..., Any]]) -> Any:
        named = {name: copies_of(value, len(images)) for name, value in self.inputs.items()}
        attached = Attached() if torch.is_grad_enabled() else nullcontext()
        # Mask2Former draws a number for every layer that training might drop, in eval mode too
        with self.settled(), torch.random.fork_rng(devices=[]), attached:
            module = spliced(self.module, forwards) if forwards else self.module
            return module(pixel_values=images, **named)

    def _record(self, images: Tensor, paths: Sequence[str]) -> tuple[Any, dict[str, Call]]:
        """Native outputs, and what modules were given and gave on the way."""
        calls: dict[str, Call] = {}

        def listening(path: str) -> Callable[..., Any]:
            native = self.module.get_submodule(path)

            def forward(*args: Any, **named: Any) -> Any:
                output = native(*args, **named)
                # others may put other things into the same output later (SAM 2)
                calls.setdefault(path, Call(copies_of(output, 1), named))
                return output

            return forward

        outputs = self._native(images, {path: listening(path) for path in paths})
        if absent := set(paths) - set(calls):
            raise UnsupportedModel(self.family, f"{', '.join(sorted(absent))} did not run in it")
        return outputs, calls

    def _blank_places(self, size: tuple[int, int]) -> Places:
        """What rows read of one empty picture."""
        return self.seam.take(self._stand_ins(size)[self.seam.at], size)

    def _stand_ins(self, size: tuple[int, int]) -> dict[str, Call]:
        """What the modules up to the seam give for one empty picture: shapes, masks and grids."""
        key = ("stand-ins", size)
        if key not in self.memo:
            with torch.no_grad(), torch.inference_mode(False):
                paths = (*self.seam.before, self.seam.at)
                self.memo[key] = self._record(self.zeros(size), paths)[1]
        return self.memo[key]


def _alone(batch: Sized) -> bool:
    """Whether a gradient would pass a batch of one. Then torch's batch norm gives a wrong one in
    eval mode, where what follows flattens and transposes its map (2.12, on a CPU): two are run."""
    return torch.is_grad_enabled() and len(batch) == 1


def _size(images: Tensor) -> tuple[int, int]:
    return images.shape[-2], images.shape[-1]


@torch.no_grad()
def assemble_dense(module: nn.Module, parts: DenseParts, options: WrapOptions) -> DenseModel:
    """A view from what the adapter found and what the caller adds."""
    for name in ("head", "pool", "sigmoid"):
        if getattr(options, name) is not None:
            reads = f"None: {type(module).__name__} reads its own rows"
            raise BadOption(name, getattr(options, name), reads)
    steps = options.preprocess_for(parts, type(module).__name__)
    model = DenseModel(
        module=module,
        name=options.name,
        family=parts.family,
        preprocess=steps,
        layout_at=TokenLayout.of_cells((1, 1)),
        patch=(1, 1),
        native=lambda images: model.reading.unaimed(model._native(images, {})),
        classes=options.class_names(parts),
        sigmoid=parts.reading.sigmoid,
        values=parts.reading.values,
        fixed_size=parts.fixed_size,
        seam=parts.seam,
        reading=parts.reading,
        inputs=parts.inputs,
    )
    grids = [_size(level) for level in model._blank_places(steps.size).maps]
    model.patch = _cell(steps.size, grids)
    model.layout_at = TokenLayout.of_cells(model.patch)
    return model


def _cell(size: tuple[int, int], grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Pixels of one cell: of the coarsest level that tiles the picture, up to 32 pixels."""
    tiling = [grid for grid in grids if not size[0] % grid[0] and not size[1] % grid[1]]
    cells = [(size[0] // h, size[1] // w) for h, w in tiling if size[0] // h == size[1] // w]
    if not cells:
        raise BadOption("size", size, f"one that square cells tile; rows read {grids[0]} places")
    return max([cell for cell in cells if max(cell) <= MOST_STRIDE] or [min(cells)])


def spliced(module: nn.Module, forwards: Mapping[str, Callable[..., Any]]) -> nn.Module:
    """A copy of `module` that shares every weight, in which modules run other functions. The module
    itself stays as it is, so that threads may share it."""
    top = _shell(module)
    for path, forward in forwards.items():
        *way, last = path.split(".")
        here = top
        for name in way:
            inner = _shell(here._modules[name])
            here._modules[name] = inner
            here = inner
        leaf = _shell(here._modules[last])
        leaf.forward = forward
        here._modules[last] = leaf
    return top


def _shell(module: nn.Module | None) -> nn.Module:
    assert module is not None
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    return shell


class Attached(TorchFunctionMode):
    """In it, `detach` cuts nothing. Detectors detach the boxes that one layer hands to the next,
    which steadies their training; the answer hangs on them all the same."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.detach else func(*args, **(kwargs or {}))


def copies_of(value: Any, count: int) -> Any:
    """What a module gave for one picture, as for `count` of them; nothing is copied."""

    def copies(x: Tensor) -> Tensor:
        return x.expand(count, *x.shape[1:]) if x.ndim and len(x) == 1 else x

    return tree_map_only(Tensor, copies, value)
