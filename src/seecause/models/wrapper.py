"""Views of a module of your own that holds a vision transformer of a library.

    class Mine(nn.Module):                        normalisation, pooling, an MLP, a temperature ...:
        def forward(self, images):                anything around the transformer is native code
            return self.head(self.backbone((images - 0.5) / 0.5)) / 2

Nothing of `forward` is written again. It runs in a shallow copy that shares every weight
(`spliced`), in which blocks do something else:

    embed      the first block stops the run: what it was given are the tokens
    readout    blocks return their input, and the last one (or the norm after it) returns the given
               features as tokens; the output is logits

Which tokens are pooled is tried: the class token, the mean of the patches or of all tokens, both.
The first that gives the module's own output is taken. Probabilities become logits by a logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from seecause.errors import BadOption, SeecauseError, UnsupportedModel
from seecause.models.block import Named, Size, same, shell, spliced
from seecause.models.parts import COMPILED, Parts, find_library_parts, native_model, unwrapped
from seecause.models.preprocess import Preprocess
from seecause.models.view import Kind, Readout

NEAR = 1e-3  # of the largest value; the verified wrap is stricter
PIXEL = 8.0  # deviations of channels above this are of pixels 0-255
POOLS: tuple[tuple[Kind, bool], ...] = (  # and whether the mean is also over special tokens
    *(("cls", False), ("mean", False), ("mean", True)),
    *(("cls+mean", False), ("cls+mean", True)),
)


class _Reached(Exception):
    """Ends a run at the first block; its argument is what the block was given."""


def wrapper_parts(module: nn.Module, output: int | str | None = None) -> Parts | None:
    """The parts of the one transformer inside of `module`, with its own way to logits around them;
    None if there is none."""
    found = list(_inside(module))
    if len(found) > 1:
        listed = " and ".join(path for path, _ in found)
        remedy = f"wrap one of them: sc.wrap(module.{found[0][0]}, head=..., pool='cls')"
        reason = f"it holds {len(found)} models ({listed})"
        raise UnsupportedModel(type(module).__name__, reason, remedy)
    return _Wrapper(module, *found[0], output).read() if found else None


def _inside(module: nn.Module, path: str = "") -> Iterator[tuple[str, Parts]]:
    """Paths and parts of the outermost modules that an adapter knows."""
    for name, child in module.named_children():
        parts = None
        with suppress(SeecauseError, AttributeError, TypeError):  # a layer of a library
            parts = find_library_parts(native_model(child)[0])
        if isinstance(parts, Parts):
            yield path + name, parts
        else:
            yield from _inside(child, f"{path}{name}.")


@dataclass(eq=False)
class _Wrapper:
    """A module of a user's own, and the parts of the transformer in it."""

    module: nn.Module
    path: str
    parts: Parts
    output: int | str | None
    cut: str = ""  # the module whose output is pooled: the norm after the last block, or that block
    seen: Named = field(default_factory=dict)  # of the last native run
    logarithm: bool = False
    packed: bool = False  # whether blocks return a tuple

    def refuse(self, reason: str, remedy: str = "") -> UnsupportedModel:
        return UnsupportedModel(type(self.module).__name__, reason, remedy)

    @torch.no_grad()
    def read(self) -> Parts:
        """Parts with the module's own readout; raises if none of the poolings gives its output."""
        parts = self.parts
        size = parts.size or cast(Preprocess, parts.preprocess).size
        self.paths = {id(part): path for path, part in self.module.named_modules()}
        self.blocks = [self.paths[id(block.native)] for block in parts.blocks]
        like, draw = next(self.module.parameters()), torch.Generator().manual_seed(0)
        images = torch.rand(4, 3, *size, generator=draw).to(like)
        images[2], images[3] = 0, 1  # show what the module does to pixels
        self.blank, layout = images[2:3], parts.layout_at(*size)
        native = self.listen(images)
        self.logarithm = bool((native >= 0).all() and ((native.sum(dim=-1) - 1).abs() < NEAR).all())
        native = self.logits(native)
        for kind, over_prefix in POOLS if layout.class_index is not None else POOLS[1:3]:
            head = partial(self.head, kind)
            try:
                read = Readout(kind, head, over_prefix=over_prefix)(self.seen["tokens"], layout)
                if bool((read - native).abs().max() <= NEAR * native.abs().max()):
                    break
            except RuntimeError:  # features of another width
                continue
        else:
            reason = f"after {self.path} it reads something else than the class token or a mean"
            raise self.refuse(reason, "give it a method view_parts, as in the page on extending")
        linear = [n for n, out in self.seen["linear"].items() if torch.equal(out, native)]
        return replace(
            parts,
            family=f"{parts.family} in {type(self.module).__name__}",
            embed=self.embed,
            norm=same if self.cut == self.blocks[-1] else self.module.get_submodule(self.cut),
            native_tokens=lambda images: (self.listen(images), self.seen["tokens"])[1],
            pool=kind,
            over_prefix=over_prefix,
            head=head,
            native_logits=lambda images: self.logits(self.module(images)),
            after_pool=same,
            native_pooled=None,
            latent=None,
            size=size,
            preprocess=self.preprocess(parts.preprocess, size),
            classes=parts.classes if len(parts.classes) == native.shape[-1] else (),
            last="".join(linear[:1]),
        )

    def listen(self, images: Tensor) -> Tensor:
        """One native run: its output. Hooks see the tokens that are pooled, the images that reach
        the transformer, and linear layers that may give the logits."""
        seen: Named = {"linear": {}}
        self.seen = seen

        def hook(part: nn.Module, args: Any, output: Any) -> None:
            given, path = (*args, None)[0], self.paths[id(part)]
            if path == self.blocks[-1]:
                self.cut, self.packed = path, isinstance(output, tuple)
                seen["tokens"] = output[0] if self.packed else output
            elif isinstance(part, nn.Conv2d):
                seen.setdefault("pixels", given)
            elif type(part) is nn.Linear and output.ndim == 2 and part.bias is not None:
                seen["linear"][path] = output
            elif self.cut == self.blocks[-1] and given is seen.get("tokens", ""):
                self.cut, seen["tokens"] = path, output

        self.cut = ""
        handles = [part.register_forward_hook(hook) for part in self.module.modules()]
        try:
            native = self.select(self.module(images))
        finally:
            for handle in handles:
                handle.remove()
        if not self.cut:
            raise self.refuse(f"its forward does not run {self.path}", "give the module that does")
        return native

    def select(self, output: Any) -> Tensor:
        """The logits among what the module returns."""
        output = getattr(output, "logits", output)
        if not isinstance(output, Tensor):
            named = dict(output if isinstance(output, Mapping) else enumerate(output))
            if self.output not in named:
                first, *others = named
                expected = f"one of the module's outputs: output={first!r} (--input output={first})"
                raise BadOption("output", self.output, f"{expected}, or of {others}")
            output = named[self.output]
        if output.ndim != 2:
            raise self.refuse(f"its output is {list(output.shape)}, not a row of logits an image")
        return output

    def logits(self, output: Any) -> Tensor:
        """Logits of what the module returns."""
        logits = self.select(output)
        return logits.clamp_min(torch.finfo(logits.dtype).tiny).log() if self.logarithm else logits

    def embed(self, images: Tensor) -> Tensor:
        """The tokens that enter the first block."""

        def stop(*args: Any, **named: Any) -> Any:
            raise _Reached((*args, *named.values())[0])

        try:
            spliced(self.module, {self.blocks[0]: stop})(images)
        except _Reached as reached:
            return reached.args[0]
        raise self.refuse(f"its forward does not run {self.blocks[0]}")

    def head(self, kind: Kind, pooled: Tensor) -> Tensor:
        """Logits [..., C] of pooled features [..., P], by the module's own code."""
        rows = pooled.flatten(0, -2)[:, None]
        prefix = self.parts.layout_at(*self.blank.shape[2:]).prefix
        first, rest = rows.chunk(2, dim=-1) if kind == "cls+mean" else (rows, rows)
        tokens = torch.cat([first.expand(-1, prefix, -1), rest], dim=1)

        def passing(*args: Any, **named: Any) -> Any:
            states = (*args, *named.values())[0]
            return (states,) if self.packed else states

        forwards: dict[str, Callable[..., Any]] = dict.fromkeys(self.blocks, passing)
        whole = self.cut == self.blocks[-1] and self.packed
        forwards[self.cut] = lambda *args, **named: (tokens,) if whole else tokens
        logits = self.logits(spliced(self.module, forwards)(self.blank.to(pooled)))
        return logits.unflatten(0, pooled.shape[:-1])

    def preprocess(self, known: Preprocess | None, size: Size) -> Preprocess | None:
        """The preprocessing around a module that normalises by itself: raw pixels, in [0, 1] or
        0-255. Otherwise what is `known` of the transformer."""
        if "pixels" not in self.seen:
            return known
        black, white = (image.flatten(1).mean(dim=1) for image in self.seen["pixels"][2:])
        scale = white - black  # one over the deviation that the module divides by
        if torch.allclose(torch.cat([scale - 1, black]), black.new_zeros(()), atol=NEAR):
            return known
        std = (1 / 255 if float(scale.min()) < 1 / PIXEL else 1.0,) * 3
        return replace(known or Preprocess(size, std, std), mean=(0.0,) * 3, std=std)


def uncompiled(module: nn.Module) -> nn.Module:
    """A copy that shares every weight, with eager modules in place of compiled ones below it."""
    top = shell(module)
    for name, child in module._modules.items():
        if child is not None:
            eager = unwrapped(child)
            inside = any(type(part).__name__ == COMPILED for part in eager.modules())
            top._modules[name] = uncompiled(eager) if inside else eager
    return top
