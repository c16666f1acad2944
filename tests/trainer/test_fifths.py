"""Figures of a stream by fifths of its events."""

import json
import math

import numpy as np
import pytest

from embertide.trainer.eval.fifths import _BLOCKS, PARTS, Fifths
from embertide.trainer.eval.metrics import Array, summarise


def events(count: int) -> tuple[Array, Array]:
    """Scores grow too large from the first event to the last."""
    rng = np.random.default_rng(count)
    true = 1 / (1 + np.exp(-rng.normal(-2, 1, count)))
    label = (rng.random(count) < true).astype(np.uint8)
    return label, np.clip(true * np.linspace(0.7, 1.4, count), 0, 1).astype(np.float32)


def fed(
    label: Array, score: Array, sizes: tuple[int, ...] = (256, 37), into: Fifths | None = None
) -> Fifths:
    into, at, n = into or Fifths(), 0, 0
    while at < len(label):
        part = slice(at, at + sizes[n % len(sizes)])
        into.add(label[part], score[part])
        at, n = part.stop, n + 1
    return into


@pytest.mark.parametrize("count", [5000, 64 * 128, 64 * 128 + 1, 41_234, 300_000])
def test_a_fifth_is_that_part_of_the_stream(count: int) -> None:
    label, score = events(count)
    found = fed(label, score).figures()
    assert len(found) == PARTS
    assert sum(each.events for each in found) == count
    begin = 0
    for n, each in enumerate(found):
        end = begin + each.events
        assert abs(end - count * (n + 1) / PARTS) <= count / _BLOCKS + 1
        exact = summarise(label[begin:end], score[begin:end])
        assert each.auc == pytest.approx(exact.auc, abs=5e-4)
        assert each.auc_error == pytest.approx(exact.auc_error, rel=0.01)
        assert each.log_loss == pytest.approx(exact.log_loss, rel=1e-9)
        assert each.calibration == pytest.approx(exact.calibration, rel=1e-9)
        begin = end


def test_few_events_leave_parts_empty_and_none_has_no_figure() -> None:
    assert all(each.events == 0 and math.isnan(each.auc) for each in Fifths().figures())
    label, score = events(7)
    assert [each.events for each in fed(label, score).figures()] == [0, 0, 7, 0, 0]


def test_memory_is_bounded_and_the_cut_of_batches_is_of_no_matter() -> None:
    label, score = events(200_000)
    one, other = fed(label, score), fed(label, score, sizes=(10_000, 3))
    assert len(one._blocks) <= _BLOCKS
    for mine, its in zip(one.figures(), other.figures(), strict=True):
        assert mine.events == its.events
        assert mine.auc == its.auc
        assert mine.log_loss == pytest.approx(its.log_loss, rel=1e-12)


@pytest.mark.parametrize("cut", [0, 8200, 100_000])
def test_a_resumed_stream_has_the_same_fifths(cut: int) -> None:
    label, score = events(150_000)
    whole = fed(label, score, sizes=(100,))
    numbers, arrays = fed(label[:cut], score[:cut], sizes=(100,)).state()
    resumed = Fifths.from_state(json.loads(json.dumps(numbers)), arrays)
    fed(label[cut:], score[cut:], sizes=(100,), into=resumed)
    assert resumed.figures() == whole.figures()
    assert sum(array.nbytes for array in whole.state()[1].values()) < 800_000


def test_what_is_written_down_does_not_change_meanwhile() -> None:
    label, score = events(30_000)
    stream = fed(label[:10_010], score[:10_010])
    frozen = stream.frozen()
    before = frozen.figures()
    fed(label[10_010:], score[10_010:], into=stream)
    assert frozen.figures() == before
    assert frozen.events == 10_010


def test_a_checkpoint_of_an_older_build_begins_anew() -> None:
    assert Fifths.from_state({}, {}).events == 0
