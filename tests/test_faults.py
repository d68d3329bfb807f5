"""What happens to a benchmark while it runs: processes killed at random moments, signals, a disk
that is full or may only be read, a folder or a picture that goes, a clock set back. Always the same
bytes as an undisturbed run, or a clear refusal. `make test-faults` draws twenty moments."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from seecause.bench import runner
from seecause.bench.plan import Store
from seecause.bench.runner import run
from seecause.cli import app, main
from tests.bench.toy import REQUEST, worker
from tests.files import photo
from tests.test_kills import contents

SEED = int(os.environ.get("SEECAUSE_SEED", "0"))
KILLS = {
    "alone": 6,
    "driver": 4,
    "worker": 4,
    "actor": 3,
    "raylet": 3,
}  # moments of `make test-faults`
SIGNS = {"worker": "spawn_main", "actor": "ray::", "raylet": "raylet/raylet"}  # of command lines
PATIENCE = 300.0  # seconds, on a busy machine
NEWNS, NEWUSER, REMOUNT, READ_ONLY = 0x20000, 0x10000000, 32, 1  # of mount(2) and unshare(2)
UNABLE = 77  # the exit code of a child that may not mount
COMMAND = ("bench", "run", "--method", "random,sobel", "--metric", "aupr1", "--limit", "6")
COMMAND += ("--shard-size", "1", "--device", "cpu", "--quiet", "--out")

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def fork(job: Callable[[], object]) -> psutil.Process:
    """A job in a process of its own; its exit code is the job's, 99 for an exception."""
    child = os.fork()
    if child:
        return psutil.Process(child)
    code = 99
    try:
        os.setsid()
        torch.set_num_threads(1)
        code = int(job() or 0)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 98
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def left_with(process: psutil.Process) -> int:
    """How a child ended; what it began ends with it."""
    begun = process.children(recursive=True)
    code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    _, alive = psutil.wait_procs(begun, timeout=PATIENCE if code >= 0 else 20)
    for orphan in alive:  # of Ray, whose own processes outlive a driver that was killed
        orphan.kill()
    return code


def after(folder: Path, events: int, process: psutil.Process) -> None:
    """Wait until so many shards have begun."""
    until = time.monotonic() + PATIENCE
    log = folder / "log.jsonl"
    while not log.is_file() or log.read_bytes().count(b'"start"') < events:
        assert time.monotonic() < until and process.status() != psutil.STATUS_ZOMBIE
        time.sleep(0.001)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    """Every byte of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(Store(folder), worker()).complete
    return contents(folder)


# processes killed at random moments


def strike(kind: str, folder: Path, draw: random.Random) -> int:
    """Begin a run, kill a process of that kind somewhere in the work, and say how the run ended."""
    how = {"alone": {"workers": 1}, "worker": {"workers": 2}, "driver": {"workers": 2}}
    options = how.get(kind, {"workers": 2, "cluster": "local"})
    process = fork(lambda: not run(Store(folder), worker(), **options).complete)
    after(folder, draw.randint(1, 9), process)
    time.sleep(draw.uniform(0, 0.05))
    slay(kind, process, draw)
    return left_with(process)


def slay(kind: str, process: psutil.Process, draw: random.Random) -> bool:
    """Kill a process of that kind as soon as there is one; False where the run ended before."""
    until = time.monotonic() + PATIENCE
    while process.status() != psutil.STATUS_ZOMBIE:
        fitting = [process] if kind in ("alone", "driver") else begun_by(process, SIGNS[kind])
        if fitting:
            try:
                draw.choice(fitting).kill()
                return True
            except psutil.NoSuchProcess:  # it has just ended by itself
                continue
        assert time.monotonic() < until, f"no {kind} to be killed"
        time.sleep(0.001)
    return False


def begun_by(process: psutil.Process, sign: str) -> list[psutil.Process]:
    """What a process has begun whose command line has the sign."""
    fitting = []
    for child in process.children(recursive=True):
        try:
            words = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if sign in words and "ray::IDLE" not in words:
            fitting.append(child)
    return fitting


def test_a_kill_waits_until_there_is_something_to_kill():
    idle = [sys.executable, "-c", "import time; time.sleep(60)", SIGNS["worker"]]
    process = fork(lambda: time.sleep(0.2) or subprocess.run(idle).returncode == -signal.SIGKILL)
    assert slay("worker", process, random.Random(0)) and left_with(process) == 1
    ended = fork(lambda: 0)
    assert not slay("worker", ended, random.Random(0)) and left_with(ended) == 0


def comes_out_the_same(kind: str, number: int, folder: Path, whole: dict[str, bytes]) -> None:
    code = strike(kind, folder, random.Random(f"{SEED} {kind} {number}"))
    if kind in ("worker", "actor"):
        assert code == 0, "the run goes on without them"
    assert run(Store(folder), worker()).complete
    assert contents(folder) == whole


def test_a_run_killed_at_a_random_moment(tmp_path, whole):
    comes_out_the_same("alone", -1, tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [(k, n) for k in KILLS for n in range(KILLS[k])])
def test_killed_at_a_random_moment(kind, number, tmp_path, whole):
    if kind in ("actor", "raylet"):
        pytest.importorskip("ray", reason="the cluster extra is not installed")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    comes_out_the_same(kind, number, tmp_path / "run", whole)


# the command, as it is stopped and as its disk fails


def command(folder: Path, *more: str) -> Callable[[], None]:
    def call() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["seecause", *COMMAND, str(folder), *more]
        main()

    return call


@pytest.fixture(scope="module")
def commanded(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("commanded")
    assert CliRunner().invoke(app, [*COMMAND, str(folder)]).exit_code == 0
    return contents(folder)


@pytest.mark.parametrize(
    ("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_run_that_is_stopped_goes_on(sign, code, tmp_path, commanded):
    process = fork(command(tmp_path / "run"))
    after(tmp_path / "run", 3, process)
    process.send_signal(sign)
    assert left_with(process) == code
    assert 0 < len(list((tmp_path / "run" / "shards").glob("*.json"))) < 12
    assert CliRunner().invoke(app, [*COMMAND, str(tmp_path / "run")]).exit_code == 0
    assert contents(tmp_path / "run") == commanded


def mounted(place: Path, options: str, flags: int = 0) -> None:
    """A small file system that only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not flags:
        place.mkdir()
        spaces = NEWNS if os.geteuid() == 0 else NEWNS | NEWUSER
        if libc.unshare(spaces) or libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None):
            os._exit(UNABLE)
    if libc.mount(b"none", bytes(place), b"tmpfs", flags, options.encode()):
        os._exit(UNABLE)


