"""Commands up to the function that does their work, which is not done: no weights are read."""

from __future__ import annotations

from types import SimpleNamespace


class Reached(Exception):
    """The function that does the work was called."""

    def __init__(self, *words, **options):
        super().__init__("reached")
        self.words, self.options = words, options


def reach(*words, **options):
    raise Reached(*words, **options)


MODEL = SimpleNamespace(
    architecture="transformer", aimed=False, classes=("a", "b"), name="opened", device="cpu",
    random_weights=False, preprocess=SimpleNamespace(inputs=list), n_layers=3,
)  # fmt: skip


def given(reached, **expected):
    """These options, and what they are said to be."""
    assert {name: reached.options[name] for name in expected} == expected
