"""The output of `status --control` is whole in a terminal of 80 columns."""

from typing import Any

import pytest

from embertide._common.terminal import Table, show_table
from embertide.server.cli import fleet_view, reshard
from embertide.server.cli.drift_view import drift_facts
from embertide.v1 import control_pb2

_NODE = "embertide-node-{}.embertide-node.embertide.svc.cluster.local"


def _facts() -> dict[str, Any]:
    nodes = [
        {
            "node": f"embertide-node-of-the-second-group-{at}",
            "address": f"{_NODE.format(at)}:7200",
            "group": 1,
            "state": "draining",
            "versions": [123_440 + at, 123_456],
            "plan_epoch": 1712,
            "versions_behind": 1_234,
            "staleness_ms": 123_456,
            "last_beat_ms": 12_500,
        }
        for at in range(2)
    ]
    return {
        "at_ms": 1_700_000_000_000,
        "trainer": None,
        "tasks": [],
        "refused": [],
        "drift": drift_facts(
            control_pb2.DriftStatus(
                settings=control_pb2.DriftSettings(mode=control_pb2.DRIFT_MODE_AUTO),
                outcome=control_pb2.DECISION_OUTCOME_OPERATION_AT_WORK,
                why="operation move-1 has not ended",
            )
        ),
        "unowned_buckets": 0,
        "unowned_by_group": {},
        "plan_epoch": 1712,
        "open": False,
        "newest_committed": 123_456,
        "versions_behind": 3,
        "nodes": nodes,
        "devices": [
            {
                "device": f"{node['node']}/0",
                "group": 1,
                "buckets": 1024,
                "moving": 128,
                "reads": 1_234_567_890,
                "bytes": 123_456_789_012,
                "budget_bytes": 160_000_000_000,
            }
            for node in nodes
        ],
        "skew": {"1": 1.2},
    }


def test_nothing_of_a_fleet_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    fleet_view.show_fleet(_facts())
    said = capsys.readouterr().out
    assert "…" not in said
    assert "drift: mode auto; operation at work: operation move-1 has not ended\n" in said
    prose = (" is at ", "plan 1712", "trainer:")
    table = [line for line in said.splitlines() if not any(each in line for each in prose)]
    assert max(map(len, table)) <= 80
    for at in range(2):
        assert f"embertide-node-of-the-second-group-{at} is at {_NODE.format(at)}:7200\n" in said
        assert f"{123_440 + at}-123456" in said
    assert said.count("123,456,789,012") == 2
    assert said.count(" 23%") == 2


def test_a_reason_is_one_line_whatever_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ids = [f"8dc06369-31d1-446e-a36b-188d148429c{at}" for at in range(2)]
    reshard.show_list(
        [control_pb2.Operation(id=id, kind="drain", reason="disk of node-0 is worn") for id in ids]
    )
    said = capsys.readouterr().out
    for id in ids:
        assert f"{id}: disk of node-0 is worn\n" in said


def test_a_name_that_is_too_long_goes_on_below_itself(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", "reads", names=("name",))
    table.add_row("n" * 100, "12,345")
    show_table(table, width=40)
    said = capsys.readouterr().out
    assert said.count("n") == 101
    assert "12,345" in said
