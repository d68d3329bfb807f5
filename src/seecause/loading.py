"""`sc.wrap` and `sc.load`: from a module or a name to a verified view."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seecause.engine.verify import verify
from seecause.errors import BadOption, NotDefined, UnknownName
from seecause.models.base import ImageModel
from seecause.models.eval_mode import eval_mode
from seecause.models.load import (
    ClassNames,
    Source,
    class_names_of,
    device_of,
    open_source,
    parse_device,
    parse_dtype,
    reading,
)
from seecause.models.parts import (
    TEMPLATES,
    CosineHead,
    Parts,
    TextInput,
    WrapOptions,
    find_parts,
    native_model,
)
from seecause.models.preprocess import Preprocess, height_and_width
from seecause.models.view import Kind, VisionModel
from seecause.registry import plugins

if TYPE_CHECKING:
    from seecause.models.dense import DenseModel
    from seecause.models.staged import StagedModel

LIBRARIES = ("builtin", "timm", "hf", "torchvision", "open_clip")


def wrap(
    module: nn.Module,
    *,
    name: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: tuple[int, int] | int | None = None,
    classes: ClassNames | None = None,
    head: nn.Module | Tensor | None = None,
    pool: Kind | None = None,
    sigmoid: bool | None = None,
    preprocess: Preprocess | None = None,
    templates: Sequence[str] | None = None,
    tokenizer: Callable[[list[str]], Any] | None = None,
    check: bool = True,
) -> VisionModel | StagedModel | DenseModel:
    """Make a view of a native module and verify it.

    `model(images)` returns logits [B, C]. The module stays yours: it is run in eval mode, and its
    flags are restored afterwards. Wrap it again after replacing one of its layers; new weights are
    noticed.

    Args:
        module: A module of timm, transformers, torchvision or open_clip, compiled, parallel,
            averaged or adapted by PEFT, or one with a method `view_parts`.
        name: The model's name in results.
        mean: Mean of each channel, where the module does not tell it.
        std: Standard deviation of each channel.
        size: Height and width of images.
        classes: Names in the order of the outputs, or a file of names.
        head: The classifier of a bare backbone: a matrix [classes, width] or a module, such as
            a `seecause.models.parts.CosineHead` of embeddings.
        pool: What the head reads: "cls", "mean" or "cls+mean".
        sigmoid: Whether classes are independent (multi-label).
        preprocess: All of the preprocessing, in place of `mean`, `std` and `size`.
        templates: Prompts with {} for the class name, for a model with a text tower.
        tokenizer: What turns prompts into tokens, for a model with a text tower.
        check: Whether the view is compared with the module.

    Returns:
        A `VisionModel`, or a `StagedModel` (networks of stages), or a `DenseModel` (boxes, pixels).

    Raises:
        UnsupportedModel: If no adapter knows the module.
        ViewMismatch: If the view does not compute what the module computes.

    Example:
        >>> import seecause as sc, timm, torch
        >>> module = timm.create_model("test_vit", num_classes=3)
        >>> model = sc.wrap(module, classes=["cat", "dog", "frog"])
        >>> model.layout.grid, model.class_index("frog"), model(torch.zeros(1, 3, 160, 160)).shape
        ((10, 10), 2, torch.Size([1, 3]))
    """
    if not isinstance(module, nn.Module):
        raise BadOption("module", type(module).__name__, "an nn.Module; sc.load takes names")
    classes = class_names_of(classes)
    text = None
    if tokenizer is not None:
        text = TextInput(tuple(classes or ()), tuple(templates or TEMPLATES), tokenizer)
    elif templates is not None:
        raise BadOption("templates", templates, "None without tokenizer=, which reads them")
    name = name or type(module).__name__
    around, (module, stated) = module, native_model(module)
    given = {
        **{"mean": mean, "std": std, "size": height_and_width(size), "classes": classes},
        **{"head": head, "pool": pool, "sigmoid": sigmoid, "preprocess": preprocess},
    }
    options = WrapOptions(name, **stated | {n: v for n, v in given.items() if v is not None})
    with eval_mode([around], device_of(around), frozen=True):
        parts = find_parts(module, text=text)
        model = parts.assemble(module, options)
        if text is not None and isinstance(parts, Parts):
            model.texts = {"templates": text.templates, "tokenizer": text.tokenize}
        if check:  # without it, the number of classes is not known
            verify(model)
            need_names(model)
            if sigmoid is None and model.n_classes == 1:
                model.sigmoid = True  # a softmax over one class is always 1
    return model


def need_names(model: ImageModel) -> None:
    """Refuse names that are not one for each class."""
    if model.classes and len(model.classes) != model.n_classes:
        expected = f"{model.n_classes}, one for each class of {model.name} in its order"
        raise BadOption("classes", f"{len(model.classes)} names", expected)


def as_view(model: ImageModel | nn.Module) -> ImageModel:
    """The view of a model: itself if it is one, otherwise `sc.wrap(model)`, which takes a few
    runs."""
    if isinstance(model, ImageModel):
        return model
    if isinstance(model, nn.Module):
        return wrap(model)
    raise BadOption("model", type(model).__name__, "what sc.load or sc.wrap gives, or a module")


def rewrap(
    model: VisionModel,
    module: nn.Module,
    *,
    head: nn.Module | None = None,
    check: bool = True,
    freeze: bool = True,
) -> VisionModel:
    """The same view of an edited copy of its module, which is put into eval mode and frozen, unless
    it is the caller's (`freeze`); `head` replaces a head that is not part of it."""
    if model.architecture == "prompt":
        reason = f"{model.name} answers through a language model"
        raise NotDefined("an edited copy", reason, "Use background.ablate, or model.export")
    need_own_classes(model, "an edited copy")
    own = model.extra  # a head that a text tower made is made again
    if head is None and not (isinstance(own, CosineHead) and own.from_text):
        head = copy.deepcopy(own)
    other = wrap(
        module.eval().requires_grad_(False) if freeze else module,
        name=model.name,
        preprocess=model.preprocess,
        classes=model.classes,
        sigmoid=model.sigmoid,
        head=head,
        pool=None if head is None else model.readout.kind,
        check=check,
        **model.texts,
    )
    assert isinstance(other, VisionModel)
    other.random_weights, other.origin = model.random_weights, model.origin
    return other


