"""`sc.lvlm.wrap` and `sc.lvlm.load`: from a module or a name to a verified view of a
vision-language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seecause.errors import BadOption, MissingWeights, UnknownName
from seecause.lvlm.verify import verify
from seecause.lvlm.view import LVLM
from seecause.models import decoder
from seecause.models.hub import fetched
from seecause.models.sources import ZOO

LIBRARIES = ("builtin", "hf")


def wrap(
    module: nn.Module,
    processor: Any = None,
    *,
    name: str | None = None,
    template: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    check: bool = True,
) -> LVLM:
    """A verified view of a transformers vision-language model. The module is put into eval mode and
    its parameters are frozen.

    `template` replaces the processor's chat template: a text with {image} and {question}. Without a
    processor, give native `inputs` to verify with, and make prompts from native inputs
    (`lvlm.read`).
    """
    module.eval().requires_grad_(False)
    if template is not None and not all(field in template for field in ("{image}", "{question}")):
        raise BadOption("template", template, "a text with {image} and {question} in it")
    view = LVLM(
        module=module,
        decoder=decoder.find(module),
        name=name or type(module).__name__,
        processor=processor,
        template=template,
    )
    if check:
        verify(view, None if inputs is None else view.read(inputs))
    return view


def load(
    spec: str,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    template: str | None = None,
    check: bool = True,
) -> LVLM:
    """A vision-language model by name: `builtin:critters-llava`, `hf:NAME-OR-FOLDER`, or a folder
    that transformers wrote."""
    library, _, where = spec.partition(":")
    if library not in LIBRARIES or not where:
        if not Path(spec).is_dir():
            raise UnknownName(
                "vision-language model", spec, [f"{library}:NAME" for library in LIBRARIES]
            )
        library, where = "hf", spec
    if library == "builtin":
        folder = ZOO / where
        if not (folder / "config.json").is_file() and where.startswith("critters-llava"):
            make = f"Make it with `seecause zoo train {where} --out DIR`, then name DIR/{where}"
            raise MissingWeights(spec, "this copy of the package does not hold it", make)
        if not (folder / "config.json").is_file():
            raise UnknownName(
                "builtin vision-language model",
                where,
                [path.parent.name for path in ZOO.glob("*/config.json")],
            )
        where = str(folder)
    module, processor = _open(where)
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(kind, torch.dtype):
        raise BadOption("dtype", dtype, "float32, bfloat16, float16 or float64")
    module.to(
        device=device, dtype=kind or (torch.float32 if library == "builtin" else None)
    )  # builtin files are in half precision
    return wrap(module, processor, name=spec, template=template, check=check)


def _open(where: str) -> tuple[Any, Any]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from seecause.models.image_readers import restrict

    module, processor = fetched(
        f"hf:{where}",
        lambda: (
            AutoModelForImageTextToText.from_pretrained(where, dtype="auto"),
            AutoProcessor.from_pretrained(where),
        ),
        repo=None if Path(where).is_dir() else where,
        remedy="Give a name or folder of transformers",
    )
    readers = getattr(module.config.text_config, "image_readers", None)
    return (restrict(module) if readers else module), processor
