"""Whether leaks are said, and nothing else is: of generated tables, as `init` and `train` see them.

Half of the tables have one planted leak, of ten kinds in turn (planted.py); `init` guesses what the
columns of a table are, and `train` reads a Parquet file of it by the schema of that guess, with the
leak in.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench import report
from bench.learns import planted
from bench.report import CONSOLE
from embertide.trainer.data import open_events
from embertide.trainer.data.columns import facts
from embertide.trainer.data.guess import Asked, Guess, guess
from embertide.trainer.data.leaks import UNIQUE, ColumnNote
from embertide.trainer.data.leaks_of_table import table_notes
from embertide.trainer.data.watch import WatchedSource

_CLAIM = "H.4"
_SAID, _FALSE = 0.95, 0.01
_WITHOUT = 10_000  # more than any seed of a table with a leak


def guess_of(table: pa.Table, has_clock: bool) -> Guess:
    """Return what `init` takes the columns for, told which are label and time."""
    asked = Asked(label="clicked", time="ts" if has_clock else None, no_time=not has_clock)
    return guess(facts(table, len(table)), asked)


def noted_by_init(table: pa.Table, found: Guess) -> list[ColumnNote]:
    """Return what `init` says of a table."""
    return table_notes(table, found, len(table))


def noted_by_train(table: pa.Table, found: Guess, folder: Path) -> list[ColumnNote]:
    """Return what `train` says of a table that it reads whole."""
    path = folder / "events.parquet"
    pq.write_table(table, path)
    source = WatchedSource(open_events(str(path), schema=found.schema()), lambda note: None)
    for _ in source.batches(batch_size=256):
        pass
    return source.notes


def is_said(notes: list[ColumnNote], leak: str) -> bool:
    """Whether the planted leak is among what was said to tell the label."""
    kinds = ("tells the label", "after the label", "together")
    columns = {name for note in notes if note.kind in kinds for name in note.columns}
    return bool(columns & {*planted.parts_of(leak)})


def false_alarms(table: pa.Table, notes: list[ColumnNote], leak: str = "") -> list[ColumnNote]:
    """Return what was said of columns that are right."""
    right = {*planted.parts_of(leak)} if leak else set()
    return [
        note
        for note in notes
        if not {*note.columns} & right
        and not (note.kind == "nearly unique" and _is_unique(table, note.columns[0]))
    ]


def _is_unique(table: pa.Table, name: str) -> bool:
    present = table.column(name).drop_null()
    return len(present.unique()) >= UNIQUE * len(present)


def run(given: argparse.Namespace) -> Iterator[report.Row]:
    """Yield a row a command and kind: shares of the tables."""
    kinds = list(planted.LEAKS)
    said: dict[str, Counter[str]] = {"init": Counter(), "train": Counter()}
    false, beside = Counter[str](), Counter[str]()
    planted_of = Counter(kinds[seed % len(kinds)] for seed in range(given.tables))
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.tables):
            leak = kinds[seed % len(kinds)]
            for of, seed_of in ((leak, seed), ("", _WITHOUT + seed)):
                table, has_clock = planted.table(seed_of, of)
                found = guess_of(table, has_clock)
                for command, notes in (
                    ("init", noted_by_init(table, found)),
                    ("train", noted_by_train(table, found, Path(folder))),
                ):
                    wrong = false_alarms(table, notes, of)
                    (beside if of else false)[command] += bool(wrong)
                    if wrong:
                        CONSOLE.print(f"{command}, table {seed_of} ({of}): {wrong[0].text}")
                    if of and is_said(notes, of):
                        said[command][of] += 1
                    elif of:
                        CONSOLE.print(f"{command}, table {seed_of} ({of}): nothing is said")
    for command in ("init", "train"):
        for kind in kinds:
            share = said[command][kind] / max(1, planted_of[kind])
            name = (f"{command}: {kind}", "said", "share")
            yield report.measure(name, [share], better="higher", target=0)
        share = said[command].total() / given.tables
        name = (f"{command}: {given.tables} tables with a leak", "said", "share")
        yield report.measure(name, [share], better="higher", target=_SAID, claim=_CLAIM)
        for what, found_in in (("with", beside), ("without", false)):
            name = (f"{command}: {given.tables} tables {what} a leak", "false alarms", "share")
            share = found_in[command] / given.tables
            claim = _CLAIM if what == "without" else ""
            yield report.measure(name, [share], better="lower", target=_FALSE, claim=claim)
