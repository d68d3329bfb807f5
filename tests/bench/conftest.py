"""One Ray cluster for all tests of a session: four cores on paper, begun by the first that asks."""

from __future__ import annotations

import os

import pytest

from seecause.bench.runner import RAY_SETTINGS


@pytest.fixture(scope="session")
def cluster():
    """Runs find it and leave it running."""
    ray = pytest.importorskip(
        "ray", reason="the cluster extra is not installed: pip install 'seecause[cluster]'"
    )
    os.environ.update(RAY_SETTINGS)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(address="local", num_cpus=4, **quiet)
    yield "local"
    ray.shutdown()
