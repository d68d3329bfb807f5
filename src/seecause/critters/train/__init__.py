"""How the embedded models are made: a recipe each, the loops that follow them, and what the results
answer from."""
