"""The console before a real control plane: tokens, roles, and operations from dry run to undo."""

from pathlib import Path
from typing import Any

import pytest
import redis
from consoles import served
from control_bench import Bench
from visitor import Answer, Visitor
from waiting import wait_until

from embertide.server.cli.control_client import Caller
from embertide.server.services.control_server import ControlServer
from embertide.server.services.tokens import Tokens
from embertide.v1 import control_pb2, update_pb2

TOKENS = {
    "operator/anna": "operators-token-is-long",
    "reader/ben": "readers-token-is-long",
    "node": "nodes-token-is-long-enough",
}
OPERATOR, READER, NODE = TOKENS.values()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text("".join(f"{owner}:{token}\n" for owner, token in TOKENS.items()))
    return file


@pytest.fixture
def control(bench: Bench, tokens: Path, tmp_path: Path) -> ControlServer:
    control = bench.control(expect=2, tokens=Tokens(tokens), audit=tmp_path / "audit.jsonl")
    nodes = [bench.node(f"node-{at}", control.address, token=NODE) for at in range(2)]
    wait_until(lambda: all(node.held().epoch for node in nodes))
    return control


@pytest.fixture
def address(bench: Bench, control: ControlServer) -> str:
    def dial(token: str | None) -> Caller:
        return Caller(control.address, token)

    return bench.stack.enter_context(served(dial, control.address)).address


def visitor(address: str, token: str) -> Visitor:
    visitor = Visitor(address)
    answer = visitor.log_in(token)
    assert answer.status == 303, answer.text
    return visitor


def preview(visitor: Visitor, **goal: str) -> Answer:
    return visitor.send("/operations/preview", reason="a <test>", **goal)


def start(visitor: Visitor, shown: Answer) -> Answer:
    """Confirm a preview; its form has everything."""
    return visitor.post("/operations/start", shown.page.fields("/operations/start"))


def operations(bench: Bench, control: ControlServer) -> list[control_pb2.Operation]:
    client = bench.client(control.address, READER)
    answer = client.call("ListOperations", control_pb2.ListOperationsRequest())
    return list(answer.operations)


def test_an_operator_drains_a_node_and_undoes_it(
    bench: Bench, control: ControlServer, address: str
) -> None:
    anna = visitor(address, OPERATOR)
    assert "role operator" in anna.get("/").text
    assert "Drain node-1" in anna.get("/nodes").text
    shown = preview(anna, goal="drain_node", drain_node="node-1")
    assert "Preview: drain" in shown.page.shown
    assert "node-1/0" in shown.page.shown
    assert operations(bench, control) == []

    started = start(anna, shown)
    assert "was accepted" in started.page.shown
    assert start(anna, shown).headers["location"] == "/operations"  # pressed twice
    wait_until(lambda: bool(operations(bench, control)[0].ended_ms))
    (ended,) = operations(bench, control)
    assert (ended.state, ended.author, ended.reason) == (
        control_pb2.OPERATION_STATE_SUCCEEDED,
        "operator/anna",
        "a <test>",
    )
    wait_until(lambda: "succeeded" in anna.get("/operations").text)
    page = anna.get("/operations").text
    assert "a &lt;test&gt;" in page
    assert f"Undo {ended.id}" in page

    undone = start(anna, preview(anna, goal="undo_operation", undo_operation=ended.id))
    assert "was accepted" in undone.page.shown
    wait_until(lambda: all(each.ended_ms for each in operations(bench, control)))
    assert len(operations(bench, control)) == 2


def test_a_reader_is_refused_by_the_control_plane(
    bench: Bench, control: ControlServer, address: str, tmp_path: Path
) -> None:
    ben = visitor(address, READER)
    assert "role reader" in ben.get("/").text
    assert "Drain node-1" not in ben.get("/nodes").text
    assert "Start an operation" not in ben.get("/operations").text
    goal = {"goal": "drain_node", "drain_node": "node-1"}
    for path, fields in (
        ("/operations/preview", goal),
        (
            "/operations/start",
            {
                **goal,
                "epoch": str(
                    bench.client(control.address, READER)
                    .call("GetStatus", control_pb2.ControlServiceGetStatusRequest())
                    .plan_epoch
                ),
            },
        ),
        ("/operations/steer", {"operation": "x", "steering": "pause"}),
        ("/operations/steer", {"operation": "x", "steering": "abort", "confirmed": "yes"}),
    ):
        refused = ben.send(path, **fields)
        assert refused.status == 403, path
        assert "needs role operator" in refused.page.shown
    assert operations(bench, control) == []
    audit = (tmp_path / "audit.jsonl").read_text()
    assert audit.count('"name": "ben"') == 4


