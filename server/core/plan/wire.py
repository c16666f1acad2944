"""Bytes that nodes send each other, by the keys that they ask of each other.

A key asked is eight bytes. Its row comes back, or, where the owner pools, one sum for each bag of
which it has a key. If the keys of a bag fall to owners by chance, an owner that has a share s of a
node's keys has one of a bag of L with probability 1 - (1 - s)^L. So sums do not grow with the keys:
of an owner that has next to all keys of a table comes one sum a bag, and of eight owners eight.

Letters of shapes are those of instance.py; X whatever is evaluated at once.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embertide.server.core.plan.workload import TableTraits

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

KEY_BYTES = 8
_FEW = 1e-6  # keys a second


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """The calls and bytes of keys asked, table by table.

    Attributes:
        key_bytes_T: Bytes of a key sent, with its row as far as rows come back.
        sum_bytes_T: Bytes of a sum, times the share of the keys that are pooled.
        bag_keys_T: Mean keys of a bag.
        bags_TN: Bags a second that a node's requests have.
        share_TN: Share of a node's keys that one key sent a second is.
    """

    key_bytes_T: Floats
    sum_bytes_T: Floats
    bag_keys_T: Floats
    bags_TN: Floats
    share_TN: Floats

    def bytes(self, tables_X: Ints, sent_XNN: Floats) -> Floats:
        """Return bytes a second, X x N x N: of the keys that a node (first) sends another."""
        sums_XNN = expected_sums(
            self.bags_TN[tables_X, :, None],
            sent_XNN * self.share_TN[tables_X, :, None],
            self.bag_keys_T[tables_X, None, None],
        )
        found: Floats = (
            self.key_bytes_T[tables_X, None, None] * sent_XNN
            + self.sum_bytes_T[tables_X, None, None] * sums_XNN
        )
        return found

    def slope(self, tables_X: Ints, sent_XNN: Floats) -> Floats:
        """Return by how much these bytes grow with a key more."""
        rest_XNN = self._elsewhere(tables_X, sent_XNN) ** (
            self.bag_keys_T[tables_X, None, None] - 1
        )
        bag_keys_XN1 = (self.bags_TN * self.share_TN * self.bag_keys_T[:, None])[tables_X, :, None]
        slope: Floats = (
            self.key_bytes_T[tables_X, None, None]
            + self.sum_bytes_T[tables_X, None, None] * bag_keys_XN1 * rest_XNN
        )
        return slope

    def mean_slope(self, tables_X: Ints, sent_XNN: Floats) -> Floats:
        """Return what a key of a table comes to in the mean, as if many of them went together."""
        sent_X11 = sent_XNN.sum(axis=(1, 2), keepdims=True)
        bytes_X11 = self.bytes(tables_X, sent_XNN).sum(axis=(1, 2), keepdims=True)
        mean: Floats = np.where(
            sent_X11 > _FEW,
            bytes_X11 / np.maximum(sent_X11, _FEW),
            self.slope(tables_X, np.zeros_like(sent_XNN)),
        )
        return mean

    def _elsewhere(self, tables_X: Ints, sent_XNN: Floats) -> Floats:
        """Return the share of a node's keys that another one does not answer."""
        answered_XNN: Floats = np.minimum(sent_XNN * self.share_TN[tables_X, :, None], 1.0)
        return 1.0 - answered_XNN


def expected_sums(bags_X: Floats, share_X: Floats, bag_keys_X: Floats | float) -> Floats:
    """Return how many sums come back: one for each bag of which an owner has a key.

    Args:
        bags_X: Bags of a node's requests.
        share_X: Share of the node's keys that the owner answers; more than 1 counts as all.
        bag_keys_X: Mean keys of a bag.
    """
    sums_X: Floats = bags_X * (1 - (1 - np.minimum(share_X, 1.0)) ** bag_keys_X)
    return sums_X


def wire_of(tables: Sequence[TableTraits], wanted_NT: Floats) -> Wire:
    """Return what keys of tables come to on the wire.

    Args:
        tables: Their traits.
        wanted_NT: Keys a second that each node's requests want, wherever they are answered.
    """
    pooled_T = np.array([table.sum_share for table in tables])
    vector_T = np.array([table.vector_bytes for table in tables])
    bag_keys_T = np.array([max(table.bag_keys, 1.0) for table in tables])
    sent_T = np.array([table.sent_share for table in tables])
    wanted_TN = wanted_NT.T
    return Wire(
        key_bytes_T=KEY_BYTES + vector_T * (1 - pooled_T),
        sum_bytes_T=vector_T * pooled_T,
        bag_keys_T=bag_keys_T,
        bags_TN=wanted_TN / bag_keys_T[:, None],
        share_TN=1 / np.maximum(wanted_TN * sent_T[:, None], 1e-9),
    )
