"""A model whose every row and dense weight encode the version: an answer shows what it was made of.

Version v publishes the rows of all keys as v in every dimension, and one dense weight w = v. The
net gives w + 1000 * max|embedding - w|: exactly v if rows and weight are of version v, and far off
if any of them is not. So one answer proves itself, and a client that remembers the last one sees
every step back.
"""

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from serving import Client
from torch import Tensor, nn

from embertide import _store
from embertide.server.adapters import triton
from embertide.trainer.config import FeatureConfig, ModelConfig, TableConfig
from embertide.trainer.embedding.store import store_table
from embertide.trainer.model.export import export_dense, tensor_bytes
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.publisher import Change, Publisher
from embertide.trainer.publish.snapshot import (
    DensePart,
    SnapshotInfo,
    schema_id,
    write_snapshot,
)

KEYS = 400
DIM = 4
CONFIG = ModelConfig(
    name="checker",
    tables=(
        TableConfig(name="a", dim=DIM, bucket_bits=2),
        TableConfig(name="b", dim=DIM, bucket_bits=1),
    ),
    features=(FeatureConfig(name="fa", table="a"), FeatureConfig(name="fb", table="b")),
)
TABLES = [store_table(table, i, 1) for i, table in enumerate(CONFIG.tables)]


class CheckerNet(nn.Module):
    """Gives the version, or something far from any; further heads twice, three times as much."""

    def __init__(self, version: int, heads: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([float(version)]))
        self.heads = heads

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        score_B = self.w + 1000.0 * (embeddings_BE - self.w).abs().amax(1)
        if self.heads == 1:
            return score_B
        return torch.stack([score_B * (head + 1) for head in range(self.heads)], dim=1)


def dense_tensors(version: int) -> bytes:
    return tensor_bytes(CheckerNet(version))


def bucket_of(table: _store.TableConfig, key: int) -> int:
    return _store.hash_key(key) >> (64 - table.bucket_bits) if table.bucket_bits else 0


def records(table: _store.TableConfig, bucket: int, value: float) -> bytes:
    """All rows of a bucket, `value` in every dimension."""
    row = _store.encode_payload(table.layout, 1, np.full(DIM, value, np.float32))
    keys = [key for key in range(KEYS) if bucket_of(table, key) == bucket]
    return b"".join(_store.encode_record(key, 1, 0, row) for key in keys)


def changes(value: float, tables: Sequence[_store.TableConfig] = TABLES) -> list[Change]:
    return [
        (table, bucket, records(table, bucket, value))
        for table in tables
        for bucket in range(1 << table.bucket_bits)
    ]


class CheckerPublisher:
    """Publishes versions of the checker model; the first as a snapshot."""

    def __init__(self, folder: Path, bus: str | None, cache: Path) -> None:
        self.publication = Publication(folder)
        self.bus = bus
        self._cache = cache
        self._program(1)
        info = SnapshotInfo.of(CONFIG, lineage=0, version=0, watermark_ms=0)
        self.publisher = Publisher(
            self.publication, bus=bus, model=CONFIG.name, schema_id=schema_id(info, TABLES)
        )
        if self.publisher.newest is None:
            self.snapshot(1)
            self.publisher.adopt(1, watermark_ms=1, dense=dense_tensors(1))

    def _program(self, heads: int) -> Path:
        program = self.publication.program
        path = program if heads == 1 else program.with_name(f"heads-{heads}.pt2")
        if not path.exists():
            export_dense(
                CheckerNet(1, heads),
                path,
                dense_features=0,
                embedding_dim=2 * DIM,
                heads=heads,
                cache=self._cache,
            )
        return path

    def snapshot(self, version: int, config: ModelConfig = CONFIG) -> Path:
        lineage = self.publisher.lineage
        info = SnapshotInfo.of(config, lineage=lineage, version=version, watermark_ms=version)
        tables = [store_table(table, i, 1) for i, table in enumerate(config.tables)]
        path = self.publication.snapshot_path(VersionId(version, lineage))
        part = DensePart(
            program=self._program(config.outputs), cpu="x86-64-v3", tensors=dense_tensors(version)
        )
        write_snapshot(path, info, tables, changes(version, tables), part)
        return path

    def publish(self, version: int, rows: list[Change] | None = None) -> None:
        self.publisher.publish(
            version,
            watermark_ms=version,
            changes=changes(version) if rows is None else rows,
            dense=dense_tensors(version),
        )

    @property
    def newest(self) -> int:
        assert self.publisher.newest is not None
        return self.publisher.newest.number


@dataclasses.dataclass
class Findings:
    """The observations of the traffic."""

    answers: int = 0
    mixed: int = 0
    back: int = 0
    versions: set[int] = dataclasses.field(default_factory=set)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def add(self, version: int, mixed: bool, last: int) -> None:
        with self.lock:
            self.answers += 1
            self.mixed += mixed
            self.back += version < last
            self.versions.add(version)


OUTPUTS = {"rank": "SCORE", "look": "EMBEDDING"}


def check_once(
    client: Client,
    rng: np.random.Generator,
    findings: Findings,
    last: int,
    models: Sequence[str] = tuple(OUTPUTS),
) -> int:
    """One request to each model; returns the version of the later."""
    keys = rng.integers(0, KEYS, (16, 2))
    for model, output in ((model, OUTPUTS[model]) for model in models):
        result = client.send({"KEYS": keys}, model=model)
        version = int(result.as_numpy("VERSION").reshape(-1)[0])
        values: NDArray[Any] = result.as_numpy(output)
        findings.add(version, bool(np.any(values != version)), last if model == "rank" else 0)
        last = max(last, version) if model == "rank" else last
    return last


def write_models(
    repository: Path, publication: Path, bus: str | None, **options: Any
) -> tuple[str, str]:
    """Write the two models that follow the publication; returns their names."""
    for name, kind in (("rank", "ranking"), ("look", "lookup")):
        triton.write_model(
            repository,
            name,
            triton.ModelOptions(
                publication=publication,
                bus=bus,
                kind=kind,
                instances=2,
                max_batch_size=256,
                **options,
            ),
        )
    return ("rank", "look")


class Traffic:
    """Threads that check answers until told to stop."""

    def __init__(
        self,
        server: triton.TritonServer,
        threads: int = 3,
        models: Sequence[str] = tuple(OUTPUTS),
    ) -> None:
        self.models = models
        self.findings = Findings()
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(server, seed)) for seed in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, server: triton.TritonServer, seed: int) -> None:
        client = Client("grpc", server)
        rng = np.random.default_rng(seed)
        last = 0
        try:
            while not self._stop.is_set():
                last = check_once(client, rng, self.findings, last, self.models)
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        finally:
            client.raw.close()

    def stop(self) -> Findings:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self.findings
