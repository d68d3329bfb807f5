"""`sc.wrap` and `sc.load`: from a module, a name, a file or a folder to a verified view.

Libraries fetch and read their own weights. Checkpoints of trainings are read by timm's loader with
`weights_only=True`: no code in a file runs. Weights are never random unless asked for, and a
damaged or missing file is one `DataMissing` that names it.

Folders of `background.export` hold the library's own checkpoint and a card (`seecause.json`), which
adds class names, preprocessing and a head that is not part of the native module, if there is one.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import re
import sys
import textwrap
import traceback
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from seecause.engine.verify import verify
from seecause.errors import (
    BadOption,
    DataMissing,
    MissingExtra,
    NotDefined,
    SeecauseError,
    UnknownName,
    UnsupportedModel,
)
from seecause.files import digest
from seecause.models.base import (
    Contents,
    ImageModel,
    device_of,
    eval_mode,
    parse_device,
    parse_dtype,
)
from seecause.models.block import Named, Size
from seecause.models.parts import (
    TEMPLATES,
    CosineHead,
    Parts,
    TextInput,
    UnitLinear,
    WrapOptions,
    find_parts,
    native_model,
)
from seecause.models.preprocess import (
    Preprocess,
    height_and_width,
    one_frame,
    preprocess_from_processor,
    preprocess_of,
)
from seecause.models.view import Kind, VisionModel
from seecause.registry import plugins

if TYPE_CHECKING:
    from seecause.models.dense import DenseModel
    from seecause.models.staged import StagedModel

log = logging.getLogger(__name__)
ZOO = Path(__file__).parent / "critters" / "checkpoints"  # the models of `builtin:`
# classes of this package, by the module whose `from_card` builds them
BUILDERS = {"IFAM": "seecause.faithful.net", "PlantedViT": "seecause.critters.planted"}
CARD = "seecause.json"
IMAGENET = "imagenet"  # a word for the names of its classes
PLAIN, HEAD = "model.safetensors", "head.safetensors"
ADAPTER = "adapter_config.json"  # file of PEFT
# modules of timm whose models take images of any size
ANY_SIZE = ("resnet", "densenet", "vgg", "convnext")
LIBRARIES = ("builtin", "timm", "hf", "torchvision", "open_clip")
# names in the order of the outputs; a single string is the path of a file
ClassNames = Sequence[str] | str | Path
Weights = str | Path | None  # a file, a folder or "random"; None for pretrained ones


def wrap(
    module: nn.Module,
    *,
    name: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: Size | int | None = None,
    classes: ClassNames | None = None,
    head: nn.Module | Tensor | None = None,
    pool: Kind | None = None,
    sigmoid: bool | None = None,
    output: int | str | None = None,
    preprocess: Any = None,
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
            averaged or adapted by PEFT; one of your own that holds such a vision transformer; or
            one with a method `view_parts`.
        name: The model's name in results.
        mean: Mean of each channel, if the module does not define it.
        std: Standard deviation of each channel.
        size: Height and width of images.
        classes: Names in the order of the outputs, or a file of names.
        head: The classifier of a bare backbone: a matrix [classes, width] or a module, such as
            a `seecause.models.parts.CosineHead` of embeddings.
        pool: The pooling that the head reads: "cls", "mean" or "cls+mean".
        sigmoid: Whether classes are independent (multi-label).
        output: Index or name of the logits, if a module of your own returns several outputs.
        preprocess: All of the preprocessing, in place of `mean`, `std` and `size`: a transform of
            torchvision, timm or open_clip, a processor of transformers, a data config of timm, or
            a file or folder with one of these; or a dict that changes some of crop, squash and
            filter.
        templates: Prompts with {} for the class name, for a model with a text tower.
        tokenizer: The tokenizer of prompts, for a model with a text tower.
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
        raise BadOption("templates", templates, "None, or tokenizer= with them")
    name = name or type(module).__name__
    around, (module, stated) = module, native_model(module)
    if preprocess is not None:
        preprocess = preprocess_of(preprocess)
    given = {
        "mean": mean, "std": std, "size": height_and_width(size), "classes": classes, "head": head,
        "pool": pool, "sigmoid": sigmoid, "preprocess": preprocess, "output": output,
    }  # fmt: skip
    options = WrapOptions(name, **stated | {n: v for n, v in given.items() if v is not None})
    with eval_mode(Contents([around]), device_of(around), frozen=True):
        parts = find_parts(module, text=text, output=output)
        model = parts.assemble(module, options)
        if text is not None and isinstance(parts, Parts):
            model.texts = {"templates": text.templates, "tokenizer": text.tokenize}
        if check:  # without it, the number of classes is not known
            verify(model)
            if model.classes and len(model.classes) != model.n_classes:
                expected = f"{model.n_classes} names, one for each class in its order"
                raise BadOption("classes", f"{len(model.classes)} names", expected)
            if sigmoid is None and model.n_classes == 1:
                model.sigmoid = True  # a softmax over one class is always 1
    return model


def as_view(model: ImageModel | nn.Module) -> ImageModel:
    """The view of a model: itself if it is one, otherwise `sc.wrap(model)`, which takes a few
    runs."""
    if isinstance(model, ImageModel):
        return model
    if isinstance(model, nn.Module):
        return wrap(model)
    raise BadOption("model", type(model).__name__, "a model of sc.load or sc.wrap, or an nn.Module")


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
    module = module.eval().requires_grad_(False) if freeze else module
    other = wrap(module, name=model.name, check=check, **_options_of(model, head))
    assert isinstance(other, VisionModel)
    other.random_weights, other.origin = model.random_weights, model.origin
    return other


def _options_of(model: VisionModel, head: nn.Module | None = None) -> Named:
    """Options of `wrap` that give this view of its module; `head` replaces one beside it."""
    own = model.extra  # a zero-shot head is made again
    if head is None and not (isinstance(own, CosineHead) and own.from_text):
        head = copy.deepcopy(own)
    return {
        "preprocess": model.preprocess,
        "classes": model.classes,
        "sigmoid": model.sigmoid,
        "head": head,
        "pool": None if head is None else model.readout.kind,
        "output": model.output,
        **model.texts,
    }


def need_own_classes(model: VisionModel, what: str) -> None:
    """Raises for a view with merged classes, because the mapping is not part of the module that is
    copied or saved."""
    if model.merged:
        counted = (
            f"{len(model.merged)} classes of {model.name} count as {len(model.classes)} answers,"
            " which its module does not know"
        )
        raise NotDefined(what, counted, "Use the model with its own classes")


def load(
    spec: str | Path | nn.Module | Callable[[], Any],
    *,
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    size: Size | int | None = None,
    classes: ClassNames | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> VisionModel | StagedModel | DenseModel:
    """Load a model by its name or path, and verify its view.

    Args:
        spec: One of

            - `builtin:critters-vit`: embedded, and small
            - `timm:NAME`, `hf:NAME`, `hf:FOLDER`, `torchvision:NAME`, `open_clip:NAME/TAG`
            - a folder that timm, transformers, PEFT or this package wrote
            - `path/to/file.py:function` or `package.module:function`: a function of your own that
              returns a module, or a module and a dict of options of `sc.wrap`, or a view
            - such a function, or a module, which receives `weights`

        weights: A file or folder that a training or `sc.background.export` wrote; None for the
            library's own, which are fetched; "random" for random ones, which every result then
            mentions.
        device: A device such as "cuda"; None leaves the model where the library loads it.
        dtype: A dtype such as "bfloat16"; None keeps the library's.
        size: Height and width in pixels, for a model that can be built for others.
        classes: Class names, as in `sc.wrap`; "imagenet" for those of ImageNet-1k: for a model
            with a text tower, the names and the 80 prompts that CLIP was published with.
        trust_remote_code: Whether transformers may run code that lies beside the weights, with a
            warning. Its class must derive from one that is supported, or have `view_parts`.
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
    if not isinstance(spec, str | Path) and not callable(spec):
        raise BadOption("spec", type(spec).__name__, "a name, a path, a function or a module")
    # options are checked before weights are read
    classes = classes if classes == IMAGENET else class_names_of(classes)
    device, dtype = parse_device(device), parse_dtype(dtype)
    given = None if callable(spec) else str(spec)
    made = spec if callable(spec) else own_function(str(spec))
    called = given or str(getattr(made, "__qualname__", type(made).__name__))
    library, _, name = called.partition(":")
    openers = {
        name: family.open_model
        for name, family in plugins("seecause.models").items()
        if hasattr(family, "open_model")
    }
    if made is not None:
        if weights == "random":
            raise BadOption("weights", "random", f"a checkpoint; {called} makes its own weights")
        source = _own(made, called, weights, size)
    elif name and library in openers and library not in LIBRARIES:
        source = Source(openers[library](name, weights=weights), {"size": size})
    else:
        if library not in LIBRARIES or not name:
            library, name = "path", called
            if not Path(called).exists():
                names = [f"{library}:NAME" for library in (*LIBRARIES, *openers)]
                names = [
                    f"timm:{called.rpartition(':')[2]}",
                    *names,
                    "the path of a model",
                    "FILE.py:FUNCTION",
                ]
                raise UnknownName("model", called, names)
        with trusting(called, trust_remote_code):
            source = open_source(library, name, weights=weights, size=height_and_width(size))
    source.module.to(device=device, dtype=dtype).eval().requires_grad_(False)
    wrap_options = {**source.wrap_options, **options}
    if classes == IMAGENET and "tokenizer" in wrap_options and "templates" not in options:
        classes, wrap_options["templates"] = imagenet_prompts()
    if classes is not None or options.get("head") is not None:  # names are the old head's
        wrap_options["classes"] = imagenet_names() if classes == IMAGENET else classes
    with reading(Path(name)) if Path(name).is_dir() else nullcontext():
        model = wrap(source.module, name=called, **wrap_options)
    model.random_weights, model.origin = weights == "random", source.origin
    return model


