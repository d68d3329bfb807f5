"""Which heads carry the picture into the words of a vision-language model, from which image tokens
into which words (head attribution)."""

from __future__ import annotations

from seecause.lvlm.analysis import embed, group_heads, grouping, importance_map
from seecause.lvlm.attribute import HeadAttribution, attribute_heads
from seecause.lvlm.bank import MeanBank, bank_of_prompts, make_bank
from seecause.lvlm.baselines import attention_scores, causal_scores, random_orders
from seecause.lvlm.calibration import calibration_critters
from seecause.lvlm.classifier import PromptClassifier, classifier
from seecause.lvlm.engine import MaskEngine
from seecause.lvlm.export import export
from seecause.lvlm.fit import elastic_net
from seecause.lvlm.lens import head_words
from seecause.lvlm.load import load, wrap
from seecause.lvlm.look import Look
from seecause.lvlm.masks import draw_masks
from seecause.lvlm.places import coverage, object_share, picture_map, seen_mask, seen_picture
from seecause.lvlm.prompt import Prompt
from seecause.lvlm.tokens import (
    TextEffects,
    TokenAttribution,
    attribute_tokens,
    sufficiency,
    text_effects,
    weighted_attention,
)
from seecause.lvlm.trace import HeadTrace, TokenTrace, trace_heads, trace_tokens
from seecause.lvlm.validate import (
    Curves,
    essential_heads,
    first_crossing,
    ratio_study,
    scan,
    threshold_study,
)
from seecause.lvlm.verify import verify
from seecause.lvlm.view import LVLM
from seecause.lvlm.wordings import Wordings, compare_wordings

__all__ = [
    "LVLM",
    "Curves",
    "HeadAttribution",
    "HeadTrace",
    "Look",
    "MaskEngine",
    "MeanBank",
    "Prompt",
    "PromptClassifier",
    "TextEffects",
    "TokenAttribution",
    "TokenTrace",
    "Wordings",
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
