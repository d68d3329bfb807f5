"""What the short names on pages about heads mean."""

from __future__ import annotations

from collections.abc import Iterable

LOOKS_NOTE = (
    "Object or background are taken away, and the answer is compared. Several ways of doing so"
    " stand side by side, because each alone can be fooled; the shaded one is believed."
)
GAINS = {
    "FIG": (
        "foreground information gain: how far the answer moves when the object goes (Jensen-Shannon"
        " divergence in nats: 0 not at all, 0.69 at most)"
    ),
    "BIG": "background information gain: how far the answer moves when the background goes",
    "BIR": (
        "background's share, BIG / (FIG + BIG): 0 answers from the object, 1 from the background."
        " Averaged by picture (mean of ratios), or of the averages"
    ),
}
LOOKS = {  # each by what its name has in it
    "discovered masks": (
        "found by search: the part of the picture that the model keeps its answer with, which need"
        " not be the object"
    ),
    "true masks": "come with the data and are the object",
    "mean": "the gap is filled with the picture's own mean colour",
    "grey": "the gap is filled with the mean colour of the training set",
    "blur": "the gap is filled with the picture, blurred",
    "noise": "the gap is filled with noise",
    "exact swap": (
        "the same picture drawn again with another background, or with another object: nothing is"
        " cut out"
    ),
}
AUDITED = {
    "degenerate": "pictures that lose nothing either way; their BIR counts as one half",
    "noise floor": "what rounding alone does; smaller effects mean nothing",
}
OUTCOMES = {  # names of numbers before and after: in words, and whether higher or lower is better
    "accuracy": ("accuracy", "↑"),
    "worst group": ("accuracy in the worst group", "↑"),
    "worst of groups (0, 1) and (1, 0)": ("accuracy in the worst of groups (0, 1) and (1, 0)", "↑"),
    "mean of groups": ("accuracy, mean of groups", "↑"),
    "groups weighted as in training": ("accuracy, groups weighted as in training", "↑"),
    "NLL": ("NLL", "↓"),
    "ECE": ("ECE", "↓"),
    "flips": ("flips", "↓"),
    "FIG": ("FIG", ""),
    "BIG": ("BIG", "↓"),
    "BIR": ("BIR", "↓"),
    "BG-gap": ("BG-gap", "↓"),
}
MEASURED = {
    "NLL": "negative log-likelihood, the surprise at the true class in nats",
    "ECE": "expected calibration error, how far confidence is from accuracy",
    "flips": "share of answers that change when the same object is drawn with another background",
    "BG-gap": "accuracy lost when the background is one of another class",
}


def looks_terms(names: Iterable[str]) -> dict[str, str]:
    """What the ways to take a background away are, of those that occur in `names`."""
    there = " ".join(names)
    return {word: meaning for word, meaning in LOOKS.items() if word in there}


def outcome_terms(names: Iterable[str]) -> dict[str, str]:
    """What the numbers of an outcome mean, of those that occur in `names`, and what they were
    measured with."""
    kinds, how = zip(*(name.partition(", ")[::2] for name in names), strict=True)
    return {
        term: meaning for term, meaning in (MEASURED | GAINS).items() if term in kinds
    } | looks_terms(how)


def spelled(name: str) -> str:
    """A number in words, with an arrow to where it is better; what it was measured with stands
    behind a comma."""
    kind, comma, how = (name, "", "") if name in OUTCOMES else name.partition(", ")
    words, better = OUTCOMES.get(kind, (kind, ""))
    return f"{words}{comma}{how} {better}".strip()
