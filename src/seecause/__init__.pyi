from . import (
    background as background,
    bench as bench,
    data as data,
    experiments as experiments,
    faithful as faithful,
    lvlm as lvlm,
    metrics as metrics,
)
from ._doctor import doctor as doctor
from .attribution.attribute import attribute as attribute, explain as explain
from .attribution.evidence import evidence as evidence, interactions as interactions
from .background.audit import audit as audit
from .background.discover import discover as discover
from .background.repair import repair as repair
from .engine.patching import Site as Site, patch as patch, run as run
from .errors import SeecauseError as SeecauseError
from .loading import load as load, wrap as wrap
from .target import Box as Box, Region as Region

__version__: str
