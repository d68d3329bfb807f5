"""Library versions, digests of the code of this package and of plug-ins, and settings of the
process's arithmetic: everything besides options that results depend on."""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import seecause
from seecause.errors import BadOption
from seecause.files import digest, digest_file

LIBRARIES = (
    *("torch", "torchvision", "timm", "transformers"),
    *("numpy", "scipy", "scikit-learn", "pillow"),
)
ABOVE = ("report", "demo", "cli")  # packages that change no number of a result


@cache
def versions() -> dict[str, str]:
    """Versions of everything that can change a result; `source` is a digest of this package."""
    return {
        "python": platform.python_version(),
        "seecause": seecause.__version__,
        "source": source_digest(),
        **{name: version(name) for name in LIBRARIES},
    }


def arithmetic() -> list[Any]:
    """Settings of this process that change last bits: the number of threads, and the precision of
    float32 products and convolutions."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return [torch.get_num_threads(), products, convolutions]


def set_arithmetic(wanted: Sequence[Any]) -> None:
    """Apply the settings that `arithmetic` returned."""
    threads, products, convolutions = wanted
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions


def check_versions(planned: Mapping[str, str], here: Mapping[str, str] | None = None) -> None:
    """Refuse to continue a run with other software than it was planned with."""
    here = versions() if here is None else here
    for what in {**planned, **here} if planned else ():
        if here.get(what) != planned.get(what):
            expected = f"{planned.get(what)}, the version that the run was planned with"
            raise BadOption(what, here.get(what), expected)


@cache
def source_digest() -> str:
    """A digest of this package's code, without the packages in `ABOVE`."""
    root = Path(seecause.__file__).parent
    files = [
        path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] not in ABOVE
    ]
    return _digest_files(root, files)


def plugin_digest(thing: Callable[..., Any] | type) -> str:
    """A digest of the code that defines a method, metric or dataset outside this package: all files
    of its package, or its one file. Empty for this package, which `versions` covers."""
    thing = inspect.unwrap(thing)
    package, *inside = thing.__module__.split(".")
    file = getattr(sys.modules.get(thing.__module__), "__file__", None)
    if package == "seecause":
        return ""
    if file is None:  # a notebook or a prompt
        return digest(inspect.getsource(thing))
    root = Path(file).parents[max(0, len(inside) - 1)]
    return _digest_files(root, sorted(root.rglob("*.py")) if inside else [Path(file)])


def model_code_digest(model: Any) -> str:
    """A digest of the code of a model's modules that is in neither this package nor `LIBRARIES`:
    its weights may stay while its forward changes. Empty where there is none."""
    kinds = {type(part).__module__.partition(".")[0]: type(part) for part in model.module.modules()}
    digests = [plugin_digest(kinds[name]) for name in sorted(kinds) if name not in LIBRARIES]
    return digest(*digests) if any(digests) else ""


def _digest_files(root: Path, files: Iterable[Path]) -> str:
    return digest(*(f"{file.relative_to(root).as_posix()} {digest_file(file)}" for file in files))
