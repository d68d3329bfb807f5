"""Damaged copies of a file, the same for every run of a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from seecause.errors import SeecauseError

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


def mutations(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """`count` copies, each with one to four changes: bits flipped, bytes cut, moved, doubled or
    replaced by something nasty."""
    draw = random.Random(seed)
    for _ in range(count):
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
        yield bytes(changed)


def survives(
    path: Path,
    read: Callable[[], object],
    count: int = 40,
    *,
    forge: Callable[[bytes], bytes] = lambda content: content,
) -> int:
    """How many damaged copies of a file are refused; any error that is not ours ends the test.
    `forge` makes a file of what was damaged. The file is whole again afterwards."""
    intact, refused = path.read_bytes(), 0
    for number, damaged in enumerate(mutations(intact, count)):
        path.write_bytes(forge(damaged))
        try:
            read()
        except SeecauseError:
            refused += 1
        except Exception as foreign:  # what is looked for
            raise AssertionError(f"{path.name}, mutation {number}: {foreign!r}") from foreign
    path.write_bytes(intact)
    return refused
