from seecause.attribution.attribute import attribute as attribute
from seecause.attribution.evidence import Evidence as Evidence, evidence as evidence
from seecause.attribution.explain import explain as explain
from seecause.attribution.interactions import (
    Interactions as Interactions,
    interactions as interactions,
)
from seecause.attribution.registry import methods as methods
from seecause.attribution.result import (
    Attribution as Attribution,
    Attributions as Attributions,
)
from seecause.background.audit import audit as audit
from seecause.background.discover import discover as discover
from seecause.background.objects import object_masks as object_masks
from seecause.background.repair import repair as repair
from seecause.background.transplant import transplant as transplant
from seecause.engine.chunks import budget as budget
from seecause.engine.patching import Site as Site, patch as patch, run as run
from seecause.errors import SeecauseError as SeecauseError
from seecause.loading import load as load, wrap as wrap
from seecause.models.heads import CosineHead as CosineHead, Similarity as Similarity
from seecause.models.rows import Box as Box, Region as Region

from . import (
    background as background,
    bench as bench,
    data as data,
    experiments as experiments,
    faithful as faithful,
    lvlm as lvlm,
    metrics as metrics,
)

__version__: str
