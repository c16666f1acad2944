"""Measures what a training step costs on this machine: by steps that are taken, and part by part.

All ranks take some steps together, as a run does, and nothing is published. Then each measures its
parts by themselves, all at the same time, as they share cores in a run. What the parts do not
explain of the measured step counts once a step (`WorkProfile.step_s`).

Shapes: B events of a part, F columns of KEYS, P buckets, U distinct keys, D of a row.
"""

import contextlib
import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from embertide import _store
from embertide.trainer.config import Codec, RunConfig
from embertide.trainer.config.sync import AsynchronousSync
from embertide.trainer.data.base import Batch
from embertide.trainer.data.keys import buckets_of
from embertide.trainer.embedding.store import store_table
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.learner import Learner, Prepared, part_of
from embertide.trainer.run.step_spans import StepSpans
from embertide.trainer.sync import codec
from embertide.trainer.sync.codec import Block
from embertide.trainer.sync.hot import COUNTED_EVERY, AskCounts
from embertide.trainer.sync.placing.profile import (
    HotKey,
    LayerProfile,
    Profile,
    RankProfile,
    TableProfile,
    WorkProfile,
)
from embertide.trainer.sync.placing.step import StepModel, Strategy
from embertide.trainer.sync.plan import Ownership
from embertide.trainer.sync.ranks import Ranks

MIN_BATCHES = 4
_REPETITIONS = 9
_PARTS = (1, 2, 4, 8, 16, 32, 64)  # of a batch, in which distinct keys are counted
_COUNTED = 8  # batches in which they are
_HOT_KEYS = 4096  # of a profile, at most
_HOT_ASKS = 4  # of a key in the batches that are counted, from where on its share is one
_SMALL_BYTES = 1 << 10
_MIN_BYTES, _MAX_BYTES = 64 << 10, 4 << 20  # by which bandwidth is measured
_CODED = 1 << 18  # numbers that codecs are measured by
_CODECS: tuple[Codec, ...] = ("fp16", "bf16", "int8")
_ALONE = RankProfile(bytes_per_s=1e9, latency_s=1e-4, sum_bytes_per_s=1e9)
"""Profile of a rank without others, which has no link: any prediction for more says that."""


def machine() -> str:
    """Return this machine in words: a profile of another one is refused."""
    model = platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        lines = (line.partition(":") for line in facts.read_text(encoding="utf-8").splitlines())
        model = next(
            (value.strip() for name, _, value in lines if name.startswith("model name")), model
        )
    return f"{model}, {os.cpu_count()} cores"


def measure(
    run: RunConfig,
    batches: Sequence[Batch],
    ranks: Ranks,
    *,
    owners: Ownership | None = None,
    step_s: float = 0.0,
) -> Profile:
    """Take a step for each batch, and return the profile, the same on all ranks.

    Args:
        run: Its rows begin empty; nothing is published.
        batches: Batches of the run's events, four or more; all ranks give the same.
        ranks: Those that take steps together.
        owners: Who owns what; None: as in a fresh run without a plan.
        step_s: A step of the run itself, as it was measured, with its hot rows; 0: the steps taken
            here say, which have none.

    Raises:
        ConfigurationError: There are too few batches, or the run is one whose steps cannot be
            measured so: with lists, sequences or a strategy whose ranks are apart.
        RankLostError: A rank is gone.
    """
    check_run(run)
    _check_batches(run, batches)
    if owners is not None and any(map(owners.columns, range(len(run.model.tables)))):
        raise ConfigurationError(
            "the plan has column-wise tables, whose steps no profile predicts: measure with a plan"
            " without columns"
        )
    assert not isinstance(run.sync, AsynchronousSync)
    hot_rows = hot_rows_of(run, owners) if step_s else 0
    # A row is hot from a run's first version on, and nothing is published here.
    if owners is not None:
        owners = dataclasses.replace(owners, hot_rows=0)
    learner = Learner(dataclasses.replace(run, hot_rows=0), ranks, owners)
    batches = list(learner.warm_up(iter(batches)))
    spans = StepSpans(learner)
    took_s = take_steps(learner, batches, spans)
    batch = batches[-1]
    begin, end = part_of(batch, ranks.rank, ranks.size)
    work, layers = _work(learner, batch, begin, end)
    mine = {
        "work": dataclasses.asdict(work),
        "layers": [dataclasses.asdict(layer) for layer in layers],
        "link": dataclasses.asdict(_link(ranks, _row_bytes(learner, batch, ranks))),
        "spans": spans.found,
    }
    every = ranks.channel("profile").gather(mine)
    first = WorkProfile(**every[0]["work"])
    profile = Profile(
        machine=machine(),
        cores=_cores(),
        events=len(batch),
        tables=_tables(run, batches, ranks.size),
        layers=tuple(LayerProfile(**layer) for layer in every[0]["layers"]),
        rows_enter=_rows_enter(layers),
        ranks=tuple(
            dataclasses.replace(
                RankProfile(**each["link"]),
                paces=(paces := _paces(every[0], each)),
                pace=statistics.median(paces.values()) if paces else 1.0,
            )
            for each in every
        ),
        work=first,
        budget_bytes=run.ddr_budget_bytes,
        step_s=max(ranks.channel("profile").gather(step_s or took_s)),
        measured=tuple(tuple(span) for each in every for span in each["spans"]),
        hot=_hot(run, batches, ranks.size),
        version_steps=_version_steps(run, batches),
    )
    measured = dataclasses.replace(learner.rows.ownership, hot_rows=hot_rows)
    return _explained(profile, Strategy(measured, run.sync, run.codecs))


