"""Slow, obvious twins of the fast paths. They import torch and the native libraries only."""
