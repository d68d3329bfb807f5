"""What the browser loads: read once at the start, so that no name in a request reaches the disk."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

HTML = "index.html"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    media_type: str


def static_files() -> dict[str, StaticFile]:
    """Files by name: those of this folder, and the report's own style, whose look the page has."""
    here = [*files("seecause.app").joinpath("static").iterdir()]
    report = files("seecause.report").joinpath("templates")
    here += [report.joinpath(name) for name in ("page.css", "pieces.css")]
    kinds = {path.name: _TYPES.get(path.name[path.name.rfind(".") :]) for path in here}
    return {
        path.name: StaticFile(path.read_bytes(), kind)
        for path in here
        if (kind := kinds[path.name]) is not None
    }
