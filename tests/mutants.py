"""Plants each bug of mutants.toml in a copy of src, one at a time, and runs the tests that should
notice: `make test-mutants`, or `python tests/mutants.py WORD` for those with WORD in their file or
line. As many at once as there are cores. Leaves with 1 where a bug survives, or is no longer to be
found."""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 900  # seconds for the tests of one bug; a hang counts as noticed


def main(word: str = "") -> int:
    mutants = tomllib.loads((ROOT / "tests/mutants.toml").read_text(encoding="utf-8"))["mutant"]
    chosen = [m for m in mutants if word in m["file"] or word in m["old"] or word in m["breaks"]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(planted, chosen))
    catching = sorted({test for test, _ in results if test})
    without = run_tests(catching, ROOT / "src", "--maxfail=1000") if catching else None
    broken = [] if without is None else failures(without)
    missed = 0
    for mutant, (test, how) in zip(chosen, results, strict=True):
        caught = bool(test) and test not in broken
        how = f"{test} fails without the bug, too" if test in broken else how
        missed += not caught
        verdict = "caught" if caught else "SURVIVED"
        sys.stdout.write(f"{verdict:9}{mutant['file']}: {mutant['breaks']}\n         {how}\n")
    sys.stdout.write(f"{len(chosen) - missed} of {len(chosen)} caught\n")
    return int(missed > 0)


def planted(mutant: dict) -> tuple[str, str]:
    """The test that fails with this bug in place, or "", and what was seen."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / "seecause" / mutant["file"]
        text = file.read_text(encoding="utf-8")
        if text.count(mutant["old"]) != 1:
            return "", f"the line stands {text.count(mutant['old'])} times: correct mutants.toml"
        file.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf-8")
        try:
            done = run_tests(list(dict.fromkeys(mutant["tests"])), source, "-x")
        except subprocess.TimeoutExpired:
            return mutant["tests"][0], f"no end after {LIMIT} s"
    failed = failures(done)
    if done.returncode != 1 or not failed:
        return "", (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    return failed[0], f"noticed by {failed[0]}"


def failures(done: subprocess.CompletedProcess[str]) -> list[str]:
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return [line.split(" ", 1)[1].split(" - ")[0] for line in lines]


def run_tests(tests: list[str], source: Path, stop: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", stop, "-q", "-p", "no:cacheprovider", *tests]
    paths = os.pathsep.join([str(source), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
