"""Where models come from: names and files -> native modules, with what their sources tell about
them.

Weights are fetched by the library that knows the name, or read from a local file or folder. Nothing
is random unless asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seecause.errors import (
    BadOption,
    MissingExtra,
    MissingWeights,
    NeedlessOption,
    NoClassifier,
    UnknownName,
    UnsupportedModel,
)
from seecause.models.checkpoints import Checkpoint, fill, read_checkpoint, read_weights
from seecause.models.hub import fetched, pretrained, pretrained_model, read_card, usable
from seecause.models.preprocess import Preprocess, one_frame, preprocess_from_processor

ADAPTER = "adapter_config.json"  # of PEFT
# modules of timm whose models take pictures of any size
ANY_SIZE = ("resnet", "densenet", "vgg", "convnext", "pvt_v2", "efficientvit_mit")
SIGNAL_TASKS = ("AudioClassification", "VideoClassification")
ROW_TASKS = (  # of transformers, whose models answer for boxes or pixels
    *("ObjectDetection", "SemanticSegmentation", "DepthEstimation", "UniversalSegmentation"),
    "InstanceSegmentation",
)
ASKED = ("GroundingDinoForObjectDetection",)  # answer for boxes of what a sentence names
PROMPTED = ("SamModel", "Sam2Model")  # answer for pixels of a prompt
ZOO = Path(__file__).parents[1] / "critters" / "checkpoints"  # what `builtin:` names
# classes of our own, by the module whose `from_card` builds them; imported when a card names one
BUILDERS = {
    "IFAM": "seecause.faithful.run",
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
) -> Source:
    """The native module behind `library:name`."""
    if library == "builtin":
        for what, given in (("weights", weights), ("size", size)):
            if given is not None:
                raise NeedlessOption(what, given, "an embedded model has its own")
        if (ZOO / name / "config.json").is_file():
            raise NoClassifier(f"builtin:{name}")
        return saved(ZOO, name, kind="builtin model")
    if library == "folder":
        from seecause.models.folders import open_folder

        if weights is not None:
            raise NeedlessOption("weights", weights, "a folder has its own")
        return open_folder(Path(name), size)
    if library == "file":
        return _timm_file(Path(name), weights, size)
    if weights not in (None, "random") and (Path(str(weights)) / ADAPTER).is_file():
        from seecause.models.folders import open_adapter

        return open_adapter(Path(str(weights)), f"{library}:{name}", size)
    opens = {"timm": _timm, "hf": open_hf, "torchvision": _torchvision, "open_clip": _open_clip}
    return opens[library](name, weights, size)


def _timm_file(path: Path, weights: str | Path | None, size: tuple[int, int] | None) -> Source:
    """A checkpoint that says which model of timm it is, as timm's training script writes it."""
    name = read_checkpoint(path).architecture
    if weights is not None or not name:
        raise MissingWeights(
            str(path),
            "a file of weights does not say which model they are of",
            f"Name the architecture: --model timm:NAME --weights {path}, or in Python"
            f" sc.load('timm:NAME', weights={str(path)!r})",
        )
    return _timm(name, path, size)


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

    arguments = card["architecture"]["arguments"]
    module = VisionTransformer(**arguments)
    fill(module, state, name)
    origin = {"library": "timm", "class": "VisionTransformer", "arguments": arguments}
    return Source(module, {key: card[key] for key in ("classes", "mean", "std")}, origin)


def saved_names(folder: Path) -> list[str]:
    """Every model that is kept in `folder`: one with a card of ours, or a folder that transformers
    wrote."""
    ours = [path.stem for path in folder.glob("*.json")]
    return ours + [path.parent.name for path in folder.glob("*/config.json")]


