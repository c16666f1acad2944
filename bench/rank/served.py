"""One user and many candidates, served: the request with contexts beside the one that repeats them.

Two models of one snapshot stand in one tritonserver, behind our front end. `whole` gets the user's
columns with each candidate, which is all that a model without contexts can be sent; `once` gets
them once, and its dense program computes once what depends on them alone. Beside `production` there
are `python` (bench/rank/python_peer.py), which gets what `whole` gets, and programs of AOTInductor
in C++ (bench/rank/aoti_peer.py), in which the user's part is written by hand; of their forms the
one with the highest rate counts. perf_analyzer asks all over gRPC, in turn. Before that their
scores must agree.

Shapes: B candidates, F columns that a request carries.
"""

import dataclasses
import functools
import json
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.grpc
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

from bench import perf, report
from bench.models import bucket_records
from bench.rank import aoti_peer
from bench.rank.dense import Case, cases
from bench.report import CONSOLE
from bench.servers import (
    BUILD,
    BenchError,
    make_backends,
    path_without_venv,
    write_python,
)
from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.server.cli.metrics_page import MetricsPage
from embertide.trainer.config import FeatureConfig, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.embedding.store import store_table
from embertide.trainer.model.dlrm import Dlrm, Probability
from embertide.trainer.model.export import export_dense, tensor_bytes
from embertide.trainer.model.rewrite.package import contexts_of_model
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.snapshot import DensePart, SnapshotInfo, write_snapshot
from embertide.trainer.run.loop import Trainer

Arrays = Mapping[str, NDArray[Any]]

