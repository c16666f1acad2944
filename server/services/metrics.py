"""/metrics of the control plane: the fleet, its plan and operations, and how we ourselves are."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from embertide.server.core.control import Control
from embertide.server.core.errors import RefusedError
from embertide.server.core.news import TRAINER_STATES, trainer_state
from embertide.server.services.driver import Driver
from embertide.server.services.gate import Gate
from embertide.server.services.rollbacks import RollbackBus
from embertide.v1 import control_pb2

_PREFIX = "embertide_control_"
_STATES = {
    name.removeprefix("NODE_STATE_").lower(): state
    for name, state in control_pb2.NodeState.items()
    if state != control_pb2.NODE_STATE_UNSPECIFIED
}


class _Fleet(NamedTuple):
    """The state of a core at a scrape."""

    epoch: int
    followed: bool
    states: Mapping[str, int]
    unowned: int
    active: int
    looks: Mapping[str, int]


def _look(core: Control, now_ms: int) -> _Fleet:
    states = core.node_states(now_ms)
    return _Fleet(
        core.epoch,
        not core.problem(now_ms),
        {name: states[state] for name, state in _STATES.items()},
        core.buckets_without_owner(now_ms),
        len(core.operations.active()),
        {
            name.removeprefix("DECISION_OUTCOME_").lower(): core.drift_looks[outcome]
            for name, outcome in control_pb2.DecisionOutcome.items()
            if outcome != control_pb2.DECISION_OUTCOME_UNSPECIFIED
        },
    )


class ControlPage(Collector):
    """The metrics, read anew at each scrape."""

    def __init__(
        self, drivers: Mapping[str, Driver], gate: Gate, buses: Mapping[str, RollbackBus]
    ) -> None:
        """Show the fleets of models, what the gate refused, and who trains by these buses."""
        self._drivers, self._gate, self._buses = drivers, gate, buses

    def collect(self) -> Iterator[Metric]:
        """Return it as it is now."""
        yield from self._of_fleets()
        yield from self._of_trainers()
        yield from self._of_ourselves()
        calls = CounterMetricFamily(
            _PREFIX + "calls_refused", "Calls that were refused.", labels=["rpc", "code"]
        )
        for what, count in list(self._gate.refused.items()):
            calls.add_metric(what.split(" ", 1), count)
        yield calls
        yield CounterMetricFamily(
            _PREFIX + "registrations_refused",
            "Nodes that asked to be of a fleet and were refused; the log names them.",
            self._gate.registrations.count,
        )

    def _of_fleets(self) -> Iterator[Metric]:
        found: dict[str, _Fleet] = {}
        for model, driver in self._drivers.items():
            try:
                found[model] = driver.call(_look)
            except RefusedError:
                continue  # `leads` says that it has nothing to say
        leads = self._gauge("leads", "1: it decides; 0: another does, or `state` is away.")
        for model in self._drivers:
            leads.add_metric([model], model in found)
        yield leads
        shown: tuple[tuple[str, str, Callable[[_Fleet], float]], ...] = (
            ("plan_epoch", "Epoch of the newest plan; 0: none.", lambda fleet: fleet.epoch),
            (
                "plans_followed",
                "0: nodes act by plans that `state` does not have; see the log.",
                lambda fleet: fleet.followed,
            ),
            ("buckets_unowned", "Buckets without a live owner.", lambda fleet: fleet.unowned),
            ("operations_active", "Operations that have not ended.", lambda fleet: fleet.active),
        )
        for name, text, value in shown:
            family = self._gauge(name, text)
            for model, fleet in found.items():
                family.add_metric([model], value(fleet))
            yield family
        nodes = GaugeMetricFamily(
            _PREFIX + "nodes", "Registered nodes by state.", labels=["model", "state"]
        )
        for model, fleet in found.items():
            for state, count in fleet.states.items():
                nodes.add_metric([model, state], count)
        yield nodes
        looks = CounterMetricFamily(
            _PREFIX + "drift_looks",
            "Looks at the drift that were due, by what came of them or forbade them.",
            labels=["model", "outcome"],
        )
        for model, fleet in found.items():
            for outcome, count in fleet.looks.items():
                looks.add_metric([model, outcome], count)
        yield looks

    def _of_trainers(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            _PREFIX + "trainer", "1 for the state of the trainer.", labels=["model", "state"]
        )
        unread = self._gauge("trainer_unread", "What the trainer has not read of its source.")
        for model, bus in self._buses.items():
            status = bus.trainer()
            if status is None:
                continue
            state = trainer_state(status)
            for each in TRAINER_STATES:
                states.add_metric([model, each], each == state)
            if status.sign.HasField("unread"):
                unread.add_metric([model], status.sign.unread)
        yield from (states, unread)

    def _of_ourselves(self) -> Iterator[Metric]:
        labels = ["model", "what"]
        events = CounterMetricFamily(_PREFIX + "events", "Log entries, by kind.", labels=labels)
        faults = CounterMetricFamily(_PREFIX + "faults", "Faults, by kind.", labels=labels)
        healthy = GaugeMetricFamily(
            _PREFIX + "task_ok", "0: a background task fails, or has no thread.", labels=labels
        )
        failures = CounterMetricFamily(
            _PREFIX + "task_failures", "Rounds of a task that failed.", labels=labels
        )
        for model, driver in self._drivers.items():
            for what, count in list(driver.journal.counts.items()):
                events.add_metric([model, what], count)
            for what, count in list(driver.counts.items()):
                faults.add_metric([model, what], count)
            for health in driver.healths():
                healthy.add_metric([model, health.name], health.ok)
                failures.add_metric([model, health.name], health.failures)
        yield from (events, faults, healthy, failures)

    @staticmethod
    def _gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(_PREFIX + name, text, labels=["model"])


def metrics_app(page: Collector) -> Callable[..., object]:
    """Return the WSGI application that shows a page."""
    registry = CollectorRegistry()
    registry.register(page)
    return make_wsgi_app(registry)
