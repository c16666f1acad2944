"""A plan's assignments bucket by bucket, which is how they are changed, and back as runs.

A layout has one entry per (table id, bucket) of the plan, in ascending order; a plan on the wire
has one assignment per run of neighbours that agree. Readers take any mapping. Plans themselves are
kept in a PackedLayout: four bytes a bucket, however many buckets there are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embertide.v1 import plan_pb2

# Sets of holders that a layout and its successors share before unused ones are dropped.
_SHARED_MAX = 1 << 16


class Place(NamedTuple):
    """A device: positions of the node in the topology and of the device in the node."""

    node: int
    device: int


class Bucket(NamedTuple):
    """The unit that is owned and moved."""

    table: int
    bucket: int


class Holders(NamedTuple):
    """The holders of a bucket, as the three lists of an Assignment."""

    owners: tuple[Place, ...]
    joining: tuple[Place, ...] = ()
    leaving: tuple[Place, ...] = ()


Layout = Mapping[Bucket, Holders]
Codes = NDArray[np.int32]


class BucketRun(NamedTuple):
    """Neighbouring buckets of one table that have the same holders."""

    table: int
    begin: int
    buckets: int
    held: Holders


class _Palette:
    """Distinct holders, each with a number. Grows; a number never changes its meaning."""

    def __init__(self, holders: Iterable[Holders] = ()) -> None:
        self.holders = list(holders)
        self.codes = {each: code for code, each in enumerate(self.holders)}

    def code(self, held: Holders) -> int:
        """Return the number of these holders, a new one if they have none."""
        code = self.codes.setdefault(held, len(self.holders))
        if code == len(self.holders):
            self.holders.append(held)
        return code


class PackedLayout(Mapping[Bucket, Holders]):
    """A layout in arrays. It never changes; `changed` returns another that shares most of it.

    Invariants:
        1. `codes[table][bucket]` is a number of the palette, or -1 if the bucket is not laid out.
        2. Arrays are never written to once the layout is made; successors share them.
        3. The palette is only appended to, and never while it is pickled (`__reduce__` copies).
        4. `_counts`, once it is made, is what (1) and (2) give.
    """

    __slots__ = ("_counts", "_palette", "codes")

    def __init__(self, codes: Mapping[int, Codes], palette: Iterable[Holders] | _Palette) -> None:
        """Take the codes of each table, by its id, and the holders that they number."""
        self.codes = {table: codes[table] for table in sorted(codes)}
        self._palette = palette if isinstance(palette, _Palette) else _Palette(palette)
        self._counts: dict[int, int] | None = None

    def __reduce__(self) -> tuple[type["PackedLayout"], tuple[dict[int, Codes], list[Holders]]]:
        """Pickle what is in use."""
        small = self._compacted()
        return PackedLayout, (small.codes, list(small._palette.holders))

    def __getitem__(self, at: Bucket) -> Holders:
        """Return who holds a bucket."""
        codes = self.codes.get(at[0])
        code = int(codes[at[1]]) if codes is not None and 0 <= at[1] < len(codes) else -1
        if code < 0:
            raise KeyError(at)
        return self._palette.holders[code]

    def __iter__(self) -> Iterator[Bucket]:
        """Yield the buckets, ascending."""
        for table, codes in self.codes.items():
            for bucket in np.flatnonzero(codes >= 0).tolist():
                yield Bucket(table, bucket)

    def __len__(self) -> int:
        """Count the buckets."""
        return sum(int(np.count_nonzero(codes >= 0)) for codes in self.codes.values())

    def runs(self) -> Iterator[BucketRun]:
        """Yield runs of neighbours that agree, ascending."""
        holders = self._palette.holders
        for table, codes in self.codes.items():
            begins = _run_begins(codes)
            counts = np.diff(begins, append=len(codes))
            found = zip(begins.tolist(), counts.tolist(), codes[begins].tolist(), strict=True)
            for begin, count, code in found:
                if code >= 0:
                    yield BucketRun(table, begin, count, holders[code])

    def run_count(self) -> int:
        """Count the runs."""
        return sum(
            int(np.count_nonzero(codes[_run_begins(codes)] >= 0)) for codes in self.codes.values()
        )

    def in_use(self) -> list[Holders]:
        """Return the distinct holders, in no order."""
        return list(self.codes_in_use().values())

    def codes_in_use(self) -> dict[int, Holders]:
        """Return the distinct holders by their codes, ascending."""
        return {code: self._palette.holders[code] for code in self.buckets_by_code()}

    def buckets_by_code(self) -> Mapping[int, int]:
        """Count the buckets of each code that is in use; counted once, as there may be 2^20."""
        if self._counts is None:
            total = np.zeros(len(self._palette.holders) + 1, np.int64)
            for codes in self.codes.values():
                # -1 becomes 0, which stands for no code.
                found = np.bincount(codes + 1, minlength=len(total))
                total += found[: len(total)]
            self._counts = {
                code: int(total[code + 1]) for code in np.flatnonzero(total[1:]).tolist()
            }
        return self._counts

    def of_codes(self, codes: Codes) -> list[Holders]:
        """Return the holders that codes of this layout number."""
        return [self._palette.holders[code] for code in codes.tolist()]

    def comparable(self, other: "PackedLayout") -> bool:
        """Whether equal codes mean equal holders in both, and both have the same buckets."""
        return self._palette is other._palette and {
            table: len(codes) for table, codes in self.codes.items()
        } == {table: len(codes) for table, codes in other.codes.items()}

    def changed(self, holders: Mapping[Bucket, Holders]) -> "PackedLayout":
        """Return the layout with these buckets held by others. Requires: it has these buckets."""
        if len(self._palette.holders) > _SHARED_MAX:
            return self._compacted()._changed(holders)
        return self._changed(holders)

    def _changed(self, holders: Mapping[Bucket, Holders]) -> "PackedLayout":
        codes = dict(self.codes)
        for at, held in holders.items():
            if codes[at.table] is self.codes[at.table]:
                codes[at.table] = self.codes[at.table].copy()
            codes[at.table][at.bucket] = self._palette.code(held)
        return PackedLayout(codes, self._palette)

    def with_holders(self, change: Callable[[Holders], Holders]) -> "PackedLayout":
        """Return the layout with each set of holders replaced by what `change` makes of it."""
        small = self._compacted()
        return PackedLayout(small.codes, map(change, small._palette.holders))

    def _compacted(self) -> "PackedLayout":
        """Return the same with a palette of its own that has nothing unused."""
        used = self.in_use()
        new_code = np.full(len(self._palette.holders) + 1, -1, np.int32)
        new_code[[self._palette.codes[held] for held in used]] = np.arange(len(used))
        return PackedLayout({table: new_code[codes] for table, codes in self.codes.items()}, used)


def _run_begins(codes: Codes) -> NDArray[np.intp]:
    """Return where runs of equal codes begin."""
    return np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))


def place(owner: plan_pb2.Owner) -> Place:
    """Read an Owner."""
    return Place(owner.node, owner.device)


def owner(at: Place) -> plan_pb2.Owner:
    """Write an Owner."""
    return plan_pb2.Owner(node=at.node, device=at.device)


def holders(assignment: plan_pb2.Assignment) -> Holders:
    """Read who holds the buckets of an assignment."""
    return Holders(
        tuple(map(place, assignment.owners)),
        tuple(map(place, assignment.joining)),
        tuple(map(place, assignment.leaving)),
    )


def packed_runs(runs: Iterable[BucketRun]) -> PackedLayout:
    """Return the layout that runs make. A bucket of two runs is as the later one says."""
    listed = list(runs)
    size: dict[int, int] = {}
    for run in listed:
        size[run.table] = max(size.get(run.table, 0), run.begin + run.buckets)
    codes = {table: np.full(count, -1, np.int32) for table, count in size.items()}
    palette = _Palette()
    for run in listed:
        codes[run.table][run.begin : run.begin + run.buckets] = palette.code(run.held)
    return PackedLayout(codes, palette)


def packed(layout: Layout) -> PackedLayout:
    """Return a layout in arrays."""
    if isinstance(layout, PackedLayout):
        return layout
    return packed_runs(BucketRun(*at, 1, layout[at]) for at in sorted(layout))


def layout_of(assignments: Iterable[plan_pb2.Assignment]) -> PackedLayout:
    """Spread assignments over their buckets."""
    return packed_runs(
        BucketRun(each.table_id, each.bucket_begin, each.bucket_count, holders(each))
        for each in assignments
    )


def assignments_of(layout: Layout) -> list[plan_pb2.Assignment]:
    """Join neighbours that agree into runs, ascending by (table, bucket)."""
    return [
        plan_pb2.Assignment(
            table_id=run.table,
            bucket_begin=run.begin,
            bucket_count=run.buckets,
            owners=map(owner, run.held.owners),
            joining=map(owner, run.held.joining),
            leaving=map(owner, run.held.leaving),
        )
        for run in packed(layout).runs()
    ]


class LaidPlan(NamedTuple):
    """A plan whose assignments are a layout.

    Attributes:
        head: The plan without assignments.
        layout: They.
    """

    head: plan_pb2.Plan
    layout: PackedLayout

    @classmethod
    def of(cls, plan: plan_pb2.Plan) -> "LaidPlan":
        """Take a plan apart."""
        head = plan_pb2.Plan()
        head.CopyFrom(plan)
        head.ClearField("assignments")
        return cls(head, layout_of(plan.assignments))

    @property
    def epoch(self) -> int:
        """Its epoch."""
        return self.head.epoch

    def whole(self) -> plan_pb2.Plan:
        """Return it as one message, which takes a while where it has many runs."""
        plan = plan_pb2.Plan()
        plan.CopyFrom(self.head)
        plan.assignments.extend(assignments_of(self.layout))
        return plan


def devices(topology: plan_pb2.Topology) -> dict[Place, plan_pb2.Device]:
    """Return every device of a topology by its place."""
    return {
        Place(position, device.index): device
        for position, node in enumerate(topology.nodes)
        for device in node.devices
    }


def budget_bytes(device: plan_pb2.Device) -> int:
    """Return what all tiers of a device may hold together."""
    return sum(each.budget_bytes for each in device.budgets)


def place_name(topology: plan_pb2.Topology, at: Place) -> str:
    """Name a device as operators write it: NODE/DEVICE."""
    return f"{topology.nodes[at.node].name}/{at.device}"


def bucket_name(tables: Iterable[plan_pb2.PlannedTable], at: Bucket) -> str:
    """Name a bucket as operators read it."""
    names = {table.id: table.name for table in tables}
    return f"bucket {at.bucket} of table {names.get(at.table, at.table)!r}"
