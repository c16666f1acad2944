"""The dense net in reduced precision, served: whole requests beside fp32 and the Python backend.

Models over one snapshot's rows stand in one tritonserver, Criteo's DLRM with a package for each
type; their tensors say that it is within bounds, or, for fp32, beyond them. The peer is torch in
Triton's Python backend, whose net computes in bf16; its variants are tried first, and the fastest
counts. perf_analyzer asks all over gRPC, in turn.
"""

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import tritonclient.grpc
from numpy.typing import NDArray

from bench import keys, models, perf, report
from bench.report import CONSOLE
from bench.serve import write_data
from bench.servers import (
    BUILD,
    BenchError,
    Variant,
    make_backends,
    path_without_venv,
    write_model,
)
from bench.shapes import SEED, Shape
from embertide import _store
from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.server.cli.metrics_page import MetricsPage
from embertide.trainer.config import ReducedType
from embertide.trainer.eval.precision import Measurement
from embertide.trainer.model.dlrm import Dlrm, Probability
from embertide.trainer.model.export import export_dense

_CLAIM = "F.3"
_OF_FP32, _OF_PYTHON = 1.5, 1.2
_BATCHES = (1, 64, 256)
_WINDOW_MS, _PILOT_WINDOW_MS = 1000, 150
_SHAPE = Shape(name="criteo", rows=200_000)
_TYPES: tuple[ReducedType, ...] = ("bf16", "int8")
_FP32 = "fp32"
_AGREE = 0.01  # of a score, as runs bound it
_PEERS = tuple(
    Variant(side="python", kind="ranking", instances=n, threads=t, batching=b, form="bf16")
    for n, t, b in itertools.product((1, 2), (1, 2), (True, False))
)


def _snapshot(of: Path, name: str, kind: ReducedType, *, taken: bool) -> Path:
    """Copy a snapshot, its rows as links, with the package that has a program in a type."""
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
        reduced_to=kind,
        cache=BUILD / "cache" / "dense",
    )
    why = "" if taken else "the bench's fp32"
    measured = Measurement(type=kind, events=1, auc=0.5, auc_loss=0.0, max_error=0.0, why=why)
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
    files = models.make(_SHAPE, BUILD)
    repository = BUILD / "bench" / "reduced"
    shutil.rmtree(repository, ignore_errors=True)
    for name, kind in ((_FP32, _TYPES[0]), *((each, each) for each in _TYPES)):
        model = triton.ModelOptions(
            snapshot=_snapshot(files.snapshot, name, kind, taken=name == kind),
            kind="ranking",
            instances=2,
            ddr_budget_bytes=2 << 30,
        )
        triton.write_model(repository, name, model)
    for peer in _PEERS:
        write_model(repository, peer, _SHAPE, files)
    grpc_port, metrics_port = free_ports(2)
    options = triton.ServerOptions(
        repository=repository,
        backends=make_backends(BUILD / "cpp" / "backends" / "embertide", built=()),
        log=BUILD / "bench" / "triton-reduced.log",
        models=(_FP32, *_TYPES),
        explicit=True,
        environment={"PATH": path_without_venv()},
        grpc_port=grpc_port,
        metrics_port=metrics_port,
    )
    with triton.TritonServer(options) as server:
        yield server


def rows(repetitions: int, batches: Sequence[int] = _BATCHES) -> Iterator[report.Row]:
    """Measure each batch.

    Raises:
        BenchError: This CPU lacks a type, or answers differ.
    """
    with _server() as server:
        page = MetricsPage(server.metrics())
        for kind in _TYPES:
            if not page.sum("embertide_dense_reduced", model=kind):
                raise BenchError(
                    f"the node computes in fp32: this CPU has no instructions of {kind}"
                )
        with contextlib.closing(tritonclient.grpc.InferenceServerClient(server.grpc)) as client:
            for batch in batches:
                peer = _fastest(server, client, batch)
                _check(client, peer, batch)
                yield from _rows(server, peer, batch, repetitions)
                client.unload_model(peer.model)


def _measure(server: triton.TritonServer, model: str, batch: int, window_ms: int) -> perf.Measured:
    data = write_data(_SHAPE, "ranking", batch)
    measured = perf.run(
        perf.Load(model=model, url=server.grpc, data=data, batch=batch, window_ms=window_ms)
    )
    CONSOLE.print(f"[dim]{model} b{batch}: {measured.requests_per_s:,.0f}/s")
    return measured


def _fastest(
    server: triton.TritonServer, client: tritonclient.grpc.InferenceServerClient, batch: int
) -> Variant:
    """Return the peer's fastest variant, loaded."""
    rates = {}
    for variant in _PEERS:
        client.load_model(variant.model)
        rates[variant] = _measure(server, variant.model, batch, _PILOT_WINDOW_MS).requests_per_s
        client.unload_model(variant.model)
    best = max(rates, key=lambda each: rates[each])
    client.load_model(best.model)
    return best


def _check(client: tritonclient.grpc.InferenceServerClient, peer: Variant, batch: int) -> None:
    """Prove that all answer alike, and that those in a reduced type are not fp32's."""

    def answer(model: str) -> NDArray[np.float32]:
        keys_BFL, dense_BD = keys.draw(_SHAPE, batch)
        inputs = []
        for name, array, dtype in (
            ("KEYS", keys_BFL[:, :, 0], "INT64"),
            ("DENSE", dense_BD, "FP32"),
        ):
            tensor = tritonclient.grpc.InferInput(name, array.shape, dtype)
            tensor.set_data_from_numpy(np.ascontiguousarray(array))
            inputs.append(tensor)
        return np.asarray(client.infer(model, inputs).as_numpy("SCORE"), np.float32).reshape(-1)

    exact = answer(_FP32)
    for name in (*_TYPES, peer.model):
        worst = float(np.abs(answer(name) - exact).max())
        if worst > _AGREE:
            raise BenchError(f"{name} and fp32 differ by {worst:.2g}, batch {batch}")
        if worst == 0 and batch > 1:
            raise BenchError(f"{name} answers as fp32 does, batch {batch}: it is not used")
        CONSOLE.print(f"{name} and fp32 agree within {worst:.2g}, batch {batch}")


def _rows(
    server: triton.TritonServer, peer: Variant, batch: int, repetitions: int
) -> Iterator[report.Row]:
    series: dict[str, list[perf.Measured]] = {each: [] for each in (*_TYPES, _FP32, peer.model)}
    for _ in range(repetitions):
        for name, measured in series.items():
            measured.append(_measure(server, name, batch, _WINDOW_MS))
    python = f"Triton Python backend, torch in bf16 ({peer.label})"
    for kind in _TYPES:
        case, ours = f"Criteo's DLRM in {kind}, batch {batch}", series[kind]
        peers = {_FP32: (series[_FP32], _OF_FP32), python: (series[peer.model], _OF_PYTHON)}
        for name, (other, target) in peers.items():
            bar = target if batch > 1 else 0.0
            yield perf.compare_throughput(
                case, ours, other, peer_name=name, target=bar, claim=_CLAIM
            )
            yield perf.compare_p99(case, ours, other, peer_name=name, target=1.0, claim=_CLAIM)
    yield perf.compare_throughput(
        f"Criteo's DLRM in int8, batch {batch}",
        series["int8"],
        series["bf16"],
        peer_name="bf16",
        target=0.0,
        claim=_CLAIM,
    )
