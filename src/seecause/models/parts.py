"""The named parts of a native module, and how a view is assembled from them.

The adapter is chosen by the package that defines a class, so that no other library is imported. A
module that knows its own parts brings its adapter with it: a method `view_parts() -> Parts`. Other
installed packages add families by the entry point `seecause.models`: an object with one or both of
    find_parts(module) -> Parts | None                the adapter; None for modules of other kinds
    open_model(name, *, weights=None) -> nn.Module    the module of `sc.load("ENTRY:NAME")`

A backbone without a classifier takes a linear head or a `CosineHead`. Zero-shot heads are class
names in prompt templates, read once by a native text tower:

    logits = exp(scale) * cos(image, text) (+ bias)

Each class is the mean of its prompts' unit embeddings, brought back to unit length. The matrix is
made when the model is wrapped: wrap again after changing the text tower.
"""

from __future__ import annotations

import copy
import importlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.errors import BadOption, UnsupportedModel
from seecause.models.block import Block, Fn, Named, Size, TokenLayout, chain, same
from seecause.models.preprocess import Preprocess, from_timm
from seecause.models.view import Kind, LatentPool, Readout, VisionModel
from seecause.registry import plugins

if TYPE_CHECKING:
    from seecause.models.dense import DenseParts
    from seecause.models.staged import StagedParts

ADAPTERS = {
    "timm": "seecause.models.timm",
    "transformers": "seecause.models.transformers",
    "torchvision": "seecause.models.multihead",
    "open_clip": "seecause.models.multihead",
}
COMPILED = "OptimizedModule"  # what torch.compile returns
WITH_TEXT = ("transformers", "open_clip")  # libraries whose models may have a text tower
AnyParts: TypeAlias = "Parts | StagedParts | DenseParts"
TABLES = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
TEMPLATES = ("a photo of a {}.",)


class CosineHead(nn.Module):
    """`scale * cos(pooled, row) (+ bias)` for each row of `matrix` [C, D]: embeddings of texts,
    prototypes or reference images.

    `scale` is a number, or a native parameter that holds its logarithm: then the head was made by
    a text tower.
    """

    matrix: Tensor

    def __init__(
        self,
        matrix: Tensor,
        *,
        scale: float | nn.Parameter = 100.0,
        bias: nn.Parameter | None = None,
    ):
        super().__init__()
        self.register_buffer("matrix", F.normalize(matrix.detach(), dim=-1))
        self.scale, self.bias = scale, bias

    @property
    def from_text(self) -> bool:
        """Whether a text tower made this head."""
        return isinstance(self.scale, nn.Parameter)

    @property
    def factor(self) -> float | Tensor:
        """The factor of the cosines."""
        return self.scale.exp() if isinstance(self.scale, nn.Parameter) else self.scale

    def forward(self, pooled: Tensor) -> Tensor:
        logits = self.factor * F.normalize(pooled, dim=-1) @ self.matrix.T
        return logits if self.bias is None else logits + self.bias


