"""Which attention heads answer from the background, and what happens without them (CIGMA)."""
