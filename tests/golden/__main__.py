"""python -m tests.golden [--write [--missing]] [--only SECTION,FUNCTION] [--fast]"""

import argparse
import sys
import time
import traceback

import torch

from tests.golden.record import compute, differences, entries, read, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("--write", action="store_true", help="store what is computed")
    parser.add_argument("--missing", action="store_true", help="with --write: new keys only")
    parser.add_argument("--only", default="", help="sections or functions, separated by commas")
    parser.add_argument("--fast", action="store_true", help="leave out what the tests call slow")
    asked = parser.parse_args()
    torch.manual_seed(0)
    only = [name for name in asked.only.split(",") if name]
    chosen = [each for each in entries(only) if not (asked.fast and each.slow)]
    stored, computed, failures = read(), {}, 0
    for entry in chosen:
        for dtype in entry.dtypes:
            start = time.process_time()
            prefix = f"{entry.section}/{entry.name}/{dtype}/"
            try:
                new = compute(entry, dtype)
            except Exception:
                traceback.print_exc()
                say(f"{prefix} FAILED")
                failures += 1
                continue
            computed |= new
            old = {key: value for key, value in stored.items() if key.startswith(prefix)}
            lines = [] if asked.write else differences(old, new, dtype)
            failures += bool(lines)
            took = time.process_time() - start
            state = f"{len(lines)} of {len(new)} DIFFER" if lines else f"{len(new)} ok"
            say(f"{prefix:45} {state}, {took:.1f} s CPU")
            for line in lines:
                say(f"    {line}")
    if asked.write:
        kept = stored if only or asked.missing or asked.fast else {}
        write({**computed, **kept} if asked.missing else {**kept, **computed})
    return 1 if failures else 0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
