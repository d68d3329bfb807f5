"""`papers.md`: the command, data, models and differences of each table and figure of the papers.

python docs/papers.py writes it from what `seecause reproduce` reads; a test fails while it is old.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seecause.data.dataset import datasets
from seecause.experiments.base import MODELS, PAPERS, PRINTED, experiments
from seecause.files import write_atomic

PAGE = Path(__file__).parent / "papers.md"
INTRO = """# Every table and figure of the papers

<!-- made by: python docs/papers.py -->

    seecause reproduce --list                                                   # all of them: data, models, GPU hours
    seecause reproduce caap/table-1 --quick                                     # does the command work? An embedded model, no download
    seecause reproduce caap/table-1 --data imagenet-s=PATH --models vit-l,deit3-l --limit 500 --out OUT

For readers with a paper in hand. The third command runs two of the table's models, joins them in one table and prints the published number, with its error, beside ours. The same command continues where it stopped; `--workers 4` or `--ray auto` spreads it; experiments with the same `--out` share their finished cells, so that table 2 costs nothing after table 1. `OUT/caap/table-1/` gets table.csv, table.md, table.tex, rows.csv (each image), figure-N.svg, index.html and experiment.json (the protocol).

`--as-printed` takes the paper's settings at once where our defaults differ; `--option KEY=VALUE` sets one. `--models NAME=timm:MODEL --weights NAME=FILE` runs any other model. `--option target=predicted` explains predictions where the data has other classes than the model.
"""
MODELS_INTRO = """## Models

Names that `--models` takes, and what they load. DINOv2 comes with its official linear head on class token and mean of patches. CLIP is a zero-shot classifier with the names and the 80 prompts that it was published with (`--classes imagenet` in the other commands; needs `seecause[clip]`).
"""
DATA_INTRO = """## Data

`--data NAME=PATH`; layouts of the folders are in [data](data.md).
"""


def page() -> str:
    """The whole page."""
    parts = [INTRO, *(_paper(paper) for paper in PAPERS), MODELS_INTRO]
    lines = ["| name | loads |", "|---|---|"]
    lines += [f"| {name} | `{known['spec']}` |" for name, known in MODELS.items()]
    forms = {form.partition(":")[0]: form for form in datasets()}
    used = sorted({n for entry in experiments().values() for n in entry.data if n in forms})
    data = ["| name | layout |", "|---|---|", *(f"| {n} | `{forms[n]}` |" for n in used)]
    return "\n".join([*parts, *lines, "", DATA_INTRO, *data, ""])


def _paper(paper: str) -> str:
    """One line for each table and figure, and notes on what differs below them."""
    known, notes = experiments(), dict[str, int]()
    head = ("", "shows", "command", "models", "printed for the method", "--as-printed", "differs")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, about in PRINTED.items():
        if not name.startswith(f"{paper}/"):
            continue
        entry, label = known.get(name), name.partition("/")[2].replace("-", " ")
        command, models, printed, note = about.get("command", "not built yet"), "", "", ""
        command = command if "seecause" not in command else f"`{command}`"
        if entry is not None:
            data = "".join(f" --data {word}=PATH" for word in entry.data if ":" not in word)
            command, models = f"`seecause reproduce {name}{data}`", ", ".join(entry.models)
            printed = ", ".join(f"{key}={value}" for key, value in entry.printed.items())
            note = f"({notes.setdefault(entry.differs, len(notes) + 1)})" if entry.differs else ""
        values = _printed_row(about)
        cells = (label, about["title"], command, models, values, printed, note)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"({number}) {text}\n" for text, number in notes.items())]
    return "\n".join([f"## {PAPERS[paper]['title']}", "", *lines])


def _printed_row(about: dict[str, Any]) -> str:
    """The values that a paper printed for its own method: of each column, one after the other."""
    row, count = (
        about.get("rows", {}).get(about.get("against", ""), []),
        len(about.get("values", ())),
    )
    means = [f"{mean:.2f}" for mean, _ in row]
    groups = [" / ".join(means[i : i + count]) for i in range(0, len(means), count or 1)]
    return "; ".join(groups)


if __name__ == "__main__":
    write_atomic(PAGE, page())
