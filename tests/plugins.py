"""Packages installed beside this one, for tests: a folder with modules and their entry points."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from seecause import registry


def write_package(folder: Path, files: Mapping[str, str], points: Mapping[str, str]) -> Path:
    """A distribution on disk: `files` by name, `points` as `"group:name" -> "module:attribute"`."""
    info = folder / "beside-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: beside\nVersion: 1.0\n")
    lines = []
    for place, value in points.items():
        group, name = place.split(":", 1)
        lines += [f"[{group}]", f"{name} = {value}"]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@contextmanager
def installed(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """That distribution on the path, with nothing remembered from before or after."""
    patch.syspath_prepend(str(folder))
    forget()
    yield
    forget()


def forget() -> None:
    registry.plugins.cache_clear()
