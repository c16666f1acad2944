"""A fresh net begins at the label rate of its first events."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killing import CACHE, train, unserved
from numpy.typing import NDArray
from rankjobs import prior_of_ranks
from rankpool import rank_pool
from shopping import HEADS, NEWS_CONFIG, Shopping

from embertide.trainer.config import DenseConfig, EvalConfig, RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsSource
from embertide.trainer.data.limit import where
from embertide.trainer.eval.learned import learned
from embertide.trainer.model.learner import Learner
from embertide.trainer.model.prior import head_bias_of, label_logits
from embertide.trainer.presets import news_history, news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer

RUN = RunConfig(model=news_model(), batch_size=32, warmup_events=200)
pytestmark = pytest.mark.usefixtures("one_thread")


class Rare(NewsSource):
    """The news, whose clicks are a few of a thousand."""

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        for batch in super().batches(batch_size=batch_size, start=start):
            yield dataclasses.replace(batch, label_B=(batch.event_B % 50 == 7).astype(np.float32))


def bias_of(learner: Learner) -> list[float]:
    bias_H = head_bias_of(learner.net)
    assert bias_H is not None
    return bias_H.tolist()


def logit(positives: float, negatives: float) -> float:
    return float(np.float32(np.log((positives + 0.5) / (negatives + 0.5))))


def first(count: int) -> list[Batch]:
    """So many batches of 32, or a few more, events."""
    return list(itertools.islice(Rare(NEWS_CONFIG).batches(batch_size=32), count))


def positives(batches: list[Batch]) -> tuple[int, int]:
    label_B = np.concatenate([each.label_B for each in batches])
    return int(label_B.sum()), int((label_B == 0).sum())


@pytest.mark.parametrize("net", ["dlrm", "dcn_v2", "deepfm"])
def test_the_bias_is_the_log_odds_of_the_first_batch(net: str) -> None:
    learner = Learner(dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, net=net)))
    batches = first(20)
    kept = list(learner.warm_up(iter(batches)))
    assert [each.first for each in kept] == [each.first for each in batches], "none is lost"
    assert bias_of(learner) == [logit(*positives(batches[:1]))]
    assert bias_of(learner)[0] < -3
    # Nothing but the bias: so a fresh net scores about the rate.
    assert learner.score(batches[0]).mean() < 0.1


def test_where_events_are_held_back_for_transforms_all_of_them_tell_the_rate() -> None:
    model = dataclasses.replace(RUN.model, dense=(DenseConfig(name="x", steps=("standardise",)),))
    learner = Learner(dataclasses.replace(RUN, model=model))
    batches = [
        dataclasses.replace(each, dense_BD=each.keys_BF[:, :1].astype(np.float32))
        for each in first(20)
    ]
    assert len(list(learner.warm_up(iter(batches)))) == len(batches)
    held = next(n for n in range(12) if sum(map(len, batches[:n])) >= 200)
    assert held > 1
    assert bias_of(learner) == [logit(*positives(batches[:held]))]


def test_a_history_net_begins_there_too() -> None:
    learner = Learner(dataclasses.replace(RUN, model=news_history()))
    learner.start_at(np.array([-4.0], np.float32))
    assert bias_of(learner) == [-4.0]


def test_each_head_begins_at_its_own_rate_of_known_labels_by_weight() -> None:
    run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, heads=HEADS))
    learner = Learner(run)
    batches = list(itertools.islice(Shopping().batches(batch_size=200), 1))
    list(learner.warm_up(iter(batches)))
    labels_BH = np.concatenate([each.labels(2) for each in batches])
    weight_B = np.concatenate([each.weight_B for each in batches if each.weight_B is not None])
    for h, found in enumerate(bias_of(learner)):
        known_B = ~np.isnan(labels_BH[:, h])
        sums = [float(weight_B[known_B & (labels_BH[:, h] == y)].sum()) for y in (1, 0)]
        assert found == pytest.approx(logit(*sums), abs=1e-6)
    assert bias_of(learner)[0] > bias_of(learner)[1]


def test_rates_of_one_label_or_no_event_are_numbers() -> None:
    batches = [where(each, each.label_B == 0) for each in first(3)]
    assert -6 < label_logits(batches, 1)[0] < -4
    assert label_logits([], 1)[0] == 0
    assert label_logits(first(3), 1, lambda batch: np.ones(len(batch), np.bool_))[0] == 0


def test_no_more_than_the_first_batch_is_waited_for() -> None:
    def one() -> Iterator[Batch]:
        yield first(1)[0]
        raise AssertionError("it waits for more")

    assert next(Learner(RUN).warm_up(one())).first == 0


@pytest.mark.parametrize(
    "begun",
    [
        lambda: (Learner(RUN), {"labelled": False}),
        lambda: (Learner(dataclasses.replace(RUN, loss="own_net:focal")), {}),
        lambda: (not_fresh(), {}),
    ],
    ids=["labels are not known yet", "a loss of one's own", "it has learned"],
)
def test_where_no_prior_is_to_be_had_nothing_is_held_back(
    begun: Callable[[], tuple[Learner, dict[str, Any]]],
) -> None:
    learner, how = begun()
    before, batches = bias_of(learner), iter(first(3))
    assert learner.warm_up(batches, **how) is batches
    assert bias_of(learner) == before


def not_fresh() -> Learner:
    learner = Learner(RUN)
    list(learner.warm_up(iter(first(2))))
    return learner


def test_a_net_of_ones_own_that_names_no_bias_is_left_alone() -> None:
    model = dataclasses.replace(RUN.model, net="own_net:Tower")
    assert head_bias_of(Learner(dataclasses.replace(RUN, model=model)).net) is None


def test_events_that_are_held_out_do_not_tell_their_labels(tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, batch_size=400, evaluation=EvalConfig(hold_out=0.5))
    trainer = train(run, Rare(NEWS_CONFIG), unserved(tmp_path))
    held = trainer.state.monitor.is_held_out
    batch = next(Rare(NEWS_CONFIG).batches(batch_size=400))
    prior_H = trainer.learner.prior_H
    assert prior_H is not None
    assert prior_H.tolist() == [logit(*positives([where(batch, ~held(batch))]))]
    assert prior_H.tolist() != [logit(*positives([batch]))]


def test_a_killed_run_does_not_begin_a_second_time(tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, publish_every_s=600, snapshot_every=1)
    whole = train(run, Rare(NEWS_CONFIG), unserved(tmp_path / "whole"))
    killed = unserved(tmp_path / "killed")
    train(run, Rare(NEWS_CONFIG), killed, batches=12)
    again = train(run, Rare(NEWS_CONFIG), killed)
    assert whole.learner.prior_H is not None
    assert again.learner.prior_H is None, "it went on from a checkpoint"
    for name, value in whole.learner.net.state_dict().items():
        assert value.equal(again.learner.net.state_dict()[name]), name
    assert again.state.prequential.fifths() == whole.state.prequential.fifths()


def test_the_first_version_scores_unknown_events_at_the_rate(tmp_path: Path) -> None:
    trainer = Trainer(RUN, Publication(tmp_path), program_cache=CACHE)
    scored: list[NDArray[np.float32]] = []
    publish = trainer._publish

    def first_version(how: str, number: int, watermark_ms: int) -> None:
        if not scored:
            scored.append(trainer.learner.score(first(1)[0]))
        publish(how, number, watermark_ms)

    trainer._publish = first_version  # type: ignore[method-assign]
    trainer.fit(Rare(NEWS_CONFIG))
    assert scored[0].mean() < 0.1


def test_ranks_begin_with_the_same_bias(tmp_path: Path) -> None:
    with rank_pool() as pool:
        (alone,) = pool.run(1, prior_of_ranks, str(tmp_path / "one"))
        together = pool.run(2, prior_of_ranks, str(tmp_path / "two"))
        apart = pool.run(2, prior_of_ranks, str(tmp_path / "apart"), "local")
    assert together == [alone, alone]
    assert apart == [alone, alone]


def test_a_rare_label_is_calibrated_from_the_start() -> None:
    def calibration(learner: Learner) -> float:
        label, score = 0.0, 0.0
        for batch, score_B in learned(learner, Rare(NEWS_CONFIG)):
            label, score = label + float(batch.label_B.sum()), score + float(score_B.sum())
        return score / label

    with_prior = calibration(Learner(RUN))
    learner = Learner(RUN)
    learner.is_fresh = False
    assert calibration(learner) > 2
    assert 0.8 < with_prior < 1.5
