"""The timeline: what happened is kept with its time, cause and author, by any leader, bounded."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from simulation import first_beat, make_node, make_registration, make_tables
from test_driver import BrokenState, NoNodes, StoppedClock

from embertide.server.adapters.state import MemoryState
from embertide.server.core.control import ControlOptions
from embertide.server.core.errors import RefusedError, StateUnavailableError
from embertide.server.core.events import TEXT_BYTES_MAX
from embertide.server.core.fleet import FOUND_AGAIN_MS
from embertide.server.core.news import News, Promotion, Rollback, Withdrawal
from embertide.server.core.newsroom import RUN_MS
from embertide.server.core.state import EVENTS_KEPT
from embertide.server.core.versions import VERSIONS_KEPT
from embertide.server.services.driver import Driver
from embertide.v1 import control_pb2, node_pb2, update_pb2

Kind = control_pb2.EventKind


class Told:
    """News that a test gives; of commits, those after the known ones alone, as the bus does."""

    def __init__(self) -> None:
        self.told = News()

    def news(self, number: int, lineage: int) -> News:
        after = [each for each in self.told.commits if each.version.number > number]
        return self.told._replace(commits=after)


class Watched:
    """A driver whose time is a test's."""

    def __init__(self, store: MemoryState, at_ms: int = 1_000_000, holder: str = "here:1") -> None:
        self.clock = StoppedClock()
        self.clock.at_ms = at_ms
        self.outside = Told()
        self.store = store
        options = ControlOptions(model="news", longest_deadline_ms=100)
        self.driver = Driver(
            options, store, NoNodes(), self.clock, holder=holder, outside=self.outside
        )
        self.sequence = 100

    def register(self, name: str, id: str = "") -> None:
        request = make_registration(make_node(name), make_tables(user=2), id=id)
        self.driver.call(lambda core, now_ms: core.register(request, now_ms))
        self.driver.beat(first_beat(make_node(name), id=id))

    def beat(self, name: str) -> None:
        self.sequence += 1
        beat = first_beat(make_node(name))
        beat.sequence = self.sequence
        self.driver.beat(beat)

    def tick(self, after_ms: int = 0) -> None:
        """Let time pass at once, as if every tick in it had taken place."""
        self.clock.at_ms += after_ms
        self.driver.call(lambda core, now_ms: self.driver.timeline.look(core, now_ms))

    def hear(self, after_ms: int = 0, **news: Any) -> None:
        self.clock.at_ms += after_ms
        self.outside.told = self.outside.told._replace(**news)
        self.driver._hear(threading.Event())

    def events(self, kind: Any = 0, **asked: Any) -> list[control_pb2.FleetEvent]:
        """Return the events that are told, newest first."""
        request = control_pb2.ListEventsRequest(kind=kind, page_size=500, **asked)
        return list(self.driver.timeline.events.page(request).events)

    def names(self, kind: Any = 0) -> list[str]:
        return [each.name for each in self.events(kind)]

    def written(self) -> list[str]:
        saved = self.store.load().events.values()
        return [each.name for each in sorted(saved, key=lambda each: -each.number)]


def test_a_node_dies_comes_back_and_every_leader_knows_it() -> None:
    store = MemoryState()
    first = Watched(store)
    first.register("node-0")
    first.tick()
    first.tick(1001)
    died = first.events(Kind.EVENT_KIND_NODE)[0]
    assert (died.name, died.subject, died.at_ms) == ("node_died", "node-0", 1_001_001)
    assert "it missed five beats: the last came 1.0 s before" in died.why

    second = Watched(store, at_ms=1_010_000, holder="there:2")
    second.tick()
    assert second.names(Kind.EVENT_KIND_NODE) == ["node_died", "node_registered"]
    leads = second.events(Kind.EVENT_KIND_LEADER)
    assert [each.subject for each in leads] == ["there:2", "here:1"]
    assert leads[0].why == "here:1 led before"
    second.tick(2 * FOUND_AGAIN_MS)  # it is dead still, which is no news
    assert second.names(Kind.EVENT_KIND_NODE)[0] == "node_died"
    assert len(second.names(Kind.EVENT_KIND_NODE)) == 2
    second.beat("node-0")
    second.tick()
    back = second.events(Kind.EVENT_KIND_NODE)[0]
    assert (back.name, back.text) == ("node_returned", "node node-0 is back after 39.0 s")
    assert second.written()[0] == "node_returned"


