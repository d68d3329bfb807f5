"""A disk that is full or may not be written: one line, and never the exit code of `incomplete`."""

from __future__ import annotations

import errno
import os

import pytest
from typer.testing import CliRunner

from seecause.cli import app
from seecause.cli.bench import INCOMPLETE

RUN = ("bench", "run", "--limit", "2", "--method", "random", "--metric", "aupr1", "--quiet")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("words", [RUN, ("explain", "critters:clean:test#0", "--method", "center")])
def test_a_write_that_fails_is_one_line(tmp_path, monkeypatch, words, number):
    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("seecause._files.os.fsync", full)
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 != INCOMPLETE
    assert isinstance(done.exception, SystemExit)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("seecause: ")]
    assert os.strerror(number) in line
    monkeypatch.undo()
    assert CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")]).exit_code == 0
