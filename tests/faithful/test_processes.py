"""Runs in processes of their own: killed and continued, and two under torchrun."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from seecause.faithful import train
from tests.faithful import shared
from tests.faithful.runs import snapshot, tiny_config, train_in_a_process

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PATIENCE = 120  # seconds, on a busy machine


def start(config, *, target=train_in_a_process, **environment: str) -> multiprocessing.Process:
    """Training in a process of its own. They fork off one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["seecause.faithful.training"])
    process = context.Process(target=target, args=(config, environment))
    process.start()
    return process


def start_two(config, **how) -> list[multiprocessing.Process]:
    """As torchrun would."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [start(config, RANK=rank, LOCAL_RANK=rank, **meeting, **how) for rank in ("0", "1")]


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_bits(tmp_path):
    """kill -9 in the middle of an epoch, then the same command again: weights, average and
    optimiser equal those of a run that was left alone."""
    whole = tiny_config(tmp_path, out=str(tmp_path / "whole"), epochs=6, snapshot_every=1)
    killed = tiny_config(tmp_path, out=str(tmp_path / "killed"), epochs=6, snapshot_every=1)
    process = start(killed)
    log = Path(killed.out) / "log.csv"
    until = time.monotonic() + PATIENCE
    while (
        not (log.exists() and len(log.read_text().splitlines()) > 2)
        and process.is_alive()
        and time.monotonic() < until
    ):
        time.sleep(0.02)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    stopped = snapshot(Path(killed.out))["position"]["step"]
    assert 0 < stopped < 6 * 4
    train(killed)
    train(whole)
    once, again = snapshot(Path(whole.out)), snapshot(Path(killed.out))
    assert once["position"] == again["position"] and once["position"]["step"] == 6 * 4
    for part in ("net", "ema"):
        assert all(torch.equal(value, again[part][name]) for name, value in once[part].items()), (
            part
        )
    for key, state in once["optimizer"]["state"].items():
        assert all(
            torch.equal(value, again["optimizer"]["state"][key][name])
            for name, value in state.items()
        )
    assert [row.split(",")[:2] for row in log.read_text().splitlines()] == [
        row.split(",")[:2] for row in (Path(whole.out) / "log.csv").read_text().splitlines()
    ]


def test_two_processes_take_the_steps_of_one(tmp_path):
    """The same global batch: noise by sample, the affine by step, the presence maximum over
    processes. Three steps with gradients of every kind."""
    one, two = two_runs(tmp_path)
    both = start_two(two)
    train(one)
    for process in both:
        process.join(timeout=PATIENCE)
        assert process.exitcode == 0
    check_equal_runs(one, two)


@pytest.mark.slow
def test_two_processes_are_one_to_the_last_digits(tmp_path):
    """In float64 no difference hides in rounding: iFAM, and the fine-tuning of a repair."""
    tiny_config(tmp_path)  # pictures and backbone
    both = start_two(tmp_path / "two", target=shared.in_a_process)
    shared.main(tmp_path / "one")
    for process in both:
        process.join(timeout=PATIENCE)
        assert process.exitcode == 0
    one, two = (torch.load(tmp_path / name / "weights.pt") for name in ("one", "two"))
    assert one.keys() == two.keys() and any(name.startswith("tuned") for name in one)
    for name, value in one.items():
        assert value.dtype == torch.float64 or not value.is_floating_point(), name
        assert_close(two[name], value, atol=1e-8, rtol=0, msg=name)


def two_runs(folder):
    settings = {"epochs": 1, "batch": 4, "limit": 12, "options": {"freeze": "none"}}
    return [tiny_config(folder, out=str(folder / name), **settings) for name in ("one", "two")]


def check_equal_runs(one, two) -> None:
    alone, shared = snapshot(Path(one.out)), snapshot(Path(two.out))
    assert alone["position"] == shared["position"] and alone["position"]["step"] == 3
    for part in ("net", "ema"):
        for name, value in alone[part].items():
            assert_close(shared[part][name], value, atol=1e-5, rtol=0, msg=f"{part} {name}")
    losses = [
        [float(cell) for cell in row.split(",")[3:12]]
        for row in (Path(one.out) / "log.csv").read_text().splitlines()[1:]
    ]
    others = [
        [float(cell) for cell in row.split(",")[3:12]]
        for row in (Path(two.out) / "log.csv").read_text().splitlines()[1:]
    ]
    assert_close(torch.tensor(others), torch.tensor(losses), atol=1e-4, rtol=0)
    assert (Path(one.out) / "epochs.csv").read_text() == (Path(two.out) / "epochs.csv").read_text()
