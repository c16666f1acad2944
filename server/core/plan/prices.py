"""What work costs a node: the coefficients of the cost model (cost.py)."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What work costs a node, in us of its time.

    Attributes:
        hit_us: A key looked up here, by the tier that has its row: HBM, DDR, SSD.
        default_us: A key looked up here that has no row.
        copied_us: A key that a copy of a hot row answers.
        asked_row_us: A key asked of a peer, whose row comes.
        asked_sum_us: A key asked of a peer that pools it.
        answered_us: What a key looked up for a peer costs beside the lookup.
        base_us: Time a second that a node spends whatever is read.
    """

    hit_us: tuple[float, float, float] = (0.05, 0.2, 15.0)
    default_us: float = 0.15
    copied_us: float = 0.1
    asked_row_us: float = 1.0
    asked_sum_us: float = 0.8
    answered_us: float = 0.6
    base_us: float = 0.0
