"""What the server keeps for a while, and how many bytes of it."""

from __future__ import annotations

import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seecause.errors import SeecauseError


class TooLarge(SeecauseError):
    """Something that alone is more than may be kept."""

    def __init__(self, size: int, most: int):
        super().__init__(
            f"this would be {size / 1e6:.0f} MB, and {most / 1e6:.0f} MB are kept here;"
            " copy it as Python or as a command and run that."
        )


class Recent(dict[Any, Any]):
    """The latest values by key, as many as `most` bytes hold. Threads may share it; what two of
    them need at once is made by both."""

    def __init__(self, most: int, size: Callable[[Any], int]):
        super().__init__()
        self.most, self.size, self.held = most, size, 0
        self.lock = threading.Lock()

    def get_or_make(self, key: Any, make: Callable[[], Any]) -> Any:
        with self.lock:
            if key in self:
                self[key] = value = self.pop(key)  # to the end: dictionaries are in order
                return value
        value = make()
        with self.lock:
            if key not in self:
                self.held += self.size(value)
                self[key] = value
            while self.held > self.most and len(self) > 1:
                self.held -= self.size(self.pop(next(iter(self))))
            return value


class Shelf:
    """Things of all sessions together, as many as `most` bytes hold: what was put there longest ago
    makes room, whoever has it. `drop` is called when a thing goes."""

    def __init__(self, most: int):
        self.most, self.held = most, 0
        self._things: OrderedDict[tuple[str, str], tuple[int, Callable[[], object]]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, session: str, id: str, size: int, drop: Callable[[], object]) -> None:
        if size > self.most:
            drop()
            raise TooLarge(size, self.most)
        gone = []
        with self._lock:
            if (session, id) in self._things:  # the same once more: it becomes the latest
                self._pop((session, id))
            self._things[session, id] = (size, drop)
            self.held += size
            while self.held > self.most:
                gone.append(self._pop(next(iter(self._things))))
        for leave in gone:
            leave()

    def take(self, session: str, id: str | None = None) -> None:
        """One thing of a session goes, or all of them."""
        with self._lock:
            keys = [key for key in self._things if key == (session, id or key[1])]
            gone = [self._pop(key) for key in keys]
        for leave in gone:
            leave()

    def _pop(self, key: tuple[str, str]) -> Callable[[], object]:
        size, drop = self._things.pop(key)
        self.held -= size
        return drop


def zip_folder(folder: Path) -> Path:
    """A folder as one zip file beside it."""
    return Path(shutil.make_archive(str(folder), "zip", folder))
