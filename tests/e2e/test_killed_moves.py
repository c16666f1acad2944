"""SIGKILL to the control plane, the source and the target of a move, in every state of it.

Each case moves three buckets, puts the control plane to sleep in the state that it aims at, proves
from `state` that it is that one, kills, and lets the rest go on. Four nodes are asked all the time
and versions are published all the time. Afterwards the operation has ended as it should, every node
holds what the plan gives it and nothing else, every row is there, and no request failed or read
zeros without an owner that was away (tests/support/controlled.py).
"""

import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from controlled import ControlledSite, stays, target_of
from waiting import wait_until

from embertide.server.core.plan.layout import Bucket, Holders, Place, layout_of
from embertide.server.core.plan.validity import check_plan
from embertide.v1 import control_pb2

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "cache" / "dense"
ENDS_WITHIN_S = 20.0
PENDING = control_pb2.OPERATION_STATE_PENDING
RUNNING = control_pb2.OPERATION_STATE_RUNNING
PAUSED = control_pb2.OPERATION_STATE_PAUSED
SUCCEEDED = control_pb2.OPERATION_STATE_SUCCEEDED
FAILED = control_pb2.OPERATION_STATE_FAILED
ABORTED = control_pb2.OPERATION_STATE_ABORTED
TAKEN_BACK = 5  # OperationRecord.step
BUCKETS = 3  # that a case moves
LOOKS_FOR_S = 0.3  # at what must not change: six ticks of the control plane
_AIMS = 20  # a state that is over in a moment is aimed at so often, on a machine with other work


class State(enum.Enum):
    """A state of a move, by the step that OperationRecord says."""

    JOINING = 1  # and the target does not hold it yet
    HELD = 1.5  # and it does: the next plan is not written
    BOTH_OWN = 2
    LEAVING = 3
    GONE = 4

    @property
    def step(self) -> int:
        return int(self.value)

    def __str__(self) -> str:
        return self.name.lower()


class Victim(enum.Enum):
    CONTROL = "control"
    SOURCE = "source"
    TARGET = "target"

    def __str__(self) -> str:
        return self.value


class Move(NamedTuple):
    at: Bucket
    source: Place
    target: Place

    def holders(self, step: int) -> Holders:
        """Who holds the bucket in a step, as plan.proto says it; 0: before it. Taken back: after
        both owned."""
        source, target = (self.source,), (self.target,)
        inside = self.source.node == self.target.node
        return {
            0: Holders(source),
            1: Holders(source, joining=target),
            2: Holders(target, leaving=source) if inside else Holders((*source, *target)),
            3: Holders(target, leaving=source),
            4: Holders(target),
            TAKEN_BACK: Holders(source, leaving=target),
        }[step]


