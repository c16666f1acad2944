"""What is compared with an older build: both sides in turn, and a build that is not there."""

from pathlib import Path

import pytest

from bench.servers import BenchError
from bench.store import programs, since, ssd


def test_sides_run_in_turn_and_each_begins_as_often() -> None:
    order: list[str] = []
    took = iter([1.0, 2.0, 4.0, 3.0])  # now, older; older, now

    def run(side: str) -> since.Times:
        order.append(side)
        return {"growth, an insert, ns": next(took)}

    (row,) = since._rows([lambda: run("now"), lambda: run("older")], repetitions=2)
    assert order == ["now", "older", "older", "now"]
    assert (row.case, row.unit, row.claim) == ("growth, an insert", "ns", "23.7")
    assert (row.ours, row.peer, row.ratio) == (2.0, 3.0, 0.6667)
    assert row.met


def test_an_older_build_without_programs_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs, "build", lambda name: Path(__file__))
    monkeypatch.setattr(ssd, "build", lambda: Path(__file__))
    with pytest.raises(BenchError, match=f"{tmp_path}.*readers_and_versions is missing: build it"):
        list(since._measure(tmp_path, ["versions"], repetitions=1))
