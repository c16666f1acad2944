"""The worth of changing the owners of one bucket, for all buckets at once.

The cost of an ownership (cost.py) is made linear where it stands: a unit of time is worth g_D on a
device, and a key more that node n asks of node m costs Q_nm for the request that needs m and for
the bytes between them, by table. Then the cost of one bucket with owners S, k of them, is

    sum over d in S of here_d g_d  +  sum over n not in S of elsewhere_n
    + (answer / k) X sum over d in S of g_d  +  (sent / k) sum over n not in S of a_n Q_n(S)

with a_n the keys that n would ask of peers, and X their sum over the nodes not in S. All changes of
all buckets follow from some products of matrices. Letters of shapes are those of instance.py.
"""

import dataclasses

import numpy as np

from embertide.server.core.plan.cost import KIB, asked_us_T, lookup_us_T, wire_in
from embertide.server.core.plan.instance import (
    Bools,
    Floats,
    Instance,
    Ints,
    buckets_T,
    rates,
)
from embertide.server.core.plan.prices import Prices
from embertide.server.core.plan.wire import Wire


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The terms that do not depend on the owners.

    Attributes:
        asked_NB: Keys a second that a node asks of peers, if it does not hold the bucket.
        here_NB: Time a second that it spends on its own keys, if it does.
        elsewhere_NB: The same if it does not: asking, and copies.
        sent_B: Share of the keys asked that are sent.
        answer_us_B: Cost of a key sent, for the peer.
        devices_N: Devices of a node.
        wire: The keys asked, as they come to the wire.
    """

    asked_NB: Floats
    here_NB: Floats
    elsewhere_NB: Floats
    sent_B: Floats
    answer_us_B: Floats
    devices_N: Ints
    wire: Wire


def terms_of(instance: Instance, prices: Prices) -> Terms:
    """Return an instance's terms."""
    table_B = instance.table_B
    sent_T = np.array([table.sent_share for table in instance.tables])
    lookup_B = lookup_us_T(instance, prices)[table_B]
    copied_NB = instance.wanted_NB * instance.copied_NT[:, table_B]
    asked_NB = instance.wanted_NB - copied_NB
    return Terms(
        asked_NB=asked_NB,
        here_NB=instance.wanted_NB * lookup_B,
        elsewhere_NB=asked_NB * asked_us_T(instance, prices)[table_B]
        + copied_NB * prices.copied_us,
        sent_B=sent_T[table_B],
        answer_us_B=lookup_B + prices.answered_us,
        devices_N=np.bincount(instance.node_D, minlength=len(instance.nodes_N)),
        wire=wire_in(instance),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Worths:
    """By how much single changes lower the cost; -inf where a change is not possible.

    Attributes:
        add_DB: A device becomes an owner.
        drop_DB: An owner is removed.
        move_DB: The bucket moves to a device from `source_DB`.
        source_DB: The owner from which a move gains most.
    """

    add_DB: Floats
    drop_DB: Floats
    move_DB: Floats
    source_DB: Ints


def _slopes(
    instance: Instance,
    terms: Terms,
    prices: Prices,
    owned_DB: Bools,
    g_N: Floats,
    *,
    far: bool,
) -> Floats:
    """Return what a key more that a node (first) sends another costs, by table."""
    sent_TNN = rates(instance, owned_DB).asked_of_TNN
    needed = prices.call_us * g_N[:, None] + prices.called_us * g_N[None, :]
    requests_N1 = instance.requests_N[:, None]
    calls_NN = needed * np.where(
        requests_N1 > 0, np.exp(-sent_TNN.sum(axis=0) / np.maximum(requests_N1, 1e-9)), 0.0
    )
    slope = terms.wire.mean_slope if far else terms.wire.slope
    bytes_TNN = slope(np.arange(len(instance.tables)), sent_TNN)
    both_NN = (g_N[:, None] + g_N[None, :]) * (prices.wire_kib_us / KIB)
    slope_TNN: Floats = calls_NN + bytes_TNN * both_NN
    nodes = np.arange(len(g_N))
    slope_TNN[:, nodes, nodes] = 0.0
    return slope_TNN


class Linear:
    """An ownership, where devices' time is worth g_D."""

    def __init__(
        self,
        instance: Instance,
        terms: Terms,
        prices: Prices,
        owned_DB: Bools,
        g_D: Floats,
        *,
        far: bool = False,
    ) -> None:
        """Take the slopes at an ownership; `far`: of bytes, those of changes of whole tables."""
        self._node_D = instance.node_D
        self._owned_DB, self._terms, self._g_D = owned_DB, terms, g_D
        self._open_D = instance.open_D
        held_NB = instance.held_NB(owned_DB)
        self._held_NB = held_NB
        held = held_NB.astype(np.float64)
        self._count_B = owned_DB.sum(axis=0).astype(np.float64)
        # Each device of a node has a part of the node's own work.
        g_N = np.bincount(instance.node_D, weights=g_D, minlength=len(terms.devices_N))
        g_N = g_N / np.maximum(terms.devices_N, 1)
        slope_TNN = _slopes(instance, terms, prices, owned_DB, g_N, far=far)
        asking_NB = np.where(held_NB, 0.0, terms.asked_NB)
        self._slope_TNN, self._table_B = slope_TNN, instance.table_B
        self._others_B = asking_NB.sum(axis=0)
        self._price_B = owned_DB.T @ g_D  # of all owners
        self._asked_of_NB, self._asks_NB = np.empty_like(held), np.empty_like(held)
        for slope_NN, at in zip(slope_TNN, buckets_T(instance), strict=True):
            self._asked_of_NB[:, at] = slope_NN.T @ asking_NB[:, at]
            self._asks_NB[:, at] = slope_NN @ held[:, at]
        self._needs_B = (self._asked_of_NB * held).sum(axis=0)
        self._elsewhere_NB = terms.elsewhere_NB * g_N[:, None]
        self._answer_B = terms.sent_B * terms.answer_us_B
        count = np.maximum(self._count_B, 1)
        self._shared_B = (
            self._answer_B * self._others_B * self._price_B + terms.sent_B * self._needs_B
        ) / count

    def _add(self, device: int) -> Floats:
        n, terms, g = self._node_D[device], self._terms, self._g_D[device]
        asked_B = terms.asked_NB[n]
        after_B = (
            self._answer_B * (self._others_B - asked_B) * (self._price_B + g)
            + terms.sent_B * (self._needs_B - asked_B * self._asks_NB[n] + self._asked_of_NB[n])
        ) / (self._count_B + 1)
        gain_B = self._elsewhere_NB[n] - terms.here_NB[n] * g + self._shared_B - after_B
        possible = ~self._held_NB[n] if self._open_D[device] else np.zeros(len(gain_B), np.bool_)
        gains: Floats = np.where(possible, gain_B, -np.inf)
        return gains

    def _drop(self, device: int) -> Floats:
        n, terms, g = self._node_D[device], self._terms, self._g_D[device]
        asked_B = terms.asked_NB[n]
        after_B = (
            self._answer_B * (self._others_B + asked_B) * (self._price_B - g)
            + terms.sent_B * (self._needs_B - self._asked_of_NB[n] + asked_B * self._asks_NB[n])
        ) / np.maximum(self._count_B - 1, 1)
        gain_B = terms.here_NB[n] * g - self._elsewhere_NB[n] + self._shared_B - after_B
        possible = self._owned_DB[device] & (self._count_B > 1)
        gains: Floats = np.where(possible, gain_B, -np.inf)
        return gains

    def _moves(self, source: int, at_M: Ints) -> Floats:
        """Return what moves of buckets from a device to each device gain, D x M."""
        m, terms = self._node_D[source], self._terms
        leaves_M = terms.here_NB[m, at_M] * self._g_D[source] - self._elsewhere_NB[m, at_M]
        asked_M, count_M = terms.asked_NB[m, at_M], self._count_B[at_M]
        others_M, price_M = self._others_B[at_M], self._price_B[at_M] - self._g_D[source]
        needs_M = (
            self._needs_B[at_M] - self._asked_of_NB[m, at_M] + asked_M * self._asks_NB[m, at_M]
        )
        answer_M, sent_M = self._answer_B[at_M], terms.sent_B[at_M]
        table_M = self._table_B[at_M]
        gains = np.full((len(self._g_D), len(at_M)), -np.inf)
        for target, n in enumerate(self._node_D):
            if target == source or not self._open_D[target]:
                continue
            g = self._g_D[target]
            if n == m:
                gains[target] = (self._g_D[source] - g) * (
                    terms.here_NB[m, at_M] + answer_M * others_M / count_M
                )
                continue
            asks_M = terms.asked_NB[n, at_M]
            after_M = (
                answer_M * (others_M + asked_M - asks_M) * (price_M + g)
                + sent_M
                * (
                    needs_M
                    + self._asked_of_NB[n, at_M]
                    - asks_M * (self._asks_NB[n, at_M] - self._slope_TNN[table_M, n, m])
                    + asked_M * self._slope_TNN[table_M, m, n]
                )
            ) / count_M
            enters_M = self._elsewhere_NB[n, at_M] - terms.here_NB[n, at_M] * g
            gain_M = leaves_M + enters_M + self._shared_B[at_M] - after_M
            gains[target] = np.where(self._held_NB[n, at_M], -np.inf, gain_M)
        return gains

    def worths(self) -> Worths:
        """Return what every single change gains."""
        shape = self._owned_DB.shape
        move_DB, source_DB = np.full(shape, -np.inf), np.zeros(shape, np.int64)
        for source in range(shape[0]):
            at_M = np.flatnonzero(self._owned_DB[source])
            gains_DM = self._moves(source, at_M)
            better = gains_DM > move_DB[:, at_M]
            move_DB[:, at_M] = np.where(better, gains_DM, move_DB[:, at_M])
            source_DB[:, at_M] = np.where(better, source, source_DB[:, at_M])
        return Worths(
            add_DB=np.array([self._add(device) for device in range(shape[0])]),
            drop_DB=np.array([self._drop(device) for device in range(shape[0])]),
            move_DB=move_DB,
            source_DB=source_DB,
        )
