"""What the metrics of a benchmark measure, in a line each. docs/bench.md and each metric's file say
more."""

from __future__ import annotations

MEANINGS = {
    "insertion": (
        "class score while the patches the map puts first are uncovered in a blurred picture, area"
        " under the curve"
    ),
    "deletion": (
        "class score while the patches the map puts first are covered, area under the curve"
    ),
    "ins-del": "insertion less deletion: one number for faithfulness",
    "aopc-morf": "mean drop of the score while patches are removed, most important first",
    "aopc-lerf": "mean drop of the score while patches are removed, least important first",
    "abpc": "area between the curves of patches removed least and most important first",
    "pixel-flipping": (
        "area under the score's curve while patches are removed, most important first"
    ),
    "comprehensiveness": "drop of the score without the patches the map puts first",
    "sufficiency": "drop of the score with only the patches the map puts first",
    "log-odds": "change of the log probability without the patches the map puts first",
    "mu-fidelity": (
        "rank correlation of the map's sum over random sets of patches with the drop of the score"
        " without them"
    ),
    "sensitivity-n": (
        "plain correlation of the map's sum over sets of patches, of many sizes, with the drop of"
        " the score without them"
    ),
    "faithfulness-estimate": (
        "correlation of the map with the drop of the score without each single patch"
    ),
    "infidelity": (
        "squared error of the map's sums over sets of patches as forecasts of the drop without"
        " them, the map scaled as fits best"
    ),
    "saco": (
        "do groups of patches matter in the order and proportion that the map claims? From -1 to 1"
    ),
    "road-morf": (
        "score after patches are removed, most important first, and filled from what is around them"
    ),
    "road-lerf": (
        "score after patches are removed, least important first, and filled from what is around"
        " them"
    ),
    "road": "half the difference of road-lerf and road-morf",
    "aupr1": (
        "does the map rank the object's pixels first? Average precision; a random map scores the"
        " object's share of the picture"
    ),
    "aupr0": "does it rank the background's pixels last? Average precision",
    "pointing": "share of images whose highest point lies on the object",
    "energy-pointing": "share of the positive values that lies on the object",
    "relevance-mass": "share of all values, by size, that lies on the object",
    "relevance-rank": "share of the object that the highest values cover, as many as it has pixels",
    "top-k": "share of the k highest values that lies on the object",
    "gini": "how few patches hold the map: 0 flat, near 1 a single patch",
    "entropy": "how widely the map is spread, in nats",
    "max-sensitivity": "largest relative change of the map under small noise in the picture",
    "avg-sensitivity": "mean relative change of the map under small noise in the picture",
    "random-logit": (
        "rank correlation with the map of another class: near 1, the map does not depend on the"
        " class"
    ),
    "random-logit-abs": "random-logit of the sizes of the values",
    "mprt": (
        "rank correlation with maps of models whose weights are redrawn: near 1, the map does not"
        " depend on what was learned"
    ),
    "mprt-abs": "mprt of the sizes of the values",
    "part-correctness": "are the creature's parts ranked by what they are worth to the model?",
    "part-contrastivity": "does the map follow the class it is asked about?",
    "background-independence": "is the background, where it does not matter, left out?",
}
