"""A planning problem in arrays: what planners compute with.

Groups do not ask each other, so each group is an instance of its own. Letters of shapes: N nodes of
the group, D their devices, B buckets of all tables in ascending order, T tables.

Rates are keys a second; one key asked for twice counts twice.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.groups import whole_groups
from embertide.server.core.plan.layout import Bucket, Place, budget_bytes, devices
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.workload import TableTraits
from embertide.v1 import plan_pb2

_GROWTH = 1.1  # of a device with an SSD tier whose memory is full
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One group's problem. Nothing in it is changed after it is made.

    Attributes:
        group: Number of the group.
        places_D: Its devices, in the topology's order.
        node_D: Position of each device's node among the group's nodes.
        nodes_N: Position of each node in the topology.
        buckets_B: The buckets, ascending.
        table_B: Position of each bucket's table in `tables`.
        tables: Traits by table, in the plan's order.
        wanted_NB: Keys that a node's own requests want of a bucket, wherever they are answered.
        copied_NT: Share of the keys that a node wants of buckets it does not hold which its copies
            of hot rows answer.
        bytes_B: Resident bytes of one copy of a bucket.
        budget_D: Bytes that a device may hold: of all its tiers, but see `_budgets`.
        open_D: Devices that may get buckets.
        owned_DB: Today's owners.
        requests_N: Requests a second of a node's own clients; zeros where that is not known.
    """

    group: int
    places_D: tuple[Place, ...]
    node_D: Ints
    nodes_N: tuple[int, ...]
    buckets_B: tuple[Bucket, ...]
    table_B: Ints
    tables: tuple[TableTraits, ...]
    wanted_NB: Floats
    copied_NT: Floats
    bytes_B: Floats
    budget_D: Floats
    open_D: Bools
    owned_DB: Bools
    requests_N: Floats

    def held_NB(self, owned_DB: Bools) -> Bools:
        """Return which nodes own which buckets on any of their devices."""
        held = np.zeros((len(self.nodes_N), owned_DB.shape[1]), np.bool_)
        for device, node in enumerate(self.node_D):
            held[node] |= owned_DB[device]
        return held

    def bytes_D(self, owned_DB: Bools) -> Floats:
        """Return the resident bytes of each device under an ownership."""
        return owned_DB.astype(np.float64) @ self.bytes_B


class Rates(NamedTuple):
    """Keys a second that an ownership makes of an instance's demand.

    Attributes:
        here_DT: Looked up on a device for its node's own requests, by table.
        for_peers_DT: Looked up on a device for peers.
        asked_NT: Asked of peers by a node.
        copied_NT: Answered by a node's copies of hot rows.
        asked_of_TNN: Sent by a node (first) to another, by table; a key that a request asks for
            twice is sent once.
    """

    here_DT: Floats
    for_peers_DT: Floats
    asked_NT: Floats
    copied_NT: Floats
    asked_of_TNN: Floats

    @property
    def asked_of_NN(self) -> Floats:
        """Keys of all tables that a node (first) sends another."""
        asked_of: Floats = self.asked_of_TNN.sum(axis=0)
        return asked_of


def rates(instance: Instance, owned_DB: Bools) -> Rates:
    """Return what each device and node does under an ownership.

    An asker that owns a bucket reads it itself. Otherwise its keys go to one of the owners, which
    rendezvous hashing chooses anew for each bucket: in the mean, owners share them evenly.
    """
    held_NB = instance.held_NB(owned_DB)
    owners_B = np.maximum(owned_DB.sum(axis=0), 1)
    elsewhere_NB = np.where(held_NB, 0.0, instance.wanted_NB)
    copied_NB = elsewhere_NB * instance.copied_NT[:, instance.table_B]
    asked_NB = elsewhere_NB - copied_NB
    sent_T = np.array([table.sent_share for table in instance.tables])
    sent_NB = asked_NB * (sent_T[instance.table_B] / owners_B)
    share_B = sent_NB.sum(axis=0)
    here_DB = np.where(owned_DB, instance.wanted_NB[instance.node_D], 0.0)
    return Rates(
        by_table(instance, here_DB),
        by_table(instance, np.where(owned_DB, share_B, 0.0)),
        by_table(instance, asked_NB),
        by_table(instance, copied_NB),
        _asked_of(instance, sent_NB, held_NB),
    )


def _asked_of(instance: Instance, sent_NB: Floats, held_NB: Bools) -> Floats:
    """Return the keys that nodes (first) send those that hold the buckets, by table."""
    held_BN = held_NB.T.astype(np.float64)
    return np.array([sent_NB[:, at] @ held_BN[at] for at in buckets_T(instance)])


