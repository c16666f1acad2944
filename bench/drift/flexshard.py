"""Bytes that sequences bring across nodes: rows owned once against what `flexshard` plans.

A virtual topology of two nodes with four devices each. Both nodes ask for sequences of 50 to 200
keys of two tables, whose rows are read by a Zipf law. A key that a request asks for twice crosses
once. The planner sees what nodes report of the first half of the requests: rates by bucket, the 64
hottest keys, and the number of rows; the second half is counted. Every node may hold 5 % more than
rows owned once take, for copies. The copies are the rows that a node read most in the first half.

Then two real nodes answer requests under both plans: their answers are compared bit for bit, and
the bytes that they asked of each other are counted.

Shapes: K keys of all requests of a node, N nodes, B buckets of all tables.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench import models, report
from bench.drift import small_cases
from bench.drift.local import FOLDER
from bench.nodes import Node, make_plan, publication_of, start_nodes
from bench.report import CONSOLE
from bench.servers import BUILD
from bench.shapes import Shape
from embertide.server.core.plan.flexshard import COPY_OVERHEAD, FlexShard
from embertide.server.core.plan.instance import Bools
from embertide.server.core.plan.layout import Bucket, Holders, Place
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.workload import Asking, TableTraits, Workload
from embertide.trainer.data.keys import buckets_of, hash_keys
from embertide.v1 import node_pb2, plan_pb2

_NODES, _DEVICES, _TABLES = 2, 4, 2
_ROWS, _BITS = 100_000, 6
_ROW_BYTES = 256
_WIRE_BYTES = 8 + 12 + _ROW_BYTES + 1  # key, record, source
_REQUESTS = 1500  # of a node and half
_EXTRA = 0.05
_HEAD = 64
_EXPONENTS = (0.0, 0.6, 0.8, 1.0, 1.2)
_SAVED, _NOTHING = 0.80, 0.10


class Requests(NamedTuple):
    """A node's requests for one table: keys by rank, and the request that each is of."""

    keys_K: NDArray[np.int64]
    request_K: NDArray[np.int64]


def draw(random: np.random.Generator, exponent: float) -> Requests:
    """Return requests of one half."""
    weights = np.arange(1, _ROWS + 1) ** -exponent
    cumulative = np.cumsum(weights) / weights.sum()
    lengths = random.integers(50, 201, _REQUESTS)
    keys_K = np.searchsorted(cumulative, random.random(int(lengths.sum())))
    return Requests(keys_K.astype(np.int64), np.repeat(np.arange(_REQUESTS), lengths))


def _bucket_of(table: int) -> NDArray[np.int64]:
    """Return the bucket of each key of a table."""
    keys_R = hash_keys(np.arange(_ROWS, dtype=np.uint64) + np.uint64(table << 32))
    return buckets_of(keys_R, _BITS).astype(np.int64)


def row_wise() -> dict[Bucket, Holders]:
    """Return every bucket owned once, in turn by all devices."""
    places = [Place(n, d) for d in range(_DEVICES) for n in range(_NODES)]
    named = itertools.product(range(_TABLES), range(1 << _BITS))
    return {Bucket(*at): Holders((places[i % len(places)],)) for i, at in enumerate(named)}


