"""The control plane's last answers, for all visitors, and their age.

Pages never wait for a control plane that does not answer: one thread asks, with the token of a
visitor who is there, and pages show the last answers with their age. It is asked at most a tenth of
the time, so a fleet whose answers take long is asked less often.
"""

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from embertide.server.cli.control_client import Caller, CallError
from embertide.server.cli.fleet_view import FleetAnswers, ask_fleet, facts_of
from embertide.server.cli.timeline import list_events
from embertide.server.console.heat import RANGES, HeatMap
from embertide.server.console.history import History
from embertide.server.console.sessions import Session
from embertide.v1 import control_pb2

_log = logging.getLogger(__name__)
EVERY_S = 2.0
VERIFY_S = 10.0
"""A token that was withdrawn ends its session so long after, at most."""
_AGAIN_S = 5.0  # after the control plane did not answer
_FIRST_WAIT_S = 15.0  # while nothing is known yet
_WAIT_S = 0.25
_LISTED = 200
EVENTS_SHOWN = 1000
"""The newest events that pages have; `embertide timeline` shows all that are kept."""
_HOT_KEYS = 50
_SLOW = 50
REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")


class Reading(NamedTuple):
    """Everything that pages show.

    Attributes:
        answers: The control plane's answers about the fleet.
        facts: The same as `embertide status` has it.
        operations: The newest, newest first.
        decisions: The newest about drift, and how it decides.
        events: The fleet's events, newest first.
        versions: The newest ones, and how full the bus is.
        took_s: How long the answers took.
    """

    answers: FleetAnswers
    facts: dict[str, Any]
    operations: control_pb2.ListOperationsResponse
    decisions: control_pb2.ListDecisionsResponse
    events: list[control_pb2.FleetEvent]
    versions: control_pb2.ListVersionsResponse
    took_s: float


def read(caller: Caller) -> Reading:
    """Ask a control plane for everything.

    Raises:
        CallError: It refused, or cannot be reached.
    """
    began_s = time.monotonic()
    answers = ask_fleet(caller, hot_keys=_HOT_KEYS, ranges=RANGES, slow_requests=_SLOW)
    operations = caller.call("ListOperations", control_pb2.ListOperationsRequest(page_size=_LISTED))
    decisions = caller.call("ListDecisions", control_pb2.ListDecisionsRequest(page_size=_LISTED))
    events = list_events(caller, control_pb2.ListEventsRequest(), EVENTS_SHOWN)
    versions = caller.call("ListVersions", control_pb2.ListVersionsRequest())
    facts = facts_of(answers)
    took_s = time.monotonic() - began_s
    return Reading(answers, facts, operations, decisions, events, versions, took_s)


class Source:
    """The last reading. Thread-safe.

    Attributes:
        history: The last hour of a few figures.
        heat: Reads by buckets and time.
        reads: Readings that were made.
        failures: Readings that failed.
    """

    def __init__(self, ask: Callable[[Caller], Reading] = read) -> None:
        """Begin without a reading; `ask` makes one."""
        self.history = History()
        self.heat = HeatMap()
        self.reads = self.failures = 0
        self._ask = ask
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "console-source")
        self._verifiers = concurrent.futures.ThreadPoolExecutor(2, "console-verify")
        self._asking: concurrent.futures.Future[None] | None = None
        self._next_s = 0.0
        self._last: Reading | None = None
        self._problem = ""

    def look(self, session: Session) -> tuple[Reading | None, str]:
        """Return the last reading, and what is wrong with the control plane; empty: nothing is.

        None: there is none yet. A session whose token is not taken any more has its `refusal` set.
        """
        self._verify(session)
        with self._lock:
            if self._asking is None and time.monotonic() >= self._next_s:
                self._asking = self._pool.submit(self._read, session)
            asking, known = self._asking, self._last is not None
        if asking is not None:
            concurrent.futures.wait([asking], _WAIT_S if known else _FIRST_WAIT_S)
        with self._lock:
            return self._last, self._problem

    def forget_age(self) -> None:
        """Have the next page ask anew, as after an operation was started."""
        with self._lock:
            self._next_s = 0.0

    def close(self) -> None:
        """Ask no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._verifiers.shutdown(wait=False, cancel_futures=True)

    def _read(self, session: Session) -> None:
        try:
            reading = self._ask(session.caller)
        except CallError as error:
            self._failed(error, session)
        except Exception as error:  # the thread must go on; pages show what was known
            _log.exception("what the control plane said cannot be shown")
            self._note(f"what the control plane said cannot be shown: {type(error).__name__}")
        else:
            self.history.add(reading.facts)
            self.heat.add(reading.answers)
            with self._lock:
                self.reads += 1
                self._last, self._problem, self._asking = reading, "", None
                self._next_s = time.monotonic() + max(EVERY_S, 9 * reading.took_s)
            session.verified_s = time.monotonic()

    def _failed(self, error: CallError, session: Session) -> None:
        if error.code in REFUSED:  # it is this visitor's affair alone: another one asks
            session.refusal = str(error)
            with self._lock:
                self._asking = None
        else:
            self._note(str(error))

    def _note(self, problem: str) -> None:
        with self._lock:
            self.failures += 1
            self._problem, self._asking = problem, None
            self._next_s = time.monotonic() + _AGAIN_S

    def _verify(self, session: Session) -> None:
        """Have the control plane look at a session's token, if it has not for a while."""
        now_s = time.monotonic()
        if now_s - session.verified_s < VERIFY_S:
            return
        session.verified_s = now_s

        def verify() -> None:
            try:
                session.caller.call(
                    "ListOperations", control_pb2.ListOperationsRequest(page_size=1)
                )
            except CallError as error:
                if error.code in REFUSED:
                    session.refusal = str(error)
            except ValueError:  # the session has ended meanwhile, and its channel with it
                _log.debug("a session ended while its token was looked at")

        self._verifiers.submit(verify)
