from seecause.critters.dataset import samples as samples
from seecause.critters.latents import (
    CLASSES as CLASSES,
    CODEWORDS as CODEWORDS,
    COLOURS as COLOURS,
    PARTS as PARTS,
    VARIANTS as VARIANTS,
    Latents as Latents,
    compatible_classes as compatible_classes,
    concatenate as concatenate,
    drop_parts as drop_parts,
    minimal_sufficient_sets as minimal_sufficient_sets,
    mix_parts as mix_parts,
)
from seecause.critters.picture import (
    BACKGROUNDS as BACKGROUNDS,
    STYLES as STYLES,
    Do as Do,
    Picture as Picture,
    Style as Style,
    intervene as intervene,
    render as render,
)
from seecause.critters.questions import (
    SUBJECTS as SUBJECTS,
    Exam as Exam,
    Question as Question,
    answer_codes as answer_codes,
    answers as answers,
    ask as ask,
    choices as choices,
    draw_exam as draw_exam,
    vocabulary as vocabulary,
    wordings as wordings,
)
from seecause.critters.regimes import (
    REGIMES as REGIMES,
    SPLITS as SPLITS,
    Certificate as Certificate,
    Regime as Regime,
    certificate as certificate,
    draw as draw,
    find_regime as find_regime,
    joint as joint,
    usual_background as usual_background,
)
