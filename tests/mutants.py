"""Plants each bug of mutants.toml in a copy of src, one at a time, and runs the tests that should
notice: `make test-mutants`, or `python tests/mutants.py WORD` for those with WORD in their file or
line. As many at once as there are cores. Leaves with 1 where a bug survives, or is no longer to be
found."""

from __future__ import annotations

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
    missed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, (caught, how) in zip(chosen, pool.map(planted, chosen), strict=True):
            missed += not caught
            verdict = "caught" if caught else "SURVIVED"
            sys.stdout.write(f"{verdict:9}{mutant['file']}: {mutant['breaks']}\n         {how}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - missed} of {len(chosen)} caught\n")
    return int(missed > 0)


def planted(mutant: dict) -> tuple[bool, str]:
    """Whether a test fails with this bug in place, and passes without it."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / "seecause" / mutant["file"]
        text = file.read_text(encoding="utf-8")
        if text.count(mutant["old"]) != 1:
            return False, f"the line stands {text.count(mutant['old'])} times: mend mutants.toml"
        file.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf-8")
        try:
            done = run_tests(list(dict.fromkeys(mutant["tests"])), source)
        except subprocess.TimeoutExpired:
            return True, f"no end after {LIMIT} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != 1 or not failed:
        return False, (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    test = failed[0].split(" ", 1)[1].split(" - ")[0]
    if run_tests([test], ROOT / "src").returncode:
        return False, f"{test} fails without the bug, too"
    return True, failed[0]


def run_tests(tests: list[str], source: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    paths = os.pathsep.join([str(source), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
