"""Exact search over the owners of a few buckets, all others staying where they are.

Each of F buckets has O options: sets of owning devices. What an option adds to each device's time
and to the keys that nodes ask of each other is in tables, so an ownership is scored by adding some
of their rows up; all replacements of one option and of any two are scored together. Letters of
shapes are those of instance.py; C candidates.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from embertide.server.core.plan.changes import Terms
from embertide.server.core.plan.cost import MEAN_WEIGHT, needed_NN, wire_kib_N
from embertide.server.core.plan.instance import Bools, Floats, Instance, Ints
from embertide.server.core.plan.prices import Prices

# Candidates whose requests are looked at together, so that arrays stay small.
_TOGETHER = 8192


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Aim:
    """The data and bounds of a search.

    Attributes:
        limit_D: Bytes that a device may hold.
        byte_us: Price of a byte moved, in the score.
        owners_max: Owners that a bucket may have in the group, those that leave included.
    """

    limit_D: Floats
    byte_us: float
    owners_max: int


def moved_bytes(instance: Instance, owned_DB: Bools) -> float:
    """Return the bytes of what devices get that they do not own today."""
    new_B = (owned_DB & ~instance.owned_DB).sum(axis=0)
    return float(new_B @ weights_B(instance))


def weights_B(instance: Instance) -> Floats:
    """Return what moving a bucket counts: its bytes, or 1 where no bytes were measured."""
    return instance.bytes_B if instance.bytes_B.any() else np.ones(len(instance.bytes_B))


def all_sets(instance: Instance, most: int) -> Iterable[tuple[int, ...]]:
    """Yield every set of open devices of different nodes, at most so many."""
    open_D = np.flatnonzero(instance.open_D).tolist()
    for count in range(1, most + 1):
        for devices in itertools.combinations(open_D, count):
            if len({int(instance.node_D[device]) for device in devices}) == count:
                yield devices


def near_sets(instance: Instance, owned_D: Bools, most: int) -> Iterable[tuple[int, ...]]:
    """Yield the sets that differ from one by an owner, and those of one owner."""
    now = np.flatnonzero(owned_D).tolist()
    nodes = [int(instance.node_D[device]) for device in now]
    for device in np.flatnonzero(instance.open_D).tolist():
        yield (device,)
        others = [
            each for each, node in zip(now, nodes, strict=True) if node != instance.node_D[device]
        ]
        if len(others) < most:
            yield (*others, device)
        for gone in others:
            yield (*(each for each in others if each != gone), device)
    for gone in now:
        if len(now) > 1:
            yield tuple(each for each in now if each != gone)


class Options:
    """The options of some buckets under an ownership.

    Attributes:
        focus_F: The buckets.
        now_F: The option that holds, of each.
    """

    def __init__(
        self,
        instance: Instance,
        terms: Terms,
        prices: Prices,
        aim: Aim,
        focus_F: Ints,
        sets_F: Sequence[Iterable[tuple[int, ...]]],
        owned_DB: Bools,
    ) -> None:
        """Make the tables; the first option of each bucket is what it has."""
        self.instance, self.focus_F, self.aim = instance, focus_F, aim
        self._prices, self._wire = prices, terms.wire
        self._table_F = instance.table_B[focus_F]
        self._devices_N = np.maximum(terms.devices_N, 1)
        devices, count = len(instance.node_D), len(focus_F)
        owned: list[list[Bools]] = []
        for bucket, sets in zip(focus_F, sets_F, strict=True):
            kept = {owned_DB[:, bucket].tobytes(): owned_DB[:, bucket]}
            for chosen in sets:
                owned_D = np.zeros(devices, np.bool_)
                owned_D[list(chosen)] = True
                if (owned_D | instance.owned_DB[:, bucket]).sum() <= aim.owners_max:
                    kept.setdefault(owned_D.tobytes(), owned_D)
            # The owners of the beginning are always an option.
            before_D = instance.owned_DB[:, bucket]
            kept.setdefault(before_D.tobytes(), before_D)
            owned.append(list(kept.values()))
        most = max(map(len, owned))
        self.valid_FO = np.array([[o < len(each) for o in range(most)] for each in owned])
        self.owned_FOD = np.array([each + [each[0]] * (most - len(each)) for each in owned])
        self.now_F = np.zeros(count, np.int64)
        self._tabulate(terms)

    def _tabulate(self, terms: Terms) -> None:
        instance, focus_F = self.instance, self.focus_F
        owned_FOD = self.owned_FOD.astype(np.float64)
        node_ND = (instance.node_D[None, :] == np.arange(len(instance.nodes_N))[:, None]).astype(
            np.float64
        )
        held_FON = owned_FOD @ node_ND.T
        away_FON = 1.0 - held_FON
        owners_FO1 = owned_FOD.sum(axis=2, keepdims=True)
        asked_FN, here_FN = terms.asked_NB[:, focus_F].T, terms.here_NB[:, focus_F].T
        elsewhere_FN = terms.elsewhere_NB[:, focus_F].T
        sent_F, answer_F = terms.sent_B[focus_F], terms.answer_us_B[focus_F]
        sent_FON = away_FON * (asked_FN * sent_F[:, None])[:, None, :] / owners_FO1
        share_FO1 = sent_FON.sum(axis=2, keepdims=True) * answer_F[:, None, None]
        asker_FON = away_FON * (elsewhere_FN / np.maximum(terms.devices_N, 1))[:, None, :]
        self.time_FOD = (
            owned_FOD * (here_FN[:, None, instance.node_D] + share_FO1)
            + asker_FON[:, :, instance.node_D]
        )
        self.sent_FONN = sent_FON[:, :, :, None] * held_FON[:, :, None, :]
        self.bytes_FOD = owned_FOD * instance.bytes_B[focus_F][:, None, None]
        fresh_FOD = self.owned_FOD & ~instance.owned_DB.T[focus_F][:, None, :]
        self.moved_FO = fresh_FOD.sum(axis=2) * weights_B(instance)[focus_F][:, None]
        # The contribution of all other buckets; `start` sets it.
        self._time_D = np.zeros(len(instance.node_D))
        self._sent_TNN = np.zeros((len(instance.tables), *(len(instance.nodes_N),) * 2))
        self._bytes_D = np.zeros(len(instance.node_D))
        self._moved = 0.0

    def start(self, time_D: Floats, sent_TNN: Floats, bytes_D: Floats, moved: float) -> None:
        """Take what the whole ownership comes to, the options that hold now included.

        Args:
            time_D: Time of each device, without what calls and bytes between nodes cost.
            sent_TNN: Keys a second that a node sends another, by table.
            bytes_D: Bytes of each device.
            moved: Bytes moved.
        """
        all_F = np.arange(len(self.focus_F))
        self._time_D = time_D - self.time_FOD[all_F, self.now_F].sum(axis=0)
        self._sent_TNN = sent_TNN.copy()
        np.subtract.at(self._sent_TNN, self._table_F, self.sent_FONN[all_F, self.now_F])
        self._bytes_D = bytes_D - self.bytes_FOD[all_F, self.now_F].sum(axis=0)
        self._moved = moved - float(self.moved_FO[all_F, self.now_F].sum())

    def _values(
        self, time_CD: Floats, sent_CNN: Floats, bytes_CD: Floats, moved_C: Floats
    ) -> Floats:
        """Return the score of candidates with what their moves count; inf where room lacks."""
        instance, prices = self.instance, self._prices
        busy_CD = time_CD
        if instance.requests_N.any() and (prices.call_us or prices.called_us):
            parts = []
            for begin in range(0, len(time_CD), _TOGETHER):
                needed_CNN = needed_NN(sent_CNN[begin : begin + _TOGETHER], instance.requests_N)
                calls_CN = (
                    prices.call_us * needed_CNN.sum(axis=2)
                    + prices.called_us * needed_CNN.sum(axis=1)
                ) / self._devices_N
                parts.append(calls_CN[:, instance.node_D])
            busy_CD = time_CD + np.concatenate(parts)
        open_CD = busy_CD[:, instance.open_D]
        values_C: Floats = (
            open_CD.max(axis=1) + MEAN_WEIGHT * open_CD.mean(axis=1) + self.aim.byte_us * moved_C
        )
        full_C = (bytes_CD > self.aim.limit_D + 0.5).any(axis=1)
        values_C[full_C] = np.inf
        return values_C

    # Bytes between nodes. They are not linear where owners pool, but the tables' add up.

    def _sent_now(self) -> Floats:
        """Return the keys that nodes send each other, by table."""
        sent_TNN = self._sent_TNN.copy()
        all_F = np.arange(len(self.focus_F))
        np.add.at(sent_TNN, self._table_F, self.sent_FONN[all_F, self.now_F])
        return sent_TNN

    def _wire_us_D(self, kib_XN: Floats) -> Floats:
        each_XN = kib_XN * (self._prices.wire_kib_us / self._devices_N)
        us_XD: Floats = each_XN[..., self.instance.node_D]
        return us_XD

    def _wire_N(self, tables_X: Ints, sent_XNN: Floats) -> Floats:
        """Return the KiB of nodes for the keys that they send of a table, X x N."""
        return wire_kib_N(self._wire.bytes(tables_X, sent_XNN))

    def _all_wire_N(self, sent_TNN: Floats) -> Floats:
        all_N: Floats = self._wire_N(np.arange(len(sent_TNN)), sent_TNN).sum(axis=0)
        return all_N

    def _wired(
        self,
        sent_TNN: Floats,
        at_C: Ints,
        option_C: Ints,
        at2_C: Ints | None,
        option2_C: Ints | None,
    ) -> Floats:
        """Return what replacing one or two options adds to the KiB of nodes, C x N."""
        now_TN = self._wire_N(np.arange(len(sent_TNN)), sent_TNN)

        def more(at_X: Ints, option_X: Ints) -> Floats:
            change: Floats = self.sent_FONN[at_X, option_X] - self.sent_FONN[at_X, self.now_F[at_X]]
            return change

        def added(tables_X: Ints, change_XNN: Floats) -> Floats:
            after_XNN = np.maximum(sent_TNN[tables_X] + change_XNN, 0.0)
            more_XN: Floats = self._wire_N(tables_X, after_XNN) - now_TN[tables_X]
            return more_XN

        tables_C = self._table_F[at_C]
        if at2_C is None or option2_C is None:
            return added(tables_C, more(at_C, option_C))
        at_K, which_C = np.unique(
            np.stack([np.r_[at_C, at2_C], np.r_[option_C, option2_C]]), axis=1, return_inverse=True
        )
        alone_KN = added(self._table_F[at_K[0]], more(*at_K))
        first_C, second_C = which_C.reshape(2, -1)
        wire_CN: Floats = alone_KN[first_C] + alone_KN[second_C]
        # Two buckets of one table share its sums.
        same = np.flatnonzero(tables_C == self._table_F[at2_C])
        wire_CN[same] = added(
            tables_C[same],
            more(at_C[same], option_C[same]) + more(at2_C[same], option2_C[same]),
        )
        return wire_CN

    def choose(self, owned_DB: Bools) -> None:
        """Take the options that an ownership has. Requires: they are options."""
        wanted_FD = owned_DB[:, self.focus_F].T
        same_FO = (self.owned_FOD == wanted_FD[:, None, :]).all(axis=2) & self.valid_FO
        self.now_F = same_FO.argmax(axis=1)

    def value(self) -> float:
        """Return the score of what holds now."""
        all_F = np.arange(len(self.focus_F))
        return float(
            self._values(
                (
                    self._time_D
                    + self.time_FOD[all_F, self.now_F].sum(axis=0)
                    + self._wire_us_D(self._all_wire_N(self._sent_now()))
                )[None],
                self._sent_now().sum(axis=0)[None],
                (self._bytes_D + self.bytes_FOD[all_F, self.now_F].sum(axis=0))[None],
                np.array([self._moved + self.moved_FO[all_F, self.now_F].sum()]),
            )[0]
        )

    def _changes(self, pairs: int) -> tuple[Ints, Ints, Floats]:
        """Return bucket, option and value of all single replacements, the best `pairs` first."""
        at_C, option_C = np.nonzero(self.valid_FO)
        values_C = self._scored(at_C, option_C, None, None)
        keep = option_C != self.now_F[at_C]
        order = np.argsort(values_C[keep], kind="stable")
        return at_C[keep][order][:pairs], option_C[keep][order][:pairs], values_C[keep][order]

    def _scored(
        self, at_C: Ints, option_C: Ints, at2_C: Ints | None, option2_C: Ints | None
    ) -> Floats:
        """Return the values of replacing one or two options."""
        all_F = np.arange(len(self.focus_F))
        now_F = self.now_F
        sent_TNN = self._sent_now()
        wire_CN = self._wired(sent_TNN, at_C, option_C, at2_C, option2_C)
        base_D = self._time_D + self._wire_us_D(self._all_wire_N(sent_TNN))
        others_NN = self._sent_TNN.sum(axis=0)
        tables = (
            (base_D, self.time_FOD),
            (others_NN, self.sent_FONN),
            (self._bytes_D, self.bytes_FOD),
            (np.float64(self._moved), self.moved_FO),
        )
        sums = []
        for base, table in tables:
            total = base + table[all_F, now_F].sum(axis=0)
            values = total + table[at_C, option_C] - table[at_C, now_F[at_C]]
            if at2_C is not None and option2_C is not None:
                values = values + table[at2_C, option2_C] - table[at2_C, now_F[at2_C]]
            sums.append(values)
        sums[0] = sums[0] + self._wire_us_D(wire_CN)
        return self._values(*sums)

    def improve(self, pairs: int, least: float) -> bool:
        """Make the best replacement of one or two options; False if none gains `least`.

        Args:
            pairs: Number of the best replacements that are tried in pairs.
            least: Gain in the score below which nothing is done.
        """
        now = self.value()
        at_C, option_C, values_C = self._changes(pairs)
        best = (float(values_C[0]) if len(values_C) else np.inf, 0, -1)
        first, second = np.triu_indices(len(at_C), 1)
        apart = at_C[first] != at_C[second]
        first, second = first[apart], second[apart]
        if len(first):
            values_P = self._scored(at_C[first], option_C[first], at_C[second], option_C[second])
            at = int(np.argmin(values_P))
            if values_P[at] < best[0] - least:
                best = float(values_P[at]), int(first[at]), int(second[at])
        if not best[0] < now - least:
            return False
        for chosen in best[1:]:
            if chosen >= 0:
                self.now_F[at_C[chosen]] = option_C[chosen]
        return True

    def write(self, owned_DB: Bools) -> None:
        """Write what holds now into an ownership."""
        owned_DB[:, self.focus_F] = self.owned_FOD[np.arange(len(self.focus_F)), self.now_F].T