_CLAIM = "F.1"
_SEED = 20_261_129
_REQUESTS = 32  # distinct ones of a case; perf_analyzer sends them in a circle
WINDOW_MS = 1500
_AGREE, _AGREE_TORCH = 1e-6, 1e-5  # of the largest score; torch's own sums are in another order
_ROWS, _BAG, _BAGS = 20_000, 50, 5  # of `production`: rows of a table, and features that are bags
_NEWS = NewsSource(NewsConfig(hours=6, views_per_hour=4000))
# Issue F: requests a second, of today's; of `production` at 256 candidates.
_TARGETS = {"production": 3.0, "news": 1.5, "news-crossed": 1.5}
_PYTHON, _AOTI, _P99, _BYTES, _KEYS = 4.0, 1.0, 0.6, 3.0, 5.0
_INSTANCES, _AOTI_THREADS = 2, 1  # of every model


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A user and its candidates.

    Attributes:
        bags: Keys of the user's columns, by name.
        candidates: Keys of the other columns, [B] by name: one a candidate.
    """

    bags: Mapping[str, NDArray[np.int64]]
    candidates: Mapping[str, NDArray[np.int64]]


class Model:
    """A case's snapshot, and requests of it."""

    def __init__(self, case: Case) -> None:
        """Take a case; its snapshot is made when it is first asked for."""
        own = [each for each in case.config.columns if not _is_made(case, each)]
        self.name = case.name
        self.context = tuple(each.name for each in own if each.name not in case.candidate)
        self.features = tuple(each.name for each in own)
        self._config = dataclasses.replace(case.config, context=self.context)
        self._is_news = case.name != "production"

    @functools.cached_property
    def snapshot(self) -> Path:
        """Its snapshot: made, or the one that was made before."""
        folder = BUILD / "bench" / "models" / f"rank-{self.name}-{torch.__version__}"
        publication = Publication(folder)
        if not publication.snapshots():
            shutil.rmtree(folder, ignore_errors=True)
            self._train(publication) if self._is_news else self._draw(publication)
        return publication.snapshot_path(publication.snapshots()[-1])

    def _train(self, publication: Publication) -> None:
        run = RunConfig(model=self._config, publish_every_s=3600, snapshot_every=99)
        Trainer(run, publication, program_cache=BUILD / "cache" / "dense").fit(_NEWS)

    def _draw(self, publication: Publication) -> None:
        torch.manual_seed(_SEED)
        config, net = self._config, Probability(Dlrm(self._config)).eval()
        publication.path.mkdir(parents=True)
        export_dense(
            net,
            publication.program,
            dense_features=config.dense_columns,
            embedding_dim=sum(config.feature_widths),
            contexts=contexts_of_model(config),
            cache=BUILD / "cache" / "dense",
        )
        part = DensePart(program=publication.program, cpu="x86-64-v3", tensors=tensor_bytes(net))
        rng = np.random.default_rng(_SEED)
        tables = [store_table(table, i, _SEED) for i, table in enumerate(config.tables)]
        size = (len(tables), _ROWS, config.tables[0].dim)
        rows_TRd = rng.random(size, np.float32) - np.float32(0.5)
        peer = publication.path / "peer"
        peer.mkdir()
        np.save(peer / "tables.npy", rows_TRd)
        (peer / "net.safetensors").write_bytes(part.tensors)
        buckets = (each for table in tables for each in bucket_records(table, rows_TRd[table.id]))
        info = SnapshotInfo.of(config, lineage=1, version=1, watermark_ms=1)
        (publication.path / "snapshots").mkdir(exist_ok=True)
        write_snapshot(publication.snapshot_path(VersionId(1, 1)), info, tables, buckets, part)

    @property
    def peer(self) -> Path | None:
        """The model that the Python peer loads; None: it has no such model."""
        return None if self._is_news else self.snapshot.parent.parent / "peer"

    def requests(self, candidates: int) -> Iterator[Request]:
        """Draw users and their candidates, the same in every run."""
        rng = np.random.default_rng(_SEED + candidates)
        others = [name for name in self.features if name not in self.context]
        batch = next(_NEWS.batches(batch_size=4096, start=0)) if self._is_news else None
        for n in range(_REQUESTS):
            if batch is None:
                bags = {
                    name: rng.integers(0, _ROWS, _BAG if i < _BAGS else 1)
                    for i, name in enumerate(self.context)
                }
                shown = {name: rng.integers(0, _ROWS, candidates) for name in others}
            else:
                column = dict(zip(self.features, batch.keys_BF.T, strict=False))
                bags = {name: column[name][n * 97 : n * 97 + 1] for name in self.context}
                shown = {name: rng.choice(column[name], candidates) for name in others}
            yield Request(bags=bags, candidates=shown)

    def whole(self, request: Request) -> Arrays:
        """Return the request that has all columns in each candidate."""
        count = len(next(iter(request.candidates.values())))
        if self._is_news:
            columns = [
                np.repeat(request.bags[name], count)
                if name in request.bags
                else request.candidates[name]
                for name in self.features
            ]
            return {"KEYS": np.stack(columns, axis=1)}
        bags = [
            request.bags[name] if name in request.bags else request.candidates[name][b : b + 1]
            for b in range(count)
            for name in self.features
        ]
        return jagged("", bags)

    def by_hand(self, request: Request) -> Arrays:
        """Return the request of `aoti_peer`: keys of the user, and of candidates."""
        shown = [request.candidates[name] for name in self.features if name not in self.context]
        user = np.concatenate([request.bags[name] for name in self.context])
        return {"USER": user[None], "KEYS": np.stack(shown, axis=1)}

    def once(self, request: Request) -> Arrays:
        """Return the request that has the user's columns once."""
        columns = [request.candidates[name] for name in self.features if name not in self.context]
        count = len(columns[0])
        return {
            **jagged("CONTEXT_", [request.bags[name] for name in self.context]),
            "CANDIDATES": np.array([[count]], np.int32),
            "KEYS": np.stack(columns, axis=1).reshape(1, -1),
            **({} if self._is_news else {"LENGTHS": np.ones((1, count * len(columns)), np.int32)}),
        }


