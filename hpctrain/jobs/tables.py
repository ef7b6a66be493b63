"""Tables that commands print for people, by rich."""

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDTH = 140
"""Of what is not printed on a terminal."""


def table(*columns: str) -> Table:
    """Return an empty table; the columns of numbers are to be given as such by `add_row`."""
    result = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        result.add_column(column, overflow="fold")
    return result


def console() -> Console:
    """Return where tables are printed: as wide as the terminal, if there is one."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)
