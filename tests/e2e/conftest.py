"""Fixtures of the end-to-end tests: a small snapshot, its right answers, a real tritonserver."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import chromium_at
from numpy.typing import NDArray
from serving import with_stock_front

from embertide import _store
from embertide.server.adapters import process, triton

VERSION = 41
WATERMARK_MS = 1_700_000_000_000


@dataclasses.dataclass(frozen=True)
class TableSpec:
    name: str
    id: int
    dim: int
    chunks: int
    dtype: str
    bucket_bits: int
    default_row: tuple[float, ...]
    keys: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    name: str
    table: str
    pooling: str


ITEM_KEYS = (*range(0, 3000, 7), -1, -(2**63), 2**63 - 1, 2**40 + 3)
TABLES = (
    TableSpec("item", 3, 8, 2, "fp32", 3, (), ITEM_KEYS),
    TableSpec("user", 5, 6, 1, "fp16", 1, (0.5, -1.5, 2.0, 0.25, -0.125, 3.0), tuple(range(50))),
    TableSpec("tag", 9, 4, 1, "int8", 0, (), tuple(range(100, 140))),
)
FEATURES = (
    FeatureSpec("item_id", "item", "sum"),
    FeatureSpec("user_id", "user", "sum"),
    FeatureSpec("history", "item", "mean"),
    FeatureSpec("tags", "tag", "sum"),
)


@dataclasses.dataclass
class Reference:
    """The same model in numpy: what a right answer is."""

    rows: dict[str, dict[int, NDArray[np.float32]]]
    version: int = VERSION
    watermark_ms: int = WATERMARK_MS

    @property
    def features(self) -> int:
        return len(FEATURES)

    @property
    def total_dim(self) -> int:
        return sum(len(self.default(feature.table)) for feature in FEATURES)

    def default(self, table: str) -> NDArray[np.float32]:
        spec = next(each for each in TABLES if each.name == table)
        return np.array(spec.default_row or np.zeros(spec.dim), np.float32)

    def row(self, feature: FeatureSpec, key: int) -> NDArray[np.float32]:
        return self.rows[feature.table].get(key, self.default(feature.table))

    def known(self, feature: int, key: int) -> bool:
        return key in self.rows[FEATURES[feature].table]

    def pooled(self, feature: FeatureSpec, keys: Sequence[int]) -> NDArray[np.float32]:
        if not keys:
            return np.zeros(len(self.default(feature.table)), np.float32)
        total = np.sum([self.row(feature, int(key)).astype(np.float64) for key in keys], axis=0)
        if feature.pooling == "mean":
            total = total / len(keys)
        return np.asarray(total.astype(np.float32))

    def sample(self, bags: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        return np.concatenate(
            [self.pooled(feature, bag) for feature, bag in zip(FEATURES, bags, strict=True)]
        )

    def flat(self, samples: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.float32]:
        """Return the answer if the third feature is a sequence: a row for each of its keys."""
        parts = []
        for bags in samples:
            for f, (feature, bag) in enumerate(zip(FEATURES, bags, strict=True)):
                rows = [self.row(feature, int(key)) for key in bag]
                parts += rows if f == 2 else [self.pooled(feature, bag)]
        return np.concatenate(parts)

    def answer(self, samples: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.float32]:
        return np.stack([self.sample(bags) for bags in samples])


def _decoded(spec: TableSpec, live: int, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values that a reader should see once they went through the row's encoding."""
    chunk = spec.dim // spec.chunks
    seen = values.copy()
    for c in range(spec.chunks):
        if not live >> c & 1:
            seen[c * chunk : (c + 1) * chunk] = 0
    if spec.dtype == "fp16":
        return seen.astype(np.float16).astype(np.float32)
    if spec.dtype == "int8":
        scale = np.float32(np.abs(seen).max()) / np.float32(127)
        return np.asarray(np.rint(seen / scale).astype(np.float32) * scale)
    return seen


def _table_config(spec: TableSpec) -> "_store.TableConfig":
    layout = _store.RowLayout(
        dtype=spec.dtype, chunks=spec.chunks, chunk_dim=spec.dim // spec.chunks
    )
    return _store.TableConfig(
        name=spec.name,
        id=spec.id,
        layout=layout,
        bucket_bits=spec.bucket_bits,
        default_row=list(spec.default_row),
    )


def _write_table(
    directory: Path, spec: TableSpec, rng: np.random.Generator
) -> tuple[list[_store.BucketFileInfo], dict[int, NDArray[np.float32]]]:
    config = _table_config(spec)
    full = (1 << spec.chunks) - 1
    records: dict[int, list[tuple[int, bytes]]] = {b: [] for b in range(1 << spec.bucket_bits)}
    rows: dict[int, NDArray[np.float32]] = {}
    for i, key in enumerate(spec.keys):
        live = full if spec.chunks == 1 or i % 3 else 1 + i % full
        values = rng.standard_normal(spec.dim).astype(np.float32)
        unsigned = key % 2**64
        payload = _store.encode_payload(config.layout, live, values)
        bucket = _store.hash_key(key) >> (64 - spec.bucket_bits) if spec.bucket_bits else 0
        records[bucket].append((unsigned, _store.encode_record(unsigned, live, 0, payload)))
        rows[key] = _decoded(spec, live, values)
    infos: list[_store.BucketFileInfo] = []
    for bucket, items in records.items():
        data = b"".join(record for _, record in sorted(items))
        info = _store.write_bucket_file(str(directory), config, bucket, VERSION, data)
        infos.append(info)
    return infos, rows


