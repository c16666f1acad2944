"""Criteo's ads, whose columns are those of the benchmark: as published, as Parquet, by a run."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from bench import criteo
from bench.servers import BenchError
from bench.train.criteo import ads_of
from bench.train.runs import Stream
from embertide.trainer.commands.inputs import open_run
from embertide.trainer.data.base import DeadLetters


def test_a_file_as_published_is_read_whatever_its_categories_look_like(tmp_path: Path) -> None:
    line = "\t".join(["1", "3", "", "-2", *["7"] * 10, "68051304", "", *['"5db9164'] * 24])
    (tmp_path / "day_0.tsv").write_text(f"{line}\n1\t2\n{line}\n")
    dead = DeadLetters()
    source = criteo.published(str(tmp_path / "day_0.tsv"), dead_letters=dead)
    (batch,) = source.batches(batch_size=10)
    assert batch.event_B.tolist() == [0, 2]
    assert dead.by_reason == {"malformed line": 1}
    np.testing.assert_array_equal(batch.dense_BD[0, :4], np.array([3, np.nan, -2, 7], np.float32))
    expected = [xxhash.xxh3_64_intdigest(word) for word in (b"68051304", b"", b'"5db9164')]
    assert batch.keys_BF[0, :3].view(np.uint64).tolist() == expected


def test_the_module_is_a_run_over_a_file_of_ads(tmp_path: Path) -> None:
    path = tmp_path / "ads.parquet"
    names = ("label", *criteo.COUNTS, *criteo.CATEGORIES)
    columns = {name: [0, 1, 1, 0, 1] for name in names}
    pq.write_table(pa.table(columns), path)
    run, source = open_run(Path(criteo.__file__), str(path), None, None, 1)
    assert run == criteo.run
    assert source.total_events() == 5
    stream = Stream(path=path, days=(0, 0), seen_by="C1")
    assert ads_of(stream).learned == 4
    del columns["C26"]
    pq.write_table(pa.table(columns), path)
    with pytest.raises(BenchError, match=r"'C26' is missing.*; give Criteo's ads"):
        ads_of(stream)