class Case:
    """One operation that moves three buckets, and the checks of how it ends."""

    numbers = itertools.count(1)

    def __init__(
        self,
        site: ControlledSite,
        *,
        inside: bool = False,
        buckets: int = BUCKETS,
        spared: Sequence[Bucket] = (),
    ) -> None:
        self.site = site
        self.id = f"move-{next(self.numbers)}"
        self.moves = self._choose(inside, spared)[:buckets]
        self.source = self.moves[0].source.node
        self.target = self.moves[0].target.node
        target = target_of(site.plan().epoch, {move.at: move.target for move in self.moves})
        self.request = control_pb2.StartReshardRequest(operation_id=self.id, target=target)
        if not spared:
            site.forget()

    def _choose(self, inside: bool, spared: Sequence[Bucket]) -> list[Move]:
        """From the node of 2 and 3 that has more to the other, or to its own other devices."""
        owned: dict[int, list[tuple[Bucket, Place]]] = {2: [], 3: []}
        for at, held in self.site.layout().items():
            if held.owners[0].node in owned and at not in spared:
                owned[held.owners[0].node].append((at, held.owners[0]))
        source = max(owned, key=lambda n: len(owned[n]))
        target = source if inside else 5 - source
        return [Move(at, old, Place(target, 1 - old.device)) for at, old in owned[source]]

    def start(self) -> None:
        self.site.control.start(self.request)
        # As they are made, one after the other.
        order = [(each.table_id, each.bucket) for each in self.record.moves]
        self.moves.sort(key=lambda move: order.index(move.at))

    @property
    def record(self) -> control_pb2.OperationRecord:
        return self.site.record(self.id)

    @property
    def operation(self) -> control_pb2.Operation:
        return self.record.operation

    def holds(self, how: Callable[[Iterator[bool]], bool]) -> bool:
        """Whether the target holds all or any of the buckets, where they are to go."""
        held = self.site.held(self.target)
        return how(held.get(move.at) == move.target.device for move in self.moves)

    def stands(
        self,
        step: int,
        state: control_pb2.OperationState.ValueType = RUNNING,
        held_as_in: int | None = None,
    ) -> bool:
        """Whether plan and record, as they are written, are those of a step and a state."""
        record, layout = self.record, self.site.layout()
        wanted = step if held_as_in is None else held_as_in
        as_planned = [layout[move.at] == move.holders(wanted) for move in self.moves]
        same = (record.step, record.operation.state, record.operation.ended_ms) == (step, state, 0)
        return same and all(as_planned)

    def await_record(self, seen: Callable[[control_pb2.OperationRecord], bool]) -> None:
        """Wait until its record is seen to be so, or it has ended."""

        def done() -> bool:
            record = self.record
            return seen(record) or record.operation.ended_ms > 0

        wait_until(done, every_s=0)

    def catch(self, seen: Callable[[control_pb2.OperationRecord], bool]) -> None:
        """Put the control plane to sleep the moment that its record is seen to be so."""
        self.await_record(seen)
        self.site.sleep(self.site.control)

    def hold(self, state: State) -> bool:
        """Put the control plane to sleep in a state; False: it was over too soon."""
        self.catch(lambda record: record.step >= state.step)
        if state is State.HELD:
            wait_until(lambda: self.holds(all))
        if state.step >= State.BOTH_OWN.step:
            assert self.holds(all), "the plan gives buckets to a node that does not hold them"
        return self.stands(state.step)

    def kill(self, victim: Victim) -> None:
        if victim is Victim.CONTROL:
            self.site.control.kill()
        else:
            self.site.kill(self.source if victim is Victim.SOURCE else self.target)

    def steer(self, steering: control_pb2.Steering.ValueType) -> None:
        self.site.control.steer(self.id, steering)

    def ends(self) -> control_pb2.Operation:
        """Wait for its end, within a bound."""
        wait_until(lambda: bool(self.operation.ended_ms), ENDS_WITHIN_S)
        return self.operation

    def ends_as(self, state: control_pb2.OperationState.ValueType, *, moved: int) -> None:
        """Prove that it ends so, and that everything is in order once all is mended."""
        ended = self.ends()
        assert ended.state == state, ended
        assert ended.buckets_done == moved
        if state == FAILED:
            wanted = f"node 'node-{self.target}' died while buckets moved to it"
            assert ended.message.startswith(wanted), ended.message
        plan = self.site.plan()
        check_plan(plan, previous_epoch=plan.epoch - 1)
        layout = layout_of(plan.assignments)
        for i, move in enumerate(self.moves):
            assert layout[move.at] == move.holders(4 if i < moved else 0)
        assert not any(held.joining or held.leaving for held in layout.values())
        self.site.mend()
        self.site.judge()
        self.site.check_every_row()

    def ends_well(self) -> None:
        """Prove that it ends in either way, and that everything is in order then."""
        if self.ends().state == FAILED:
            self.ends_as(FAILED, moved=0)
        else:
            self.ends_as(SUCCEEDED, moved=BUCKETS)

    def waits(self) -> bool:
        """Whether it waits and says for whom."""
        said = f"waits: node-{self.target} is dead, and so is a node that it takes over from"
        return self.operation.message == said and not self.operation.ended_ms

    def give_up(self) -> None:
        """Let a case that missed its state end."""
        self.site.mend()
        if self.operation.state == PAUSED:
            self.steer(control_pb2.STEERING_RESUME)
        self.ends()
        wait_until(self.site.is_whole)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlledSite]:
    with ControlledSite(tmp_path_factory.mktemp("killed"), CACHE) as site:
        yield site
        site.sum_up()


@pytest.fixture
def site(fleet: ControlledSite) -> Iterator[ControlledSite]:
    """The fleet, all well; what a failed test left of its operations is ended."""
    yield fleet
    fleet.go_on()
    for id, record in fleet.state.load().operations.items():
        if not record.operation.ended_ms:
            fleet.control.steer(id, control_pb2.STEERING_ABORT)
    fleet.mend()


