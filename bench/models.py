"""Making the models that are measured: random rows as a snapshot, and as files for the peer.

Row k of a table is the row of key k on both sides. What is made is kept under `build/bench/models`
and made again only when the shape changes.

Shapes: T tables, R rows a table, d values a row.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.shapes import SEED, Shape
from embertide import _store
from embertide.trainer.config import ModelConfig
from embertide.trainer.data.keys import buckets_of
from embertide.trainer.embedding.records import encode_rows
from embertide.trainer.embedding.store import store_table
from embertide.trainer.model.dlrm import Dlrm, Probability
from embertide.trainer.model.export import export_dense, tensor_bytes
from embertide.trainer.publish.snapshot import DensePart, SnapshotInfo, write_snapshot

CPU = "x86-64-v3"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Where a shape's files are."""

    snapshot: Path
    peer: Path  # tables.npy [T,R,d] and net.safetensors


def bucket_records(
    table: _store.TableConfig, rows_Rd: NDArray[np.float32]
) -> Iterator[tuple[_store.TableConfig, int, bytes]]:
    """Give a table's buckets as row records."""
    keys_R = np.arange(len(rows_Rd), dtype=np.uint64)
    bucket_R = buckets_of(keys_R, table.bucket_bits)
    for bucket in range(1 << table.bucket_bits):
        mine = np.flatnonzero(bucket_R == bucket)
        yield table, bucket, encode_rows(table.layout, keys_R[mine], rows_Rd[mine]).tobytes()


def _draw_tables(shape: Shape, path: Path) -> None:
    """Write tables.npy, one table in memory at a time."""
    rng = np.random.default_rng(SEED)
    size = (shape.tables, shape.rows, shape.dim)
    out: NDArray[np.float32] = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
        path, "w+", np.float32, size
    )
    for t in range(shape.tables):
        out[t] = rng.random(size[1:], np.float32) - np.float32(0.5)
    del out  # closes the file


def _dense_part(config: ModelConfig, directory: Path, cache: Path) -> DensePart:
    torch.manual_seed(SEED)
    net = Probability(Dlrm(config))
    tensors = tensor_bytes(net)
    (directory / "net.safetensors").write_bytes(tensors)
    program = directory / "program.pt2"
    export_dense(
        net,
        program,
        dense_features=config.dense_features,
        embedding_dim=sum(config.feature_dims),
        cpu=CPU,
        cache=cache,
    )
    return DensePart(program=program, cpu=CPU, tensors=tensors)


def _make(shape: Shape, directory: Path, cache: Path) -> None:
    config = shape.config()
    peer = directory / "peer"
    peer.mkdir(parents=True)
    _draw_tables(shape, peer / "tables.npy")
    part = _dense_part(config, peer, cache)
    tables = [store_table(table, i, SEED) for i, table in enumerate(config.tables)]
    rows_TRd = np.load(peer / "tables.npy", mmap_mode="r")
    buckets = (each for table in tables for each in bucket_records(table, rows_TRd[table.id]))
    info = SnapshotInfo.of(config, lineage=1, version=1, watermark_ms=1)
    write_snapshot(directory / "snapshot", info, tables, buckets, part)


def make(shape: Shape, build: Path) -> Files:
    """Return the files of a shape, making them if need be."""
    parts = [dataclasses.asdict(shape), repr(shape.config()), SEED, CPU, torch.__version__]
    text = json.dumps(parts, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    directory = build / "bench" / "models" / f"{shape.name}-{digest}"
    if not directory.is_dir():
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        _make(shape, partial, build / "cache" / "dense")
        partial.rename(directory)
    return Files(snapshot=directory / "snapshot", peer=directory / "peer")
