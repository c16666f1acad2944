"""Nodes' reads of each bucket and keys asked of others, over several windows.

A node's load windows are added up in counts that halve: in a minute, in ten, in an hour and in a
day. Counts and the time that they cover halve together, so that their quotient is a rate from the
first window on. They halve by the wall clock, or by event time where a stream is replayed faster
than it came about: then a window counts as long as the watermark moved. Rates are for each second
of the wall clock all the same, as nodes spend their time in it.

A node that does not say what it reads is unknown, and not idle: its counts stay as they were, and
`unknown` names it.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embertide.server.core.bags import Bags
from embertide.server.core.plan.bucket_columns import BucketColumns, bucket_columns
from embertide.server.core.plan.layout import Bucket, Layout, PackedLayout, packed
from embertide.server.core.plan.wire import KEY_BYTES
from embertide.server.core.plan.workload import Asking, TableTraits, Work, Workload
from embertide.server.core.row_demand import RowDemand
from embertide.v1 import node_pb2, plan_pb2

Clock = Literal["wall", "event"]
HALF_LIVES_S = (60, 600, 3600, 86_400)
PLANNED_BY_S = 600
# By which gains are predicted: three load windows of a node.
NEWEST_S = 15
_KEPT_S = (NEWEST_S, *HALF_LIVES_S)
# Three windows of a node: it was asked as often.
UNKNOWN_AFTER_MS = 15_000
# Where there are many nodes, 100 a second are asked; see services/driver.py.
UNKNOWN_MS_A_NODE = 30
# Plans and people get numbers for this time, which is that of a load window.
WINDOW_S = 5
_KINDS = ("here", "for_peers", "asked", "hot")


# Buckets that are kept of a node, some 1.3 MB.
PLACES_MAX = 1 << 14
# Nodes times buckets up to which planners are told who asks for what: 2 GB at most.
ASKING_MAX = 1 << 26


class Buckets:
    """Places of all buckets of the tables in flat arrays."""

    def __init__(self, tables: Iterable[plan_pb2.PlannedTable]) -> None:
        """Give each bucket its place, table by table."""
        self._first: dict[int, int] = {}
        self._count: dict[int, int] = {}
        self.count = 0
        for table in tables:
            self._first[table.id] = self.count
            self._count[table.id] = 1 << table.bucket_bits
            self.count += 1 << table.bucket_bits

    def places(self, columns: BucketColumns) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """Return the places that columns speak of, ascending, and the last entry of each.

        Buckets that there are not are left out.
        """
        place_L = np.full(len(columns.table), -1, np.int64)
        for table in np.unique(columns.table).tolist():
            at = (columns.table == table) & (columns.bucket < self._count.get(table, 0))
            place_L[at] = self._first.get(table, 0) + columns.bucket[at]
        known = np.flatnonzero(place_L >= 0)[::-1]
        places, first = np.unique(place_L[known], return_index=True)
        return places, known[first]

    def codes(self, layout: PackedLayout) -> NDArray[np.int32]:
        """Return a layout's codes by place; -1 where it has no such bucket."""
        codes = np.full(self.count, -1, np.int32)
        for table, of_table in layout.codes.items():
            if table in self._first:
                count = min(len(of_table), self._count[table])
                codes[self._first[table] : self._first[table] + count] = of_table[:count]
        return codes

    def names(self, places: NDArray[np.int64]) -> list[Bucket]:
        """Return the buckets at places."""
        tables = list(self._first)
        firsts = np.array([self._first[table] for table in tables], np.int64)
        which = np.searchsorted(firsts, places, side="right") - 1
        buckets = (places - firsts[which]).tolist() if len(places) else []
        return [
            Bucket(tables[table], bucket)
            for table, bucket in zip(which.tolist(), buckets, strict=True)
        ]

    def of_table(self, table: int) -> slice:
        """Return the places of a table's buckets."""
        return slice(self._first[table], self._first[table] + self._count[table])


