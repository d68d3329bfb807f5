"""Train an embedded Critters model from its recipe: minutes on a GPU, hours on a CPU.

python -m tools.critters critters-vit --out weights
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.critters import TEST_SAMPLES, find_recipe, recipes, train


def main(arguments: list[str] | None = None) -> str:
    """Train as the arguments say; returns the line that is printed at the end."""
    parser = argparse.ArgumentParser(prog="python -m tools.critters", description=__doc__)
    parser.add_argument("name", help=f"one of {', '.join(recipes())}")
    parser.add_argument("--out", type=Path, default=Path("weights"), help="folder for the results")
    parser.add_argument("--samples", type=int, help="training images")
    parser.add_argument("--batch", type=int, help="images in a step")
    parser.add_argument("--test-samples", type=int, default=TEST_SAMPLES)
    parser.add_argument("--start", type=Path, help="folder to go on from (critters-llava)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, help="seeds other than 0 are part of the name")
    parser.add_argument("--background-reliability", type=float, help="r_s; part of the name")
    asked = vars(parser.parse_args(arguments))
    name, out, start, device, tested = (
        asked.pop(key) for key in ("name", "out", "start", "device", "test_samples")
    )
    recipe = find_recipe(name, **asked)
    measured = train(recipe, out=out, start=start, device=device, test_samples=tested)
    regime = measured.get("regime", recipe.regime)
    return (
        f"{out / recipe.stem}: accuracy {measured['accuracy']:.3f} on {measured['samples']} test"
        f" images of {regime}"
    )


if __name__ == "__main__":
    import sys

    sys.stdout.write(main() + "\n")
