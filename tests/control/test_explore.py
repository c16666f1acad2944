"""The pure core under schedules by chance: it keeps the rules, and bugs put into it do not.

`EMBERTIDE_SCHEDULES` sets how many (400 by default, 100,000 in `make test-long`); each is one seed,
which a failure names and `python tests/control/explore.py --seed N` plays again.
"""

import os
from collections.abc import Callable, Mapping

import explore
import pytest
from explore_rules import BrokenRuleError, Record

from embertide.server.adapters.state import MemoryState
from embertide.server.core import operation
from embertide.server.core.batch import Batch
from embertide.server.core.control import Control
from embertide.server.core.operation import RunningOperation
from embertide.server.core.operations import Operations
from embertide.server.core.plan import moves
from embertide.server.core.plan.layout import Holders
from embertide.server.core.plan.moves import Move, Step
from embertide.server.core.state import Writes
from embertide.server.core.view import View

SCHEDULES = int(os.environ.get("EMBERTIDE_SCHEDULES", "400"))
LONG = 100_000
ENOUGH = 3000  # schedules within which each bug is found

Patch = pytest.MonkeyPatch


def test_schedules_keep_the_rules() -> None:
    counts = explore.explore(range(SCHEDULES))
    assert counts.ended > SCHEDULES, counts


@pytest.mark.long
def test_many_schedules_keep_the_rules() -> None:
    print(explore.explore_on_all_cores(LONG).line)


def test_a_seed_plays_the_same_again() -> None:
    told = []
    before = operation.BATCH_BUCKETS
    for _ in range(2):
        schedule = explore.Schedule(3, trace=True)
        schedule.run()
        told.append(schedule.told())
    assert told[0] == told[1]
    assert schedule.batch_buckets != before == operation.BATCH_BUCKETS
    assert "SUCCEEDED" in told[0]


# --- bugs put in on purpose -------------------------------------------------------------------


def drop_before_the_deadline(patch: Patch) -> None:
    def after_all_act(self: Batch, step: Step, view: View) -> Step | None:
        self._deadline_ms = 0
        return right(self, step, view)

    right = Batch._after_all_act
    patch.setattr(Batch, "_after_all_act", after_all_act)


def lose_the_record_of_a_step(patch: Patch) -> None:
    """The plan is written, and what it is a step of is not."""

    def commit(self: MemoryState, term: int, writes: Writes) -> None:
        if writes.plan is not None:
            writes.operations.clear()
        right(self, term, writes)

    right = MemoryState.commit
    patch.setattr(MemoryState, "commit", commit)


def forget_the_source_when_taking_back(patch: Patch) -> None:
    def taken_back(held: Holders, move: Move) -> Holders:
        return right(held._replace(leaving=()), move)

    right = moves._STEPS[Step.TAKEN_BACK]
    patch.setitem(moves._STEPS, Step.TAKEN_BACK, taken_back)


def ignore_the_term(patch: Patch) -> None:
    def commit(self: MemoryState, term: int, writes: Writes) -> None:
        right(self, self._term, writes)

    right = MemoryState.commit
    patch.setattr(MemoryState, "commit", commit)


def do_not_wait_for_targets(patch: Patch) -> None:
    patch.setattr(Batch, "_held", lambda self, view: True)


def do_not_wait_for_versions(patch: Patch) -> None:
    patch.setattr(View, "all_have_reached", lambda self, version: True)


def do_not_wait_for_readers(patch: Patch) -> None:
    patch.setattr(View, "all_act_by", lambda self, epoch: True)


def turn_back_to_sources_that_hold_nothing(patch: Patch) -> None:
    patch.setattr(Batch, "_missing_source", lambda self, view: "")


def count_moves_taken_back_as_done(patch: Patch) -> None:
    patch.setattr(RunningOperation, "_arrange", lambda self, order: None)


def let_all_batches_join_at_once(patch: Patch) -> None:
    """A target that is late never says that it holds the first of them alone."""

    def take(self: Batch, step: Step, epoch: int) -> None:
        right(self, step, epoch)
        self.message.joined_epoch = 0  # as if any plan that it holds would do

    right = Batch.take
    patch.setattr(Batch, "take", take)


def forget_what_was_accepted(patch: Patch) -> None:
    """After a restart only the operation at work is known."""

    def init(
        self: Operations, records: Mapping[str, Record], longest_deadline_ms: int, now_ms: int
    ) -> None:
        known = {id: each for id, each in records.items() if each.operation.base_epoch}
        right(self, known, longest_deadline_ms, now_ms)

    right = Operations.__init__
    patch.setattr(Operations, "__init__", init)


def answer_before_writing(patch: Patch) -> None:
    """A first answer is remembered though its write failed: a repeat is told it was accepted."""

    def take(self: object) -> Writes:
        writes = right(self)  # type: ignore[arg-type]
        self.written()  # type: ignore[attr-defined]
        return writes

    right = Control.take
    patch.setattr(Control, "take", take)


# With a seed to begin at: the first one that finds it may be a minute away from 0.
BUGS: list[tuple[Callable[[Patch], None], int]] = [
    (drop_before_the_deadline, 0),
    (lose_the_record_of_a_step, 0),
    (forget_the_source_when_taking_back, 280),
    (ignore_the_term, 0),
    (do_not_wait_for_targets, 0),
    (do_not_wait_for_versions, 0),
    (do_not_wait_for_readers, 0),
    (turn_back_to_sources_that_hold_nothing, 5960),
    (count_moves_taken_back_as_done, 2990),
    (let_all_batches_join_at_once, 0),
    (forget_what_was_accepted, 0),
    (answer_before_writing, 0),
]


# Each of them broke a rule once, and its bug was mended.
MENDED = {
    9032: "moves of a batch that was taken back stood where a restart took them for another's",
    10916: "an owner left, and the only other one had just been started again",
    68313: "an owner that was added was taken back, and the only other one had just been started",
    57698: "an undo made a node own a bucket twice, on two of its devices, and never ended",
    40327: "a node that was heard again had asked by an older plan within the deadline",
}


@pytest.mark.parametrize("seed", MENDED)
def test_a_seed_that_broke_a_rule(seed: int) -> None:
    explore.Schedule(seed).run()


@pytest.mark.parametrize(("bug", "begin"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_a_bug_is_found(bug: Callable[[Patch], None], begin: int, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises(BrokenRuleError) as found:
        explore.explore(range(begin, begin + ENOUGH))
    assert isinstance(found.value.__cause__, BrokenRuleError), "it fails, but breaks no rule"
