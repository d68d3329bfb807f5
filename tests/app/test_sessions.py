"""Sessions end when nobody uses them, and see only what is theirs."""

import pytest
from PIL import Image

from seecause.app.jobs import Job, Queue, Refused
from seecause.app.sessions import Sessions
from seecause.app.state import OpenedPicture
from seecause.errors import Stopped


def picture(name):
    return OpenedPicture(name, name, Image.new("RGB", (4, 4)), {})


def clocked(now):
    """Sessions that end after ten seconds by the clock `now`."""
    sessions = Sessions()
    sessions.idle, sessions.clock = 10, lambda: now[0]
    return sessions


def test_a_session_goes_when_it_is_not_used():
    now = [0.0]
    sessions = clocked(now)
    used, unused = sessions.open(), sessions.open()
    now[0] = 9
    sessions.get(used.id)
    now[0] = 15
    assert sessions.get(used.id) is used
    with pytest.raises(Refused, match="has ended"):
        sessions.get(unused.id)
    assert len(sessions) == 1


def test_the_session_unused_longest_makes_room():
    sessions = Sessions()
    sessions.most = 2
    first, second = sessions.open(), sessions.open()
    sessions.get(first.id)
    sessions.open()
    assert sessions.get(first.id)
    with pytest.raises(Refused, match="has ended"):
        sessions.get(second.id)


def test_jobs_of_a_session_that_ends_are_cancelled():
    now, queue = [0.0], Queue("toy")
    sessions = clocked(now)
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


def test_images_of_all_sessions_share_one_budget():
    sessions = Sessions()
    sessions.pictures.most = 3
    one, other = sessions.open(), sessions.open()
    for name in ("u0", "u1"):
        one.add_picture(picture(name))
    one.add_picture(picture("u0"))  # once more: the latest
    for name in ("u0", "u2"):
        other.add_picture(picture(name))
    assert one.picture("u0") and other.picture("u0") and other.picture("u2")
    assert one.picture("u1") is None and len(sessions.pictures) == 3


def test_files_of_all_sessions_share_one_budget_and_leave_the_disk(tmp_path):
    now = [0.0]
    sessions = clocked(now)
    sessions.files.most = 3
    one, other = sessions.open(), sessions.open()

    def add(session):
        path = tmp_path / "made.zip"
        path.write_bytes(b"x")
        return session.add_file("made.zip", path)

    ids = [add(one) for _ in range(3)]
    paths = [one.file(id)[1] for id in ids]
    add(other), add(other)
    assert [path.exists() for path in paths] == [False, False, True]
    assert one.file(ids[0]) is None and other.file(ids[2]) is None
    now[0] = 11
    sessions.open()
    assert len(sessions.files) == 0 and not paths[2].exists()
    assert not list(paths[2].parent.iterdir())
    sessions.close()
    assert not paths[2].parent.exists()
