"""Known holes of versions of tritonserver, and what `doctor` says of one that has them."""

import json
from pathlib import Path
from typing import Any

import pytest
from installed import twin, twin_of_version
from typer.testing import CliRunner

from embertide.server.adapters.known_holes import advice, known_holes
from embertide.server.cli.app import app


def test_what_was_tried_of_two_versions_is_in_the_table() -> None:
    """2.51 ended at deadlines and at small HTTP bodies; 2.72 did not, and both swell."""
    old, new = known_holes("2.51.0"), known_holes("2.72.0")
    assert [hole.repaired for hole in new] == [None, None]
    assert {hole.what for hole in old} > {hole.what for hole in new}
    assert [hole for hole in old if hole.door == "gRPC" and "deadline" in hole.what]
    assert [hole for hole in old if hole.door == "HTTP" and "hundred bytes" in hole.what]


@pytest.mark.parametrize("version", ["", "unknown", "3.0.0", "2", "v2.51.0", "2.x.1"])
def test_of_a_version_that_is_not_known_nothing_is_said(version: str) -> None:
    assert known_holes(version) == []
    assert advice(version) == ""


def test_advice_is_of_doors_that_are_open_and_of_what_a_newer_server_repairs() -> None:
    assert "gRPC calls that pass their deadline" in advice("2.51.0", http=False)
    assert "HTTP request" not in advice("2.51.0", http=False)
    assert "HTTP request" in advice("2.51.0", http=True)
    assert advice("2.58.9", http=False).startswith("gRPC calls")
    assert advice("2.59.0", http=False) == advice("2.69.0") == advice("2.73.0dev") == ""
    assert advice("2.68.0").startswith("an HTTP request")
    assert "\n" not in advice("2.51.0")
    assert "--triton" in advice("2.51.0")


def doctor(folder: Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["doctor", "--json", "--triton", str(folder)])
    findings = json.loads(done.stdout)["findings"]
    found: dict[str, Any] = next(each for each in findings if each["name"] == "tritonserver")
    return found


def test_doctor_says_the_version_its_holes_and_the_remedy(tmp_path: Path) -> None:
    """Twins: no registry has another version."""
    old = doctor(twin_of_version(tmp_path / "old", "2.58.0"))
    assert old["ok"]
    assert old["found"] == f"2.58.0, {tmp_path}/old/bin/tritonserver"
    assert "pass their deadline or are cancelled end it (until 2.59)" in old["advice"]
    assert "give a newer tritonserver by --triton" in old["advice"]
    new = doctor(twin_of_version(tmp_path / "new", "2.72.0"))
    assert (new["ok"], new["advice"]) == (True, "")
    assert new["found"].startswith("2.72.0, ")
    none = doctor(twin(tmp_path / "none", "echo it is cold; exit 3"))
    assert not none["ok"]
    assert "is no tritonserver (code 3: it is cold)" in none["found"]
    absent = doctor(tmp_path / "absent")
    assert not absent["ok"]
    assert f"{tmp_path}/absent is not there" in absent["found"]


def test_doctor_marks_what_is_well_what_could_be_better_and_what_is_not(tmp_path: Path) -> None:
    folder = twin_of_version(tmp_path / "old", "2.58.0")
    done = CliRunner().invoke(app, ["doctor", "--triton", str(folder)], env={"COLUMNS": "80"})
    lines = done.stdout.splitlines()
    at = lines.index("  what: tritonserver")
    assert lines[at - 1] == "!"
    assert lines[lines.index("  what: Python") - 1] == "ok"
    assert "until 2.59" in lines[at + 1]
