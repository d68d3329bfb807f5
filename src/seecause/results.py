"""The base class of results: numbers, tables, saving and display."""

from __future__ import annotations

import html
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seecause.errors import MissingExtra
from seecause.files import write_json

if TYPE_CHECKING:
    import pandas


class Result:
    """Base class of results. A result implements `numbers`; `rows` if it has one row for each
    image, head or class; `save` and `_repr_html_` if there is more to keep or to see."""

    def numbers(self) -> dict[str, float]:
        """The findings as a flat dictionary of floats."""
        raise NotImplementedError

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `to_pandas`."""
        return [self.numbers()]

    def to_pandas(self) -> pandas.DataFrame:
        """The rows of the result as a data frame.

        Raises:
            MissingExtra: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise MissingExtra("pandas") from None
        return pandas.DataFrame(self.rows())

    def save(self, folder: str | Path) -> Path:
        """Write `numbers.json` into a folder, which is created if needed; returns the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "numbers.json", self.numbers())
        return folder

    def show(self) -> None:
        """Display the result below a notebook's cell, or print it."""
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
            sys.modules["IPython"].display.display(self)
        else:
            print(self)  # noqa: T201

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}: {value:.4g}" for name, value in self.numbers().items())
        return f"{type(self).__name__}({numbers})"

    def _repr_html_(self) -> str:
        """The numbers as a table, for notebooks."""
        cells = (
            f"<tr><th>{html.escape(name)}</th><td>{value:.4g}</td></tr>"
            for name, value in self.numbers().items()
        )
        return f"<table>{''.join(cells)}</table>"
