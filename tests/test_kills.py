"""A process that is killed at any write, rename or removal: the next one gives the same bytes and
leaves nothing else behind. Killed for real: a fork leaves by `os._exit` at its n-th such call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from seecause import files
from seecause.bench.plan import Store
from seecause.bench.runner import run
from seecause.cli import app
from seecause.cli.shared import result_folder
from tests.bench.toy import worker

CALLS = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir")
KILLED = 9
Job = Callable[[Path], None]

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def killed(job: Job, folder: Path, at: int) -> bool:
    """Run a job in a child that dies at its `at`-th call; whether it came so far. A file that was
    not synced yet is torn."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    try:
        count = 0

        def counted(name: str) -> Callable[..., object]:
            real = getattr(os, name)

            def call(*args, **options):
                nonlocal count
                count += 1
                if count == at:
                    if name == "fsync":
                        os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
                    os._exit(KILLED)
                return real(*args, **options)

            return call

        torch.set_num_threads(1)
        for name in CALLS:
            setattr(os, name, counted(name))
        job(folder)
    finally:
        os._exit(0)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below, hidden ones too, but what tells of times, processes and the folder."""
    here = str(folder).encode()
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "log.jsonl"]
    marks = [path for path in files if path.parent.name == "shards" and path.suffix == ".json"]
    return {
        str(path.relative_to(folder)): b""
        if path in marks
        else path.read_bytes().replace(here, b"")
        for path in files
    }


def every_kill(job: Job, before: Job, places: Iterator[Path]) -> int:
    """Kill the job at each of its calls in a place of its own, then do it again; how many calls."""
    whole = next(places)
    before(whole)
    job(whole)
    expected = contents(whole)
    for at, place in enumerate(places, start=1):
        before(place)
        if not killed(job, place, at):
            return at - 1
        job(place)
        assert contents(place) == expected, f"after a kill at call {at}"
    raise AssertionError("unreachable")


@pytest.fixture
def places(tmp_path) -> Iterator[Path]:
    """Folders without end."""

    def endless() -> Iterator[Path]:
        for number in range(10_000):
            place = tmp_path / str(number)
            place.mkdir()
            yield place

    return endless()


def nothing(place: Path) -> None:
    pass


@pytest.mark.slow
def test_a_bench_run_killed_anywhere_comes_out_the_same(places):
    work = worker(methods={"center": {}}, metrics=("aupr1",), measures={}, limit=2, shard_size=1)

    def job(place: Path) -> None:
        assert run(Store(place / "run"), work).complete

    assert every_kill(job, nothing, places) > 20


def results(place: Path, name: str) -> None:
    with result_folder(place / "out", {"command": name}, overwrite=True) as folder:
        files.write_atomic(folder / "page.html", name)
        (folder / "maps").mkdir()
        (folder / "maps" / "a.txt").write_text(name)


@pytest.mark.parametrize(
    ("before", "least"),
    [
        (nothing, 4),
        (lambda place: results(place, "earlier"), 8),
        (lambda place: _foreign(place / "out"), 6),
    ],
    ids=["new", "replaced", "beside other things"],
)
def test_a_result_folder_killed_anywhere_comes_out_the_same(places, before, least):
    assert every_kill(lambda place: results(place, "later"), before, places) > least


def _foreign(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    (folder / "page.html").write_text("to be replaced")


def test_files_move_also_where_another_disk_is_mounted(tmp_path, monkeypatch):
    _foreign(tmp_path / "out")
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if self.parent != Path(target).parent:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    results(tmp_path, "later")
    assert (tmp_path / "out" / "page.html").read_text() == "later"
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("before", [nothing, lambda place: _foreign(place / "out")])
def test_explain_killed_anywhere_comes_out_the_same(places, before):
    words = ["explain", "critters:clean:test#0", "--method", "center", "--quiet", "--overwrite"]

    def job(place: Path) -> None:
        done = CliRunner().invoke(app, [*words, "--device", "cpu", "--out", str(place / "out")])
        assert done.exit_code == 0, done.output

    assert every_kill(job, before, places) > 5