def test_a_node_that_dies_while_nobody_leads_is_told_by_the_next_leader() -> None:
    store = MemoryState()
    first = Watched(store)
    first.register("node-0")
    first.tick()
    second = Watched(store, at_ms=2_000_000)
    second.tick()
    assert second.names(Kind.EVENT_KIND_NODE) == ["node_registered"]
    second.tick(2 * FOUND_AGAIN_MS)
    died = second.events(Kind.EVENT_KIND_NODE)[0]
    assert (died.name, died.why) == (
        "node_died",
        "it has not beaten since this control plane leads",
    )


def test_a_node_that_starts_again_or_is_removed_is_told_with_who_did_it() -> None:
    there = Watched(MemoryState())
    there.register("node-0")
    there.tick()
    there.register("node-0", id="again")
    there.tick()
    request = control_pb2.RemoveNodeRequest(request_id="x", node="node-0")
    there.driver.call(lambda core, now_ms: core.remove(request, now_ms), author="operator/anna")
    there.tick()
    newest = there.events(Kind.EVENT_KIND_NODE)
    assert [each.name for each in newest] == ["node_removed", "node_restarted", "node_registered"]
    assert newest[0].author == "operator/anna"


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_write_that_fails_loses_no_event_and_doubles_none(how: str) -> None:
    store = BrokenState()
    there = Watched(store)
    there.register("node-0")
    there.tick()
    store.fail = lambda: how
    with pytest.raises(StateUnavailableError):
        there.tick(1001)
    settings = control_pb2.DriftSettings(mode=control_pb2.DRIFT_MODE_OFF)
    with pytest.raises(StateUnavailableError):
        there.driver.call(lambda core, now_ms: core.set_drift(settings))
    store.fail = lambda: ""
    there.driver.call(lambda core, now_ms: core.set_drift(settings), author="operator/anna")
    there.tick()
    assert there.names() == there.written()
    counts = {name: there.names().count(name) for name in there.names()}
    assert counts.pop("drift_set") == (2 if how == "after" else 1), "one each that was written"
    assert set(counts.values()) == {1}
    assert {"leader_began", "node_registered", "node_died"} <= counts.keys()


def test_events_of_a_store_that_lost_its_keys_are_written_again() -> None:
    store = MemoryState()
    there = Watched(store)
    there.register("node-0")
    there.tick()
    store.lose()
    there.driver.call(lambda core, now_ms: None, decides=True)
    there.tick()
    assert there.written()[0] == "state_restored"
    assert set(there.written()) == {"leader_began", "node_registered", "state_restored"}


def commits(
    first: int, last: int, *, schema: int = 7, lineage: int = 3, every_ms: int = 1000
) -> list[update_pb2.GlobalCommit]:
    return [
        update_pb2.GlobalCommit(
            version=update_pb2.Version(lineage=lineage, number=number),
            schema_id=schema,
            committed_ms=1_000_000 + every_ms * number,
        )
        for number in range(first, last + 1)
    ]


def test_versions_that_follow_each_other_are_one_event_that_grows() -> None:
    there = Watched(MemoryState())
    there.hear(commits=commits(1, 1))
    assert there.events(Kind.EVENT_KIND_VERSION)[0].text == "version 1 was published"
    for number in range(2, 30):
        there.hear(1000, commits=commits(1, number))
    (event,) = there.events(Kind.EVENT_KIND_VERSION)
    assert event.text == "versions 1 to 21 were published", "written each ten seconds"
    there.hear(10_000)
    (event,) = there.events(Kind.EVENT_KIND_VERSION)
    assert (event.text, event.times) == ("versions 1 to 29 were published", 29)
    assert (event.first_ms, event.at_ms) == (1_001_000, 1_029_000)
    there.hear(RUN_MS, commits=commits(1, 29) + commits(700, 700))
    assert there.events(Kind.EVENT_KIND_VERSION)[0].text == "version 700 was published"
    later = Watched(there.store, at_ms=3_000_000)
    later.hear(commits=commits(1, 29) + commits(700, 702))
    assert [each.subject for each in later.events(Kind.EVENT_KIND_VERSION)] == [
        *("701-3", "700-3", "29-3")
    ]
    later.hear(20_000)
    assert later.events(Kind.EVENT_KIND_VERSION)[0].text == "versions 701 to 702 were published"