class UnitLinear(nn.Linear):
    """A linear layer on features of unit length: a repaired zero-shot head."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.normalize(input, dim=-1))


def head_for(head: nn.Module | Tensor, like: Tensor) -> nn.Module:
    """A copy of the caller's head, a module or a matrix [C, D], on the device and in the dtype of
    `like`."""
    if isinstance(head, Tensor):
        if head.ndim != 2:
            raise BadOption("head", f"tensor {list(head.shape)}", "a matrix [classes, width]")
        layer = nn.Linear(head.shape[1], head.shape[0], bias=False, dtype=head.dtype)
        layer.load_state_dict({"weight": head})
        head = layer.eval().requires_grad_(False)
    elif all((t.device, t.dtype) == (like.device, like.dtype) for t in head.state_dict().values()):
        return head
    return copy.deepcopy(head).to(like.device, like.dtype)


@dataclass(frozen=True)
class TextInput:
    """Class names, prompt templates with `{}` for the name, and the tokenizer of the text
    tower."""

    classes: tuple[str, ...]
    templates: tuple[str, ...]
    tokenize: Callable[..., Any]

    def __post_init__(self) -> None:
        for template in self.templates:
            if "{}" not in template:
                raise BadOption("templates", template, "texts with {} where the class name goes")


@dataclass
class Parts:
    """The named pieces of one native backbone. `head` and `native_logits` are None for a bare
    backbone."""

    family: str
    embed: Fn
    layout_at: Callable[[int, int], TokenLayout]
    blocks: list[Block]
    norm: Fn  # final norm on rows
    patch: Size
    native_tokens: Fn  # the module's own, after `norm`: [B, T, D]
    preprocess: Preprocess | None = None
    pool: Kind | None = None  # the module's own pooling
    head: Fn | None = None  # pooled -> logits
    native_logits: Fn | None = None
    # what the module does between pooling and classifier; stays in front of a given head
    after_pool: Fn = same
    # the module's own pooled features, after `after_pool`, for its own pooling
    native_pooled: Fn | None = None
    latent: LatentPool | None = None
    over_prefix: bool = False
    classes: Sequence[str] = ()
    sigmoid: bool = False
    fixed_size: bool = True
    size: Size | None = None
    extra: nn.Module | None = None
    # of a module around a transformer (wrapper.py): the path of the linear layer that gives logits
    last: str | None = None
    facts: Fn | None = None  # facts about tokens (block.py)
    # completes a partial `Preprocess`; used by video models (`Film` in preprocess.py)
    adapt_preprocess: Callable[[Preprocess], Preprocess] = lambda steps: steps

    def add_text(
        self,
        module: Any,
        text: TextInput,
        *,
        encode: Callable[[list[str]], Tensor],
        embed: Fn,
        project: Fn = same,
    ) -> None:
        """The zero-shot head of a module with two towers: `encode` reads prompts, `embed` gives
        embeddings of images, `project` brings pooled tokens there."""
        matrix = text_matrix(encode, text.classes, text.templates)
        bias = getattr(module, "logit_bias", None)
        head = CosineHead(matrix, scale=module.logit_scale, bias=bias)
        self.extra, self.head = head, head if project is same else chain(project, head)
        self.native_logits = lambda images: head(embed(images))
        self.classes, self.sigmoid = text.classes, head.bias is not None

    def assemble(self, module: nn.Module, options: WrapOptions) -> VisionModel:
        """A view of these parts, with the options of the caller."""
        steps = self.adapt_preprocess(options.preprocess_for(self, type(module).__name__))
        kind, like = self._pool_for(module, options), next(module.parameters())
        extra = self.extra if options.head is None else head_for(options.head, like)
        if options.head is None and extra is not None:
            extra.to(like.device, like.dtype).eval()
        readout = Readout(
            kind=kind,
            head=(self.head or same)
            if options.head is None
            else chain(self.after_pool, cast(Fn, extra)),
            norm=self.norm,
            over_prefix=self.over_prefix,
            latent=self.latent if kind == "latent" else None,
        )
        native = self.native_logits
        if options.head is not None and self.native_pooled is not None and kind == self.pool:
            native = chain(self.native_pooled, cast(Fn, extra))
        elif options.head is not None or native is None:
            native = partial(self._native, replace(readout, norm=same))
        return VisionModel(
            module=module,
            name=options.name,
            family=self.family,
            embed=self.embed,
            layout_at=self.layout_at,
            blocks=self.blocks,
            readout=readout,
            preprocess=steps,
            patch=self.patch,
            native=native,
            classes=options.class_names(self),
            sigmoid=self.sigmoid if options.sigmoid is None else options.sigmoid,
            fixed_size=self.fixed_size,
            extra=extra,
            facts=self.facts,
            last=self.last,
            output=options.output,
        )

    def _native(self, readout: Readout, images: Tensor) -> Tensor:
        """Logits of a readout without norm on the module's own tokens."""
        layout = self.layout_at(images.shape[-2], images.shape[-1])
        return readout(self.native_tokens(images), layout)

    def _pool_for(self, module: nn.Module, options: WrapOptions) -> Kind:
        """The pooling of tokens; raises if this backbone does not support it."""
        if options.head is None and self.head is None:
            raise UnsupportedModel(
                type(module).__name__,
                "it has no classifier",
                "pass head= (a matrix [classes, width] or a module)",
            )
        kind, layout = options.pool or self.pool, self.layout_at(*(self.size or self.patch))
        needs: dict[Kind, Any] = {
            "cls": layout.class_index,
            "cls+dist": layout.distill_index,
            "mean": layout,
            "cls+mean": layout.class_index,
            "latent": self.latent,
        }
        readable = [known for known, part in needs.items() if part is not None]
        if options.head is None and self.pool is not None:
            readable = [self.pool]  # the module's own classifier reads one pooling
        if kind is None or kind not in readable:
            how = f"{' or '.join(readable)}, the pools of this model's tokens"
            raise BadOption("pool", kind, f"{how}; other pools need head=")
        return kind