def test_an_operation_is_paused_resumed_and_aborted_after_a_question(
    bench: Bench, control: ControlServer, address: str
) -> None:
    anna = visitor(address, OPERATOR)
    shown = preview(anna, goal="drain_node", drain_node="node-1", mib_per_s="0.0001")
    assert "was accepted" in start(anna, shown).page.shown
    steer = {"operation": shown.page.fields("/operations/start")["operation_id"]}
    assert anna.send("/operations/steer", steering="pause", **steer).status == 303
    paused = control_pb2.OPERATION_STATE_PAUSED
    wait_until(lambda: operations(bench, control)[0].state == paused)
    assert anna.send("/operations/steer", steering="resume", **steer).status == 303
    question = anna.send("/operations/steer", steering="abort", **steer)
    assert "Abort operation" in question.page.shown
    assert not operations(bench, control)[0].ended_ms
    sure = question.page.fields("/operations/steer") | {"steering": "abort"}
    assert anna.post("/operations/steer", sure).status == 303
    aborted = control_pb2.OPERATION_STATE_ABORTED
    wait_until(lambda: operations(bench, control)[0].state == aborted)


def test_what_an_operator_writes_wrongly_is_named(address: str) -> None:
    anna = visitor(address, OPERATOR)
    for fields, says in (
        ({"goal": "odd"}, "choose one of planner"),
        ({"goal": "planner", "planner": "<b>"}, "planner is"),
        ({"goal": "drain_node", "drain_node": "no node"}, "the node to drain is"),
        ({"goal": "drain_node", "drain_node": "node-9"}, "node-9"),
        ({"goal": "undo_operation", "undo_operation": "nothing"}, "nothing"),
        ({"goal": "drain_node", "drain_node": "node-1", "p99_ms": "nan"}, "p99 in ms is"),
        ({"goal": "drain_node", "drain_node": "node-1", "reason": "x" * 300}, "say it shorter"),
    ):
        refused = anna.send("/operations/preview", **fields)
        assert refused.status in (400, 502), fields
        assert says in refused.page.shown
        assert "<b>" not in refused.text


def test_an_operator_freezes_drift_after_a_preview_and_a_reader_may_not(
    bench: Bench, control: ControlServer, address: str, tmp_path: Path
) -> None:
    def settings() -> control_pb2.DriftSettings:
        request = control_pb2.ListDecisionsRequest()
        answer = bench.client(control.address, READER).call("ListDecisions", request)
        found: control_pb2.DriftSettings = answer.settings
        return found

    anna, ben = visitor(address, OPERATOR), visitor(address, READER)
    assert "Change how drift is treated" in anna.get("/drift").text
    assert "Change how drift is treated" not in ben.get("/drift").text
    form = {"mode": "advise", "freeze": "2h", "reason": "a <release>"}
    refused = ben.send("/drift/set", confirmed="yes", **form)
    assert refused.status == 403
    assert "needs role operator" in refused.page.shown
    question = anna.send("/drift/set", **form)
    assert "mode off" in question.page.shown
    assert "mode advise, frozen until" in question.page.shown
    assert settings().mode == control_pb2.DRIFT_MODE_OFF, "nothing has changed before"
    assert anna.post("/drift/set", question.page.fields("/drift/set")).status == 303
    assert settings().mode == control_pb2.DRIFT_MODE_ADVISE
    assert settings().frozen_until_ms > 0
    assert settings().reason == "a <release>"
    wait_until(lambda: "a &lt;release&gt;" in anna.get("/drift").text)
    ended = anna.send("/drift/set", confirmed="yes", mode="advise", freeze="0s")
    assert ended.status == 303
    assert settings().frozen_until_ms == 0
    for fields, says in (
        ({"mode": "odd"}, "choose one of"),
        ({"mode": "off", "freeze": "soon"}, "use a number and s, m, h or d"),
        ({"mode": "off", "freeze": "100d"}, "at most 90d"),
    ):
        wrong = anna.send("/drift/set", **fields)
        assert wrong.status == 400
        assert says in wrong.page.shown
    request = control_pb2.ListEventsRequest(text="drift monitor")
    events = bench.client(control.address, READER).call("ListEvents", request).events
    assert [each.author for each in events] == ["operator/anna", "operator/anna"]


