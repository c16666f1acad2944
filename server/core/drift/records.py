"""The record of decisions: each look at the drift with its numbers, whether it acted or not."""

from collections.abc import Mapping

from embertide.server.core.drift.correction import is_measured
from embertide.server.core.pagination import page_of
from embertide.server.core.state import DECISIONS_KEPT
from embertide.v1 import control_pb2

# Operations with a measured gain that others do not push out: predictions learn from them.
MEASURED_KEPT = 64
Decision = control_pb2.Decision
Outcome = control_pb2.DecisionOutcome


class Decisions:
    """Decisions by id, oldest first; at most 1,000. `changed` holds what must be written.

    The oldest one goes first, but for the newest 64 operations whose gains were measured.
    """

    def __init__(self, saved: Mapping[str, Decision]) -> None:
        """Go on with what was written."""
        self._by_id = dict(sorted(saved.items(), key=lambda item: _number(item[0])))
        self.changed: dict[str, Decision | None] = {}

    def __iter__(self) -> "reversed[Decision]":
        """Yield them, newest first."""
        return reversed(list(self._by_id.values()))

    @property
    def last(self) -> Decision | None:
        """The newest one."""
        return next(iter(self), None)

    def add(self, decision: Decision) -> Decision:
        """Keep a decision. One that repeats the last one without acting takes its place."""
        last = self.last
        if last is not None and _repeats(decision, last):
            decision.id = last.id
            decision.looks = last.looks + 1
            decision.first_ms = last.first_ms or last.at_ms
        else:
            decision.id = f"look-{_number(last.id) + 1 if last else 1}"
            decision.looks = 1
        self.keep(decision)
        while len(self._by_id) > DECISIONS_KEPT:
            self._drop_oldest()
        return decision

    def _drop_oldest(self) -> None:
        measured = [id for id, each in self._by_id.items() if is_measured(each)]
        kept = set(measured[-MEASURED_KEPT:])
        oldest = next(id for id in self._by_id if id not in kept)
        del self._by_id[oldest]
        self.changed[oldest] = None

    def keep(self, decision: Decision) -> None:
        """Write a decision, or write it again."""
        self._by_id[decision.id] = decision
        self.changed[decision.id] = decision

    def get(self, id: str) -> Decision | None:
        """Return a decision."""
        return self._by_id.get(id)

    def acted_since(self, begin_ms: int) -> list[Decision]:
        """Return those that started operations since a time."""
        return [
            each
            for each in self
            if each.outcome == Outcome.DECISION_OUTCOME_ACTED and each.at_ms >= begin_ms
        ]

    def page(
        self, request: control_pb2.ListDecisionsRequest, settings: control_pb2.DriftSettings
    ) -> control_pb2.ListDecisionsResponse:
        """Return a page, newest first.

        Raises:
            RefusedError: The page is too long, or its token is not of ours.
        """
        asked = (
            each
            for each in self
            if not request.acted_only or each.outcome == Outcome.DECISION_OUTCOME_ACTED
        )
        decisions, more = page_of(request).cut(asked, lambda each: _number(each.id))
        return control_pb2.ListDecisionsResponse(
            settings=settings, decisions=decisions, next_page_token=more
        )


def _number(id: str) -> int:
    return int(id.rpartition("-")[2])


def _repeats(decision: Decision, last: Decision) -> bool:
    return (
        decision.outcome == last.outcome
        and decision.outcome != Outcome.DECISION_OUTCOME_ACTED
        and decision.plan_epoch == last.plan_epoch
        and decision.triggers == last.triggers
    )
