"""`embertide snapshot verify|show|diff`: what they find, and their exit status."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from serving import change_manifest, flip_byte
from typer.testing import CliRunner

from embertide import _store
from embertide.server.cli.snapshot import app
from embertide.trainer.config import FeatureConfig
from embertide.trainer.publish.snapshot import (
    PROGRAM,
    TENSORS,
    TRANSFORMS,
    DensePart,
    SnapshotInfo,
    write_snapshot,
)

INFO = SnapshotInfo(
    model="m",
    lineage=3,
    version=7,
    watermark_ms=99,
    dense_features=0,
    features=(FeatureConfig(name="shown", table="item"), FeatureConfig(name="who", table="user")),
)
# Key to (live mask, value of each element); two chunks of four.
Rows = Mapping[int, tuple[int, float]]
ITEM: Rows = {key: (3 if key % 3 else 1, key) for key in range(20)}
USER: Rows = {key: (1, key) for key in range(5)}


def table(name: str, index: int, bits: int = 1, chunks: int = 2) -> _store.TableConfig:
    layout = _store.RowLayout(chunks=chunks, chunk_dim=8 // chunks)
    return _store.TableConfig(name=name, id=index, layout=layout, bucket_bits=bits)


TABLES = (table("item", 0), table("user", 1, bits=0))


def records(of: _store.TableConfig, rows: Rows, bucket: int) -> bytes:
    found = b""
    for key, (live, value) in sorted(rows.items()):
        if of.bucket_bits == 0 or _store.hash_key(key) >> (64 - of.bucket_bits) == bucket:
            payload = _store.encode_payload(of.layout, live, np.full(8, value, np.float32))
            found += _store.encode_record(key, live, 0, payload)
    return found


def write(
    path: Path,
    item: Rows = ITEM,
    user: Rows = USER,
    *,
    info: SnapshotInfo = INFO,
    tables: tuple[_store.TableConfig, ...] = TABLES,
    weight: float = 1,
) -> Path:
    program = path.with_suffix(".pt2")
    program.write_bytes(b"a program")
    tensors = {"bias": np.zeros(2, np.float32), "weight": np.full(3, weight, np.float32)}
    dense = DensePart(program=program, cpu="x86-64-v3", tensors=safetensors.numpy.save(tensors))
    buckets = (
        (of, bucket, records(of, rows, bucket))
        for of, rows in zip(tables, (item, user), strict=True)
        for bucket in range(1 << of.bucket_bits)
    )
    write_snapshot(path, info, tables, buckets, dense)
    return path


def run(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit status and what --json says."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    said = json.loads(done.stdout)
    assert isinstance(said, dict)
    return done.exit_code, said


def text(*arguments: object) -> tuple[int, str]:
    """Exit status and what people read, on one line."""
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return write(tmp_path / "a")


def test_show_counts_rows_by_table_and_live_chunks(snapshot: Path) -> None:
    code, said = run("show", snapshot)
    assert code == 0
    assert (said["version"], said["lineage"], said["watermark_ms"]) == (7, 3, 99)
    item = said["tables"]["item"]
    assert (item["rows"], item["buckets"], item["live_chunks"]) == (20, 2, [0, 7, 13])
    assert said["tables"]["user"]["live_chunks"] == [0, 5, 0]
    sizes = [path.stat().st_size for path in (snapshot / "tables" / "item").iterdir()]
    assert item["bytes"] == sum(sizes)
    code, words = text("show", snapshot)
    assert code == 0
    assert "version 7 of lineage 3, watermark 99 ms" in words
    assert "1: 7, 2: 13" in words


COLUMNS = [
    {"name": "price", "steps": [{"kind": "log1p"}], "fill": 0.0, "missing": True},
    {"name": "age", "steps": [], "fill": 0.0, "missing": False},
]


def transforms(columns: list[dict[str, Any]]) -> _store.Transforms:
    return _store.Transforms(json.dumps({"format": 1, "columns": columns}))


def test_show_verify_and_diff_know_the_transforms(tmp_path: Path) -> None:
    info = dataclasses.replace(INFO, dense_features=2, transforms=transforms(COLUMNS))
    snapshot = write(tmp_path / "a", info=info)
    assert run("show", snapshot)[1]["dense"] == COLUMNS
    assert "DENSE: price (log1p, missing), age" in text("show", snapshot)[1]
    assert run("verify", snapshot)[0] == 0
    fills = [{**column, "fill": 1.0} for column in COLUMNS]
    other = write(tmp_path / "b", info=dataclasses.replace(info, transforms=transforms(fills)))
    code, said = run("diff", snapshot, other)
    assert code == 1
    assert "(transforms)" in said["tensors"]
    (snapshot / TRANSFORMS).write_text("{}")
    assert "transforms.json: bytes is 2" in run("verify", snapshot)[1]["faults"][0]
    data = {"bytes": 2, "crc32c": _store.crc32c(b"{}")}
    part = {"role": "transforms", "path": TRANSFORMS, **data}
    change_manifest(snapshot, dense=[part])
    code, said = run("verify", snapshot)
    assert code == 1
    assert "format" in said["faults"][0]


def test_a_publications_newest_snapshot_is_meant(tmp_path: Path) -> None:
    folder = tmp_path / "pub" / "snapshots"
    folder.mkdir(parents=True)
    for number in (3, 12):
        info = dataclasses.replace(INFO, version=number)
        write(folder / f"{number:012d}-000001", info=info)
    assert run("show", tmp_path / "pub")[1]["version"] == 12


def test_verify_proves_every_file(snapshot: Path) -> None:
    code, said = run("verify", snapshot)
    assert (code, said["valid"], said["faults"]) == (0, True, [])
    assert (said["files"], said["rows"]) == (5, 25)
    found = [path for path in snapshot.rglob("*") if path.is_file()]
    manifest = (snapshot / "manifest.json").stat().st_size
    assert said["bytes"] == sum(path.stat().st_size for path in found) - manifest
    assert "every one proved" in text("verify", snapshot)[1]


def test_verify_names_every_harmed_file_and_not_the_first_alone(snapshot: Path) -> None:
    bucket = snapshot / "tables" / "item" / "bucket-000001.emb"
    flip_byte(bucket, 150)
    flip_byte(snapshot / TENSORS, 90)
    (snapshot / PROGRAM).unlink()
    code, said = run("verify", snapshot)
    assert (code, said["valid"], len(said["faults"])) == (1, False, 3)
    for name in ("bucket-000001.emb", TENSORS, PROGRAM):
        assert any(name in fault for fault in said["faults"])
    code, words = text("verify", snapshot)
    assert code == 1
    assert "5 files, 25 rows" in words
    assert "3 of them not what was written" in words


@pytest.mark.parametrize("name", ["tables/item/bucket-000000.emb", TENSORS, PROGRAM])
def test_verify_finds_a_flipped_byte_anywhere(snapshot: Path, name: str) -> None:
    size = (snapshot / name).stat().st_size
    for at in range(0, size, max(1, size // 9)):
        flip_byte(snapshot / name, at)
        assert run("verify", snapshot)[0] == 1, at
        flip_byte(snapshot / name, at)
    assert run("verify", snapshot)[0] == 0


def test_a_manifest_that_is_none_is_refused(snapshot: Path) -> None:
    buckets = json.loads((snapshot / "manifest.json").read_text())["buckets"]
    change_manifest(snapshot, buckets=[*buckets, buckets[0]])
    code, said = run("verify", snapshot)
    assert code == 1
    assert "names a bucket twice" in said["faults"][0]
    (snapshot / "manifest.json").write_bytes(b"\xff{")
    for command in (("verify",), ("show",), ("diff", snapshot)):
        code, said = run(*command, snapshot)
        assert code == 1
        assert "manifest.json" in said["error"]


def test_equal_rows_and_tensors_are_equal_whatever_the_version(
    snapshot: Path, tmp_path: Path
) -> None:
    info = dataclasses.replace(INFO, version=8, lineage=4, watermark_ms=100)
    code, said = run("diff", snapshot, write(tmp_path / "b", info=info))
    assert (code, said["equal"]) == (0, True)
    assert (said["before"]["version"], said["after"]["version"]) == (7, 8)
    assert said["tensors"] == said["schema"] == []
    assert all(each["added"] == each["bytes"] == 0 for each in said["tables"])
    assert "they hold the same" in text("diff", snapshot, tmp_path / "b")[1]


def test_diff_counts_rows_by_table(snapshot: Path, tmp_path: Path) -> None:
    rows = {key: row for key, row in ITEM.items() if key not in (0, 5, 19)}
    rows |= {1000: (3, 1), 2001: (1, 2), 1: (1, 1), 2: (3, 2.5)}
    other = write(tmp_path / "b", rows)
    code, said = run("diff", snapshot, other)
    assert (code, said["equal"]) == (1, False)
    item, user = said["tables"]
    assert (item["table"], item["added"], item["removed"], item["changed"]) == ("item", 2, 3, 2)
    # Chunks of 16 bytes: 0 had one, 5 and 19 two, 1 loses one; then three rows fewer or more.
    assert item["bytes"] == 16 * (-1 - 2 - 2 + 2 + 1 - 1) - 12
    assert (user["added"], user["removed"], user["changed"]) == (0, 0, 0)
    back = run("diff", other, snapshot)[1]["tables"][0]
    assert (back["added"], back["removed"], back["changed"]) == (3, 2, 2)
    assert back["bytes"] == -item["bytes"]
    code, words = text("diff", snapshot, other)
    assert code == 1
    assert "they differ" in words


def test_diff_names_the_dense_tensors_that_differ(snapshot: Path, tmp_path: Path) -> None:
    code, said = run("diff", snapshot, write(tmp_path / "b", weight=2))
    assert (code, said["tensors"]) == (1, ["weight"])
    assert "dense tensors that differ: weight" in text("diff", snapshot, tmp_path / "b")[1]


def test_diff_of_another_schema_says_so(snapshot: Path, tmp_path: Path) -> None:
    tables = (table("item", 0, chunks=4), table("visitor", 1, bits=0))
    features = (FeatureConfig(name="shown", table="item"),)
    info = dataclasses.replace(INFO, features=features)
    rows = dict.fromkeys(range(9), (1, 0.0))
    code, said = run("diff", snapshot, write(tmp_path / "b", rows, tables=tables, info=info))
    assert (code, said["schema"]) == (1, ["features"])
    by_table = {
        each["table"]: (each["layout"], each["added"], each["removed"]) for each in said["tables"]
    }
    assert by_table == {
        "item": (True, 9, 20),
        "user": (True, 0, 5),
        "visitor": (True, 5, 0),
    }


def test_diff_refuses_a_harmed_file_and_names_it(snapshot: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b")
    flip_byte(other / "tables" / "user" / "bucket-000000.emb", 130)
    code, said = run("diff", snapshot, other)
    assert code == 1
    assert "bucket-000000.emb" in said["error"]