def _by_name(model: Model, name: str, request: Request) -> Arrays:
    """Return what the model of a name is sent."""
    if name == "once":
        return model.once(request)
    return model.by_hand(request) if name.startswith("aoti") else model.whole(request)


def _is_made(case: Case, feature: FeatureConfig) -> bool:
    made = {name for each in case.config.sequences if each.published for name in each.columns}
    return bool(feature.crossed) or feature.name in made


def jagged(prefix: str, bags: Sequence[NDArray[np.int64]]) -> Arrays:
    """Return the inputs of bags: their keys, and how many each has."""
    return {
        f"{prefix}KEYS": np.concatenate(bags)[None],
        f"{prefix}LENGTHS": np.array([[len(bag) for bag in bags]], np.int32),
    }


def _write_python_model(directory: Path, weights: Path) -> None:
    (directory / "1").mkdir(parents=True)
    write_python(directory / "1" / "model.py", "bench.rank.python_peer")
    ragged = "dims: [ -1 ] allow_ragged_batch: true"
    lines = [
        'name: "python"',
        'backend: "python"',
        "max_batch_size: 64",
        f'input [ {{ name: "KEYS" data_type: TYPE_INT64 {ragged} }} ]',
        f'input [ {{ name: "LENGTHS" data_type: TYPE_INT32 {ragged} }} ]',
        'output [ { name: "SCORE" data_type: TYPE_FP32 dims: [ -1 ] } ]',
        f"instance_group [ {{ count: {_INSTANCES} kind: KIND_CPU }} ]",
        f'parameters {{ key: "directory" value: {{ string_value: "{weights}" }} }}',
    ]
    (directory / "config.pbtxt").write_text("\n".join(lines) + "\n")


def _write_aoti_model(
    directory: Path, form: str, candidates: int | None, model: Model, weights: Path
) -> None:
    (directory / "1").mkdir(parents=True)
    users = len(model.context)
    program = aoti_peer.program(
        weights,
        users=users,
        bags=_BAGS,
        bag=_BAG,
        form=form,
        threads=_AOTI_THREADS,
        candidates=candidates,
    )
    keys = _BAGS * _BAG + users - _BAGS
    parameters = {
        "program": program,
        "inputs": "USER,KEYS",
        "instances": _INSTANCES,
        "threads": _AOTI_THREADS,
    }
    lines = [
        f'name: "{directory.name}"',
        'backend: "aoti"',
        "max_batch_size: 0",  # a request is an execution: each has a user of its own
        f'input [ {{ name: "USER" data_type: TYPE_INT64 dims: [ 1, {keys} ] }} ]',
        'input [ { name: "KEYS" data_type: TYPE_INT64 dims: [ -1, '
        f"{len(model.features) - users} ] }} ]",
        'output [ { name: "SCORE" data_type: TYPE_FP32 dims: [ -1, 1 ] } ]',
        f"instance_group [ {{ count: {_INSTANCES} kind: KIND_CPU }} ]",
        *(
            f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
            for key, value in parameters.items()
        ),
    ]
    (directory / "config.pbtxt").write_text("\n".join(lines) + "\n")


def scores_of(
    client: tritonclient.grpc.InferenceServerClient, name: str, arrays: Arrays
) -> NDArray[np.float32]:
    """Return a model's scores of a request, flat.

    Raises:
        BenchError: They are nearly all alike.
    """
    inputs = []
    for tensor, array in arrays.items():
        kind = np_to_triton_dtype(array.dtype)
        inputs.append(tritonclient.grpc.InferInput(tensor, array.shape, kind))
        inputs[-1].set_data_from_numpy(np.ascontiguousarray(array))
    scores = np.asarray(client.infer(name, inputs).as_numpy("SCORE"), np.float32).ravel()
    if len(np.unique(scores)) < len(scores) / 4:
        raise BenchError(f"{name}: {len(scores)} scores are nearly all alike")
    return scores


