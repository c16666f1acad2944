"""News from outside the core: versions, the trainer, nodes that were refused, tasks."""

from collections.abc import Sequence
from typing import NamedTuple

from embertide.v1 import control_pb2, node_pb2, update_pb2

SILENT_MS = 10_000
"""A trainer sets its sign every two seconds; one that is older has no trainer behind it.

Where the bus was away meanwhile, it gets as long from the time on when the bus answers again.
"""
_STOPPED = (130, 143)  # by Ctrl-C, by SIGTERM
TRAINER_STATES = ("alive", "silent", "ended", "stopped", "failed")


def trainer_state(status: control_pb2.TrainerStatus) -> str:
    """Return what has become of a trainer, one of TRAINER_STATES."""
    sign = status.sign
    if not sign.ended_ms:
        answers_ms = status.answers_ms if status.HasField("answers_ms") else status.age_ms
        return "silent" if min(status.age_ms, answers_ms) > SILENT_MS else "alive"
    if sign.exit_status == 0:
        return "ended"
    return "stopped" if sign.exit_status in _STOPPED else "failed"


class Withdrawal(NamedTuple):
    """Versions that ordinary requests never see, both ends included."""

    first: int
    last: int
    reason: str
    by: str
    at_ms: int
    detail: str


class Rollback(NamedTuple):
    """Version `number` restores the state of version `to`."""

    number: int
    to: int
    by: str
    at_ms: int


class Promotion(NamedTuple):
    """The decisions of guard and rollbacks (docs/formats.md, "Promotion record")."""

    promoted: int = 0
    withdrawn: tuple[Withdrawal, ...] = ()
    undone: tuple[Rollback, ...] = ()


class RollbackNews(NamedTuple):
    """An order to roll back that waits for a trainer, and the outcome of the last one taken."""

    order: update_pb2.RollbackOrder | None = None
    outcome: update_pb2.RollbackOutcome | None = None


class News(NamedTuple):
    """News from outside the core at one time.

    Attributes:
        commits: Commits of versions after the newest that the timeline knows, oldest first.
        promotion: The decisions on versions; None: not known now.
        bus: How full the bus is; None: not known now.
        trainer: Its newest sign; None: there is none, or it is not known now.
        refused: Nodes that were refused.
        tasks: The health of this process's background tasks.
        rollback: What was ordered, and what has become of it.
    """

    commits: Sequence[update_pb2.GlobalCommit] = ()
    promotion: Promotion | None = None
    bus: control_pb2.BusStatus | None = None
    trainer: control_pb2.TrainerStatus | None = None
    refused: Sequence[control_pb2.RefusedRegistration] = ()
    tasks: Sequence[node_pb2.TaskHealth] = ()
    rollback: RollbackNews = RollbackNews()
