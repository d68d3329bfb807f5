"""`make test-mutants` takes long; a planted bug whose line moved is noticed here."""

import tomllib
from pathlib import Path

import seecause


def test_every_planted_bug_still_has_its_line():
    planted = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))
    lost = []
    for mutant in planted["mutant"]:
        file = Path(seecause.__file__).parent / mutant["file"]
        if not file.is_file() or file.read_text(encoding="utf-8").count(mutant["old"]) != 1:
            lost.append(f"{mutant['file']}: {mutant['breaks']}")
    assert not lost
