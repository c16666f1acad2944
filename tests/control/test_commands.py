"""The commands of operators, against a control plane of their own and two nodes that are twins."""

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import embertide
from fake_node import FakeNode
from typer.testing import Result
from waiting import wait_until

from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import own_state
from embertide.trainer.config import FeatureConfig, ModelConfig, TableConfig
from embertide.trainer.sync import plan

LOOK, ACT = "may-look-at-all-of-it", "may-act-on-all-of-it"
COMMAND = (sys.executable, "-m", "embertide.server.cli")


class Operator:
    """Runs commands with --control and a token."""

    def __init__(self, address: str, token: Path) -> None:
        self.address = address
        self.options = ("--control", address, "--token-file", str(token))

    def run(self, *arguments: object) -> Result:
        return embertide(*arguments, *self.options)

    def json(self, *arguments: object) -> dict[str, object]:
        done = self.run(*arguments, "--json")
        assert done.exit_code == 0, done.stderr
        said: dict[str, object] = json.loads(done.stdout)
        return said


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERTIDE_CONFIG", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    folder = tmp_path_factory.mktemp("control")
    (folder / "tokens").write_text(f"# who may what\nreader:{LOOK}\noperator:{ACT}\n")
    (folder / "token").write_text(f"{ACT}\n")
    (port,) = free_ports(1)
    command = [*COMMAND, "control", "--listen", f"127.0.0.1:{port}", "--expect-nodes", "2"]
    command += ["--directory", str(folder)]
    command += ["--tokens", str(folder / "tokens"), "--longest-deadline-ms", "100"]
    command += ["--heartbeat-ms", "10000"]  # a busy machine makes no node dead
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(Child(command, log=folder / "control.log"))
        wait_until(lambda: "control plane of model" in child.log_text())
        url = own_state(folder).url
        nodes = [
            stack.enter_context(FakeNode(f"node-{index}", f"127.0.0.1:{port}", url, token=ACT))
            for index in range(2)
        ]
        nodes[0].reads = {0: 200, 4: 200, 8: 200, 12: 200}
        wait_until(lambda: all(node.held().epoch for node in nodes))
        yield Operator(f"127.0.0.1:{port}", folder / "token")


def _reads_of(operator: Operator, bucket: str) -> dict[str, int]:
    """Return how many keys of a bucket each node answered itself, and see that it is all it had."""
    wanted = operator.json("plan", "explain", bucket)["wanted"]
    assert isinstance(wanted, dict)
    assert all(each["hot"] == each["asked"] == 0 for each in wanted.values())
    return {name: each["here"] for name, each in wanted.items()}


def test_status_shows_the_fleet(operator: Operator) -> None:
    said = operator.run("status")
    assert said.exit_code == 0, said.stderr
    assert "node-1" in said.stdout
    assert "max/mean" in said.stdout
    facts = operator.json("status")
    assert facts["plan_epoch"]
    assert not facts["open"]


