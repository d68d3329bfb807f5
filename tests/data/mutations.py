"""Damaged copies of a file, the same for every run of a seed: by bytes, and by what a format is
made of, so that readers also meet files that are well formed and mean nothing."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Draw = random.Random

NASTY = (
    b"",
    b"\0",
    b"\n",
    b"\xff\xfe",
    b"\xc2\xb2",  # a digit that int() does not take
    b"..",
    b"/etc/hostname",
    b"../../../etc/hostname",
    b"-1",
    b"nan",
    b"inf",
    b"1e999",
    b"99999999999999999999",
    b"9" * 5000,
    b'"',
    b",",
    b"\t",
    b"{" * 300,
    b"x" * 300,
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
)
TEXTS = (
    "",
    "a",
    "../../../etc/hostname",
    "/etc/hostname",
    "a\0b",
    "two\nlines",
    "\x1b[2J\x1b[31mred",
    "\u202eright to left\u2066",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    '=HYPERLINK("http://x")',
    "\ud800",  # half of a character: cannot be written as UTF-8
    "x" * 5000,
    "{0.__class__}",
    "{real}",
    "1e999",
)
NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 31, 1 << 63, 10**30, 0.5, -0.0, 1e308, float("inf"))
VALUES = (*TEXTS, *NUMBERS, float("nan"), None, True, False, [], {}, [[]], [None], {"": {}})


def of_bytes(content: bytes, draw: Draw) -> bytes:
    """One to four changes: bits flipped, bytes cut, moved, doubled or replaced by something
    nasty."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(changed) + 1)
        until = min(len(changed), place + draw.choice((1, 2, 4, 16, 64)))
        kind = draw.randrange(6)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[place:until]
        elif kind == 2:
            del changed[place:]
        elif kind == 3:
            changed[place:place] = changed[place:until] * draw.randint(1, 3)
        else:
            changed[place : until if kind == 4 else place] = draw.choice(NASTY)
    return bytes(changed)


def of_tree(tree: Any, draw: Draw) -> Any:
    """A value of JSON with one to three of its parts gone, exchanged, renamed or replaced."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            return draw.choice(VALUES)
        holder, key = draw.choice(places)
        kind = draw.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            other, there = draw.choice(places)
            if _is_leaf(other[there]) or _is_leaf(holder[key]):
                holder[key] = json.loads(json.dumps(other[there]))
        elif kind == 2 and isinstance(holder, dict):
            holder[str(draw.choice(VALUES))] = holder.pop(key)
        elif kind == 3 and isinstance(holder, list):
            holder.extend(holder[:1] * draw.choice((1, 3, 1000)))
        elif kind == 4 and isinstance(holder[key], int | float):
            holder[key] = holder[key] * draw.choice((-1, 0.5, 2, 10**9))
        else:
            holder[key] = deepcopy(draw.choice(VALUES))  # a later change may go into it
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in list(keys):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, dict | list)


def of_json(content: bytes, draw: Draw) -> bytes:
    return json.dumps(of_tree(json.loads(content), draw)).encode()


def of_safetensors(content: bytes, draw: Draw) -> bytes:
    """Its header is JSON behind eight bytes of length."""
    size = int.from_bytes(content[:8], "little")
    header = of_json(content[8 : 8 + size], draw)
    told = len(header) if draw.random() < 0.9 else draw.choice((0, 1 << 40, 1 << 63))
    return told.to_bytes(8, "little") + header + content[8 + size :]


def of_toml(content: bytes, draw: Draw) -> bytes:
    """Lines gone, doubled or exchanged; values replaced."""
    lines = content.decode().splitlines()
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(lines)) if lines else 0
        kind = draw.randrange(4)
        if kind == 0:
            del lines[at : at + 1]
        elif kind == 1:
            lines[at:at] = lines[at : at + 1]
        elif kind == 2:
            lines[at : at + 1] = [draw.choice(TEXTS).encode("utf-8", "replace").decode()]
        else:
            value = json.dumps(draw.choice(VALUES)).replace("null", "1979-05-27T07:32:00Z")
            lines[at : at + 1] = [
                re.sub(r"=.*", lambda _, value=value: f"= {value}", line)
                for line in lines[at : at + 1]
            ]
    return "\n".join(lines).encode()


def of_csv(content: bytes, draw: Draw) -> bytes:
    rows = list(csv.reader(io.StringIO(content.decode())))
    for _ in range(draw.randint(1, 3)):
        row = draw.choice(rows)
        at = draw.randrange(len(row) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            del row[at : at + 1]
        elif kind == 1:
            row[at:at] = row[at : at + 1] or [""]
        else:
            row[at : at + 1] = [str(draw.choice(VALUES))]
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue().encode("utf-8", "surrogatepass")


def of_zip(content: bytes, draw: Draw) -> bytes:
    """One member of an archive is damaged, renamed or missing; its checksum is right."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        names = old.namelist()
        victim, kind = draw.choice(names), draw.randrange(6)
        for name in names:
            data = old.read(name)
            if name != victim:
                new.writestr(name, data)
            elif kind == 0:
                new.writestr(draw.choice(("../../../tmp/x", "/tmp/x", " ", "a" * 300)), data)
            elif kind > 1:
                new.writestr(name, of_bytes(data, draw))
    return made.getvalue()


def of_parquet(content: bytes, draw: Draw) -> bytes:
    """A column of other values, or gone, or renamed."""
    table = pq.read_table(pa.BufferReader(content))
    name = draw.choice(table.column_names)
    at, kind = table.column_names.index(name), draw.randrange(4)
    if kind == 0:
        table = table.drop_columns([name])
    elif kind == 1:
        table = table.rename_columns(
            ["x" if other == name else other for other in table.column_names]
        )
    else:
        value = draw.choice((None, 1, -1, 1 << 40, 0.5, float("nan"), "a", b"x", [1], {"a": 1}))
        table = table.set_column(at, name, pa.array([value] * table.num_rows))
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def of_png(content: bytes, draw: Draw) -> bytes:
    """Chunks gone, doubled or damaged, with the checksums they should have."""
    chunks, at = [], 8
    while at + 8 <= len(content):
        size, kind = struct.unpack(">I4s", content[at : at + 8])
        chunks.append((kind, content[at + 8 : at + 8 + size]))
        at += 12 + size
    place = draw.randrange(len(chunks))
    kind, data = chunks[place]
    chunks[place : place + 1] = [(kind, of_bytes(data, draw))] * draw.randrange(3)
    return content[:8] + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def of_npy(content: bytes, draw: Draw) -> bytes:
    """Another header before the same values."""
    size = int.from_bytes(content[8:10], "little")
    kinds = ("|u1", "|O", "<f8", "|V0", "<U9999", "|S0", "x", *map(str, TEXTS[:4]))
    shape = [draw.choice((0, 1, 2, 4, 6, -1, 1 << 40, 10**30)) for _ in range(draw.randrange(5))]
    order = draw.choice((True, False, 0, "x"))
    header = repr({"descr": draw.choice(kinds), "fortran_order": order, "shape": tuple(shape)})
    text = header.encode()
    return content[:8] + struct.pack("<H", len(text)) + text + content[10 + size :]
