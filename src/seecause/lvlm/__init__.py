"""Which heads carry the picture into the words of a vision-language model, from which image tokens
into which words (head attribution)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seecause.lvlm.activations import HeadActivations, HeadWords, head_words
    from seecause.lvlm.analysis import (
        Grouping,
        HeadGroups,
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
    from seecause.lvlm.prompt_classifier import PromptClassifier, classifier, export
    from seecause.lvlm.trace import (
        AnswerTrace,
        HeadTrace,
        RankingCurves,
        TokenTrace,
        attention_scores,
        causal_scores,
        check_masks_suffice,
        essential_heads,
        first_crossing,
        random_orders,
        ratio_study,
        scan,
        threshold_study,
        trace_answer,
        trace_heads,
        trace_tokens,
    )

_NAMES = {
    "activations": "HeadActivations HeadWords head_words",
    "analysis": (
        "Grouping HeadGroups WordingComparison compare_wordings embed group_heads "
        "grouping importance_map"
    ),
    "attribute": (
        "HeadAttribution TextEffects TokenAttribution attribute_heads attribute_tokens "
        "sufficiency text_effects weighted_attention"
    ),
    "bank": "MeanBank bank_of_prompts calibration_critters make_bank",
    "engine": "MaskEngine",
    "fit": "elastic_net",
    "masks": "draw_masks",
    "model": "LVLM load verify wrap",
    "prompt": "Prompt coverage object_share picture_map seen_mask seen_picture",
    "prompt_classifier": "PromptClassifier classifier export",
    "trace": (
        "AnswerTrace HeadTrace RankingCurves TokenTrace attention_scores causal_scores "
        "check_masks_suffice essential_heads first_crossing random_orders ratio_study "
        "scan threshold_study trace_answer trace_heads trace_tokens"
    ),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "LVLM",
    "AnswerTrace",
    "Grouping",
    "HeadActivations",
    "HeadAttribution",
    "HeadGroups",
    "HeadTrace",
    "HeadWords",
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
    "check_masks_suffice",
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
    "trace_answer",
    "trace_heads",
    "trace_tokens",
    "verify",
    "weighted_attention",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a run loads the modules it needs."""
    if name in _WHERE:
        return getattr(importlib.import_module(f"seecause.lvlm.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'seecause.lvlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
