from .attribute import (
    AnswerTrace as AnswerTrace,
    HeadAttribution as HeadAttribution,
    attribute_heads as attribute_heads,
    attribute_tokens as attribute_tokens,
    trace_answer as trace_answer,
)
from .bank import MeanBank as MeanBank, make_bank as make_bank
from .edit import edited_heads as edited_heads
from .engine import MaskEngine as MaskEngine
from .model import (
    LVLM as LVLM,
    calibration_critters as calibration_critters,
    load as load,
    wrap as wrap,
)
from .prompt import image_map as image_map, seen_image as seen_image
from .prompt_classifier import (
    PromptClassifier as PromptClassifier,
    classifier as classifier,
)
from .words import (
    AnswerEngine as AnswerEngine,
    AnswerWords as AnswerWords,
    trace_words as trace_words,
)
