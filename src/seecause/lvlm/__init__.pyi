from seecause.lvlm.attribute import (
    AnswerTrace as AnswerTrace,
    HeadAttribution as HeadAttribution,
    attribute_heads as attribute_heads,
    attribute_tokens as attribute_tokens,
    trace_answer as trace_answer,
)
from seecause.lvlm.bank import MeanBank as MeanBank, make_bank as make_bank
from seecause.lvlm.edit import edited_heads as edited_heads
from seecause.lvlm.engine import MaskEngine as MaskEngine
from seecause.lvlm.model import (
    LVLM as LVLM,
    calibration_critters as calibration_critters,
    load as load,
    wrap as wrap,
)
from seecause.lvlm.prompt import image_map as image_map, seen_image as seen_image
from seecause.lvlm.prompt_classifier import (
    PromptClassifier as PromptClassifier,
    classifier as classifier,
)
from seecause.lvlm.words import (
    AnswerEngine as AnswerEngine,
    AnswerWords as AnswerWords,
    trace_words as trace_words,
)
