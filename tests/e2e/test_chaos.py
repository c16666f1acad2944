"""Chaos as a user runs it: fixed seeds over a real fleet, and the seeds that once failed."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.alone

COMMAND = (sys.executable, "-m", "embertide.server.cli", "chaos")
SEEDS = (
    14,  # messages to a node are flipped
    34,  # a node's bus is cut, the others' loses packets
    64,  # the bus is killed
    50,  # the disk is full: the trainer publishes once there is room
)
# Seeds of rounds that failed, each with what was wrong; mended since. For `make test-long`.
REGRESSIONS = {
    13: "a node on a slow link to the bus fell back until its peers could not ask it",
    28: "the trainer ended on a harmed checkpoint, with another whole one beside it",
    40: "a node was ready before it had read through the bus, and stepped back a version",
    42: "a node ended on a snapshot that is harmed, or that was pruned while it waited",
    88: "a node was ready though the newest version's net was harmed, and stepped back",
}


def chaos(*arguments: object, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def seeds(numbers: Sequence[int]) -> list[str]:
    return [word for number in numbers for word in ("--seed", str(number))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("chaos") / "out"
    before = {process.pid for process in psutil.process_iter()}
    done = chaos("--out", out, *seeds(SEEDS))
    # An ended process whose parent has not asked for it yet has no command line: None.
    left = [
        each.info["name"]
        for each in psutil.process_iter(["name", "cmdline"])
        if each.pid not in before and str(out) in " ".join(each.info["cmdline"] or ())
    ]
    assert done.returncode == 0, done.stdout + done.stderr
    assert not left, "processes outlive the command"
    return out, json.loads((out / "report.json").read_text())


def test_no_round_fails(run: tuple[Path, dict[str, Any]]) -> None:
    _, report = run
    assert report["failing_seeds"] == []
    assert [each["seed"] for each in report["each"]] == [*SEEDS]
    assert report["degraded_requests"] == 0  # nothing happened to a node


def test_faults_happened_and_answers_were_compared(run: tuple[Path, dict[str, Any]]) -> None:
    _, report = run
    assert report["flipped_messages"] > 0
    assert report["noticed"]["corrupt"] > 0
    assert report["process_starts"]["bus"] == 1
    for each in report["each"]:
        assert each["versions"] > 0
        assert each["answers"] > 2 * each["state_rows"] > 0


def test_the_report_has_a_timeline(run: tuple[Path, dict[str, Any]]) -> None:
    out, report = run
    page = (out / "report.html").read_text()
    assert page.count("<img") == 2 + min(3, len(report["each"]))
    lines = (out / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [*SEEDS]


def test_what_ran_is_left_out_on_resume(run: tuple[Path, dict[str, Any]]) -> None:
    out, report = run
    done = chaos("--out", out, *seeds(SEEDS), "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answers"] == report["answers"]


@pytest.mark.long
def test_no_round_fails_of_those_that_failed_by_harmed_files(tmp_path: Path) -> None:
    done = chaos("--out", tmp_path / "out", *seeds([*REGRESSIONS]))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [each["seed"] for each in report["each"]] == [*REGRESSIONS]
    assert report["failing_seeds"] == []


def test_a_seed_names_the_same_faults_each_time() -> None:
    first, second = (chaos("--seed", 3, "--rounds", 4, "--dry-run") for _ in range(2))
    assert first.stdout == second.stdout
    assert first.stdout.count("seed ") == 4


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    done = chaos("--out", tmp_path, "--without", "disk-full")
    assert done.returncode == 1
    assert "holds something else" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "years"