def _timm(name: str, weights: str | Path | None, size: tuple[int, int] | None) -> Source:
    import timm

    bare, _, _ = name.partition(".")
    if not timm.is_model(bare):
        raise UnknownName("timm model", name, timm.list_models())
    options: dict[str, Any] = {} if size is None else timm_size(bare, size)
    checkpoint = _checkpoint(weights)
    heads = ("head.weight", "head.fc.weight", "fc.weight", "classifier.weight")
    count = None if checkpoint is None else checkpoint.count_classes(heads)
    options |= {} if count is None else {"num_classes": count}
    known = timm.get_pretrained_cfg(name) if weights is None else None
    module = fetched(
        f"timm:{name}",
        lambda: timm.create_model(name, pretrained=weights is None, **options),
        repo=None if known is None else known.hf_hub_id,
    )
    own = {**options, "num_classes": module.num_classes}
    wrap_options: dict[str, Any] = {"size": size}
    if checkpoint is not None:
        fill(module, checkpoint.state, str(weights), resized="img_size" in options)
        wrap_options["classes"] = checkpoint.names_for(module.num_classes)
    wrap_options["classes"] = wrap_options.get("classes") or imagenet_names(module.num_classes)
    return Source(module, wrap_options, {"library": "timm", "name": name, "options": own})


def timm_size(name: str, size: tuple[int, int]) -> dict[str, Any]:
    """The option that builds a model of timm for pictures of a size; convolutional networks take
    any."""
    import timm

    if timm.models.is_model_in_modules(name, ANY_SIZE):
        return {}
    if not timm.models.is_model_in_modules(name, ("efficientvit_msra",)):
        return {"img_size": size}
    if size[0] != size[1]:
        raise BadOption("size", size, f"a square: timm's {name} takes no other")
    return {"img_size": size[0]}


def _checkpoint(weights: str | Path | None) -> Checkpoint | None:
    return None if weights in (None, "random") else read_checkpoint(Path(str(weights)))


def open_hf(
    name: str,
    weights: str | Path | None,
    size: tuple[int, int] | None,
    *,
    labels: int | None = None,
) -> Source:
    """A model of transformers; with `labels`, a classifier of so many classes whose own weights may
    be missing, because an adapter brings them."""
    where = str(weights) if weights not in (None, "random") else name
    folder = Path(where)
    local = where.startswith((".", "/", "~"))  # no name of the hub begins so
    if folder.is_file() or (local and not folder.is_dir()):
        raise MissingWeights(
            f"hf:{name}", f"{where} is no folder", "Give a folder that transformers wrote"
        )
    with usable(folder) if folder.is_dir() else nullcontext():
        if (folder / "config.json").exists():
            read_card(folder / "config.json")
        return _hf_module(name, where, weights, size, labels)


def _hf_module(
    name: str,
    where: str,
    weights: str | Path | None,
    size: tuple[int, int] | None,
    labels: int | None,
) -> Source:
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

    config = fetched(
        f"hf:{name}",
        lambda: pretrained(AutoConfig, where),
        repo=None if Path(where).is_dir() else where,
    )
    kinds = config.architectures or ()
    if hasattr(config, "vision_config") and any("ForConditionalGeneration" in k for k in kinds):
        raise NoClassifier(name if Path(name).is_dir() else f"hf:{name}")
    own = any("ForImageClassification" in k for k in kinds)  # also of a model with two towers
    dual = hasattr(config, "text_config") and hasattr(config, "vision_config") and not own
    timm = config.model_type == "timm_wrapper"  # its config says more than a processor
    classifies = timm or labels is not None or own
    loader = AutoModelForImageClassification if classifies and not dual else AutoModel
    rows = _task_loader(kinds, ROW_TASKS)
    loader = rows or _task_loader(kinds, SIGNAL_TASKS) or loader
    if weights == "random":
        module = loader.from_config(config, trust_remote_code=False)
    else:
        module = fetched(f"hf:{name}", lambda: pretrained_model(loader, where, labels=labels))
    if module.dtype in (torch.float16, torch.bfloat16):
        module = module.float()  # as with files; `load` narrows it again where it is asked to
    wrap_options = {} if timm else _processor(name, where, size, framed=rows is not None)
    if dual or any(kind in ASKED for kind in kinds):
        from transformers import AutoTokenizer

        wrap_options["tokenizer"] = fetched(f"hf:{name}", lambda: pretrained(AutoTokenizer, where))
    return Source(module, wrap_options)