def problem_of(first: Mapping[tuple[int, int], Requests]) -> tuple[Problem, float]:
    """Return the planner's problem, and the bytes that a node has for copies.

    Args:
        first: Requests of the first half by node and table.
    """
    buckets = 1 << _BITS
    layout = row_wise()
    wanted_NB = np.zeros((_NODES, _TABLES * buckets))
    traits = {}
    sizes = []
    for table in range(_TABLES):
        bucket_R = _bucket_of(table)
        sizes.append(np.bincount(bucket_R, minlength=buckets) * (_ROW_BYTES + 24.0))
        counts_R = np.zeros(_ROWS)
        for n in range(_NODES):
            keys_K = first[n, table].keys_K
            counts_R += np.bincount(keys_K, minlength=_ROWS)
            of_table = slice(table * buckets, (table + 1) * buckets)
            wanted_NB[n, of_table] = np.bincount(bucket_R[keys_K], minlength=buckets)
        head = np.sort(counts_R)[-_HEAD:]
        traits[table] = TableTraits(
            row_bytes=_ROW_BYTES,
            wire_bytes=_WIRE_BYTES,
            rows=_ROWS,
            head_keys=_HEAD,
            head_share=float(head.sum() / counts_R.sum()),
        )
    bytes_B = np.concatenate(sizes)
    used: dict[Place, float] = {}
    for at, (_, held) in enumerate(sorted(layout.items())):
        used[held.owners[0]] = used.get(held.owners[0], 0.0) + bytes_B[at]
    plan = plan_pb2.Plan(epoch=1)
    for table in range(_TABLES):
        plan.tables.add(id=table, name=f"sequence{table}", bucket_bits=_BITS, chunks=1)
    for n in range(_NODES):
        node = plan.topology.nodes.add(name=f"node-{n}", address=f"node-{n}:1")
        for d in range(_DEVICES):
            device = node.devices.add(index=d, kind=plan_pb2.DEVICE_KIND_CPU)
            # Full as it is: what is more is for copies.
            device.budgets.add(tier=plan_pb2.TIER_DDR, budget_bytes=int(used[Place(n, d)]))
    asking = Asking(
        wanted_NB=wanted_NB,
        copied_NT=np.zeros((_NODES, _TABLES)),
        bytes_B=bytes_B,
        traits=traits,
    )
    problem = Problem(plan=plan, layout=layout, workload=Workload(work={}, asking=asking))
    return problem, _EXTRA * sum(used.values()) / _NODES


def _held_NB(owners: Mapping[Bucket, tuple[Place, ...]]) -> Bools:
    held_NB = np.zeros((_NODES, _TABLES << _BITS), np.bool_)
    for at, places in owners.items():
        for place in places:
            held_NB[place.node, (at.table << _BITS) + at.bucket] = True
    return held_NB


def crossing(
    proposal: Proposal | None,
    first: Mapping[tuple[int, int], Requests],
    second: Mapping[tuple[int, int], Requests],
) -> float:
    """Return the bytes that the second half brings across nodes; without a proposal, as it is."""
    owners = {at: held.owners for at, held in row_wise().items()}
    if proposal is not None:
        owners |= proposal.owners
    held_NB = _held_NB(owners)
    total = 0
    for (node, table), requests in second.items():
        bucket_R = _bucket_of(table)
        near_R = held_NB[node, (table << _BITS) + bucket_R]
        if proposal is not None:
            rows = proposal.hot_rows.get(table, 0)
            counts_R = np.bincount(first[node, table].keys_K, minlength=_ROWS)
            counts_R[near_R] = 0
            copied = np.argsort(-counts_R, kind="stable")[:rows]
            near_R = near_R.copy()
            near_R[copied[counts_R[copied] > 0]] = True
        asked = np.unique(requests.request_K * _ROWS + requests.keys_K) % _ROWS
        total += int((~near_R[asked]).sum()) * _WIRE_BYTES
    return float(total)


def virtual(exponent: float, seed: int) -> tuple[float, float]:
    """Return the bytes across nodes by the planner's answer, and as it is."""
    random = np.random.default_rng(seed)
    halves = [
        {at: draw(random, exponent) for at in itertools.product(range(_NODES), range(_TABLES))}
        for _ in range(2)
    ]
    problem, copy_bytes = problem_of(halves[0])
    proposal = FlexShard(copy_bytes).propose(problem)
    taken = sum(rows * (_ROW_BYTES + COPY_OVERHEAD) for rows in proposal.hot_rows.values())
    if taken > copy_bytes:
        raise ValueError(f"copies take {taken:,} bytes of {copy_bytes:,.0f}")
    return crossing(proposal, halves[0], halves[1]), crossing(None, halves[0], halves[1])