@dataclasses.dataclass(slots=True)
class _Node:
    """A node's counts, H half-lives x K kinds x P buckets, and the seconds they cover.

    The buckets are those that the node has said something of, as ascending places.
    """

    places_P: NDArray[np.int64]
    counts_HKP: NDArray[np.float32]
    seconds_H: NDArray[np.float64]
    requests_H: NDArray[np.float64]  # of the node's own clients
    busy_us_H: NDArray[np.float64]  # CPU time of its process
    bytes_P: NDArray[np.int64]  # resident, as reported last
    tables: dict[int, "_TableReads"] = dataclasses.field(default_factory=dict)
    window: int = 0  # of the last load
    watermark_ms: int = 0
    heard_ms: int = 0


@dataclasses.dataclass(slots=True)
class _TableReads:
    """A node's reads of a table in the last window, and what it asked of peers since its start."""

    reads: int = 0
    bytes: int = 0
    in_tier: tuple[int, int, int] = (0, 0, 0)  # of `reads`, found in HBM, DDR, SSD
    asked: int = 0
    asked_in_sums: int = 0
    sums: int = 0
    asked_bytes: int = 0


def _tables_of(
    load: node_pb2.NodeServiceGetLoadResponse, columns: BucketColumns
) -> dict[int, _TableReads]:
    tables: dict[int, _TableReads] = collections.defaultdict(_TableReads)
    for id in np.unique(columns.table).tolist():
        at = columns.table == id
        hbm, ddr, ssd = columns.in_tier[:, at].sum(axis=1).tolist()
        tables[id] = _TableReads(
            reads=int(columns.reads[at].sum()),
            bytes=int(columns.bytes_read[at].sum()),
            in_tier=(hbm, ddr, ssd),
        )
    for peer in load.peers:
        for traffic in peer.tables:
            table = tables[traffic.table_id]
            table.asked += traffic.keys
            table.asked_in_sums += traffic.sum_keys
            # A node that does not count sums: as if each key had one.
            table.sums += traffic.sums or traffic.sum_keys
            table.asked_bytes += traffic.bytes
    return dict(tables)


def _make_places(node: _Node, places_L: NDArray[np.int64]) -> None:
    """Let a node have these places, with zeros where they are new."""
    places_P = np.union1d(node.places_P, places_L)
    if len(places_P) == len(node.places_P):
        return
    at = np.searchsorted(places_P, node.places_P)
    counts = np.zeros((*node.counts_HKP.shape[:2], len(places_P)), np.float32)
    counts[:, :, at] = node.counts_HKP
    node.places_P, node.counts_HKP = places_P, counts
    node.bytes_P = np.zeros(len(places_P), np.int64)


def _drop_places(node: _Node) -> None:
    """Drop what is beyond the bound."""
    if len(node.places_P) <= PLACES_MAX:
        return
    weight_P = node.counts_HKP.sum(axis=(0, 1)) + (node.bytes_P > 0)
    kept = np.sort(np.argsort(-weight_P, kind="stable")[:PLACES_MAX])
    node.places_P, node.bytes_P = node.places_P[kept], node.bytes_P[kept]
    node.counts_HKP = node.counts_HKP[:, :, kept]


