"""The dense net in bf16, served: whole requests beside the same in fp32.

Two models over one snapshot's rows stand in one tritonserver, Criteo's DLRM with one package; the
tensors of one say that bf16 is within bounds. perf_analyzer asks both over gRPC, in turn.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import safetensors.torch
import torch

from bench import models, perf, report
from bench.report import CONSOLE
from bench.serve import write_data
from bench.servers import BUILD, BenchError, make_backends, path_without_venv
from bench.shapes import SEED, Shape
from embertide import _store
from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.server.cli.metrics_page import MetricsPage
from embertide.trainer.eval.precision import Measurement
from embertide.trainer.model.dlrm import Dlrm, Probability
from embertide.trainer.model.export import export_dense

_CLAIM = "F.3"
_RATIO = 1.5
_BATCHES = (1, 64, 256)
_WINDOW_MS = 1000
_SHAPE = Shape(name="criteo", rows=200_000)


def _snapshot(of: Path, name: str, *, taken: bool) -> Path:
    """Copy a snapshot, its rows as links, with the package that has a program in bf16."""
    snapshot = BUILD / "bench" / "models" / f"criteo-{name}-{torch.__version__}"
    shutil.rmtree(snapshot, ignore_errors=True)
    shutil.copytree(of, snapshot, copy_function=os.link)
    config = _SHAPE.config()
    torch.manual_seed(SEED)
    program = snapshot / "made.pt2"
    export_dense(
        Probability(Dlrm(config)),
        program,
        dense_features=config.dense_features,
        embedding_dim=sum(config.feature_dims),
        with_bf16=True,
        cache=BUILD / "cache" / "dense",
    )
    measured = Measurement(
        events=1, auc=0.5, auc_loss=0.0, max_error=0.0, why="" if taken else "the bench's fp32"
    )
    tensors = safetensors.torch.load((of / "dense" / "tensors.safetensors").read_bytes())
    data = {
        "program": program.read_bytes(),
        "tensors": safetensors.torch.save(tensors, measured.metadata()),
    }
    program.unlink()
    manifest = json.loads((snapshot / "manifest.json").read_text())
    for part in manifest["dense"]:
        if part["role"] in data:
            path, bytes_ = snapshot / part["path"], data[part["role"]]
            path.unlink()  # a link
            path.write_bytes(bytes_)
            part |= {"bytes": len(bytes_), "crc32c": _store.crc32c(bytes_)}
    (snapshot / "manifest.json").unlink()
    (snapshot / "manifest.json").write_text(_store.check_manifest(json.dumps(manifest)))
    return snapshot


@contextlib.contextmanager
def _server() -> Iterator[triton.TritonServer]:
    snapshot = models.make(_SHAPE, BUILD).snapshot
    repository = BUILD / "bench" / "bf16"
    shutil.rmtree(repository, ignore_errors=True)
    for name in ("bf16", "fp32"):
        model = triton.ModelOptions(
            snapshot=_snapshot(snapshot, name, taken=name == "bf16"),
            kind="ranking",
            instances=2,
            ddr_budget_bytes=2 << 30,
        )
        triton.write_model(repository, name, model)
    grpc_port, metrics_port = free_ports(2)
    options = triton.ServerOptions(
        repository=repository,
        backends=make_backends(BUILD / "cpp" / "backends" / "embertide", built=()),
        log=BUILD / "bench" / "triton-bf16.log",
        models=("bf16", "fp32"),
        explicit=True,
        environment={"PATH": path_without_venv()},
        grpc_port=grpc_port,
        metrics_port=metrics_port,
    )
    with triton.TritonServer(options) as server:
        yield server


def rows(repetitions: int) -> Iterator[report.Row]:
    """Measure each batch.

    Raises:
        BenchError: This CPU has no bf16.
    """
    with _server() as server:
        page = MetricsPage(server.metrics())
        if not page.sum("embertide_dense_bf16", model="bf16"):
            raise BenchError("the node computes in fp32: this CPU has neither AVX512-BF16 nor AMX")
        for batch in _BATCHES:
            yield from _rows(server, batch, repetitions)


def _rows(server: triton.TritonServer, batch: int, repetitions: int) -> Sequence[report.Row]:
    data = write_data(_SHAPE, "ranking", batch)
    series: dict[str, list[perf.Measured]] = {"bf16": [], "fp32": []}
    for _ in range(repetitions):
        for name, measured in series.items():
            load = perf.Load(
                model=name, url=server.grpc, data=data, batch=batch, window_ms=_WINDOW_MS
            )
            measured.append(perf.run(load))
            CONSOLE.print(f"[dim]{name} b{batch}: {measured[-1].requests_per_s:,.0f}/s")
    case, peer = f"Criteo's DLRM, batch {batch}", "fp32"
    target = _RATIO if batch > 1 else 0.0
    ours, exact = series["bf16"], series["fp32"]
    return (
        perf.compare_throughput(case, ours, exact, peer_name=peer, target=target, claim=_CLAIM),
        perf.compare_p99(case, ours, exact, peer_name=peer, target=1.0, claim=_CLAIM),
    )
