"""Stores of ours that the benchmarks fill, and keys to ask for.

Shapes: N keys, R rows, D dimensions.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.keys import zipf_keys
from embertide import _store
from embertide.trainer.data.base import Batch
from embertide.trainer.data.keys import buckets_of, hash_keys

Keys = NDArray[np.uint64]
CHUNKS = 4
_BUCKET_ROWS = 100_000
_ELEMENTS = {"fp32": "<f4", "fp16": "<f2"}  # of others, rows are encoded from fp32
_INDEX_BYTES = 40  # a row, with room to grow
_AUX_BYTES = 8 + 4 * CHUNKS  # a row of a training store
_SLACK = 64 << 20
_SETTLED_S = 1.5  # memory becomes huge pages when it has been full for a second


def keys_of(rows_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the 64-bit keys of rows: hashed, as ids of users and items are."""
    return hash_keys(rows_N.astype(np.uint64) + np.uint64(0x5EED)).view(np.int64)


def draw(
    rng: np.random.Generator, rows: int, exponent: float, batches: int, size: int
) -> list[NDArray[np.int64]]:
    """Return batches of rows, uniform (exponent 0) or Zipf; no batch repeats another."""
    if exponent == 0:
        drawn = rng.integers(0, rows, batches * size)
    else:
        drawn = zipf_keys(rng, rows, exponent, batches * size)
    return np.split(drawn, batches)


def table_of(
    rows: int, dim: int, dtype: str = "fp32", *, bucket_rows: int = _BUCKET_ROWS, number: int = 0
) -> _store.TableConfig:
    """Return a table with about so many rows a bucket."""
    layout = _store.RowLayout(dtype=dtype, chunks=CHUNKS, chunk_dim=dim // CHUNKS)
    bits = max(0, round(float(np.log2(max(rows, 1) / bucket_rows))))
    return _store.TableConfig(name=f"table{number}", id=number, layout=layout, bucket_bits=bits)


def records_of(
    rng: np.random.Generator,
    keys_N: Keys,
    dim: int,
    dtype: str = "fp32",
    *,
    live_chunks: int = CHUNKS,
) -> bytes:
    """Return the records of rows of which any `live_chunks` chunks live, with random values."""
    if dtype not in _ELEMENTS:
        whole, layout = (
            _store.RowLayout(dtype=each, chunks=CHUNKS, chunk_dim=dim // CHUNKS)
            for each in ("fp32", dtype)
        )
        plain = records_of(rng, keys_N, dim, live_chunks=live_chunks)
        return _store.convert_records(whole, layout, plain)
    width = dim // CHUNKS * live_chunks
    head = [("key", "<u8"), ("live", "<u2"), ("kind", "u1"), ("zero", "u1")]
    record = np.dtype([*head, ("values", _ELEMENTS[dtype], width)])
    records = np.zeros(len(keys_N), record)
    records["key"] = keys_N
    order = rng.random((len(keys_N), CHUNKS)).argsort(axis=1)
    bits = np.where(order < live_chunks, 1 << np.arange(CHUNKS), 0)
    records["live"] = bits.sum(axis=1)
    records["values"] = rng.random((len(keys_N), width), np.float32)
    return records.tobytes()


def filled(
    table: _store.TableConfig,
    keys_R: NDArray[np.int64],
    *,
    live_chunks: int = CHUNKS,
    **options: Any,
) -> _store.ServingStore:
    """Return a serving store with one version of a row for each of these keys, each named once."""
    store = _store.ServingStore(tables=[table], **options)
    unsigned_R = keys_R.view(np.uint64)
    buckets_R = buckets_of(unsigned_R, table.bucket_bits)
    order = np.argsort(buckets_R, kind="stable")
    ends = np.searchsorted(buckets_R[order], np.arange((1 << table.bucket_bits) + 1))
    rng = np.random.default_rng(1)
    for bucket in range(1 << table.bucket_bits):
        keys_N = unsigned_R[order[ends[bucket] : ends[bucket + 1]]]
        layout = table.layout
        records = records_of(rng, keys_N, layout.dim, layout.dtype, live_chunks=live_chunks)
        store.stage_records(1, 0, bucket, records)
    store.commit(1)
    return store


def payload_bytes(dim: int, dtype: str = "fp32", live_chunks: int = CHUNKS) -> int:
    """Return the bytes of a row's payload."""
    layout = _store.RowLayout(dtype=dtype, chunks=CHUNKS, chunk_dim=dim // CHUNKS)
    live = (1 << live_chunks) - 1
    return len(_store.encode_payload(layout, live, np.zeros(dim, np.float32)))


def fill(
    rows: int, dim: int, dtype: str = "fp32", *, live_chunks: int = CHUNKS, **options: Any
) -> _store.ServingStore:
    """Return a serving store of so many rows, all in DDR."""
    payload = payload_bytes(dim, dtype, live_chunks)
    store = filled(
        table_of(rows, dim, dtype),
        keys_of(np.arange(rows, dtype=np.int64)),
        live_chunks=live_chunks,
        ddr_budget_bytes=rows * (payload + _INDEX_BYTES) + _SLACK,
        **options,
    )
    settle(store)
    return store


def settle(store: _store.Store) -> None:
    """Maintain a store until what it holds lies in huge pages, as far as the system gives any."""
    huge, since = -1, time.monotonic()
    while time.monotonic() < since + _SETTLED_S:
        store.maintain()
        if (now := store.stats()["huge_bytes"]) != huge:
            huge, since = now, time.monotonic()


def train(tables: int, rows: int, dim: int) -> _store.TrainingStore:
    """Return a training store of some tables with `rows` new rows each."""
    row_bytes = 4 * dim + _AUX_BYTES + _INDEX_BYTES
    store = _store.TrainingStore(
        tables=[table_of(rows, dim, number=table) for table in range(tables)],
        ddr_budget_bytes=tables * rows * row_bytes + _SLACK,
    )
    make_rows(store, tables, rows)
    return store


def make_rows(store: _store.TrainingStore, tables: int, rows: int) -> None:
    """Make `rows` rows in each of the first tables of a training store."""
    order = np.random.default_rng(1).permutation(rows)
    for table in range(tables):
        for part in np.array_split(order, 10):
            store.ensure_rows(table, keys_of(part))
    settle(store)


def batches(
    ids_NFL: NDArray[np.int64], dense_ND: NDArray[np.float32], count: int
) -> Iterator[Batch]:
    """Yield events as so many batches of one size, a quarter of them positive, by chance.

    Args:
        ids_NFL: Rows of features, of which a batch has the first of each bag (bench/keys.py).
        dense_ND: Dense features.
        count: Batches; it divides N.
    """
    rng = np.random.default_rng(2)
    for ids_BFL, dense_BD in zip(np.split(ids_NFL, count), np.split(dense_ND, count), strict=True):
        event_B = np.arange(len(ids_BFL))
        yield Batch(
            first=0,
            next_offset=len(ids_BFL),
            event_B=event_B,
            ts_ms_B=event_B,
            keys_BF=keys_of(ids_BFL[:, :, 0]),
            dense_BD=dense_BD,
            label_B=(rng.random(len(ids_BFL)) < 0.25).astype(np.float32),
        )
