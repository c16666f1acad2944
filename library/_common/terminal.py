"""Output of commands: the one place that writes to a terminal.

Names and values in it are data (quoting.py): nothing is obeyed as markup or as an escape sequence.
On a terminal no word is cut: messages go on below, indented, and a table that does not fit is
listed row by row. In a file or a pipe a message is one line. For the calling thread.
"""

import datetime
import json
import logging
import math
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

import rich.box
import rich.console
import rich.progress
import rich.table
import rich.text
import typer
from rich.cells import cell_len

from embertide._common.quoting import terminal_text, without_secrets

_MIN_COLUMNS = 20
_MIN_NAME = 12  # what a column of names keeps of a terminal


def wrapped(text: str, columns: int = 80) -> list[str]:
    """Return a text as the lines of a terminal; a word alone may be longer than one.

    A line feed begins a line, all else that is invisible is shown.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        shown = terminal_text(line)
        indent = " " * (len(shown) - len(shown.lstrip(" ")))
        lines += textwrap.wrap(
            shown,
            max(columns, _MIN_COLUMNS),
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return lines


def say(text: str = "", *, err: bool = False) -> None:
    """Print a message to stdout, or with `err` to stderr; secrets of URLs are not shown."""
    text = without_secrets(text)
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        lines = wrapped(text, shutil.get_terminal_size().columns)
    else:
        lines = [terminal_text(line) for line in text.split("\n")]
    typer.echo("\n".join(lines), err=err)


def time_text(at_ms: int) -> str:
    """Return a wall clock's time in ms since the Unix epoch as people read it, with its zone."""
    when = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def age_text(age_ms: float) -> str:
    """Return how long something takes or is ago: 0.4 s, 34 s, 12 min, 5 h, 3 days."""
    seconds = max(0.0, age_ms / 1000)
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, length, until in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < until * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def print_text(text: str) -> None:
    """Print a text of ours as it is, a file's for example: it is not wrapped and not escaped."""
    typer.echo(text.removesuffix("\n"))


def _json(value: Any) -> Any:
    """Return a value as it is printed: NaN and the infinities are null, URLs have no secrets."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json(each) for each in value]
    return value


def print_json(value: Mapping[str, Any], *, line: bool = False) -> None:
    """Print one JSON object to stdout; `line`: as one line, at once, as commands that go on do."""
    typer.echo(json.dumps(_json(value), indent=None if line else 1, allow_nan=False))
    if line:
        sys.stdout.flush()


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return time_text(round(record.created * 1000))


def log_to_stderr(*, times: bool = False) -> None:
    """Write what is logged, from INFO on, to stderr, without the secrets of URLs.

    With `times` each line begins with its time, for what runs for long by itself.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(f"{'%(asctime)s ' * times}%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def console(*, err: bool = False) -> rich.console.Console:
    """Return a console that takes texts as they are."""
    return rich.console.Console(stderr=err, markup=False, emoji=False, highlight=False)


def text(value: str, style: str = "") -> rich.text.Text:
    """Return a cell of a table, in a style of rich's."""
    return rich.text.Text(terminal_text(without_secrets(value)), style=style)


def _cell(value: Any) -> Any:
    return text(value) if isinstance(value, str) else value


def _lines(value: str) -> rich.text.Text:
    """Return a title of ours, whose line feeds begin lines."""
    return rich.text.Text("\n".join(map(terminal_text, value.split("\n"))))


class Table(rich.table.Table):
    """A table of rich's whose titles and cells are data. Print it with `show_table`.

    Args:
        titles: Column titles; none: `add_column` adds them.
        names: Columns of names of any length, whose words may be cut where the others need the
            room.
        title: The text above the table.
        header: Whether the titles are shown.
    """

    def __init__(
        self,
        *titles: str,
        names: Collection[str] = (),
        title: str | None = None,
        header: bool = True,
        **settings: Any,
    ) -> None:
        """Make a table without rows; `settings` are rich's."""
        plain: dict[str, Any] = {
            "box": rich.box.SIMPLE_HEAD,
            "padding": (0, 1, 0, 0),
            "pad_edge": False,
            "show_edge": False,
        }
        super().__init__(
            title=None if title is None else _lines(title),
            title_justify="left",
            show_header=header,
            **(plain | settings),
        )
        self._names = set(names)
        for each in titles:
            self.add_column(each)

    def add_column(self, header: Any = "", footer: Any = "", **settings: Any) -> None:
        """Add a column; its title is data, too."""
        super().add_column(_lines(str(header)), footer, **({"overflow": "fold"} | settings))

    def add_row(self, *cells: Any, **settings: Any) -> None:
        """Add a row; a cell is data, or what `text` made."""
        super().add_row(*map(_cell, cells), **settings)

    def fit(self, room: int) -> bool:
        """Give each column its width, so that no word is cut; return whether that fits."""
        least, widths = [], []
        for column in self.columns:
            cells = [str(each) for each in (column.header, *column.cells)]
            words = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
            lines = max((cell_len(line) for cell in cells for line in cell.split("\n")), default=0)
            least.append(min(words, _MIN_NAME) if self._is_of_names(column) else words)
            widths.append(lines)
        excess = sum(widths) + self._beside() - room
        # Names give way first, then what has the most room to give.
        for at in sorted(
            range(len(widths)),
            key=lambda at: (not self._is_of_names(self.columns[at]), least[at] - widths[at]),
        ):
            given = min(max(excess, 0), widths[at] - least[at])
            widths[at] -= given
            excess -= given
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        return excess <= 0

    def _is_of_names(self, column: rich.table.Column) -> bool:
        return str(column.header) in self._names

    def _beside(self) -> int:
        """Return the columns of a terminal that a row takes beside its cells."""
        _, right, _, left = self.padding
        between = left + right + (1 if self.box is not None else 0)
        edges = 2 * (self.show_edge and self.box is not None) + self.pad_edge * (left + right)
        return between * max(0, len(self.columns) - 1) + edges


def show_table(table: Table, *, width: int | None = None) -> None:
    """Print a table, no word of it cut; one that does not fit is listed row by row."""
    out = console()
    out.width = min(out.width, width or out.width)
    if table.fit(out.width):
        out.print(table)
        return
    if table.title is not None:
        say(str(table.title))
    titles = [str(column.header) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for at, (title, cell) in enumerate(zip(titles, row, strict=True)):
            named = f"{title}: {cell}" if title else str(cell)
            say(named if at == 0 else f"  {named}")


class ProgressText(rich.progress.ProgressColumn):
    """A text of a progress bar, as "{task.description}", whose values are data."""

    def __init__(self, form: str) -> None:
        """Take the text, with values of `task` in braces."""
        super().__init__()
        self._form = form

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        """Return it for a task."""
        return text(self._form.format(task=task))


def progress_bar(
    *columns: rich.progress.ProgressColumn, shown: bool = True
) -> rich.progress.Progress:
    """Return a bar on stderr, for people alone, and if it is to be `shown`."""
    return rich.progress.Progress(
        *columns, console=console(err=True), disable=not (shown and sys.stderr.isatty())
    )
