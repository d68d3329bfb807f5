"""Damaged and crafted files of every kind that is read: each is taken, or refused in our words, in
bounded time and memory.

    python tests/fuzz.py --cases 10000                    # all kinds: `make test-fuzz`
    python tests/fuzz.py --kinds toml,csv --cases 500 --seed 3

A child reads them; one that crashes, hangs or takes too much memory is a finding like an exception
that is not ours, and the next child goes on behind it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 10.0  # of a processor, for one case
PATIENCE = 300.0  # seconds on the clock: for a reader that waits
MEMORY = 2 << 30  # bytes more than before
Mutation = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True, eq=False)
class Victim:
    """An intact file, who reads it, and the ways to damage it, which take turns. `put` writes the
    damaged content, where more than the file must change."""

    file: Path
    read: Callable[[], object]
    mutations: Sequence[Mutation]
    put: Callable[[bytes], object] | None = None


@dataclass
class Outcome:
    """Of one kind of files."""

    cases: int = 0
    refused: int = 0
    slowest: float = 0.0  # seconds of a processor
    grown: int = 0  # bytes of the largest child, beyond what it began with
    findings: list[str] = field(default_factory=list)


def fuzz(victims: Sequence[Victim], cases: int, seed: int = 0) -> Outcome:
    """Read so many damaged files, each case from a seed of its own."""
    intact = [victim.file.read_bytes() for victim in victims]
    for victim in victims:
        victim.read()  # what is intact is taken
    outcome = Outcome()
    while outcome.cases < cases:
        first = outcome.cases
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            _in_child(victims, intact, range(first, cases), seed, write)
        os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                _note(outcome, json.loads(line))
        status = os.waitpid(child, 0)[1]
        if os.waitstatus_to_exitcode(status) != 0:
            name = victims[outcome.cases % len(victims)].file.name
            reason = f"the process ended with {os.waitstatus_to_exitcode(status)}"
            outcome.findings.append(f"case {outcome.cases}, {name}: {reason}")
            outcome.cases += 1
    for victim, content in zip(victims, intact, strict=True):
        victim.file.write_bytes(content)
    return outcome


def _note(outcome: Outcome, line: dict) -> None:
    outcome.cases += 1
    outcome.refused += line["refused"]
    outcome.slowest = max(outcome.slowest, line["seconds"])
    outcome.grown = max(outcome.grown, line["grown"])
    if line["finding"]:
        outcome.findings.append(line["finding"])


def _in_child(
    victims: Sequence[Victim], intact: Sequence[bytes], cases: range, seed: int, write: int
) -> None:
    """Every case is one line to the parent, written when it ended."""
    status = 1
    try:
        _limit()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for case in cases:
            place = case % len(victims)
            line = _one(victims[place], intact[place], case, random.Random(f"{seed} {case}"))
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            os.write(write, (json.dumps({**line, "grown": grown << 10}) + "\n").encode())
        status = 0
    except Exception:
        traceback.print_exc(file=sys.stdout)  # of this file, not of what is tested
    finally:
        sys.stdout.flush()
        os._exit(status)


def _limit() -> None:
    """Time by alarms that no library can swallow, memory by the system."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, resource.RLIM_INFINITY))
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # progress bars, and what libraries in C complain about
    gc.freeze()


def _one(victim: Victim, intact: bytes, case: int, draw: random.Random) -> dict:
    from seecause.errors import SeecauseError

    mutate = draw.choice(victim.mutations)
    damaged = mutate(intact, draw)
    (victim.put or victim.file.write_bytes)(damaged)
    refused, finding, began = False, "", time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        victim.read()
    except SeecauseError as error:
        refused = True
        str(error).encode("utf-8", "backslashreplace")
    except BaseException as foreign:  # what is looked for
        place = traceback.extract_tb(foreign.__traceback__)
        ours = [frame for frame in place if "seecause" in frame.filename] or place
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        finding = f"case {case}, {victim.file.name}: {type(foreign).__name__} at {where}:"
        finding = ascii(f"{finding} {str(foreign)[:120]}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        victim.file.write_bytes(intact)
    return {"refused": refused, "finding": finding, "seconds": time.process_time() - began}


def main() -> int:
    from tests.fuzz_kinds import KINDS

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help=", ".join(KINDS))
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    count = 0
    for kind in chosen.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            began, outcome = (
                time.monotonic(),
                fuzz(KINDS[kind](Path(folder)), chosen.cases, chosen.seed),
            )
        count += len(outcome.findings)
        say(
            f"{kind}: {outcome.cases} cases, {outcome.refused} refused, {len(outcome.findings)}"
            f" findings, slowest {outcome.slowest:.2f} s, {outcome.grown >> 20} MiB more,"
            f" {time.monotonic() - began:.0f} s in all"
        )
        for finding in outcome.findings[:40]:
            say(f"    {finding}")
    return int(count > 0)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