def hot_rows_of(run: RunConfig, owners: Ownership | None) -> int:
    """Return how many rows may be hot: as a plan says, or else the run."""
    planned = None if owners is None else owners.hot_rows
    return run.hot_rows if planned is None else planned


def _explained(profile: Profile, strategy: Strategy) -> Profile:
    """Return a profile by which a strategy's step takes what was measured.

    What the parts lack of it counts once a step. Parts that take longer by themselves than the step
    did, as others were at work meanwhile, are all taken to have taken less.
    """
    parts_s = StepModel(profile, len(profile.ranks)).step_s(strategy)
    work = profile.work
    if parts_s > profile.step_s:
        share = profile.step_s / parts_s
        codec_s = {name: share * cost for name, cost in work.codec_s.items()}
        costs = dataclasses.asdict(work)
        work = WorkProfile(
            **{n: share * c for n, c in costs.items() if n != "codec_s"}, codec_s=codec_s
        )
        layers = tuple(
            dataclasses.replace(
                layer, forward_s=share * layer.forward_s, backward_s=share * layer.backward_s
            )
            for layer in profile.layers
        )
        profile = dataclasses.replace(profile, work=work, layers=layers)
        parts_s = StepModel(profile, len(profile.ranks)).step_s(strategy)
    rest_s = max(0.0, profile.step_s - parts_s)
    return dataclasses.replace(profile, work=dataclasses.replace(work, step_s=rest_s))


def check_run(run: RunConfig) -> None:
    """Refuse a run whose steps cannot be measured.

    Raises:
        ConfigurationError: The message says why.
    """
    if isinstance(run.sync, AsynchronousSync):
        raise ConfigurationError(
            f"sync is {type(run.sync).__name__}, whose ranks take no step together: measure with"
            " AllReduce() or DCT()"
        )
    if run.model.sequences or any(feature.keys != "one" for feature in run.model.features):
        raise ConfigurationError(
            f"model {run.model.name!r} has lists or sequences, whose steps cannot be measured yet"
        )


def _check_batches(run: RunConfig, batches: Sequence[Batch]) -> None:
    if len(batches) < MIN_BATCHES:
        raise ConfigurationError(
            f"there are events for {len(batches)} batches of {run.batch_size}: give events for"
            f" {MIN_BATCHES} or more"
        )


