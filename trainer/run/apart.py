"""A rank of an asynchronous run: it learns whole batches by itself, one after the other.

The first rank's loop is that of any run: it reads, counts and keeps what lies beside the rows, but
for the steps themselves. It hands batches out (hand_out.py); the learning thread of each rank takes
one, reads its rows from their owners, takes a step of its own net, and has the owners apply the
rows' gradients (sync/row_server.py). Where a version or checkpoint is due, or the run ends, the
first rank waits until all batches are learned; all replicas of the net become one
(sync/replicas.py); then all ranks publish as ranks of any run do. So whoever reads versions or
checkpoints knows nothing of it.

    first rank                          other ranks
    loop: read, put ... take reports    follow: ask for the next task
          command ------------------->  obey it, as the first rank does the same
    learning thread: ask, learn         learn it, report with the next ask
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from embertide.trainer.config import (
    AsynchronousSync,
    Hop,
    LocalSGD,
    PartialAllReduce,
    RunConfig,
)
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.learner import Learner, NotFiniteError
from embertide.trainer.publish.threads import Workers
from embertide.trainer.run.hand_out import (
    Command,
    HandOut,
    Job,
    Report,
    Task,
    packed_report,
    packed_task,
    unpacked_report,
    unpacked_task,
)
from embertide.trainer.sync.calls import empty
from embertide.trainer.sync.channel import Channel
from embertide.trainer.sync.groups import GroupGenerator
from embertide.trainer.sync.meetings import Meetings
from embertide.trainer.sync.neighbours import Neighbours
from embertide.trainer.sync.ranks import TIMEOUT_S, Ranks
from embertide.trainer.sync.replicas import Replicas
from embertide.trainer.sync.row_server import by_powers

_NEXT, _MEET, _MET, _REPORT, _ROUND = "next", "meet", "met", "report", "round"
_END = "end"
ASK_S = 0.5  # what ranks tell one another beside batches, they tell so often
_STILL_S, _STILL_STEPS = 0.5, 4
"""A rank stands still that takes longer for a batch than this, and than so many usual ones."""


def check_supported(run: RunConfig) -> None:
    """Refuse what ranks that are not at the same step cannot do.

    Raises:
        ConfigurationError: The message names it, and why.
    """
    sync = run.sync
    if isinstance(sync, PartialAllReduce) and sync.schedule == "static":
        raise ConfigurationError(
            "sync=PartialAllReduce(schedule='static') is for ranks that are at the same step, and"
            " here each takes the next batch when it is free: use schedule='generated'"
        )
    reasons = {
        "prune": (run.prune is not None, "all ranks make a pass of pruning at one step"),
        "serve_reduced": (
            run.serve_reduced is not None,
            "all ranks score a batch in both ways at one step",
        ),
        "labels": (run.labels is not None, "impressions are scored before the next are read"),
        "ssd_budget_bytes": (run.ssd_budget_bytes > 0, "rows are brought from the SSD by steps"),
        "codecs.gradients": (
            run.codecs.gradients == "int8",
            "what int8 rounds off goes with the rank's next gradient of that key",
        ),
        "optimizer.schedule": (
            run.optimizer.schedule is not None,
            "it counts steps, and each rank takes its own",
        ),
        "correction": (
            run.correction is not None,
            "it follows all scores in the order of events, and each rank knows its own",
        ),
        "model.sequences": (
            any(each.published for each in run.model.sequences),
            "the first rank alone knows the histories, and each rank publishes a part",
        ),
    }
    for name, (is_set, why) in reasons.items():
        if is_set:
            raise _refused(run, f"does not go with {name}, for {why}", "AllReduce()")


def check_learner(run: RunConfig, learner: Learner) -> None:
    """Refuse a plan or a net of one's own that they cannot do.

    Raises:
        ConfigurationError: As of `check_supported`.
    """
    for t, table in enumerate(run.model.tables):
        if learner.rows.ownership.everywhere(t):
            raise _refused(
                run,
                f"does not go with table {table.name!r}, which the plan has everywhere, for all"
                " ranks change its rows at one step",
                "AllReduce()",
            )
        if learner.rows.ownership.columns(t):
            raise _refused(
                run,
                f"does not go with table {table.name!r}, which the plan has column-wise, for the"
                " ranks that have parts of a row take its step together",
                "AllReduce()",
            )
    if learner.has_statistics:
        raise _refused(
            run,
            "does not go with a net that has buffers, as BatchNorm's, for ranks bring them"
            " together in every step",
            "AllReduce()",
        )


def _refused(run: RunConfig, what: str, instead: str) -> ConfigurationError:
    return ConfigurationError(f"sync={type(run.sync).__name__}() {what}: use sync={instead}")


class Apart:
    """The part of one rank beside an ordinary run. For the training thread.

    Args:
        run: With an asynchronous strategy.
        ranks: More than one.
        learner: This rank's.
        channel: The one of the training thread.

    Attributes:
        hand_out: The queue of batches, on the first rank; None on the others.
        meetings: The groups' meetings, on the first rank with `PartialAllReduce`.
        neighbours: With `Hop`.
        replicas: The net's copies on all ranks.
    """

    def __init__(self, run: RunConfig, ranks: Ranks, learner: Learner, channel: Channel) -> None:
        """Open the calls; `start` serves them."""
        assert isinstance(run.sync, AsynchronousSync)
        assert learner.rows.served is not None
        self._run, self._sync, self._ranks, self._learner = run, run.sync, ranks, learner
        self._channel = channel
        self._served = learner.rows.served
        self._calls = ranks.calls()
        self.replicas = Replicas(learner.weights, learner.optimizer, channel, self._calls)
        self.hand_out: HandOut | None = None
        if ranks.first:
            self.hand_out = HandOut(
                ranks.size,
                max_out=run.sync.max_row_staleness + 1,
                max_apart=run.sync.max_batches_apart,
                timeout_s=TIMEOUT_S,
                lost=ranks.lost,
            )
        self.meetings: Meetings | None = None
        self._meets = isinstance(run.sync, PartialAllReduce)
        if isinstance(run.sync, PartialAllReduce) and self.hand_out is not None:
            generator = GroupGenerator(
                ranks.size,
                run.sync.group_size,
                buffer=run.sync.buffer,
                division=run.sync.division,
                max_lag=run.sync.max_lag,
                seed=run.seed,
            )
            self.meetings = Meetings(generator, self._stands_still)
        self.neighbours: Neighbours | None = None
        if isinstance(run.sync, Hop):
            self.neighbours = Neighbours(
                run.sync, ranks.size, self._calls, self.replicas, self._round_now
            )
        self._workers = Workers("learner")
        self._failure: Exception | None = None
        self._since_average = 0  # batches that were handed out

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve other ranks, and on the first rank learn beside; at the end nothing is under way.

        Raises:
            RankLostError: A rank is gone.
        """
        answers = self._served.answers() | {
            _NEXT: self._answer_next,
            _MEET: self._answer_meet,
            _MET: self._answer_met,
            _REPORT: self._answer_report,
            _ROUND: self._answer_round,
        }
        if self.neighbours is not None:
            answers |= self.neighbours.answers()
        self._calls.serve(answers, self._fail)
        learning = self._workers.submit(self._learn_here, here=False) if self.hand_out else None
        try:
            yield
            if self.hand_out is not None:
                self.hand_out.end(Command(_END, None))
        except BaseException as error:
            failure = error if isinstance(error, Exception) else RuntimeError("the run has ended")
            self._fail(failure)
            raise
        finally:
            if learning is not None:
                learning.exception()  # waits; what it failed with is raised by the hand-out
        self._calls.close()

    # --- on the first rank ------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether all ranks are to take the mean of their nets, now that a batch was handed out."""
        self._since_average += 1
        return (
            isinstance(self._sync, LocalSGD)
            and self._since_average >= self._sync.every * self._ranks.size
        )

    def settle(self) -> None:
        """Return once no rank is to learn or to meet others; all reports are taken.

        Raises:
            RankLostError: A rank is gone.
        """
        assert self.hand_out is not None
        if self.meetings is not None:
            self.meetings.release()
        self.hand_out.end_round()
        if self.neighbours is not None:
            self.neighbours.go_to(self.hand_out.round)
        self.hand_out.wait_for_here()

    def command(self, name: str, value: Any, data: bytes = b"") -> None:
        """Have all other ranks do what this one does next; every batch has been learned."""
        assert self.hand_out is not None
        self.hand_out.command(Command(name, value, data))

    def average(self, *, optimizers: bool) -> None:
        """Make the nets of all ranks one, and where a version ends their optimizers."""
        self._since_average = 0
        if optimizers:
            self._served.check(self._channel)
        self.replicas.average(optimizers=optimizers)

    def _learn_here(self) -> None:
        hand_out = self.hand_out
        assert hand_out is not None
        torch.set_num_threads(self._run.threads)
        try:
            while not isinstance(task := hand_out.next(0), Command):
                if task is None:
                    continue
                report = self.do(task)
                if self.meetings is not None:
                    self.meetings.ask(0)
                hand_out.report(report)
                if self.meetings is not None:
                    self._meet_here(self.meetings)
                elif self.neighbours is not None and task.learn is not None:
                    self.neighbours.end()
        except Exception as error:
            self._fail(error)

    def _meet_here(self, meetings: Meetings) -> None:
        """Meet groups until one serves the first rank."""
        while (group := meetings.wait(0)) is not None:
            self.replicas.average_with(group.members)
            meetings.done(0, group.number)
            if 0 in group.serves:
                return

    def _answer_next(self, rank: int, number: int, data: torch.Tensor) -> torch.Tensor:
        del number
        assert self.hand_out is not None
        if len(data):
            self.hand_out.report(unpacked_report(data))
        return packed_task(self.hand_out.next(rank))

    def _answer_meet(self, rank: int, goes_on: int, data: torch.Tensor) -> torch.Tensor:
        assert self.meetings is not None
        assert self.hand_out is not None
        if not goes_on:
            # In this order: whoever waits for all reports then lets go all who have asked.
            self.meetings.ask(rank)
            self.hand_out.report(unpacked_report(data))
        group = self.meetings.wait(rank)
        if group is None:
            return empty()
        numbers = [group.number, rank in group.serves, *group.members]
        return torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)

    def _answer_met(self, rank: int, number: int, data: torch.Tensor) -> torch.Tensor:
        assert self.meetings is not None
        self.meetings.done(rank, number)
        return data

    def _answer_report(self, rank: int, number: int, data: torch.Tensor) -> torch.Tensor:
        del rank, number
        assert self.hand_out is not None
        self.hand_out.report(unpacked_report(data))
        return empty()

    def _answer_round(self, rank: int, number: int, data: torch.Tensor) -> torch.Tensor:
        del rank, number, data
        assert self.hand_out is not None
        return torch.tensor([self.hand_out.round]).view(torch.uint8)

    def _stands_still(self, rank: int) -> bool:
        assert self.hand_out is not None
        usual_s = self.hand_out.stats.mean_s
        return self.hand_out.has_had_s(rank) > max(_STILL_S, _STILL_STEPS * usual_s)

    # --- on the others ----------------------------------------------------------------------------

    def follow(self, obey: Callable[[Command], None], between: Callable[[], None]) -> None:
        """Learn what is handed out and obey commands, until the run ends.

        Args:
            obey: Does with the first rank what it commands.
            between: Called now and then, at least every few seconds while nothing is learned.

        Raises:
            RankLostError: A rank is gone.
        """
        report = empty()
        while True:
            between()
            task: Task | None = unpacked_task(self._calls.call(0, _NEXT, 0, report))
            report = empty()
            if self._failure is not None:
                raise self._failure
            if isinstance(task, Job):
                report = packed_report(self.do(task))
                if self._meets:
                    self._meet(report)
                    report = empty()
                elif self.neighbours is not None and task.learn is not None:
                    self._calls.call(0, _REPORT, 0, report)
                    report = empty()
                    self.neighbours.end()
            elif task is not None and task.name == _END:
                return
            elif task is not None:
                obey(task)

    def _meet(self, report: torch.Tensor) -> None:
        """Report, and meet the groups that the first rank names, until one serves this rank."""
        goes_on, is_served = 0, False
        while not is_served:
            answer = self._calls.call(0, _MEET, goes_on, report)
            if not len(answer):
                return
            number, is_served, *members = answer.view(torch.int64).tolist()
            self.replicas.average_with(members)
            self._calls.call(0, _MET, number, empty())
            goes_on, report = 1, empty()

    # --- on all -----------------------------------------------------------------------------------

    def _round_now(self) -> int:
        """Return the round of the hand-out."""
        if self.hand_out is not None:
            return self.hand_out.round
        return int(self._calls.call(0, _ROUND, 0, empty()).view(torch.int64))

    def do(self, job: Job) -> Report:
        """Score and learn the events of a batch."""
        rank, none = self._ranks.rank, np.empty(0, np.float32)
        self._served.batch = job.number
        scored = none if job.score is None else self._learner.score(job.score)
        if job.learn is None:
            return Report(job.number, rank, none, scored)
        if self.neighbours is not None:
            self.neighbours.begin(job.round)
        try:
            learned = self._learner.take_step(self._learner.prepare(job.learn))
        except NotFiniteError as error:
            return Report(job.number, rank, none, scored, 0, error.reason)
        self.replicas.learned(len(job.learn))
        return Report(job.number, rank, learned.scores, scored, learned.missing)

    def _fail(self, error: Exception) -> None:
        """Let all threads of this rank know that the run is over."""
        self._failure = self._failure or error
        self._served.server.fail(error)
        if self.hand_out is not None:
            self.hand_out.fail(error)
        if self.meetings is not None:
            self.meetings.fail(error)
        if self.neighbours is not None:
            self.neighbours.fail(error)

    def counters(self) -> dict[str, dict[str, float]]:
        """Return counters of this rank since the start, which add up over ranks; for any thread.

        Returns:
            `batches` by rank; `waits_s` by what was waited for; `groups` by size; `row_staleness`,
            `batch_gap` and `iteration_gap`, histograms by what their bins begin with; and `sums` of
            the values of each histogram.
        """
        rows = self._served.server.stats
        waits_s = {"row order": rows.holds_s}
        histograms = {"row_staleness": rows.staleness}
        found: dict[str, dict[str, float]] = {}
        if self.hand_out is not None:
            done = self.hand_out.stats.done
            found["batches"] = {str(rank): count for rank, count in enumerate(done)}
            waits_s["batch"] = sum(self.hand_out.stats.waits_s)
            histograms["batch_gap"] = self.hand_out.stats.apart
        if self.meetings is not None:
            found["groups"] = {str(size): n for size, n in dict(self.meetings.sizes).items()}
            waits_s["group"] = sum(self.meetings.waits_s)
        if self.neighbours is not None:
            waits_s["neighbours"] = self.neighbours.waits_s
            histograms["iteration_gap"] = self.neighbours.gaps
        found["waits_s"] = waits_s
        found["sums"] = {
            name: sum(value * count for value, count in dict(counts).items())
            for name, counts in histograms.items()
        }
        return found | {name: dict(by_powers(counts)) for name, counts in histograms.items()}

    def figures(self) -> dict[str, Any]:
        """Return counters of this rank."""
        found: dict[str, Any] = {"rows": self._served.server.stats.as_json()}
        if self.neighbours is not None:
            found["neighbours"] = self.neighbours.as_json()
        if self.hand_out is None:
            return found
        meetings = {} if self.meetings is None else self.meetings.as_json()
        return found | {"hand_out": self.hand_out.stats.as_json(), "meetings": meetings}