def _task_loader(kinds: Sequence[str], tasks: Sequence[str]) -> Any:
    """What loads a model of some tasks, by the class that a config names; None for any other."""
    import transformers

    for kind in kinds:
        if kind in PROMPTED and tasks is ROW_TASKS:
            return transformers.AutoModelForMaskGeneration
        if kind in ASKED and tasks is ROW_TASKS:
            return transformers.AutoModelForZeroShotObjectDetection
        for task in tasks:
            if kind.endswith(f"For{task}"):
                return getattr(transformers, f"AutoModelFor{task}")
    return None


def _processor(
    name: str, where: str, size: tuple[int, int] | None, *, framed: bool = False
) -> dict[str, Any]:
    """The preprocessing that is kept beside a model; nothing where none is, and `wrap` asks."""
    card = Path(where) / "preprocessor_config.json"
    if card.is_file():
        config = read_card(card)
    elif Path(where).is_dir():
        return {"size": size}
    else:
        from transformers import AutoImageProcessor

        try:
            config = fetched(f"hf:{name}", lambda: pretrained(AutoImageProcessor, where)).to_dict()
        except MissingWeights:
            return {"size": size}
    if config.get("feature_extractor_type") == "ASTFeatureExtractor":
        from seecause.models.signals import Spectrogram

        return {"preprocess": Spectrogram.of_extractor(config), "size": size}
    steps = preprocess_from_processor({**config, **(one_frame(config) if framed else {})})
    return {"preprocess": steps, "size": size}


def _torchvision(name: str, weights: str | Path | None, size: tuple[int, int] | None) -> Source:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known and name in models.list_models():  # of detection, segmentation, video ...
        reason, remedy = "it is no classifier of pictures", "name one: vit_b_16, resnet50, swin_t"
        raise UnsupportedModel(f"torchvision {name}", reason, remedy)
    if name not in known:
        raise UnknownName("torchvision model", name, known)
    default: Any = getattr(models.get_model_weights(name), "DEFAULT")  # noqa: B009  an enum's own
    options: dict[str, Any] = {}
    checkpoint = _checkpoint(weights)
    heads = ("heads.head.weight", "fc.weight", "classifier.weight", "classifier.6.weight")
    count = None if checkpoint is None else checkpoint.count_classes(heads)
    options |= {} if count is None else {"num_classes": count}
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
    names: Sequence[str] = ()
    if checkpoint is not None:
        fill(module, checkpoint.state, str(weights))
        names = checkpoint.names_for(options.get("num_classes", 1000))
    if not names and options.get("num_classes", 1000) == 1000:
        names = default.meta["categories"]
    steps = default.transforms()
    side = steps.crop_size[0]
    frame = Preprocess(
        size or (side, side),
        steps.mean,
        steps.std,
        side / steps.resize_size[0],
        filter=steps.interpolation.value,
    )
    wrap_options = {"preprocess": frame, "classes": tuple(names)}
    origin = {"library": "torchvision", "name": name, "options": options}
    return Source(module, wrap_options, origin)


def _open_clip(name: str, weights: str | Path | None, size: tuple[int, int] | None) -> Source:
    try:
        import open_clip
    except ImportError:
        raise MissingExtra("open_clip", "clip") from None
    if size is not None:
        raise NeedlessOption("size", size, "open_clip models have their own")
    arch, _, tag = name.partition("/")
    if arch not in open_clip.list_models():
        raise UnknownName("open_clip model", arch, open_clip.list_models())
    pretrained = (tag or None) if weights is None else str(weights)
    if weights == "random":
        pretrained = None
    elif pretrained is None:
        raise MissingWeights(
            f"open_clip:{name}",
            "no pretrained tag",
            f"Write open_clip:{arch}/TAG, or pass weights=",
        )
    known = (open_clip.get_pretrained_cfg(arch, tag) or {}) if pretrained == tag else {}
    repo = known.get("hf_hub", "").rpartition("/")[0]
    module = fetched(
        f"open_clip:{name}",
        lambda: open_clip.create_model(arch, pretrained=pretrained),
        repo=repo or None,
    )
    origin = {"library": "open_clip", "name": arch}
    return Source(module, {"tokenizer": open_clip.get_tokenizer(arch)}, origin)


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


def imagenet_names(count: int) -> tuple[str, ...]:
    """Class names of ImageNet-1k, from timm; nothing for other sizes."""
    if count != 1000:
        return ()
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return tuple(info.index_to_description(i) for i in range(1000))
