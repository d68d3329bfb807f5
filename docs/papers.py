"""`papers.md`: the command, data, models and differences of each table and figure of the papers.

python docs/papers.py writes it from what `seecause reproduce` reads; a test fails while it is old.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from seecause.data.dataset import datasets
from seecause.experiments.base import MODELS, PAPERS, PRINTED, experiments
from seecause.files import write_atomic

PAGE = Path(__file__).parent / "papers.md"
ALL = 1_000_000  # images: as many as there are
MOST = 12  # groups of printed values in a cell
INTRO = """# Every table and figure of the papers

<!-- made by: python docs/papers.py -->

    seecause reproduce --list                                                   # all of them: data, models, GPU hours
    seecause reproduce caap/table-1 --quick                                     # does the command work? An embedded model, no download
    seecause reproduce caap/table-1 --data imagenet-s=PATH --models vit-l,deit3-l --as-printed --out OUT

For readers with a paper in hand. The third command runs two of the table's models with the paper's settings, joins them in one table and prints the published number, with its error, beside ours. A run that is stopped writes the table of what is finished, and the same command continues; `--workers 4` or `--ray auto` spreads it; experiments with the same `--out` share their finished cells, so that table 2 costs nothing after table 1. `OUT/caap/table-1/` gets table.csv, table.md, table.tex, rows.csv (each image), figure-N.svg, index.html and experiment.json (the protocol).

All 66 experiments with `--quick`, one after the other: 288 s of one core (`python benchmarks/experiments.py quick - OUT`).

The tables below have the values that a paper printed for its own method, models (or data) one after the other with `;` between them, GPU hours (rough guesses) and images (`--limit` changes them). `--as-printed` sets what its column lists, where our defaults differ from the paper; `--option KEY=VALUE` sets one. `--models NAME=timm:MODEL --weights NAME=FILE` runs any other model. `--option target=predicted` explains predictions where the data has other classes than the model.
"""
MODELS_INTRO = """## Models

Names that `--models` takes, and what they load. DINOv2 comes with its official linear head on class token and mean of patches. CLIP is a zero-shot classifier with the names and the 80 prompts that it was published with (`--classes imagenet` in the other commands; needs `seecause[clip]`). Of InternVL2.5, 2B and 8B (MPO) are published in transformers' layout; 1B and 4B have to be converted: `--models internvl2.5-1b=hf:FOLDER`.
"""
DEFAULTS = """## Defaults that differ from the papers

Of the library and all commands; in the tables above `--as-printed` or the option named there restores the paper's.

| paper | option | default | the paper | why, and how to get the paper's |
|---|---|---|---|---|
| CAAP | `tail` | source; patched where no class token is read | patched (Algorithm 1) | half the cost, maps nearly the same: `tail=patched` |
| CAAP | `layers` | from the embedding; to the end, with other tails to two thirds of the depth | from block 1 to two thirds | better on shallow models: `layers=(1, None)`, in experiments `first_layer=1` |
| CAAP | `approx` | none; e-caap as we read it | e-caap-printed | the printed formula does not give f(blank) for an empty set: `approx=e-caap-printed` |
| CAAP | errors | standard deviation with n - 1 | n | the paper's are smaller by 0.1 % for 500 images |
| HeAr | `how`, `masks` | derivative, 64 | elastic net, 10,000 | seconds instead of an hour, correlation 0.99: `how=fit` |
| HeAr | `floor` | 1 logit | none | shares of a small effect are noise: `floor=0` |
| HeAr | masks | each head is ablated with probability 0.75 | not said | exactly three quarters would shift all coefficients by a constant |
| HeAr | explained image | left out of the average image | not said | an image would be ablated by a part of itself |
| HeAr | image tokens of several shapes | an average for each shape | not said | token by token averages need one shape |
| HeAr | rows of text that are kept | for each image | A.4: for each image; figure 15: for each model | |
| HeAr | t-SNE | perplexity 30, begun by PCA, seed 0 | not said | |
"""
DATA_INTRO = """## Data

`--data NAME=PATH`; layouts of the folders are in [data](data.md).
"""
LISTS = {  # of a file in experiments/published
    "differing": "Defaults that differ from the paper, here and in the other commands:",
    "not_built": "Compared in the paper and not built here:",
}


def page() -> str:
    """The whole page."""
    parts = [INTRO, *(_paper(paper) for paper in PAPERS), DEFAULTS, MODELS_INTRO]
    lines = ["| name | loads |", "|---|---|"]
    lines += [f"| {name} | `{known['spec']}` |" for name, known in MODELS.items()]
    forms = {form.partition(":")[0]: form for form in datasets()}
    used = sorted({n for entry in experiments().values() for n in entry.data if n in forms})
    data = ["| name | layout |", "|---|---|", *(f"| {n} | `{forms[n]}` |" for n in used)]
    return "\n".join([*parts, *lines, "", DATA_INTRO, *data, ""])


def _paper(paper: str) -> str:
    """One line for each table and figure, and below them what differs, each sentence once."""
    known, notes = experiments(), dict[str, int]()
    head = ("", "shows", "command", "models", "printed for the method")
    head += ("GPU hours", "images", "--as-printed", "differs")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, about in PRINTED.items():
        if not name.startswith(f"{paper}/"):
            continue
        entry, label = known.get(name), name.partition("/")[2].replace("-", " ")
        command, models, printed = about.get("command", "not built yet"), "", ""
        hours, images = "", ""
        command = command if "seecause" not in command else f"`{command}`"
        if entry is not None:
            data = "".join(f" --data {word}=PATH" for word in entry.data if ":" not in word)
            command, models = f"`seecause reproduce {name}{data}`", ", ".join(entry.models)
            printed = ", ".join(f"{key}={value}" for key, value in entry.printed.items())
            hours = f"{entry.hours:g}" if entry.hours else ""
            images = "all" if (entry.limit or ALL) >= ALL else str(entry.limit)
        sentences = re.split(r"(?<=\.) (?=[A-Z`])", about.get("differs", ""))
        numbers = (notes.setdefault(text, len(notes) + 1) for text in sentences if text)
        note = ", ".join(f"({number})" for number in sorted(numbers))
        values = _printed_row(about, paper)
        cells = (label, about["title"], command, models, values, hours, images, printed, note)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"({number}) {text}\\" for text, number in notes.items()), ""]
    for key, heading in LISTS.items():
        listed = PAPERS[paper].get(key, ())
        lines += [heading, "", *(f"- {text}" for text in listed), ""] if listed else []
    return "\n".join([f"## {PAPERS[paper]['title']}", "", *lines])


def _printed_row(about: dict[str, Any], method: str) -> str:
    """The values that a paper printed for its own method: of each column, one after the other."""
    rows, count = about.get("rows", {}), len(about.get("values", ()))
    every = [pair for row in rows.values() for pair in row]
    row = rows.get(method, rows.get(about.get("against", ""), every))
    means = ["-" if not v else f"{v[0]:.2f}" if v[1:] else f"{v[0]:g}" for v in row]
    groups = [" / ".join(means[i : i + count]) for i in range(0, len(means), count or 1)]
    if not groups or len(groups) > MOST:
        return "in table.md" if groups else ""
    return f"{' / '.join(about['values'])}: {'; '.join(groups)}"


if __name__ == "__main__":
    write_atomic(PAGE, page())
