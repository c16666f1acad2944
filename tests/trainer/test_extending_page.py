"""docs/extending.md ("extending.md"): the source of its run's file reads as one of ours does."""

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from killing import CACHE

import embertide
from embertide.data import Batch, EventSource, open_events
from embertide.trainer.commands.run_file import RunFile, load

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
EVENTS = 3000


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    """The page's run, and the same events as clicks.csv."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    ts = 1_750_000_000 + np.sort(rng.integers(0, 9000, EVENTS))
    values = (rng.integers(0, most, EVENTS) for most in (50, 9, 2))
    rows = np.column_stack((ts, *values)).tolist()
    with sqlite3.connect("clicks.db") as db:
        db.execute("CREATE TABLE clicks (ts INTEGER, user INTEGER, item INTEGER, clicked INTEGER)")
        db.executemany("INSERT INTO clicks VALUES (?, ?, ?, ?)", rows)
    lines = [",".join(map(str, row)) for row in rows]
    Path("clicks.csv").write_text("ts,user,item,clicked\n" + "\n".join(lines) + "\n")
    (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    Path("run.py").write_text(text)
    return load(Path("run.py"))


def read(source: EventSource, start: int = 0) -> Iterator[Batch]:
    return source.batches(batch_size=64, start=start)


def test_it_reads_what_a_reader_of_ours_reads(given: RunFile) -> None:
    source = given.source
    assert source is not None
    assert source.total_events() == EVENTS
    whole = list(read(source))
    ours = open_events("clicks.csv", schema=source.schema)
    for one, other in zip(whole, read(ours), strict=True):
        assert (one.first, one.next_offset) == (other.first, other.next_offset)
        for name in ("event_B", "ts_ms_B", "keys_BF", "dense_BD", "label_B"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
    for batch in whole[:-1:5]:
        again = next(read(source, batch.next_offset))
        assert again.first == batch.next_offset


def test_a_run_goes_on_from_where_it_stopped(given: RunFile) -> None:
    run, data = given.run, given.source
    for events, learned in ((1000, 1000), (None, EVENTS)):
        done = embertide.train(run, data=data, folder="pub", events=events, program_cache=CACHE)
        assert done.events == learned