def own_function(spec: str) -> Callable[[], Any] | None:
    """The function that `path/to/file.py:function` or `package.module:function` names; None for
    other texts. Modules are looked for in the working folder, too."""
    place, _, name = spec.rpartition(":")
    file, is_file = Path(place), place.endswith(".py")
    dotted = all(map(str.isidentifier, place.split(".")))
    if not name.isidentifier() or place in LIBRARIES or not (is_file or dotted):
        return None
    if is_file and not file.is_file():
        raise DataMissing(place, "there is no such file", "give path/to/file.py:FUNCTION")
    home = str(file.absolute().parent if is_file else Path.cwd())
    sys.path[:0] = [] if home in sys.path else [home]
    with own_code(spec):
        if is_file:
            # a name without dots, which no other file has
            known = f"own_{file.stem}_{digest(str(file.absolute()), length=8)}"
            found = cast(Any, importlib.util.spec_from_file_location(known, file))
            sys.modules[known] = module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
        elif importlib.util.find_spec(place.partition(".")[0]) is None:
            return None
        else:
            module = importlib.import_module(place)
    if not callable(getattr(module, name, None)):
        raise UnknownName(f"function of {place}", name, vars(module))
    return getattr(module, name)


@contextmanager
def own_code(spec: str) -> Iterator[None]:
    """Report an error of a user's own code in one line, with the place that raised."""
    try:
        yield
    except Exception as failure:
        last = traceback.extract_tb(failure.__traceback__)[-1]
        where = f"{_reason(failure, 300)} in {last.filename}, line {last.lineno}"
        raise DataMissing(spec, where, "correct that code") from failure


