"""Costs of shards by the learned cost net: tables' contributions to the devices of an instance.

A device's cost is that of the sum of its tables' contributions. So a planner that changes one table
replaces one term; contributions of many ownerships of a table are evaluated at once. Letters of
shapes are those of instance.py and cost_net.py; C candidates, B here the buckets of one table; S
the elements of a contribution: the shard's vector, then bytes sent and received.
"""

import numpy as np

from embertide.server.core.plan.cost import MEAN_WEIGHT
from embertide.server.core.plan.cost_net import FEATURES, CostNet, Singles
from embertide.server.core.plan.instance import Bools, Floats, Instance
from embertide.server.core.plan.wire import KEY_BYTES, expected_sums

LINE_BYTES = 64
# About what a call, an element of an ownership and one of a sum cost one core.
_CALL_US, _BUCKET_US, _SUM_US = 100, 0.05, 0.02
_MEMO_MAX = 50_000


class ShardCosts:
    """Contributions of tables, and the costs of their sums.

    Attributes:
        unit_us: Time of a unit.
        spent_us: About what one core has spent here; counted from what was done, so that a search
            that stops by it does the same every time.
    """

    def __init__(self, instance: Instance, net: CostNet) -> None:
        """Take the demand of an instance."""
        self._net, self._instance = net, instance
        tables = np.arange(len(instance.tables) + 1)
        self._ends = np.searchsorted(instance.table_B, tables)
        nodes_D = instance.node_D
        self._first_D = np.flatnonzero(np.diff(nodes_D, prepend=-1))
        self._devices_N = np.bincount(nodes_D, minlength=len(instance.nodes_N))
        row_T = np.array([table.row_bytes for table in instance.tables])
        wanted_B = instance.wanted_NB.sum(axis=0)
        bytes_read = float((wanted_B * (row_T[instance.table_B] + LINE_BYTES)).sum())
        # The unit: bytes that a device reads in the mean. Costs do not depend on how much is asked.
        self._unit = max(bytes_read / max(1, int(instance.open_D.sum())), 1e-9)
        self.unit_us = self._unit * net.us_per_byte
        self.spent_us = 0.0
        self._memo: dict[tuple[int, bytes], Singles] = {}

    def buckets_of(self, table: int) -> slice:
        """Return where a table's buckets are."""
        return slice(int(self._ends[table]), int(self._ends[table + 1]))

    def features(self, table: int, owned_CDB: Bools) -> tuple[Singles, Singles]:
        """Return features of a table's shards, C x D x F, and units sent and received, C x D x 2.

        A bucket that nobody owns is not read.
        """
        instance = self._instance
        traits, at = instance.tables[table], self.buckets_of(table)
        wanted_NB = instance.wanted_NB[:, at]
        held_CNB = np.logical_or.reduceat(owned_CDB, self._first_D, axis=1)
        copies_CB = np.maximum(owned_CDB.sum(axis=1), 1)
        asked_NB = wanted_NB * (traits.sent_share * (1 - instance.copied_NT[:, table]))[:, None]
        asked_CNB = np.where(held_CNB, 0.0, asked_NB) / copies_CB[:, None]
        asked_CND = asked_CNB @ owned_CDB.transpose(0, 2, 1).astype(np.float64)
        own_CD = np.einsum("cdb,db->cd", owned_CDB, wanted_NB[instance.node_D])
        keys_CD = own_CD + asked_CND.sum(axis=1)
        vectors_CND = self._vectors(table, wanted_NB.sum(axis=1), asked_CND)
        requests_CND, answers_CND = asked_CND * KEY_BYTES, vectors_CND * traits.row_bytes
        per_D = self._devices_N[instance.node_D]
        asks_CD = requests_CND.sum(axis=2)[:, instance.node_D] / per_D
        gets_CD = answers_CND.sum(axis=2)[:, instance.node_D] / per_D
        traffic_CD2 = np.stack(
            [asks_CD + answers_CND.sum(axis=1), gets_CD + requests_CND.sum(axis=1)], axis=-1
        )
        resident_CD = owned_CDB @ instance.bytes_B[at]
        features_CDF = np.empty((*keys_CD.shape, FEATURES), np.float32)
        features_CDF[..., 0] = keys_CD * traits.row_bytes / self._unit
        features_CDF[..., 1] = keys_CD * LINE_BYTES / self._unit
        features_CDF[..., 2] = traits.row_bytes / 512
        features_CDF[..., 3] = keys_CD / max(float(wanted_NB.sum()), 1e-9)
        features_CDF[..., 4] = np.log2(1 + resident_CD) / 40
        features_CDF[..., 5] = traits.bag_keys / 100
        return features_CDF, (traffic_CD2 / self._unit).astype(np.float32)

    def _vectors(self, table: int, wanted_N: Floats, asked_CND: Floats) -> Floats:
        """Return how many vectors owners return: a sum for each bag of which they have a key."""
        traits = self._instance.tables[table]
        share_CND = asked_CND / np.maximum(wanted_N, 1e-9)[:, None]
        bag_keys = max(traits.bag_keys, 1.0)
        sums_CND = expected_sums((wanted_N / bag_keys)[:, None], share_CND, bag_keys)
        vectors: Floats = traits.sum_share * sums_CND + (1 - traits.sum_share) * asked_CND
        return vectors

    def contributions(self, table: int, owned_CDB: Bools) -> Singles:
        """Return what ownerships of a table contribute to each device, C x D x S."""
        self.spent_us += _CALL_US + owned_CDB.size * _BUCKET_US
        features_CDF, traffic_CD2 = self.features(table, owned_CDB)
        return np.concatenate([self._net.vectors(features_CDF), traffic_CD2], axis=-1)

    def all_contributions(self, owned_DB: Bools) -> Singles:
        """Return the contributions of all tables, T x D x S."""
        return np.array(
            [
                self._known(table, owned_DB[:, self.buckets_of(table)])
                for table in range(len(self._instance.tables))
            ]
        )

    def _known(self, table: int, owned_DB: Bools) -> Singles:
        """Return the contribution of a table's ownership, remembered."""
        key = (table, owned_DB.tobytes())
        if key not in self._memo:
            if len(self._memo) >= _MEMO_MAX:
                self._memo.clear()
            [self._memo[key]] = self.contributions(table, owned_DB[None])
        return self._memo[key]

    def costs(self, sums_XS: Singles) -> Singles:
        """Return the unit costs of devices from the sums of contributions."""
        self.spent_us += _CALL_US / 2 + sums_XS.size * _SUM_US
        width = self._net.width
        return self._net.costs(sums_XS[..., :width], sums_XS[..., width:])

    def values(self, sums_CDS: Singles) -> Floats:
        """Return the figure to compare by, as `Score.value` has it."""
        costs_CD = self.costs(sums_CDS)[..., self._instance.open_D]
        values: Floats = costs_CD.max(axis=-1) + MEAN_WEIGHT * costs_CD.mean(axis=-1)
        return values
