"""Runs in processes of their own: killed and continued, and two under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import torch
from torch.testing import assert_close

from seecause.faithful import train
from tests.faithful.runs import tiny_config

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PATIENCE = 120  # seconds, on a busy machine


def start(config, *launcher: str) -> subprocess.Popen:
    config.folder.parent.mkdir(exist_ok=True)
    path = config.folder.parent / f"{config.folder.name}.json"
    path.write_text(json.dumps(asdict(config)))
    command = [
        sys.executable,
        *launcher,
        "-m",
        "seecause",
        "faithful",
        "train",
        "--config",
        str(path),
        "--device",
        "cpu",
        "--quiet",
    ]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen) -> None:
    message, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, message


def snapshot(config) -> dict:
    return torch.load(config.folder / "last.pt", weights_only=True)


def test_a_killed_run_ends_in_the_same_bits(tmp_path):
    """kill -9 in the middle of an epoch, then the same command again: weights, average and
    optimiser equal those of a run that was left alone."""
    whole = tiny_config(tmp_path, out=str(tmp_path / "whole"), epochs=6, snapshot_every=1)
    killed = tiny_config(tmp_path, out=str(tmp_path / "killed"), epochs=6, snapshot_every=1)
    process = start(killed)
    log = killed.folder / "log.csv"
    until = time.monotonic() + PATIENCE
    while (
        not (log.exists() and len(log.read_text().splitlines()) > 2)
        and process.poll() is None
        and time.monotonic() < until
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    stopped = snapshot(killed)["position"]["step"]
    assert 0 < stopped < 6 * 4
    train(killed)
    train(whole)
    once, again = snapshot(whole), snapshot(killed)
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
        row.split(",")[:2] for row in (whole.folder / "log.csv").read_text().splitlines()
    ]


def test_two_processes_take_the_steps_of_one(tmp_path):
    """The same global batch: noise by sample, the affine by step, the presence maximum over
    processes. Three steps with gradients of every kind."""
    settings = {"epochs": 1, "batch": 4, "limit": 12, "options": {"freeze": "none"}}
    one = tiny_config(tmp_path, out=str(tmp_path / "one"), **settings)
    two = tiny_config(tmp_path, out=str(tmp_path / "two"), **settings)
    process = start(
        two,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--master_port=0",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0",
    )
    train(one)
    finish(process)
    alone, shared = snapshot(one), snapshot(two)
    assert alone["position"] == shared["position"] and alone["position"]["step"] == 3
    for part in ("net", "ema"):
        for name, value in alone[part].items():
            assert_close(shared[part][name], value, atol=1e-5, rtol=0, msg=f"{part} {name}")
    losses = [
        [float(cell) for cell in row.split(",")[3:12]]
        for row in (one.folder / "log.csv").read_text().splitlines()[1:]
    ]
    others = [
        [float(cell) for cell in row.split(",")[3:12]]
        for row in (two.folder / "log.csv").read_text().splitlines()[1:]
    ]
    assert_close(torch.tensor(others), torch.tensor(losses), atol=1e-4, rtol=0)
    assert (one.folder / "epochs.csv").read_text() == (two.folder / "epochs.csv").read_text()
