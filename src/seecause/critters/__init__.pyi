from seecause.critters.rendering import (
    Do as Do,
    render as render,
    samples as samples,
)
from seecause.critters.world import (
    CLASSES as CLASSES,
    certificate as certificate,
    draw as draw,
)
