"""Sessions end when nobody uses them, and see only what is theirs."""

from __future__ import annotations

import pytest
from PIL import Image

from seecause._stop import Stopped
from seecause.app.jobs import Job, Queue
from seecause.app.sessions import PICTURES, Full, NoJob, NoSession, Sessions
from seecause.app.workshop import Picture


def picture(name):
    return Picture(name, name, Image.new("RGB", (4, 4)), {})


def test_a_session_goes_when_it_is_not_used():
    now = [0.0]
    sessions = Sessions(idle=10, clock=lambda: now[0])
    used, unused = sessions.open(), sessions.open()
    now[0] = 9
    sessions.get(used.id)
    now[0] = 15
    assert sessions.get(used.id) is used
    with pytest.raises(NoSession):
        sessions.get(unused.id)
    assert len(sessions) == 1


def test_the_session_unused_longest_makes_room():
    now = [0.0]
    sessions = Sessions(most=2, clock=lambda: now[0])
    first, second = sessions.open(), sessions.open()
    now[0] = 70
    sessions.get(first.id)
    sessions.open()
    assert sessions.get(first.id)
    with pytest.raises(NoSession):
        sessions.get(second.id)


def test_jobs_of_a_session_that_ends_are_cancelled():
    now, queue = [0.0], Queue("toy")
    sessions = Sessions(idle=10, clock=lambda: now[0])
    session = sessions.open()

    def endless(tell):
        while True:
            tell(0.0, "")

    job = Job(session.id, endless)
    session.add_job(job, queue)
    queue.submit(job)
    now[0] = 11
    sessions.open()
    assert isinstance(job.future.exception(20), Stopped)
    queue.close()


def test_a_job_belongs_to_its_session():
    sessions, queue = Sessions(), Queue("toy")
    mine, theirs = sessions.open(), sessions.open()
    job = Job(mine.id, lambda tell: {})
    mine.add_job(job, queue)
    assert mine.job(job.id) == (job, queue)
    with pytest.raises(NoJob):
        theirs.job(job.id)
    queue.close()


def test_only_the_latest_pictures_of_a_session_stay():
    session = Sessions().open()
    for place in range(PICTURES + 3):
        session.add_picture(picture(f"u{place}"))
    assert list(session.pictures) == [f"u{place}" for place in range(3, PICTURES + 3)]


def test_sessions_in_use_are_not_ended_by_new_ones():
    now = [0.0]
    sessions = Sessions(most=2, clock=lambda: now[0])
    first, second = sessions.open(), sessions.open()
    with pytest.raises(Full, match="in a minute"):
        sessions.open()
    now[0] = 70
    sessions.get(first.id)
    third = sessions.open()  # the second was not used for a while
    assert sessions.get(first.id) and sessions.get(third.id) and len(sessions) == 2
    with pytest.raises(NoSession):
        sessions.get(second.id)