def _own(
    made: Callable[[], Any] | nn.Module,
    spec: str,
    weights: Weights,
    size: Size | int | None,
) -> Source:
    """A module of a user's own, with `weights` of a training or of `background.export` in it."""
    origin = {"library": "function", "name": spec} if ":" in spec else {}
    options: Named = {}
    if not isinstance(made, nn.Module):
        with own_code(spec):
            made = made()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping):
        made, options = made[0], dict(made[1])
    if isinstance(made, VisionModel):
        made, options = made.module, _options_of(made)
    if not isinstance(made, nn.Module):
        expected = "a function that returns an nn.Module, (module, options of sc.wrap), or a view"
        raise BadOption("model", f"{spec}, which returned a {type(made).__name__}", expected)
    made, folder = native_model(made)[0], Path(str(weights))
    if weights is not None and (folder / CARD).is_file():
        with reading(folder):
            card = read_json(folder / CARD)
            fill(made, read_checkpoint(folder / PLAIN), str(folder))
            options = {**options, **_exported_options(card, folder)}
    elif weights is not None:
        fill(made, read_checkpoint(folder), str(weights))
    return Source(made, options | ({} if size is None else {"size": size}), origin)


# ---------------------------------------------------------------- native modules by name


class LanguageModel(UnsupportedModel):
    """A vision-language model, where a classifier is asked for."""

    def __init__(self, name: str):
        reason = "this is a vision-language model, not a classifier"
        super().__init__(name, reason, "use sc.lvlm.load, or `seecause lvlm`")


@dataclass
class Source:
    """A native module, options of `wrap` that its source tells, and how its library builds it."""

    module: nn.Module
    wrap_options: Named = field(default_factory=dict)
    origin: Named = field(default_factory=dict)


