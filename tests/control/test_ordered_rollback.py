"""StartRollback over a real Redis: what is ordered, what is refused, what becomes known of it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from control_bench import Bench, Client
from waiting import wait_until

from embertide.server.cli.versions import rollback_plan
from embertide.server.services.tokens import Tokens
from embertide.v1 import control_pb2, update_pb2

ACT, LOOK, SERVE = "operators-token-is-long", "readers-token-is-long", "nodes-token-is-long-enough"
ORDER, OUTCOME = "e:{news:commit}:rollback", "e:{news:commit}:rolled_back"
NEWEST = 12


class Site:
    """A control plane, the bus that it reads, and a trainer that is not there."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bus = redis.Redis.from_url(bench.url)
        for number in (9, NEWEST):
            self.publish(number)
        self.live()
        tokens = folder / "tokens"
        tokens.write_text(f"reader/ben:{LOOK}\noperator/anna:{ACT}\nnode:{SERVE}\n")
        self.audit = folder / "audit.jsonl"
        control = bench.control(tokens=Tokens(tokens), bus=bench.url, audit=self.audit)
        self.anna = bench.client(control.address, ACT)
        self.ben = bench.client(control.address, LOOK)
        wait_until(lambda: len(self.versions().versions) == 2)

    def publish(self, number: int, lineage: int = 1) -> None:
        version = update_pb2.Version(number=number, lineage=lineage)
        commit = update_pb2.GlobalCommit(version=version, committed_ms=1_790_000_000_000)
        self.bus.xadd(
            "e:{news:commit}:log", {"m": commit.SerializeToString()}, id=f"{number}-{lineage}"
        )

    def live(self, *, started_ms: int = 1, **fields: Any) -> None:
        sign = update_pb2.TrainerSign(
            host="t-0", pid=7, started_ms=started_ms, version=NEWEST, lineage=1, **fields
        )
        self.bus.set("e:{news:commit}:trainer", sign.SerializeToString(), ex=7 * 86_400)

    def versions(self) -> control_pb2.ListVersionsResponse:
        answer: control_pb2.ListVersionsResponse = self.ben.call(
            "ListVersions", control_pb2.ListVersionsRequest()
        )
        return answer

    def take(self, *, ended_ms: int, **outcome: Any) -> None:
        """Do as a trainer that takes the order does."""
        message: Any = self.bus.get(ORDER)
        order = update_pb2.RollbackOrder.FromString(message)
        told = update_pb2.RollbackOutcome(order=order, ended_ms=ended_ms, **outcome)
        self.bus.delete(ORDER)
        self.bus.set(OUTCOME, told.SerializeToString())


@pytest.fixture
def site(bench: Bench, tmp_path: Path) -> Site:
    made = Site(bench, tmp_path)
    bench.stack.callback(made.bus.close)
    return made


def asked(id: str = "one", version: int = 9, **more: Any) -> control_pb2.StartRollbackRequest:
    return control_pb2.StartRollbackRequest(id=id, version=version, **more)


def start(client: Client, request: control_pb2.StartRollbackRequest) -> Any:
    return client.call("StartRollback", request)


def ordered(site: Site) -> update_pb2.RollbackOrder | None:
    message: Any = site.bus.get(ORDER)
    return update_pb2.RollbackOrder.FromString(message) if message else None


def test_an_order_goes_out_once_and_its_end_is_known(site: Site) -> None:
    answer = start(site.anna, asked(dry_run=True))
    assert (answer.newest.number, answer.trainer.sign.host) == (NEWEST, "t-0")
    assert ordered(site) is None, "a dry run orders nothing"
    start(site.anna, asked(reason="bad labels"))
    first = ordered(site)
    assert first is not None
    assert (first.id, first.version, first.author, first.reason) == (
        *("one", 9, "operator/anna", "bad labels"),
    )
    left_s = site.bus.ttl(ORDER)
    assert isinstance(left_s, int)
    assert 0 < left_s <= 60
    start(site.anna, asked(reason="bad labels"))
    assert ordered(site) == first
    wait_until(lambda: site.versions().rollback_order == first)
    site.take(ended_ms=5, version=13)
    start(site.anna, asked(reason="bad labels"))
    assert ordered(site) is None, "what was carried out is not ordered again"
    wait_until(lambda: site.versions().rollback_outcome.version == 13)
    assert not site.versions().HasField("rollback_order")
    lines = [json.loads(line) for line in site.audit.read_text().splitlines()]
    asked_for = [line for line in lines if line.get("rpc") == "StartRollback"]
    assert len(asked_for) == 4
    assert "bad labels" in json.dumps(asked_for[1])


