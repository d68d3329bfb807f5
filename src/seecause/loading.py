"""`sc.wrap` and `sc.load`: from a module or a name to a verified view."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seecause.engine.verify import compare, random_images, tolerance_of, verify
from seecause.errors import BadOption, NotDefined, UnknownName, UnsupportedModel, ViewMismatch
from seecause.models.base import ImageModel
from seecause.models.checkpoints import ClassNames, class_names_of
from seecause.models.devices import device_of, gather_answers, lie_apart, parse_device, parse_dtype
from seecause.models.eval_mode import eval_mode
from seecause.models.heads import TEMPLATES, Similarity, TextHead, TextInput
from seecause.models.parts import (
    Parts,
    WrapOptions,
    assemble,
    find_parts,
    is_known,
    native_model,
)
from seecause.models.preprocess import Preprocess, height_and_width
from seecause.models.view import Kind, VisionModel
from seecause.registry import plugins

if TYPE_CHECKING:
    from seecause.models.containers import Container
    from seecause.models.dense import DenseModel, DenseParts
    from seecause.models.staged import StagedModel, StagedParts

LIBRARIES = ("builtin", "timm", "hf", "torchvision", "open_clip")


def wrap(
    module: nn.Module,
    *,
    name: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: tuple[int, int] | int | None = None,
    classes: ClassNames | None = None,
    head: nn.Module | Tensor | Similarity | None = None,
    pool: Kind | None = None,
    sigmoid: bool | None = None,
    preprocess: Preprocess | None = None,
    templates: Sequence[str] | None = None,
    tokenizer: Callable[[list[str]], Any] | None = None,
    check: bool = True,
) -> VisionModel | StagedModel | DenseModel:
    """A view of a module of timm, transformers, torchvision or open_clip, or of one that holds such
    a module, compared with it before you get it (`check`). `model(images)` gives logits [B, C].

    Give what the module does not tell:
        mean, std, size    how pictures are normalised; or all of it, `preprocess`
        classes            names in the order of the outputs, {index: name}, or a file of names
        head, pool         on a bare backbone: a matrix [classes, width], a module or
                           `sc.Similarity`, on the "cls" token, the "mean" or "cls+mean"
        sigmoid            whether classes answer independently (multi-label)
        tokenizer          of a model with a text tower, which reads `classes` in `templates`

    The module stays yours: it is run in eval mode, and what was set comes back. Wrap it again after
    replacing one of its layers; new weights are noticed.

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
    options = WrapOptions(
        name, mean, std, height_and_width(size), classes, head, pool, sigmoid, preprocess
    )
    around, (module, stated) = module, native_model(module)
    options = options.or_else(stated)
    with eval_mode([around], device_of(around), frozen=True):
        container = None if is_known(module) else _container_of(module)
        if container is not None:
            module, options = _inner_model(container, options)
        return _view(module, text, options, check)


def _container_of(module: nn.Module) -> Container | None:
    """The model in a module of somebody's own, unless an adapter knows the module itself."""
    try:
        find_parts(module)
    except UnsupportedModel:
        from seecause.models.containers import container_of

        return container_of(module)
    return None


@torch.no_grad()
def _inner_model(container: Container, options: WrapOptions) -> tuple[nn.Module, WrapOptions]:
    """The inner model, and what is on top of it as options of `wrap`: the first reading that gives
    the outer module's own answer."""
    from seecause.models.containers import answer_of

    inner, stated = native_model(container.inner)
    known = options.or_else(stated)
    if known.head is not None:
        return inner, known
    readings, expected = list(container.readings()), None
    for reading in readings:
        tried = replace(known, **reading)
        model = _view(inner, None, tried, check=False)
        if expected is None:
            images = random_images(model)
            expected = answer_of(container.outer, images)
        if expected is None and len(readings) == 1 and not reading:
            return inner, known  # nothing else in it can answer
        if expected is None:
            raise container.refusal("its own answer to a batch of images cannot be had")
        if _agree(answer_of(model, images), expected):
            return inner, tried
    raise container.refusal("neither the model in it nor the layers beside that give its answer")


def _agree(got: Tensor | None, expected: Tensor) -> bool:
    if got is None:
        return False
    try:
        compare("answer", "", got, expected, tolerance_of(expected.dtype))
    except ViewMismatch:
        return False
    return True


def _view(
    module: nn.Module, text: TextInput | None, options: WrapOptions, check: bool
) -> VisionModel | StagedModel | DenseModel:
    apart, parts = lie_apart(module), find_parts(module, text=text)
    if isinstance(parts, Parts):
        model = assemble(module, parts, options)
        if apart:
            gather_answers(model)
        if text is not None:
            model.texts = {"templates": text.templates, "tokenizer": text.tokenize}
    elif apart:
        reason = "its weights lie on several devices, and it is not split into blocks"
        raise UnsupportedModel(type(module).__name__, reason, "load it onto one device")
    else:
        model = _other_view(module, parts, options)
    if check:  # else it may end in anything, and names are not those of its outputs
        verify(model)
        need_names(model)
        if options.sigmoid is None and model.n_classes == 1 and not model.values:
            model.sigmoid = True  # a softmax over one class is 1 whatever is in the picture
    return model