def open_source(
    library: str,
    name: str,
    *,
    weights: Weights = None,
    size: Size | None = None,
) -> Source:
    """The native module behind `library:name`, where `library` may be "path"."""
    path = Path(name)
    if weights is not None and (library == "builtin" or (library == "path" and path.is_dir())):
        raise BadOption("weights", weights, "no value: this model has its own")
    if weights not in (None, "random") and (Path(str(weights)) / ADAPTER).is_file():
        if library != "hf":
            raise BadOption("weights", weights, "an adapter for a model of transformers (hf:NAME)")
        return _adapter(Path(str(weights)), name, size)
    if library == "path" and path.is_dir():
        return _folder(path, size)
    if library == "path":
        reason = "a file of weights does not say which model it is of"
        remedy = f"name the architecture: --model timm:NAME --weights {path}"
        raise DataMissing(str(path), reason, remedy)
    if library == "builtin":
        if (ZOO / name / "config.json").is_file():
            raise LanguageModel(f"builtin:{name}")
        source = saved(ZOO, name, kind="builtin model")
        return Source(source.module, {**source.wrap_options, "size": size}, source.origin)
    readers = {"timm": _timm, "torchvision": _torchvision, "open_clip": _open_clip}
    return readers.get(library, _transformers)(name, weights, size)


