"""What the page calls models, datasets, pictures and results: names without the folders of this
machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from seecause.data.images import sample_of


def public_spec(spec: str) -> str:
    """What `sc.load` takes, where it names nothing of this machine; else the last folder alone."""
    library, colon, name = spec.rpartition(":")
    local = Path(name).is_absolute() or name.startswith((".", "~")) or Path(name).exists()
    return f"{library}{colon}{Path(name).name}" if local else spec


def named_data(specs: Sequence[str]) -> dict[str, str]:
    """Datasets by what the page calls them: what `open_data` takes, without folders."""
    names: dict[str, str] = {}
    for spec in specs:
        public = ":".join(map(public_spec, spec.split(":")))
        names[free_name(public, names)] = spec
    return names


def name_folders(folders: Sequence[Path]) -> dict[str, Path]:
    """Folders of results by their last part, numbered where it is not the only one."""
    named: dict[str, Path] = {}
    for folder in map(Path.resolve, folders):
        named[free_name(folder.name or "results", named)] = folder
    return named


def picture_name(text: str) -> str:
    """What a file or sample is called, without the folders of this machine."""
    kind, colon, rest = text.partition(":") if sample_of(text) else ("", "", text)
    return f"{kind}{colon}{rest.replace(chr(92), '/').rpartition('/')[2]}"


def short_name(spec: str) -> str:
    """`builtin:critters-vit` -> critters-vit: letters that a link can hold."""
    last = Path(spec.rpartition(":")[2]).name
    return re.sub(r"[^a-zA-Z0-9_.-]+", "-", last)[:48] or "model"


def free_name(name: str, taken: Mapping[str, object]) -> str:
    """The name, numbered where it is taken."""
    place, free = 2, name
    while free in taken:
        free, place = f"{name}-{place}", place + 1
    return free