def test_a_schema_that_changes_is_told_after_a_restart_too() -> None:
    there = Watched(MemoryState())
    there.hear(commits=commits(1, 2))
    there.hear(20_000, commits=commits(1, 2) + commits(3, 3, schema=9))
    (event,) = there.events(Kind.EVENT_KIND_SCHEMA)
    assert (event.text, event.why) == ("the schema is 0x9 from version 3 on", "it was 0x7")
    later = Watched(there.store, at_ms=3_000_000)
    later.hear(commits=commits(1, 2) + commits(3, 4, schema=9) + commits(5, 5, schema=7))
    assert [each.why for each in later.events(Kind.EVENT_KIND_SCHEMA)] == [
        *("it was 0x9", "it was 0x7")
    ]


def test_withdrawals_and_rollbacks_are_told_once_with_who_decided() -> None:
    there = Watched(MemoryState())
    undone = commits(8, 8)
    undone[0].rollback_to = 5
    there.hear(commits=commits(5, 7) + undone)
    rolled = there.events(Kind.EVENT_KIND_VERSION, text="restores")[0]
    assert (rolled.text, rolled.author) == ("version 8 restores the state of version 5", "")
    promotion = Promotion(
        promoted=8,
        withdrawn=(
            Withdrawal(6, 6, "auc", "guard@a:1", 1_000_500, "0.71 to 0.70"),
            Withdrawal(6, 7, "rollback", "rollback@b:2", 1_000_900, ""),
        ),
        undone=(Rollback(8, 5, "rollback@b:2", 1_000_900),),
    )
    for _ in range(2):
        there.hear(promotion=promotion)
    later = Watched(there.store, at_ms=3_000_000)
    later.hear(promotion=promotion)
    (withdrawn,) = later.events(Kind.EVENT_KIND_VERSION, text="withdrawn")
    assert (withdrawn.text, withdrawn.why, withdrawn.author, withdrawn.at_ms) == (
        *("version 6 was withdrawn: auc", "0.71 to 0.70", "guard@a:1"),
        1_000_500,
    )
    (rolled,) = later.events(Kind.EVENT_KIND_VERSION, text="restores")
    assert rolled.author == "rollback@b:2"


def sign(age_ms: int = 0, **fields: Any) -> control_pb2.TrainerStatus:
    said = update_pb2.TrainerSign(host="t-0", pid=7, started_ms=999_000, **fields)
    return control_pb2.TrainerStatus(sign=said, age_ms=age_ms)


def test_a_trainer_starts_falls_silent_comes_back_and_ends() -> None:
    store = MemoryState()
    there = Watched(store)
    there.hear(trainer=sign())
    there.hear(60_000, trainer=sign(60_000))
    silent = there.events(Kind.EVENT_KIND_TRAINER)[0]
    assert (silent.name, silent.at_ms) == ("trainer_silent", 1_000_000)
    there = Watched(store, at_ms=1_100_000)
    there.hear(trainer=sign(100_000))
    there.hear(trainer=sign(100))
    there.hear(trainer=sign(ended_ms=1_200_000, exit_status=1, error="no disk"))
    there.hear(trainer=sign(9000, ended_ms=1_200_000, exit_status=1, error="no disk"))
    assert there.names(Kind.EVENT_KIND_TRAINER) == [
        *("trainer_ended", "trainer_returned", "trainer_silent", "trainer_started")
    ]
    ended = there.events(Kind.EVENT_KIND_TRAINER)[0]
    assert (ended.at_ms, ended.why) == (1_200_000, "no disk")


def test_a_bus_that_was_away_makes_no_trainer_silent_and_brings_none_back() -> None:
    def away(age_ms: int, answers_ms: int) -> control_pb2.TrainerStatus:
        status = sign(age_ms)
        status.answers_ms = answers_ms
        return status

    there = Watched(MemoryState())
    there.hear(trainer=sign())
    there.hear(trainer=away(45_000, 500))
    there.hear(trainer=sign(100))
    there.hear(trainer=away(45_000, 500))
    assert there.names(Kind.EVENT_KIND_TRAINER) == ["trainer_started"]
    there.hear(trainer=away(54_600, 10_100))
    there.hear(trainer=away(90_000, 500))
    assert there.names(Kind.EVENT_KIND_TRAINER) == ["trainer_silent", "trainer_started"]