_SHAPE = Shape(name="sequences", rows=20_000, tables=1, buckets=16, dim=16)


def _ask(nodes: Sequence[Node], keys: Sequence[NDArray[np.uint64]]) -> list[bytes]:
    """Return the answers of both nodes to sequences, rows as they are."""
    answers = []
    for at, keys_K in enumerate(keys):
        request = node_pb2.ReadRequest(lengths=[1] * len(keys_K))
        request.keys.extend(keys_K.tolist())
        answer = nodes[at % len(nodes)].stub.Read(request, timeout=20)
        answers.append(np.array(answer.embeddings, np.float32).tobytes())
    return answers


def _real(
    publication: Path,
    keys: Sequence[NDArray[np.uint64]],
    hot_rows: int,
    everywhere: int,
) -> tuple[list[bytes], int]:
    """Return answers of two nodes, and the bytes that they asked of each other for them.

    Args:
        publication: The model.
        keys: Sequences; the first half warms copies up.
        hot_rows: Room for copies.
        everywhere: So many buckets have owners on both nodes.
    """

    def plan(snapshot: Path, addresses: Sequence[str]) -> plan_pb2.Plan:
        made = make_plan(snapshot, addresses)
        for table in made.tables:
            made.hot_rows.add(table_id=table.id, rows=hot_rows)
        for run in made.assignments[:everywhere]:
            run.owners.add(node=1 - run.owners[0].node)
        return made

    with start_nodes(FOLDER / "flexshard", publication, 2, make=plan) as nodes:
        half = len(keys) // 2
        _ask(nodes, keys[:half])
        _ask(nodes, keys[:half])
        time.sleep(2)
        before = sum(t.bytes for node in nodes for t in node.traffic().values())
        answers = _ask(nodes, keys[half:])
        after = sum(t.bytes for node in nodes for t in node.traffic().values())
    return answers, after - before


def real() -> list[report.Row]:
    """Return whether real nodes answer alike under both plans, and what crosses."""
    files = models.make(_SHAPE, BUILD)
    publication = publication_of(files.snapshot, FOLDER / "flexshard-publication")
    random = np.random.default_rng(1)
    weights = np.arange(1, _SHAPE.rows + 1) ** -1.2
    keys = [
        random.choice(_SHAPE.rows, random.integers(50, 201), p=weights / weights.sum()).astype(
            np.uint64
        )
        for _ in range(400)
    ]
    plain, bytes_plain = _real(publication, keys, 0, 0)
    planned, bytes_planned = _real(publication, keys, _SHAPE.rows // 20, 4)
    equal = float(plain == planned)
    return [
        report.measure(
            ("two real nodes, Zipf 1.2", "answers are equal under both plans", "1: all"),
            [equal],
            better="higher",
            target=1,
            claim="19.5",
        ),
        report.compare(
            ("two real nodes, Zipf 1.2", "bytes asked of each other", "bytes"),
            [float(bytes_planned)],
            [float(bytes_plain)],
            peer_name="rows owned once",
            better="lower",
            target=0,
            claim="19.5",
        ),
    ]


def measure(repetitions: int) -> list[report.Row]:
    """Return the rows of the report.

    Raises:
        BenchError: A node does not start.
    """
    rows = []
    for exponent in _EXPONENTS:
        found = [virtual(exponent, seed) for seed in range(repetitions)]
        saved = [1 - ours / alone for ours, alone in found]
        CONSOLE.print(f"Zipf {exponent}: saved {' '.join(f'{each:.3f}' for each in saved)}")
        even = exponent == 0
        rows.append(
            report.measure(
                (f"2 nodes x 4 devices, Zipf {exponent}", "bytes across nodes saved", "share"),
                saved,
                better="lower" if even else "higher",
                target=_NOTHING if even else _SAVED if exponent == _EXPONENTS[-1] else 0,
                claim="19.5",
            )
        )
    return rows + small_cases.flexshard() + real()
