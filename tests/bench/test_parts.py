"""How benchmarks are run: rows are written as they come, and what stops one is told."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import parts, report
from bench.servers import BenchError


def _row(name: str, ours: float) -> report.Row:
    return report.measure((name, "rate", "1/s"), [ours] * 5, better="higher", target=2)


def _some(_: argparse.Namespace) -> Iterator[report.Row]:
    yield _row("first", 3)
    yield _row("second", 1)


def _stopped(_: argparse.Namespace) -> Iterator[report.Row]:
    yield _row("first", 3)
    raise BenchError("no disk")


def _run(measure: parts.Measure, monkeypatch: pytest.MonkeyPatch, out: Path, **how: bool) -> int:
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        parts.command("Some", measure, parts.options("some", __doc__), **how)
    return int(ended.value.code or 0)


def test_rows_are_written_with_commit_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "some.json"
    assert _run(_some, monkeypatch, out, picture=True) == 0
    said = json.loads(out.read_text())
    assert {"commit", "machine", "rows"} <= said.keys()
    assert [row["case"] for row in said["rows"]] == ["first", "second"]
    assert [row["n"] for row in said["rows"]] == [5, 5]
    assert out.with_suffix(".svg").stat().st_size
    assert _run(_some, monkeypatch, out, barred=True) == 1, "a target was missed"


def test_what_was_measured_before_an_error_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "some.json"
    assert _run(_stopped, monkeypatch, out) == 1
    assert [row["case"] for row in json.loads(out.read_text())["rows"]] == ["first"]
    assert "no disk" in capsys.readouterr().err


def test_parts_are_named_by_words_or_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every: dict[str, parts.Measure] = {"one": _some, "two": _some, "three": _stopped}
    monkeypatch.setattr(sys, "argv", ["bench", "one,two", "--out", str(tmp_path)])
    assert parts.main("bench.some", "Some", every, __doc__) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some_one.json", "some_two.json"]
    monkeypatch.setattr(sys, "argv", ["bench", "four", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        parts.main("bench.some", "Some", every, __doc__)
