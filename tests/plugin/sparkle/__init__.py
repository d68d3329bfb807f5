"""A package that is installed beside seecause and adds to it."""
