"""Tables whose texts are never cut: one that is too long for the terminal goes on below itself."""

from collections.abc import Collection

import rich.box
from rich.table import Table


def folding(*titles: str, names: Collection[str]) -> Table:
    """Return a table of these columns.

    Args:
        titles: Of the columns.
        names: Columns of names, of any length, which fold. Others keep their width, so they should
            be few and short: a terminal may have 80 columns.
    """
    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for title in titles:
        if title in names:
            table.add_column(title, overflow="fold")
        else:
            table.add_column(title, no_wrap=True)
    return table
