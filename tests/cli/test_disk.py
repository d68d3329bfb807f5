"""A disk that is full or may not be written: one line, and never the exit code of `incomplete`."""

from __future__ import annotations

import errno
import os

import pytest
from typer.testing import CliRunner

from seecause.cli import app
from seecause.cli.progress import INCOMPLETE

RUN = ("bench", "run", "--limit", "2", "--method", "random", "--metric", "aupr1", "--quiet")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("words", [RUN, ("explain", "critters:clean:test#0", "--method", "center")])
def test_a_write_that_fails_is_one_line(tmp_path, monkeypatch, words, number):
    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("seecause.files.os.fsync", full)
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 != INCOMPLETE
    assert isinstance(done.exception, SystemExit)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("seecause: ")]
    assert os.strerror(number) in line
    monkeypatch.undo()
    assert CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")]).exit_code == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("room", [0, 1500])
@pytest.mark.parametrize("words", [RUN, ("explain", "critters:clean:test#0", "--method", "center")])
def test_a_file_that_the_system_cuts_off_is_one_line(tmp_path, words, room):
    """By the system's own limit: no call is replaced."""
    code, stderr = limited([*words, "--out", str(tmp_path / "out")], room)
    assert code == 2 and "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("seecause: ")]
    assert os.strerror(errno.EFBIG) in line
    names = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert not [name for name in names if name.endswith(".partial")], names
    assert CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")]).exit_code == 0


def limited(words: list[str], room: int) -> tuple[int, str]:
    """Exit code and standard error of a command in a child whose files may have `room` bytes."""
    import resource
    import signal

    import torch

    read, write = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        done = CliRunner().invoke(app, words)
        os.write(write, done.stderr.encode()[-4000:])
        os._exit(done.exit_code)
    os.close(write)
    with os.fdopen(read) as pipe:
        stderr = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stderr
