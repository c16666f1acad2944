"""Tasks that the core leaves to its driver, as a tick must not wait for them, and their results.

    core: a tick adds a task --> driver: has the first one run where planners run, and hands its
    result in --> core: the next tick uses the result if it is of the plan that holds by then

The driver does not look into tasks: it runs them, or says why it cannot.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from embertide.server.core.drift.look import GainComparison, GainCosts, Look, LookFindings
from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.preparation import PreparedOperation, operation_of, propose_here
from embertide.server.core.reshard import PlannerTask, Situation, build_moves
from embertide.v1 import control_pb2

Propose = Callable[[PlannerTask], Proposal]
Outcome_co = TypeVar("Outcome_co", covariant=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult(Generic[Outcome_co]):
    """The end of a task.

    Attributes:
        epoch: Epoch of the plan that the task was made from.
        outcome: The answer, or the reason why there is none.
    """

    epoch: int
    outcome: Outcome_co | RefusedError

    def value(self) -> Outcome_co:
        """Return the answer.

        Raises:
            RefusedError: There is none.
        """
        if isinstance(self.outcome, RefusedError):
            raise self.outcome
        return self.outcome


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperationPrepared(TaskResult[PreparedOperation]):
    """The end of `PrepareOperation`, by the id of the operation."""

    operation_id: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DriftSeen(TaskResult[LookFindings]):
    """The end of `LookAtDrift`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GainMeasured(TaskResult[GainCosts]):
    """The end of `MeasureGain`."""


Result_co = TypeVar("Result_co", bound=TaskResult[object], covariant=True)
Result = TypeVar("Result", bound=TaskResult[object])


class Task(Protocol[Result_co]):
    """Something to be run beside the ticks. It is pickled, and never changes."""

    @property
    def name(self) -> str:
        """A name for people: the planner's, where one is asked."""

    @property
    def is_quick(self) -> bool:
        """Whether it takes so little time that it may be run in a thread of the control plane."""

    def run(self, propose: Propose = propose_here) -> Result_co:
        """Do it, and return its result.

        Args:
            propose: Asks a planner that may take long.

        Raises:
            RefusedError: It has no answer.
        """

    def refused(self, error: RefusedError) -> Result_co:
        """Return the result that says why there is no answer."""

    def is_ended_by(self, result: TaskResult[object]) -> bool:
        """Whether a result is of this task, or of one that is equal to it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOperation:
    """Asks for the moves and the record of the operation that a request comes to.

    Attributes:
        request: The request.
        planner_task: The question to a planner that the request comes to.
        now: The situation that it is judged by, without operations.
        nodes_known: Nodes of today's plan; further ones of the situation's are of a group to add.
    """

    request: control_pb2.StartReshardRequest
    planner_task: PlannerTask
    now: Situation
    nodes_known: int

    @property
    def name(self) -> str:
        """The planner's name."""
        return self.planner_task.name

    @property
    def epoch(self) -> int:
        """Epoch of the plan that it is judged by."""
        return self.planner_task.epoch

    @property
    def is_quick(self) -> bool:
        """Whether no planner thinks, and the moves are few."""
        return not self.planner_task.thinks and not self.planner_task.large

    def run(self, propose: Propose = propose_here) -> OperationPrepared:
        """Return the operation.

        Raises:
            RefusedError: It cannot be done; the message names what is wrong.
        """
        asked = self.planner_task
        proposal = propose(asked) if asked.thinks else propose_here(asked)
        moves = build_moves(asked.kind, asked.name, proposal, self.now)
        operation = operation_of(self.request, moves, self.now)
        operation.answer.added_nodes.extend(self.now.plan.topology.nodes[self.nodes_known :])
        return self._ended(operation)

    def refused(self, error: RefusedError) -> OperationPrepared:
        """Return the result that says why there is no operation."""
        return self._ended(error)

    def _ended(self, outcome: PreparedOperation | RefusedError) -> OperationPrepared:
        return OperationPrepared(
            operation_id=self.request.operation_id, epoch=self.epoch, outcome=outcome
        )

    def is_for(self, operation_id: str, epoch: int) -> bool:
        """Whether it prepares an operation by the plan of an epoch."""
        return (self.request.operation_id, self.epoch) == (operation_id, epoch)

    def is_ended_by(self, result: TaskResult[object]) -> bool:
        """Whether a result is of this operation and plan."""
        return isinstance(result, OperationPrepared) and self.is_for(
            result.operation_id, result.epoch
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LookAtDrift:
    """Asks for a look at the drift."""

    look: Look
    problem: Problem
    name = "look"
    is_quick = False

    def run(self, propose: Propose = propose_here) -> DriftSeen:
        """Return what the look found.

        Raises:
            RefusedError: As `Look.propose`.
        """
        return DriftSeen(epoch=self.problem.plan.epoch, outcome=self.look.propose(self.problem))

    def refused(self, error: RefusedError) -> DriftSeen:
        """Return the result that says why nothing was seen."""
        return DriftSeen(epoch=self.problem.plan.epoch, outcome=error)

    def is_ended_by(self, result: TaskResult[object]) -> bool:
        """Whether a result is of a look at the same plan."""
        return isinstance(result, DriftSeen) and result.epoch == self.problem.plan.epoch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasureGain:
    """Asks what the last operation that was started for drift has gained."""

    compare: GainComparison
    problem: Problem
    name = "compare"
    is_quick = False

    def run(self, propose: Propose = propose_here) -> GainMeasured:
        """Return the costs of both plans.

        Raises:
            RefusedError: As `GainComparison.propose`.
        """
        outcome = self.compare.propose(self.problem)
        return GainMeasured(epoch=self.problem.plan.epoch, outcome=outcome)

    def refused(self, error: RefusedError) -> GainMeasured:
        """Return the result that says why the gain is not known."""
        return GainMeasured(epoch=self.problem.plan.epoch, outcome=error)

    def is_ended_by(self, result: TaskResult[object]) -> bool:
        """Whether a result is of a comparison by the same plan."""
        return isinstance(result, GainMeasured) and result.epoch == self.problem.plan.epoch


AnyTask = PrepareOperation | LookAtDrift | MeasureGain


class TaskQueue:
    """Tasks in the order in which they were added, and results that the core has not used yet.

    Both are bounded: there is at most one task, and one result, of each kind. A task that is added
    takes the place of the one of its kind, whose plan does not hold any more. Used by one thread at
    a time, as the core that it belongs to.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._tasks: list[AnyTask] = []
        self._results: dict[type[TaskResult[object]], TaskResult[object]] = {}

    def __iter__(self) -> Iterator[AnyTask]:
        """Yield the tasks that have no result yet, oldest first."""
        return iter(self._tasks)

    def __len__(self) -> int:
        """Count them."""
        return len(self._tasks)

    def add(self, task: AnyTask) -> None:
        """Let a task be run."""
        self._tasks = [each for each in self._tasks if type(each) is not type(task)]
        self._tasks.append(task)

    def first(self) -> AnyTask | None:
        """Return the task to run next; it stays until its result is handed in."""
        return self._tasks[0] if self._tasks else None

    def finish(self, result: TaskResult[object]) -> None:
        """Hand in the result of a task. It is kept even if a newer task has taken its place."""
        self._tasks = [each for each in self._tasks if not each.is_ended_by(result)]
        self._results[type(result)] = result

    def take(self, kind: type[Result]) -> Result | None:
        """Return the result of a kind, once; None: there is none."""
        result = self._results.pop(kind, None)
        return result if isinstance(result, kind) else None
