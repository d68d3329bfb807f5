"""What `make release-check` asks of an installed wheel: modules import without extras, and what
needs one says which."""

import contextlib
import importlib
import importlib.util
import io
import pkgutil
import sys

import seecause
from seecause.cli import run
from seecause.errors import MissingExtra

EXTRAS = ("captum", "quantus", "ray", "open_clip", "pydicom", "tensorboard", "torchmetrics")
EXTRAS += ("fastapi", "mlflow", "wandb", "fiftyone", "pytorch_grad_cam")


def main() -> int:
    """How many modules were imported."""
    there = [name for name in EXTRAS if importlib.util.find_spec(name)]
    if there:
        sys.exit(f"these are extras, and installed: {', '.join(there)}")
    found = pkgutil.walk_packages(seecause.__path__, "seecause.", onerror=lambda name: None)
    names = [module.name for module in found]
    imported = 0
    for name in names:
        if name.endswith(("kernel_triton", "__main__")):
            continue
        try:
            importlib.import_module(name)
            imported += 1
        except MissingExtra:
            if name != "seecause.attribution.captum" and not name.startswith("seecause.app"):
                raise
        except ModuleNotFoundError as missing:
            if not name.startswith("seecause.app.") or missing.name not in ("fastapi", "starlette"):
                raise
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = run(["serve"])
    if code != 2 or "seecause[app]" not in said.getvalue():
        sys.exit(f"`seecause serve` does not ask for its extra: {said.getvalue()}")
    return imported


if __name__ == "__main__":
    sys.stdout.write(f"{main()} modules import without extras\n")
