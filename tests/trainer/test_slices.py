"""Figures by slice: exact for a file, bounded for a stream."""

import json

import numpy as np
import pytest

from embertide.trainer.eval.metrics import Binned, summarise
from embertide.trainer.eval.slices import MAX_TRACKED, StreamSlice, slice_table


def test_a_table_has_the_largest_values_and_the_rest_together() -> None:
    rng = np.random.default_rng(2)
    value = (rng.zipf(1.4, 5000) % 40).astype(np.int64)
    label = (rng.random(5000) < 0.2).astype(np.float32)
    score = rng.random(5000).astype(np.float32)
    table = slice_table(value, label, score, most=5)
    counts = {int(v): int((value == v).sum()) for v in np.unique(value)}
    largest = sorted(counts, key=lambda v: -counts[v])[:5]
    assert list(table.values) == largest
    for each, figures in table.values.items():
        assert figures == summarise(label[value == each], score[value == each])
    others = ~np.isin(value, largest)
    assert table.rest == summarise(label[others], score[others])
    assert table.rest_values == len(counts) - 5
    assert slice_table(value, label, score, most=100).rest is None


def test_a_stream_has_the_same_figures_within_its_bins() -> None:
    rng = np.random.default_rng(3)
    value = rng.integers(8, size=20_000)
    label = (rng.random(20_000) < 0.02 + 0.01 * value).astype(np.float32)
    score = np.clip(0.01 * (1 + value) + 0.02 * rng.random(20_000), 0, 1).astype(np.float32)
    stream = StreamSlice()
    for at in range(0, 20_000, 100):
        part = slice(at, at + 100)
        stream.add(value[part], label[part], score[part])
    exact = slice_table(value, label, score, most=3)
    found = stream.table(3)
    assert list(found.named()) == list(exact.named())
    assert found.rest_values == exact.rest_values == 5
    for name, figures in found.named().items():
        wanted = exact.named()[name]
        assert figures.events == wanted.events
        assert figures.log_loss == pytest.approx(wanted.log_loss, rel=1e-9)
        assert figures.calibration == pytest.approx(wanted.calibration, rel=1e-6)
        assert figures.normalised_entropy == pytest.approx(wanted.normalised_entropy, rel=1e-9)
        assert figures.auc == pytest.approx(wanted.auc, abs=0.005)


def test_a_stream_tells_so_many_values_apart_and_no_more() -> None:
    stream, ones = StreamSlice(), np.ones(4 * MAX_TRACKED)
    stream.add(np.arange(4 * MAX_TRACKED), ones, ones * 0.5)
    table = stream.table(10)
    assert len(table.values) == 10
    assert table.rest is not None
    assert table.rest.events == 4 * MAX_TRACKED - 10
    assert table.rest_values is None
    assert len(stream.state()["counts"]) == MAX_TRACKED + 1
    resumed = StreamSlice.from_state(stream.state())
    stream.add(np.array([5000]), np.zeros(1), np.ones(1) * 0.5)
    resumed.add(np.array([5000]), np.zeros(1), np.ones(1) * 0.5)
    assert json.dumps(resumed.table(4).named(), default=repr) == json.dumps(
        stream.table(4).named(), default=repr
    )


@pytest.mark.parametrize("score", [0.0, 1e-9, 0.5, 1.0])
def test_scores_at_the_ends_have_a_bin(score: float) -> None:
    binned = Binned(16)
    binned.add(np.array([0, 1]), np.array([score, score]))
    assert binned.auc()[0] == 0.5
    wanted = summarise(np.array([0, 1]), np.array([score, score]))
    assert binned.summary().log_loss == pytest.approx(wanted.log_loss)
