"""Equations of the site: `$$ ... $$` and `$ ... $` become MathML when it is built, so that pages
need no script and no font from elsewhere. GitHub shows the same source. Numbers keep their errors
beside them."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

CODE = re.compile(r"(^```.*?^```|^(?: {4}.*\n?)+|`[^`\n]+`)", flags=re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^\$\$(.+?)\$\$$", flags=re.MULTILINE | re.DOTALL)
PLUS_MINUS = re.compile(r"(?<=\d) ± (?=\d)")
INLINE = re.compile(r"(?<![\\$\w])\$([^$\n]+)\$(?![\w$])")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Equations outside of code, as MathML."""
    pieces = CODE.split(markdown)
    pieces[::2] = [_replace(piece) for piece in pieces[::2]]
    return "".join(pieces)


def on_page_content(html: str, **_: Any) -> str:
    """A number stays on one line with its error."""
    return PLUS_MINUS.sub("\u00a0±\u00a0", html)


def _replace(text: str) -> str:
    text = BLOCK.sub(lambda match: convert(match[1].strip(), display="block"), text)
    # inside a span, because a line that begins with another element would be a block of its own
    return INLINE.sub(lambda match: f"<span>{convert(match[1].strip())}</span>", text)