def _cores() -> int:
    """Return the cores of each rank of this machine."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def take_steps(learner: Learner, batches: Sequence[Batch], spans: StepSpans | None = None) -> float:
    """Take a step for each batch, and return what one takes; keys of the next travel meanwhile.

    `spans` gets the parts of the last step that has a next one.
    """
    took: list[float] = []
    following = iter(batches[1:])
    with ThreadPoolExecutor(1) as ahead:
        asked: Future[Prepared] | None = ahead.submit(learner.prepare, batches[0])

        def ask() -> None:
            nonlocal asked
            batch = next(following, None)
            asked = None if batch is None else ahead.submit(learner.prepare, batch)

        while asked is not None:
            ready = asked.result()
            is_shown = spans is not None and len(took) == len(batches) - 2
            began = time.perf_counter()
            with spans.recording() if is_shown and spans else contextlib.nullcontext():
                learner.take_step(ready, ask)
                if is_shown and asked is not None:
                    asked.result()
            took.append(time.perf_counter() - began)
            # With what it waits for the next batch's keys.
            if asked is not None:
                asked.result()
                took[-1] = time.perf_counter() - began
    return statistics.median(took[len(took) // 2 :])


def _cost_s(work: Callable[[], object]) -> float:
    """Return what some work takes: the lower quartile, for what else is at work only adds to it."""
    took = []
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return sorted(took)[len(took) // 4]


def _work(
    learner: Learner, batch: Batch, begin: int, end: int
) -> tuple[WorkProfile, list[LayerProfile]]:
    """Measure this rank's parts of a step, by themselves."""
    run, rows = learner.run, learner.rows
    keys_FB = np.ascontiguousarray(batch.keys_BF[begin:end].T)
    tables = [run.model.table_index(column.table) for column in run.model.columns]
    stored = [store_table(table, t, run.seed) for t, table in enumerate(run.model.tables)]
    widths = [table.layout.dim for table in stored]
    dims = [w - t.counter_chunks * t.layout.chunk_dim for w, t in zip(widths, stored, strict=True)]
    router = _store.Router(
        [
            (table.bucket_bits, width, dim, np.zeros(1 << table.bucket_bits, np.uint16))
            for table, width, dim in zip(stored, widths, dims, strict=True)
        ],
        ranks=1,
        rank=0,
    )
    bags: list[tuple[int, NDArray[np.int64], NDArray[np.uint32] | None]] = [
        (table, keys_B, None) for table, keys_B in zip(tables, keys_FB, strict=True)
    ]
    route_s = _cost_s(lambda: router.route(bags))
    routed = router.route(bags)
    keys_T = np.split(routed.keys, np.cumsum(routed.lengths)[:-1])
    if rows.exchange is not None:
        keys_T = [keys_U[rows.exchange.mine(t, keys_U)] for t, keys_U in enumerate(keys_T)]
    own = [(t, keys_U) for t, keys_U in enumerate(keys_T) if len(keys_U)]
    lookups: list[_store.BagLookup] = [
        (t, keys_U, None, "sum", np.empty((len(keys_U), widths[t]), np.float32))
        for t, keys_U in own
    ]
    lookup_s = _cost_s(lambda: rows.store.lookup_bags(lookups, threads=run.threads, places=True))
    floats = int(np.dot(routed.lengths, widths))
    outs = [("sum", np.empty((end - begin, widths[t]), np.float32)) for t in tables]
    pool_s = _cost_s(lambda: routed.pool(np.zeros(floats, np.float32), outs))
    pieces = [(None, np.zeros((end - begin, dims[t]), np.float32)) for t in tables]
    give_s = _cost_s(lambda: routed.sum(pieces))
    gradients: list[_store.BagGradients] = [
        (t, keys_U, None, np.zeros((len(keys_U), dims[t]), np.float32), None) for t, keys_U in own
    ]
    optimizer = run.optimizer
    update_s = _cost_s(
        lambda: rows.store.apply_gradients(
            gradients,
            learning_rate=optimizer.sparse_learning_rate,
            epsilon=optimizer.epsilon,
            initial_accumulator=optimizer.initial_accumulator,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            max_gradient_norm=optimizer.max_gradient_norm,
            threads=run.threads,
        )
    )
    adam_s = _cost_s(learner.optimizer.step)
    found = max(1, sum(len(keys_U) for _, keys_U in own))
    asked = [keys_U.view(np.int64) for keys_U in keys_T]
    count_s = _cost_s(lambda: AskCounts(len(asked), _HOT_KEYS).add([asked])) / COUNTED_EVERY
    keys = keys_FB.size
    layers = _layers(learner, batch, begin, end)
    work = WorkProfile(
        route_s=route_s / keys,
        lookup_s=lookup_s / found,
        pool_s=pool_s / keys,
        give_s=give_s / keys,
        update_s=update_s / found,
        adam_s=adam_s / max(1, sum(layer.parameters for layer in layers)),
        codec_s={name: _codec_s(name) for name in _CODECS},
        count_s=count_s / found,
    )
    return work, layers


