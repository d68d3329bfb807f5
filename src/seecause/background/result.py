"""What a repair gives: the mended model, numbers before and after, and a folder to ship."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seecause.background.audit import BackgroundAudit
from seecause.background.prune import export as export_model
from seecause.data.dataset import Hole
from seecause.files import write_atomic, write_json
from seecause.models.view import VisionModel

CARD = "README.md"
NOT_TESTED = (
    "Shortcuts other than the background, or than what the pairs differ in.",
    "Pictures unlike those of the data named here: other cameras, places and times.",
    "Calibration: probabilities may mean something else than before.",
)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A remedy that was tried, or why it was not."""

    name: str
    done: str
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    choose: dict[str, float] = field(default_factory=dict)
    report: dict[str, float] = field(default_factory=dict)
    failed: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Repair:
    """`model` is the mended one, or `original` where nothing was done."""

    model: VisionModel
    original: VisionModel
    remedy: str
    verdict: str  # of the audit that decided whether to repair
    before: BackgroundAudit
    after: BackgroundAudit
    candidates: Mapping[str, Candidate]
    chosen_by: str
    record: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[Hole, ...] = ()  # pictures that could not be read

    def __repr__(self) -> str:
        return f"Repair({self.sentence})"

    @property
    def sentence(self) -> str:
        """What happened, in one."""
        first, second = self.before.judged.numbers(), self.after.judged.numbers()
        name = self.original.name
        if self.remedy == "nothing":
            return f"{name}: {_NOTHING.get(self.verdict, _NO_GAIN)}"
        return (
            f"{name}, mended by {self.remedy}: on other backgrounds"
            f" {first['transplants']:.0%} -> {second['transplants']:.0%} right, answers that flip"
            f" {first['flips']:.0%} -> {second['flips']:.0%}; on plain pictures"
            f" {first['accuracy']:.0%} -> {second['accuracy']:.0%} right."
        )

    def export(self, folder: str | Path) -> Path:
        """Write the checkpoint (plain timm, transformers, torchvision or open_clip load it), a page
        with pictures before and after, and a card."""
        from seecause.report.background import repair_sections
        from seecause.report.pages import write_page

        folder = export_model(self.model, [], folder)
        usage = (folder / CARD).read_text(encoding="utf-8")
        write_atomic(folder / CARD, model_card(self, usage))
        write_json(folder / "repair.json", self.facts())
        title = f"{self.original.name}: before and after"
        write_page(folder / "index.html", title, repair_sections(self), lead=self.sentence)
        return folder

    def facts(self) -> dict[str, Any]:
        """For programs."""
        return {
            "remedy": self.remedy,
            "verdict": self.verdict,
            "chosen by": self.chosen_by,
            "sentence": self.sentence,
            "before": self.before.numbers(),
            "after": self.after.numbers(),
            "candidates": [_plain(vars(candidate)) for candidate in self.candidates.values()],
            "run": self.record,
            "left out": [asdict(hole) for hole in self.skipped],
        }


_NO_GAIN = "no remedy answers held-out versions better by more than chance; nothing was changed."
_NOTHING = {
    "no": "nothing to repair: its answers hardly follow the background.",
    "too few": (
        "too few right answers to tell whether there is something to repair, and no remedy answers"
        " held-out versions better by more than chance; nothing was changed."
    ),
}


def model_card(result: Repair, usage: str) -> str:
    """Markdown: what was done, on which data, what it cost, what was not tested. `usage` is the
    card of the exported checkpoint, from which the way to load it is taken."""
    record, chosen = result.record, result.candidates[result.remedy]
    first, second = result.before.numbers(), result.after.numbers()
    rows = [
        f"| {name} | {value:.3f} | {second[name]:.3f} |"
        for name, value in first.items()
        if name in second and name != "right answers"
    ]
    tried = [
        f"| {c.name} | {c.failed or c.done} | {c.choose.get(result.chosen_by, float('nan')):.3f} |"
        f" {c.seconds:.1f} |"
        for c in result.candidates.values()
    ]
    iou = record.get("mask IoU")
    eye = f"Objects were found by: {record['masks']}"
    eye += "." if iou is None else f" (IoU with known masks {iou:.2f})."
    lost = first["accuracy"] - second["accuracy"]
    return "\n\n".join(
        [
            f"# {record['model']}, repaired",
            result.sentence,
            f"## What was done\n\n{chosen.done} {eye}",
            *record["notes"],
            f"## On which data\n\n{record['data']}: {record['learn']} pictures to learn from,"
            f" {record['choose']} to choose by; reported on {record['report']} of"
            f" {record['report data']}. Seed {record['seed']}, seecause {record['seecause']}.",
            f"## What it cost\n\n{100 * lost:.1f} points of accuracy on plain pictures, and"
            f" {chosen.seconds:.0f} s.",
            "| on held-out pictures | before | after |\n|---|---|---|\n" + "\n".join(rows),
            f"## What was tried\n\n| remedy | what | {result.chosen_by} (choosing) | s |\n"
            "|---|---|---|---|\n" + "\n".join(tried),
            "## What was not tested\n\n" + "\n".join(f"- {line}" for line in NOT_TESTED),
            usage[usage.index("## Load it") :] if "## Load it" in usage else usage,
        ]
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold: no NaN."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if v == v}
        plain[name] = value
    return plain
