"""What happens to a run while it goes on: processes killed at any write and at random moments,
signals, a disk that is full or may only be read, a folder that goes. Always the rows of an
undisturbed run, or a clear refusal. `make test-faults` draws more moments."""

import ctypes
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from seecause import files
from seecause.bench.tables import read_results, run
from seecause.cli import main
from seecause.cli.shared import result_folder
from tests.bench.toy import prepared
from tests.cli.calls import invoke

SEED = int(os.environ.get("SEECAUSE_SEED", "0"))
KILLS = {"driver": 4, "worker": 3, "actor": 3}  # moments of `make test-faults`
SIGNS = {"worker": "spawn_main", "actor": "ray::"}  # of command lines
CALLS = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir")
KILLED, UNABLE = 9, 77  # exit codes of a child: killed by itself, may not mount
PATIENCE = 300.0  # seconds, on a busy machine
NEWNS, NEWUSER, REMOUNT, READ_ONLY = 0x20000, 0x10000000, 32, 1  # of mount(2) and unshare(2)
COMMAND = ("bench", "run", "--method", "random,sobel", "--metric", "aupr1", "--limit", "6")
COMMAND += ("--option", "run.cell_size=1", "--device", "cpu", "--quiet", "--out")

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def outcome(folder: Path) -> object:
    """The rows of a run, and the names of all its files."""
    results = read_results(folder)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    rows = {method: table.drop_columns("seconds") for method, table in results.rows.items()}
    return names, {method: table.to_pydict() for method, table in rows.items()}


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
    """How a child ended; its own processes end with it."""
    begun = process.children(recursive=True)
    code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    _, alive = psutil.wait_procs(begun, timeout=PATIENCE if code >= 0 else 20)
    for orphan in alive:  # of Ray, whose own processes outlive a driver that was killed
        assert "spawn_main" not in " ".join(orphan.cmdline()), "a worker outlived its parent"
        orphan.kill()
    return code


def after(folder: Path, cells: int, process: psutil.Process) -> None:
    """Wait until so many cells are finished."""
    until = time.monotonic() + PATIENCE
    while len(list(folder.glob("cells/*.parquet"))) < cells:
        assert time.monotonic() < until
        assert process.status() != psutil.STATUS_ZOMBIE
        time.sleep(0.001)


def begun_by(process: psutil.Process, sign: str) -> list[psutil.Process]:
    """Descendants of a process whose command line has the sign."""
    fitting = []
    for child in process.children(recursive=True):
        try:
            words = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if sign in words and "ray::IDLE" not in words:
            fitting.append(child)
    return fitting


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> object:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder, prepared()).complete
    return outcome(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [(k, n) for k in KILLS for n in range(KILLS[k])])
def test_killed_at_a_random_moment(kind, number, tmp_path, whole):
    folder, draw = tmp_path / "run", random.Random(f"{SEED} {kind} {number}")
    if kind == "actor":
        pytest.importorskip("ray", reason="the cluster extra is not installed")
    where = {"ray": "local"} if kind == "actor" else {}
    process = fork(lambda: not run(folder, prepared(), workers=2, **where).complete)
    after(folder, draw.randint(1, 6), process)
    time.sleep(draw.uniform(0, 0.05))
    fitting = [process] if kind == "driver" else begun_by(process, SIGNS[kind])
    if fitting:
        draw.choice(fitting).kill()
    code = left_with(process)
    assert kind == "driver" or code == 0, "the run goes on without them"
    assert run(folder, prepared()).complete and outcome(folder) == whole


def test_a_run_killed_in_the_middle_goes_on(tmp_path, whole):
    process = fork(lambda: not run(tmp_path / "run", prepared()).complete)
    after(tmp_path / "run", 3, process)
    process.kill()
    assert left_with(process) == -signal.SIGKILL
    assert run(tmp_path / "run", prepared()).complete and outcome(tmp_path / "run") == whole


# killed at every write, rename or removal: a fork leaves by `os._exit` at its n-th such call


def killed(job: Callable[[], object], at: int) -> bool:
    """Run a job in a child that dies at its `at`-th call; whether it came so far. A file that was
    not synced yet is torn."""

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

    def armed() -> None:
        for name in CALLS:
            setattr(os, name, counted(name))
        job()

    count = 0
    return left_with(fork(armed)) == KILLED