def _codec_s(name: Codec) -> float:
    """Return what a codec takes for a number, in the mean of encoding and decoding."""
    values = np.random.default_rng(1).standard_normal(_CODED).astype(np.float32)
    blocks = [Block(_CODED // 64, 64)]
    sent = codec.encode(name, values, blocks)
    took = _cost_s(lambda: codec.encode(name, values, blocks))
    took += _cost_s(lambda: codec.decode(name, sent, blocks))
    return took / 2 / _CODED


def _layers(learner: Learner, batch: Batch, begin: int, end: int) -> list[LayerProfile]:
    """Return the net's layers in the order of the forward pass.

    Forward passes are measured by layer; what backward takes is divided as forward is.
    """
    net = learner.net
    names = {
        module: name
        for name, module in net.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    took: dict[nn.Module, list[float]] = {}
    began: dict[nn.Module, float] = {}

    def before(module: nn.Module, _: Any) -> None:
        began[module] = time.perf_counter()

    def after(module: nn.Module, *_: Any) -> None:
        took.setdefault(module, []).append(time.perf_counter() - began[module])

    hooks = [
        hook
        for module in names
        for hook in (
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after),
        )
    ]
    events = end - begin
    width = learner.rows.embedding_dim
    dense_BD = torch.zeros((events, batch.dense_BD.shape[1]))
    forward_s, backward_s = [], []
    for _ in range(_REPETITIONS):
        embeddings_BE = torch.zeros((events, width), requires_grad=True)
        start = time.perf_counter()
        loss = net(dense_BD.to(learner.device), embeddings_BE.to(learner.device)).float().mean()
        middle = time.perf_counter()
        loss.backward()
        backward_s.append(time.perf_counter() - middle)
        forward_s.append(middle - start)
    for hook in hooks:
        hook.remove()
    learner.optimizer.zero_grad()
    share = {module: statistics.median(each) for module, each in took.items()}
    total = sum(share.values()) or 1.0
    return [
        LayerProfile(
            name=names[module],
            parameters=sum(each.numel() for each in module.parameters(recurse=False)),
            forward_s=statistics.median(forward_s) * seconds / total / events,
            backward_s=statistics.median(backward_s) * seconds / total / events,
        )
        for module, seconds in share.items()
    ]


def _rows_enter(layers: Iterable[LayerProfile]) -> int:
    """Return the first layer behind the MLP over DENSE, which is the first part of some nets."""
    at = 0
    layers = list(layers)
    while at + 1 < len(layers) and layers[at].name.startswith("bottom"):
        at += 1
    return at


def _costs_of(measured: dict[str, Any]) -> dict[str, float]:
    """Return what each kind of work costs a rank."""
    kinds = ("route", "lookup", "pool", "give", "update", "adam")
    costs = {kind: float(measured["work"][f"{kind}_s"]) for kind in kinds}
    return {**costs, "net": sum(of["forward_s"] + of["backward_s"] for of in measured["layers"])}


def _paces(first: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return times that each kind of a rank's work takes what the first one's does."""
    mine, its = _costs_of(first), _costs_of(other)
    return {kind: its[kind] / cost for kind, cost in mine.items() if cost > 0}


def _row_bytes(learner: Learner, batch: Batch, ranks: Ranks) -> int:
    """Return about what a rank sends another for the rows of a step, the same on all ranks."""
    columns = learner.run.model.columns
    distinct = {
        table.name: len(
            np.unique(batch.keys_BF[:, [f for f, c in enumerate(columns) if c.table == table.name]])
        )
        for table in learner.run.model.tables
    }
    floats = sum(table.width * distinct[table.name] for table in learner.run.model.tables)
    return min(max(4 * floats // ranks.size**2, _MIN_BYTES), _MAX_BYTES)


def _less(took_s: float, latency_s: float) -> float:
    """Return a time without its latency, of which a measurement may have had less."""
    return max(took_s - latency_s, took_s / 2)


def _link(ranks: Ranks, size: int) -> RankProfile:
    """Measure this rank's link while all send, by messages of a size as a step's.

    What is larger may travel at another rate: of a wire that lets so much pass at once, or that
    loses what it has no room for.
    """
    if ranks.size == 1:
        return _ALONE
    channel = ranks.channel("profile")
    others = ranks.size - 1
    partner = ranks.rank ^ 1  # of whom the last of an odd number has none

    def exchange(size: int) -> None:
        sizes = [size if rank != ranks.rank else 0 for rank in range(ranks.size)]
        sent = torch.zeros(size * others, dtype=torch.uint8)
        channel.exchange(sent, sizes, sizes, "profile").wait()

    def one_way(*, even: bool) -> None:
        sends = ranks.rank % 2 == (0 if even else 1)
        to_R = [size if sends and rank == partner else 0 for rank in range(ranks.size)]
        from_R = [0 if sends or rank != partner else size for rank in range(ranks.size)]
        sent = torch.zeros(sum(to_R), dtype=torch.uint8)
        channel.exchange(sent, to_R, from_R, "profile").wait()

    def there_and_back() -> None:
        one_way(even=True)  # what is sent is on its way yet, but not once its answer is there
        one_way(even=False)

    latency_s = _cost_s(lambda: exchange(_SMALL_BYTES))
    together = 2 * others * size / _less(_cost_s(lambda: exchange(size)), latency_s)
    way_s = _cost_s(there_and_back) / 2
    numbers = torch.zeros(size // 4)
    sum_s = _cost_s(lambda: channel.sum(numbers, "profile").wait())
    summed = 2 * others / ranks.size * size
    alone = size / _less(way_s, latency_s) if partner < ranks.size else together / 2
    return RankProfile(
        bytes_per_s=max(alone, together / 2),
        together_bytes_per_s=together,
        latency_s=latency_s,
        sum_bytes_per_s=summed / _less(sum_s, latency_s),
    )


def _version_steps(run: RunConfig, batches: Sequence[Batch]) -> float:
    """Return about how many steps a version has, by the times of events."""
    took_ms = float(batches[-1].ts_ms_B[-1] - batches[0].ts_ms_B[0]) / len(batches)
    return 1e3 * run.publish_every_s / took_ms if took_ms > 0 else 0.0


def _hot(run: RunConfig, batches: Sequence[Batch], ranks: int) -> tuple[HotKey, ...]:
    """Return the keys that ranks ask for most often, the most frequent of all tables first."""
    found: list[tuple[int, HotKey]] = []
    for t, table in enumerate(run.model.tables):
        columns = [f for f, column in enumerate(run.model.columns) if column.table == table.name]
        asked = []
        for batch in batches[-_COUNTED:]:
            for rank in range(ranks):
                begin, end = part_of(batch, rank, ranks)
                asked.append(np.unique(batch.keys_BF[begin:end][:, columns]))
        key_U, count_U = np.unique(np.concatenate(asked), return_counts=True)
        total = count_U.sum()
        often = np.argsort(-count_U, kind="stable")[:_HOT_KEYS]
        often = often[count_U[often] >= _HOT_ASKS]
        bucket_N = buckets_of(key_U[often].view(np.uint64), table.bucket_bits)
        for bucket, count in zip(bucket_N.tolist(), count_U[often].tolist(), strict=True):
            found.append((count, HotKey(t, int(bucket), count / total)))
    found.sort(key=lambda each: -each[0])
    return tuple(key for _, key in found[:_HOT_KEYS])


def _tables(run: RunConfig, batches: Sequence[Batch], ranks: int) -> tuple[TableProfile, ...]:
    """Count what batches ask of tables."""
    made: list[TableProfile] = []
    counted = batches[-_COUNTED:]
    for t, table in enumerate(run.model.tables):
        columns = [f for f, column in enumerate(run.model.columns) if column.table == table.name]
        stored = store_table(table, t, run.seed)
        dim = stored.layout.dim
        gradient = dim - stored.counter_chunks * stored.layout.chunk_dim
        points: dict[float, float] = {}
        load_P = np.zeros(1 << table.bucket_bits)
        for parts in _PARTS:
            sizes, found = [], []
            for batch in counted:
                for part in range(min(parts, 4)):
                    begin, end = part_of(batch, part, parts)
                    if begin == end:
                        continue
                    keys_U = np.unique(batch.keys_BF[begin:end][:, columns])
                    sizes.append(end - begin)
                    found.append(len(keys_U))
                    if parts == ranks or (parts == 1 and ranks not in _PARTS):
                        buckets_U = buckets_of(keys_U.view(np.uint64), table.bucket_bits)
                        load_P += np.bincount(buckets_U, minlength=len(load_P))
            if sizes:
                points[float(statistics.mean(sizes))] = float(max(1e-9, statistics.mean(found)))
        made.append(
            TableProfile(
                name=table.name,
                row_floats=dim,
                gradient_floats=gradient,
                row_bytes=4 * dim + 4 * gradient + 24,
                rows=len(np.unique(np.concatenate([each.keys_BF[:, columns] for each in batches]))),
                keys=float(len(columns)),
                distinct=tuple(sorted(points.items())),
                load_P=tuple((load_P / load_P.sum()).tolist()),
                # Tables that cannot be column-wise: those that trainer.embedding.columns refuses.
                chunks=1 if stored.counter_chunks or table.dtype == "int8" else table.chunks,
            )
        )
    return tuple(made)
