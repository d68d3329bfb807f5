"""What an adapter finds in a native module, and how a view is put together from it.

Adapters are found by where a class is defined, so that nothing is imported in vain. A module that
knows its own parts brings its adapter with it: a method `view_parts() -> Parts`. Packages installed
beside this one add families by the entry point `seecause.models`: an object with
    find_parts(module) -> Parts | None                      the adapter; None for what it is not for
    open_model(name, *, weights=None) -> nn.Module          what `sc.load("ENTRY:NAME")` opens
either of which it may lack.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from seecause.errors import BadOption, SeecauseError, UnsupportedModel
from seecause.models.block import Block, Fn, chain, same
from seecause.models.heads import (
    Similarity,
    TextHead,
    TextInput,
    class_names,
    head_like,
    linear,
    read_features,
    text_matrix,
)
from seecause.models.layout import TokenLayout
from seecause.models.preprocess import Preprocess, complete, from_timm
from seecause.models.view import Kind, LatentPool, Readout, VisionModel
from seecause.registry import plugins, warn_of_plugin

if TYPE_CHECKING:
    from seecause.models.dense import DenseParts
    from seecause.models.staged import StagedParts

ADAPTERS = {
    "timm": "seecause.models.timm",
    "transformers": "seecause.models.transformers",
    "torchvision": "seecause.models.torchvision",
    "open_clip": "seecause.models.open_clip",
}
SHARDED = ("FullyShardedDataParallel", "DeepSpeedEngine")
Encode = Callable[[list[str]], Tensor]  # prompts -> embeddings [n, D]
WITH_TEXT = ("transformers", "open_clip")  # libraries whose models may have a text tower


@dataclass
class Parts:
    """The named pieces of one native backbone. `head` and `native_logits` are None for a bare
    backbone."""

    family: str
    embed: Callable[[Tensor], Tensor]
    layout_at: Callable[[int, int], TokenLayout]
    blocks: list[Block]
    norm: Fn  # final norm on rows
    patch: tuple[int, int]
    native_tokens: Callable[[Tensor], Tensor]  # the module's own, after `norm`: [B, T, D]
    preprocess: Preprocess | None = None
    pool: Kind | None = None  # the module's own pooling
    head: Fn | None = None  # pooled -> logits
    native_logits: Callable[[Tensor], Tensor] | None = None
    # what the module does between pooling and classifier; stays in front of a given head
    after_pool: Fn = same
    # the module's own pooled features, after `after_pool`, for its own pooling
    native_pooled: Callable[[Tensor], Tensor] | None = None
    latent: LatentPool | None = None
    over_prefix: bool = False
    classes: Sequence[str] = ()
    sigmoid: bool = False
    fixed_size: bool = True
    size: tuple[int, int] | None = None
    extra: nn.Module | None = None
    facts: Callable[[Tensor], Tensor] | None = None  # what blocks may know (block.py)
    native_order: Fn = same  # native sequences [B, T, D] -> in the layout's order
    # what is known of the preprocessing -> all of it, where inputs are films (film.py)
    adapt_preprocess: Callable[[Preprocess], Preprocess] = lambda steps: steps
    view: type[VisionModel] = VisionModel

    def add_text(
        self, module: Any, text: TextInput, *, encode: Encode, embed: Fn, project: Fn = same
    ) -> None:
        """The zero-shot head of a module with two towers: `encode` reads prompts, `embed` gives
        embeddings of images, `project` brings pooled tokens there."""
        matrix = text_matrix(encode, text.classes, text.templates)
        head = TextHead(matrix, module.logit_scale, getattr(module, "logit_bias", None))
        self.extra, self.head = head, head if project is same else chain(project, head)
        self.native_logits = lambda images: head(embed(images))
        self.classes, self.sigmoid = text.classes, head.bias is not None

    def assemble(self, module: nn.Module, options: WrapOptions) -> VisionModel:
        """A view of these parts, with the options of the caller."""
        steps = self.adapt_preprocess(options.preprocess_for(self, type(module).__name__))
        kind, like = _checked_pool(module, self, options), next(module.parameters())
        head, sigmoid = options.head, options.sigmoid
        readout = Readout(
            kind=kind,
            head=self.head or same,
            norm=self.norm,
            over_prefix=self.over_prefix,
            latent=self.latent if kind == "latent" else None,
        )
        native = _Native(self, readout)
        if isinstance(head, Tensor):
            head = linear(head)
        elif isinstance(head, Similarity):
            sigmoid = True if sigmoid is None else sigmoid
            head = head.head(lambda images: native.pooled(images.to(like.device, like.dtype)))
        extra = self.extra
        if head is not None:
            extra = head = head_like(head, like)
            native.head, readout.head = head, chain(self.after_pool, head)
        elif extra is not None:
            extra.to(like.device, like.dtype).eval()
        return self.view(
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
            sigmoid=self.sigmoid if sigmoid is None else sigmoid,
            fixed_size=self.fixed_size,
            extra=extra,
            facts=self.facts,
            native_order=self.native_order,
        )


@dataclass(frozen=True, eq=False)
class WrapOptions:
    """Options of `wrap`; None stands for what the module or its library tells.
    `head` is a module on pooled features, a matrix [C, D] or a `Similarity`."""

    name: str
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    size: tuple[int, int] | None = None
    classes: Sequence[str] | None = None
    head: nn.Module | Tensor | Similarity | None = None
    pool: Kind | None = None
    sigmoid: bool | None = None
    preprocess: Preprocess | None = None

    def or_else(self, stated: Mapping[str, Any]) -> WrapOptions:
        """These options, completed by what is `stated` elsewhere."""
        return replace(self, **{n: v for n, v in stated.items() if getattr(self, n) is None})

    def preprocess_for(self, parts: Parts | StagedParts | DenseParts, of: str) -> Preprocess:
        """The whole preprocessing; raises if the mean, std or size is unknown."""
        known, size = self.preprocess or parts.preprocess, self.size
        if parts.fixed_size and parts.size is not None:
            if size is not None and tuple(size) != parts.size:
                built = f"{parts.size[0]} x {parts.size[1]}, which {of} is built for"
                raise BadOption("size", tuple(size), built)
            size = parts.size
        elif known is None:
            size = size or parts.size
        return complete(known, mean=self.mean, std=self.std, size=size, of=of)

    def class_names(self, parts: Parts | StagedParts | DenseParts) -> tuple[str, ...]:
        """Names of classes; those that the module tells are of its own head."""
        own = parts.classes if self.head is None else ()
        return tuple(own if self.classes is None else self.classes)


def find_parts(
    module: nn.Module, *, text: TextInput | None = None
) -> Parts | StagedParts | DenseParts:
    """The parts of a native module, by the adapter of the library it (or a class it derives from)
    comes from.

    `text` is what a model with a text tower makes its classifier of.
    """
    own = getattr(module, "view_parts", None)
    if own is not None:
        return own()
    if type(module).__module__.split(".")[0] not in ADAPTERS:
        parts = _find_in_plugins(module)
        if parts is not None:
            return parts
    for cls in type(module).__mro__:
        library = cls.__module__.split(".")[0]
        if library in ADAPTERS:
            parts = _find(module, library, cls.__name__, text)
            asked = "input_ids" in getattr(parts, "inputs", ())  # a detector's
            if text is not None and not asked and not isinstance(parts.extra, TextHead):
                raise BadOption(
                    "tokenizer", text.tokenize, f"None: {type(module).__name__} has no text tower"
                )
            return parts
    reason, remedy = f"no adapter knows it (adapters: {', '.join(ADAPTERS)})", "see docs/models.md"
    inside = [n for n, part in module.named_modules() if is_known(part) and "." not in n]
    if inside:
        reason = f"it is no model of {', '.join(ADAPTERS)}, but holds one"
        place = f"module.{inside[0]}"
        remedy = f"wrap that: sc.wrap({place}), or sc.wrap({place}, head=module.HEAD, pool='cls')"
    raise UnsupportedModel(f"{type(module).__module__}.{type(module).__name__}", reason, remedy)


def _find_in_plugins(module: nn.Module) -> Parts | StagedParts | DenseParts | None:
    """The parts that the first fitting plug-in returns; a warning names plug-ins that fail."""
    for name, plugin in plugins("seecause.models").items():
        try:
            parts = plugin.find_parts(module) if hasattr(plugin, "find_parts") else None
        except SeecauseError:
            raise  # it knows the module, and says what is wrong with it
        except Exception as error:  # a plug-in may raise anything
            warn_of_plugin(
                "seecause.models", name, f"could not look at {type(module).__name__}", error
            )
            continue
        if parts is not None:
            return parts
    return None


def _find(
    module: nn.Module, library: str, kind: str, text: TextInput | None
) -> Parts | StagedParts | DenseParts:
    """Of an instance of a library's class `kind`: a vision transformer by the library's adapter,
    which also says why any other class is refused."""
    adapter = importlib.import_module(ADAPTERS[library])
    names = (cls.__name__ for cls in type(module).__mro__)
    kind = next((name for name in names if name in adapter.CLASSES), kind)
    if kind not in adapter.CLASSES:
        parts = _find_other(module, library, kind, text)
        if parts is not None:
            return parts
    options = {"text": text} if library in WITH_TEXT else {}
    return adapter.find(module, kind, **options)


def _find_other(
    module: nn.Module, library: str, kind: str, text: TextInput | None
) -> Parts | StagedParts | DenseParts | None:
    """The parts of a network of stages, or of a model of film, boxes or pixels."""
    from seecause.models import staged

    parts = staged.find(module, library, kind)
    if parts is not None or library != "transformers":
        return parts
    from seecause.models.dense import dense_parts
    from seecause.models.transformers import FAMILIES

    return FAMILIES[kind](module) if kind in FAMILIES else dense_parts(module, text)


def is_known(module: nn.Module) -> bool:
    """Whether the module's own class comes from a library with an adapter, or brings one along."""
    return type(module).__module__.split(".")[0] in ADAPTERS or hasattr(module, "view_parts")


