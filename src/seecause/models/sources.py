"""Where models come from: names and files -> native modules, with what their sources tell about
them.

Weights are fetched by the library that knows the name, or read from a local file or folder. Nothing
is random unless asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from seecause.errors import BadOption, MissingExtra, MissingWeights, NoClassifier, UnknownName
from seecause.models.hub import fetched, pretrained, pretrained_model, read_card, usable
from seecause.models.preprocess import Preprocess, preprocess_from_processor

ZOO = Path(__file__).parents[1] / "critters" / "checkpoints"  # what `builtin:` names
# classes of our own, by the module whose `from_card` builds them; imported when a card names one
BUILDERS = {
    "IFAM": "seecause.faithful.checkpoint",
    "PlantedViT": "seecause.critters.planted",
}


@dataclass
class Source:
    """A native module, what `wrap` should be told about it, and how its library builds it."""

    module: nn.Module
    wrap_options: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)


def open_source(
    library: str,
    name: str,
    *,
    weights: str | Path | None = None,
    size: tuple[int, int] | None = None,
    classes: Sequence[str] | None = None,
) -> Source:
    """The native module behind `library:name`."""
    if library in ("builtin", "folder"):
        for what, given in (("weights", weights), ("size", size)):
            if given is not None:
                raise BadOption(what, given, "nothing: a saved model has its own")
        if library == "builtin" and (ZOO / name / "config.json").is_file():
            raise NoClassifier(f"builtin:{name}")
        if library == "builtin":
            return saved(ZOO, name, kind="builtin model")
        return _folder(Path(name), classes)
    return {"timm": _timm, "hf": _hf, "torchvision": _torchvision, "open_clip": _open_clip}[
        library
    ](name, weights, size, classes)


def saved(folder: Path, name: str, *, kind: str = "saved model") -> Source:
    """A model this package wrote: NAME.json (architecture, classes, normalisation) and
    NAME.safetensors."""
    card = folder / f"{name}.json"
    if not card.is_file():
        raise UnknownName(kind, name, saved_names(folder))
    state = read_weights(card.with_suffix(".safetensors"))
    with usable(card):
        return _from_card(read_card(card), state, name)


def _from_card(card: dict[str, Any], state: dict[str, Tensor], name: str) -> Source:
    builder = BUILDERS.get(card["architecture"]["class"])
    if builder is not None:
        return importlib.import_module(builder).from_card(card, state, name)
    from timm.models.vision_transformer import VisionTransformer

    module = VisionTransformer(**card["architecture"]["arguments"])
    fill(module, state, name)
    origin = {
        "library": "timm",
        "class": "VisionTransformer",
        "arguments": card["architecture"]["arguments"],
    }
    return Source(
        module, {"classes": card["classes"], "mean": card["mean"], "std": card["std"]}, origin
    )


def saved_names(folder: Path) -> list[str]:
    """Every model that is kept in `folder`: one with a card of ours, or a folder that transformers
    wrote."""
    return [path.stem for path in folder.glob("*.json")] + [
        path.parent.name for path in folder.glob("*/config.json")
    ]


def _timm(
    name: str,
    weights: str | Path | None,
    size: tuple[int, int] | None,
    classes: Sequence[str] | None,
) -> Source:
    import timm

    bare, _, _ = name.partition(".")
    if not timm.is_model(bare):
        raise UnknownName("timm model", name, timm.list_models())
    convolutional = timm.models.is_model_in_modules(
        bare, ("resnet", "densenet", "vgg")
    )  # they take pictures of any size
    options: dict[str, Any] = {} if size is None or convolutional else {"img_size": size}
    state = None if weights in (None, "random") else read_weights(Path(str(weights)))
    if state is not None:
        _count_classes(
            state,
            ("head.weight", "head.fc.weight", "fc.weight", "classifier.weight"),
            options,
            "num_classes",
        )
    known = timm.get_pretrained_cfg(name) if weights is None else None
    repo = None if known is None else known.hf_hub_id
    module = fetched(
        f"timm:{name}",
        lambda: timm.create_model(name, pretrained=weights is None, **options),
        repo=repo,
    )
    if state is not None:
        fill(module, state, str(weights))
    wrap_options: dict[str, Any] = {"size": size} if convolutional else {}
    if classes is None:
        wrap_options["classes"] = imagenet_names(module.num_classes)
    own = {**options, "num_classes": module.num_classes}
    return Source(module, wrap_options, {"library": "timm", "name": name, "options": own})


def _hf(
    name: str,
    weights: str | Path | None,
    size: tuple[int, int] | None,
    classes: Sequence[str] | None,
) -> Source:
    where = str(weights) if weights not in (None, "random") else name
    if Path(where).is_file() or (
        where.startswith((".", "/", "~")) and not Path(where).is_dir()
    ):  # no name of the hub begins so
        raise MissingWeights(
            f"hf:{name}", f"{where} is no folder", "Give a folder that transformers wrote"
        )
    if Path(where).is_dir():
        with usable(Path(where)):
            if (Path(where) / "config.json").exists():
                read_card(Path(where) / "config.json")
            return _hf_module(name, where, weights, size)
    return _hf_module(name, where, weights, size)


def _hf_module(
    name: str, where: str, weights: str | Path | None, size: tuple[int, int] | None
) -> Source:
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

    config = fetched(
        f"hf:{name}",
        lambda: pretrained(AutoConfig, where),
        repo=None if Path(where).is_dir() else where,
    )
    if hasattr(config, "vision_config") and any(
        "ForConditionalGeneration" in a for a in config.architectures or ()
    ):
        raise NoClassifier(name if Path(name).is_dir() else f"hf:{name}")
    dual = hasattr(config, "text_config") and hasattr(config, "vision_config")
    bare = not any("ForImageClassification" in a for a in config.architectures or ()) or dual
    loader = AutoModel if bare else AutoModelForImageClassification
    module = (
        loader.from_config(config, trust_remote_code=False)
        if weights == "random"
        else fetched(f"hf:{name}", lambda: pretrained_model(loader, where))
    )
    if module.dtype in (torch.float16, torch.bfloat16):
        module = module.float()  # as with files; `load` narrows it again where it is asked to
    wrap_options: dict[str, Any] = {}
    card = Path(where) / "preprocessor_config.json"
    if card.is_file():
        steps = preprocess_from_processor(read_card(card))
        wrap_options = {"preprocess": replace(steps, size=size or steps.size)}
    elif not Path(where).is_dir():
        from transformers import AutoImageProcessor

        steps = preprocess_from_processor(
            fetched(f"hf:{name}", lambda: pretrained(AutoImageProcessor, where)).to_dict()
        )
        wrap_options = {"preprocess": replace(steps, size=size or steps.size)}
    if dual:
        from transformers import AutoTokenizer

        wrap_options["tokenizer"] = fetched(f"hf:{name}", lambda: pretrained(AutoTokenizer, where))
    return Source(module, wrap_options)


def _torchvision(
    name: str,
    weights: str | Path | None,
    size: tuple[int, int] | None,
    classes: Sequence[str] | None,
) -> Source:
    from torchvision import models

    if name not in models.list_models():
        raise UnknownName("torchvision model", name, models.list_models())
    default: Any = getattr(models.get_model_weights(name), "DEFAULT")  # noqa: B009  an enum's own
    options: dict[str, Any] = {}
    state = None if weights in (None, "random") else read_weights(Path(str(weights)))
    if state is not None:
        _count_classes(
            state,
            ("heads.head.weight", "fc.weight", "classifier.weight", "classifier.6.weight"),
            options,
            "num_classes",
        )
    if size is not None and name.startswith("vit_"):
        if size[0] != size[1]:
            raise BadOption(
                "size", size, "a square: torchvision's VisionTransformer takes no other"
            )
        options["image_size"] = size[0]
    module = fetched(
        f"torchvision:{name}",
        lambda: models.get_model(name, weights=default if weights is None else None, **options),
    )
    if state is not None:
        fill(module, state, str(weights))
    steps = default.transforms()
    names = default.meta["categories"] if options.get("num_classes", 1000) == 1000 else ()
    side = steps.crop_size[0]
    wrap_options = {
        "preprocess": Preprocess(
            size or (side, side),
            tuple(steps.mean),
            tuple(steps.std),
            crop=side / steps.resize_size[0],
            filter="bilinear",
        )
    }
    origin = {"library": "torchvision", "name": name, "options": options}
    return Source(
        module,
        wrap_options if classes is not None else {**wrap_options, "classes": tuple(names)},
        origin,
    )


def _open_clip(
    name: str,
    weights: str | Path | None,
    size: tuple[int, int] | None,
    classes: Sequence[str] | None,
) -> Source:
    try:
        import open_clip
    except ImportError:
        raise MissingExtra("open_clip", "clip") from None
    if size is not None:
        raise BadOption("size", size, "None: open_clip models have their own size")
    arch, _, tag = name.partition("/")
    if arch not in open_clip.list_models():
        raise UnknownName("open_clip model", arch, open_clip.list_models())
    pretrained = (
        None if weights == "random" else str(weights) if weights is not None else tag or None
    )
    if pretrained is None and weights != "random":
        raise MissingWeights(
            f"open_clip:{name}",
            "no pretrained tag",
            f"Write open_clip:{arch}/TAG, or pass weights=",
        )
    repo = (
        (open_clip.get_pretrained_cfg(arch, tag) or {}).get("hf_hub", "").rpartition("/")[0]
        if pretrained == tag
        else ""
    )
    module = fetched(
        f"open_clip:{name}",
        lambda: open_clip.create_model(arch, pretrained=pretrained),
        repo=repo or None,
    )
    return Source(
        module, {"tokenizer": open_clip.get_tokenizer(arch)}, {"library": "open_clip", "name": arch}
    )


def _folder(folder: Path, classes: Sequence[str] | None) -> Source:
    if (folder / "seecause.json").is_file():
        from seecause.models.exported import read_exported

        return read_exported(folder, classes)
    if (folder / "config.json").is_file():
        return _hf(str(folder), None, None, None)
    return saved(folder, only_card(folder).stem)


def only_card(folder: Path) -> Path:
    """The card of the one model that this package wrote there."""
    cards = [path for path in folder.glob("*.json") if path.with_suffix(".safetensors").is_file()]
    if len(cards) != 1:
        raise MissingWeights(
            str(folder),
            f"{len(cards)} models (NAME.json beside NAME.safetensors) and no config.json there",
            "Give a folder with one model",
        )
    return cards[0]


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from a safetensors file or a weights-only torch file; half-precision files are
    widened when copied."""
    if not path.is_file():
        raise MissingWeights(
            str(path),
            "it is a folder" if path.is_dir() else "the file does not exist",
            "Give the path of a .safetensors or torch file",
        )
    try:
        state: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except (
        *(OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError),
        *(ArithmeticError, AssertionError, SafetensorError, UnpicklingError),
    ) as broken:
        raise MissingWeights(
            str(path),
            f"it cannot be read ({type(broken).__name__})",
            "Give an intact .safetensors or weights-only torch file",
        ) from broken
    if not isinstance(state, dict):
        raise MissingWeights(
            str(path),
            f"it holds a {type(state).__name__}, not a state dict",
            "Give a file of named weights",
        )
    for wrapper in ("state_dict", "model"):
        if isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def imagenet_names(count: int) -> tuple[str, ...]:
    """Class names of ImageNet-1k, from timm; nothing for other sizes."""
    if count != 1000:
        return ()
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return tuple(info.index_to_description(i) for i in range(1000))


def _count_classes(
    state: dict[str, Tensor], heads: tuple[str, ...], options: dict[str, Any], name: str
) -> None:
    for head in heads:
        if head in state:
            options[name] = len(state[head])
            return


def fill(module: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load weights into a module, or say what does not fit."""
    try:
        module.load_state_dict(state)
    except RuntimeError as mismatch:
        first = str(mismatch).partition("\n")[2].split("\n")[0].strip() or str(mismatch)
        raise MissingWeights(
            source,
            f"the file does not fit {type(module).__name__}: {first[:200]}",
            "Give the weights of this architecture",
        ) from mismatch
