"""What the `seecause faithful` commands open, measure and calibrate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from seecause.cli.options import Device
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.faithful.opened import Opened
    from seecause.faithful.output import By

MIXED_SAME, MIXED_RAND = ":mixed_same", ":mixed_rand"  # of ImageNet-9


def open_on(network: str, device: Device) -> Opened:
    from seecause.cli.options import pick_device
    from seecause.faithful.opened import open_network

    opened = open_network(network)
    opened.net.to(pick_device(device))
    return opened


def need_data(opened: Opened, without: str) -> None:
    """Refuse a network that does not tell what it was trained on, and say what does without."""
    if opened.data is None:
        raise BadOption(
            "NETWORK",
            opened.name,
            f"one that tells what it was trained on, such as the folder of its run, or {without}",
        )


def pictures_to_test(opened: Opened, data: str | None, limit: int | None) -> tuple[Any, Any]:
    """The pictures to test on, with labels as the network counts its classes, and the map of its
    answers where the dataset has classes of its own."""
    from seecause.data.registry import open_data
    from seecause.faithful.classes import fitting

    if data is None and opened.test is None:
        need_data(opened, "--data with the pictures to test on")
    return fitting(
        opened.net, opened.test_pictures(limit) if data is None else open_data(data, limit=limit)
    )


def examined(
    opened: Opened, data: Any, batch: int, mapping: Any, *, quiet: bool, cuts: bool = False
) -> dict[str, float]:
    """Every number there is about these pictures; with `cuts`, also mIoU on random cuts of those
    that have masks."""
    from seecause.cli.progress import counting
    from seecause.faithful.crops import RandomCuts
    from seecause.faithful.evaluate import examine, frame_of, public_worst

    with counting("examining", len(data), quiet=quiet) as advance:
        found = examine(
            opened.net, data, batch=batch, mapping=mapping, workers=opened.workers, advance=advance
        )
    row = found.table() | public_worst(found, data.name)
    if cuts and "miou" in row:
        with counting("random cuts", len(data), quiet=quiet) as advance:
            cut = RandomCuts(data, frame_of(opened.net).preprocess)
            row["miou_public"] = examine(
                opened.net, cut, batch=batch, workers=opened.workers, advance=advance
            ).table()["miou"]
    if data.name.startswith("imagenet9:") and data.name.endswith(
        MIXED_RAND
    ):  # its twin tells what a background of another class costs
        twin, _ = pictures_to_test(
            opened, data.name.removesuffix(MIXED_RAND) + MIXED_SAME, len(data)
        )
        row["background_gap"] = (
            examined(opened, twin, batch, mapping, quiet=quiet)["average"] - row["average"]
        )
    return row


def key_points_of(
    opened: Opened, test: Any, batch: int, limit: int | None, *, quiet: bool
) -> dict[str, float]:
    """Nothing for photos without key points."""
    from seecause.cli.progress import counting
    from seecause.data.registry import open_data
    from seecause.faithful.keypoints import fitted_on, key_points

    name = fitted_on(test.name)
    if name is None:
        return {}
    fit = open_data(name, limit=limit)
    with counting("key points", len(fit) + len(test), quiet=quiet) as advance:
        return key_points(
            opened.net, fit, test, batch=batch, workers=opened.workers, advance=advance
        )


def calibrated(
    opened: Opened, quantiles: list[float], batch: int, limit: int | None, *, by: By, quiet: bool
) -> None:
    """Thresholds from training pictures, prepared as test pictures are. Those of all training
    pictures are kept in RUN/best; those of `limit` are not.

    A network that is no run, and so keeps nothing, brings its own.
    """
    from seecause.cli.progress import counting
    from seecause.faithful import calibrate
    from seecause.faithful.evaluate import batches_of
    from seecause.faithful.snapshot import keep_thresholds

    net = opened.net
    known = [net.thresholds.get((quantile, by)) for quantile in quantiles]
    if opened.run is None and limit is None and None not in known:
        return
    need_data(opened, "no --quantile: thresholds come from its training pictures")
    data = opened.train_pictures(limit)
    if all(found is not None and found.pictures == len(data) for found in known):
        return

    def images() -> Iterator[Any]:
        with counting("calibrating", len(data), quiet=quiet) as advance:
            for some, *_ in batches_of(net, data, batch=batch, workers=opened.workers):
                yield some
                advance(len(some))

    calibrate(net, images(), quantiles, by=by)
    if limit is None and opened.run is not None:
        keep_thresholds(opened.run, net)
