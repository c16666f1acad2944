"""The cost of a plan: each device's time a second, and one figure to compare plans by.

All planners are compared by `Score`, and the decision to move goes by it too (core/drift). Letters
of shapes are those of instance.py; F kinds of work, as in prices.py.

    busy us/s = work_F · prices_F: lookups by tier, copies, keys asked and answered, requests,
                requests that need a certain peer, bytes of rows looked up, bytes between nodes

Two of these are expected, not counted. Requests that ask a peer for m keys each in the mean, if
keys fall to peers by chance, need that peer with probability 1 - exp(-m). Sums that peers return
follow from the share of the keys that they answer (wire.py).
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from embertide.server.core.plan.figures import Cost
from embertide.server.core.plan.instance import (
    Bools,
    Floats,
    Instance,
    by_table,
    instances,
    owned_after,
    rates,
)
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.prices import KINDS, Prices
from embertide.server.core.plan.wire import Wire, wire_of
from embertide.server.core.plan.workload import TableTraits


class Score(NamedTuple):
    """A plan's cost; less is better. Compared by `value`.

    Attributes:
        busiest_us: Time a second that the busiest device spends.
        mean_us: Mean over the devices.
    """

    busiest_us: float
    mean_us: float

    @property
    def value(self) -> float:
        """One figure: throughput ends where the busiest device does; work saved counts a little."""
        return self.busiest_us + MEAN_WEIGHT * self.mean_us


# Where the busiest devices of two plans are equal, the plan with less work in all is better.
MEAN_WEIGHT = 0.25
KIB = 1024


def lookup_us_T(instance: Instance, prices: Prices) -> Floats:
    """Return what a key looked up costs, by table, as the tiers have its rows today."""
    return np.array([lookup_us(table, prices) for table in instance.tables])


def asked_us_T(instance: Instance, prices: Prices) -> Floats:
    """Return what a key asked of a peer costs the asker, by table."""
    sums_T = np.array([table.sum_share for table in instance.tables])
    return sums_T * prices.asked_sum_us + (1 - sums_T) * prices.asked_row_us


def lookup_us(table: TableTraits, prices: Prices) -> float:
    """Return what a key of a table looked up costs, as the tiers have its rows today."""
    missing = max(0.0, 1.0 - sum(table.tier_share))
    bytes_us = prices.read_kib_us * table.row_bytes / KIB
    return float(np.dot(prices.hit_us, table.tier_share)) + prices.default_us * missing + bytes_us


def _lookups_TF(instance: Instance) -> Floats:
    """Return the shares of a key looked up that are found in HBM, DDR, SSD and nowhere."""
    return np.array(
        [[*table.tier_share, max(0.0, 1.0 - sum(table.tier_share))] for table in instance.tables]
    )


def needed_NN(asked_NN: Floats, requests_N: Floats) -> Floats:
    """Return how many requests a second of each node need each peer.

    Args:
        asked_NN: Keys a second that a node (first) asks of another, each once a request; axes may
            stand before these two.
        requests_N: Requests a second of a node's own clients.
    """
    requests_N1 = requests_N[:, None]
    keys_NN = asked_NN / np.maximum(requests_N1, 1e-9)
    needed: Floats = requests_N1 * -np.expm1(-keys_NN)
    return needed


def wire_in(instance: Instance) -> Wire:
    """Return what keys asked come to on the wire."""
    return wire_of(instance.tables, by_table(instance, instance.wanted_NB))


def wire_kib_N(bytes_XNN: Floats) -> Floats:
    """Return KiB that each node sends and receives, X x N, of bytes between any two."""
    kib_XN: Floats = (bytes_XNN.sum(axis=-1) + bytes_XNN.sum(axis=-2)) / KIB
    return kib_XN


def work_DF(instance: Instance, owned_DB: Bools) -> Floats:
    """Return what each device does a second under an ownership, by kind of work.

    A node's work beside lookups is shared evenly by its devices.
    """
    now = rates(instance, owned_DB)
    tables_T = np.arange(len(instance.tables))
    sums_T = np.array([table.sum_share for table in instance.tables])
    row_kib_T = np.array([table.row_bytes for table in instance.tables]) / KIB
    needed = needed_NN(now.asked_of_NN, instance.requests_N)
    node_NF = np.stack(
        [
            now.copied_NT.sum(axis=1),
            now.asked_NT @ (1 - sums_T),
            now.asked_NT @ sums_T,
            np.zeros(len(instance.nodes_N)),
            instance.requests_N,
            needed.sum(axis=1),
            needed.sum(axis=0),
            np.zeros(len(instance.nodes_N)),
            wire_kib_N(wire_in(instance).bytes(tables_T, now.asked_of_TNN).sum(axis=0)),
            np.ones(len(instance.nodes_N)),
        ],
        axis=1,
    )
    devices_N = np.bincount(instance.node_D, minlength=len(instance.nodes_N))
    shared_NF = node_NF / np.maximum(devices_N, 1)[:, None]
    lookups_DT = now.here_DT + now.for_peers_DT
    lookups_DF = lookups_DT @ _lookups_TF(instance)
    work: Floats = np.concatenate([lookups_DF, shared_NF[instance.node_D]], axis=1)
    work[:, KINDS.index("answered")] = now.for_peers_DT.sum(axis=1)
    work[:, KINDS.index("read_kib")] = lookups_DT @ row_kib_T
    return work


def busy_us_D(instance: Instance, owned_DB: Bools, prices: Prices) -> Floats:
    """Return the time that each device spends a second under an ownership."""
    busy_us: Floats = work_DF(instance, owned_DB) @ prices.us_F
    return busy_us


def score_of(instance: Instance, busy_us_D: Floats) -> Score:
    """Return the score of the time that the devices spend."""
    open_D = busy_us_D[instance.open_D]
    return Score(float(open_D.max()), float(open_D.mean())) if len(open_D) else Score(0.0, 0.0)


def score(instance: Instance, owned_DB: Bools, prices: Prices) -> Score:
    """Return the cost of an ownership."""
    return score_of(instance, busy_us_D(instance, owned_DB, prices))


def fleet_cost(found: Iterable[tuple[Instance, Bools]], prices: Prices) -> Cost:
    """Return what ownerships of all groups cost together."""
    busiest = total = asked = value = 0.0
    count = 0
    for instance, owned_DB in found:
        busy_D = busy_us_D(instance, owned_DB, prices)
        open_D = busy_D[instance.open_D]
        if not len(open_D):
            continue
        busiest = max(busiest, float(open_D.max()))
        value += score_of(instance, busy_D).value
        total += float(open_D.sum())
        count += len(open_D)
        asked += float(rates(instance, owned_DB).asked_NT.sum())
    return Cost(busiest_us=busiest, mean_us=total / max(count, 1), asked_keys=asked, value=value)


def costed(problem: Problem, proposal: Proposal) -> Proposal:
    """Return a proposal with what today's plan and the proposed one cost.

    Where it has that already, or nobody has said what nodes ask for, it is returned as it is.
    """
    if proposal.before is not None or problem.workload.asking is None:
        return proposal
    groups = list(instances(problem))
    after = [(each, owned_after(each, proposal.owners)) for each in groups]
    return dataclasses.replace(
        proposal,
        before=fleet_cost([(each, each.owned_DB) for each in groups], problem.prices),
        after=fleet_cost(after, problem.prices),
    )
