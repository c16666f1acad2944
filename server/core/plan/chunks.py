"""Plans in parts, as `state` keeps those of many runs: a head, the machines, and chunks of buckets.

A part is named by its place ("machines", or TABLE.NUMBER for a chunk) and by the epoch in which it
changed last. An epoch writes only the parts that it changes, and a reader that has the others under
the same epochs keeps them. Which parts a plan has is in its head (PlanChunks in plan.proto).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from embertide.server.core.errors import invalid
from embertide.server.core.plan.layout import (
    BucketRun,
    Codes,
    Holders,
    LaidPlan,
    owner,
    packed_runs,
    place,
)
from embertide.v1 import plan_pb2

CHUNK_BUCKETS = 1024
# A plan is written as one message, which older nodes read too, while its runs and 16 times its
# nodes are at most so many: then it has some 100 KB.
WHOLE_MAX = 4096
MACHINES = "machines"
_OF_MACHINES = ("topology", "tier_shares")
_NODE_AS_RUNS = 16


class Part(NamedTuple):
    """A part under its name."""

    place: str
    epoch: int

    @property
    def name(self) -> str:
        """The end of the key in `state`."""
        return f"{self.place}:{self.epoch}"


class Written(NamedTuple):
    """A plan as it is written.

    Attributes:
        head: The Plan of the epoch's key: whole, or naming its parts.
        parts: Those of its parts that are new.
    """

    head: plan_pb2.Plan
    parts: dict[Part, bytes]


def is_small(plan: LaidPlan) -> bool:
    """Whether a plan is written as one message."""
    nodes = len(plan.head.topology.nodes)
    return _NODE_AS_RUNS * nodes + plan.layout.run_count() <= WHOLE_MAX


def parts_of(head: plan_pb2.Plan) -> list[Part]:
    """Return the parts that a plan's head names; none: it is whole.

    Raises:
        RefusedError: It does not name as many as its tables have.
    """
    if not head.HasField("chunks"):
        return []
    places = list(_places(head, head.chunks.chunk_buckets))
    epochs = [head.chunks.machines_epoch, *head.chunks.epochs]
    if len(places) != len(epochs):
        raise invalid(f"plan {head.epoch} names {len(epochs)} parts; its tables have {len(places)}")
    return [Part(*each) for each in zip(places, epochs, strict=True)]


def _places(head: plan_pb2.Plan, chunk_buckets: int) -> Iterator[str]:
    yield MACHINES
    for table in head.tables:
        for number in range(_chunks_of(table, chunk_buckets)):
            yield f"{table.id}.{number}"


def _chunks_of(table: plan_pb2.PlannedTable, chunk_buckets: int) -> int:
    return -(-(1 << table.bucket_bits) // chunk_buckets)


def written(after: LaidPlan, before: LaidPlan | None, parts: list[Part]) -> Written:
    """Return what to write for a plan.

    Args:
        after: The plan.
        before: The one before it, if it is known.
        parts: That one's parts; none: it is whole, or not known.
    """
    if is_small(after):
        return Written(after.whole(), {})
    epochs = {part.place: part.epoch for part in parts}
    changed = _changed(after, before if parts else None)
    epochs |= dict.fromkeys(changed, after.epoch)
    head = _only(after.head, of_machines=False)
    head.chunks.chunk_buckets = CHUNK_BUCKETS
    head.chunks.machines_epoch, *rest = (epochs[each] for each in _places(head, CHUNK_BUCKETS))
    head.chunks.epochs.extend(rest)
    return Written(head, {Part(each, after.epoch): _encoded(after, each) for each in changed})


def _only(head: plan_pb2.Plan, *, of_machines: bool) -> plan_pb2.Plan:
    """Return the fields of a head that are in the part "machines", or the others."""
    some = plan_pb2.Plan()
    some.CopyFrom(head)
    for field, _ in head.ListFields():
        if (field.name in _OF_MACHINES) != of_machines:
            some.ClearField(field.name)  # type: ignore[arg-type]
    return some


def _changed(after: LaidPlan, before: LaidPlan | None) -> list[str]:
    """Return the places of the parts that differ between two plans; all without one before."""
    if before is None or not after.layout.comparable(before.layout):
        return list(_places(after.head, CHUNK_BUCKETS))
    machines = [_only(each.head, of_machines=True) for each in (after, before)]
    places = [] if machines[0] == machines[1] else [MACHINES]
    for table, codes in after.layout.codes.items():
        old = before.layout.codes[table]
        if codes is not old:
            numbers = np.unique(np.flatnonzero(codes != old) // CHUNK_BUCKETS)
            places += [f"{table}.{number}" for number in numbers.tolist()]
    return places


def _encoded(plan: LaidPlan, at: str) -> bytes:
    if at == MACHINES:
        return _only(plan.head, of_machines=True).SerializeToString()
    table, _, number = at.partition(".")
    begin = int(number) * CHUNK_BUCKETS
    codes = plan.layout.codes[int(table)][begin : begin + CHUNK_BUCKETS]
    return encoded(codes, plan).SerializeToString()


def encoded(codes: Codes, plan: LaidPlan) -> plan_pb2.PlanChunk:
    """Return the chunk of some buckets, by their codes in a plan's layout."""
    begins = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
    values, which = np.unique(codes[begins], return_inverse=True)
    return plan_pb2.PlanChunk(
        holders=[
            plan_pb2.Holders(
                owners=map(owner, held.owners),
                joining=map(owner, held.joining),
                leaving=map(owner, held.leaving),
            )
            for held in plan.layout.of_codes(values)
        ],
        counts=np.diff(begins, append=len(codes)).tolist(),
        which=which.tolist(),
    )


def read(head: plan_pb2.Plan, found: Mapping[Part, bytes]) -> LaidPlan:
    """Return the plan that a head and its parts make.

    Raises:
        RefusedError: A chunk does not have the buckets that it should have.
    """
    if not head.HasField("chunks"):
        return LaidPlan.of(head)
    parts = parts_of(head)
    whole = plan_pb2.Plan()
    whole.CopyFrom(head)
    whole.ClearField("chunks")
    whole.MergeFromString(found[parts[0]])
    at, runs = 1, list[BucketRun]()
    for table in head.tables:
        for number in range(_chunks_of(table, head.chunks.chunk_buckets)):
            begin = number * head.chunks.chunk_buckets
            end = min(begin + head.chunks.chunk_buckets, 1 << table.bucket_bits)
            runs += _runs(table.id, begin, end, found[parts[at]], parts[at])
            at += 1
    return LaidPlan(whole, packed_runs(runs))


def _runs(table: int, begin: int, end: int, chunk: bytes, part: Part) -> Iterator[BucketRun]:
    message = plan_pb2.PlanChunk.FromString(chunk)
    palette = [
        Holders(
            tuple(map(place, each.owners)),
            tuple(map(place, each.joining)),
            tuple(map(place, each.leaving)),
        )
        for each in message.holders
    ]
    counts, which = list(message.counts), list(message.which)
    if (
        len(counts) != len(which)
        or sum(counts) != end - begin
        or 0 in counts
        or max(which, default=0) >= len(palette)
    ):
        raise invalid(f"chunk {part.name} does not lay out buckets {begin} to {end - 1}")
    for count, position in zip(counts, which, strict=True):
        yield BucketRun(table, begin, count, palette[position])
        begin += count
