"""What a page of parts promises."""

from __future__ import annotations

import pytest

from seecause.report.faithful import NOTE, note_of
from tests.faithful.nets import tiny_net


def test_a_promise_is_made_for_a_fixed_mask_only():
    assert (
        note_of(tiny_net()) == NOTE
        and "with this mask" in NOTE
        and "sees the whole picture when it chooses the mask" in NOTE
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [({"stages": 1}, "have seen the whole picture"), ({"gradient": "soft"}, "read a little")],
)
def test_networks_that_see_everything_promise_nothing(options, why):
    assert "promises nothing" in note_of(tiny_net(**options)) and why in note_of(
        tiny_net(**options)
    )