def need_own_classes(model: VisionModel, what: str) -> None:
    """Refuse a view in which several classes count as one answer, where the module alone is copied
    or written: that would forget it."""
    if model.merged:
        counted = (
            f"{len(model.merged)} classes of {model.name} count as {len(model.classes)} answers,"
            " which its module does not know"
        )
        raise NotDefined(what, counted, "Use the model with its own classes")


def load(
    spec: str | Path,
    *,
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    size: tuple[int, int] | int | None = None,
    classes: ClassNames | None = None,
    **options: Any,
) -> VisionModel | StagedModel | DenseModel:
    """Load a model by its name or path, and verify its view.

    Args:
        spec: One of

            - `builtin:critters-vit`: embedded, and small
            - `timm:NAME`, `hf:NAME`, `hf:FOLDER`, `torchvision:NAME`, `open_clip:NAME/TAG`
            - a folder that timm, transformers, PEFT or this package wrote

        weights: A file or folder that a training wrote; None for the library's own, which are
            fetched; "random" for random ones, which every result then mentions.
        device: A device such as "cuda"; None leaves the model where the library loads it.
        dtype: A dtype such as "bfloat16"; None keeps the library's.
        size: Height and width in pixels, for a model that can be built for others.
        classes: Class names, as in `sc.wrap`.
        **options: Other options of `sc.wrap` (mean, std, head, pool ...).

    Returns:
        A verified view, as `sc.wrap` returns it.

    Raises:
        UnknownName: If no library has a model of that name.
        DataMissing: If weights are missing, damaged, or of another architecture.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> model.layout.grid, model.layout.registers, len(model.blocks)
        ((12, 12), (1, 2, 3, 4), 6)
    """
    if not isinstance(spec, str | Path):
        raise BadOption("spec", type(spec).__name__, "a name or a path; sc.wrap takes modules")
    # options are checked before weights are read
    spec, classes = str(spec), class_names_of(classes)
    device, dtype = parse_device(device), parse_dtype(dtype)
    library, _, name = spec.partition(":")
    openers = {
        name: family.open_model
        for name, family in plugins("seecause.models").items()
        if hasattr(family, "open_model")
    }
    if name and library in openers and library not in LIBRARIES:
        source = Source(openers[library](name, weights=weights), {"size": size})
    else:
        if library not in LIBRARIES or not name:
            library, name = "path", spec
            if not Path(spec).exists():
                names = [f"timm:{spec}", *(f"{library}:NAME" for library in (*LIBRARIES, *openers))]
                raise UnknownName("model", spec, [*names, "the path of a model"])
        source = open_source(library, name, weights=weights, size=height_and_width(size))
    source.module.to(device=device, dtype=dtype).eval().requires_grad_(False)
    wrap_options = {**source.wrap_options, **options}
    if classes is not None or options.get("head") is not None:  # names are the old head's
        wrap_options["classes"] = classes
    with reading(Path(name)) if Path(name).is_dir() else nullcontext():
        model = wrap(source.module, name=spec, **wrap_options)
    model.random_weights, model.origin = weights == "random", source.origin
    if model.extra is not None:
        model.extra.eval()
    need_names(model)
    return model
