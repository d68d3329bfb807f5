"""Models of transformers, by name or folder, and the other folders that libraries and trainings
leave behind: timm's, PEFT's adapters, our own.

What `heads.export` writes is a card (`seecause.json`) beside weights:

    zeroed   the library's own checkpoint; the card adds class names, preprocessing and a head of
             our own, if there is one
    sliced   smaller weights; the module is built whole, loses the same heads, and is then filled
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seecause.errors import (
    BadOption,
    DataMissing,
    MissingExtra,
    UnknownName,
    UnsupportedModel,
)
from seecause.models.checkpoints import (
    Checkpoint,
    class_list,
    fill,
    read_checkpoint,
    read_weights,
)
from seecause.models.heads import CosineHead, UnitLinear
from seecause.models.preprocess import (
    Preprocess,
    from_timm,
    one_frame,
    preprocess_from_processor,
)
from seecause.models.slicing import slice_heads
from seecause.models.sources import (
    ADAPTER,
    Source,
    fetched,
    only_card,
    open_source,
    pretrained,
    pretrained_model,
    read_card,
    saved,
    timm_size,
    usable,
)

SIGNAL_TASKS = ("VideoClassification",)
ROW_TASKS = (  # of transformers, whose models answer for boxes or pixels
    *("ObjectDetection", "SemanticSegmentation", "DepthEstimation", "UniversalSegmentation"),
    "InstanceSegmentation",
)
ASKED = ("GroundingDinoForObjectDetection",)  # answer for boxes of what a sentence names
PROMPTED = ("SamModel", "Sam2Model")  # answer for pixels of a prompt
CARD = "seecause.json"
PLAIN, SLICED, HEAD = "model.safetensors", "sliced.safetensors", "head.safetensors"
ADAPTED = "adapter_model.safetensors", "adapter_model.bin"


def open_folder(folder: Path, size: tuple[int, int] | None) -> Source:
    """The model in a folder, whoever wrote it."""
    if (folder / CARD).is_file():
        _need_own_size(size)
        card = read_card(folder / CARD)
        with usable(folder / CARD):
            return _exported(card, folder)
    if (folder / ADAPTER).is_file():
        return open_adapter(folder, None, size)
    if (folder / "config.json").is_file():
        card = read_card(folder / "config.json")
        if "architecture" in card and "model_type" not in card:
            with usable(folder):
                return _open_timm(folder, card, size)
        return open_hf(str(folder), None, size)
    if not any(path.with_suffix(".safetensors").is_file() for path in folder.glob("*.json")):
        raise _nothing_in(folder)
    _need_own_size(size)
    return saved(folder, only_card(folder).stem)


def _need_own_size(size: tuple[int, int] | None) -> None:
    if size is not None:
        raise BadOption("size", size, "no value: a model that this package wrote has its own")


def _nothing_in(folder: Path) -> DataMissing:
    """What a folder without a model holds, and what to give instead."""
    below = sorted(path.parent.name for path in folder.glob("*/config.json"))
    below += sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER}"))
    files = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".pth", ".pt", ".ckpt")]
    if below:
        remedy = f"Give one of the models below it: {folder / below[-1]}"
    elif files:
        remedy = f"Name the architecture: --model timm:NAME --weights {sorted(files)[0]}"
    else:
        remedy = "Give a folder that timm, transformers, PEFT or this package wrote"
    return DataMissing(str(folder), "no config.json and no model of ours there", remedy)


def _open_timm(folder: Path, card: dict[str, Any], size: tuple[int, int] | None) -> Source:
    """What timm's `save_for_hf` and `push_to_hf_hub` write."""
    import timm

    name = str(card["architecture"])
    if not timm.is_model(name):
        raise UnknownName("timm model", name, timm.list_models())
    checkpoint = read_checkpoint(folder)
    options = {**card.get("model_args", {}), "num_classes": card["num_classes"]}
    if size is not None:
        options |= timm_size(name, size)
    steps = card.get("pretrained_cfg") or {}
    module = timm.create_model(name, pretrained=False, **options)
    fill(module, checkpoint.state, str(folder), resized="img_size" in options)
    names = _labels(card) or checkpoint.names_for(options["num_classes"])
    wrap_options: dict[str, Any] = {"size": size, "classes": names}
    if {"input_size", "mean", "std"} <= set(steps):
        wrap_options["preprocess"] = from_timm(steps)
    return Source(module, wrap_options, {"library": "timm", "name": name, "options": options})


def _labels(card: dict[str, Any]) -> tuple[str, ...]:
    """Names of classes in a card of timm, or what it calls them in words."""
    names, words = class_list(card.get("label_names")), card.get("label_descriptions") or {}
    return tuple(str(words.get(name, name)) for name in names)


def open_adapter(folder: Path, base: str | None, size: tuple[int, int] | None) -> Source:
    """A base model with the adapter of a PEFT folder merged into it. `base` is a model as
    `sc.load` takes it; without it the folder says which one of transformers it is."""
    try:
        import peft
    except ImportError:
        raise MissingExtra("peft", "adapters") from None
    card = read_card(folder / ADAPTER)
    named = card.get("base_model_name_or_path")
    if base is None and not named:
        raise DataMissing(
            str(folder),
            "the adapter does not say what it was trained on",
            f"Name it: --model timm:NAME (or hf:NAME) --weights {folder}",
        )
    where = next((folder / name for name in ADAPTED if (folder / name).is_file()), folder / "none")
    adapter = read_checkpoint(where)
    library, _, name = (base or f"hf:{named}").partition(":")
    build: dict[str, Callable[..., Source]] = {"timm": _timm_base, "hf": _hf_base}
    if library not in build:
        raise BadOption("model", base, "timm:NAME or hf:NAME, which an adapter can be merged into")
    with usable(folder):
        source = build[library](name, adapter, size)
        adapted = peft.PeftModel.from_pretrained(source.module, str(folder))
        source.module = adapted.merge_and_unload()
    return source


