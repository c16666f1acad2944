"""The figures that bench.sync.pods reads from the log of a pod."""

import json

import pytest

from bench.servers import BenchError
from bench.sync.pods import rate


def line(second: int, events: int) -> str:
    said = json.dumps({"progress": {"events": events}})
    return f"2026-11-28T22:00:{second:02d}.123456789Z {said}"


def test_the_rate_is_that_of_the_run_after_its_start() -> None:
    start = [line(0, 100), "2026-11-28T22:00:09.5Z model is compiled", line(10, 19_000)]
    later = [line(20 + n, 20_000 + 5_000 * n) for n in range(21)]
    assert rate("\n".join(start + later)) == pytest.approx(5_000)


def test_a_run_that_ended_early_has_no_rate() -> None:
    with pytest.raises(BenchError, match="ended early"):
        rate("\n".join(line(n, 5_000 * n) for n in range(10)))