def test_an_operator_goes_back_to_a_version_after_a_preview_and_a_reader_may_not(
    bench: Bench, tokens: Path
) -> None:
    bus = redis.Redis.from_url(bench.url)
    bench.stack.callback(bus.close)
    sign = update_pb2.TrainerSign(host="<i>t-0", pid=7, started_ms=1, lineage=1)
    bus.set("e:{news:commit}:trainer", sign.SerializeToString(), ex=7 * 86_400)
    for number in (8, 9, 12):
        commit = update_pb2.GlobalCommit(version=update_pb2.Version(number=number, lineage=1))
        bus.xadd("e:{news:commit}:log", {"m": commit.SerializeToString()}, id=f"{number}-1")
    control = bench.control(expect=1, tokens=Tokens(tokens), bus=bench.url)
    reader = bench.client(control.address, READER)
    request = control_pb2.ListVersionsRequest()
    wait_until(lambda: len(reader.call("ListVersions", request).versions) == 3)

    def dial(token: str | None) -> Caller:
        return Caller(control.address, token)

    address = bench.stack.enter_context(served(dial, control.address)).address
    anna, ben = visitor(address, OPERATOR), visitor(address, READER)
    assert 'href="/versions?to=9#rollback"' in anna.get("/versions").text
    assert "/versions?to=12#" not in anna.get("/versions").text, "it is the newest"
    assert 'value="9"' in anna.get("/versions?to=9").text
    assert "/versions/rollback" not in ben.get("/versions").text
    form = {"version": "9", "reason": "a <test>"}
    for confirmed in ("", "yes"):
        refused = ben.send("/versions/rollback", confirmed=confirmed, **form)
        assert refused.status == 403
        assert "needs role operator" in refused.page.shown
    question = anna.send("/versions/rollback", **form)
    assert "3 versions are undone" in question.page.shown
    assert "<i>t-0" not in question.text
    key = "e:{news:commit}:rollback"
    assert bus.get(key) is None, "nothing is ordered before"
    fields = question.page.fields("/versions/rollback")
    for _ in range(2):  # the button is pressed twice
        assert anna.post("/versions/rollback", fields).status == 303
    message: Any = bus.get(key)
    order = update_pb2.RollbackOrder.FromString(message)
    assert (order.version, order.author, order.reason) == (9, "operator/anna", "a <test>")
    wait_until(lambda: "a &lt;test&gt;" in anna.get("/versions").text)
    assert "waits for the trainer" in anna.get("/versions").page.shown
    for version in ("", "-1", "x", "<b>", "9" * 40, "٣"):
        wrong = anna.send("/versions/rollback", version=version)
        assert wrong.status == 400, version
        assert "give a number" in wrong.page.shown
    newest = anna.send("/versions/rollback", version="12")
    assert newest.status == 502
    assert "not older than 12" in newest.page.shown


def test_a_plan_that_moved_on_is_previewed_again(address: str) -> None:
    anna = visitor(address, OPERATOR)
    shown = preview(anna, goal="drain_node", drain_node="node-1")
    stale = shown.page.fields("/operations/start") | {"epoch": "1000"}
    again = anna.post("/operations/start", stale)
    assert "The plan has moved on since the preview" in again.page.shown
    assert "was accepted" in start(anna, again).page.shown


def test_a_withdrawn_token_sees_nothing_more(
    address: str, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embertide.server.console.source.VERIFY_S", 0.0)
    ben = visitor(address, READER)
    assert ben.get("/").status == 200
    tokens.write_text(f"operator/anna:{OPERATOR}\nnode:{NODE}\n")
    wait_until(lambda: ben.get("/").status == 303)
    assert visitor(address, OPERATOR).get("/").status == 200
    assert Visitor(address).log_in(READER).status == 403
