"""Two processes, as torchrun starts them, take the steps of one."""

import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from seecause.background.last_layer import fine_tune
from seecause.faithful import train
from seecause.faithful.training import join_processes
from tests.background.repair_toys import fitted, made_splits, scenes
from tests.faithful.runs import snapshot, table, tiny_config, train_in_a_process

PATIENCE = 120  # seconds, on a busy machine


def run_two(target, argument) -> list[multiprocessing.Process]:
    """As torchrun would, in processes that fork off one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["seecause.faithful.training"])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environments = [{**meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    running = [context.Process(target=target, args=(argument, each)) for each in environments]
    for process in running:
        process.start()
    return running


def finish(running: list[multiprocessing.Process]) -> None:
    for process in running:
        process.join(timeout=PATIENCE)
        assert process.exitcode == 0


def test_two_processes_take_the_steps_of_one(tmp_path):
    """The same global batch: noise by sample, the affine by step, the presence maximum over
    processes. Three steps with gradients of every kind."""
    settings = {"epochs": 1, "batch": 4, "limit": 12, "options": {"freeze": "none"}}
    one, two = (
        tiny_config(tmp_path, out=str(tmp_path / name), **settings) for name in ("one", "two")
    )
    running = run_two(train_in_a_process, two)
    train(one)
    finish(running)
    alone, shared = snapshot(Path(one.out)), snapshot(Path(two.out))
    assert alone["position"] == shared["position"] and alone["position"]["step"] == 3
    for part in ("net", "ema"):
        for name, value in alone[part].items():
            assert_close(shared[part][name], value, atol=1e-5, rtol=0, msg=f"{part} {name}")
    for ours, theirs in zip(*(table(Path(run.out) / "log.csv") for run in (one, two)), strict=True):
        for name in set(ours) - {"seconds"}:
            assert float(theirs[name]) == pytest.approx(float(ours[name]), abs=1e-4), name
    assert (Path(one.out) / "epochs.csv").read_text() == (Path(two.out) / "epochs.csv").read_text()


def test_a_process_takes_the_gpu_of_its_number_on_its_own_machine(monkeypatch):
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)

    def no_gpu(device: torch.device) -> None:
        raise RuntimeError(f"no {device} here")

    monkeypatch.setattr(torch.cuda, "set_device", no_gpu)
    with pytest.raises(RuntimeError, match="no cuda:1 here"), join_processes("cuda"):
        pass


def fine_tuned(out: Path, environment: dict[str, str]) -> None:
    """Two epochs of an odd batch, and of one that only the first process has a share of."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    with join_processes("cpu") as processes:
        biased = fitted(scenes(64)).to(torch.float64)
        splits = made_splits(biased)
        view, _ = fine_tune(
            biased,
            splits.train,
            lambda view: splits.validation.predict(view).transplant_worst,
            epochs=2,
            rate=1e-3,
            batch=len(splits.train) - 1,
        )
    if processes.first:
        torch.save(view.module.state_dict(), out / f"{processes.world}.pt")


@pytest.mark.slow
def test_fine_tuning_by_two_processes_is_that_of_one_to_the_last_digits(tmp_path):
    running = run_two(fine_tuned, tmp_path)
    fine_tuned(tmp_path, {})
    finish(running)
    one, two = (torch.load(tmp_path / f"{world}.pt") for world in (1, 2))
    assert_close(two, one, atol=1e-8, rtol=0)
