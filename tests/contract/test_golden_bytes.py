"""The formats, written here a second time from docs/formats.md alone, against the C++.

Invariant 1 of the design: a row's bytes are the same wherever they are made. The golden literals
also stand in backend_cpp/base/row_test.cc.
"""

import json
import math
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from numpy.typing import NDArray

from embertide import _store

MASK = (1 << 64) - 1
SEED = 0x9E3779B97F4A7C15

GOLDEN = {
    "fp32": "0807060504030201020000000000c03f000080be",
    "fp16": "080706050403020102000000003e00b4",
    "bf16": "080706050403020102000000c03f80be",
    "int8": "0807060504030201020000000683413c7feb",
    "int4": "08070605040302010200000010fc40be18",
}
KEY = 0x0102030405060708


def hash_key(key: int) -> int:
    z = (key + SEED) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def int4_payload(held: NDArray[np.float32]) -> bytes:
    first = np.float32(held[np.abs(held).argmax()] / np.float32(-8))
    if first == 0:
        return bytes(4 + len(held) // 2)

    def elements(scale: np.float32) -> NDArray[np.float32]:
        return np.rint(np.clip(held / scale, np.float32(-8), np.float32(7)))

    def sum_of(terms: NDArray[np.float64]) -> float:
        total = 0.0
        for term in terms.tolist():  # as the page says: sum() and numpy have other orders
            total += term
        return total

    best, least = first, math.inf
    for share in (1, 0.92, 0.84, 0.76):
        scale = first * np.float32(share)
        q = elements(scale).astype(np.float64)
        fitted = np.float32(sum_of(q * held) / sum_of(q * q))
        for each in (scale, fitted):
            off = held.astype(np.float64) - elements(each).astype(np.float64) * np.float64(each)
            error = sum_of(np.square(off))
            if error < least:
                best, least = each, error
    nibbles = elements(best).astype(np.int8).astype(np.uint8) & 15
    return struct.pack("<f", best) + bytes((nibbles[::2] | nibbles[1::2] << 4).tolist())


def payload(dtype: str, chunk_dim: int, live: int, values: list[float]) -> bytes:
    chunks = np.array(values, dtype=np.float32).reshape(-1, chunk_dim)
    held = np.concatenate([chunks[c] for c in range(len(chunks)) if live >> c & 1])
    if dtype == "fp32":
        return bytes(held.tobytes())
    if dtype == "fp16":
        return bytes(held.astype(np.float16).tobytes())
    if dtype == "bf16":
        bits = held.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return bytes(rounded.astype(np.uint16).tobytes())
    if dtype == "int4":
        return int4_payload(held)
    scale = np.float32(np.abs(held).max() / np.float32(127))
    return struct.pack("<f", scale) + bytes(np.rint(held / scale).astype(np.int8).tobytes())


def record(key: int, live: int, body: bytes) -> bytes:
    return struct.pack("<QHBB", key, live, 0, 0) + body


def bucket_file(table_id: int, bucket: int, bits: int, version: int, rows: list[bytes]) -> bytes:
    """A file of one block; fp32, two chunks of two."""
    header = b"EMBKT001" + struct.pack("<IIQ", 1, 96, SEED) + b"splitmix64".ljust(16, b"\0")
    header += struct.pack("<QQIIIHHB19x", version, len(rows), table_id, bucket, bits, 2, 2, 0)
    out = header + struct.pack("<I", google_crc32c.value(header))
    records = b"".join(rows)
    start = b"EBLK" + struct.pack("<II", len(rows), len(records))
    out += start + struct.pack("<I", google_crc32c.value(start + records)) + records
    footer = b"EEND" + struct.pack("<IQ", 1, len(rows))
    return out + footer + struct.pack("<I", google_crc32c.value(footer))


def table(bits: int = 1) -> _store.TableConfig:
    layout = _store.RowLayout(dtype="fp32", chunks=2, chunk_dim=2)
    return _store.TableConfig(name="item", id=3, layout=layout, bucket_bits=bits)


def some_rows(bucket: int) -> list[bytes]:
    keys = [k for k in range(200) if hash_key(k) >> 63 == bucket]
    return [record(k, 3, np.full(4, k, dtype=np.float32).tobytes()) for k in keys]


@pytest.mark.parametrize("dtype", GOLDEN)
def test_golden_record_is_the_same_in_both_languages(dtype: str) -> None:
    values = [9.0, 9.0, 1.5, -0.25]
    ours = record(KEY, 2, payload(dtype, 2, 2, values))
    layout = _store.RowLayout(dtype=dtype, chunks=2, chunk_dim=2)
    body = _store.encode_payload(layout, 2, np.array(values, dtype=np.float32))
    assert ours.hex() == GOLDEN[dtype]
    assert _store.encode_record(KEY, 2, 0, body).hex() == GOLDEN[dtype]


@pytest.mark.parametrize("dtype", GOLDEN)
def test_rows_of_many_values_are_the_same_in_both_languages(dtype: str) -> None:
    rng = np.random.default_rng(6)
    for chunk_dim, scale in ((2, 1.0), (4, 1e-3), (10, 1e20), (32, 0.3)):
        layout = _store.RowLayout(dtype=dtype, chunks=3, chunk_dim=chunk_dim)
        for _ in range(50):
            values = (rng.standard_t(3, 3 * chunk_dim) * scale).astype(np.float32)
            if dtype == "fp16":
                values = np.clip(values, -60000, 60000)
            live = int(rng.integers(1, 8))
            wanted = payload(dtype, chunk_dim, live, values.tolist())
            assert _store.encode_payload(layout, live, values).hex() == wanted.hex()


def test_hash_and_initial_value_follow_the_page() -> None:
    for key in [0, 1, -1, KEY, 1 << 40]:
        assert _store.hash_key(key) == hash_key(key & MASK)
        h = hash_key(hash_key(hash_key(5 ^ 3) ^ (key & MASK)) ^ 7)
        unit = np.float32(np.float32(h >> 40) * np.float32(2**-23)) - np.float32(1)
        assert _store.initial_value(5, 3, key, 7, 0.5) == float(unit * np.float32(0.5))


def test_bucket_files_are_the_same_bytes(tmp_path: Path) -> None:
    rows = some_rows(1)
    info = _store.write_bucket_file(str(tmp_path), table(), 1, 9, b"".join(rows))
    written = (tmp_path / info.path).read_bytes()
    assert info.path == "tables/item/bucket-000001.emb"
    assert written == bucket_file(3, 1, 1, 9, rows)
    assert info.crc32c == google_crc32c.value(written) == _store.crc32c(written)


def test_a_file_written_from_the_page_is_read(tmp_path: Path) -> None:
    rows = some_rows(0)
    data = bucket_file(3, 0, 1, 4, rows)
    path = tmp_path / "tables/item/bucket-000000.emb"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    info = _store.BucketFileInfo(
        path="tables/item/bucket-000000.emb",
        table="item",
        bucket=0,
        version=4,
        rows=len(rows),
        bytes=len(data),
        crc32c=google_crc32c.value(data),
    )
    assert _store.read_bucket_file(str(tmp_path), table(), info) == b"".join(rows)
    path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(_store.StoreError, match=r"bucket-000000\.emb") as caught:
        _store.read_bucket_file(str(tmp_path), table(), info)
    assert caught.value.code == "CORRUPT"


def test_a_row_is_the_same_from_trainer_to_file_to_node(tmp_path: Path) -> None:
    trained = _store.TrainingStore(tables=[table(0)], ddr_budget_bytes=8 << 20)
    keys = np.array([5, 11, 5], dtype=np.int64)
    trained.ensure_rows(0, keys)
    gradients = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert trained.apply_gradients([(0, keys, None, gradients)], learning_rate=0.1) == 2
    trained.set_live(0, 11, 2)
    records = trained.take_changes(0, 0)
    info = _store.write_bucket_file(str(tmp_path), table(0), 0, 1, records)
    node = _store.ServingStore(tables=[table(0)], ddr_budget_bytes=8 << 20)
    node.stage_records(1, 0, 0, _store.read_bucket_file(str(tmp_path), table(0), info))
    node.commit(1)
    assert node.export_bucket(0, 0) == records == trained.export_bucket(0, 0)
    served, source, version = node.lookup(0, keys)
    assert served.tobytes() == trained.lookup(0, keys)[0].tobytes()
    assert served[0].tobytes() == records[12:28]
    assert (served[1, :2] == 0).all()
    assert version == 1
    assert source.tolist() == [1, 1, 1]
    node.check_integrity()


def test_a_manifest_of_another_format_is_refused() -> None:
    manifest = {
        "format_version": 1,
        "hash_name": "splitmix64",
        "hash_seed": SEED,
        "model": "news",
        "lineage": 1,
        "schema_id": 9,
        "version": 1,
        "watermark_ms": 0,
        "dense_features": 0,
        "tables": [],
        "features": [],
        "buckets": [],
        "dense": [],
        "dense_id": "",
        "dense_cpu": "",
    }
    assert json.loads(_store.check_manifest(json.dumps(manifest))) == manifest
    for field, value in [("format_version", 2), ("hash_name", "md5")]:
        with pytest.raises(_store.StoreError, match=field):
            _store.check_manifest(json.dumps(manifest | {field: value}))
    del manifest["watermark_ms"]
    with pytest.raises(_store.StoreError, match="watermark_ms"):
        _store.check_manifest(json.dumps(manifest))
