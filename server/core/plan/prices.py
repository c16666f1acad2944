"""The prices of a node's work: the coefficients of the cost model (cost.py)."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

# The kinds of work, in the order of `Prices.us_F`. Letter of shapes: F kinds of work.
KINDS = (
    "hbm",
    "ddr",
    "ssd",
    "default",
    "copied",
    "asked_row",
    "asked_sum",
    "answered",
    "request",
    "call",
    "called",
    "read_kib",
    "wire_kib",
    "base",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """The prices of a node's work, in us of its time.

    The defaults of keys, requests and calls were measured on one core of an AMD EPYC with requests
    over gRPC and rows of 64 bytes. Those of bytes are assumed: 10 GB/s from memory, 1.5 GB/s
    between nodes. They are where the fit to a running fleet (core/price_fit.py) starts.

    Attributes:
        hit_us: A key looked up here, by the tier that has its row: HBM, DDR, SSD.
        default_us: A key looked up here that has no row.
        copied_us: A key that a copy of a hot row answers.
        asked_row_us: A key asked of a peer, whose row comes.
        asked_sum_us: A key asked of a peer that pools it.
        answered_us: A key looked up for a peer, beside the lookup.
        request_us: A request of the node's own clients, beside its keys.
        call_us: The need of a request for a certain peer, to the asker, beside its keys.
        called_us: The same, to that peer.
        read_kib_us: 1,024 bytes of rows looked up here, beside the price of their keys.
        wire_kib_us: 1,024 bytes that come from a peer or go to one, likewise.
        base_us: Time a second that a node spends whatever is read.
    """

    hit_us: tuple[float, float, float] = (0.044, 0.194, 15.0)
    default_us: float = 0.15
    copied_us: float = 0.1
    asked_row_us: float = 0.95
    asked_sum_us: float = 0.75
    answered_us: float = 0.55
    request_us: float = 100.0
    call_us: float = 150.0
    called_us: float = 100.0
    read_kib_us: float = 0.1
    wire_kib_us: float = 0.7
    base_us: float = 0.0

    @property
    def us_F(self) -> NDArray[np.float64]:
        """The prices in the order of KINDS."""
        return np.array(
            [
                *self.hit_us,
                self.default_us,
                self.copied_us,
                self.asked_row_us,
                self.asked_sum_us,
                self.answered_us,
                self.request_us,
                self.call_us,
                self.called_us,
                self.read_kib_us,
                self.wire_kib_us,
                self.base_us,
            ]
        )


def prices_of(us_F: NDArray[np.float64]) -> Prices:
    """Return the prices whose `us_F` this is."""
    hbm, ddr, ssd, *rest = us_F.tolist()
    names = [field.name for field in dataclasses.fields(Prices) if field.name != "hit_us"]
    return Prices(hit_us=(hbm, ddr, ssd), **dict(zip(names, rest, strict=True)))
