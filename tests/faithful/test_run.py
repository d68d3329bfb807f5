"""What surrounds a run: its processes, its logs and its folder."""

from __future__ import annotations

import contextlib
import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from seecause.errors import BadOption, MissingExtra, ViewMismatch
from seecause.faithful import train, training
from seecause.faithful.run import (
    CsvLog,
    Processes,
    join_processes,
    joined_processes,
)
from seecause.faithful.training import Run
from tests.faithful.runs import CPU, deaf, start, table


def test_a_board_hears_of_training_and_of_validation(configure):
    run, heard = start(configure(limit=8, epochs=2)), []
    run.board.add = lambda kind, row: heard.append((kind, row["epoch"], row["step"]))
    closed = []
    run.board.writer = SimpleNamespace(close=lambda: closed.append(len(heard)))
    run.go(deaf)
    assert closed == [6]  # after all rows, so that none is lost
    training_rows = [("train", 0, 1), ("train", 0, 2), ("train", 1, 3), ("train", 1, 4)]
    assert [row for row in heard if row[0] == "train"] == training_rows
    assert [row for row in heard if row[0] == "val"] == [("val", 0, 2), ("val", 1, 4)]


def test_a_board_is_written_beside_the_log(configure, monkeypatch):
    scalars, places = [], []

    class Writer:
        def __init__(self, folder):
            places.append(folder)

        def add_scalar(self, name, value, step):
            scalars.append((name, value, step))

        def close(self):
            places.append("closed")

    board = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    config = configure(limit=8, tensorboard=True)
    train(config)
    assert places == [str(config.folder / "tensorboard"), "closed"]
    names = {name for name, _, _ in scalars}
    assert {"train/total", "train/learning_rate", "val/average", "val/kept"} <= names
    assert not names & {"train/step", "train/epoch", "val/best"}
    assert [step for name, _, step in scalars if name == "train/total"] == [1, 2]
    for kind, file in (("train", "log.csv"), ("val", "epochs.csv")):
        for row in table(config.folder / file):
            written = {name: value for name, value, step in scalars if step == int(row["step"])}
            for name, cell in row.items():
                if f"{kind}/{name}" in names and cell:
                    assert float(cell) == pytest.approx(written[f"{kind}/{name}"], rel=1e-5), name


def test_processes_add_their_gradients_and_average_their_logs(monkeypatch):
    """The other of two has three times as much."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor.mul_(4))
    two, alone = Processes(1, 2, CPU), Processes(0, 1, CPU)
    assert two.mean(torch.tensor([1.0, 2.0])).tolist() == [2, 4]
    assert alone.mean(torch.tensor([1.0, 2.0])).tolist() == [1, 2]
    weights = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(3))]
    for processes, factor in ((two, 4), (alone, 1)):
        for weight in weights:
            weight.grad = torch.ones_like(weight) * weight.numel()
        processes.add_gradients([*weights, torch.nn.Parameter(torch.zeros(1))])
        assert [weight.grad.unique().tolist() for weight in weights] == [[4 * factor], [3 * factor]]
    assert alone.first and not two.first
    assert alone.gather("a") == ["a"] and alone.from_first("a") == "a"

    def gather(everyones, mine):
        everyones[:] = ["first", mine]

    def broadcast(message, src, device):
        assert (src, device) == (0, CPU)
        message[0] = "first"

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    assert two.gather("second") == ["first", "second"] and two.from_first("second") == "first"


def test_processes_exchange_gradients_in_the_last_pass_of_a_step(configure, monkeypatch):
    """And wait for unused parameters only where a loss is off."""
    quiet: list[bool] = []

    class Wrapped(torch.nn.Module):
        def __init__(self, module, **options):
            super().__init__()
            self.module, self.options, self.off = module, options, False

        @contextlib.contextmanager
        def no_sync(self):
            self.off = True
            yield
            self.off = False

        def forward(self, *inputs):
            quiet.append(self.off)
            return self.module(*inputs)

    monkeypatch.setattr(training, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr(Processes, "wait", lambda self: None)
    monkeypatch.setattr(Processes, "mean", lambda self, values: values)
    for losses, idle in (({}, False), ({"entropy": 0.0}, True)):
        config = configure(accumulate=2, batch=4, limit=8, losses=losses, ema=False)
        run = Run(config, Processes(0, 2, CPU))
        assert run.losses.options == {"broadcast_buffers": False, "find_unused_parameters": idle}
        run._epoch(deaf)
    assert quiet == [True, False] * 4


def test_a_process_takes_the_device_it_is_told(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for there, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        with join_processes() as alone, join_processes("cpu") as told:
            assert (alone.device.type, told.device.type) == (kind, "cpu")
            assert (alone.rank, alone.world) == (0, 1)
    with pytest.raises(BadOption, match="here there is none"), join_processes("cuda:1"):
        pass
    assert joined_processes(CPU) == Processes(0, 1, CPU)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with join_processes("cpu") as third:
        assert third == joined_processes(CPU) == Processes(1, 3, CPU)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_processes_meet_as_torchrun_tells_and_part_also_after_an_error(monkeypatch, kind):
    """This is the fourth of six, and the second on its machine: it takes GPU 1."""
    calls, where = [], torch.device("cuda", 1) if kind == "cuda" else CPU
    for name, value in {"WORLD_SIZE": "6", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("takes", device)))
    monkeypatch.setattr(
        dist, "init_process_group", lambda how, **more: calls.append(("joins", how, more))
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("parts"))
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("waits"))
    joined = Processes(3, 6, where)
    met = "seecause.faithful.run.joined_processes"
    monkeypatch.setattr(met, lambda device: replace(joined, device=device))
    with pytest.raises(KeyboardInterrupt), join_processes(kind) as processes:
        assert processes == joined and not processes.first
        processes.wait()
        raise KeyboardInterrupt
    joins = ("joins", "nccl", {"device_id": where}) if kind == "cuda" else ("joins", "gloo", {})
    assert calls == [*([("takes", where)] if kind == "cuda" else []), joins, "waits", "parts"]
    Processes(0, 1, CPU).wait()  # for nobody
    assert calls[-1] == "parts"


def test_a_log_that_is_opened_again_keeps_the_rows_up_to_its_step(tmp_path):
    log = CsvLog(tmp_path / "log.csv", ("step", "total"))
    for step in (1, 2, 3):
        log.add({"step": step, "total": 0.5 * step})
    with log.path.open("a") as file:
        file.write("1")  # a row of step 12, say, that was cut short
    CsvLog(log.path, log.columns, step=2).add({"step": 3, "total": 9.0, "more": 1.0})
    values = [(row["step"], row["total"]) for row in table(log.path)]
    assert values == [("1", "0.5"), ("2", "1.0"), ("3", "9.0")]
    log.add({"step": 4, "total": 0.123456789})
    assert table(log.path)[-1] == {"step": "4", "total": "0.123457"}


def test_errors_survive_the_way_between_processes():
    error = ViewMismatch("probe", "block 3", "off by 1")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ViewMismatch and str(again) == str(error) and again.where == "block 3"


def test_tensorboard_is_asked_for_by_name(configure, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match="tools"):
        train(configure(tensorboard=True))
