"""Several files as one input, in order of time."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embertide.trainer.data import open_events
from embertide.trainer.data.base import Batch, DeadLetters, EventSchema, FeatureColumn
from embertide.trainer.data.files import matching_files
from embertide.trainer.errors import DataError

SCHEMA = EventSchema(
    features=(FeatureColumn(name="item", column="item"), FeatureColumn(name="word", column="word")),
    label="y",
    ts="ts",
)
ARRAYS = ("event_B", "ts_ms_B", "keys_BF", "dense_BD", "label_B")
# Names out of order of time; the group of ts 20 lies in two files.
CUTS = {"c": (0, 70), "a": (70, 71), "b": (71, 200)}


def columns() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    ts = np.sort(rng.integers(40, size=200))
    ts[68:74] = ts[68]
    words = [str(i) if i % 3 else f"w{i}" for i in rng.integers(30, size=200)]
    label = rng.integers(3, size=200)  # a third of it is bad
    return {"ts": np.sort(ts), "item": rng.integers(99, size=200), "word": words, "y": label}


def write(path: Path, begin: int, end: int) -> str:
    part = {name: values[begin:end] for name, values in columns().items()}
    if path.suffix == ".parquet":
        pq.write_table(pa.table(part), path, row_group_size=16)
    else:
        rows = zip(*part.values(), strict=True)
        lines = [",".join(part), *(",".join(map(str, row)) for row in rows)]
        lines[len(lines) // 2 : 0] = ["1,2"] if path.stem != "a" else []
        path.write_text("\n".join(lines) + "\n")
    return str(path)


def same(ours: Batch, theirs: Batch) -> bool:
    bounds = (ours.first, ours.next_offset) == (theirs.first, theirs.next_offset)
    return bounds and all(np.array_equal(getattr(ours, n), getattr(theirs, n)) for n in ARRAYS)


@pytest.fixture(params=["parquet", "csv"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for name, cut in CUTS.items():
        write(tmp_path / f"{name}.{request.param}", *cut)
    return tmp_path / f"*.{request.param}"


def test_parquet_files_in_time_order_give_the_batches_of_one_file(tmp_path: Path) -> None:
    whole = open_events(write(tmp_path / "whole.parquet", 0, 200), schema=SCHEMA)
    parts = [write(tmp_path / f"{name}.parquet", *cut) for name, cut in CUTS.items()]
    several = open_events(parts, schema=SCHEMA)
    assert several.total_events() == 200
    ours, theirs = (list(each.batches(batch_size=16)) for each in (whole, several))
    assert len(ours) == len(theirs)
    assert all(map(same, ours, theirs))
    assert whole.dead_letters.by_reason == several.dead_letters.by_reason
    assert whole.dead_letters.count > 0


@pytest.mark.parametrize("batch_size", [1, 16, 300])
def test_resuming_in_any_file_equals_reading_on(folder: Path, batch_size: int) -> None:
    def opened() -> Any:
        return open_events(str(folder), schema=SCHEMA)

    whole = list(opened().batches(batch_size=batch_size))
    assert all(a.watermark_ms < b.ts_ms_B[0] for a, b in itertools.pairwise(whole))
    for i in range(0, len(whole), max(1, len(whole) // 12)):
        resumed = list(opened().batches(batch_size=batch_size, start=whole[i].next_offset))
        assert len(resumed) == len(whole) - i - 1
        assert all(map(same, resumed, whole[i + 1 :]))
    end = whole[-1].next_offset
    with pytest.raises(DataError, match=f"start {end + 1} lies beyond its {end} events"):
        list(opened().batches(batch_size=batch_size, start=end + 1))


def test_dead_letters_have_the_index_among_all_files(tmp_path: Path) -> None:
    for name, cut in CUTS.items():
        write(tmp_path / f"{name}.csv", *cut)
    dead = DeadLetters(path=tmp_path / "dead.jsonl")
    source = open_events(str(tmp_path / "*.csv"), schema=SCHEMA, dead_letters=dead)
    batches = list(source.batches(batch_size=50))
    events = np.concatenate([batch.event_B for batch in batches])
    lines = (tmp_path / "dead.jsonl").read_text().splitlines()
    rejected = [int(line.split(":")[1].split(",")[0]) for line in lines]
    assert dead.by_reason["malformed line"] == 2
    assert sorted([*events.tolist(), *rejected]) == list(range(202))


def test_a_key_column_is_read_alike_in_all_files(tmp_path: Path) -> None:
    for name, words in (("a", "x,x,1"), ("b", "1,2,3")):
        rows = [f"{'ab'.index(name)},1,{word},0" for word in words.split(",")]
        (tmp_path / f"{name}.csv").write_text("\n".join(["ts,item,word,y", *rows]))
    source = open_events(str(tmp_path / "*.csv"), schema=SCHEMA)
    (batch,) = source.batches(batch_size=100)
    assert batch.keys_BF[2, 1] == batch.keys_BF[3, 1]


def test_files_that_overlap_in_time_are_an_error_that_names_both_times(tmp_path: Path) -> None:
    for name, begin, end in (("a", 0, 100), ("b", 60, 160)):
        write(tmp_path / f"{name}.parquet", begin, end)
    source = open_events(str(tmp_path / "*.parquet"), schema=SCHEMA)
    with pytest.raises(DataError, match=r"b.parquet: begins at ts \d+ ms, but .* goes on to \d+"):
        list(source.batches(batch_size=10))


def test_what_names_no_file_or_several_formats_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file matches"):
        open_events(str(tmp_path / "*.parquet"), schema=SCHEMA)
    with pytest.raises(ValueError, match="name at least one"):
        open_events([], schema=SCHEMA)
    paths = [write(tmp_path / "a.parquet", 0, 9), write(tmp_path / "b.csv", 9, 20)]
    with pytest.raises(ValueError, match="another format or schema"):
        open_events(paths, schema=SCHEMA)


def test_globs_work_through_fsspec_and_names_with_brackets_are_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet", 0, 9)
    found = matching_files(f"file://{tmp_path}/*.parquet")
    assert found == [f"file://{tmp_path}/{name}.parquet" for name in ("a", "b")]
    odd = write(tmp_path / "day[1].parquet", 0, 9)
    assert matching_files(odd) == [odd]
