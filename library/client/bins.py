"""Features whose key is the bin of an amount: made here, of the amount that a call has for DENSE.

Shapes: B samples, E edges.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from embertide.client.errors import InputError
from embertide.client.tables import MISSING_KEY, Keys


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """Bins of a column of DENSE, as the trainer published them.

    Attributes:
        dense: Which column.
        edges: Where one bin ends and the next begins, ascending.
    """

    dense: int
    edges: tuple[float, ...]

    def keys_of(self, amount_B: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return how many edges are not above each amount; of NaN the missing key.

        Both are compared as floats of 32 bits, as the trainer compares those of events.
        """
        edges_E = np.array(self.edges, np.float32)
        bin_B = np.searchsorted(edges_E, amount_B, side="right")
        return np.where(np.isnan(amount_B), MISSING_KEY, bin_B)

    def check(self, what: str, given: Keys, amount: str, amount_B: NDArray[np.float32]) -> None:
        """Refuse bins that a caller worked out otherwise; a missing key is none, and passes.

        Args:
            what: The feature.
            given: The keys that the caller sent for it.
            amount: The column of DENSE.
            amount_B: Its values.

        Raises:
            InputError: A bin is not that of its row's amount, or a row has a list of them.
        """
        remedy = f"leave {what!r} out: the client makes it of {amount!r}"
        if given.lengths_B is not None or given.weights_N is not None:
            raise InputError(f"feature {what!r} is the bin of an amount, one a row; {remedy}")
        bin_B = self.keys_of(amount_B)
        wrong_B = (given.keys_N != bin_B) & (given.keys_N != MISSING_KEY)
        if wrong_B.any():
            row = int(np.flatnonzero(wrong_B)[0])
            raise InputError(
                f"feature {what!r}, row {row} is {given.keys_N[row]}, where {amount!r} is "
                f"{amount_B[row]}, of bin {bin_B[row]}; {remedy}"
            )