class Demand:
    """The counts of all nodes, by name.

    Bounded: 96 bytes a bucket that a node speaks of, and PLACES_MAX of those a node; of more, those
    are kept that are read or asked for most.
    """

    def __init__(self, clock: Clock = "wall") -> None:
        """Begin with none."""
        self._clock = clock
        self._buckets = Buckets(())
        self._tables: list[plan_pb2.PlannedTable] = []
        self._nodes: dict[str, _Node] = {}
        self._rows = RowDemand()
        self._bags = Bags()
        self.missed_windows = 0

    def take(
        self,
        name: str,
        load: node_pb2.NodeServiceGetLoadResponse,
        tables: Sequence[plan_pb2.PlannedTable],
        now_ms: int,
        columns: BucketColumns | None = None,
    ) -> None:
        """Add a node's last window, once; its columns are made here unless given."""
        columns = columns if columns is not None else bucket_columns(load)
        self._follow(tables)
        node = self._nodes.get(name)
        if node is None:
            halves = len(_KEPT_S)
            node = _Node(
                places_P=np.zeros(0, np.int64),
                counts_HKP=np.zeros((halves, len(_KINDS), 0), np.float32),
                bytes_P=np.zeros(0, np.int64),
                seconds_H=np.zeros(halves),
                requests_H=np.zeros(halves),
                busy_us_H=np.zeros(halves),
            )
            self._nodes[name] = node
        node.heard_ms = now_ms
        node.tables = _tables_of(load, columns)
        self._rows.take(name, load, columns)
        places_L, last_L = self._buckets.places(columns)
        _make_places(node, places_L)
        at_L = np.searchsorted(node.places_P, places_L)
        node.bytes_P[:] = 0
        node.bytes_P[at_L] = columns.bytes[last_L]
        now_KP = np.zeros(node.counts_HKP.shape[1:], np.float32)
        here = columns.reads - columns.peer_reads
        counts = np.stack((here, columns.peer_reads, columns.asked, columns.hot_reads))
        now_KP[:, at_L] = counts[:, last_L]
        fresh = load.window == 0 or load.window != node.window
        seconds = self._seconds(node, load) if fresh and load.window_ms else 0.0
        if not seconds:
            return
        if load.window and node.window and load.window > node.window + 1:
            self.missed_windows += load.window - node.window - 1
        keep_H = 0.5 ** (seconds / np.array(_KEPT_S))
        self._bags.take(name, load, float(keep_H[_KEPT_S.index(PLANNED_BY_S)]))
        node.counts_HKP *= keep_H[:, None, None].astype(np.float32)
        node.counts_HKP += now_KP
        _drop_places(node)
        node.seconds_H = node.seconds_H * keep_H + load.window_ms / 1000
        node.requests_H = node.requests_H * keep_H + float(load.requests)
        node.busy_us_H = node.busy_us_H * keep_H + float(load.cpu_us)
        node.window = load.window

    def _seconds(self, node: _Node, load: node_pb2.NodeServiceGetLoadResponse) -> float:
        """Return what a window covers."""
        before, node.watermark_ms = node.watermark_ms, load.watermark_ms
        if self._clock == "event" and before and load.watermark_ms > before:
            return (load.watermark_ms - before) / 1000
        return load.window_ms / 1000

    def _follow(self, tables: Sequence[plan_pb2.PlannedTable]) -> None:
        """Begin anew where the tables are others."""
        if list(tables) != self._tables:
            self._tables = list(tables)
            self._buckets = Buckets(tables)
            self._nodes.clear()
            self._bags.clear()

    def forget(self, name: str) -> None:
        """Drop a node, as when it is removed."""
        self._nodes.pop(name, None)
        self._rows.forget(name)
        self._bags.forget(name)

    def unknown(self, names: Iterable[str], now_ms: int) -> list[str]:
        """Return those of whom nobody knows what they read now."""
        after_ms = max(UNKNOWN_AFTER_MS, UNKNOWN_MS_A_NODE * len(self._nodes))
        known = {name for name, node in self._nodes.items() if now_ms - node.heard_ms <= after_ms}
        return [name for name in names if name not in known]

    def rates(self, name: str, half_life_s: int) -> Mapping[str, NDArray[np.float64]]:
        """Return keys a second by kind, each by bucket; zeros for a node never heard of.

        Kinds: `here`, own requests' of held buckets; `for_peers`; `asked`, own requests' that peers
        answered; `hot`, own requests' that copies answered.
        """
        node = self._nodes.get(name)
        which = _KEPT_S.index(half_life_s)
        if node is None or not node.seconds_H[which]:
            return {kind: np.zeros(self._buckets.count) for kind in _KINDS}
        rates_KB = np.zeros((len(_KINDS), self._buckets.count))
        rates_KB[:, node.places_P] = node.counts_HKP[which] / node.seconds_H[which]
        return dict(zip(_KINDS, rates_KB, strict=True))

    def _sparse(self, name: str, which: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the places that a node spoke of, and keys a second by kind at each."""
        node = self._nodes.get(name)
        if node is None:
            return np.zeros(0, np.int64), np.zeros((len(_KINDS), 0))
        return node.places_P, node.counts_HKP[which] / max(node.seconds_H[which], 1e-9)

    def workload(
        self, topology: plan_pb2.Topology, layout: Layout, half_life_s: int = PLANNED_BY_S
    ) -> Workload:
        """Return what each owner does for its buckets, in reads of a load window.

        An owner reads what its own requests want of the bucket, and its part of what the nodes of
        its group ask that do not own it. Those say so themselves; where one of them is not heard,
        the owner's count of what it read for peers stands in.
        """
        names = [node.name for node in topology.nodes]
        which = _KEPT_S.index(half_life_s)
        work: dict[tuple[Bucket, int], Work] = {}
        laid = packed(layout)
        for group in sorted({node.group for node in topology.nodes}):
            members = [at for at, node in enumerate(topology.nodes) if node.group == group]
            self._add_work(work, laid, {at: names[at] for at in members}, which)
        asking = None
        if self._buckets.count and len(names) * self._buckets.count <= ASKING_MAX:
            rates = [self.rates(name, half_life_s) for name in names]
            asking = self._asking(names, rates, half_life_s)
        return Workload(work=work, asking=asking)

    def newest(self, topology: plan_pb2.Topology) -> Asking | None:
        """Return who asks for what by the newest reads alone, which count half after NEWEST_S.

        None: nobody has said, or it is too much to be told twice.
        """
        names = [node.name for node in topology.nodes]
        if not 0 < len(names) * self._buckets.count <= ASKING_MAX // 2:
            return None
        rates = [self.rates(name, NEWEST_S) for name in names]
        return self._asking(names, rates, NEWEST_S)

    def _add_work(
        self,
        work: dict[tuple[Bucket, int], Work],
        layout: PackedLayout,
        members: Mapping[int, str],
        which: int,
    ) -> None:
        """Add the work of a group's nodes, by position and name."""
        code_B = self._buckets.codes(layout)
        palette = layout.codes_in_use()
        size = max(palette, default=-1) + 2  # the last place is that of -1
        owners_C = np.zeros(size)
        owned_NC = {node: np.zeros(size, np.bool_) for node in members}
        held_NC = {node: np.zeros(size, np.bool_) for node in members}
        for code, held in palette.items():
            for place in held.owners:
                if place.node in members:
                    owned_NC[place.node][code] = True
                    owners_C[code] += 1
            for places in held:
                for place in places:
                    if place.node in members:
                        held_NC[place.node][code] = True
        spoken = {node: self._sparse(name, which) for node, name in members.items()}
        others_B = np.zeros(self._buckets.count)  # asked by nodes that do not own the bucket
        for node, (places_P, rates_KP) in spoken.items():
            owns_P = owned_NC[node][code_B[places_P]]
            others_B[places_P] += np.where(owns_P, 0.0, rates_KP[_KINDS.index("asked")])
        for node, (places_P, rates_KP) in spoken.items():
            code_P = code_B[places_P]
            here_P, for_peers_P = rates_KP[0], rates_KP[1]
            share_P = others_B[places_P] / np.maximum(owners_C[code_P], 1)
            share_P = np.where(owned_NC[node][code_P], np.maximum(share_P, for_peers_P), 0.0)
            reads_P = np.rint((here_P + share_P) * WINDOW_S).astype(np.int64)
            of_node = self._nodes.get(members[node])
            bytes_P = of_node.bytes_P if of_node is not None else np.zeros(0, np.int64)
            kept = np.flatnonzero(held_NC[node][code_P] & ((here_P + share_P > 0) | (bytes_P > 0)))
            at = self._buckets.names(places_P[kept])
            for bucket, reads, bytes in zip(
                at, reads_P[kept].tolist(), bytes_P[kept].tolist(), strict=True
            ):
                work[bucket, node] = Work(reads, bytes)

    def _asking(
        self,
        names: Sequence[str],
        rates: Sequence[Mapping[str, NDArray[np.float64]]],
        half_life_s: int,
    ) -> Asking:
        """Return the same demand by who asks."""
        shape = (len(names), self._buckets.count)
        here_NB, asked_NB, hot_NB, for_peers_NB = (
            np.array([each[kind] for each in rates]).reshape(shape)
            for kind in ("here", "asked", "hot", "for_peers")
        )
        copied_NT = np.zeros((len(names), len(self._tables)))
        traits = {}
        for at, table in enumerate(self._tables):
            of_table = self._buckets.of_table(table.id)
            hot_N, asked_N = hot_NB[:, of_table].sum(axis=1), asked_NB[:, of_table].sum(axis=1)
            copied_NT[:, at] = hot_N / np.maximum(hot_N + asked_N, 1e-9)
            sent, asked = for_peers_NB[:, of_table].sum(), asked_N.sum()
            # Counts are samples, and nodes' windows begin at different times.
            sent_share = min(1.0, sent / asked) if asked and sent else 1.0
            usual = self._rows.traits(table.id, 1 << table.bucket_bits, self._traits(table.id))
            wanted_N = here_NB[:, of_table].sum(axis=1) + asked_N + hot_N
            asked_share_N = asked_N / np.maximum(wanted_N, 1e-9)
            shares = dict(zip(names, asked_share_N.tolist(), strict=True))
            traits[table.id] = usual._replace(
                sent_share=float(sent_share),
                bag_keys=self._bags.keys(table.id, shares, float(sent_share)),
            )
        bytes_B = np.zeros(shape[1])
        for name in names:
            if name in self._nodes:
                node = self._nodes[name]
                bytes_B[node.places_P] = np.maximum(bytes_B[node.places_P], node.bytes_P)
        return Asking(
            wanted_NB=here_NB + asked_NB + hot_NB,
            copied_NT=copied_NT,
            bytes_B=bytes_B,
            traits=traits,
            curves=self._rows.curves(names),
            row_room=self._rows.rooms(names),
            requests_N=np.array([self._requests(name, half_life_s) for name in names]),
            busy_us_N=np.array([self._busy_us(name, half_life_s) for name in names]),
        )

    def _requests(self, name: str, half_life_s: int) -> float:
        """Return a node's own requests a second."""
        node = self._nodes.get(name)
        which = _KEPT_S.index(half_life_s)
        if node is None or not node.seconds_H[which]:
            return 0.0
        return float(node.requests_H[which] / node.seconds_H[which])

    def _busy_us(self, name: str, half_life_s: int) -> float:
        """Return the CPU time that a node's process takes a second; 0: not known."""
        node = self._nodes.get(name)
        which = _KEPT_S.index(half_life_s)
        if node is None or not node.seconds_H[which]:
            return 0.0
        return float(node.busy_us_H[which] / node.seconds_H[which])

    def _traits(self, table: int) -> TableTraits:
        """Return what all nodes together say of a table; defaults where it was not read."""
        total, usual = _TableReads(), TableTraits()
        tiers = np.zeros(3)
        for node in self._nodes.values():
            each = node.tables.get(table, _TableReads())
            total.reads += each.reads
            total.bytes += each.bytes
            total.asked += each.asked
            total.asked_in_sums += each.asked_in_sums
            total.sums += each.sums
            total.asked_bytes += each.asked_bytes
            tiers += each.in_tier
        if total.reads:
            hbm, ddr, ssd = (tiers / total.reads).tolist()
            row_bytes = total.bytes / total.reads
            usual = usual._replace(
                row_bytes=row_bytes,
                tier_share=(hbm, ddr, ssd),
                vector_bytes=row_bytes + KEY_BYTES,
            )
        if total.asked:
            vectors = total.asked - total.asked_in_sums + total.sums
            usual = usual._replace(
                wire_bytes=total.asked_bytes / total.asked,
                vector_bytes=max(0.0, total.asked_bytes - KEY_BYTES * total.asked) / vectors,
                sum_share=total.asked_in_sums / total.asked,
            )
        return usual
