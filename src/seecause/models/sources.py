"""Where models come from: names and files -> native modules, with what their sources tell about
them.

Weights are fetched by the library that knows the name, or refused within seconds, or read from a
local file or folder; cards and configs are read within bounds. All damage is one clear line, and
nothing is random unless asked for.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from seecause.errors import (
    BadOption,
    DataMissing,
    SeecauseError,
    UnknownName,
    UnsupportedModel,
)
from seecause.models.checkpoints import Checkpoint, fill, read_checkpoint, read_weights

WAIT = 5.0  # seconds for a first answer of the hub
LONGEST = 600  # characters of what a library says
_UNREAD = re.compile(r"(^|\.)(pooler|mask_token)(\.|$)")  # no answer is read through these
REMEDY = "Pass weights=PATH (--weights PATH), or 'random' to use random ones"
# of sizes in cards and configs
_LIMITS = dict.fromkeys(("depth", "num_hidden_layers", "num_layers"), 1000) | dict.fromkeys(
    (
        *("embed_dim", "hidden_size", "num_heads", "num_attention_heads", "intermediate_size"),
        *("img_size", "image_size", "patch_size", "num_classes", "num_channels", "in_chans"),
        *("reg_tokens", "num_register_tokens", "projection_dim", "size", "height", "width"),
        *("shortest_edge", "crop_size"),
    ),
    1 << 17,
)
ADAPTER = "adapter_config.json"  # of PEFT
# modules of timm whose models take pictures of any size
ANY_SIZE = ("resnet", "densenet", "vgg", "convnext", "pvt_v2", "efficientvit_mit")
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
                raise BadOption(what, given, "no value: an embedded model has its own")
        if (ZOO / name / "config.json").is_file():
            raise UnsupportedModel(
                f"builtin:{name}",
                "this is a vision-language model, not a classifier",
                "use sc.lvlm.load, or `seecause lvlm`",
            )
        return saved(ZOO, name, kind="builtin model")
    if library == "folder":
        from seecause.models.folders import open_folder

        if weights is not None:
            raise BadOption("weights", weights, "no value: a folder has its own")
        return open_folder(Path(name), size)
    if library == "file":
        return _timm_file(Path(name), weights, size)
    if weights not in (None, "random") and (Path(str(weights)) / ADAPTER).is_file():
        from seecause.models.folders import open_adapter

        return open_adapter(Path(str(weights)), f"{library}:{name}", size)
    if library == "timm":
        return _timm(name, weights, size)
    if library == "hf":
        from seecause.models.folders import open_hf

        return open_hf(name, weights, size)
    if library == "torchvision":
        from seecause.models.torchvision import open_torchvision

        return open_torchvision(name, weights, size)
    from seecause.models.open_clip import open_clip_model

    return open_clip_model(name, weights, size)


def _timm_file(path: Path, weights: str | Path | None, size: tuple[int, int] | None) -> Source:
    """A checkpoint that says which model of timm it is, as timm's training script writes it."""
    name = read_checkpoint(path).architecture
    if weights is not None or not name:
        raise DataMissing(
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
    checkpoint = chosen_checkpoint(weights)
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


def chosen_checkpoint(weights: str | Path | None) -> Checkpoint | None:
    return None if weights in (None, "random") else read_checkpoint(Path(str(weights)))


def only_card(folder: Path) -> Path:
    """The card of the one model that this package wrote there."""
    cards = [path for path in folder.glob("*.json") if path.with_suffix(".safetensors").is_file()]
    if len(cards) != 1:
        raise DataMissing(
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


def fetched(
    what: str, fetch: Callable[[], Any], *, repo: str | None = None, remedy: str = REMEDY
) -> Any:
    """What a library's own loader gives; being offline or unknown becomes one clear line.

    `repo` is where the Hugging Face hub has it, if it does. Its client would ask an unreachable hub
    again and again, for up to a minute.
    """
    if repo is not None and not _kept(repo):
        _need_hub(what, remedy)
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)  # its retries are not news to anyone
    try:
        return fetch()
    except (OSError, RuntimeError, ValueError) as failure:
        raise DataMissing(what, f"fetching failed ({_reason(failure)})", remedy) from failure
    finally:
        hub.setLevel(level)


def pretrained(loader: Any, where: str | Path, **options: Any) -> Any:
    """`loader.from_pretrained` of a config, tokenizer or processor that runs no code of strangers:
    transformers would otherwise ask on standard input."""
    return loader.from_pretrained(where, trust_remote_code=False, **options)


def pretrained_model(
    loader: Any, where: str | Path, *, labels: int | None = None, **options: Any
) -> Any:
    """The same of a model; weights that the checkpoint lacks are an error, not random numbers. Only
    the classifier may be new, of so many `labels`, where an adapter brings its weights."""
    if labels is not None:
        options |= {"num_labels": labels, "ignore_mismatched_sizes": True}
    module, info = pretrained(loader, where, output_loading_info=True, **options)
    mismatched = [entry[0] for entry in info.get("mismatched_keys") or ()]
    absent = sorted(
        name for name in [*info.get("missing_keys", ()), *mismatched] if not _UNREAD.search(name)
    )
    absent = [name for name in absent if labels is None or not name.startswith("classifier.")]
    if absent:
        named = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if absent[3:] else "")
        raise DataMissing(
            str(where), f"the checkpoint lacks {named}", "Give a checkpoint of the whole model"
        )
    return module


def _kept(repo: str) -> bool:
    """Whether something of this repository is on disk already; the libraries then use it, online or
    not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot_download(repo, local_files_only=True)
    except LocalEntryNotFoundError:
        return False
    except HFValidationError:  # no name of a repository: the library says so better
        return True
    return True


def _need_hub(what: str, remedy: str) -> None:
    """Any answer will do: that of a proxy, or an error of the hub's own."""
    import httpx
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=WAIT)
    except (OSError, httpx.TransportError) as failure:
        reason = (
            f"they are not on this machine, and {constants.ENDPOINT} cannot be reached"
            f" ({_reason(failure)})"
        )
        raise DataMissing(
            what, reason, f"Connect to the network, or: {remedy[0].lower()}{remedy[1:]}"
        ) from failure


def _reason(failure: Exception, longest: int = LONGEST) -> str:
    return textwrap.shorten(f"{type(failure).__name__}: {failure}", longest, placeholder=" ...")


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """What other libraries raise on a card or config that is damaged or means nothing, as one error
    of ours that names the file."""
    try:
        yield
    except (SeecauseError, MemoryError):
        raise
    except Exception as failure:  # whatever a builder makes of words that are not its own
        raise DataMissing(
            str(path),
            f"no model can be made of it ({_reason(failure, 200)})",
            "Give an intact folder, as its library wrote it",
        ) from failure


def read_card(path: Path) -> dict[str, Any]:
    """A JSON object whose numbers are those of a model: sizes that no model has would take all
    memory, or for ever."""
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as failure:
        raise DataMissing(
            str(path),
            "it is no JSON, or cut off",
            "Give an intact folder, as its library wrote it",
        ) from failure
    if not isinstance(card, dict):
        raise DataMissing(
            str(path), f"it holds a {type(card).__name__}, not a JSON object", "Give an intact one"
        )
    _check_numbers(path, card)
    return card


def _check_numbers(path: Path, value: Any, key: str = "") -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(path, inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check_numbers(path, inner, key)
    elif isinstance(value, int) and key in _LIMITS and not 0 <= value <= _LIMITS[key]:
        raise DataMissing(
            str(path), f"{key} is {value}, not 0 to {_LIMITS[key]}", "Give an intact one"
        )
