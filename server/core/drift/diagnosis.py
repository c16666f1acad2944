"""The diagnosis: why a look at the drift that was due did nothing, and how often that came."""

import collections
import dataclasses

from embertide.v1 import control_pb2

Outcome = control_pb2.DecisionOutcome


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """An outcome, and the words for people.

    Attributes:
        outcome: The outcome of a look, or what forbids one.
        why: For people, with the numbers that decided.
    """

    outcome: "control_pb2.DecisionOutcome.ValueType"
    why: str


class Diagnosis:
    """Remembers the outcomes of looks, and of times at which a look was due and forbidden."""

    def __init__(self) -> None:
        """Begin before the first look."""
        self.counts: collections.Counter[control_pb2.DecisionOutcome.ValueType] = (
            collections.Counter()
        )
        self._last: Reason | None = None
        self._looked_ms = 0
        self._forbidden: Reason | None = None  # since the last look
        self._forbidden_ms = 0

    def note_look(self, reason: Reason, now_ms: int) -> None:
        """Take in the outcome of a look."""
        self.counts[reason.outcome] += 1
        self._last, self._looked_ms, self._forbidden = reason, now_ms, None

    def note_forbidden(self, reason: Reason, now_ms: int, interval_ms: float) -> None:
        """Take in what forbids a look: once for each time that one is due."""
        last = self._forbidden
        same = last is not None and last.outcome == reason.outcome
        if same and now_ms - self._forbidden_ms < interval_ms:
            return
        self.counts[reason.outcome] += 1
        self._forbidden, self._forbidden_ms = reason, now_ms

    def message(
        self, settings: control_pb2.DriftSettings, forbidden: Reason | None
    ) -> control_pb2.DriftStatus:
        """Write the status.

        Args:
            settings: The treatment of drift.
            forbidden: The reason that forbids a look now; None: nothing does.
        """
        reason = forbidden or self._last
        return control_pb2.DriftStatus(
            settings=settings,
            outcome=reason.outcome if reason else Outcome.DECISION_OUTCOME_UNSPECIFIED,
            why=reason.why if reason else "",
            looked_ms=self._looked_ms,
            counts=[
                control_pb2.OutcomeCount(outcome=outcome, looks=looks)
                for outcome, looks in sorted(self.counts.items())
            ],
        )
