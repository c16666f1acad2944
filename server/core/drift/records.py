"""The record of decisions: each look at the drift with its numbers, whether it acted or not."""

import re
from collections.abc import Mapping

from embertide.server.core.errors import invalid
from embertide.server.core.state import DECISIONS_KEPT
from embertide.v1 import control_pb2

PAGE_MAX = 500
_PAGE = 100
_TOKEN = re.compile(r"before-(\d{1,18})")
Decision = control_pb2.Decision
Outcome = control_pb2.DecisionOutcome


class Decisions:
    """Decisions by id, oldest first; at most 1,000. `changed` holds what must be written."""

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
            oldest = next(iter(self._by_id))
            del self._by_id[oldest]
            self.changed[oldest] = None
        return decision

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
        if request.page_size > PAGE_MAX:
            raise invalid(f"page_size is {request.page_size}; at most {PAGE_MAX}")
        before: int | None = None
        if request.page_token:
            token = _TOKEN.fullmatch(request.page_token)
            if token is None:
                raise invalid(
                    f"page_token {request.page_token[:80]!r} is not from this service; start again "
                    "with an empty one"
                )
            before = int(token[1])
        size = request.page_size or _PAGE
        found = [
            each
            for each in self
            if (before is None or _number(each.id) < before)
            and (not request.acted_only or each.outcome == Outcome.DECISION_OUTCOME_ACTED)
        ]
        more = f"before-{_number(found[size - 1].id)}" if len(found) > size else ""
        return control_pb2.ListDecisionsResponse(
            settings=settings, decisions=found[:size], next_page_token=more
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
