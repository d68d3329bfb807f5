from seecause.critters.latents import CLASSES as CLASSES
from seecause.critters.regimes import (
    certificate as certificate,
    draw as draw,
    samples as samples,
)
from seecause.critters.rendering import Do as Do, render as render
