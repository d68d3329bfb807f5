"""What is installed with the package, without extras, has a licence that lets people use it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

# as packages name it; NVIDIA's own libraries come with torch for Linux, under NVIDIA's terms
PERMISSIVE = re.compile(
    r"MIT|BSD|Apache|Python|PSF|ISC|MPL|Mozilla|HPND|Unlicense|0BSD|CNRI|Zlib|NVIDIA", re.IGNORECASE
)
UNSAID = {"cuda-toolkit"}  # NVIDIA's list of its libraries, which holds nothing itself


def shipped(name: str = "seecause") -> dict[str, str]:
    """Licence by package, of everything that is installed with one, by its own requirements."""
    licences: dict[str, str] = {}
    waiting = [name]
    while waiting:
        try:
            package = distribution(waiting.pop())
        except PackageNotFoundError:  # of another system
            continue
        metadata = package.metadata
        if metadata["Name"].lower() in licences:
            continue
        words = [metadata.get("License-Expression"), metadata.get("License")]
        words += [c for c in metadata.get_all("Classifier", []) if c.startswith("License")]
        licences[metadata["Name"].lower()] = " ".join(word[:200] for word in words if word)
        for text in package.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return licences


def test_nothing_that_ships_is_under_a_licence_that_spreads():
    licences = shipped()
    assert len(licences) > 30 and "quantus" not in licences
    odd = {name for name, words in licences.items() if not PERMISSIVE.search(words)}
    assert odd <= UNSAID
    assert not [words for words in licences.values() if re.search(r"\bA?GPL|General Public", words)]
