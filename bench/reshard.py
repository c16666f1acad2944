"""Twenty reshards under load and versions, against the time before each: `make bench-reshard`.

Two tritonservers of two devices, a control plane, a Redis, a publisher of several versions a
second, and a client process a node. Each reshard moves 40 % of the buckets, two thirds of them to
the other node, so that every device keeps its number. They run twice over in turn: at half of the
rate that the fleet sustains, for the p99 of requests, and in closed loop, for throughput.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bench import keys, parts, report
from bench.fleet import MODEL, Fleet, start_fleet
from bench.load import Seen, encode
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from bench.shapes import SEED, Shape
from embertide.server.core.plan.layout import Bucket, Holders, Place, assignments_of, layout_of
from embertide.trainer.data.keys import buckets_of
from embertide.v1 import control_pb2, plan_pb2

_FOLDER = BUILD / "bench" / "reshard"
_SHAPE = Shape(name="reshard", rows=200_000, tables=8, buckets=16)
_BATCH = 64
_REQUESTS = 512
_VERSIONS_PER_S = 5
_MOVED_SHARE = 0.4
_RATE_SHARE = 0.5  # of the requests/s in closed loop
_BEFORE_S = 3.0
_SETTLE_S = 1.0  # at the begin of a load, before anything counts
_OPERATION_S = 120.0
_MAX_P99, _MIN_RATE = 1.5, 0.9  # during / before
_FAILURES_SHOWN, _CHARACTERS_SHOWN = 5, 200


class Step(NamedTuple):
    """A part of an operation."""

    said: str  # by the operation, as long as it lasted
    seconds: float
    p99_us: float
    failed: int

    def line(self) -> str:
        """Describe it for people."""
        failed = f", {self.failed} failed" * bool(self.failed)
        return f"    {self.said}: {self.seconds:.2f} s, p99 {self.p99_us:,.0f} us{failed}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A reshard and the quiet time before it."""

    closed_loop: bool
    seconds: float
    buckets: int
    buckets_across: int  # of them, to the other node
    bytes: int
    versions: int  # that were committed meanwhile
    versions_seen: int  # that answers were of
    requests: int
    failed: int
    failed_before: int
    p99_us: float
    p99_us_before: float
    requests_per_s: float
    requests_per_s_before: float
    late_us_p99: float  # by the client
    client_cpu_share: float
    steps: list[Step]

    def line(self) -> str:
        """Describe it for people."""
        return (
            f"{'closed loop' if self.closed_loop else 'at a rate'}: {self.seconds:.1f} s, "
            f"{self.buckets} buckets ({self.buckets_across} across), {self.bytes / 1e6:.0f} MB, "
            f"{self.versions} versions; p99 {self.p99_us_before:,.0f} -> {self.p99_us:,.0f} us, "
            f"{self.requests_per_s_before:,.0f} -> {self.requests_per_s:,.0f}/s, "
            f"{self.failed_before} -> {self.failed} failed; client: {self.client_cpu_share:.0%} "
            f"of a core, late by {self.late_us_p99:,.0f} us"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The running processes, and how much a reshard may do at once."""

    fleet: Fleet
    budget: control_pb2.ReshardBudget


def _requests() -> list[bytes]:
    keys_NFL, _ = keys.draw(_SHAPE, _BATCH * _REQUESTS)
    keys_NF = keys_NFL[:, :, 0]
    bits = _SHAPE.config().tables[0].bucket_bits
    for column in keys_NF.T:
        read = np.unique(buckets_of(column.astype(np.uint64), bits))
        if len(read) < 1 << bits:
            raise BenchError(f"requests read only {len(read)} of {1 << bits} buckets of a table")
    return [encode(MODEL, batch_BF) for batch_BF in np.split(keys_NF, _REQUESTS)]


# --- reshards -------------------------------------------------------------------------------------


def make_target(plan: plan_pb2.Plan, rng: np.random.Generator) -> control_pb2.ReshardTarget:
    """Return a target that moves a share of each device's buckets to the others, evenly.

    Requires: the plan has two nodes, and one owner a bucket.
    """
    by_place: dict[Place, list[Bucket]] = {}
    for bucket, held in layout_of(plan.assignments).items():
        by_place.setdefault(held.owners[0], []).append(bucket)
    # Neighbours are on different nodes, so two of the three ways round lead to the other node.
    places = sorted(by_place, key=lambda place: (place.device, place.node))
    moved = {}
    for i, place in enumerate(places):
        held_here = by_place[place]
        chosen = rng.permutation(len(held_here))[: round(len(held_here) * _MOVED_SHARE)]
        for j, way in zip(chosen, itertools.cycle((1, 3, 2)), strict=False):
            moved[held_here[j]] = Holders((places[(i + way) % len(places)],))
    return control_pb2.ReshardTarget(base_epoch=plan.epoch, assignments=assignments_of(moved))


def _move(
    site: Site, id: str, target: control_pb2.ReshardTarget
) -> tuple[control_pb2.StartReshardResponse, control_pb2.Operation, list[tuple[float, str]]]:
    """Run a reshard to its end; return what it moves, how it ended, and what it said when."""
    answer = site.fleet.caller.call(
        "StartReshard",
        control_pb2.StartReshardRequest(operation_id=id, target=target, budget=site.budget),
    )
    said, operation = [(time.time(), "accepted")], answer.operation
    for operation in site.fleet.caller.watch(id, _OPERATION_S):
        if operation.message and operation.message != said[-1][1]:
            said.append((time.time(), operation.message))
    if operation.state != control_pb2.OPERATION_STATE_SUCCEEDED:
        raise BenchError(f"{id} did not succeed: {operation.message}; see {_FOLDER}")
    return answer, operation, said


def _steps(seen: Seen, said: list[tuple[float, str]], end: float) -> list[Step]:
    steps = []
    for (begin, message), (until, _) in itertools.pairwise([*said, (end, "")]):
        if until > begin:
            part = seen.between(begin, until)
            steps.append(Step(message, until - begin, part.latency_us_p99, part.failed))
    return steps


def _measure_pair(site: Site, id: str, rate: float | None, rng: np.random.Generator) -> Pair:
    # A snapshot is a trainer's work; here it would take this machine's cores from both sides.
    site.fleet.versions.snapshot()
    target = make_target(site.fleet.caller.plan(), rng)
    site.fleet.clients.start(rate)
    time.sleep(_SETTLE_S)
    quiet = time.time()
    time.sleep(_BEFORE_S)
    answer, operation, said = _move(site, id, target)
    seen = site.fleet.clients.stop()
    for why, count in seen.failures.most_common(_FAILURES_SHOWN):
        CONSOLE.print(f"[red]{count} failed: {why[:_CHARACTERS_SHOWN]}")
    begin, end = operation.created_ms / 1e3, operation.ended_ms / 1e3
    before, during = seen.between(quiet, begin, wholly=True), seen.between(begin, end)
    across = sum(move.source.node != move.target.node for move in answer.moves)
    return Pair(
        closed_loop=rate is None,
        seconds=end - begin,
        buckets=operation.buckets_done,
        buckets_across=across,
        bytes=operation.bytes_done,
        versions=site.fleet.versions.published(begin, end),
        versions_seen=during.versions,
        requests=len(during.log),
        failed=during.failed,
        failed_before=before.failed,
        p99_us=during.latency_us_p99,
        p99_us_before=before.latency_us_p99,
        requests_per_s=during.requests_per_s,
        requests_per_s_before=before.requests_per_s,
        late_us_p99=before.late_us_p99,
        client_cpu_share=seen.cpu_share,
        steps=_steps(seen, said, end),
    )


def _measure(site: Site, reshards: int) -> list[Pair]:
    site.fleet.clients.start(None)
    time.sleep(_SETTLE_S)
    begin = time.time()
    time.sleep(_BEFORE_S)
    end = time.time()
    sustained = site.fleet.clients.stop().between(begin, end).requests_per_s
    rate = _RATE_SHARE * sustained
    CONSOLE.print(f"[dim]the fleet sustains {sustained:,.0f} requests/s; the rate is {rate:,.0f}")
    rng = np.random.default_rng(SEED)
    pairs = []
    for n in range(reshards):
        for name, each in (("rate", rate), ("closed", None)):
            pairs.append(_measure_pair(site, f"{name}-{n}", each, rng))
            CONSOLE.print(f"[dim]{n + 1}/{reshards} {pairs[-1].line()}")
            for step in pairs[-1].steps:
                CONSOLE.print(f"[dim]{step.line()}")
    return pairs


def _rows(pairs: Sequence[Pair], budget: control_pb2.ReshardBudget) -> list[report.Row]:
    at_rate = [pair for pair in pairs if not pair.closed_loop]
    closed = [pair for pair in pairs if pair.closed_loop]
    bounds = ", ".join(f"{field.name} {value}" for field, value in budget.ListFields())
    case = (
        f"{_SHAPE.tables}x{_SHAPE.rows}x{_SHAPE.dim}, {at_rate[0].buckets} of "
        f"{_SHAPE.tables * (_SHAPE.buckets or 1)} buckets move, {_VERSIONS_PER_S} versions/s"
        + (f", {bounds}" if bounds else "")
    )
    peer = "before it"
    p99 = report.compare(
        (f"{case}, half rate", "p99 latency", "us"),
        [pair.p99_us for pair in at_rate],
        [pair.p99_us_before for pair in at_rate],
        peer_name=peer,
        better="lower",
        target=_MAX_P99,
    )
    throughput = report.compare(
        (f"{case}, closed loop", "throughput", "requests/s"),
        [pair.requests_per_s for pair in closed],
        [pair.requests_per_s_before for pair in closed],
        peer_name=peer,
        better="higher",
        target=_MIN_RATE,
    )
    return [p99, throughput]


def _summary(pairs: Sequence[Pair]) -> str:
    seconds = [pair.seconds for pair in pairs]
    return (
        f"{len(pairs)} reshards: {statistics.median(seconds):.1f} s each ({min(seconds):.1f} to "
        f"{max(seconds):.1f}), {sum(p.buckets for p in pairs):,} buckets, of them "
        f"{sum(p.buckets_across for p in pairs):,} to the other node, "
        f"{sum(p.bytes for p in pairs) / 1e6:,.0f} MB; {sum(p.versions for p in pairs):,} versions "
        f"meanwhile; {sum(p.requests for p in pairs):,} requests during them; "
        f"{sum(p.failed for p in pairs)} failed, and {sum(p.failed_before for p in pairs)} before"
    )


def _run(given: argparse.Namespace) -> Iterator[report.Row]:
    budget = control_pb2.ReshardBudget(
        bytes_per_s=given.bytes_per_s, buckets_at_once=given.buckets_at_once
    )
    with start_fleet(_FOLDER, _SHAPE, _requests(), _VERSIONS_PER_S) as fleet:
        pairs = _measure(Site(fleet=fleet, budget=budget), given.reshards)
    yield from _rows(pairs, budget)
    details = given.out.with_suffix(".pairs.json")
    details.write_text(json.dumps([dataclasses.asdict(pair) for pair in pairs], indent=1) + "\n")
    CONSOLE.print(f"{_summary(pairs)}\neach reshard: {details}")
    if failed := sum(pair.failed for pair in pairs):
        raise BenchError(f"{failed} requests failed")


if __name__ == "__main__":
    parser = parts.options("reshard", __doc__)
    parser.add_argument("--reshards", type=int, default=20, help="of each kind of load")
    parser.add_argument("--bytes-per-s", type=int, default=0, help="budget of each reshard")
    parser.add_argument("--buckets-at-once", type=int, default=0, help="budget of each reshard")
    parts.command("Reshards under load and versions", _run, parser)
