"""Which adapter reads which library's modules, found by where a class is defined, so that nothing
is imported in vain.

A module that knows its own parts brings its adapter with it: a method `view_parts() -> Parts`.
Packages installed beside this one add families by the entry point `seecause.models`: an object with
    find_parts(module) -> Parts | None                      the adapter; None for what it is not for
    open_model(name, *, weights=None) -> nn.Module          what `sc.load("ENTRY:NAME")` opens
either of which it may lack.
"""

from __future__ import annotations

import importlib

from torch import nn

from seecause._plugins import plugins, warn_of_plugin
from seecause.errors import BadOption, SeecauseError, UnsupportedModel
from seecause.models import conv_view
from seecause.models.conv_view import ConvParts
from seecause.models.heads import TextHead, TextInput
from seecause.models.parts import Parts

ADAPTERS = {
    "timm": "seecause.models.timm_view",
    "transformers": "seecause.models.hf_view",
    "torchvision": "seecause.models.torchvision_view",
    "open_clip": "seecause.models.open_clip_view",
}
WITH_TEXT = ("transformers", "open_clip")  # libraries whose models may have a text tower


def find(module: nn.Module, *, text: TextInput | None = None) -> Parts | ConvParts:
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
            if text is not None and not isinstance(parts.extra, TextHead):
                raise BadOption(
                    "tokenizer", text.tokenize, f"None: {type(module).__name__} has no text tower"
                )
            return parts
    raise UnsupportedModel(
        f"{type(module).__module__}.{type(module).__name__}",
        f"no adapter knows it (adapters: {', '.join(ADAPTERS)})",
        "wrap a model of one of these libraries; docs/models.md says which, and what an adapter is",
    )


def _find_in_plugins(module: nn.Module) -> Parts | ConvParts | None:
    """The parts that the first plug-in knows; one that breaks is named, and the next is asked."""
    for name, plugin in plugins("seecause.models").items():
        try:
            parts = plugin.find_parts(module) if hasattr(plugin, "find_parts") else None
        except SeecauseError:
            raise  # it knows the module, and says what is wrong with it
        except Exception as error:  # whatever a stranger's code raises
            warn_of_plugin(
                "seecause.models", name, f"could not look at {type(module).__name__}", error
            )
            continue
        if parts is not None:
            return parts
    return None


def _find(module: nn.Module, library: str, kind: str, text: TextInput | None) -> Parts | ConvParts:
    if library in conv_view.LIBRARIES and kind in conv_view.SPLITS:
        return conv_view.find(module, library, kind)
    adapter = importlib.import_module(ADAPTERS[library])
    return adapter.find(module, text=text) if library in WITH_TEXT else adapter.find(module)
