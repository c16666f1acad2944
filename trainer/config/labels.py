"""Labels that come as a stream of their own, later than what they label."""

import dataclasses

_MAX_S = 366 * 86_400.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabelJoin:
    """How long impressions wait for feedback, and what becomes of feedback that comes later.

    docs/training.md, "Late labels", says what versions and AUC then mean; data/labels.py has the
    weights.

    Attributes:
        wait_s: Seconds of event time that an impression waits for feedback. It is learned then,
            with the label that it has. A longer wait has fewer false negatives, and learns later.
        correct_s: Feedback that comes later than that, but within so many seconds of the
            impression, is learned as a positive, and negatives are weighed down by as many as are
            false. 0, or no more than wait_s: it is counted and not learned.
        most_waiting: Impressions held at most, some hundred bytes each; beyond it the oldest goes
            as if its time were over.
    """

    wait_s: float
    correct_s: float = 0.0
    most_waiting: int = 2_000_000

    def __post_init__(self) -> None:
        """Refuse what no impression could wait for."""
        for name in ("wait_s", "correct_s"):
            if not 0 <= getattr(self, name) <= _MAX_S:
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 to {_MAX_S:,.0f} s")
        if max(self.wait_s, self.correct_s) == 0:
            raise ValueError("wait_s and correct_s are 0; give the seconds that feedback may take")
        if self.most_waiting < 1:
            raise ValueError(f"most_waiting is {self.most_waiting}; it must be at least 1")
