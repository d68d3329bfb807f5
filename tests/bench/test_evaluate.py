"""One worker at one shard: what it reads, holds, refuses and times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from seecause.bench.evaluate import Clock, open_prepared, predict, read_samples, run_shard
from seecause.bench.plan import Store
from seecause.bench.runner import run
from seecause.data.batch import to_batch
from seecause.errors import BadOption
from tests.bench.toy import worker


def test_the_precision_of_products_is_part_of_a_shard_and_is_put_back(tmp_path, monkeypatch):
    def precision():
        return (
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
        )  # of products, and of convolutions

    before, seen = precision(), []
    monkeypatch.setattr(
        "seecause.bench.evaluate.predict",
        lambda *given: (seen.append(precision()), predict(*given))[1],
    )
    fast, plain = (
        worker(precision="high", methods={"sobel": {}}, limit=2),
        worker(methods={"sobel": {}}, limit=2),
    )
    for work, wanted in ((fast, ("high", True)), (plain, ("highest", False))):
        assert (
            run(Store(tmp_path), work).complete and seen.pop() == wanted and precision() == before
        )
    assert [shard.id for shard in fast.plan.shards] != [shard.id for shard in plain.plan.shards]
    with pytest.raises(BadOption, match="highest, high"):
        worker(precision="medium")


def test_a_worker_with_other_software_than_the_plan_is_refused(monkeypatch):
    plan = worker().plan
    open_prepared(plan)
    others = replace(plan, versions={**plan.versions, "torch": "1.13.0"})
    with pytest.raises(BadOption, match=r"torch=.*planned with, 1\.13\.0.*make them alike"):
        open_prepared(others)
    with pytest.raises(BadOption, match="metric my-metric is not set"):
        open_prepared(replace(plan, plugins={"metric my-metric": "0123"}))
    # also where the data is that of a plug-in, whose code is known by the same word
    monkeypatch.setattr("seecause.bench.evaluate.plugins", lambda *_: {"data": "0123"})
    others = replace(plan, data={**plan.data, "fingerprint": "4567"}, plugins={"data": "0123"})
    with pytest.raises(BadOption, match="planned with, 4567"):
        open_prepared(others)


def test_a_picture_that_changed_after_the_plan_is_noticed(tmp_path):
    pictures = tmp_path / "data"
    pictures.mkdir()
    draw = np.random.default_rng(0)
    for name in ("a.png", "b.png", "c.png"):
        Image.fromarray(draw.integers(0, 255, (60, 90, 3), np.uint8)).save(pictures / name)
    asked = dict(data=f"folder:{pictures}", target="predicted", methods={"sobel": {}})
    work = worker(**asked, metrics=("ins-del",))
    Image.new("RGB", (90, 60), "red").save(pictures / "c.png")
    status = run(Store(tmp_path / "run"), work)
    assert status.done == 1
    (reason,) = status.failed.values()
    assert "samples 2 to 2" in reason and "they changed since" in reason
    assert run(Store(tmp_path / "run"), worker(**asked, metrics=("ins-del",))).complete


def test_large_pictures_do_not_pile_up(tmp_path):
    for name in "ab":
        Image.new("RGB", (1200, 900), "red").save(tmp_path / f"{name}.png")
    work = worker(
        data=f"folder:{tmp_path}", target="predicted", methods={"sobel": {}}, metrics=("ins-del",)
    )
    frame = work.model.preprocess
    whole, _ = read_samples(work.data, 0, 2)
    cut, _ = read_samples(work.data, 0, 2, frame=frame)
    assert whole[0].image.shape == (3, 900, 1200)
    assert tuple(cut[0].image.shape[1:]) == frame.size
    batches = [to_batch(work.model, list(samples.values())) for samples in (cut, whole)]
    assert torch.equal(batches[0].images, batches[1].images) and batches[0].masks is None


def test_the_cache_counts_all_that_it_holds():
    work = worker(methods={"sobel": {}}, metrics=("part-correctness",), measures={}, limit=2)
    run_shard(work, work.plan.shards[0])
    images, truth = work.loaded[0, 2].batch.images, work.truths[0, 2]
    held = [images, work.loaded[0, 2].batch.masks, work.loaded[0, 2].batch.labels]
    held += [truth.removed, truth.elsewhere, truth.creature]
    assert work.bytes == sum(tensor.numel() * tensor.element_size() for tensor in held)


def test_a_clock_waits_for_the_gpu_at_both_ends(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in ("cuda", "cpu"):
        clock = Clock(torch.device(device))
        with clock.on("attribute"):
            pass
    assert waited == [torch.device("cuda")] * 2 and clock.seconds["attribute"] >= 0
