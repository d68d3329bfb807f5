"""Type-check this package and the README's Python: `python tests/readme_types.py`."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        for number, block in enumerate(blocks):
            (Path(folder) / f"readme_{number}.py").write_text(block)
        checker = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
        return subprocess.run([*checker, "src", folder], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
