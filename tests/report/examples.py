"""Explanations that need no model, for tests of what is shown."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from seecause.attribution.attribute import Answer, Explanation
from seecause.attribution.result import Attribution
from seecause.report import write_page

MANIFEST = {
    "method": "caap",
    "options": {"score": "prob", "tail": None},
    "used": {"tail": "source"},
    "model": "timm:toy",
    "architecture": "transformer",
    "model_fingerprint": "0123456789abcdef",
    "random_weights": False,
    "grid": [4, 6],
    "device": "cpu",
    "dtype": "float32",
    "target": {},
    "images": [2, 3, 64, 96],
    "memory_halvings": [],
    "versions": {"torch": "2.0"},
}


def explanation(
    names: tuple[str, ...] = ("cat.jpg", "dog.jpg"),
    methods: tuple[str, ...] = ("caap",),
    **manifest: object,
) -> Explanation:
    generator = torch.Generator().manual_seed(0)
    count = len(names)
    answers = [[Answer("tabby", 0.75, True), Answer("tiger <cat>", 0.2)] for _ in names]
    runs = {
        method: Attribution(
            maps=torch.rand(count, 4, 6, generator=generator),
            images=torch.rand(count, 3, 64, 96, generator=generator),
            manifest={**MANIFEST, "method": method, **manifest},
            labels=["tabby"] * count,
        )
        for method in methods
    }
    return Explanation(names, answers, runs)


def rendered(title: str, sections: list) -> str:
    """A page as text."""
    with TemporaryDirectory() as folder:
        return write_page(Path(folder) / "page.html", title, sections).read_text()