def computed_once(server: triton.TritonServer, name: str) -> float:
    """Return the candidates of a model whose context the dense net computed once."""
    page = MetricsPage(server.metrics())
    of = "candidates_in_context_program"
    return page.sum("embertide_contexts_total", model=name, of=of)


class Server:
    """The models of a case in one tritonserver. A context manager."""

    def __init__(self, model: Model, candidates: Sequence[int]) -> None:
        """Start it and load them.

        Args:
            model: The case's.
            candidates: Numbers of candidates that requests may have.
        """
        self.model = model
        repository = BUILD / "bench" / "rank-repository"
        shutil.rmtree(repository, ignore_errors=True)
        repository.mkdir(parents=True)
        for name, context in (("whole", None), ("once", model.context)):
            options = triton.ModelOptions(
                snapshot=model.snapshot,
                kind="ranking",
                instances=_INSTANCES,
                max_batch_size=4096,
                max_keys=1 << 20,  # 1,024 candidates with all of a user's bags
                context=context,
            )
            triton.write_model(repository, name, options)
        self.names = ["once", "whole"]
        if model.peer is not None:
            self.names.append("python")
            _write_python_model(repository / "python", model.peer)
            for count in (None, *candidates):
                self.names.append(f"aoti_{count or 'any'}")
                form = "tuned" if count else "rows"
                _write_aoti_model(repository / self.names[-1], form, count, model, model.peer)
        grpc_port, metrics_port = free_ports(2)
        self._triton = triton.TritonServer(
            triton.ServerOptions(
                repository=repository,
                backends=make_backends(BUILD / "cpp" / "backends" / "embertide", built=("aoti",)),
                log=BUILD / "bench" / f"triton-rank-{model.name}.log",
                models=tuple(self.names),
                explicit=True,
                environment={"PATH": path_without_venv()},
                grpc_port=grpc_port,
                metrics_port=metrics_port,
            )
        )
        self.client = tritonclient.grpc.InferenceServerClient(self._triton.grpc)

    def names_for(self, candidates: int) -> list[str]:
        """Return the models that a request of so many candidates can be sent to."""
        return [
            name
            for name in self.names
            if not name.startswith("aoti_") or name in ("aoti_any", f"aoti_{candidates}")
        ]

    def __enter__(self) -> "Server":
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop it."""
        self.client.close()
        self._triton.stop()

    def scores(self, name: str, arrays: Arrays) -> NDArray[np.float32]:
        """Return the scores of a request, flat."""
        return scores_of(self.client, name, arrays)

    def counted(self) -> float:
        """Return the candidates whose context the dense net of `once` computed once."""
        return computed_once(self._triton, "once")

    def measure(self, name: str, data: Path, batch: int) -> perf.Measured:
        """Run perf_analyzer once."""
        load = perf.Load(
            model=name, url=self._triton.grpc, data=data, batch=batch, window_ms=WINDOW_MS
        )
        measured = perf.run(load)
        rate, p99 = measured.requests_per_s, measured.latency_us_p99
        CONSOLE.print(f"[dim]{self.model.name} {name}: {rate:,.1f}/s, p99 {p99:,.0f} us")
        return measured


def write_data(path: Path, requests: Sequence[Arrays], *, by_sample: bool) -> Path:
    """Write perf_analyzer's JSON; rectangular samples stand one by one."""
    entries = []
    for arrays in requests:
        flat = {
            name: {
                "content": array.ravel().tolist(),
                "shape": list(array.shape) if "USER" in arrays else [array.size],
            }
            for name, array in arrays.items()
        }
        if by_sample:
            rows = arrays["KEYS"]
            entries += [{"KEYS": {"content": row.tolist(), "shape": [len(row)]}} for row in rows]
        else:
            entries.append(flat)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"data": entries}, separators=(",", ":")))
    return path


def _bytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