def aim(site: ControlledSite, state: State, victim: Victim, *, inside: bool = False) -> Case:
    """Kill in a state of a move; proved by what is written, and by what the target holds."""
    for _ in range(_AIMS):
        case = Case(site, inside=inside)
        case.start()
        aimed = True
        if state is State.JOINING and victim is Victim.TARGET:
            site.sleep(site.control)
            aimed = case.record.step == 0
            site.sleep_node(case.target)  # so that it never reads the plan that comes
            site.wake(site.control)
        aimed = case.hold(state) and aimed
        case.kill(victim)
        if state is State.JOINING and victim is not Victim.TARGET:
            aimed = aimed and not case.holds(any)
        if aimed and case.stands(state.step):
            return case
        case.give_up()
    raise AssertionError(f"{state} was over too soon, {_AIMS} times")


# Inside one node a plan differs from one across only while both own.
PLANS = [
    *(pytest.param(state, False, id=f"across-{state}") for state in State),
    *(
        pytest.param(
            state,
            True,
            id=f"inside-{state}",
            marks=() if state is State.BOTH_OWN else pytest.mark.long,
        )
        for state in State
    ),
]


@pytest.mark.parametrize(("state", "inside"), PLANS)
def test_a_killed_control_plane_goes_on(site: ControlledSite, state: State, inside: bool) -> None:
    case = aim(site, state, Victim.CONTROL, inside=inside)
    site.go_on()
    case.ends_as(SUCCEEDED, moved=BUCKETS)


@pytest.mark.parametrize("state", State, ids=str)
def test_a_killed_source_holds_nothing_up(site: ControlledSite, state: State) -> None:
    case = aim(site, state, Victim.SOURCE)
    site.go_on()
    case.ends_as(SUCCEEDED, moved=BUCKETS)


@pytest.mark.parametrize("state", State, ids=str)
def test_a_killed_target_is_taken_back(site: ControlledSite, state: State) -> None:
    case = aim(site, state, Victim.TARGET)
    site.go_on()
    if state is State.GONE:  # the source has dropped them
        case.ends_as(SUCCEEDED, moved=BUCKETS)
    else:
        case.ends_as(FAILED, moved=0)


@pytest.mark.parametrize("state", State, ids=str)
def test_a_killed_node_that_moves_inside_itself(site: ControlledSite, state: State) -> None:
    case = aim(site, state, Victim.TARGET, inside=True)
    site.go_on()
    if state in (State.JOINING, State.HELD):
        case.ends_as(FAILED, moved=0)
        return
    if state is not State.GONE:
        # One that had said that it acts by the plan may be missed only after the source is dropped.
        gone = state is State.LEAVING
        wait_until(
            lambda: case.waits() or (gone and case.record.step != State.LEAVING.step), ENDS_WITHIN_S
        )
        site.mend()
    case.ends_as(SUCCEEDED, moved=BUCKETS)


def test_both_ends_killed_it_waits_for_one_or_is_taken_back(site: ControlledSite) -> None:
    """It waits, unless the target was missed before the source was."""
    case = aim(site, State.BOTH_OWN, Victim.SOURCE)
    case.kill(Victim.TARGET)
    site.go_on()
    wait_until(lambda: case.waits() or case.operation.ended_ms > 0, ENDS_WITHIN_S)
    if case.waits():
        site.mend()
        case.ends_well()  # a source that is back first owns alone again
    else:
        case.ends_as(FAILED, moved=0)


@pytest.mark.parametrize("state", [State.BOTH_OWN, State.LEAVING], ids=str)
@pytest.mark.parametrize("victim", [Victim.SOURCE, Victim.TARGET], ids=str)
def test_a_node_that_is_back_before_it_was_missed(
    site: ControlledSite, state: State, victim: Victim
) -> None:
    """It holds nothing when it comes back: the move waits until it does again."""
    case = aim(site, state, victim)
    site.mend()
    case.ends_well()  # on a machine that is busy elsewhere it may be missed


@pytest.mark.parametrize("victim", Victim, ids=str)
def test_killed_while_it_is_pending(site: ControlledSite, victim: Victim) -> None:
    for _ in range(_AIMS):
        case = Case(site)
        case.start()
        site.sleep(site.control)
        case.kill(victim)
        if case.stands(0, PENDING) and case.operation.base_epoch == 0:
            break
        case.give_up()
    else:
        raise AssertionError("it never was pending")
    site.go_on()
    if victim is Victim.TARGET:
        case.ends_as(FAILED, moved=0)
    else:
        case.ends_as(SUCCEEDED, moved=BUCKETS)


