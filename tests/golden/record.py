"""The registry of golden functions, what they share, and how numbers are stored and compared."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_name("golden.json")
REAL = Path(os.environ.get("SEECAUSE_REAL", "/nonexistent"))
DEVICE = os.environ.get("SEECAUSE_DEVICE", "cpu")  # float64 on a GPU agrees with what is stored
SECTIONS = ("attribution", "metrics", "heads", "background", "faithful", "lvlm", "bench", "real")
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
Named = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Golden:
    """One function: its section, the precisions it runs in, and whether the tests skip it."""

    section: str
    name: str
    run: Callable[[torch.dtype], Named]
    dtypes: tuple[str, ...]
    slow: bool


_ALL: list[Golden] = []


def golden(
    section: str, *, dtypes: Sequence[str] = ("float64", "float32"), slow: bool = False
) -> Callable[[Callable[..., Named]], Callable[..., Named]]:
    """Register a generator of (key, tensor or numbers). `dtypes`: ("float32",) for what is trained
    or sampled in single precision; its tolerance is 1e-5."""

    def register(function: Callable[..., Named]) -> Callable[..., Named]:
        name = function.__name__.replace("_", "-")
        _ALL.append(Golden(section, name, function, tuple(dtypes), slow))
        return function

    return register


def entries(only: Sequence[str] = ()) -> list[Golden]:
    """All registered functions, or those of the sections (or functions) named in `only`."""
    import importlib

    for section in SECTIONS:
        importlib.import_module(f"tests.golden.{section}")
    here = [each for each in _ALL if each.section != "real" or REAL.is_dir()]
    return [each for each in here if not only or {each.section, each.name} & set(only)]


def compute(entry: Golden, dtype: str) -> dict[str, list[float]]:
    """Projections by key, of one function in one precision."""
    prefix = f"{entry.section}/{entry.name}/{dtype}"
    return {f"{prefix}/{key}": project(value) for key, value in entry.run(DTYPES[dtype])}


def project(value: Any) -> list[float]:
    """Up to four numbers as they are; of more: how many there are, root mean square, mean, and two
    dots with fixed random vectors (over the root of the count, so that all are of one scale)."""
    flat = torch.as_tensor(value).detach().cpu().double().flatten()
    flat = flat.nan_to_num(nan=-12345.0, posinf=1e9, neginf=-1e9)
    if len(flat) <= 4:
        return flat.tolist()
    vectors = _vectors(len(flat)) @ flat / math.sqrt(len(flat))
    return [
        float(len(flat)),
        float(flat.square().mean().sqrt()),
        float(flat.mean()),
        *vectors.tolist(),
    ]


def _vectors(count: int) -> Tensor:
    return torch.randn(2, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def differences(old: dict[str, list[float]], new: dict[str, list[float]], dtype: str) -> list[str]:
    """A line for each key that differs by more than the tolerance, relative to its scale."""
    lines = []
    for key, expected in old.items():
        found = new.get(key)
        if found is None:
            lines.append(f"{key}: no longer computed")
        elif len(found) != len(expected):
            lines.append(f"{key}: {len(found)} numbers, stored {len(expected)}")
        else:
            values = expected[1:] if len(expected) == 5 else expected
            scale = max(1e-300, *map(abs, values))
            error = max(abs(a - b) for a, b in zip(expected, found, strict=True)) / scale
            if not error <= TOLERANCE[dtype]:
                lines.append(f"{key}: differs by {error:.1e} of its scale ({expected} -> {found})")
    lines += [f"{key}: not stored (run --write --missing)" for key in new if key not in old]
    return lines


def read() -> dict[str, list[float]]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def write(numbers: dict[str, list[float]]) -> None:
    rows = (
        f"{json.dumps(key)}: [{', '.join(f'{v:.14g}' for v in numbers[key])}]"
        for key in sorted(numbers)
    )
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


# what the sections share


@cache
def model(name: str, dtype: torch.dtype) -> Any:
    import seecause as sc

    return sc.load(f"builtin:{name}", device=DEVICE, dtype=dtype)


@cache
def batch(name: str, dtype: torch.dtype, data: str = "critters:clean:test", count: int = 8) -> Any:
    """Normalised images [B, 3, H, W] of the model's dtype, labels [B], masks [B, H, W]."""
    import seecause as sc

    samples = sc.data.open_data(data, limit=count)
    return sc.data.to_batch(model(name, dtype), [samples[i] for i in range(count)])
