"""What is installed with the package, without extras, has a licence that lets people use it."""

import re
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

# as SPDX and classifiers begin; NVIDIA's own libraries come with torch for Linux, under its terms
PERMISSIVE = re.compile(
    r"(OSI Approved :: )?(LicenseRef-)?"
    r"(MIT|BSD|0BSD|Apache|Python|PSF|ISC|MPL|Mozilla|HPND|BSL|Unlicense|CC0|CNRI|Zlib|NVIDIA)\b"
)
UNSAID = {"cuda-toolkit"}  # NVIDIA's list of its libraries, which holds nothing itself


def licence_names(metadata: Message) -> list[str]:
    """Its SPDX expression; where there is none, a licence field of one line and its classifiers."""
    if expression := metadata.get("License-Expression"):
        return [expression]
    field = (metadata.get("License") or "").strip()
    names = [field] if field and "\n" not in field else []
    listed = (c.partition(" :: ") for c in metadata.get_all("Classifier", []))
    return names + [name for kind, _, name in listed if kind == "License"]


def permissive(expression: str) -> bool:
    """Whether every part of an SPDX expression, or one of its alternatives, lets people use it."""
    parts = [re.split(r" OR ", part) for part in re.split(r" AND ", expression.strip("()"))]
    return all(any(PERMISSIVE.match(name.strip("() ")) for name in part) for part in parts)


def shipped(name: str = "seecause") -> dict[str, list[str]]:
    """Licences by package, of everything that is installed with one, by its own requirements."""
    licences: dict[str, list[str]] = {}
    waiting = [name]
    while waiting:
        try:
            package = distribution(waiting.pop())
        except PackageNotFoundError:  # of another system
            continue
        metadata = package.metadata
        if metadata["Name"].lower() in licences:
            continue
        licences[metadata["Name"].lower()] = licence_names(metadata)
        for text in package.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return licences


def test_nothing_that_ships_is_under_a_licence_that_spreads():
    licences = shipped()
    assert len(licences) > 30 and "quantus" not in licences
    odd = {name for name, names in licences.items() if not any(map(permissive, names))}
    assert odd <= UNSAID
    spreads = re.compile(r"\bA?GPL|General Public")
    assert not [names for names in licences.values() if spreads.search(" ".join(names))]
