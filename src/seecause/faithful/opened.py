"""A trained network to test, change or ship, with the data it is tested on: a run, a folder with a
network, or `builtin:critters-ifam`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seecause.data.dataset import Dataset
from seecause.data.registry import open_data
from seecause.errors import BadOption, MissingWeights
from seecause.faithful.data import open_test, open_train, open_validation
from seecause.faithful.net import IFAM
from seecause.faithful.snapshot import CONFIG, open_run
from seecause.models.sources import ZOO, only_card, saved

# every creature on every background equally often: in its own regime, some groups have hardly a
# picture
BALANCED = "critters:balanced"

_PICTURES = (
    "data",
    "val",
    "test",
    "limit",
    "val_limit",
)  # of `Opened`: what decides which pictures it is trained and tested on


@dataclass(frozen=True, eq=False)
class Opened:
    """A network in eval mode, by its `name`. `data` is what it was trained on, without the split;
    None where nothing tells."""

    name: str
    net: IFAM
    data: str | None = None
    val: str | None = None  # other pictures to choose by, with their split
    test: str | None = None  # other pictures to test on, with their split
    limit: int | None = None  # training pictures
    val_limit: int | None = None
    workers: int = 0
    run: Path | None = None  # where results are kept

    def train_pictures(self, limit: int | None = None) -> Dataset:
        return open_train(
            self._known("thresholds from training pictures"), limit=limit or self.limit
        )

    def val_pictures(self) -> Dataset:
        """What interventions are chosen by."""
        return open_validation(
            self._known("choosing an intervention"), self.val, limit=self.val_limit
        )

    def test_pictures(self, limit: int | None = None) -> Dataset:
        return (
            open_test(self._known("its test pictures"), limit=limit)
            if self.test is None
            else open_data(self.test, limit=limit)
        )

    def told(self) -> dict[str, Any]:
        """What a card says about the pictures, so that a copy is tested on the same ones."""
        return {name: getattr(self, name) for name in _PICTURES}

    def _known(self, need: str) -> str:
        if self.data is None:
            raise BadOption(
                "network", self.name, f"one that tells what it was trained on, for {need}"
            )
        return self.data


def open_network(text: str) -> Opened:
    """By name: the folder of a run, one that `faithful export` or `zoo train` wrote, or
    `builtin:NAME`."""
    library, _, name = text.partition(":")
    if library == "builtin":
        return _from_card(text, ZOO, name)
    folder = Path(text)
    if (folder / CONFIG).is_file():
        config, net = open_run(folder)
        return Opened(
            text,
            net,
            config.data,
            config.val,
            None,
            config.limit,
            config.val_limit,
            config.workers,
            folder,
        )
    if not any(folder.glob("*.json")):
        remedy = "Give a folder of `faithful train` or `faithful export`, or builtin:critters-ifam"
        raise MissingWeights(text, f"no run ({CONFIG}) and no network there", remedy)
    return _from_card(text, folder, only_card(folder).stem)


def _from_card(text: str, folder: Path, name: str) -> Opened:
    net = saved(folder, name, kind="builtin model" if folder == ZOO else "saved model").module
    if not isinstance(net, IFAM):
        raise BadOption(
            "network",
            text,
            f"an iFAM network, such as builtin:critters-ifam; this is a {type(net).__name__}",
        )
    card = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    regime = card.get("recipe", {}).get("regime")
    if regime is not None:  # of the zoo
        return Opened(text, net.eval(), f"critters:{regime}", f"{BALANCED}:val", f"{BALANCED}:test")
    return Opened(text, net.eval(), **{name: card.get(name) for name in _PICTURES})
