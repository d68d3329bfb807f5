"""One budget bounds what runs at once, and running out of memory is survived and recorded."""

from __future__ import annotations

import pytest
import torch

from seecause._stop import Stopped, stoppable
from seecause.engine.chunks import (
    budget,
    fit,
    in_chunks,
    memory,
    plain_logits,
    run_in_chunks,
)
from tests.helpers import noise
from tests.linear import SIZE, linear_model

CPU = torch.device("cpu")


def test_the_budget_decides_how_many_run_at_once():
    with budget(1000):
        assert fit(50, 100, CPU) == 10
        assert fit(5, 100, CPU) == 5
        assert fit(50, 5000, CPU) == 1
        assert fit(50, 100, CPU, share=0.5) == 5
        assert fit(50, 0, CPU) == 50 and fit(0, 100, CPU) == fit(1, 100, CPU) == 1


def test_out_of_memory_halves_the_chunk_and_goes_on(caplog):
    sizes = []

    def run(start, stop):
        if stop - start > 3:
            raise torch.cuda.OutOfMemoryError("too large")
        sizes.append(stop - start)
        return list(range(start, stop))

    with budget() as held:
        parts = list(in_chunks(run, 10, 8, what="rows"))
        assert [i for part in parts for i in part] == list(range(10))
        assert sizes == [2, 2, 2, 2, 2]
        assert held.halvings == memory().halvings == ["rows: 4", "rows: 2"]
    assert caplog.messages == [
        "out of memory; rows reduced to 4",
        "out of memory; rows reduced to 2",
    ]


def test_work_can_be_stopped_between_two_chunks():
    done = []

    def check():
        if len(done) == 2:
            raise Stopped

    with stoppable(check), pytest.raises(Stopped):
        list(in_chunks(lambda a, b: done.append(a), 5, 1))
    assert done == [0, 1]


def test_a_single_item_that_does_not_fit_is_an_error():
    def run(start, stop):
        raise torch.cuda.OutOfMemoryError("too large")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        list(in_chunks(run, 3, 2))


def test_as_many_run_together_as_fit_and_results_come_in_order():
    ran = []

    def run(start, stop):
        ran.append((start, stop))
        return torch.arange(start, stop)

    with budget(10):
        assert run_in_chunks(run, 7, 4, CPU).tolist() == list(range(7))
    assert ran == [(0, 2), (2, 4), (4, 6), (6, 7)]


@pytest.mark.parametrize("what", ["pictures", None])
def test_plain_answers_of_as_many_pictures_as_fit(what):
    model, images, sizes = linear_model(), noise(5, 3, *SIZE).requires_grad_(), []

    def count(module, given):
        sizes.append(len(given[0]))
        if sizes == [2]:
            raise torch.cuda.OutOfMemoryError("too large")

    model.module.eval().register_forward_pre_hook(count)
    with budget(2 * model.forward_bytes(model.layout) + 1) as held:
        logits = plain_logits(model, images, **({"what": what} if what else {}))
    assert sizes == [2, 1, 1, 1, 1, 1] and not logits.requires_grad
    assert held.halvings == [f"{what or 'batch'}: 1"]
    assert torch.equal(logits, torch.cat([model(image[None]) for image in images]))


def test_a_budget_hears_of_halvings_under_one_inside_it():
    def run(start, stop):
        if stop - start > 1:
            raise torch.cuda.OutOfMemoryError("too large")
        return start

    with budget() as outer:
        list(in_chunks(run, 4, 2))
        with budget(100):
            list(in_chunks(run, 2, 2, what="rows"))
        assert outer.halvings == ["chunk: 1", "rows: 1"]


def test_budgets_nest_and_end():
    with budget(10) as outer:
        with budget(20):
            assert memory().limit == 20
        assert memory() is outer
    assert memory().limit is None


NO_ROOM = "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory"


NO_ROOM_BY = [NO_ROOM, "DefaultCPUAllocator: not enough memory", "can't allocate memory: 8 bytes"]


@pytest.mark.parametrize("failure", [*map(RuntimeError, NO_ROOM_BY), MemoryError()])
def test_out_of_memory_on_a_cpu_halves_too(failure):
    def run_chunk(a: int, b: int) -> int:
        if b - a > 2:
            raise failure
        return b - a

    with budget(None) as held:
        assert sum(in_chunks(run_chunk, 7, 8, what="images")) == 7
    assert held.halvings == ["images: 4", "images: 2"]


def test_another_error_of_torch_is_no_lack_of_memory():
    def run_chunk(a: int, b: int) -> int:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with budget(None) as held, pytest.raises(RuntimeError, match="shapes"):
        list(in_chunks(run_chunk, 4, 4))
    assert held.halvings == []
