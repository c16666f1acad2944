"""docs/scale.md is kept true: what can be computed from the code is computed here."""

from pathlib import Path

from embertide.server.core import demand
from embertide.server.core.fleet import BEAT_MS_A_NODE, BEATS_MISSED
from embertide.server.core.plan import chunks
from embertide.server.core.plan.layout import (
    BucketRun,
    Codes,
    Holders,
    LaidPlan,
    Place,
    packed_runs,
)
from embertide.server.core.plan.validity import NODES_MAX, OWNERS_MAX, PLAN_RUNS_MAX
from embertide.server.core.state import LEASE_MS, MOVES_INSIDE_MAX, PLANS_KEPT
from embertide.v1 import plan_pb2

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "scale.md").read_text().split())
GROUPS, NODES, GPUS = 8, 8, 8  # groups, nodes a group, GPUs a node
TABLES, BUCKETS = 100, 1024  # 10^10 rows, 10^5 a bucket


def designed() -> LaidPlan:
    """The plan of the design's size: each device has a run of each table, alike in all groups."""
    places = [(node, gpu) for node in range(NODES) for gpu in range(GPUS)]
    bounds = [BUCKETS * at // len(places) for at in range(len(places) + 1)]
    tier = [
        plan_pb2.TierBudget(tier=each, budget_bytes=1 << 40)
        for each in (plan_pb2.TIER_HBM, plan_pb2.TIER_DDR, plan_pb2.TIER_SSD)
    ]
    devices = [
        plan_pb2.Device(index=gpu, kind=plan_pb2.DEVICE_KIND_GPU, budgets=tier)
        for gpu in range(GPUS)
    ]
    topology = plan_pb2.Topology(
        nodes=[
            plan_pb2.Node(
                name=f"node-{at:02}",
                address=f"node-{at:02}.embertide:7000",
                group=at // NODES,
                devices=devices,
            )
            for at in range(GROUPS * NODES)
        ]
    )
    tables = [
        plan_pb2.PlannedTable(id=id, name=f"table-{id}", bucket_bits=10, chunks=8)
        for id in range(TABLES)
    ]
    runs = [
        BucketRun(
            table.id,
            begin,
            end - begin,
            Holders(tuple(Place(group * NODES + node, gpu) for group in range(GROUPS))),
        )
        for table in tables
        for (node, gpu), begin, end in zip(places, bounds, bounds[1:], strict=False)
    ]
    head = plan_pb2.Plan(epoch=1, tables=tables, topology=topology)
    return LaidPlan(head, packed_runs(runs))


def says(line: str) -> None:
    assert line in PAGE, f"docs/scale.md does not say: {line}"


def test_limits_are_those_of_the_code() -> None:
    for name, value in {
        "NODES_MAX": NODES_MAX,
        "OWNERS_MAX": OWNERS_MAX,
        "PLAN_RUNS_MAX": PLAN_RUNS_MAX,
        "CHUNK_BUCKETS": chunks.CHUNK_BUCKETS,
        "WHOLE_MAX": chunks.WHOLE_MAX,
        "PLANS_KEPT": PLANS_KEPT,
        "MOVES_INSIDE_MAX": MOVES_INSIDE_MAX,
        "LEASE_MS": LEASE_MS,
        "BEATS_MISSED": BEATS_MISSED,
        "BEAT_MS_A_NODE": BEAT_MS_A_NODE,
        "PLACES_MAX": demand.PLACES_MAX,
        "ASKING_MAX": demand.ASKING_MAX,
    }.items():
        says(f"| `{name}` | {value:,} |")


def test_the_plan_has_the_bytes_that_the_page_says() -> None:
    plan = designed()
    written = chunks.written(plan, None, [])
    whole = plan.whole().ByteSize()
    parts = sum(map(len, written.parts.values()))
    says(f"{plan.layout.run_count():,} runs")
    says(f"as one message {whole / 1000:,.0f} KB")
    says(f"in parts {parts / 1000:,.0f} KB, and a head of {written.head.ByteSize():,} bytes")
    # A step of a move of every hundredth bucket, and the worst that a chunk can be.
    moved = {
        at: held._replace(joining=(Place(0, 1),))
        for number, (at, held) in enumerate(plan.layout.items())
        if number % 100 == 0 and Place(0, 1) not in held.owners
    }
    after = LaidPlan(plan.head, plan.layout.changed(moved))
    after.head.epoch += 1
    step = chunks.written(after, plan, chunks.parts_of(written.head))
    says(f"{len(moved):,} buckets spread over all tables writes {_kb(step):,.0f} KB")
    codes: Codes = next(iter(plan.layout.codes.values())).copy()
    values = sorted(set(codes.tolist()))
    codes[:] = [values[at % len(values)] for at in range(len(codes))]
    worst = chunks.encoded(codes, plan).ByteSize()
    says(f"no two neighbours agree has {worst / 1000:.1f} KB")


def _kb(step: chunks.Written) -> float:
    return (step.head.ByteSize() + sum(map(len, step.parts.values()))) / 1000


def test_beats_and_detection_are_those_of_the_code() -> None:
    for nodes, base_ms in ((64, 200), (1000, 200)):
        interval_ms = max(base_ms, BEAT_MS_A_NODE * nodes)
        says(
            f"| {nodes:,} | {interval_ms:,} ms | {1000 * nodes // interval_ms:,} | "
            f"{BEATS_MISSED * interval_ms / 1000:g} s |"
        )
