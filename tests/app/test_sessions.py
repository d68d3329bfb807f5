"""Sessions end when nobody uses them, and see only what is theirs."""

from __future__ import annotations

import pytest
from PIL import Image

from seecause._stop import Stopped
from seecause.app.jobs import Job, Queue
from seecause.app.sessions import (
    FILES,
    PICTURES,
    Full,
    NoJob,
    NoSession,
    Sessions,
    Storage,
    TooLarge,
)
from seecause.app.state import OpenedPicture


def picture(name):
    return OpenedPicture(name, name, Image.new("RGB", (4, 4)), {})


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

    def endless(progress):
        while True:
            progress(0.0, "")

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
    job = Job(mine.id, lambda progress: {})
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


def test_pictures_of_all_sessions_share_one_budget():
    size = picture("").bytes
    sessions = Sessions(storage=Storage(pictures=3 * size))
    one, other = sessions.open(), sessions.open()
    for name in ("u0", "u1"):
        one.add_picture(picture(name))
    one.add_picture(picture("u0"))  # once more: the latest
    for name in ("u0", "u2"):
        other.add_picture(picture(name))
    assert list(one.pictures) == ["u0"] and list(other.pictures) == ["u0", "u2"]
    assert sessions.storage.pictures.held == 3 * size


def test_files_of_all_sessions_share_one_budget_and_leave_the_disk(tmp_path):
    now = [0.0]
    sessions = Sessions(idle=10, clock=lambda: now[0], storage=Storage(files=100))
    one, other = sessions.open(), sessions.open()

    def add(session, size):
        path = tmp_path / "made.zip"
        path.write_bytes(b"x" * size)
        return session.add_file("made.zip", path)

    places = [add(one, 30) for _ in range(FILES + 1)]
    assert list(one.files) == places[1:] and sessions.storage.files.held == 60
    paths = [path for _, path in one.files.values()]
    add(other, 60)
    assert [path.exists() for path in paths] == [False, True] and list(one.files) == places[2:]
    with pytest.raises(TooLarge, match="as a command"):
        add(other, 101)
    now[0] = 11
    sessions.open()
    assert sessions.storage.files.held == 0 and not paths[1].exists()
    assert not list(paths[1].parent.iterdir())
    sessions.storage.close()
    assert not paths[1].parent.exists()


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
