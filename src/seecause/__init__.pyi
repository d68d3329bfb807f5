from seecause.attribution.attribute import attribute as attribute, explain as explain
from seecause.attribution.evidence import evidence as evidence, interactions as interactions
from seecause.background.audit import audit as audit
from seecause.background.discover import discover as discover
from seecause.background.repair import repair as repair
from seecause.engine.patching import Site as Site, patch as patch, run as run
from seecause.errors import SeecauseError as SeecauseError
from seecause.loading import load as load, wrap as wrap
from seecause.target import Box as Box, Region as Region

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
