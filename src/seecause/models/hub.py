"""What others made: weights from the network, fetched by the library that knows them or refused
within seconds; cards and configs, read within bounds. All damage is one clear line."""

from __future__ import annotations

import json
import logging
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seecause.errors import MissingWeights, SeecauseError

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
        raise MissingWeights(what, f"fetching failed ({_reason(failure)})", remedy) from failure
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
        raise MissingWeights(
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
        raise MissingWeights(
            what, reason, f"Connect to the network, or: {remedy[0].lower()}{remedy[1:]}"
        ) from failure


def _reason(failure: Exception, longest: int = LONGEST) -> str:
    return textwrap.shorten(f"{type(failure).__name__}: {failure}", longest, placeholder=" ...")


def class_names(config: Any) -> tuple[str, ...]:
    """Class names in a config of transformers, unless they are placeholders: LABEL_0 ..."""
    names = tuple(str(config.id2label[index]) for index in sorted(config.id2label or ()))
    return () if names == tuple(f"LABEL_{i}" for i in range(len(names))) else names


def is_multi_label(config: Any) -> bool:
    """Whether a config of transformers says that classes answer independently."""
    return getattr(config, "problem_type", None) == "multi_label_classification"


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """What other libraries raise on a card or config that is damaged or means nothing, as one error
    of ours that names the file."""
    try:
        yield
    except (SeecauseError, MemoryError):
        raise
    except Exception as failure:  # whatever a builder makes of words that are not its own
        raise MissingWeights(
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
        raise MissingWeights(
            str(path),
            "it is no JSON, or cut off",
            "Give an intact folder, as its library wrote it",
        ) from failure
    if not isinstance(card, dict):
        raise MissingWeights(
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
        raise MissingWeights(
            str(path), f"{key} is {value}, not 0 to {_LIMITS[key]}", "Give an intact one"
        )