@dataclass(frozen=True, eq=False)
class WrapOptions:
    """Options of `wrap`; None selects the value of the module or its library."""

    name: str
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    size: Size | None = None
    classes: Sequence[str] | None = None
    head: nn.Module | Tensor | None = None  # a module on pooled features, or a matrix [C, D]
    pool: Kind | None = None
    sigmoid: bool | None = None
    preprocess: Preprocess | Named | None = None  # or some fields of it
    output: int | str | None = None  # which output of a module that returns several

    def preprocess_for(self, parts: AnyParts, of: str) -> Preprocess:
        """The whole preprocessing; raises if the mean, std or size is unknown."""
        known, size, changes = parts.preprocess, self.size, Named()
        if isinstance(self.preprocess, Preprocess):
            known = self.preprocess
        elif self.preprocess is not None:
            changes = self.preprocess
        for name, value in (("mean", self.mean), ("std", self.std)):
            if value is not None and not all(0 <= number <= 1 for number in value):
                scaled = [round(number / 255, 4) for number in value]
                expected = f"numbers from 0 to 1, as pixels are: {scaled} if these are of 0-255"
                raise BadOption(name, tuple(value), expected)
        patch = parts.patch if isinstance(parts, Parts) else (1, 1)
        if size is not None and any(a % b for a, b in zip(size, patch, strict=True)):
            near = [max(1, round(a / b)) * b for a, b in zip(size, patch, strict=True)]
            expected = f"multiples of the patch, {patch}, such as {tuple(near)}"
            raise BadOption("size", tuple(size), expected)
        if parts.fixed_size and parts.size is not None:
            if size is not None and tuple(size) != parts.size:
                raise BadOption("size", tuple(size), f"{parts.size}, which {of} is built for")
            size = parts.size
        values: Named = {
            "mean": self.mean or changes.get("mean") or (known and known.mean),
            "std": self.std or changes.get("std") or (known and known.std),
            "size": size or changes.get("size") or (parts.size if known is None else known.size),
        }
        values = {**changes, **values}
        absent = [name for name, value in values.items() if value is None]
        if absent:
            options = ", ".join(f"{name}= (--input {name}=...)" for name in absent)
            raise BadOption(
                absent[0],
                None,
                f"a value: {of} does not state its {' and '.join(absent)}, so pass {options} as in"
                " training; often mean and std are both 0.5,0.5,0.5, or 0.485,0.456,0.406 and"
                " 0.229,0.224,0.225 (ImageNet)",
            )
        return Preprocess(**values) if known is None else replace(known, **values)

    def class_names(self, parts: AnyParts) -> tuple[str, ...]:
        """Names of classes. Names stated by the module are used only with its own head."""
        own = parts.classes if self.head is None else ()
        return tuple(own if self.classes is None else self.classes)


def find_parts(
    module: nn.Module, *, text: TextInput | None = None, output: int | str | None = None
) -> AnyParts:
    """The parts of a native module, by the adapter of the library it (or a class it derives from)
    comes from; otherwise those of the transformer inside of it. `text` is what a model with a text
    tower makes its classifier of."""
    own = getattr(module, "view_parts", None)
    if own is not None:
        return own()
    foreign = type(module).__module__.split(".")[0] not in ADAPTERS
    for plugin in plugins("seecause.models").values() if foreign else ():
        parts = plugin.find_parts(module) if hasattr(plugin, "find_parts") else None
        if parts is not None:
            return parts
    refused = None
    try:
        parts = find_library_parts(module, text)
    except UnsupportedModel as reason:
        if not foreign:
            raise
        parts, refused = None, reason
    if parts is not None:
        if text is not None and not isinstance(getattr(parts, "extra", None), CosineHead):
            reason = f"None: {type(module).__name__} has no text tower"
            raise BadOption("tokenizer", text.tokenize, reason)
        return parts
    if foreign:
        from seecause.models.wrapper import wrapper_parts

        if (parts := wrapper_parts(module, output)) is not None:
            return parts
    raise refused or UnsupportedModel(
        f"{type(module).__module__}.{type(module).__name__}",
        f"it is no model of {', '.join(ADAPTERS)}, and none of its parts is a vision transformer"
        " of these",
        "give it a method view_parts (docs: Your own model)",
    )