def pause(site: ControlledSite, state: State) -> Case:
    """Pause a move in a state."""
    for _ in range(_AIMS):
        case = Case(site)
        case.start()
        case.await_record(lambda record: record.step >= state.step)
        case.steer(control_pb2.STEERING_PAUSE)
        if case.stands(state.step, PAUSED):
            return case
        case.give_up()
    raise AssertionError(f"{state} was over too soon, {_AIMS} times")


@pytest.mark.parametrize("victim", Victim, ids=str)
def test_killed_while_it_is_paused(site: ControlledSite, victim: Victim) -> None:
    case = pause(site, State.BOTH_OWN)
    case.kill(victim)
    assert case.stands(State.BOTH_OWN.step, PAUSED)
    site.go_on()
    dead = {Victim.SOURCE: case.source, Victim.TARGET: case.target}.get(victim)
    wait_until(lambda: site.knows(dead))
    assert stays(lambda: case.stands(State.BOTH_OWN.step, PAUSED), LOOKS_FOR_S)
    case.steer(control_pb2.STEERING_RESUME)
    if victim is Victim.TARGET:
        case.ends_as(FAILED, moved=0)
    else:
        case.ends_as(SUCCEEDED, moved=BUCKETS)


def test_a_killed_control_plane_knows_who_waits_for_whom(site: ControlledSite) -> None:
    first = pause(site, State.BOTH_OWN)
    second = Case(site, spared=[move.at for move in first.moves])
    second.start()
    site.control.kill()
    assert first.stands(State.BOTH_OWN.step, PAUSED)
    assert second.stands(0, PENDING)
    site.go_on()
    wait_until(lambda: site.knows(dead=None))

    def as_before() -> bool:
        return first.stands(State.BOTH_OWN.step, PAUSED) and second.stands(0, PENDING)

    assert stays(as_before, LOOKS_FOR_S)
    first.steer(control_pb2.STEERING_RESUME)
    assert first.ends().state == SUCCEEDED
    second.ends_as(SUCCEEDED, moved=BUCKETS)
    assert all(site.layout()[move.at] == move.holders(4) for move in first.moves)


@pytest.mark.parametrize("victim", Victim, ids=str)
def test_killed_while_it_waits_for_bandwidth(site: ControlledSite, victim: Victim) -> None:
    case = Case(site, buckets=2)
    case.request.dry_run = True
    wait_until(lambda: all(each.bytes for each in site.control.start(case.request).moves))
    sizes = [each.bytes for each in site.control.start(case.request).moves]
    case.request.dry_run = False
    case.request.budget.buckets_at_once = 1
    case.request.budget.bytes_per_s = max(sizes) // 2  # 2 s from the first to the second
    case.start()
    case.catch(lambda record: "bandwidth" in record.operation.message)
    assert case.operation.buckets_done == 1
    case.kill(victim)
    assert case.operation.state == RUNNING
    assert case.record.step == 0
    layout = site.layout()
    assert [layout[move.at] for move in case.moves] == [
        move.holders(4 if i == 0 else 0) for i, move in enumerate(case.moves)
    ]
    site.go_on()
    if victim is Victim.TARGET:
        case.ends_as(FAILED, moved=1)
    else:
        case.ends_as(SUCCEEDED, moved=2)


@pytest.mark.parametrize(
    ("state", "victim"),
    [(State.JOINING, Victim.CONTROL), *((State.BOTH_OWN, victim) for victim in Victim)],
    ids=str,
)
def test_killed_while_it_is_aborted(site: ControlledSite, state: State, victim: Victim) -> None:
    """A target that only joined is forgotten at once, one that owned leaves first."""
    for _ in range(_AIMS):
        case = Case(site)
        case.start()
        case.await_record(lambda record: record.step >= state.step)
        case.steer(control_pb2.STEERING_ABORT)
        case.catch(lambda record: record.step == TAKEN_BACK)
        case.kill(victim)
        if case.stands(TAKEN_BACK, ABORTED, 0 if state is State.JOINING else TAKEN_BACK):
            break
        case.give_up()
    else:
        raise AssertionError("it was never caught")
    site.go_on()
    case.ends_as(ABORTED, moved=0)


@pytest.mark.parametrize("victim", [Victim.CONTROL, Victim.SOURCE], ids=str)
def test_killed_while_a_dead_target_is_taken_back(site: ControlledSite, victim: Victim) -> None:
    case = aim(site, State.BOTH_OWN, Victim.TARGET)
    site.go_on()
    case.catch(lambda record: record.step == TAKEN_BACK)
    case.kill(victim)
    assert case.stands(TAKEN_BACK, FAILED)
    site.go_on()
    case.ends_as(FAILED, moved=0)
