"""A few damaged files of every kind; `make test-fuzz` reads ten thousand of each."""

from __future__ import annotations

import os
import random
import signal

import pytest

from tests.fuzz import Victim, fuzz
from tests.fuzz_kinds import KINDS

CASES = 40

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_taken_or_refused_in_our_words(kind, tmp_path):
    outcome = fuzz(KINDS[kind](tmp_path), CASES)
    assert not outcome.findings
    assert outcome.cases == CASES and outcome.refused > 0


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (lambda: 1 // 0, "ZeroDivisionError"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended with -9"),
        (lambda: bytearray(1 << 40), "MemoryError"),
    ],
)
def test_what_is_looked_for_is_noticed(bad, word, tmp_path):
    """And the next child goes on behind it."""
    (tmp_path / "a").write_bytes(b"intact")

    def read() -> None:
        if (tmp_path / "a").read_bytes() == b"bad":
            bad()

    def change(content: bytes, draw: random.Random) -> bytes:
        return draw.choice((b"bad", content))

    outcome = fuzz([Victim(tmp_path / "a", read, (change,))], 6)
    assert outcome.cases == 6 and 0 < len(outcome.findings) < 6
    assert all(word in finding for finding in outcome.findings)