def fetched(
    what: str,
    fetch: Callable[[], Any],
    remedy: str = "pass weights=PATH (--weights PATH), or 'random' to use random ones",
) -> Any:
    """The result of a library's own loader; its failure is raised as `DataMissing`."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # libraries report each retry, and then the failure
    try:
        return fetch()
    except Exception as failure:  # clients of the network raise anything
        raise DataMissing(what, f"fetching failed ({_reason(failure, 600)})", remedy) from failure
    finally:
        logging.disable(before)


@contextmanager
def reading(folder: Path, *files: str, writer: str = "its library") -> Iterator[None]:
    """Report a missing or damaged file in the block as one `DataMissing`.

    Args:
        folder: What is being read.
        *files: Names of files that must be in the folder.
        writer: What wrote the folder, for the error.
    """
    if not all((folder / name).is_file() for name in files):
        absent = f"no {' and '.join(files)} there"
        raise DataMissing(str(folder), absent, f"give a folder that {writer} wrote")
    try:
        yield
    except SeecauseError:
        raise
    except Exception as damage:  # other libraries raise anything on a damaged file
        reason = f"{' or '.join(files) or 'it'} cannot be read ({_reason(damage, 200)})"
        raise DataMissing(str(folder), reason, f"give a file as {writer} writes it") from damage


def _reason(failure: Exception, longest: int) -> str:
    return textwrap.shorten(f"{type(failure).__name__}: {failure}", longest, placeholder=" ...")


def read_json(path: Path) -> Named:
    """A card or config: an object of JSON."""
    with reading(path):
        card = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(card, dict):
            raise ValueError(f"it holds a {type(card).__name__}, not an object")
        return card


# ---------------------------------------------------------------- files and folders


def _folder(folder: Path, size: Size | None) -> Source:
    """The model in a folder, whichever library wrote it."""
    if (folder / CARD).is_file():
        with reading(folder):
            return _exported(read_json(folder / CARD), folder)
    if (folder / ADAPTER).is_file():
        return _adapter(folder, None, size)
    if (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
        if "architecture" in config and "model_type" not in config:
            return _timm_folder(folder, config, size)
        return _transformers(str(folder), None, size)
    if _cards(folder):
        return saved(folder, only_card(folder).stem)
    below = sorted(str(path.name) for path in folder.iterdir())
    reason = f"no config.json and no model of this package there, but {_few(below) or 'nothing'}"
    remedy = (
        "give a folder that timm, transformers, PEFT or this package wrote; for a file of weights"
        " name the architecture: --model timm:NAME --weights FILE"
    )
    raise DataMissing(str(folder), reason, remedy)


def saved(folder: Path, name: str, *, kind: str = "saved model") -> Source:
    """A model that this package wrote: NAME.json (architecture, classes, normalisation) and
    NAME.safetensors."""
    path = folder / f"{name}.json"
    if not path.is_file():
        known = [card.stem for card in folder.glob("*.json")]
        raise UnknownName(kind, name, known + [c.parent.name for c in folder.glob("*/config.json")])
    with reading(path):
        card, state = read_json(path), read_checkpoint(path.with_suffix(".safetensors"))
        architecture = card["architecture"]
        builder = BUILDERS.get(architecture["class"])
        if builder is not None:
            return importlib.import_module(builder).from_card(card, state, name)
        origin = {"library": "timm", **architecture}
        module = build_native(origin)
        fill(module, state, name)
        return Source(module, {key: card[key] for key in ("classes", "mean", "std")}, origin)


def only_card(folder: Path) -> Path:
    """The card of the one model that this package wrote to a folder."""
    cards = _cards(folder)
    if len(cards) != 1:
        found = f"{len(cards)} models (NAME.json beside NAME.safetensors), no config.json"
        raise DataMissing(str(folder), found, "give a folder with one model")
    return cards[0]


def _cards(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.json") if path.with_suffix(".safetensors").is_file()]


def _exported(card: Named, folder: Path) -> Source:
    """A model that `background.export` wrote."""
    origin = card["origin"]
    if not origin or origin["library"] == "function":
        name = origin.get("name", "FILE.py:FUNCTION")
        remedy = f"name the code, too: sc.load({name!r}, weights={str(folder)!r})"
        remedy += f" (--model {name} --weights {folder})"
        raise DataMissing(str(folder), f"its module is of your own code, {name}", remedy)
    if origin["library"] == "transformers":
        module = pretrained_model(_model_class(origin["class"]), folder)
    else:
        module = build_native(origin, folder)
        fill(module, read_checkpoint(folder / PLAIN), str(folder))
    return Source(module, _exported_options(card, folder), origin)


def _exported_options(card: Mapping[str, Any], folder: Path) -> Named:
    """Options of `wrap` on the card of an exported model."""
    options: Named = {
        "preprocess": Preprocess(**card["preprocess"]),
        "classes": card["classes"],
        "sigmoid": card["sigmoid"],
        "output": card.get("output"),
    }
    if (own := card["head"]) is not None:
        state = read_checkpoint(folder / HEAD)
        if own["kind"] == "cosine":
            head: nn.Module = CosineHead(state["matrix"], scale=own["scale"])
        else:
            kind = UnitLinear if own["kind"] == "unit-linear" else nn.Linear
            head = kind(*state["weight"].shape[::-1], bias="bias" in state)
            head.load_state_dict(state)
        options |= {"head": head, "pool": card["pool"]}
    if card["templates"]:
        options["templates"] = card["templates"]
        if (folder / "tokenizer_config.json").is_file():
            from transformers import AutoTokenizer

            options["tokenizer"] = pretrained(AutoTokenizer, folder)
        elif card["origin"].get("library") == "open_clip":
            import open_clip

            options["tokenizer"] = open_clip.get_tokenizer(card["origin"]["name"])
    return options


def build_native(origin: Named, folder: Path | None = None) -> Any:
    """The whole module with random weights, from a `Source.origin`. A model of transformers has its
    configuration in `origin`, or in the folder."""
    library, name = origin["library"], origin.get("name", "")
    if library == "transformers":
        import transformers

        kind = _model_class(origin["class"])
        if folder is None:
            return kind(kind.config_class.from_dict(origin["config"]))
        return kind(pretrained(transformers.AutoConfig, folder))
    if library == "torchvision":
        from torchvision import models

        return models.get_model(name, weights=None, **origin["options"])
    if library == "open_clip":
        import open_clip

        _need_known("open_clip model", name, open_clip.list_models())
        return open_clip.create_model(name, pretrained=None)
    if library == "seecause":
        from seecause.critters.planted import PlantedViT

        return PlantedViT(**origin["arguments"])
    if "arguments" in origin:
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(**origin["arguments"])
    import timm

    _need_known("timm model", name, timm.list_models())
    return timm.create_model(name, pretrained=False, **origin["options"])


def _model_class(name: str) -> Any:
    """A model class of transformers; a card may not name anything else."""
    import transformers

    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise UnknownName("model class of transformers", str(name), ())
    return kind


def _need_known(kind: str, name: str, known: Sequence[str]) -> None:
    """Raises for addresses of a hub: a card may name only models that the library builds itself."""
    if str(name).partition(".")[0] not in known:
        raise UnknownName(kind, str(name), known)


# ---------------------------------------------------------------- timm


def _timm(name: str, weights: Weights, size: Size | None) -> Source:
    import timm

    bare = name.partition(".")[0]
    if not timm.is_model(bare):
        raise UnknownName("timm model", name, timm.list_models())
    options, state = _timm_size(bare, size), chosen_checkpoint(weights)
    options |= class_count(state, "head", "head.fc", "fc", "classifier")
    module = fetched(
        f"timm:{name}", lambda: timm.create_model(name, pretrained=weights is None, **options)
    )
    if state:
        fill(module, state, str(weights))
    count = module.num_classes
    origin = {"library": "timm", "name": name, "options": {**options, "num_classes": count}}
    return Source(
        module, {"size": size, "classes": imagenet_names() if count == 1000 else ()}, origin
    )


def _timm_folder(folder: Path, card: Named, size: Size | None) -> Source:
    """A model that timm's `save_for_hf` or `push_to_hf_hub` wrote."""
    import timm

    name = str(card["architecture"])
    _need_known("timm model", name, timm.list_models())
    options = _timm_size(name, size)
    with reading(folder):
        module = timm.create_model(f"local-dir:{folder}", pretrained=True, **options)
    options |= {**card.get("model_args", {}), "num_classes": module.num_classes}
    words = card.get("label_descriptions") or {}
    classes = [words.get(name, name) for name in card.get("label_names") or ()]
    origin = {"library": "timm", "name": name, "options": options}
    return Source(module, {"size": size, "classes": classes}, origin)