def find_library_parts(module: nn.Module, text: TextInput | None = None) -> AnyParts | None:
    """The parts of a module of a library, None for other modules: a vision transformer by its
    adapter (which also says why any other class is refused), a network of stages, or a model of
    boxes or pixels."""
    libraries = [cls.__module__.split(".")[0] for cls in type(module).__mro__]
    library = next((library for library in libraries if library in ADAPTERS), None)
    if library is None:
        return None
    adapter = importlib.import_module(ADAPTERS[library])
    classes = [cls for cls in type(module).__mro__ if cls.__module__.split(".")[0] == library]
    known = [cls.__name__ for cls in classes if cls.__name__ in adapter.CLASSES]
    if not known:
        from seecause.models.dense import dense_parts
        from seecause.models.staged import staged_parts

        parts = staged_parts(module, library, classes[0].__name__) or dense_parts(module)
        if parts is not None:
            return parts
    options = {"text": text} if library in WITH_TEXT else {}
    return adapter.find(module, (known or [classes[0].__name__])[0], **options)


def unwrapped(module: Any) -> nn.Module:
    """The module inside of wrappers that change how it runs, not what it predicts."""
    kind = type(module).__name__
    parallel = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    if kind == COMPILED:
        return unwrapped(module._orig_mod)
    if parallel or kind.startswith(("ModelEma", "AveragedModel")):  # of timm and torch
        return unwrapped(module.module)
    if type(module).__module__.startswith("peft.") and hasattr(module, "get_base_model"):
        return unwrapped(module.get_base_model())
    return module


def native_model(module: Any) -> tuple[nn.Module, Named]:
    """The module `unwrapped`; of transformers' `TimmWrapper...` the timm model in it, and what its
    config says about that, as options of `wrap`."""
    module = unwrapped(module)
    if not type(module).__name__.startswith("TimmWrapper"):
        foreign = type(module).__module__.split(".")[0] not in ADAPTERS
        if foreign and any(type(part).__name__ == COMPILED for part in module.modules()):
            from seecause.models.wrapper import uncompiled

            module = uncompiled(module)
        return module, {}
    card = getattr(module.config, "pretrained_cfg", None)
    names = class_names(module.config) if "Classification" in type(module).__name__ else ()
    steps = {"preprocess": from_timm(card)} if card else {}
    return module.timm_model, steps | ({"classes": names} if names else {})


@torch.no_grad()
def text_matrix(
    encode: Callable[[list[str]], Tensor],
    classes: Sequence[str],
    templates: Sequence[str] = TEMPLATES,
    *,
    batch: int = 256,
) -> Tensor:
    """Unit rows [C, D], one per class. `encode` turns prompts into embeddings [n, D]."""
    prompts = [template.format(name) for name in classes for template in templates]
    rows = [
        F.normalize(encode(prompts[i : i + batch]), dim=-1) for i in range(0, len(prompts), batch)
    ]
    per_class = torch.cat(rows).unflatten(0, (len(classes), len(templates)))
    return F.normalize(per_class.mean(dim=1), dim=-1)


def require_text(module: nn.Module, text: TextInput | None) -> TextInput:
    """The text input of a model that has no classes of its own; raises if it was not given."""
    if text is None or not text.classes:
        raise UnsupportedModel(
            f"{type(module).__name__} without class names",
            "it compares images with texts and has no classes of its own",
            "pass classes=[...] and tokenizer=, or wrap its vision tower with head=",
        )
    return text


def as_inputs(tokens: Any, device: torch.device) -> dict[str, Tensor]:
    """The output of a tokenizer (ids [n, L], or a mapping of tensors) as keyword arguments on a
    device."""
    named = tokens if isinstance(tokens, Mapping) else {"input_ids": tokens}
    return {name: torch.as_tensor(value, device=device) for name, value in named.items()}


def class_names(config: Any) -> tuple[str, ...]:
    """Class names in a config of transformers, unless they are placeholders: LABEL_0 ..."""
    names = tuple(str(config.id2label[index]) for index in sorted(config.id2label or ()))
    return () if names == tuple(f"LABEL_{i}" for i in range(len(names))) else names


def is_multi_label(config: Any) -> bool:
    """Whether a config of transformers says that classes are independent."""
    return getattr(config, "problem_type", None) == "multi_label_classification"
