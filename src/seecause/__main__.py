"""`python -m seecause`."""

from seecause.cli import main

main()
