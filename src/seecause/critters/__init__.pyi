from .rendering import Do as Do, render as render, samples as samples
from .world import CLASSES as CLASSES, certificate as certificate, draw as draw
