"""The serving benchmark: what a case must reach, what a side may choose, what its rows say."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bench import aoti, models, perf, serve
from bench.report import Row
from bench.servers import BUILD, BenchError, BenchServer, Variant, make_backends
from bench.shapes import Shape


def _series(*rates: float) -> list[perf.Measured]:
    return [perf.Measured(requests_per_s=rate, latency_us_p99=9.0, report="") for rate in rates]


def _rows(case: serve.Case, sides: Sequence[Variant], *, avx512: bool) -> list[Row]:
    series = [_series(300.0), *(_series(100.0) for _ in sides[1:])]
    return serve.rows_of(case, Shape(name="criteo", rows=1000), sides, series, avx512=avx512)


def test_rows_answer_the_claim_by_the_bar_of_the_cpu() -> None:
    case = next(each for each in serve.CRITEO if (each.kind, each.batch) == ("ranking", 1))
    sides = [Variant(side="ours", kind="ranking"), Variant(side="python", kind="ranking")]
    narrow, wide = (_rows(case, sides, avx512=each) for each in (False, True))
    assert [row.metric for row in wide] == ["throughput", "p99 latency"]
    assert {row.claim for row in narrow + wide} == {"23.4"}
    # 3.0x: 2.8 is asked for with AVX2, 3.6 with AVX-512.
    assert narrow[0].met
    assert not wide[0].met
    assert (narrow[0].target, wide[0].target, wide[1].target) == (2.8, 3.6, 1.0)


def test_a_run_beside_one_peer_leaves_the_others_out() -> None:
    cases = serve.beside(["aoti"], serve.CRITEO + serve.BAGS)
    assert [(each.kind, each.batch) for each in cases] == [("ranking", n) for n in (1, 64, 256)]
    sides = [Variant(side="ours", kind="ranking"), Variant(side="aoti", kind="ranking")]
    rows = _rows(cases[0], sides, avx512=True)
    assert [(row.metric, row.target) for row in rows] == [("throughput", 1.0), ("p99 latency", 1.0)]
    assert all(row.peer_name.startswith("AOTInductor with EmbeddingBag") for row in rows)
    fill = serve.beside(["fill"], serve.CRITEO + serve.BAGS)
    assert {each.kind for each in fill} == {"lookup"}


def test_no_instance_has_more_threads_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert {each.threads for each in serve.variants("ours", "ranking", stacked=False)} == {1, 2}
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert {each.threads for each in serve.variants("python", "ranking", stacked=False)} == {
        1,
        2,
        3,
    }
    assert {each.threads for each in serve.variants("fill", "lookup", stacked=False)} == {1}


class _Idle(BenchServer):
    """Has nothing to unload."""

    def __init__(self) -> None:
        pass

    def unload(self, variants: Iterable[Variant]) -> None:
        pass


class _Measuring(serve.Bench):
    """A bench whose pilots measure what they are told; None: nothing is answered."""

    def __init__(
        self, rates: dict[int, float | None], cases: Sequence[serve.Case] = serve.BAGS
    ) -> None:
        self.cases, self.stacked, self.shape = cases, True, Shape(name="bags", rows=1000)
        self.server = _Idle()
        self._rates = rates

    def check(self, ours: Variant, peer: Variant, batch: int) -> None:
        pass

    def measure(self, variant: Variant, case: serve.Case, window_ms: int) -> perf.Measured:
        rate = self._rates[variant.threads]
        if rate is None:
            raise perf.UnmeasuredError(f"{variant.model}, batch {case.batch}, {window_ms} ms")
        return _series(rate)[0]


def test_a_variant_that_answers_nothing_loses_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    chosen = _Measuring({1: 10.0, 2: None}).choose("python", "ranking")
    assert {each.threads for each in chosen.values()} == {1}
    with pytest.raises(BenchError, match=r"no variant of python ranking .* batches \[64\]"):
        _Measuring({1: None, 2: None}).choose("python", "ranking")


def test_rows_of_a_case_are_there_before_the_next_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    rates: dict[int, float | None] = {1: 10.0}
    found = _Measuring(rates, serve.CRITEO[:2]).run(repetitions=1)
    assert [row.n for row in next(found)] == [1] * 4
    rates[1] = None
    with pytest.raises(perf.UnmeasuredError):
        next(found)


def _infer(bench: serve.Bench, variant: Variant, batches: Sequence[int]) -> None:
    """Send requests of these sizes at once and compare each answer with that of one sent alone."""
    expected = {batch: bench.answer(variant, batch) for batch in set(batches)}
    with ThreadPoolExecutor(len(batches)) as pool:
        answers = list(pool.map(lambda batch: bench.answer(variant, batch), batches))
    for batch, answer in zip(batches, answers, strict=True):
        np.testing.assert_allclose(answer, expected[batch], atol=1e-6)


@pytest.mark.long
def test_the_program_of_aotinductor_answers_as_ours_alone_and_joined(tmp_path: Path) -> None:
    shape = Shape(name="check", rows=1000, tables=4)
    backends = make_backends(BUILD / "cpp" / "backends" / "embertide")
    with BenchServer(backends, shape, models.make(shape, tmp_path)) as server:
        bench = serve.Bench(server, (), stacked=False)
        ours = Variant(side="ours", kind="ranking")
        for form in aoti.FORMS:
            peer = Variant(side="aoti", kind="ranking", form=form)
            for batch in (1, 2, 64, 256):
                bench.check(ours, peer, batch)
            _infer(bench, peer, [1 + i % 5 for i in range(64)])
            counts = server.client.get_inference_statistics(peer.model).model_stats[0]
            assert counts.execution_count < counts.inference_stats.success.count