def _timm_base(name: str, adapter: Checkpoint, size: tuple[int, int] | None) -> Source:
    source = open_source("timm", name, size=size)
    count = adapter.count_classes(("head.weight", "head.modules_to_save.weight"))
    if count is not None and count != source.module.num_classes:
        base: Any = source.module
        base.reset_classifier(count)
        source.wrap_options["classes"] = ()
        source.origin["options"]["num_classes"] = count
    return source


def _hf_base(name: str, adapter: Checkpoint, size: tuple[int, int] | None) -> Source:
    count = adapter.count_classes(("classifier.weight", "classifier.modules_to_save.weight"))
    return open_hf(name, None, size, labels=count)


def _exported(card: dict[str, Any], folder: Path) -> Source:
    origin = card["origin"]
    if not origin:
        raise DataMissing(
            str(folder),
            "its card does not say how the module is built",
            "Build it, load model.safetensors into it, and sc.wrap it",
        )
    if card["form"] == "sliced":
        module = build_native(origin, folder)
        for place, keep in zip(card["blocks"], card["kept"], strict=True):
            if keep is not None:
                slice_heads(module.get_submodule(place), keep)
        fill(module, read_weights(folder / SLICED), str(folder))
        origin = {**origin, "kept": card["kept"]}
    elif origin["library"] == "transformers":
        read_card(folder / "config.json")
        module = pretrained_model(_model_class(origin["class"]), folder)
    else:
        module = build_native(origin, folder)
        fill(module, read_weights(folder / PLAIN), str(folder))
    return Source(module, _wrap_options(card, folder), origin)


def build_native(origin: dict[str, Any], folder: Path | None = None) -> Any:
    """The whole module, with random weights. A model of transformers has its configuration in
    `origin`, or in the folder."""
    library = origin["library"]
    if library == "transformers":
        import transformers

        kind = _model_class(origin["class"])
        if folder is None:
            return kind(kind.config_class.from_dict(origin["config"]))
        read_card(folder / "config.json")
        return kind(pretrained(transformers.AutoConfig, folder))
    if library == "torchvision":
        from torchvision import models

        return models.get_model(origin["name"], weights=None, **origin["options"])
    if library == "open_clip":
        import open_clip

        _need_name("open_clip model", origin["name"], open_clip.list_models())
        return open_clip.create_model(origin["name"], pretrained=None)
    if library == "seecause":  # the only one of ours that does not write itself
        from seecause.critters.planted import PlantedViT

        return PlantedViT(**origin["arguments"])
    if "arguments" in origin:
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(**origin["arguments"])
    import timm

    _need_name("timm model", origin["name"], timm.list_models())
    return timm.create_model(origin["name"], pretrained=False, **origin["options"])


def _model_class(name: str) -> Any:
    """A model of transformers by its name; a card may not name anything else."""
    import transformers

    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise UnknownName("model class of transformers", str(name), ())
    return kind


def _need_name(kind: str, name: str, known: Sequence[str]) -> None:
    """No address of a hub: a folder that was given is read, and nothing else."""
    if str(name).partition(".")[0] not in known:
        raise UnknownName(kind, str(name), known)


def _wrap_options(card: dict[str, Any], folder: Path) -> dict[str, Any]:
    frame: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in card["preprocess"].items()
    }
    wrap_options: dict[str, Any] = {
        "preprocess": Preprocess(**frame),
        "classes": tuple(card["classes"]),
        "sigmoid": card["sigmoid"],
    }
    if card["head"] is not None:
        wrap_options |= {"head": _head(card["head"], folder), "pool": card["pool"]}
    if card["templates"]:
        wrap_options["templates"] = card["templates"]
        if (folder / "tokenizer_config.json").is_file():
            from transformers import AutoTokenizer

            wrap_options["tokenizer"] = pretrained(AutoTokenizer, folder)
        elif card["origin"]["library"] == "open_clip":
            import open_clip

            wrap_options["tokenizer"] = open_clip.get_tokenizer(card["origin"]["name"])
    return wrap_options


def _head(card: dict[str, Any], folder: Path) -> nn.Module:
    state = read_weights(folder / HEAD)
    if card["kind"] == "cosine":
        return CosineHead(state["matrix"], scale=card["scale"])
    kind = UnitLinear if card["kind"] == "unit-linear" else nn.Linear
    head = kind(state["weight"].shape[1], state["weight"].shape[0], bias="bias" in state)
    head.load_state_dict(state)
    return head


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
        raise DataMissing(
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
        raise UnsupportedModel(
            name if Path(name).is_dir() else f"hf:{name}",
            "this is a vision-language model, not a classifier",
            "use sc.lvlm.load, or `seecause lvlm`",
        )
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
        except DataMissing:
            return {"size": size}
    steps = preprocess_from_processor({**config, **(one_frame(config) if framed else {})})
    return {"preprocess": steps, "size": size}
