"""The autopilot: looks at the drift again and again, decides, and remembers what came of it.

    wait --> look (signals; a planner if a detector fired) --> judge --> record --> wait
                                                                 |
                                                                 +--> operation --> measure the gain

A look runs where planners run; everything here is quick. What must outlive a restart is written:
decisions and settings. References, seasons and measurements begin anew with the process.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from embertide.server.core.demand import Clock
from embertide.server.core.drift.correction import (
    HELD_BACK,
    Factor,
    factors,
    kind_of,
    measured_of,
)
from embertide.server.core.drift.diagnosis import Diagnosis, Reason
from embertide.server.core.drift.judge import DAY_MS, Case, Outcome, Verdict, judge
from embertide.server.core.drift.look import GainComparison, GainCosts, Look, LookFindings, gain
from embertide.server.core.drift.options import MODES, DriftOptions
from embertide.server.core.drift.records import Decision, Decisions
from embertide.server.core.drift.seasons import Seasons
from embertide.server.core.drift.signals import (
    HotSet,
    Signals,
    distance,
    hot_set,
    mix_of,
    overlap,
)
from embertide.server.core.errors import RefusedError, invalid
from embertide.server.core.plan.instance import Floats
from embertide.server.core.plan.layout import Bucket
from embertide.server.core.plan.names import Device, Roster, names_of
from embertide.server.core.plan.planner import Planner
from embertide.server.core.plan.planners import PLANNERS, planner
from embertide.server.core.plan.workload import Asking
from embertide.server.core.reshard import REASON_BYTES_MAX, MovePlan, Situation, problem_of
from embertide.server.core.tasks import LookAtDrift, MeasureGain
from embertide.v1 import control_pb2, node_pb2, plan_pb2

JOIN = "join"
_OPERATION = "drift-"  # how the ids of its operations begin
_GIVE_UP_MS = 600_000  # beyond the time that it takes: a gain that is not measured by then never is
_SETTLE_MS = 15_000  # three load windows: those under way when an operation ends are of both plans
_FIRST_RATE = 10e6  # bytes a second that moves take before any was measured
# Reading, decoding and adding a row of a bucket that moves, and dropping it where it was.
_US_PER_BYTE = 0.02
_HALF_LIVES = 3  # after an operation, until what was read before it hardly counts
_SMOOTHED = 0.3
# Outcomes after which the next look asks a planner again, whatever the detectors say.
_PENDING = {
    Outcome.DECISION_OUTCOME_UNCONFIRMED: "confirm",
    Outcome.DECISION_OUTCOME_COOLING_DOWN: HELD_BACK,
    Outcome.DECISION_OUTCOME_FROZEN: HELD_BACK,
    Outcome.DECISION_OUTCOME_OVER_BUDGET: HELD_BACK,
    Outcome.DECISION_OUTCOME_UNSURE: HELD_BACK,
    Outcome.DECISION_OUTCOME_PLANNER_FAILED: "planner_failed",
}


class Trust(NamedTuple):
    """Whether the cost model may be acted on, and its median relative error."""

    trusted: bool = True
    error: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    """A decision whose gain is still to be measured.

    Attributes:
        decision: Its id.
        operation: Id of its operation.
        owners: Former owners of the buckets that move.
        spent: Time that the fleet spent before, as measured; 0: not known.
        work: What devices did a second at the same time, `LookFindings.work`.
        ended_ms: When the operation was seen to have ended, in the clock of the demand; None: it
            runs.
    """

    decision: str
    operation: str
    owners: Mapping[Bucket, tuple[Device, ...]]
    spent: float
    work: tuple[Floats, ...]
    ended_ms: int | None = None


class DriftMemory:
    """State that outlives one Control inside the process, and no process."""

    def __init__(self) -> None:
        """Begin without a reference."""
        self.reference: Signals | None = None
        self.hot_set: HotSet | None = None
        self.mix_NT: Floats | None = None
        self.mix_nodes: list[str] = []  # whose mix it is, by position
        self.looked_at_ms: int | None = None  # the last look, in the clock of the demand
        self.speed = 1.0  # seconds of that clock in a second of the wall clock
        self.seasons = Seasons()
        self.looked_ms: int | None = None
        self.asked_ms: int | None = None  # when a planner was asked last
        self.pending = ""
        self.fired: tuple[str, ...] = ()  # with `pending`: the detectors that led to it
        self.agreed = 0
        self.bytes_per_s = _FIRST_RATE
        self.waiting: _Waiting | None = None
        self.diagnosis = Diagnosis()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """An operation that the autopilot wants to be started."""

    request: control_pb2.StartReshardRequest
    move_plan: MovePlan


class Autopilot:
    """Decides. Driven by Control from one thread at a time."""

    def __init__(
        self,
        options: DriftOptions,
        memory: DriftMemory,
        decisions: Mapping[str, Decision],
        settings: control_pb2.DriftSettings | None,
        clock: Clock = "wall",
    ) -> None:
        """Go on with what was written; settings that an operator made override the options."""
        self.options = options
        self.memory = memory
        self.decisions = Decisions(decisions)
        self.settings = settings or control_pb2.DriftSettings(mode=MODES[options.mode])
        # As they are written: none, while the options hold.
        self.kept_settings = settings
        self._clock = clock

    def set(self, wanted: control_pb2.DriftSettings) -> control_pb2.DriftSettings:
        """Change how drift is treated.

        Raises:
            RefusedError: No mode is given, or the reason is too long.
        """
        if wanted.mode not in MODES.values():
            raise invalid("settings.mode is not said; use OFF, ADVISE or AUTO")
        size = len(wanted.reason.encode())
        if size > REASON_BYTES_MAX:
            raise invalid(f"settings.reason is {size} bytes; at most {REASON_BYTES_MAX}")
        if wanted.frozen_until_ms < 0:
            raise invalid(f"settings.frozen_until_ms is {wanted.frozen_until_ms}; use 0 or a time")
        self.settings = self.kept_settings = control_pb2.DriftSettings()
        self.settings.CopyFrom(wanted)
        return self.settings

    def take_back(self, operation: str) -> control_pb2.DriftSettings | None:
        """Only advise from now on, if that is an operation of its own which somebody undoes.

        The reason for it is still there, so it would be started again. None: nothing changes.
        """
        acts = self.settings.mode == control_pb2.DRIFT_MODE_AUTO
        if not acts or not operation.startswith(_OPERATION):
            return None
        wanted = control_pb2.DriftSettings()
        wanted.CopyFrom(self.settings)
        wanted.mode, wanted.reason = control_pb2.DRIFT_MODE_ADVISE, f"{operation} was undone"
        return self.set(wanted)

    def is_time(self, now_ms: int) -> bool:
        """Whether the last look is so long ago that one is due, unless something forbids it."""
        looked_ms = self.memory.looked_ms
        return looked_ms is None or now_ms - looked_ms >= self.options.interval_s * 1000

    def is_due(self, now_ms: int) -> bool:
        """Whether it is time for a look, and the mode does not forbid it."""
        return self._off() is None and self.is_time(now_ms)

    def _off(self) -> Reason | None:
        """Return why no look takes place in this mode; None: looks take place."""
        if self.settings.mode != control_pb2.DRIFT_MODE_OFF:
            return None
        text = "mode is off; `embertide drift mode advise` looks again"
        return Reason(Outcome.DECISION_OUTCOME_OFF, text)

    def note_forbidden(self, reason: Reason | None, now_ms: int) -> None:
        """Count what forbids a look that is due, or that the mode does. Requires: `is_time`."""
        reason = self._off() or reason
        if reason is not None:
            interval_ms = self.options.interval_s * 1000
            self.memory.diagnosis.note_forbidden(reason, now_ms, interval_ms)

    def note_moved_on(self, before: int, now: int, now_ms: int) -> None:
        """Count a look that is of no use, as the plan has moved on from one epoch to another."""
        text = f"the plan moved on from {before} to {now} while it was looked at"
        self._note(Outcome.DECISION_OUTCOME_PLAN_MOVED_ON, text, now_ms)

    def _note(
        self, outcome: "control_pb2.DecisionOutcome.ValueType", why: str, now_ms: int
    ) -> None:
        self.memory.diagnosis.note_look(Reason(outcome, why), now_ms)

    def status(self, forbidden: Reason | None) -> control_pb2.DriftStatus:
        """Say what forbids a look now, or else what the last one came to."""
        return self.memory.diagnosis.message(self.settings, self._off() or forbidden)

    def build_look(
        self,
        now: Situation,
        loads: Mapping[str, node_pb2.NodeServiceGetLoadResponse],
        drained: Iterable[str],
        now_ms: int,
    ) -> LookAtDrift | None:
        """Return the look that is due; None: it cannot look, which is recorded."""
        first = self.memory.looked_ms is None
        at_ms = self._time(loads, now_ms)
        self._learn_speed(at_ms, now_ms)
        self.memory.looked_ms, self.memory.looked_at_ms = now_ms, at_ms
        asking = now.workload.asking
        missing = [*self._dead(now), *sorted(now.unknown)]
        if missing or asking is None:
            name = missing[0] if missing else "any node"
            why = f"the load of {name} is not known"
            if first:  # a fleet that has just started reports its first load in a moment
                self._note(Outcome.DECISION_OUTCOME_UNKNOWN_LOAD, why, now_ms)
            else:
                self._record(now, now_ms, Outcome.DECISION_OUTCOME_UNKNOWN_LOAD, why)
            return None
        seen, growth = self._compare_demand(now.plan, asking, hot_set(loads.values()), at_ms)
        joined = self._joined(now, frozenset(drained))
        look = Look(
            planner=self._planner(joined),
            reference=self.memory.reference,
            seen=seen,
            due="node_joined" if joined else self._due(now_ms),
            growth_N=growth[: len(now.plan.topology.nodes)],
            growth_T=growth[len(now.plan.topology.nodes) :],
            newest=now.newest,
            probe_share=0.0 if joined else self._probe_share(now_ms),
        )
        return LookAtDrift(look=look, problem=problem_of(now))

    def _compare_demand(
        self, plan: plan_pb2.Plan, asking: Asking, hot: HotSet, at_ms: int
    ) -> tuple[Signals, Floats]:
        """Compare the demand with the reference and the day before, and remember it.

        Returns:
            The signals that follow from that alone, and the growth over the horizon of each node
            and then of each table.
        """
        memory = self.memory
        starts_T = np.cumsum([0, *(1 << table.bucket_bits for table in plan.tables)])[:-1]
        mix_NT = mix_of(asking.wanted_NB, starts_T)
        nodes = names_of(plan.topology)
        names = [
            *(f"node {name}" for name in nodes),
            *(f"table {table.name}" for table in plan.tables),
        ]
        wanted_T = np.add.reduceat(asking.wanted_NB.sum(axis=0), starts_T)
        totals = dict(zip(names, [*asking.wanted_NB.sum(axis=1), *wanted_T], strict=True))
        signals = Signals(
            mix_change=distance(mix_NT, memory.mix_NT if memory.mix_nodes == nodes else None),
            hot_set_overlap=overlap(hot, memory.hot_set),
            forecast_error=memory.seasons.error(at_ms, totals),
        )
        horizon_ms = int(self.options.horizon_s * 1000 * memory.speed)
        growth = memory.seasons.growth(at_ms, horizon_ms, names)
        memory.seasons.take(at_ms, totals)
        if memory.hot_set is None or memory.mix_NT is None:
            memory.hot_set, memory.mix_NT, memory.mix_nodes = hot, mix_NT, nodes
        elif memory.mix_nodes != nodes:
            memory.mix_NT, memory.mix_nodes = mix_NT, nodes  # of another fleet
        return signals, growth

    def _learn_speed(self, at_ms: int, now_ms: int) -> None:
        """Take in how fast the clock of the demand goes."""
        looked_ms, looked_at_ms = self.memory.looked_ms, self.memory.looked_at_ms
        if self._clock == "wall" or looked_ms is None or looked_at_ms is None:
            return
        if at_ms > looked_at_ms and now_ms > looked_ms:
            speed = (at_ms - looked_at_ms) / (now_ms - looked_ms)
            self.memory.speed += _SMOOTHED * (speed - self.memory.speed)

    def _planner(self, joined: Sequence[str]) -> Planner:
        return planner(JOIN if joined and JOIN in PLANNERS else self.options.planner)

    def _due(self, now_ms: int) -> str:
        """Return why a planner is asked even if no detector fires; empty: it is not."""
        if self.memory.pending:
            return self.memory.pending
        asked_ms = self.memory.asked_ms
        if asked_ms is not None and now_ms - asked_ms >= self.options.look_again_s * 1000:
            return "look_again"
        return ""

    def _time(self, loads: Mapping[str, node_pb2.NodeServiceGetLoadResponse], now_ms: int) -> int:
        """Return the time that seasons count in."""
        watermarks = [load.watermark_ms for load in loads.values() if load.watermark_ms]
        return max(watermarks) if self._clock == "event" and watermarks else now_ms

    @staticmethod
    def _dead(now: Situation) -> list[str]:
        owning = {place.node for held in now.layout.in_use() for place in held.owners}
        names = [now.plan.topology.nodes[at].name for at in sorted(owning)]
        return [name for name in names if not now.alive(name)]

    @staticmethod
    def _joined(now: Situation, drained: frozenset[str]) -> list[str]:
        """Return the live nodes that own nothing and that nobody has drained."""
        owning = {place.node for held in now.layout.in_use() for place in held.owners}
        return [
            node.name
            for at, node in enumerate(now.plan.topology.nodes)
            if at not in owning
            and node.group not in now.plan.topology.partial_groups
            and node.name not in drained
            and now.alive(node.name)
        ]

    def take(
        self,
        outcome: LookFindings | RefusedError,
        move_plan: MovePlan | None,
        now: Situation,
        trust: Trust,
        now_ms: int,
    ) -> Act | None:
        """Judge what a look has found, record it, and return what is to be started, if anything.

        Args:
            outcome: The findings of the look, or the reason why there are none.
            move_plan: The moves that it comes to; None: it proposes nothing.
            now: The situation; its plan is the one that was looked at.
            trust: Whether the cost model may be acted on.
            now_ms: Wall clock.
        """
        if isinstance(outcome, RefusedError) or move_plan is None:
            if isinstance(outcome, RefusedError):
                why = f"planner {self.options.planner!r}: {outcome.message}"
                self._record(now, now_ms, Outcome.DECISION_OUTCOME_PLANNER_FAILED, why)
                self.memory.pending = _PENDING[Outcome.DECISION_OUTCOME_PLANNER_FAILED]
                return None
            decision = self._record(
                now, now_ms, Outcome.DECISION_OUTCOME_QUIET, "no detector fired"
            )
            decision.signals.CopyFrom(outcome.signals.message())
            return None
        return self._judged(outcome, move_plan, now, trust, now_ms)

    def _judged(
        self,
        found: LookFindings,
        move_plan: MovePlan,
        now: Situation,
        trust: Trust,
        now_ms: int,
    ) -> Act | None:
        saved = gain(found.before, found.after)
        before, after = found.before.message(), found.after.message()
        correction = self.corrections(now_ms)[kind_of(before, after, found.triggers)]
        expected = correction.expected(saved)
        whole = correction.expected(gain(found.before, found.whole)) if found.whole else expected
        moved_bytes = sum(move.bytes for move in move_plan.moves)
        must = "a node has joined and owns nothing" if "node_joined" in found.triggers else ""
        self.memory.agreed = self.memory.agreed + 1 if whole >= self.options.min_gain else 0
        verdict = judge(
            self._case(found, move_plan, correction, moved_bytes, must, trust, now_ms),
            self.options,
        )
        acts = verdict.outcome == Outcome.DECISION_OUTCOME_ACTED
        decision = self._decision(now, now_ms, verdict.outcome, verdict.why)
        decision.planner = JOIN if must and JOIN in PLANNERS else self.options.planner
        request = self._request(decision) if acts else None
        decision.MergeFrom(
            Decision(
                signals=found.signals.message(),
                triggers=dict.fromkeys((*self.memory.fired, *found.triggers)),
                before=before,
                after=after,
                predicted_gain=saved,
                expected_gain=expected,
                correction=correction.message(),
                buckets=len(move_plan.moves),
                bytes=moved_bytes,
                move_s=verdict.move_s,
                move_cost_us=verdict.cost_us,
                horizon_gain_us=verdict.horizon_gain_us,
                model_error=trust.error,
                explanation=found.explanation,
                operation_id=request.operation_id if request else "",
            )
        )
        self._keep(decision)
        self._after(verdict, found, now_ms)
        if request is None:
            return None
        roster = Roster(now.plan.topology)
        self.memory.waiting = _Waiting(
            decision=decision.id,
            operation=request.operation_id,
            owners={bucket: roster.devices(now.layout[bucket].owners) for bucket in found.owners},
            spent=found.spent,
            work=found.work,
        )
        return Act(
            request=request, move_plan=dataclasses.replace(move_plan, planner=decision.planner)
        )

    def _case(
        self,
        found: LookFindings,
        move_plan: MovePlan,
        correction: Factor,
        moved_bytes: int,
        must: str,
        trust: Trust,
        now_ms: int,
    ) -> Case:
        acted = self.decisions.acted_since(now_ms - DAY_MS)
        saved, whole = (gain(found.before, of) for of in (found.after, found.whole or found.after))
        return Case(
            mode=self.settings.mode,
            gain=correction.expected(whole),
            predicted=whole,
            learned_from=correction.operations,
            probe=found.whole is not None,
            saved_us=found.before.value * correction.expected(saved),
            bytes=moved_bytes,
            changes=bool(move_plan.moves or move_plan.hot_rows or move_plan.tier_shares),
            bytes_per_s=self._rate(),
            us_per_byte=_US_PER_BYTE,
            trusted=trust.trusted,
            model_error=trust.error,
            agreed=self.memory.agreed,
            quiet_ms=now_ms - acted[0].at_ms if acted else None,
            measuring=self.memory.waiting is not None,
            acted=len(acted),
            moved_bytes=sum(each.bytes for each in acted),
            frozen=self._frozen(now_ms),
            must=must,
        )

    def corrections(self, now_ms: int) -> dict[str, Factor]:
        """Return how predicted gains are corrected, by kind, by the gains on record."""
        return factors(measured_of(self.decisions, now_ms))

    def _probe_share(self, now_ms: int) -> float:
        """Return the share of a plan's buckets that may move: all, once a gain is on record."""
        known = self.corrections(now_ms)[""].operations
        return 0.0 if known else self.options.probe_share

    def _rate(self) -> float:
        """Return how fast a move will be: as measured, within the bandwidth budget."""
        bound = self.options.bytes_per_s
        return min(self.memory.bytes_per_s, bound) if bound else self.memory.bytes_per_s

    def _frozen(self, now_ms: int) -> str:
        if now_ms < self.settings.frozen_until_ms:
            left_s = (self.settings.frozen_until_ms - now_ms) / 1000
            reason = f" ({self.settings.reason})" if self.settings.reason else ""
            return f"frozen by an operator for another {left_s:,.0f} s{reason}"
        for window in self.options.freeze:
            if window.covers(now_ms):
                return f"in the freeze window {window} UTC"
        return ""

    def _request(self, decision: Decision) -> control_pb2.StartReshardRequest:
        """Return the request that a decision to act comes to."""
        reason = f"drift: {decision.why}".encode()[:REASON_BYTES_MAX].decode(errors="ignore")
        return control_pb2.StartReshardRequest(
            operation_id=f"{_OPERATION}{decision.at_ms}",
            planner=decision.planner,
            reason=reason,
            half_life_s=self.options.half_life_s,
            budget=control_pb2.ReshardBudget(
                bytes_per_s=self.options.bytes_per_s, p99_us=self.options.p99_us
            ),
        )

    def _after(self, verdict: Verdict, found: LookFindings, now_ms: int) -> None:
        """Remember for the next look what this one has settled."""
        self.memory.pending = _PENDING.get(verdict.outcome, "")
        kept = dict.fromkeys((*self.memory.fired, *found.triggers)) if self.memory.pending else ()
        self.memory.fired = tuple(each for each in kept if each not in _PENDING.values())
        self.memory.asked_ms = now_ms
        self.memory.reference = found.signals
        self.memory.hot_set = self.memory.mix_NT = None  # the next look's are the reference
        if verdict.outcome == Outcome.DECISION_OUTCOME_ACTED:
            self.memory.agreed = 0
            self.memory.reference = None  # the move itself changes the signals

    def _decision(
        self,
        now: Situation,
        now_ms: int,
        outcome: "control_pb2.DecisionOutcome.ValueType",
        why: str,
    ) -> Decision:
        return Decision(at_ms=now_ms, outcome=outcome, why=why, plan_epoch=now.plan.epoch)

    def _record(
        self,
        now: Situation,
        now_ms: int,
        outcome: "control_pb2.DecisionOutcome.ValueType",
        why: str,
    ) -> Decision:
        """Keep a decision that needed no planner."""
        return self._keep(self._decision(now, now_ms, outcome, why))

    def _keep(self, decision: Decision) -> Decision:
        """Keep a decision, and count its outcome."""
        self._note(decision.outcome, decision.why, decision.at_ms)
        return self.decisions.add(decision)

    def can_compare(
        self,
        operations: Mapping[str, control_pb2.OperationRecord],
        loads: Mapping[str, node_pb2.NodeServiceGetLoadResponse],
        now_ms: int,
    ) -> bool:
        """Whether it is time to measure what the last operation has gained."""
        waiting = self.memory.waiting
        record = operations.get(waiting.operation) if waiting else None
        if waiting is None or (record is not None and not record.operation.ended_ms):
            return False
        if record is None or not waiting.spent or not record.operation.buckets_done:
            self.memory.waiting = None
            return False
        at_ms = self._time(loads, now_ms)
        if waiting.ended_ms is None:
            self.memory.waiting = dataclasses.replace(waiting, ended_ms=at_ms)
            self._learn_rate(waiting, record.operation)
            return False
        passed_ms = _HALF_LIVES * self.options.half_life_s * 1000
        if now_ms > record.operation.ended_ms + passed_ms + _GIVE_UP_MS:
            self.memory.waiting = None  # a stream that stands still, or nodes that say nothing
            return False
        settled = now_ms >= record.operation.ended_ms + _SETTLE_MS
        return settled and at_ms >= waiting.ended_ms + passed_ms

    def build_comparison(self, now: Situation) -> MeasureGain | None:
        """Return the question that the measurement needs. Requires: `can_compare`.

        None: an owner of before has left, so nobody can say any more what it was worth.
        """
        waiting = self.memory.waiting
        if waiting is None:
            return None
        roster = Roster(now.plan.topology)
        owners = {}
        for at, before in waiting.owners.items():
            found = [each for each in map(roster.find, before) if each is not None]
            if len(found) < len(before):
                self.memory.waiting = None
                return None
            owners[at] = tuple(found)
        return MeasureGain(
            compare=GainComparison(owners=owners, work=waiting.work), problem=problem_of(now)
        )

    def compare(self, found: GainCosts | None, now_ms: int) -> None:
        """Keep what the last operation has gained beside what was predicted; None: not known.

        The demand may have changed meanwhile. So what the fleet spends is compared with what it
        would spend if the operation had not been: what it spent before, times by how much the cost
        model says that today's demand would have changed that. It says both by today's prices:
        those of before may have been fitted to less.
        """
        waiting, self.memory.waiting = self.memory.waiting, None
        decision = self.decisions.get(waiting.decision) if waiting else None
        if waiting is None or decision is None or found is None:
            return
        had_it_stayed = waiting.spent * found.undone.value / (found.before_value or 1.0)
        if found.spent and had_it_stayed:
            decision.measured_gain = 1 - found.spent / had_it_stayed
            decision.measured_ms = now_ms
            self.decisions.keep(decision)

    def _learn_rate(self, waiting: _Waiting, operation: control_pb2.Operation) -> None:
        """Take in how fast an operation moved its bytes."""
        decision = self.decisions.get(waiting.decision)
        seconds = (operation.ended_ms - decision.at_ms) / 1000 if decision else 0.0
        if operation.bytes_done and seconds > 0:
            rate = operation.bytes_done / seconds
            self.memory.bytes_per_s += _SMOOTHED * (rate - self.memory.bytes_per_s)
