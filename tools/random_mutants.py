"""Random one-line bugs, drawn by mutmut, against the tests that run the line.

    python tools/random_mutants.py map                  # which test runs which line: out/lines
    python tools/random_mutants.py draw 100 --seed 1    # draw, run, and list the survivors

`map` runs the tests once, with coverage. `draw` takes mutations of the four folders that compute,
evenly over all that mutmut makes, without texts: a message in other letters is no bug that a test
should freeze. A mutant is caught if a test that runs its line fails. Survivors are printed as
diffs: whether one is equivalent is for a person to say. Needs `pip install mutmut pytest-cov`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = ROOT / "out/lines"
FOLDERS = ("engine", "attribution", "background", "lvlm")
ON_GPU = ("graphs.py", "kernel.py", "kernel_triton.py")  # need a GPU, as their tests do
AT_ONCE, LIMIT = 40, 600  # tests of one call; its seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["map", "draw"])
    parser.add_argument("count", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    if asked.what == "map":
        return map_lines(asked.jobs)
    drawn = draw(asked.count, asked.seed)
    tests, caught = lines_to_tests(), 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for place, how in zip(drawn, pool.map(lambda m: verdict(*m, tests), drawn), strict=True):
            caught += how != "SURVIVED"
            sys.stdout.write(f"{place[0]}:{place[1]} {how}\n")
            sys.stdout.write("" if how != "SURVIVED" else f"{diff(place[0], place[2])}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{caught} of {len(drawn)} caught\n")
    return None


def map_lines(jobs: int) -> None:
    shutil.rmtree(LINES, ignore_errors=True)
    LINES.mkdir(parents=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "worksteal"]
    command += [
        "--cov=src/seecause",
        "--cov-context=test",
        "--cov-report=",
        "--durations=0",
        "tests",
    ]
    command += [f"--ignore=tests/{name}" for name in ("app", "browser", "critters", "memory")]
    environment = {**os.environ, "COVERAGE_FILE": str(LINES / "data"), "OMP_NUM_THREADS": "1"}
    with (LINES / "durations.txt").open("w") as file:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=file, check=False)


def draw(count: int, seed: int) -> list[tuple[str, int, str]]:
    """(file, line, mutated text of the file), `count` of all mutations that are not of texts."""
    import libcst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.file_mutation import create_mutations

    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / "src/seecause" / folder).glob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.rpartition("/")[2] in ON_GPU:
                continue
            module, made, _, _ = create_mutations(name, path.read_text(encoding="utf-8"))
            kept = [m for m in made if not isinstance(m.original_node, libcst.BaseString)]
            found += [(name, module, mutation) for mutation in kept]
    drawn = []
    for name, module, mutation in random.Random(seed).sample(found, count):
        positions = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
        line = positions[mutation.original_node].start.line
        replaced = module.deep_replace(mutation.original_node, mutation.mutated_node)
        drawn.append((name, line, replaced.code))
    return drawn


def lines_to_tests() -> dict[tuple[str, int], list[str]]:
    """The tests that run a line, quickest first."""
    from coverage import CoverageData

    seconds = {}
    for row in (LINES / "durations.txt").read_text(encoding="utf-8").splitlines():
        words = row.split(maxsplit=2)
        if len(words) == 3 and words[1] == "call":
            seconds[words[2]] = float(words[0].removesuffix("s"))
    data = CoverageData(str(LINES / "data"))
    data.read()
    tests = {}
    for file in data.measured_files():
        name = Path(file).relative_to(ROOT).as_posix()
        for line, contexts in data.contexts_by_lineno(file).items():
            names = {context.partition("|")[0] for context in contexts if context}
            tests[name, line] = sorted(names, key=lambda test: seconds.get(test, 0.0))
    return tests


def verdict(name: str, line: int, text: str, tests: dict[tuple[str, int], list[str]]) -> str:
    chosen = next((tests[name, at] for at in range(line, 0, -1) if tests.get((name, at))), [])
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        (source.parent / name).write_text(text, encoding="utf-8")
        for start in range(0, len(chosen), AT_ONCE):
            batch = chosen[start : start + AT_ONCE]
            try:
                done = run(batch, source)
            except subprocess.TimeoutExpired:
                return "caught: no end"
            failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
            if done.returncode not in (0, 5):
                return f"caught: {failed[0][:90] if failed else 'no collection'}"
    return "SURVIVED"


def run(tests: list[str], source: Path) -> subprocess.CompletedProcess[str]:
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "slow or not slow"]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    kept = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(command, timeout=LIMIT, **kept)


def diff(name: str, text: str) -> str:
    old = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return "\n".join(difflib.unified_diff(old, text.splitlines(), lineterm="", n=1))


if __name__ == "__main__":
    main()
