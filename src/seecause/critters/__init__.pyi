from .latents import CLASSES as CLASSES
from .regimes import (
    certificate as certificate,
    draw as draw,
    samples as samples,
)
from .rendering import Do as Do, render as render