def refused_then_done(place: Path, word: str, expected: dict[str, bytes]) -> int:
    """The command is one line while its disk fails, and completes when there is room."""
    refused = CliRunner().invoke(app, [*COMMAND, str(place / "run")])
    assert refused.exit_code == 2 and isinstance(refused.exception, SystemExit), refused.output
    assert refused.stderr.startswith("seecause: ") and word in refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and not list(place.rglob("*.partial"))
    mounted(place, "size=40m", REMOUNT)
    assert CliRunner().invoke(app, [*COMMAND, str(place / "run")]).exit_code == 0
    assert contents(place / "run") == expected
    return 0


def in_child(job: Callable[[], int]) -> None:
    code = left_with(fork(job))
    if code == UNABLE:
        pytest.skip("this system mounts nothing for a process")
    assert code == 0


@pytest.mark.parametrize("kilobytes", [4, 24, 48, 96])
def test_a_full_disk_is_one_line_and_costs_nothing(kilobytes, tmp_path, commanded):
    place = tmp_path / "disk"

    def job() -> int:
        mounted(place, f"size={kilobytes}k")
        return refused_then_done(place, "No space left on device", commanded)

    in_child(job)


def test_a_disk_that_may_only_be_read_is_one_line(tmp_path, commanded):
    place = tmp_path / "disk"

    def job() -> int:
        mounted(place, "size=40m")
        mounted(place, "size=40m", REMOUNT | READ_ONLY)
        return refused_then_done(place, "Read-only file system", commanded)

    in_child(job)


def test_a_folder_deleted_under_the_run_is_told(tmp_path, capfd, commanded):
    folder = tmp_path / "run"
    process = fork(command(folder))
    after(folder, 3, process)
    shutil.rmtree(folder, ignore_errors=True)
    assert left_with(process) in (1, 2)  # what is missing, or what cannot be written
    stderr = capfd.readouterr().err
    assert "Traceback" not in stderr and ("not run" in stderr or "seecause: " in stderr)
    assert CliRunner().invoke(app, [*COMMAND, str(folder)]).exit_code == 0
    assert contents(folder) == commanded


def test_a_clock_set_back_changes_nothing(tmp_path, whole, monkeypatch):
    hours = itertools.count(2_000_000_000, -3600)
    monkeypatch.setattr(time, "time", lambda: float(next(hours)))
    counts = itertools.count(1)
    run(Store(tmp_path), worker(), enough=lambda: "enough" if next(counts) > 4 else "")
    before = Store(tmp_path).ids()
    for number, file in enumerate(path for path in tmp_path.rglob("*") if path.is_file()):
        os.utime(file, (0, number % 2 * 4_000_000_000))
    assert 0 < len(before) < 9 and run(Store(tmp_path), worker()).complete
    assert contents(tmp_path) == whole
    done = [event for event in Store(tmp_path).events() if event["event"] == "done"]
    assert len(done) == 9, "no shard is done twice"


def test_a_picture_that_vanishes_costs_its_shard_and_is_named(tmp_path, caplog):
    for number in range(6):
        photo(tmp_path / "data" / "a" / f"{number}.png", (96, 96), seed=number)
    options = {"data": f"folder:{tmp_path / 'data'}", "methods": {"random": {}}}
    options |= {"metrics": ("ins-del",), "target": "predicted"}
    work = worker(**options)
    (tmp_path / "data" / "a" / "3.png").unlink()
    status = run(Store(tmp_path / "run"), work)
    assert status.done == 2 and "they changed since" in next(iter(status.failed.values()))
    left = run(Store(tmp_path / "run"), worker(**options))
    assert left.complete and len(Store(tmp_path / "run").rows(worker(**options).plan)) == 5
    assert left.gone == ["a/3.png"] and "a/3.png" in caplog.text
    assert list(runner.status(tmp_path / "run").gone) == ["a/3.png"]
    again = run(Store(tmp_path / "run"), worker(**options))
    assert again.gone == ["a/3.png"], "it stays named"
    photo(tmp_path / "data" / "a" / "3.png", (96, 96), seed=3)
    assert not run(Store(tmp_path / "run"), worker(**options)).gone


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, whole):
    assert REQUEST.seed == 0 and run(Store(tmp_path), worker(), workers=3).complete
    assert contents(tmp_path) == whole
