"""The demo as a user runs it: real processes, a small stream, its proof, and what goes wrong."""

import html
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from serving import metric
from waiting import wait_until

from embertide.server.adapters.process import free_ports
from embertide.server.cli.demo.figures import hit_share

COMMAND = (sys.executable, "-m", "embertide.server.cli")
EVENTS = 40_000  # of the generated stream: four hours, so that the frozen copy has three to rot
OF = ("contexts", "candidates", "candidates_in_context_program")
FIELDS = {
    "events",
    "served_auc",
    "served_auc_by_day",
    "served_auc_by_hour",
    "trainer_auc",
    "frozen_auc",
    "requests",
    "failed_requests",
    "p50_ms",
    "p99_ms",
    "freshness_p50_s",
    "freshness_p99_s",
    "versions_published",
    "rows",
    "resident_bytes",
    "hits",
    "reshard",
}


def ports() -> list[str]:
    names = ("--grpc-port", "--metrics-port", "--control-port")
    pairs = zip(names, free_ports(3), strict=True)
    return [str(part) for pair in pairs for part in pair]


def embertide(*arguments: object, timeout: float = 240) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("demo") / "out"
    done = embertide("demo", "--events", EVENTS, "--out", out, *ports())
    assert done.returncode == 0, done.stderr
    assert "Served AUC" in done.stdout
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return out, report


def test_the_report_says_what_happened(demo: tuple[Path, dict[str, Any]]) -> None:
    out, report = demo
    assert report.keys() >= FIELDS
    assert report["events"] == pq.read_metadata(out / "scores.parquet").num_rows
    assert 0.95 * EVENTS < report["events"] <= EVENTS
    assert report["failed_requests"] == 0
    hour = sorted(report["frozen_auc_by_hour"], key=int)[-2]  # the last one holds few events
    assert report["served_auc_by_hour"][hour] > report["frozen_auc_by_hour"][hour] + 0.03
    assert report["staleness_event_p99_s"] <= 60
    assert report["versions_published"] > 500
    assert report["hits"]["ddr"] > 0
    assert set(report["resident_bytes"]) == {"hbm", "ddr", "ssd", "index"}
    page = (out / "report.html").read_text()
    assert page.count("data-chart=") == 3
    assert f"{report['served_auc']:.4f}" in page


def test_buckets_moved_because_traffic_shifted_and_no_answer_changed(
    demo: tuple[Path, dict[str, Any]],
) -> None:
    out, report = demo
    reshard, decision = report["reshard"], report["reshard"]["decision"]
    assert set(decision["triggers"]) & {"mix_change", "skew"}
    assert decision["predicted_gain"] > 0.01
    assert 0 < decision["seconds_after_the_shift"] < 30
    assert reshard["buckets_moved"] >= 1
    assert reshard["buckets_moved_to_other_nodes"] >= 1
    assert (reshard["failed_requests"], reshard["answers_changed"]) == (0, 0)
    # A thousand in a demo of the usual length (docs/results/demo.md).
    assert reshard["compared"] == reshard["answers"] >= 500
    assert reshard["checks"] > 0.5 * reshard["compared"]
    assert reshard["largest_difference"] <= 1e-6
    assert reshard["bytes_moved"] > 0
    assert reshard["p99_ms"] > 0
    elsewhere = [hit_share(report["hits"], source) for source in ("hot", "remote")]
    assert sum(elsewhere) >= 0.15
    assert min(elsewhere) > 0.01
    page = (out / "report.html").read_text()
    assert f"{reshard['buckets_moved']} of {reshard['buckets']}<" in page
    assert html.escape(decision["why"]) in page
    decisions = json.loads((out / "decisions.json").read_text())["decisions"]
    assert [each["outcome"] for each in decisions].count("DECISION_OUTCOME_ACTED") == 1


@pytest.mark.long
def test_two_ranks_look_for_a_plan_and_the_report_says_what_they_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ("--ranks", 2, "--events", 100_000, "--out", out)  # the search ends before them
    done = embertide("demo", *given, *ports(), timeout=900)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    assert (report["ranks"], report["failed_requests"]) == (2, 0)
    plan = report["plan"]
    assert plan["stage"] in ("none", "kept", "refused")
    assert plan["searched"] > 0
    assert plan["default_s"] > 0
    assert "Plan of 2 ranks" in done.stdout
    page = (out / "report.html").read_text()
    assert f">{plan['searched']:,}<" in page
    assert html.escape(plan["why"]) in page
    proof = embertide("demo", "--verify", "--out", out)
    assert proof.returncode == 0, proof.stderr


