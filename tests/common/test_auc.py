"""AUC and its standard error, by counts of events with equal scores."""

import math

import numpy as np
import pytest

from embertide._common.auc import Array, auc_error_of_counts, auc_of_counts, counts_by_score


def placements(label: Array, score: Array) -> tuple[Array, Array]:
    """DeLong's structural components, pair by pair."""
    pairs = (score[label == 1][:, None] > score[label == 0][None, :]) + 0.5 * (
        score[label == 1][:, None] == score[label == 0][None, :]
    )
    return pairs.mean(axis=1), pairs.mean(axis=0)


@pytest.mark.parametrize("levels", [3, 10_000])
@pytest.mark.parametrize("rate", [0.03, 0.4])
def test_the_error_is_delongs_pair_by_pair(levels: int, rate: float) -> None:
    rng = np.random.default_rng(levels)
    label = (rng.random(700) < rate).astype(np.int64)
    score = rng.integers(0, levels, 700) + levels // 3 * label
    of_positives, of_negatives = placements(label, score)
    counts = counts_by_score(label, score)
    assert sum(int(each.sum()) for each in counts) == 700
    assert auc_of_counts(*counts) == pytest.approx(of_positives.mean(), abs=1e-12)
    wanted = of_positives.var(ddof=1) / len(of_positives)
    wanted += of_negatives.var(ddof=1) / len(of_negatives)
    assert auc_error_of_counts(*counts) == pytest.approx(math.sqrt(wanted), rel=1e-9)


def test_aucs_of_other_events_lie_as_far_apart_as_the_error_says() -> None:
    rng = np.random.default_rng(0)
    aucs, errors = [], []
    for _ in range(400):
        label = (rng.random(2000) < 0.02).astype(np.int64)
        counts = counts_by_score(label, rng.normal(label * 1.0, 1.0))
        aucs.append(auc_of_counts(*counts))
        errors.append(auc_error_of_counts(*counts))
    assert np.mean(errors) == pytest.approx(np.std(aucs), rel=0.15)


@pytest.mark.parametrize("label", [[], [1], [0, 0, 0], [1, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
def test_fewer_than_two_of_a_label_have_no_error(label: list[int]) -> None:
    score = np.arange(len(label), dtype=np.float64)
    assert math.isnan(auc_error_of_counts(*counts_by_score(np.array(label), score)))


def test_order_counts_and_nothing_else() -> None:
    label = np.array([0, 1, 0, 1, 1, 0])
    score = np.array([-np.inf, 0.0, -0.0, 5.0, 5.0, 5.0])
    assert auc_of_counts(*counts_by_score(label, score)) == pytest.approx(6.5 / 9)
    ranks = np.array([0, 1, 1, 2, 2, 2])
    assert auc_of_counts(*counts_by_score(label, ranks)) == pytest.approx(6.5 / 9)
