"""Nets that look back, served: HSTU over 128 items beside target attention over ten.

Both are the best model of the news with equally many parameters (bench/train/sequences.py), stand
in one tritonserver and get requests with contexts: a user once, and its candidates. Nodes read the
histories, of which every place is taken. Rows and nets are drawn; no score means anything.
perf_analyzer asks both over gRPC, in turn.

Shapes: B candidates, R rows of a table, U users, L places of a history.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import tritonclient.grpc
from numpy.typing import NDArray

from bench import perf, report
from bench.models import bucket_records
from bench.rank.served import WINDOW_MS, Arrays, computed_once, jagged, scores_of, write_data
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError, make_backends, path_without_venv
from bench.train.sequences import ATTENTION, HSTU
from embertide import _store
from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.trainer.config import ModelConfig
from embertide.trainer.data.keys import buckets_of
from embertide.trainer.embedding.histories import history_rows
from embertide.trainer.embedding.store import store_tables
from embertide.trainer.model.build import build_net
from embertide.trainer.model.dlrm import Probability
from embertide.trainer.model.export import export_dense, tensor_bytes
from embertide.trainer.model.rewrite.package import contexts_of_model
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.snapshot import DensePart, SnapshotInfo, write_snapshot

_CLAIM = "F.5"
_SEED = 20_261_130
_ROWS, _USERS = 20_000, 2_000
_REQUESTS = 32
_P99 = 2.0  # of target attention's


def model(of: ModelConfig, length: int) -> ModelConfig:
    """Return a model with histories so long, published; all but the candidate is the user's."""
    (sequence,) = of.sequences
    return dataclasses.replace(
        of,
        sequences=(dataclasses.replace(sequence, length=length, published=True),),
        context=tuple(each.name for each in of.event_features if each.name != "cand"),
    )


MODELS = {
    "hstu128": model(HSTU.model, 128),
    "attention10": model(ATTENTION.model, 10),
}


def _buckets(
    config: ModelConfig, tables: Sequence[_store.TableConfig]
) -> Iterator[tuple[_store.TableConfig, int, bytes]]:
    rng = np.random.default_rng(_SEED)
    for table in tables[: len(config.tables)]:
        rows_Rd = rng.random((_ROWS, table.layout.dim), np.float32) - np.float32(0.5)
        yield from bucket_records(table, rows_Rd)
    for sequence, table in zip(config.sequences, tables[len(config.tables) :], strict=True):
        user_U = np.arange(_USERS, dtype=np.uint64)
        items_UL = rng.integers(0, _ROWS, (_USERS, sequence.length))
        times = len(sequence.gap_columns)
        gap_UT = np.cumsum(rng.exponential(600, (_USERS, times)), axis=1).astype(np.float32)
        rows_UK = history_rows(table.layout, items_UL, gap_UT)
        bucket_U = buckets_of(user_U, table.bucket_bits)
        for bucket in range(1 << table.bucket_bits):
            mine = bucket_U == bucket
            records = _store.encode_key_records(table.layout, user_U[mine], rows_UK[mine])
            yield table, bucket, records


def snapshot(name: str, config: ModelConfig) -> Path:
    """Return a drawn snapshot of a model: made, or the one that was made before."""
    folder = BUILD / "bench" / "models" / f"rank-{name}-{torch.__version__}"
    path = Publication(folder).snapshot_path(VersionId(1, 1))
    if path.is_dir():
        return path
    shutil.rmtree(folder, ignore_errors=True)
    path.parent.mkdir(parents=True)
    torch.manual_seed(_SEED)
    net = Probability(build_net(config)).eval()
    program = folder / "program.pt2"
    export_dense(
        net,
        program,
        dense_features=config.dense_columns,
        embedding_dim=sum(config.feature_widths),
        contexts=contexts_of_model(config),
        cache=BUILD / "cache" / "dense",
    )
    part = DensePart(program=program, cpu="x86-64-v3", tensors=tensor_bytes(net))
    tables = store_tables(config, _SEED)
    info = SnapshotInfo.of(config, lineage=1, version=1, watermark_ms=1)
    write_snapshot(path, info, tables, _buckets(config, tables), part)
    return path


@contextlib.contextmanager
def server(models: Mapping[str, ModelConfig]) -> Iterator[triton.TritonServer]:
    """Serve models, all in one tritonserver."""
    repository = BUILD / "bench" / "rank-histories"
    shutil.rmtree(repository, ignore_errors=True)
    for name, config in models.items():
        options = triton.ModelOptions(
            snapshot=snapshot(name, config),
            kind="ranking",
            max_batch_size=4096,
            context=config.context,
        )
        triton.write_model(repository, name, options)
    grpc_port, metrics_port = free_ports(2)
    started = triton.TritonServer(
        triton.ServerOptions(
            repository=repository,
            backends=make_backends(BUILD / "cpp" / "backends" / "embertide", built=()),
            log=BUILD / "bench" / "triton-rank-histories.log",
            models=tuple(models),
            explicit=True,
            environment={"PATH": path_without_venv()},
            grpc_port=grpc_port,
            metrics_port=metrics_port,
        )
    )
    with started:
        yield started


def requests(config: ModelConfig, candidates: int) -> list[Arrays]:
    """Draw users and candidates of each, the same in every run and for every model."""
    rng = np.random.default_rng(_SEED + candidates)
    made: list[Arrays] = []
    for _ in range(_REQUESTS):
        bags: list[NDArray[np.int64]] = [
            rng.integers(0, _USERS if name == "user" else _ROWS, 1) for name in config.context
        ]
        made.append(
            {
                **jagged("CONTEXT_", bags),
                "CANDIDATES": np.array([[candidates]], np.int32),
                "KEYS": rng.integers(0, _ROWS, (1, candidates)),
            }
        )
    return made


def rows(candidates: Sequence[int], repetitions: int) -> Iterator[report.Row]:
    """Measure both models at each number of candidates."""
    with server(MODELS) as started:
        for count in candidates:
            yield from _rows(started, count, repetitions)


def _rows(started: triton.TritonServer, candidates: int, repetitions: int) -> Iterator[report.Row]:
    data = {}
    for name, config in MODELS.items():
        drawn = requests(config, candidates)
        with tritonclient.grpc.InferenceServerClient(started.grpc) as client:
            scores_of(client, name, drawn[0])  # refuses those that are nearly all alike
        path = BUILD / "bench" / "data" / f"rank-{name}.json"
        data[name] = write_data(path, drawn, by_sample=False)
    series: dict[str, list[perf.Measured]] = {name: [] for name in MODELS}
    for _ in range(repetitions):
        for name, measured in series.items():
            load = perf.Load(model=name, url=started.grpc, data=data[name], window_ms=WINDOW_MS)
            measured.append(perf.run(load))
            rate, p99 = measured[-1].requests_per_s, measured[-1].latency_us_p99
            CONSOLE.print(f"[dim]{name}: {rate:,.1f}/s, p99 {p99:,.0f} us")
    if not all(computed_once(started, name) for name in MODELS):
        raise BenchError("the program for contexts was not run: see the log")
    ours, peer = series.values()
    case = f"HSTU over 128 items, one user x {candidates}"
    named = {"peer_name": "target attention over 10", "claim": _CLAIM}
    yield perf.compare_p99(case, ours, peer, target=_P99 if candidates == 256 else 0.0, **named)
    yield perf.compare_throughput(case, ours, peer, target=0.0, **named)
