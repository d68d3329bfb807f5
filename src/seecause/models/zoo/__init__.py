"""Embedded models: their weights, cards and logs, and the recipes that make them."""