def unwrapped(module: Any) -> nn.Module:
    """The module inside of wrappers that change how it runs, not what it predicts."""
    kind, inner = type(module).__name__, None
    if kind in SHARDED:
        raise UnsupportedModel(
            kind,
            "no process holds all of its weights",
            "gather them (a full state dict) and load that into the plain model",
        )
    parallel = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    if kind == "OptimizedModule":  # torch.compile
        inner = module._orig_mod
    elif parallel or kind.startswith(("ModelEma", "AveragedModel")):  # of timm and torch
        inner = module.module
    elif type(module).__module__.startswith("peft.") and hasattr(module, "get_base_model"):
        inner = module.get_base_model()
    return module if inner is None else unwrapped(inner)


def native_model(module: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The module `unwrapped`; of transformers' `TimmWrapper...` the timm model in it, and what its
    config says about that, as options of `wrap`."""
    module = unwrapped(module)
    if not type(module).__name__.startswith("TimmWrapper"):
        return module, {}
    card = getattr(module.config, "pretrained_cfg", None)
    wrap_options = {"preprocess": from_timm(card)} if card else {}
    names = class_names(module.config) if "Classification" in type(module).__name__ else ()
    return module.timm_model, wrap_options | ({"classes": names} if names else {})


def readable_pools(parts: Parts) -> list[Kind]:
    """The ways in which the tokens of a backbone can be pooled."""
    layout = parts.layout_at(*(parts.size or parts.patch))
    present: dict[Kind, bool] = {
        "cls": layout.class_index is not None,
        "cls+dist": layout.distill_index is not None,
        "mean": True,
        "cls+mean": layout.class_index is not None,
        "latent": parts.latent is not None,
    }
    return [kind for kind, there in present.items() if there]


def _checked_pool(module: nn.Module, parts: Parts, options: WrapOptions) -> Kind:
    """How tokens are pooled; refuses a backbone that cannot be read so."""
    head, pool = options.head, options.pool
    if head is None and parts.head is None:
        raise UnsupportedModel(
            type(module).__name__,
            "it has no classifier",
            "pass head= (a matrix [classes, width], a module, or sc.Similarity(images))",
        )
    kind = pool or parts.pool
    readable = readable_pools(parts)
    if kind not in readable:
        how = f"how {type(module).__name__} can be read: {', '.join(readable)}"
        raise BadOption("pool", kind, how)
    if pool is not None and head is None and pool != parts.pool:
        raise BadOption(
            "pool",
            pool,
            f"{parts.pool!r}, which this model's own classifier reads; pass head= with another"
            " pool",
        )
    return kind


@dataclass
class _Native:
    """The module's own way from images to logits, with the caller's head, if any."""

    parts: Parts
    readout: Readout
    head: nn.Module | None = None

    def tokens(self, images: Tensor, last: Fn) -> Tensor:
        layout = self.parts.layout_at(images.shape[-2], images.shape[-1])
        read = replace(self.readout, norm=same, head=last)
        return read(self.parts.native_tokens(images), layout)

    def pooled(self, images: Tensor) -> Tensor:
        own = self.parts.native_pooled if self.readout.kind == self.parts.pool else None
        return own(images) if own is not None else self.tokens(images, self.parts.after_pool)

    def __call__(self, images: Tensor) -> Tensor:
        if self.head is not None:
            return read_features(self.head, self.pooled(images))
        if self.parts.native_logits is not None:
            return self.parts.native_logits(images)
        return self.tokens(images, self.readout.head)