def test_a_reshard_from_a_dry_run_to_its_undo(operator: Operator, tmp_path: Path) -> None:
    dry = operator.run("reshard", "--planner", "greedy", "--dry-run")
    assert "would move" in dry.stdout, dry.stderr
    assert "max/mean" in dry.stdout
    assert "predicted, a second: busiest device, us" in dry.stdout
    assert "cost model: " in dry.stdout
    told = operator.json("reshard", "--planner", "greedy", "--dry-run")
    # Node 0 alone reads them: on another node they cost more, which greedy does not go by.
    assert told["after"]["busiest_us"] > told["before"]["busiest_us"] > 0  # type: ignore[index]
    done = operator.run("reshard", "--planner", "greedy", "--watch", "--id", "greedy-1")
    assert done.exit_code == 0, done.stderr
    assert "greedy-1: SUCCEEDED" in done.stdout
    listed = operator.run("reshard", "list").stdout
    assert "greedy-1" in listed
    assert "SUCCEEDED" in listed
    assert " UTC" in listed, "a time has its zone"
    assert operator.run("reshard", "watch", "greedy-1").exit_code == 0
    whole = operator.run("plan", "explain")
    assert whole.exit_code == 0, whole.stderr
    assert "by greedy (operation greedy-1)" in whole.stdout
    assert "predicted, a second: busiest device, us" in whole.stdout
    facts = operator.json("plan", "explain")
    assert facts["predicted"]["gain"] < 0  # type: ignore[index]
    assert len(facts["devices"]) == 4  # type: ignore[arg-type]
    over = operator.run("reshard", "abort", "greedy-1")
    assert over.exit_code == 1
    assert "is over" in over.stderr
    undone = operator.json("reshard", "undo", "greedy-1", "--watch")
    assert undone["state"] == "OPERATION_STATE_SUCCEEDED"
    epoch = operator.json("status")["plan_epoch"]
    assert isinstance(epoch, int)
    assert f"0 buckets differ between plan 1 and plan {epoch}" in (
        operator.run("plan", "diff", 1, epoch).stdout
    )
    target = tmp_path / "target.json"
    entry = {"table": "user", "buckets": "0-3", "owners": ["node-1/1"]}
    target.write_text(json.dumps({"base_epoch": epoch, "assignments": [entry]}))
    moved = operator.run("reshard", "--target", target, "--watch", "--reason", "by hand")
    assert moved.exit_code == 0, moved.stderr
    assert operator.json("plan", "explain", "user/2")["owners"] == ["node-1/1"]
    # Who reads them is said as of each node's last load, of before the move or after it: until all
    # are of after it, two nodes may say that they read the bucket, or none.
    wait_until(lambda: _reads_of(operator, "user/2") == {"node-0": 0, "node-1": 10})
    assert "user/2" in operator.run("plan", "diff", epoch, epoch + 4).stdout
    assert "node-1/1" in operator.run("plan", "show").stdout
    epoch = operator.json("status")["plan_epoch"]
    hot = [{"table": "user", "rows": 1000}, {"table": "item", "rows": None}]
    target.write_text(json.dumps({"base_epoch": epoch, "hot_rows": hot}))
    given = operator.run("reshard", "--target", target, "--watch")
    assert given.exit_code == 0, given.stderr
    assert "hot rows of user: 1,000 a node" in given.stdout
    assert "hot rows of user: 1,000 a node" in operator.run("plan", "show").stdout


def test_hot_keys_and_skew(operator: Operator) -> None:
    # Loads are asked for every five seconds, and before a reshard is planned.
    operator.run("reshard", "--planner", "greedy", "--dry-run")
    hot = operator.json("hot")["hot_keys"]
    assert hot == [{"table": "user", "key": 7, "reads": 80, "error": 2}]
    assert "node-0/0" in operator.run("hot").stdout


def test_nodes_are_listed_and_drained(operator: Operator) -> None:
    assert "node-0" in operator.run("node", "list").stdout
    planned = operator.run("node", "remove", "node-1")
    assert planned.exit_code == 1
    assert "drain it first" in planned.stderr
    drained = operator.run("node", "drain", "node-1", "--watch")
    assert drained.exit_code == 0, drained.stderr
    devices = operator.json("status")["devices"]
    assert isinstance(devices, list)
    assert sum(each["buckets"] for each in devices if each["device"].startswith("node-1")) == 0


