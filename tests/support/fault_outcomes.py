"""The fate of a process one of whose background tasks had a fault."""

import dataclasses
from collections.abc import Mapping

FAULTS = {
    "exception": "an exception",
    "bad_alloc": "no memory",
    "unknown": "what is no exception",
    "start": "no thread",
}
SAYS_S, HEALS_S, STARTS_S = 10.0, 10.0, 60.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one task and one fault.

    Attributes:
        lives: Whether the process does.
        answers: Whether it does its work meanwhile; None: not asked, as it cannot.
        in_status: Whether its status, or its metrics, name the task.
        in_log: Whether its log does.
        heals_s: Seconds from the end of the fault to a task and a process that work; None: not in
            time.
    """

    lives: bool
    answers: bool | None
    in_status: bool
    in_log: bool
    heals_s: float | None


Tried = tuple[str, str, Mapping[str, Outcome]]  # whose tasks, the fault, outcomes by task


def wrong(tried: Tried) -> list[str]:
    """Return what is not well of a fault that each task of a process had, a line each."""
    whose, fault, outcomes = tried
    return [
        f"{whose}, {task}, {FAULTS[fault]}: {outcome}"
        for task, outcome in outcomes.items()
        if not (outcome.lives and outcome.in_status and outcome.in_log)
        or outcome.answers is False
        or outcome.heals_s is None
    ]