def _other_view(
    module: nn.Module, parts: StagedParts | DenseParts, options: WrapOptions
) -> StagedModel | DenseModel:
    from seecause.models.staged import StagedParts, assemble_staged

    if isinstance(parts, StagedParts):
        return assemble_staged(module, parts, options)
    from seecause.models.dense import assemble_dense

    return assemble_dense(module, parts, options)


def need_names(model: ImageModel) -> None:
    """Refuse names that are not one for each class."""
    if model.classes and len(model.classes) != model.n_classes:
        raise BadOption(
            "classes",
            f"{len(model.classes)} names",
            f"{model.n_classes}, one for each class of {model.name} in its order",
        )


def as_view(model: ImageModel | nn.Module) -> ImageModel:
    """A view as it is; a module is wrapped, which takes a few runs: wrap it yourself for many
    calls."""
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
        raise NotDefined(
            "an edited copy",
            f"{model.name} answers through a language model",
            "Use heads.ablate, or lvlm.export for zeroed heads",
        )
    need_own_classes(model, "an edited copy")
    wrap_options: dict[str, Any] = {
        "name": model.name,
        "preprocess": model.preprocess,
        "classes": model.classes,
        "sigmoid": model.sigmoid,
        "check": check,
    }
    if head is None and not isinstance(model.extra, TextHead):
        head = copy.deepcopy(model.extra)
    wrap_options |= (
        model.texts if head is None else {**model.texts, "head": head, "pool": model.readout.kind}
    )
    other = wrap(module.eval().requires_grad_(False) if freeze else module, **wrap_options)
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


def _model_names(spec: str) -> list[str]:
    """What could have been meant where no model is called `spec`: timm's names are often typed
    without the library before them."""
    import timm

    names = [f"{library}:NAME" for library in (*LIBRARIES, *_openers())]
    names.append("the path of a saved folder or of a checkpoint that names its architecture")
    return [f"timm:{spec}", *names] if timm.is_model(spec) else names


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
    """A model by its name or path, verified: `sc.attribute(model, pictures)` explains it. `spec`:

        builtin:critters-vit    embedded, and small
        timm:NAME               hf:NAME or hf:FOLDER     torchvision:NAME     open_clip:NAME/TAG
        FOLDER                  that timm, transformers, PEFT or this package wrote
        FILE                    a checkpoint that names its architecture, as timm's script writes it

    weights     a file or folder that training left; None: the library's own, fetched; "random" is
                the only way to random ones, and every result then says so
    device      such as "cuda"; dtype: such as "bfloat16". None: as the library loads it
    size        height and width in pixels, of a model that can be built for others
    classes     as in `sc.wrap`; options: all others of it (mean, std, head, pool ...)

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> model.layout.grid, model.layout.registers, len(model.blocks)
    ((12, 12), (1, 2, 3, 4), 6)
    """
    from seecause.models import sources

    if not isinstance(spec, str | Path):
        raise BadOption("spec", type(spec).__name__, "a name or a path; sc.wrap takes modules")
    # what cannot be had is refused before weights are read
    spec, classes = str(spec), class_names_of(classes)
    device, dtype = parse_device(device), parse_dtype(dtype)
    library, _, name = spec.partition(":")
    reading = nullcontext()
    if name and library not in LIBRARIES and library in _openers():
        module = _openers()[library](name, weights=weights)
        source = sources.Source(module, {"size": size})
    else:
        if library not in LIBRARIES or not name:
            if not Path(spec).exists():
                raise UnknownName("model", spec, _model_names(spec))
            library, name = "folder" if Path(spec).is_dir() else "file", spec
        source = sources.open_source(library, name, weights=weights, size=height_and_width(size))
        reading = sources.usable(Path(name)) if Path(name).is_dir() else reading
    source.module.to(device=device, dtype=dtype).eval().requires_grad_(False)
    wrap_options = {**source.wrap_options, **options}
    if classes is not None or options.get("head") is not None:  # names are the old head's
        wrap_options["classes"] = classes
    with reading:
        model = wrap(source.module, name=spec, **wrap_options)
    model.random_weights, model.origin = weights == "random", source.origin
    if model.extra is not None:
        model.extra.eval()
    need_names(model)
    return model


def _openers() -> dict[str, Any]:
    """What opens models of packages installed beside this one, by their prefix."""
    families = plugins("seecause.models").items()
    return {name: family.open_model for name, family in families if hasattr(family, "open_model")}
