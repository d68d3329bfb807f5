"""Queues: fair, limited, and a job that is cancelled frees its model."""

import threading

import pytest

from seecause.app import jobs
from seecause.app.jobs import Job, Queue, Refused
from seecause.errors import BadOption, Stopped, may_stop, stoppable

SOON = 20.0


@pytest.fixture
def held(monkeypatch):
    """A queue whose only worker is busy until `let_go` is set."""
    monkeypatch.setattr(jobs, "WORKERS", 1)
    monkeypatch.setattr(jobs, "PER_SESSION", 4)
    queue, let_go, began = Queue("toy"), threading.Event(), threading.Event()

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


def test_what_waits_is_limited_for_each_session(held):
    queue, _ = held
    for _ in range(4):
        queue.submit(Job("a", noting([], "")))
    with pytest.raises(Refused, match="too many"):
        queue.submit(Job("a", noting([], "")))
    queue.submit(Job("b", noting([], "")))


def test_long_jobs_of_one_session_leave_room_for_others():
    queue, let_go, began = Queue("toy"), threading.Event(), threading.Semaphore(0)

    def hold(progress):
        began.release()
        let_go.wait(SOON)
        return {}

    for _ in range(jobs.OWN_WORKERS):
        queue.submit(Job("holder", hold))
        assert began.acquire(timeout=SOON)
    own = queue.submit(Job("holder", noting([], "own")))
    assert queue.submit(Job("other", noting([], "other"))).future.result(SOON)
    assert not own.running and not own.future.done()
    let_go.set()
    assert own.future.result(SOON) == {"name": "own"}
    queue.close()


def test_a_cancelled_job_ends_at_its_next_block_and_frees_the_queue():
    queue, began = Queue("toy"), threading.Event()

    def endless(progress):
        began.set()
        while True:
            may_stop()  # what every walk over blocks asks

    job = queue.submit(Job("a", endless))
    assert began.wait(SOON)
    queue.cancel(job)
    assert isinstance(job.future.exception(SOON), Stopped)
    assert queue.submit(Job("b", noting([], "next"))).future.result(SOON) == {"name": "next"}
    queue.close()


def test_progress_is_told_and_telling_ends_a_cancelled_job():
    queue, seen = Queue("toy"), []

    def run(progress):
        progress(0.25, "a quarter")
        seen.append((job.share, job.words))
        job.stopped = True
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
