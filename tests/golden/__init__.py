"""Golden outputs: numbers of the main flows, kept in `golden.json`, that a refactoring must not
change.

    python -m tests.golden                     compare (`--only lvlm,faithful`: these sections)
    python -m tests.golden --write             store what is computed

A section is a file of this package with functions marked `@golden(...)`; each yields named tensors
or numbers. Where an API changes, the function is adapted; the stored numbers stay. A tensor is
stored as four projections (`project`). Sections named real-* need SEECAUSE_REAL, a folder with the
files that its functions name.
"""