def test_an_order_that_failed_is_an_event_with_its_reason(site: Site) -> None:
    start(site.anna, asked())
    site.take(ended_ms=round(time.time() * 1000), error="its delta is gone: name a version after 3")

    def failed() -> list[control_pb2.FleetEvent]:
        request = control_pb2.ListEventsRequest(text="not restored")
        return list(site.ben.call("ListEvents", request).events)

    wait_until(lambda: len(failed()) == 1)
    (event,) = failed()
    assert (event.name, event.author) == ("rollback_failed", "operator/anna")
    assert event.why == "its delta is gone: name a version after 3"
    time.sleep(2)
    assert len(failed()) == 1, "it is noted once"
    start(site.anna, asked("two"))
    assert ordered(site) is not None, "another one may be ordered"


def test_of_two_orders_one_is_refused_until_the_first_has_ended(site: Site) -> None:
    start(site.anna, asked())
    refused = site.anna.refused("StartRollback", asked("two", 8))
    assert refused[0] == "ABORTED"
    assert "version 9, by operator/anna" in refused[1]
    assert site.anna.refused("StartRollback", asked("one", 8))[0] == "ALREADY_EXISTS"
    site.take(ended_ms=0)
    assert site.anna.refused("StartRollback", asked("two", 8))[0] == "ABORTED"
    # Who took it has died, for the trainer of now started later.
    site.live(started_ms=round(time.time() * 1000) + 60_000)
    time.sleep(1.1)
    start(site.anna, asked("two", 8))
    order = ordered(site)
    assert order is not None
    assert order.version == 8


def test_a_preview_warns_of_a_version_that_was_withdrawn(site: Site) -> None:
    withdrawn = {"first": 9, "last": 9, "reason": "auc", "by": "guard@a:1", "at_ms": 5}
    record = {"promoted": 9, "undone": [], "withdrawn": [withdrawn | {"detail": "0.7 to 0.6"}]}
    header = b"EMPRM001 1 00000000\n"
    site.bus.set("e:{news:commit}:promoted", header + json.dumps(record).encode())
    wait_until(lambda: "NOTE that it was withdrawn" in rollback_plan(preview(site), 9))
    assert "auc: 0.7 to 0.6" in rollback_plan(preview(site), 9)
    assert "NOTE" not in rollback_plan(start(site.anna, asked(version=8, dry_run=True)), 8)


def preview(site: Site) -> control_pb2.StartRollbackResponse:
    answer: control_pb2.StartRollbackResponse = start(site.anna, asked(dry_run=True))
    return answer


def test_what_cannot_be_done_is_refused_with_the_remedy(site: Site, bench: Bench) -> None:
    for request, code, says in (
        (asked(""), "INVALID_ARGUMENT", "id is ''"),
        (asked(version=0), "INVALID_ARGUMENT", "version is 0"),
        (asked(reason="x" * 257), "INVALID_ARGUMENT", "257 bytes"),
        (asked(version=NEWEST), "FAILED_PRECONDITION", "not older than 12"),
        (asked(version=1 << 63), "FAILED_PRECONDITION", "not older than 12"),
    ):
        refused = site.anna.refused("StartRollback", request)
        assert refused[0] == code, refused
        assert says in refused[1]
    assert site.ben.refused("StartRollback", asked())[0] == "PERMISSION_DENIED"
    site.publish(NEWEST + 1, lineage=2)
    time.sleep(1.1)
    refused = site.anna.refused("StartRollback", asked())
    assert refused[0] == "FAILED_PRECONDITION"
    assert "the trainer on t-0 is ending" in refused[1]
    site.live(ended_ms=2, exit_status=1)
    time.sleep(1.1)
    refused = site.anna.refused("StartRollback", asked())
    assert refused[0] == "FAILED_PRECONDITION"
    assert "the last one is failed" in refused[1]
    assert "run `embertide rollback" in refused[1]
    assert ordered(site) is None
    without = bench.client(bench.control().address)
    assert "has no --bus" in without.refused("StartRollback", asked())[1]