def buckets_T(instance: Instance) -> list[slice]:
    """Return where each table's buckets are."""
    ends = np.searchsorted(instance.table_B, np.arange(len(instance.tables) + 1)).tolist()
    return [slice(*each) for each in itertools.pairwise(ends)]


def by_table(instance: Instance, values_XB: Floats) -> Floats:
    """Add up values of buckets by table."""
    starts_T = np.searchsorted(instance.table_B, np.arange(len(instance.tables)))
    return np.add.reduceat(values_XB, starts_T, axis=1)


def instances(problem: Problem) -> Iterator[Instance]:
    """Yield the instance of each group that owns every bucket, ascending by group.

    Raises:
        RefusedError: Nobody has reported what nodes ask for.
    """
    plan, topology = problem.plan, problem.plan.topology
    buckets_B = tuple(sorted(problem.layout))
    position = {table.id: at for at, table in enumerate(plan.tables)}
    table_B = np.array([position[at.table] for at in buckets_B], np.int64)
    known = devices(topology)
    asking = problem.workload.asking
    if asking is None:
        raise RefusedError(
            Code.FAILED_PRECONDITION, "no node has reported its load yet; wait some seconds"
        )
    # A group that comes or goes is filled and emptied by its own operations.
    for group in sorted(whole_groups(topology)):
        nodes_N = tuple(at for at, node in enumerate(topology.nodes) if node.group == group)
        places_D = tuple(sorted(at for at in known if at.node in nodes_N))
        device = {place: at for at, place in enumerate(places_D)}
        owned_DB = np.zeros((len(places_D), len(buckets_B)), np.bool_)
        for at, bucket in enumerate(buckets_B):
            for place in problem.layout[bucket].owners:
                if place in device:
                    owned_DB[device[place], at] = True
        yield Instance(
            group=group,
            places_D=places_D,
            node_D=np.array([nodes_N.index(place.node) for place in places_D], np.int64),
            nodes_N=nodes_N,
            buckets_B=buckets_B,
            table_B=table_B,
            tables=tuple(asking.traits.get(table.id, TableTraits()) for table in plan.tables),
            wanted_NB=asking.wanted_NB[list(nodes_N)],
            copied_NT=asking.copied_NT[list(nodes_N)],
            bytes_B=asking.bytes_B,
            budget_D=_budgets(
                [known[place] for place in places_D],
                owned_DB.astype(np.float64) @ asking.bytes_B,
                problem.filled,
            ),
            open_D=np.array([place.node not in problem.shunned for place in places_D]),
            owned_DB=owned_DB,
            requests_N=asking.requests_N[list(nodes_N)]
            if len(asking.requests_N)
            else np.zeros(len(nodes_N)),
        )


def _budgets(known_D: Sequence[plan_pb2.Device], held_D: Floats, filled: float) -> Floats:
    """Return the bytes that each device may hold by a plan, or what it holds already.

    A plan must not push rows to SSD: costs are computed as if the tiers had the rows that they have
    today. So a device with an SSD tier fills its memory, or grows by a tenth where that is full.
    """
    budgets = []
    for device, held in zip(known_D, held_D, strict=True):
        ssd = sum(each.budget_bytes for each in device.budgets if each.tier == plan_pb2.TIER_SSD)
        total, memory = budget_bytes(device), budget_bytes(device) - ssd
        room = min(filled * total, max(filled * memory, _GROWTH * held)) if ssd else filled * total
        budgets.append(room)
    return np.array(budgets, np.float64)


def owners_of(
    instance: Instance, owned_DB: Bools, layout_owners: Mapping[Bucket, tuple[Place, ...]]
) -> dict[Bucket, tuple[Place, ...]]:
    """Return the owners of the buckets that an ownership changes, those of other groups kept.

    Args:
        instance: The group's problem.
        owned_DB: The owners that shall be.
        layout_owners: The owners today, of all groups.
    """
    changed: dict[Bucket, tuple[Place, ...]] = {}
    ours = set(instance.places_D)
    for at in np.flatnonzero((owned_DB != instance.owned_DB).any(axis=0)):
        bucket = instance.buckets_B[at]
        others = tuple(place for place in layout_owners[bucket] if place not in ours)
        mine = tuple(instance.places_D[device] for device in np.flatnonzero(owned_DB[:, at]))
        changed[bucket] = (*others, *mine)
    return changed


def owned_after(instance: Instance, owners: Mapping[Bucket, tuple[Place, ...]]) -> Bools:
    """Return who of a group owns what once buckets have these owners; others stay."""
    owned_DB = instance.owned_DB.copy()
    device = {place: at for at, place in enumerate(instance.places_D)}
    position = {bucket: at for at, bucket in enumerate(instance.buckets_B)}
    for bucket, places in owners.items():
        at = position[bucket]
        owned_DB[:, at] = False
        owned_DB[[device[place] for place in places if place in device], at] = True
    return owned_DB