def refused(count: int, last_ms: int, message: str = "no") -> control_pb2.RefusedRegistration:
    return control_pb2.RefusedRegistration(
        node="n", address="a:1", message=message, count=count, last_ms=last_ms
    )


def test_a_node_that_is_refused_again_and_again_is_one_event() -> None:
    there = Watched(MemoryState())
    for second in range(60):
        there.hear(1000, refused=[refused(second + 1, 1_000_000 + 1000 * second)])
    (event,) = there.events(Kind.EVENT_KIND_REFUSED)
    assert (event.times, event.first_ms, event.why) == (51, 1_000_000, "no")
    there.hear(refused=[refused(61, 1_060_500, "another cause")])
    assert [each.why for each in there.events(Kind.EVENT_KIND_REFUSED)] == ["another cause", "no"]


def test_a_failing_task_is_told_and_that_it_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Watched(MemoryState())
    health = node_pb2.TaskHealth(name="bus", state="failing", error="gone", since_ms=999_999)
    states: list[Sequence[node_pb2.TaskHealth]] = [[health], [health], []]
    health_of = "embertide.server.services.driver.task_health"
    monkeypatch.setattr(health_of, lambda each: each)
    for tasks in states:
        found = list(tasks) or [node_pb2.TaskHealth(name="bus", state="running")]
        monkeypatch.setattr(there.driver, "healths", lambda found=found: found)
        there.hear()
    assert there.names(Kind.EVENT_KIND_TASK) == ["task_recovered", "task_failing"]
    assert there.events(Kind.EVENT_KIND_TASK)[1].at_ms == 999_999


def test_each_kind_has_its_bound_and_pages() -> None:
    there = Watched(MemoryState())
    there.tick()
    for at in range(EVENTS_KEPT + 50):
        there.hear(refused=[refused(1, 1_000_000 + at, f"message {at}")])
    assert len(there.events(Kind.EVENT_KIND_REFUSED)) == EVENTS_KEPT
    assert there.names()[0] == "node_refused"
    assert "leader_began" in there.written()
    assert len(there.written()) == EVENTS_KEPT + 1
    numbers: list[int] = []
    request = control_pb2.ListEventsRequest(page_size=200)
    while True:
        answer = there.driver.timeline.events.page(request)
        numbers += [each.number for each in answer.events]
        if not answer.next_page_token:
            break
        request.page_token = answer.next_page_token
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) == EVENTS_KEPT + 1
    assert [each.why for each in there.events(text="MESSAGE 77")] == ["message 77"]
    assert len(there.events(since_ms=1_000_540)) == 10
    assert len(there.events(Kind.EVENT_KIND_REFUSED, until_ms=1_000_059)) == 10
    with pytest.raises(RefusedError, match="text is"):
        there.events(text="x" * (TEXT_BYTES_MAX + 1))


def test_versions_have_their_quality_and_verdicts() -> None:
    there = Watched(MemoryState())
    quality = update_pb2.LiveQuality(events=50, auc=0.75)
    there.hear(commits=commits(5, 8), trainer=sign(lineage=3, version=8, quality=quality))
    answer = there.driver.versions.answer()
    assert [each.version.number for each in answer.versions] == [8, 7, 6, 5]
    assert answer.versions[0].quality == quality
    assert not answer.versions[1].HasField("quality")
    verdicts = control_pb2.VersionVerdict
    assert {each.verdict for each in answer.versions} == {verdicts.VERSION_VERDICT_UNSPECIFIED}
    withdrawn = (Withdrawal(6, 6, "auc", "guard@a:1", 5, "0.71 to 0.70"),)
    there.hear(promotion=Promotion(promoted=7, withdrawn=withdrawn))
    answer = there.driver.versions.answer()
    assert answer.promoted == 7
    assert [each.verdict for each in answer.versions] == [
        verdicts.VERSION_VERDICT_CANDIDATE,
        verdicts.VERSION_VERDICT_PROMOTED,
        verdicts.VERSION_VERDICT_WITHDRAWN,
        verdicts.VERSION_VERDICT_PROMOTED,
    ]
    assert (answer.versions[2].why, answer.versions[2].author) == ("auc: 0.71 to 0.70", "guard@a:1")
    there.hear(commits=commits(5, 8) + commits(9, 9 + VERSIONS_KEPT))
    found = there.driver.versions.answer().versions
    assert len(found) == VERSIONS_KEPT
    assert found[0].version.number == 9 + VERSIONS_KEPT
