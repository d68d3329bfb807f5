"""Datasets that are given in the page as a ZIP: a folder with one sub-folder for each class, and
masks in `masks/` if there are some (`folder:PATH`)."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path, PurePosixPath

from seecause.app.jobs import Reply
from seecause.app.sessions import Session
from seecause.app.state import class_folders
from seecause.data.dataset import SUFFIXES, open_data
from seecause.errors import BadImage

ZIP_BYTES = 200 << 20
UNPACKED_BYTES = 600 << 20
FILES = 5000  # of a ZIP


def add_zip(own: Session, content: bytes, name: str) -> Reply:
    """Unpack a ZIP and name it as a dataset of the session."""
    folder = own.add_folder()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            _unpack(packed, folder)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as failure:
        raise BadImage("your ZIP", f"cannot be unpacked ({failure})", "pack it again") from None
    inside = class_folders(folder)
    while len(inside) == 1 and class_folders(inside[0]):  # a ZIP of a folder
        folder, inside = inside[0], class_folders(inside[0])
    data, name = open_data(f"folder:{folder}"), Path(name).stem
    if len(data.classes) < 2:
        raise BadImage(name, "fewer than two classes", "give one sub-folder for each class")
    own.data[name] = f"folder:{folder}"
    return {"name": name, "images": len(data), "classes": list(data.classes)[:12]}


def _unpack(packed: zipfile.ZipFile, folder: Path) -> None:
    """Images and tables of a ZIP, nothing else and nowhere else."""
    kinds = (*SUFFIXES, ".csv")
    entries = [entry for entry in packed.infolist() if entry.filename.lower().endswith(kinds)]
    entries = [entry for entry in entries if "__MACOSX" not in entry.filename]
    if len(entries) > FILES or sum(entry.file_size for entry in entries) > UNPACKED_BYTES:
        most = f"give at most {FILES} files and {UNPACKED_BYTES >> 20} MB"
        raise BadImage("your ZIP", "too much in it", most)
    for entry in entries:
        parts = PurePosixPath(entry.filename.replace("\\", "/")).parts
        if ".." in parts or parts[0] == "/" or ":" in parts[0]:
            raise BadImage("your ZIP", "a path that leads out of it", "pack a folder")
        path = folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        with packed.open(entry) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
