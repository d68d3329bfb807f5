from seecause.lvlm._verify import verify as verify
from seecause.lvlm.analysis import (
    Grouping as Grouping,
    HeadActivations as HeadActivations,
    HeadGroups as HeadGroups,
    RankingCurves as RankingCurves,
    attention_scores as attention_scores,
    causal_scores as causal_scores,
    embed as embed,
    essential_heads as essential_heads,
    first_crossing as first_crossing,
    group_heads as group_heads,
    grouping as grouping,
    importance_map as importance_map,
    random_orders as random_orders,
    scan as scan,
    threshold_study as threshold_study,
)
from seecause.lvlm.attribute import (
    HeadAttribution as HeadAttribution,
    TextEffects as TextEffects,
    TokenAttribution as TokenAttribution,
    WordingComparison as WordingComparison,
    attribute_heads as attribute_heads,
    attribute_tokens as attribute_tokens,
    compare_wordings as compare_wordings,
    ratio_study as ratio_study,
    sufficiency as sufficiency,
    text_effects as text_effects,
    text_slopes as text_slopes,
    weighted_attention as weighted_attention,
)
from seecause.lvlm.bank import (
    MeanBank as MeanBank,
    bank_of_prompts as bank_of_prompts,
    make_bank as make_bank,
)
from seecause.lvlm.edit import (
    blind_logits as blind_logits,
    edited_heads as edited_heads,
    speak_blind as speak_blind,
)
from seecause.lvlm.engine import MaskEngine as MaskEngine
from seecause.lvlm.fit import elastic_net as elastic_net
from seecause.lvlm.masks import draw_masks as draw_masks
from seecause.lvlm.model import (
    LVLM as LVLM,
    calibration_critters as calibration_critters,
    load as load,
    wrap as wrap,
)
from seecause.lvlm.prompt import (
    Prompt as Prompt,
    coverage as coverage,
    object_share as object_share,
    picture_map as picture_map,
    seen_mask as seen_mask,
    seen_picture as seen_picture,
)
from seecause.lvlm.prompt_classifier import (
    PromptClassifier as PromptClassifier,
    classifier as classifier,
    export as export,
)
from seecause.lvlm.trace import (
    AnswerTrace as AnswerTrace,
    HeadTrace as HeadTrace,
    HeadWords as HeadWords,
    TokenTrace as TokenTrace,
    check_masks_suffice as check_masks_suffice,
    head_words as head_words,
    trace_answer as trace_answer,
    trace_heads as trace_heads,
    trace_tokens as trace_tokens,
)
from seecause.lvlm.words import (
    AnswerEngine as AnswerEngine,
    AnswerWords as AnswerWords,
    trace_words as trace_words,
)