def _timm_size(name: str, size: Size | None) -> Named:
    """The option that builds a model of timm for images of a size; convolutional networks take
    any."""
    import timm

    if size is None or timm.models.is_model_in_modules(name, ANY_SIZE):
        return {}
    return {"img_size": size}


def imagenet_names() -> tuple[str, ...]:
    """The names of ImageNet's 1,000 classes in the order of the labels, from timm."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo().label_descriptions())


def imagenet_prompts() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of ImageNet's classes and the prompts that CLIP was published with, from
    open_clip."""
    try:
        from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES
    except ImportError:
        raise MissingExtra("open_clip", "clip") from None
    return tuple(IMAGENET_CLASSNAMES), tuple(fill("{}") for fill in OPENAI_IMAGENET_TEMPLATES)


# ---------------------------------------------------------------- torchvision and open_clip


def _torchvision(name: str, weights: Weights, size: Size | None) -> Source:
    from torchvision import models

    known = models.list_models(module=models)  # classifiers of images alone
    if name not in known:
        raise UnknownName("torchvision classifier", name, known)
    default: Any = getattr(models.get_model_weights(name), "DEFAULT")  # noqa: B009  an enum's own
    state = chosen_checkpoint(weights)
    options: Named = class_count(state, "heads.head", "fc", "classifier", "classifier.6")
    if size is not None and name.startswith("vit_"):
        if size[0] != size[1]:
            raise BadOption("size", size, "a square: torchvision's vision transformers are square")
        options["image_size"] = size[0]
    module = fetched(
        f"torchvision:{name}",
        lambda: models.get_model(name, weights=default if weights is None else None, **options),
    )
    if state:
        fill(module, state, str(weights))
    names = () if "num_classes" in options else default.meta["categories"]
    frame = preprocess_of(default.transforms())
    wrap_options = {"preprocess": frame, "size": size, "classes": tuple(names)}
    origin = {"library": "torchvision", "name": name, "options": options}
    return Source(module, wrap_options, origin)


def _open_clip(name: str, weights: Weights, size: Size | None) -> Source:
    try:
        import open_clip
    except ImportError:
        raise MissingExtra("open_clip", "clip") from None
    if size is not None:
        raise BadOption("size", size, "no value: open_clip models have their own")
    arch, _, tag = name.partition("/")
    if arch not in open_clip.list_models():
        raise UnknownName("open_clip model", arch, open_clip.list_models())
    pretrained = (tag or None) if weights is None else str(weights)
    if weights == "random":
        pretrained = None
    elif pretrained is None:
        raise DataMissing(
            f"open_clip:{name}",
            "no pretrained tag",
            f"Write open_clip:{arch}/TAG, or pass weights=",
        )
    module = fetched(
        f"open_clip:{name}", lambda: open_clip.create_model(arch, pretrained=pretrained)
    )
    origin = {"library": "open_clip", "name": arch}
    return Source(module, {"tokenizer": open_clip.get_tokenizer(arch)}, origin)


# ---------------------------------------------------------------- transformers and PEFT

TASKS = ("Classification", "Detection", "Segmentation")  # ends of classes that predict
_TRUSTED = ContextVar("trust_remote_code", default=False)
_UNREAD = re.compile(r"(^|\.)(pooler|mask_token)(\.|$)")  # no prediction is read through these


