"""The tables of families and versions in `models.md`, made from the tables that adapters read, the
newest releases that are tested (`constraints.txt`) and the oldest (`OLDEST` in the Makefile).

python docs/families.py writes it; a test fails while it is old.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from seecause.attribution.registry import methods
from seecause.files import write_atomic
from seecause.models import decoder, dense, staged, timm, transformers

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
LIBRARIES = ("torch", "torchvision", "timm", "transformers", "open_clip_torch")
# classes that the oldest transformers has not got
NEWER = ("Molmo2ForConditionalGeneration",)
START, END = "<!-- families: python docs/families.py -->\n", "<!-- end -->\n"
SUFFIXES = re.compile(
    r"(For(ImageClassification|VideoClassification|ConditionalGeneration|ObjectDetection|DepthEstimation"
    r"|SemanticSegmentation|InstanceSegmentation|UniversalSegmentation)|(Vision)?Model(WithProjection)?)(WithTeacher)?$"
)


def table() -> str:
    """Every family that is read, with what it is read as, and the releases that were tested."""
    rows = [
        ("timm", "tokens", timm.CLASSES),
        ("timm", "stages", staged.SPLITS["timm"]),
        ("transformers", "tokens", _families(transformers.READINGS)),
        ("transformers", "boxes", _families(_rows("Detection"))),
        ("transformers", "pixels", _families(_rows("Segmentation"))),
        ("transformers", "words", _families(decoder.FAMILIES)),
        ("transformers", "film", _families(transformers.FAMILIES)),
        ("torchvision", "tokens", ["VisionTransformer"]),
        ("torchvision", "stages", staged.SPLITS["torchvision"]),
        ("open_clip_torch", "tokens", ["CLIP", "CustomTextCLIP"]),
    ]
    lines = ["| library | read as | families |", "|---|---|---|"]
    for library, kind, names in rows:
        lines.append(f"| {library} | {kind} | {', '.join(names)} |")
    works = (
        f"**Tokens**, **film**: all {len(methods())} [methods](methods.md), heads, audits, repair."
        f" **Stages**: {len(methods('staged'))} of them (`seecause list methods --staged`), no"
        " heads."
        f" **Boxes**, **pixels**: {len(methods('dense'))}, for the row that is asked about."
        " **Words**: [vision-language models](lvlm.md)."
    )
    return "\n".join([*lines, "", works, "", *_versions(), "", _refusals(), ""])


def _versions() -> list[str]:
    """Which releases were tested, newest and oldest; the whole suite runs on both."""
    rows = [f"| {name} | {_tested(name)} | {_oldest(name)} |" for name in LIBRARIES]
    newer = f"Not in transformers {_oldest('transformers')}: {', '.join(_families(NEWER))}."
    said = (
        "The whole suite runs on both columns (`make test`, `make test-oldest`), and on whatever"
        " is the newest of the day (`make test-newest`)."
    )
    return [said, "", "| library | newest | oldest |", "|---|---|---|", *rows, "", newer]


def _oldest(library: str) -> str:
    found = re.search(rf"'{library}==([^']+)'", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert found is not None, f"OLDEST in the Makefile has no {library}"
    return found[1]


def _refusals() -> str:
    """Families of transformers that are known and not read, each with its reason."""
    towers = {n: why for n, why in transformers.REFUSED.items() if "language model" not in why}
    listed = [
        f"{', '.join(_families(names))} ({reason})"
        for reason, names in _grouped(decoder.REFUSED | towers).items()
    ]
    return f"Known to transformers and refused: {'; '.join(listed)}."


def _grouped(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Names by their reason."""
    return {why: [name for name in reasons if reasons[name] == why] for why in reasons.values()}


def _rows(*parts: str) -> list[str]:
    """Classes of detectors or of models of pixels, by parts of their names."""
    return [name for name in dense.DENSE_FAMILIES if any(part in name for part in parts)]


def _families(names: Iterable[str]) -> list[str]:
    """Class names without what they are for, each once."""
    return list(dict.fromkeys(SUFFIXES.sub("", name).removesuffix("Vision") for name in names))


def _tested(library: str) -> str:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{library.replace('_', '-')}==(\S+)$", pins, flags=re.MULTILINE)
    assert found is not None, f"constraints.txt has no {library}"
    return found[1]


def updated(page: str) -> str:
    """The page with a fresh table."""
    before, rest = page.split(START)
    return f"{before}{START}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    write_atomic(PAGE, updated(PAGE.read_text(encoding="utf-8")))