def every_kill(tmp_path: Path, before: Callable, job: Callable, seen: Callable) -> int:
    """Kill the job at each of its calls, each in a folder of its own, then do it again."""
    place = tmp_path / "0"
    before(place)
    job(place)
    expected = seen(place)
    for at in range(1, 10_000):
        place = tmp_path / str(at)
        before(place)
        if not killed(lambda place=place: job(place), at):
            return at - 1
        job(place)
        assert seen(place) == expected, f"after a kill at call {at}"
    raise AssertionError("unreachable")


@pytest.mark.slow
def test_a_run_killed_at_any_write_comes_out_the_same(tmp_path):
    work = prepared(methods={"center": {}}, metrics=("aupr1",), measures={}, limit=2, cell_size=1)
    assert every_kill(tmp_path, Path.mkdir, lambda place: run(place, work), outcome) > 6


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below, hidden ones too."""
    here = str(folder).encode()
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes().replace(here, b"") for p in found}


def write_result(place: Path, name: str = "later") -> None:
    with result_folder(place / "out", {"command": name}, overwrite=True) as folder:
        files.write_atomic(folder / "page.html", name)
        (folder / "maps").mkdir()
        (folder / "maps" / "a.txt").write_text(name)


def beside_other_things(place: Path) -> None:
    (place / "out").mkdir(parents=True)
    (place / "out" / "thesis.txt").write_text("mine")


def replaced(place: Path) -> None:
    place.mkdir()
    write_result(place, "earlier")


@pytest.mark.parametrize("before", [Path.mkdir, replaced, beside_other_things])
def test_a_result_folder_killed_at_any_write_comes_out_the_same(tmp_path, before):
    assert every_kill(tmp_path, before, write_result, contents) > 3


# the command, as it is stopped and as its disk fails


def command(folder: Path) -> Callable[[], None]:
    def call() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["seecause", *COMMAND, str(folder)]
        main()

    return call


def completes(folder: Path) -> object:
    """The same command again."""
    assert invoke(*COMMAND, str(folder)).exit_code == 0
    return outcome(folder)


@pytest.fixture(scope="module")
def commanded(tmp_path_factory) -> object:
    return completes(tmp_path_factory.mktemp("commanded"))


@pytest.mark.parametrize(
    ("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_run_that_is_stopped_goes_on(sign, code, tmp_path, commanded):
    process = fork(command(tmp_path / "run"))
    after(tmp_path / "run", 3, process)
    process.send_signal(sign)
    assert left_with(process) == code
    assert 0 < len(list((tmp_path / "run" / "cells").glob("*.parquet"))) < 12
    assert completes(tmp_path / "run") == commanded


def mount(place: Path, options: str, flags: int = 0) -> None:
    """A small file system that only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not flags:
        place.mkdir()
        spaces = NEWNS if os.geteuid() == 0 else NEWNS | NEWUSER
        if libc.unshare(spaces) or libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None):
            os._exit(UNABLE)
    if libc.mount(b"none", bytes(place), b"tmpfs", flags, options.encode()):
        os._exit(UNABLE)


@pytest.mark.parametrize("disk", ["size=4k", "size=48k", "read-only"])
def test_a_disk_that_is_full_or_read_only_is_one_line_and_costs_nothing(disk, tmp_path, commanded):
    place = tmp_path / "disk"

    def job() -> None:
        mount(place, "size=40m" if disk == "read-only" else disk)
        if disk == "read-only":
            mount(place, "size=40m", REMOUNT | READ_ONLY)
        refused = invoke(*COMMAND, str(place / "run"))
        assert refused.exit_code == 2, refused.output
        word = "Read-only file system" if disk == "read-only" else "No space left on device"
        assert refused.stderr.startswith("seecause: ") and word in refused.stderr
        assert len(refused.stderr.splitlines()) == 1 and not list(place.rglob("*.partial"))
        mount(place, "size=40m", REMOUNT)
        assert completes(place / "run") == commanded

    code = left_with(fork(job))
    if code == UNABLE:
        pytest.skip("this system mounts nothing for a process")
    assert code == 0


def test_a_folder_deleted_under_the_run_is_told(tmp_path, capfd, commanded):
    folder = tmp_path / "run"
    process = fork(command(folder))
    after(folder, 3, process)
    shutil.rmtree(folder, ignore_errors=True)
    assert left_with(process) in (1, 2)  # what is missing, or what cannot be written
    assert "Traceback" not in capfd.readouterr().err
    assert completes(folder) == commanded
