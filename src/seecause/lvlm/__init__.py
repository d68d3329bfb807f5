"""Which heads carry the picture into the words of a vision-language model, from which image tokens
into which words (head attribution)."""

from __future__ import annotations

from seecause.lvlm.activations import HeadActivations, head_words
from seecause.lvlm.analysis import (
    WordingComparison,
    compare_wordings,
    embed,
    group_heads,
    grouping,
    importance_map,
)
from seecause.lvlm.attribute import (
    HeadAttribution,
    TextEffects,
    TokenAttribution,
    attribute_heads,
    attribute_tokens,
    sufficiency,
    text_effects,
    weighted_attention,
)
from seecause.lvlm.bank import MeanBank, bank_of_prompts, calibration_critters, make_bank
from seecause.lvlm.classifier import PromptClassifier, classifier, export
from seecause.lvlm.engine import MaskEngine
from seecause.lvlm.fit import elastic_net
from seecause.lvlm.masks import draw_masks
from seecause.lvlm.model import LVLM, load, verify, wrap
from seecause.lvlm.prompt import (
    Prompt,
    coverage,
    object_share,
    picture_map,
    seen_mask,
    seen_picture,
)
from seecause.lvlm.trace import (
    HeadTrace,
    RankingCurves,
    TokenTrace,
    attention_scores,
    causal_scores,
    essential_heads,
    first_crossing,
    random_orders,
    ratio_study,
    scan,
    threshold_study,
    trace_heads,
    trace_tokens,
)

__all__ = [
    "LVLM",
    "HeadActivations",
    "HeadAttribution",
    "HeadTrace",
    "MaskEngine",
    "MeanBank",
    "Prompt",
    "PromptClassifier",
    "RankingCurves",
    "TextEffects",
    "TokenAttribution",
    "TokenTrace",
    "WordingComparison",
    "attention_scores",
    "attribute_heads",
    "attribute_tokens",
    "bank_of_prompts",
    "calibration_critters",
    "causal_scores",
    "classifier",
    "compare_wordings",
    "coverage",
    "draw_masks",
    "elastic_net",
    "embed",
    "essential_heads",
    "export",
    "first_crossing",
    "group_heads",
    "grouping",
    "head_words",
    "importance_map",
    "load",
    "make_bank",
    "object_share",
    "picture_map",
    "random_orders",
    "ratio_study",
    "scan",
    "seen_mask",
    "seen_picture",
    "sufficiency",
    "text_effects",
    "threshold_study",
    "trace_heads",
    "trace_tokens",
    "verify",
    "weighted_attention",
    "wrap",
]
