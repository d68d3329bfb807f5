"""What a study's TOML file says: its cells, and what their functions may ask of a run."""

from __future__ import annotations

import importlib
import itertools
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from seecause.data import open_data
from seecause.errors import DataMissing
from seecause.loading import load

Row = dict[str, Any]


@dataclass(frozen=True)
class StudyCell:
    """One call. `label` are columns that its rows get and the function does not."""

    group: str
    call: str
    options: Mapping[str, Any]
    label: Mapping[str, Any]
    needs: tuple[str, ...]
    folder: Path  # of the study's file

    @property
    def name(self) -> str:
        return " ".join(map(str, [self.group, *self.label.values(), *self.options.values()]))

    @property
    def function(self) -> Callable[..., list[Row]]:
        return _function(self.call, self.folder)

    def columns(self) -> Row:
        """What the grid says of every row; lists and tables are no columns."""
        choices = {**self.label, **self.options}
        return {
            name: value for name, value in choices.items() if not isinstance(value, list | dict)
        }


@lru_cache
def _function(call: str, folder: Path) -> Callable[..., list[Row]]:
    """A file beside the study is meant before a module of the same name elsewhere."""
    module, _, name = call.rpartition(".")
    file = folder / f"{module}.py"
    if file.is_file():
        loaded = sys.modules.get(module)
        if loaded is not None and getattr(loaded, "__file__", None) != str(file):
            del sys.modules[module]
        sys.path.insert(0, str(folder))
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as reason:
        hint = f"a function in a file beside {folder / '*.toml'}, or one that can be imported"
        raise DataMissing(call, str(reason), hint) from reason
    finally:
        if file.is_file():
            sys.path.remove(str(folder))


@dataclass(frozen=True)
class StudyFile:
    """A file that was read. `quick` stands in for settings where there is a limit."""

    file: Path
    name: str
    question: str
    cells: tuple[StudyCell, ...]
    settings: Row
    quick: Row
    files: tuple[str, ...]
    output: Row
    figure: Row


@dataclass
class StudyContext:
    """What a function may ask of its run, beside its own options."""

    device: str
    work: Path
    real: Path | None = None
    models: Path | None = None
    limit: int | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)

    def load(self, name: str, **options: Any) -> Any:
        """A wrapped model, once in a process."""
        model = _model(name, self.device, tuple(sorted(options.items())))
        self.fingerprints[self.published(name)] = model.fingerprint()
        return model

    def data(self, spec: str, limit: int | None = None) -> Any:
        data = open_data(spec, limit=limit)
        self.fingerprints[self.published(data.name)] = data.fingerprint
        return data

    def published(self, name: str) -> str:
        """A name as the study file has it: without the folders of this run."""
        for place in ("real", "models"):
            if (folder := getattr(self, place)) is not None:
                name = name.replace(str(folder), f"{{{place}}}")
        return name

    def fill(self, value: Any) -> Any:
        """Options with the folders of this run in the place of {real} and {models}."""
        if isinstance(value, dict):
            return {name: self.fill(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.fill(inner) for inner in value]
        if isinstance(value, str) and ("{real}" in value or "{models}" in value):
            for name in ("real", "models"):
                if f"{{{name}}}" in value and getattr(self, name) is None:
                    raise DataMissing(value, "no folder is given", f"give --{name} DIR")
            return value.format(real=self.real, models=self.models)
        return value


@lru_cache(maxsize=4)
def _model(name: str, device: str, options: tuple[tuple[str, Any], ...]) -> Any:
    return load(name, device=device, **dict(options))


def read_study(file: str | Path) -> StudyFile:
    """A study file, its grids multiplied out in the order they are written."""
    file = Path(file).resolve()
    if not file.is_file():
        raise DataMissing(str(file), "no such file", "give a study: a TOML file")
    try:
        text = tomllib.loads(file.read_text(encoding="utf-8"))
        cells = [cell for entry in text["cells"] for cell in _cells(entry, text, file.parent)]
        _check_names(cells)
        return StudyFile(
            file, str(text["name"]), str(text["question"]), tuple(cells),
            dict(text.get("settings", {})), dict(text.get("quick", {})),
            tuple(text.get("files", ())), dict(text["output"]), dict(text.get("figure", {})),
        )  # fmt: skip
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as odd:
        reason = f"it is no study ({type(odd).__name__}: {str(odd)[:200]})"
        remedy = "name, question, cells and output are needed: see docs/bench.md"
        raise DataMissing(str(file), reason, remedy) from odd


def _check_names(cells: Sequence[StudyCell]) -> None:
    """Cells are kept and told apart by their names."""
    names = Counter(cell.name for cell in cells)
    for name, times in names.items():
        if times > 1:
            raise ValueError(f"{times} cells are called {name!r}; a label tells them apart")


def _cells(entry: Row, text: Row, folder: Path) -> Iterator[StudyCell]:
    """Every call of one entry."""
    for options in _choices(entry, text.get("lists", {})):
        label = {k: _labelled(v, options) for k, v in entry.get("label", {}).items()}
        needs = tuple(entry.get("needs", ()))
        yield StudyCell(str(entry["group"]), str(entry["call"]), options, label, needs, folder)


def _choices(entry: Row, lists: Mapping[str, list[Any]]) -> Iterator[Row]:
    """Options of every cell of an entry."""
    grid = {
        name: as_list(lists[value] if isinstance(value, str) and value in lists else value)
        for name, value in entry.get("grid", {}).items()
    }
    for table in entry.get("each", [{}]):
        for choice in itertools.product(*grid.values()):
            yield {**entry.get("set", {}), **table, **dict(zip(grid, choice, strict=True))}


def _labelled(value: Any, options: Row) -> Any:
    return value.format(**options) if isinstance(value, str) else value


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