@contextmanager
def trusting(spec: str, trust_remote_code: bool) -> Iterator[None]:
    """Let transformers run the code of a repository that is loaded in the block, with a warning;
    otherwise no code of a repository runs."""
    if trust_remote_code:
        log.warning("%s: code of its repository is run with all your rights", spec)
    token = _TRUSTED.set(trust_remote_code)
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def pretrained(loader: Any, where: str | Path, **options: Any) -> Any:
    """`loader.from_pretrained`, which runs code of a repository only inside `trusting`."""
    return loader.from_pretrained(where, trust_remote_code=_TRUSTED.get(), **options)


def pretrained_model(loader: Any, where: str | Path, *, labels: int = 0, **options: Any) -> Any:
    """`loader.from_pretrained` of a model; weights that the checkpoint lacks are an error. Only the
    classifier may be new, of so many `labels`, where an adapter brings its weights."""
    if labels:
        options |= {"num_labels": labels, "ignore_mismatched_sizes": True}
    module, info = pretrained(loader, where, output_loading_info=True, **options)
    mismatched = [entry[0] for entry in info.get("mismatched_keys") or ()]
    new = ("classifier.",) if labels else ()
    absent = sorted(
        name
        for name in [*info["missing_keys"], *mismatched]
        if not _UNREAD.search(name) and not name.startswith(new)
    )
    if absent:
        lacking = f"the checkpoint lacks {_few(absent)}"
        raise DataMissing(str(where), lacking, "give a checkpoint of the whole model")
    return module


def _transformers(name: str, weights: Weights, size: Size | None, *, labels: int = 0) -> Source:
    """A model of transformers; with `labels`, a classifier of so many classes."""
    import transformers

    where = name if weights in (None, "random") else str(weights)
    folder, what = Path(where), f"hf:{name}"
    if folder.is_file() or (where.startswith((".", "/", "~")) and not folder.is_dir()):
        raise DataMissing(what, f"{where} is no folder", "give a folder that transformers wrote")
    with reading(folder):
        config = fetched(what, lambda: pretrained(transformers.AutoConfig, where))
        kinds = [kind for kind in config.architectures or () if isinstance(kind, str)]
        kind = next((kind for kind in kinds if kind.endswith(TASKS)), "")
        if hasattr(config, "vision_config") and "ForConditionalGeneration" in str(kinds):
            raise LanguageModel(what)
        own = (getattr(config, "auto_map", None) or {}) if _TRUSTED.get() else {}
        automatic = next((name for name in own if name.startswith("AutoModel")), "AutoModel")
        loader: Any = getattr(transformers, automatic) if own or not kind else _model_class(kind)
        if labels:
            loader = transformers.AutoModelForImageClassification
        if weights == "random":
            auto = {"trust_remote_code": True} if own else {}
            module = loader.from_config(config, **auto) if auto or not kind else loader(config)
        else:
            module = fetched(what, lambda: pretrained_model(loader, where, labels=labels))
        if module.dtype in (torch.float16, torch.bfloat16):
            module = module.float()  # `load` narrows it again where dtype= asks for it
        options: Named = {"size": size}
        if config.model_type != "timm_wrapper":  # its config says more than a processor
            options |= _processor(where, rows=kind.endswith(("Detection", "Segmentation")))
        if hasattr(config, "text_config") and not kind:
            tokenizer = transformers.AutoTokenizer
            options["tokenizer"] = fetched(what, lambda: pretrained(tokenizer, where))
    return Source(module, options)


def _processor(where: str, *, rows: bool) -> Named:
    """The preprocessing beside a model; where there is none, `wrap` asks for it."""
    from transformers import AutoImageProcessor

    try:
        config = pretrained(AutoImageProcessor, where).to_dict()
    except Exception:  # there is none, or the network is not there
        return {}
    return {"preprocess": preprocess_from_processor(config | (one_frame(config) if rows else {}))}


def _adapter(folder: Path, name: str | None, size: Size | None) -> Source:
    """A model of transformers with the adapter of a PEFT folder merged into it; without a `name`,
    the folder names the model."""
    try:
        import peft
    except ImportError:
        raise MissingExtra("peft", "adapters") from None
    name = name or read_json(folder / ADAPTER).get("base_model_name_or_path")
    if not name:
        remedy = f"name it: --model hf:NAME --weights {folder}"
        raise DataMissing(str(folder), "the adapter does not name its base model", remedy)
    state = read_checkpoint(folder / "adapter_model.safetensors")
    count = class_count(state, "classifier", "classifier.modules_to_save")
    source = _transformers(name, None, size, labels=count.get("num_classes", 0))
    with reading(folder, writer="PEFT"):
        adapted = peft.PeftModel.from_pretrained(source.module, str(folder))
        source.module = adapted.merge_and_unload()
    return source