def write_manifest(
    directory: Path,
    *,
    version: int,
    watermark_ms: int = 0,
    tables: Sequence[_store.TableConfig],
    features: Sequence[FeatureSpec],
    buckets: Sequence[_store.BucketFileInfo],
) -> None:
    """Write the manifest that makes bucket files a snapshot."""
    fields = ("path", "table", "bucket", "version", "rows", "bytes", "crc32c")
    manifest = {
        "format_version": 1,
        "hash_name": "splitmix64",
        "hash_seed": 0x9E3779B97F4A7C15,
        "model": "news",
        "lineage": 1,
        "version": version,
        "watermark_ms": watermark_ms,
        "schema_id": 1,
        "dense_features": 0,
        "tables": [
            {
                "name": table.name,
                "id": table.id,
                "dim": table.layout.dim,
                "chunks": table.layout.chunks,
                "dtype": table.layout.dtype,
                "bucket_bits": table.bucket_bits,
                "init_seed": 0,
                "init_scale": 0.01,
                "default_row": table.default_row,
            }
            for table in tables
        ],
        "features": [dataclasses.asdict(feature) for feature in features],
        "buckets": [{field: getattr(info, field) for field in fields} for info in buckets],
        "dense": [],
        "dense_id": "",
        "dense_cpu": "",
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))


def write_snapshot(directory: Path) -> Reference:
    """Write the model of these tests as a snapshot and return its reference."""
    rng = np.random.default_rng(7)
    buckets: list[_store.BucketFileInfo] = []
    rows = {}
    for spec in TABLES:
        infos, rows[spec.name] = _write_table(directory, spec, rng)
        buckets += infos
    write_manifest(
        directory,
        version=VERSION,
        watermark_ms=WATERMARK_MS,
        tables=[_table_config(spec) for spec in TABLES],
        features=FEATURES,
        buckets=buckets,
    )
    return Reference(rows)


@pytest.fixture(scope="session")
def backends() -> Path:
    """Where the built backend is; a missing one fails, it does not skip."""
    root = Path(__file__).parents[2]
    return Path(os.environ.get("EMBERTIDE_BACKENDS", root / "build" / "cpp" / "backends"))


@pytest.fixture(scope="session")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    directory = tmp_path_factory.mktemp("snapshot")
    return directory, write_snapshot(directory)


@pytest.fixture(scope="session")
def reference(snapshot: tuple[Path, Reference]) -> Reference:
    return snapshot[1]


@pytest.fixture(scope="session")
def server_options(
    tmp_path_factory: pytest.TempPathFactory, backends: Path
) -> triton.ServerOptions:
    """Options of a server of its own: free ports, an empty repository."""
    directory = tmp_path_factory.mktemp("triton")
    (directory / "models").mkdir()
    grpc_port, metrics_port = process.free_ports(2)
    # A backend built with a sanitizer needs its runtime in the server: EMBERTIDE_TRITON_PRELOAD.
    runtime = os.environ.get("EMBERTIDE_TRITON_PRELOAD")
    preload = {"LD_PRELOAD": runtime} if runtime else {}
    return triton.ServerOptions(
        repository=directory / "models",
        backends=backends,
        log=directory / "triton.log",
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        explicit=True,
        models=("lookup", "hps", "lean"),
        environment=preload,
    )


def _write_models(options: triton.ServerOptions, snapshot: Path) -> None:
    for name in options.models:
        model = triton.ModelOptions(
            snapshot=snapshot,
            hps_names=name == "hps",
            index="lean" if name == "lean" else None,
            instances=2,
            max_batch_size=64,
            max_queue_delay_us=2000,
            max_samples=32,
            max_keys=200,
            node="node-test",
        )
        triton.write_model(options.repository, name, model)


@pytest.fixture(scope="session")
def server(
    server_options: triton.ServerOptions, snapshot: tuple[Path, Reference]
) -> Iterator[triton.TritonServer]:
    """A server with the models `lookup` (two instances), `hps` and `lean` over the snapshot."""
    _write_models(server_options, snapshot[0])
    with triton.TritonServer(server_options) as running:
        yield running
        assert running.alive(), running.log_text()


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def stock(
    server_options: triton.ServerOptions,
    snapshot: tuple[Path, Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[triton.TritonServer]:
    """The same behind tritonserver's own front end, which answers over HTTP as well."""
    directory = tmp_path_factory.mktemp("stock")
    options = with_stock_front(
        dataclasses.replace(
            server_options, repository=directory / "models", log=directory / "triton.log"
        )
    )
    _write_models(options, snapshot[0])
    with triton.TritonServer(options) as running:
        yield running
        assert running.alive(), running.log_text()


@pytest.fixture
def one_table_manifest() -> Callable[..., None]:
    """Write the manifest of a model of one table and one feature, pooled by sum."""

    def write(
        directory: Path, table: _store.TableConfig, buckets: Sequence[_store.BucketFileInfo]
    ) -> None:
        feature = FeatureSpec("cand", table.name, "sum")
        write_manifest(directory, version=1, tables=[table], features=[feature], buckets=buckets)

    return write


@pytest.fixture
def new_snapshot(tmp_path: Path) -> Callable[[], Path]:
    """Write a fresh copy of the snapshot, for tests that harm it."""

    def write() -> Path:
        directory = tmp_path / "snapshot"
        directory.mkdir()
        write_snapshot(directory)
        return directory

    return write


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium, and what drives it."""
    with chromium_at(tmp_path_factory.mktemp("profile")) as driver:
        yield driver
