"""Queues: fair, limited, and a job that is cancelled frees its model."""

from __future__ import annotations

import threading

import pytest

from seecause._stop import Stopped, may_stop
from seecause.app import jobs
from seecause.app.jobs import Job, Queue, TooBusy
from seecause.errors import BadOption

SOON = 20.0


@pytest.fixture
def held(monkeypatch):
    """A queue whose worker is busy until `let_go` is set, however long that takes."""
    monkeypatch.setattr(jobs, "MOMENT", float("inf"))
    queue, let_go, began = (
        Queue("toy", limit=6, per_session=4),
        threading.Event(),
        threading.Event(),
    )

    def hold(progress):
        began.set()
        let_go.wait(SOON)
        return {}

    queue.submit(Job("holder", hold))
    assert began.wait(SOON)
    yield queue, let_go
    let_go.set()
    queue.close()


def noting(order, name):
    def run(progress):
        order.append(name)
        return {"name": name}

    return run


def test_sessions_take_turns(held):
    queue, let_go = held
    order: list[str] = []
    many = [queue.submit(Job("greedy", noting(order, f"greedy {i}"))) for i in range(3)]
    many.append(queue.submit(Job("modest", noting(order, "modest"))))
    assert queue.ahead(many[-1]) == 2  # the one that runs, and one of the greedy session
    let_go.set()
    for job in many:
        job.future.result(SOON)
    assert order == ["greedy 0", "modest", "greedy 1", "greedy 2"]


def test_a_newer_job_takes_the_place_of_an_older_one_of_its_slot(held):
    queue, let_go = held
    order: list[str] = []
    older = queue.submit(Job("a", noting(order, "older"), slot="brush"))
    other = queue.submit(Job("b", noting(order, "other session"), slot="brush"))
    newer = queue.submit(Job("a", noting(order, "newer"), slot="brush"))
    let_go.set()
    assert newer.future.result(SOON) == {"name": "newer"} and other.future.result(SOON)
    assert isinstance(older.future.exception(SOON), Stopped) and "older" not in order


def test_what_waits_is_limited_for_each_session_and_for_all(held):
    queue, _ = held
    for _ in range(4):
        queue.submit(Job("a", noting([], "")))
    with pytest.raises(TooBusy, match="you"):
        queue.submit(Job("a", noting([], "")))
    for name in "bc":
        queue.submit(Job(name, noting([], "")))
    with pytest.raises(TooBusy, match="toy"):
        queue.submit(Job("d", noting([], "")))
    assert len(queue) == 6


def test_a_long_job_goes_on_beside_the_queue(held, monkeypatch):
    queue, let_go = held
    order: list[str] = []
    waiting = queue.submit(Job("other", noting(order, "waiting")))
    queue.relieve()
    assert not waiting.done  # the holder has not run for a moment
    monkeypatch.setattr(jobs, "MOMENT", 0.0)
    queue.relieve()
    assert waiting.future.result(SOON) == {"name": "waiting"} and not let_go.is_set()
    assert queue.submit(Job("other", noting(order, "next"))).future.result(SOON)
    let_go.set()
    assert queue.submit(Job("holder", noting(order, "last"))).future.result(SOON)
    assert order == ["waiting", "next", "last"]


def test_a_cancelled_job_ends_at_its_next_block_and_frees_the_queue():
    queue, began = Queue("toy"), threading.Event()

    def endless(progress):
        began.set()
        while True:
            may_stop()  # what every walk over blocks asks

    job = queue.submit(Job("a", endless))
    assert began.wait(SOON)
    waiting = queue.submit(Job("a", noting([], "never")))
    queue.cancel(waiting)
    assert isinstance(waiting.future.exception(SOON), Stopped)
    queue.cancel(job)
    assert isinstance(job.future.exception(SOON), Stopped)
    assert queue.submit(Job("b", noting([], "next"))).future.result(SOON) == {"name": "next"}
    queue.close()


def test_progress_is_told_and_telling_ends_a_cancelled_job():
    queue, seen = Queue("toy"), []

    def run(progress):
        progress(0.25, "a quarter")
        seen.append((job.share, job.words))
        job.stop()
        progress(0.5, "half")
        return {}

    job = Job("a", run)
    queue.submit(job)
    assert isinstance(job.future.exception(SOON), Stopped)
    assert seen == [(0.25, "a quarter")] and job.share == 0.25
    queue.close()


def test_a_failing_job_does_not_end_the_worker():
    queue = Queue("toy")

    def fails(progress):
        raise BadOption("x", 1, "2")

    assert isinstance(queue.submit(Job("a", fails)).future.exception(SOON), BadOption)
    assert queue.submit(Job("a", noting([], "next"))).future.result(SOON) == {"name": "next"}
    queue.close()


def test_a_run_of_a_model_stops_between_two_blocks(state):
    from seecause._stop import stoppable

    model, calls = state.models["critters-vit"].view, []

    def check():
        calls.append(1)
        if len(calls) == 3:
            raise Stopped

    image = state.sample("s0").inputs["critters-vit"]
    with pytest.raises(Stopped), stoppable(check):
        model(image)
    assert len(calls) == 3
    assert model(image).shape == (1, 8)  # nothing was left behind