# ---------------------------------------------------------------- checkpoints of trainings

LOSSES = ("criterion", "loss", "optim", "metric")  # prefixes of weights that are ignored


class _Inert:
    """Replaces classes of other objects in a file, such as Lightning's hyper-parameters: an ordered
    dictionary, which torch fills with the object's items and attributes."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return OrderedDict()


class _Nothing:
    """Replaces numpy's arrays and scalars, whose state is no dictionary."""

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def chosen_checkpoint(weights: Weights) -> dict[str, Tensor]:
    """What `read_checkpoint` returns for an option `weights`; nothing for pretrained and random
    weights."""
    return {} if weights in (None, "random") else read_checkpoint(Path(str(weights)))


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Named weights in a safetensors or torch file, as timm reads it (averaged weights first, then
    `state_dict` or `model`), or in the one file of a folder."""
    whole = (path / name for name in ("model.safetensors", "pytorch_model.bin"))
    path = next(filter(Path.is_file, whole), path)
    if not path.is_file():
        reason = "no model.safetensors there" if path.is_dir() else "the file does not exist"
        raise DataMissing(str(path), reason, "give the path of a .safetensors or torch file")
    from timm.models import load_state_dict

    with reading(path, writer="the training"):
        foreign = (
            torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if zipfile.is_zipfile(path)
            else ()
        )
        inert = [(_Nothing if name.startswith("numpy") else _Inert, name) for name in foreign]
        with torch.serialization.safe_globals(cast(Any, inert)):
            content = load_state_dict(str(path), weights_only=True)
    named = content.items() if isinstance(content, Mapping) else ()
    state = {str(n).replace("_orig_mod.", ""): v for n, v in named if isinstance(v, Tensor)}
    if not state:
        reason = f"it holds a {type(content).__name__} without named weights"
        raise DataMissing(str(path), reason, "save torch.save(model.state_dict(), PATH)")
    return state


def class_count(state: Mapping[str, Tensor], *heads: str) -> dict[str, int]:
    """Rows of the classifier, a module called like one of `heads`, as the option `num_classes`."""
    for head in heads:
        named = [name for name in state if f".{name}".endswith(f".{head}.weight")]
        if named:
            return {"num_classes": len(state[min(named, key=len)])}
    return {}


def fill(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load weights into a module, or raise `DataMissing` with what does not fit.

    A prefix that a wrapper put in front of all names is removed (`module.`, `model.`), and the
    weights of losses beside the model are ignored.

    Args:
        module: The module to fill.
        state: Named weights.
        source: The file, for errors.
    """
    longest = max(module.state_dict(), key=len)
    found = [name.removesuffix(longest) for name in state if f".{name}".endswith(f".{longest}")]
    if len(found) > 1:
        listed = " and ".join(f"{prefix}*" for prefix in found)
        raise DataMissing(source, f"it holds several models: {listed}", "save one of them alone")
    prefix = "".join(found)
    beside = [name for name in state if not name.startswith(prefix) and name.startswith(LOSSES)]
    fitting = {name.removeprefix(prefix): v for name, v in state.items() if name not in beside}
    try:
        module.load_state_dict(fitting)
    except RuntimeError as misfit:
        remedy = "give the weights of this architecture"
        if "pos_embed" in str(misfit):
            remedy += ", or the size they are for: size= (--input size=H,W)"
        reason = f"the file does not fit ({_reason(misfit, 600)})"
        raise DataMissing(source, reason, remedy) from None
    if beside:
        log.warning("%s: weights beside the model are not used (%s)", source, _few(beside))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


# ---------------------------------------------------------------- class names


def class_names_of(classes: ClassNames | None) -> tuple[str, ...] | None:
    """Names in the order of the outputs, from the option `classes`."""
    if classes is None:
        return None
    if isinstance(classes, str | Path):
        return read_class_names(classes)
    names = tuple(classes)
    if not all(isinstance(name, str) for name in names):
        raise BadOption("classes", classes, "names in the order of the outputs, or a file of them")
    return names


def read_class_names(path: str | Path) -> tuple[str, ...]:
    """Names in a file: one a line, or a JSON list."""
    with reading(Path(path), writer="a text editor"):
        text = Path(path).read_text(encoding="utf-8-sig")
        lines = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
        names = tuple(filter(None, map(str.strip, lines)))
    if not names:
        remedy = "give a list, or a file with one name a line or a JSON list"
        raise DataMissing(str(path), "it holds no class names", remedy)
    return names
