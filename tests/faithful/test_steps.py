"""One step of training, looked at from inside: rates, clipping, precision, passes that add up, and
the average that follows."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from seecause.errors import BadOption
from seecause.faithful import load, train
from seecause.faithful.training import CsvLog, new_net, new_optimizer
from tests.faithful.runs import ignore, snapshot, start, table


def state(module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


def test_rates_grow_with_the_batch_and_decay_shrinks_with_the_run(configure):
    config = configure(batch=64, learning_rate=1e-6, head_factor=1e4)
    net = new_net(config, ("a", "b"))
    optimizer = new_optimizer(config, net, 100)
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    matrix = found[id(net.stage2.tower.native.blocks[0].attn.qkv.weight)]
    head, norm = found[id(net.stage2.head.weight)], found[id(net.stage2.fc_norm.weight)]
    assert matrix["lr"] == pytest.approx(2e-6) and head["lr"] == pytest.approx(2e-2)
    assert matrix["weight_decay"] == head["weight_decay"] == pytest.approx(0.005)
    assert norm["weight_decay"] == 0 and norm["betas"] == (0.9, 0.999)
    run = start(configure(epochs=3, limit=12))  # 3 epochs of 3 steps
    assert sorted({group["weight_decay"] for group in run.optimizer.param_groups}) == pytest.approx(
        [0, 0.05 / 3]
    )


def test_rates_fall_by_a_cosine_from_epoch_to_epoch(configure):
    """Also as the log tells them: the paper's are of the order of a millionth."""
    config = configure(epochs=2, limit=8, learning_rate=1e-6)
    assert train(config).best_epoch == 0  # the first of equally good ones
    rates = [float(row["learning_rate"]) for row in table(Path(config.out) / "log.csv")]
    assert rates == pytest.approx([5e-7, 5e-7, 2.5e-7, 2.5e-7])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_network_learns_in_the_precision_asked(configure, precision):
    run, seen = start(configure(precision=precision)), []
    run.net.register_forward_pre_hook(
        lambda *arguments: seen.append(
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        )
    )
    run._epoch(ignore)
    assert seen == [getattr(torch, precision)]
    assert all(value.dtype == torch.float32 for value in run.net.parameters())


def follow(
    averaged: dict[str, Tensor], weights: dict[str, Tensor], update: int
) -> dict[str, Tensor]:
    """The average after an update, counted from 0: its decay is 1 - (1 + t)^(-2/3), so that the
    first one copies."""
    share = (1 + update) ** (-2 / 3)
    return {
        name: (
            averaged[name] + share * (value - averaged[name])
            if value.is_floating_point()
            else value
        )
        for name, value in weights.items()
    }


def test_the_average_follows_closely_at_first(configure):
    run = start(configure(limit=12))
    steps: list[dict[str, Tensor]] = []
    run._epoch(lambda *message: steps.append(state(run.net)))
    expected = state(run.net)
    for update, weights in enumerate(steps):
        expected = follow(expected, weights, update)
    assert len(steps) == 3 and not same(steps[-1], state(run.ema.module))
    assert run.ema.decay == 0.9999
    assert_close(state(run.ema.module), expected, atol=1e-6, rtol=0)
    run._validate()  # keeps the average
    assert same(state(load(Path(run.config.out) / "best")), state(run.ema.module))


def test_a_stopped_run_ends_in_the_same_bits(configure, tmp_path):
    whole, stopped = (
        configure(out=str(tmp_path / name), epochs=2, limit=12, snapshot_every=1)
        for name in ("whole", "stopped")
    )

    def stop(done: int, *message) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(stopped, on_step=stop)
    assert snapshot(Path(stopped.out))["position"]["step"] == 4  # in the second epoch
    train(stopped)
    train(whole)
    once, again = (snapshot(Path(config.out)) for config in (whole, stopped))
    assert once["position"] == again["position"] and once["position"]["step"] == 6
    assert same(once["net"], again["net"]) and same(once["ema"], again["ema"])
    for name, steps in (("log.csv", "123456"), ("epochs.csv", "36")):  # all rows, each once
        logs = [table(Path(config.out) / name) for config in (whole, stopped)]
        assert [[row["step"] for row in rows] for rows in logs] == [[*steps], [*steps]]
        assert [row | {"seconds": ""} for row in logs[0]] == [
            row | {"seconds": ""} for row in logs[1]
        ]
    assert all(
        same(kept, again["optimizer"]["state"][key])
        for key, kept in once["optimizer"]["state"].items()
    )


def test_a_batch_that_cannot_be_made_leaves_nothing_behind(configure):
    config = configure(batch=5)
    with pytest.raises(BadOption, match="at most 4"):
        start(config)
    assert not Path(config.out).exists()


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


def test_a_run_makes_the_folders_it_lies_in(configure, tmp_path):
    config = configure(out=str(tmp_path / "runs" / "of today" / "first"))
    train(config)
    assert (Path(config.out) / "best").is_dir()
