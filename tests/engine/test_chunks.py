"""One budget bounds what runs at once, and running out of memory is survived and recorded."""

import pytest
import torch

from seecause.engine.chunks import (
    budget,
    fit,
    in_chunks,
    memory,
    plain_logits,
)
from seecause.errors import Stopped, stoppable
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


LACKS = [
    torch.cuda.OutOfMemoryError("too large"),
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("DefaultCPUAllocator: not enough memory"),
]


@pytest.mark.parametrize("failure", LACKS)
def test_out_of_memory_halves_the_chunk_and_goes_on(failure, caplog):
    sizes = []

    def run(start, stop):
        if stop - start > 3:
            raise failure
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


def test_budgets_nest_pass_halvings_on_and_end():
    def run(start, stop):
        if stop - start > 1:
            raise torch.cuda.OutOfMemoryError("too large")
        return start

    with budget(10) as outer:
        with budget(20):
            assert memory().limit == 20
            list(in_chunks(run, 2, 2, what="rows"))
        assert memory() is outer and outer.halvings == ["rows: 1"]
    assert memory().limit is None


def test_another_error_of_torch_is_no_lack_of_memory():
    def run_chunk(a: int, b: int) -> int:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with budget(None) as held, pytest.raises(RuntimeError, match="shapes"):
        list(in_chunks(run_chunk, 4, 4))
    assert held.halvings == []
