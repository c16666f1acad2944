"""Bytes a row costs over its payload, while a table grows and when it is full.

Rows come in random order, a hundredth of them at a time, so that all buckets grow alike; after each
bucket's share the store's own account is read, which holds it to its budget. Each side runs in a
process of its own, whose resident memory the account is checked against. FBGEMM's hash map stands
beside a dense table.
"""

import dataclasses
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench import report
from bench.report import CONSOLE
from bench.store import ours, peers
from embertide import _store
from embertide.trainer.data.keys import buckets_of

_ROWS = 4_000_000
_DIM = 32
_PAYLOAD = 4 * _DIM
_SHARES = 100
# Sizes below this say more of the store's own directory than of rows.
_FROM = 400_000
_MEAN_BAR, _WORST_BAR, _ALLOCATOR_BAR = 14.0, 18.0, 1.03


@dataclasses.dataclass(frozen=True, slots=True)
class Grown:
    """The cost of a growing table over its payload."""

    rows: list[int]
    over_payload: list[float]  # bytes a row
    account: int  # bytes at the end, payload included
    resident: int  # of the process, more than before the first row


def _grow(profile: str, index: str = "plain") -> Grown:
    rng = np.random.default_rng(1)
    table = ours.table_of(_ROWS, _DIM)
    budget = _ROWS * (_PAYLOAD + 120) + (64 << 20)
    store: _store.TrainingStore | _store.ServingStore
    if profile == "train":
        store = _store.TrainingStore(tables=[table], ddr_budget_bytes=budget, index=index)
    else:
        store = _store.ServingStore(tables=[table], ddr_budget_bytes=budget, index=index)
    order = rng.permutation(_ROWS)
    before = report.resident_bytes()
    rows: list[int] = []
    over: list[float] = []
    for part in np.array_split(order, _SHARES):
        keys_N = ours.keys_of(part)
        if isinstance(store, _store.TrainingStore):
            store.ensure_rows(0, keys_N)
            _note(store, rows, over)
            continue
        buckets_N = buckets_of(keys_N.view(np.uint64), table.bucket_bits)
        for bucket in range(1 << table.bucket_bits):
            chosen = keys_N[buckets_N == bucket].view(np.uint64)
            store.stage_records(1, 0, bucket, ours.records_of(rng, chosen, _DIM))
            _note(store, rows, over)
    stats = store.stats()
    account = stats["ddr_payload_bytes"] + stats["index_bytes"]
    return Grown(rows, over, account, report.resident_bytes() - before)


def _note(store: _store.Store, rows: list[int], over: list[float]) -> None:
    stats = store.stats()
    if stats["rows"] < _FROM:
        return
    used = stats["ddr_payload_bytes"] + stats["index_bytes"]
    rows.append(stats["rows"])
    over.append(used / stats["rows"] - _PAYLOAD)


def _pruned_hash() -> float:
    before = report.resident_bytes()
    peer = peers.PrunedHash(_ROWS, _DIM)
    over = (report.resident_bytes() - before) / _ROWS - _PAYLOAD
    del peer
    return over - 4  # the rows' ids, which the benchmark keeps


def _in_process(work: Callable[..., Any], *arguments: object) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _row(case: str, metric: str, value: float, peer: float, name: str, bar: float) -> report.Row:
    what = (case, metric, "bytes a row over payload")
    return report.compare(what, [value], [peer], peer_name=name, better="lower", target=bar)


def run() -> Iterator[report.Row]:
    """Yield the rows of the report; bars on ours alone are stated against the bar itself."""
    case = f"{_ROWS:,} rows of {_DIM} floats"
    CONSOLE.print(f"bytes a row: {case}")
    serve: Grown = _in_process(_grow, "serve")
    mean = statistics.fmean(serve.over_payload)
    lean: Grown = _in_process(_grow, "serve", "lean")
    for name, grown in (("serve", serve), ("serve, lean index", lean)):
        over = grown.over_payload
        for metric, value, bar in (
            ("mean of growth", statistics.fmean(over), _MEAN_BAR),
            ("worst moment of growth", max(over), _WORST_BAR),
        ):
            row = _row(f"{case}, {name}", metric, value, bar, "the bar", 1.0)
            yield dataclasses.replace(row, claim="23.2")
    train: Grown = _in_process(_grow, "train")
    train_mean = statistics.fmean(train.over_payload)
    yield _row(f"{case}, train", "mean of growth", train_mean, mean, "ours, serve", 0.0)
    for name, grown in (("serve", serve), ("serve, lean index", lean), ("train", train)):
        yield dataclasses.replace(
            _row(
                f"{case}, {name}",
                "resident memory",
                grown.resident,
                grown.account,
                "our account",
                _ALLOCATOR_BAR,
            ),
            unit="bytes",
        )
    peer = peers.PrunedHash.name
    yield _row(
        f"{case}, serve", "full", serve.over_payload[-1], _in_process(_pruned_hash), peer, 0.0
    )
