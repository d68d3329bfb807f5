"""What one picture costs before and beside its explanation: processor seconds of whole commands.

    python benchmarks/startup.py [--runs 5]

Each command runs in a process of its own; user and system time are the operating system's figures
for that process, and the least of some runs is printed: whatever else the machine does can only add
to it. `import timm` is the floor for any model of timm: its layers/_fx.py loads torchvision.models,
and that ops/roi_align.py, which loads torch._dynamo.utils, the compiler of torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SAMPLE = "critters:clean:test#3"


def commands(folder: Path) -> dict[str, list[str]]:
    """What is measured, by its name in the table."""
    own = [sys.executable, "-m", "seecause"]
    return {
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
        "python -c 'import seecause'": [sys.executable, "-c", "import seecause"],
        "python -c 'import torch, torch._dynamo.utils'": [
            *(sys.executable, "-c", "import torch, torch._dynamo.utils"),
        ],
        "python -c 'import timm'": [sys.executable, "-c", "import timm"],
        "seecause --help": [*own, "--help"],
        "seecause explain missing.jpg": [*own, "explain", str(folder / "missing.jpg")],
        f"seecause explain {SAMPLE}": [*own, "explain", SAMPLE, "--out", str(folder / "explained")],
    }


def processor_seconds(command: list[str]) -> float:
    """User and system time of one process and what it started."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)
    _, _, usage = os.wait4(process.pid, 0)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print("| command | CPU seconds |\n|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, command in commands(Path(folder)).items():
            least = min(processor_seconds(command) for _ in range(runs))
            print(f"| `{name}` | {least:.1f} |", flush=True)


if __name__ == "__main__":
    main()