@pytest.mark.long
def test_the_best_model_is_asked_by_an_events_own_columns(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = embertide(
        "demo", "--model", "news-crossed", "--events", EVENTS, "--out", out, *ports(), timeout=600
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    assert report["failed_requests"] == 0
    assert report["reshard"]["compared"] == report["reshard"]["answers"] >= 1
    assert report["reshard"]["answers_changed"] == 0
    newest = max((out / "publication" / "snapshots").iterdir())
    manifest = json.loads((newest / "manifest.json").read_text())
    assert [each["name"] for each in manifest["sequences"]] == ["hist"]
    # No request carried more: the others would have been refused.
    assert len(manifest["features"]) == 23
    # A user's columns stood once in requests, and the net computed what depends on them once.
    page = (out / "metrics.txt").read_text()
    asked = {of: int(metric(page, "embertide_contexts_total", model="news", of=of)) for of in OF}
    assert 0 < asked["contexts"] < asked["candidates"]
    assert asked["candidates_in_context_program"] == asked["candidates"]
    proof = embertide("demo", "--verify", "--out", out)
    assert proof.returncode == 0, proof.stderr


def test_every_row_names_the_version_that_answered(demo: tuple[Path, dict[str, Any]]) -> None:
    out, report = demo
    table = pq.read_table(out / "scores.parquet")
    assert set(table.column_names) >= {"event", "ts_ms", "score", "version", "plan_epoch", "node"}
    version = table.column("version").to_numpy()
    assert version[0] == 1
    assert report["steps_back"] == 0  # of a node
    assert len(np.unique(version)) == report["versions_answered"]
    assert sorted(table.column("node").unique().to_pylist()) == ["node-0", "node-1"]


def test_the_proof_holds(demo: tuple[Path, dict[str, Any]]) -> None:
    done = embertide("demo", "--verify", "--out", demo[0])
    assert done.returncode == 0, done.stderr
    assert "figures of the report hold" in done.stdout


def change_column(path: Path, name: str, values: Any) -> None:
    table = pq.read_table(path)
    index = table.schema.get_field_index(name)
    column = pa.array(values, table.schema.field(index).type)
    pq.write_table(table.set_column(index, name, column), path)


@pytest.fixture
def copied(demo: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    out = tmp_path / "out"
    subprocess.run(["cp", "-r", str(demo[0]), str(out)], check=True)
    return out


def test_the_proof_finds_each_figure_that_was_changed(
    demo: tuple[Path, dict[str, Any]], copied: Path
) -> None:
    scores = pq.read_table(copied / "scores.parquet").column("score").to_numpy().copy()
    scores[:1000] = 0.5
    change_column(copied / "scores.parquet", "score", scores)
    # One answer of the reshard, changed by it.
    requests = pq.read_table(copied / "requests.parquet")
    difference = requests.column("difference").to_pylist()
    said = json.loads((copied / "reshard.json").read_text())
    sent_ms = requests.column("sent_ms").to_pylist()
    meanwhile = [said["began_ms"] < at < said["ended_ms"] for at in sent_ms]
    difference[meanwhile.index(True)] = 0.01
    change_column(copied / "requests.parquet", "difference", difference)
    changed = {**demo[1], "frozen_auc": demo[1]["frozen_auc"] + 0.001}
    (copied / "report.json").write_text(json.dumps(changed))
    page = (copied / "metrics.txt").read_text().splitlines()
    page = [line for line in page if not line.startswith("nv_inference_count")]
    (copied / "metrics.txt").write_text("\n".join(page) + "\n")
    done = embertide("demo", "--verify", "--out", copied)
    assert done.returncode == 1
    for figure in ("served_auc", "frozen_auc", "reshard", "nv_inference_count"):
        assert f"error: {figure}: reported" in done.stderr, figure


def test_the_proof_finds_a_version_that_had_learned_what_it_scored(
    demo: tuple[Path, dict[str, Any]], copied: Path
) -> None:
    # As if the last version had answered all: it has seen everything.
    rows = pq.read_metadata(copied / "scores.parquet").num_rows
    change_column(copied / "scores.parquet", "version", [demo[1]["versions_published"]] * rows)
    done = embertide("demo", "--verify", "--out", copied)
    assert done.returncode == 1
    assert "learned rows" in done.stderr


def running(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(marker in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        signal.SIGKILL,
    ],
)
def test_however_it_is_stopped_it_leaves_no_process(how: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [*COMMAND, "demo", "--out", str(out), *ports()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (out / "logs" / "replay-news.log").exists(), timeout_s=60)
        assert len(running(str(out))) >= 3
        os.kill(process.pid, how)
        _, said = process.communicate(timeout=30)
    wait_until(lambda: not running(str(out)), timeout_s=15)
    if how != signal.SIGKILL:
        assert process.returncode == 130
        assert "stopped" in said
        assert "Traceback" not in said


def test_a_busy_port_is_named_with_its_option(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = [*ports()[:-1], port]
        done = embertide("demo", "--events", 2000, "--out", tmp_path / "out", *arguments)
    assert done.returncode == 1
    assert f"port {port} is in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere.parquet"), "nowhere.parquet is missing"),
        (("--data", "README.md"), "README.md"),
        (("--verify", "--out", "nowhere"), "run the demo first"),
        (("--bus", "redis://127.0.0.1:1"), "Redis at 127.0.0.1:1 cannot be reached"),
        (("--events", "0"), "greater than or equal to 1"),
        (("--max-staleness", "0"), "--max-staleness"),
    ],
)
def test_wrong_arguments_are_refused_with_the_value(
    arguments: Sequence[str], message: str, tmp_path: Path
) -> None:
    done = embertide("demo", "--out", tmp_path / "out", *ports(), *arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    done = embertide("demo", "--out", tmp_path, *ports())
    assert done.returncode == 1
    assert "holds something else than a demo" in done.stderr
    assert (tmp_path / "precious.txt").read_text() == "mine"
