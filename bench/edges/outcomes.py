"""What became of a process one of whose background tasks had a fault, and the rows of it."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping

from bench import report

FAULTS = {
    "exception": "an exception",
    "bad_alloc": "no memory",
    "unknown": "what is no exception",
    "start": "no thread",
}
SAYS_S, HEALS_S, STARTS_S = 10.0, 10.0, 60.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one task and one fault.

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


def rows(whose: str, fault: str, outcomes: Mapping[str, Outcome]) -> Iterator[report.Row]:
    """Yield the rows of a fault that each task of a process had; say on stderr what is not well."""
    case = f"every task of {whose}: {FAULTS[fault]}"
    for task, outcome in outcomes.items():
        well = outcome.lives and outcome.in_status and outcome.in_log
        if not well or outcome.answers is False or outcome.heals_s is None:
            print(f"{whose}, {task}, {fault}: {outcome}", file=sys.stderr)

    def share(metric: str, values: list[bool]) -> report.Row:
        return report.measure(
            (case, metric, f"share of {len(values)} tasks"),
            [sum(values) / len(values)],
            better="higher",
            target=1,
            claim="A.5",
        )

    yield share("the process lives", [each.lives for each in outcomes.values()])
    yield share("its status names the task", [each.in_status for each in outcomes.values()])
    yield share("its log names the task", [each.in_log for each in outcomes.values()])
    answers = [each.answers for each in outcomes.values() if each.answers is not None]
    if answers:
        yield share("its work goes on", answers)
    yield share("healed", [each.heals_s is not None for each in outcomes.values()])
    healed = [each.heals_s for each in outcomes.values() if each.heals_s is not None]
    if healed:
        yield report.measure(
            (case, "until it is healed, the longest", "s"),
            [max(healed)],
            better="lower",
            target=HEALS_S,
            claim="A.5",
        )