def test_refusals_name_the_value(operator: Operator, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"base_epoch": 1, "assignments": [{"table": "user"}]}')
    (tmp_path / "who.json").write_text(
        '{"base_epoch": 1, "assignments": [{"table": "user", "buckets": "0", "owners": ["x/0"]}]}'
    )
    (tmp_path / "hot.json").write_text('{"base_epoch": 1, "hot_rows": [{"table": "user"}]}')
    (tmp_path / "none.json").write_text('{"base_epoch": 1}')
    for arguments, message in (
        (("reshard", "--target", tmp_path / "hot.json"), "hot_rows 0"),
        (("reshard", "--target", tmp_path / "none.json"), "assignments, hot_rows or tier"),
        (("reshard",), "give either --planner greedy or --target FILE"),
        (("reshard", "--planner", "best"), "no such planner: 'best'"),
        (("reshard", "--target", "nowhere.json"), "nowhere.json"),
        (("reshard", "--target", tmp_path / "bad.json"), "assignment 0"),
        (("reshard", "--target", tmp_path / "who.json"), "no node 'x'"),
        (("reshard", "pause", "r0"), "no such operation"),
        (("node", "drain", "node-9"), "node-9"),
        (("plan", "explain", "user/99"), "buckets 0 to 15"),
        (("plan", "explain", "users/0"), "no table 'users'"),
        (("plan", "show", "--epoch", "9999"), "9999"),
    ):
        done = operator.run(*arguments)
        # The control plane's refusals may be right later; an input of a wrong form never is.
        refused = re.match(r"error: [A-Z_]+: ", done.stderr) is not None
        assert done.exit_code == (1 if refused else 2), arguments
        assert message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_tokens_are_asked_for(operator: Operator, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(LOOK)
    reader = Operator(operator.address, tmp_path / "token")
    assert reader.run("status").exit_code == 0
    refused = reader.run("node", "remove", "node-0")
    assert "PERMISSION_DENIED" in refused.stderr
    done = embertide("node", "list", "--control", operator.address)
    assert "give --token-file" in done.stderr


def test_nobody_answers() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    done = embertide("hot", "--control", address)
    assert done.exit_code == 1
    assert f"no control plane answers at {address}" in done.stderr
    assert "embertide control" in done.stderr


def test_a_trainers_plan_is_written_from_what_nodes_read(
    operator: Operator, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    # Nodes report what they read in windows of some seconds.
    wait_until(lambda: operator.run("plan", "ranks", 2, path).exit_code == 0)
    said = operator.json("plan", "ranks", 2, path)
    assert said["file"] == str(path)
    unevenness = said["unevenness"]
    assert isinstance(unevenness, float)
    assert 1 <= unevenness < 1.1
    model = ModelConfig(
        name="m",
        tables=(TableConfig(name="user", bucket_bits=4), TableConfig(name="item", bucket_bits=2)),
        features=(FeatureConfig(name="u", table="user"), FeatureConfig(name="i", table="item")),
    )
    owners = plan.read(path, model, 2).owners_T[0]
    assert sorted(owners[[0, 4, 8, 12]].tolist()) == [0, 0, 1, 1], "hot buckets are spread"
    refused = operator.run("plan", "ranks", 2, tmp_path / "none" / "plan.json")
    assert refused.exit_code == 1
    assert "cannot be written: No such file or directory" in refused.stderr


def test_the_timeline_is_printed_searched_and_cut_by_time(operator: Operator) -> None:
    said = operator.json("timeline")["events"]
    assert isinstance(said, list)
    names = [each["name"] for each in said]
    assert {"leader_began", "plan_made", "node_registered"} <= set(names)
    printed = operator.run("timeline", "node-1", "--kind", "node").stdout.splitlines()
    assert "  node: node node-1 at 127.0.0.1:" in printed[0]
    assert " UTC  " in printed[0]
    assert "registered" in printed[0]
    assert operator.json("timeline", "--since", "2100-01-01")["events"] == []
    assert "no such event" in operator.run("timeline", "--until", "2020-01-01T00:00").stdout
    newest = operator.json("timeline", "--limit", "1", "--since", "1d")["events"]
    assert isinstance(newest, list)
    assert newest == said[:1]
    for wrong, says in (
        (("--kind", "odd"), "choose one of node, leader, version"),
        (("--since", "yesterday"), "give 90s, 30m, 2h or 3d ago"),
    ):
        done = operator.run("timeline", *wrong)
        assert done.exit_code == 2
        assert says in done.stderr
