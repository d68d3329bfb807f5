"""One page from the run folders of `seecause bench ablate`: which of CAAP's settings decide?

for x in blank select layers tail score; do seecause bench ablate $x --limit 64 --device cpu --out
runs/$x; done python scripts/ablations_page.py runs/blank runs/select runs/layers runs/tail
runs/score
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.tables import differences
from seecause.bench.ablate import STUDIES, agreement, read_depth
from seecause.bench.plan import Plan, Store
from seecause.bench.tables import make_table, to_markdown
from seecause.errors import BadOption
from seecause.metrics import Summary, summarise


def main(
    runs: list[Path],
    out: Annotated[Path, typer.Option(help="The page.")] = Path(
        "docs/results/ablations-critters.md"
    ),
) -> None:
    heads = {head(Store(folder).plan()) for folder in runs}
    if len(heads) != 1:
        raise BadOption(
            "runs",
            [str(folder) for folder in runs],
            "folders of the same model, pictures and metrics",
        )
    out.write_text(
        "\n".join([*heads, *(study(Store(folder)) for folder in runs)]), encoding="utf-8"
    )


def head(plan: Plan) -> str:
    asked, curves = plan.request, plan.request.measures["insertion-deletion"]
    return f"""# Which of CAAP's settings decide?

Written by `python scripts/ablations_page.py` (seecause {plan.versions["seecause"]}, torch {plan.versions["torch"]}, {asked.device}, {asked.dtype}).
{len(plan.samples)} pictures of `{plan.data["name"]}` on `{asked.model}`; target = {asked.target}.
Insertion and deletion in {curves["order"]} order, steps: {curves["steps"]}.
Mean ± standard error; the best mean in bold. The first setting is the default: differences from it are image by image, and in brackets how many
standard errors they are. Rank correlation is Spearman's, between the maps under two settings.
"""


def study(store: Store) -> str:
    """Scores, differences from the default, how alike the maps are, and where the class token looks
    if the run says so."""
    plan, depth = store.plan(), read_depth(store)
    table, alike, asked = make_table(store.rows(plan), plan), agreement(store, plan), plan.request
    command = (
        f"seecause bench ablate {asked.study} --model {asked.model} --data {asked.data} --limit"
        f" {asked.limit} --device {asked.device}"
    )
    pairs = [
        [Summary(float(m), float(e), alike.images).text(2) for m, e in zip(*both, strict=True)]
        for both in zip(alike.mean, alike.error, strict=True)
    ]
    below = [[other, *pairs[i][:i]] for i, other in enumerate(alike.names) if i]
    texts = [f"## {STUDIES[asked.study]}\n", f"    {command}\n", to_markdown(table)]
    texts += [
        f"Less `{table.reference}`:\n",
        differences(table),
        "Rank correlation:\n",
        grid(["", *alike.names[:-1]], below),
    ]
    if depth is not None:
        seen = [
            [summarise(values).text(4) for values in pair]
            for pair in zip(depth.on_object.T, depth.on_background.T, strict=True)
        ]
        texts += [
            f"Attention of the class token to one patch; {depth.uniform:.4f} if it looked"
            " everywhere alike:\n"
        ]
        texts += [
            grid(
                ["block", "of the object", "of the background"],
                [[str(block), *pair] for block, pair in enumerate(seen, start=1)],
            )
        ]
    return "\n".join(texts)


def grid(names: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; short rows are filled up."""
    lines = [
        names,
        ["---"] * len(names),
        *([*row, *[""] * (len(names) - len(row))] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
