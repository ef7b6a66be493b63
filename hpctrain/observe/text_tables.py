"""Tables that commands print for people, by rich."""

import sys
from collections.abc import Collection

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDTH = 140
"""Of what is not printed on a terminal."""


def table(*columns: str, numbers: Collection[str] = ()) -> Table:
    """Return an empty table; columns of `numbers` are set right."""
    result = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        result.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    return result


def console() -> Console:
    """Return where tables are printed: as wide as the terminal, if there is one."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)


def text_of(table: Table) -> str:
    """Return a table as text, without blanks at the ends of its lines."""
    out = console()
    with out.capture() as captured:
        out.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))