def _keys(arrays: Arrays) -> int:
    return sum(array.size for name, array in arrays.items() if name.endswith("KEYS"))


def _check(server: Server, requests: Sequence[Request]) -> dict[str, float]:
    """Prove that `once` gives the scores of the others; return the largest difference by name.

    Raises:
        BenchError: It does not.
    """
    model = server.model
    count = len(next(iter(requests[0].candidates.values())))
    worst = dict.fromkeys(server.names_for(count)[1:], 0.0)
    for request in requests[:4]:
        once = server.scores("once", model.once(request))
        for name in worst:
            other = server.scores(name, _by_name(model, name, request))
            off = float(np.abs(other - once).max() / np.abs(other).max())
            worst[name] = max(worst[name], off)
    if worst["whole"] > _AGREE or max(worst.values()) > _AGREE_TORCH:
        raise BenchError(f"{model.name}: scores differ, as a share of the largest, by {worst}")
    return worst


def rows(candidates: Sequence[int], repetitions: int) -> Iterator[report.Row]:
    """Measure each model at each number of candidates."""
    for case in cases():
        model = Model(case)
        with Server(model, candidates) as server:
            for count in candidates:
                yield from _rows(server, count, repetitions)


def _rows(server: Server, candidates: int, repetitions: int) -> Iterator[report.Row]:
    model = server.model
    requests = list(model.requests(candidates))
    worst = _check(server, requests)
    repeated, single = [[make(each) for each in requests] for make in (model.whole, model.once)]
    rectangular = "LENGTHS" not in repeated[0]
    data = {
        name: write_data(
            BUILD / "bench" / "data" / f"rank-{name}.json",
            [_by_name(model, name, each) for each in requests],
            by_sample=rectangular and name == "whole",
        )
        for name in server.names_for(candidates)
    }
    series: dict[str, list[perf.Measured]] = {name: [] for name in data}
    for _ in range(repetitions):
        for name, measured in series.items():
            batch = candidates if name == "whole" and rectangular else 1
            measured.append(server.measure(name, data[name], batch))
    if not server.counted():
        raise BenchError(f"{model.name}: the program for contexts was not run: see the log")
    case = f"{model.name}, one user x {candidates}"
    named: Any = {"peer_name": "today's: all columns in each candidate", "claim": _CLAIM}
    target = _TARGETS[model.name] if candidates == 256 or model.name != "production" else 0.0
    ours, peer = series["once"], series["whole"]
    yield perf.compare_throughput(case, ours, peer, target=target, **named)
    yield perf.compare_p99(case, ours, peer, target=_P99, **named)
    if "python" in series:
        bar = _PYTHON if candidates == 256 else 0.0
        python: Any = {"peer_name": "Python backend that repeats the user", "claim": _CLAIM}
        yield perf.compare_throughput(case, ours, series["python"], target=bar, **python)
        fastest = max(
            (name for name in series if name.startswith("aoti")),
            key=lambda name: statistics.median(each.requests_per_s for each in series[name]),
        )
        by_hand: Any = {"peer_name": f"AOTInductor by hand, {fastest}", "claim": _CLAIM}
        yield perf.compare_throughput(case, ours, series[fastest], target=_AOTI, **by_hand)
        yield perf.compare_p99(case, ours, series[fastest], target=0, **by_hand)
    for what, unit, count, bar in (
        ("tensors of a request", "bytes", _bytes, _BYTES),
        ("keys of a request", "keys", _keys, _KEYS),
    ):
        yield report.compare(
            (case, what, unit),
            [float(count(each)) for each in single],
            [float(count(each)) for each in repeated],
            better="lower",
            target=round(1 / bar, 4),
            **named,
        )
    yield report.compare(
        (case, "largest difference of scores", "1e-9 of the largest"),
        [worst["whole"] * 1e9],
        [1.0],
        peer_name="",
        better="lower",
        target=_AGREE * 1e9,
        claim="F.2",
    )
