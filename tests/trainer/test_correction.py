"""A running correction of scores: learned before labels are, bounded, and served."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from fp64 import batch_of, model
from killing import CACHE, train, unserved
from numpy.typing import NDArray
from rankjobs import corrected_ranks
from rankpool import rank_pool
from shopping import HEADS, NEWS_CONFIG, Shopping, tasks_of

from embertide.trainer.config import CorrectionConfig, LocalSGD, RunConfig
from embertide.trainer.data.generator import NewsSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.correction import HALF_LIVES, Correction
from embertide.trainer.model.export import named_tensors
from embertide.trainer.model.learner import Learner
from embertide.trainer.model.own import check_program
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot import TENSORS
from embertide.trainer.run.apart import check_supported
from embertide.trainer.run.loop import Trainer

STEP = RunConfig(model=model(top_sees_embeddings=True), ddr_budget_bytes=8 << 20)
CORRECTED = dataclasses.replace(STEP, correction=CorrectionConfig(half_life=2000))
CHOSEN = CorrectionConfig(half_life=0, bound=3.0)
pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(events: int, rate: float, seed: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield labels and true log odds, 100 at a time; their mean probability is about `rate`."""
    rng = np.random.default_rng(seed)
    for _ in range(events // 100):
        logit_B = np.log(rate / (1 - rate)) + rng.normal(-0.2, 0.8, 100)
        yield (rng.random(100) < 1 / (1 + np.exp(-logit_B))).astype(np.float32), logit_B


@pytest.mark.parametrize("rate", [0.01, 0.3])
@pytest.mark.parametrize("shift", [-0.4, 0.4])
def test_scores_that_are_off_by_a_constant_come_right(rate: float, shift: float) -> None:
    correction = Correction(CorrectionConfig(half_life=50_000), 1)
    sums = np.zeros(3)
    for n, (label_B, logit_B) in enumerate(drawn(300_000, rate, 1)):
        plain_B = 1 / (1 + np.exp(-logit_B - shift))
        score_B = 1 / (1 + np.exp(-logit_B - shift - correction.offset_H[0]))
        if n >= 1500:
            sums += label_B.sum(), score_B.sum(), plain_B.sum()
        correction.add(label_B, score_B.astype(np.float32), None)
    label, score, plain = sums
    assert abs(plain / label - 1) > 0.2
    assert score / label == pytest.approx(1, abs=0.05)
    assert correction.offset_H[0] == pytest.approx(-shift, abs=0.1)


def test_it_is_bounded_and_few_events_move_it_little() -> None:
    correction = Correction(CorrectionConfig(half_life=1000, bound=0.5), 1)
    correction.add(np.ones(2), np.full(2, 0.5, np.float32), None)
    assert correction.offset_H[0] == 0, "one label alone tells no rate"
    correction.add(np.zeros(1), np.full(1, 0.5, np.float32), None)
    assert 0 < correction.offset_H[0] < 0.05
    for _ in range(100):
        label_B = (np.arange(100) < 90).astype(np.float32)
        correction.add(label_B, np.full(100, 0.1, np.float32), None)
    assert correction.offset_H[0] == 0.5


def test_heads_have_their_own_unknown_labels_none_and_weights_count() -> None:
    both, one = Correction(CorrectionConfig(), 2), Correction(CorrectionConfig(), 1)
    rng = np.random.default_rng(2)
    label_BH = (rng.random((400, 2)) < (0.5, 0.1)).astype(np.float32)
    label_BH[::3, 1] = np.nan
    weight_B = rng.random(400).astype(np.float32)
    score_BH = np.full((400, 2), 0.3, np.float32)
    both.add(label_BH, score_BH, weight_B)
    assert both.offset_H[0] > 0 > both.offset_H[1]
    known_B = ~np.isnan(label_BH[:, 1])
    weight_B[~known_B] = 0
    one.add(np.nan_to_num(label_BH[:, 1]), score_BH[:, 1], weight_B)
    assert one.offset_H[0] == both.offset_H[1]


def test_a_resumed_one_is_the_same() -> None:
    whole, resumed = Correction(CorrectionConfig(), 1), Correction(CorrectionConfig(), 1)
    for n, (label_B, _) in enumerate(drawn(2000, 0.2, 3)):
        if n == 7:
            state = json.loads(json.dumps(whole.state()))
            resumed.load(state)
        for each in (whole, resumed) if n >= 7 else (whole,):
            each.add(label_B, np.full(100, 0.1, np.float32), None)
    assert resumed.state() == whole.state()
    assert whole.offset_H[0] != 0


def moving(events: int, period: int, seed: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield labels and log odds that do not know how the rate moves: by 1.2 up, or down."""
    rng = np.random.default_rng(seed)
    for n in range(events // 100):
        logit_B = rng.normal(-1, 0.5, 100)
        away = 1.2 * (-1) ** (n * 100 // period) if period else 0
        yield (rng.random(100) < 1 / (1 + np.exp(-logit_B - away))).astype(np.float32), logit_B


@pytest.mark.parametrize(
    ("period", "lengths"), [(1_000, {100, 300}), (20_000, {300, 1_000, 3_000}), (0, {0, 100_000})]
)
def test_the_run_chooses_how_long_it_remembers(period: int, lengths: set[int]) -> None:
    """And no choice made before would have given scores much less loss: what it gave is counted."""
    chosen = Correction(CHOSEN, 1)
    alone = {0: None} | {
        each: Correction(CorrectionConfig(half_life=each, bound=3.0), 1) for each in HALF_LIVES
    }
    loss = dict.fromkeys([-1, *alone], 0.0)
    for n, (label_B, logit_B) in enumerate(moving(100_000, period, 4)):
        for name, each in {-1: chosen, **alone}.items():
            offset = 0.0 if each is None else float(each.offset_H[0])
            score_B = (1 / (1 + np.exp(-logit_B - offset))).astype(np.float32)
            if n >= 100:
                loss[name] -= float(np.where(label_B, np.log(score_B), np.log1p(-score_B)).sum())
            if each is not None:
                each.add(label_B, score_B, None)
    assert chosen.half_lives[0][0] in lengths
    best = min(loss[each] for each in alone)
    assert loss[-1] < best * 1.001
    assert period == 0 or loss[-1] < 0.98 * loss[0]


def test_a_version_gets_what_is_best_for_as_long_as_it_serves() -> None:
    """A rate that has moved twice by the next version is better left alone."""
    seldom, often = Correction(CHOSEN, 1), Correction(CHOSEN, 1)
    for n, (label_B, logit_B) in enumerate(moving(60_000, 1_000, 5)):
        for each, every in ((seldom, 77), (often, 1)):
            score_B = 1 / (1 + np.exp(-logit_B - each.offset_H[0]))
            each.add(label_B, score_B.astype(np.float32), None)
            if n % every == 0:
                each.version_goes_out()
    assert often.half_lives == ([100], [100])
    assert often.served_H == often.offset_H
    assert seldom.half_lives[0] == [100]
    assert seldom.half_lives[1][0] in (0, 30_000, 100_000)
    assert abs(seldom.served_H[0]) < 0.3


def test_one_that_chooses_resumes_exactly_and_begins_with_none_after_another_kind() -> None:
    whole, resumed = Correction(CHOSEN, 2), Correction(CHOSEN, 2)
    parts = zip(moving(4_000, 500, 6), moving(4_000, 0, 7), strict=True)
    for n, ((one_B, _), (other_B, _)) in enumerate(parts):
        if n == 17:
            resumed.load(json.loads(json.dumps(whole.state())))
        for each in (whole, resumed) if n >= 17 else (whole,):
            each.add(np.stack([one_B, other_B], 1), np.full((100, 2), 0.3, np.float32), None)
            if n % 5 == 0:
                each.version_goes_out()
    assert resumed.state() == whole.state()
    assert (resumed.offset_H == whole.offset_H).all()

    before = {"sums": [[3.0], [2.0], [9.0], [1.5]], "offset": [0.25]}  # of a build with one
    one, choosing = Correction(CorrectionConfig(), 1), Correction(CHOSEN, 1)
    one.load(before)
    choosing.load(before)
    assert one.offset_H == one.served_H == 0.25
    assert choosing.offset_H == choosing.served_H == 0
    choosing.load(one.state())
    assert choosing.state() == Correction(CHOSEN, 1).state()


def test_scores_have_the_correction_from_before_their_labels_and_the_net_learns_without() -> None:
    plain, corrected = Learner(STEP), Learner(CORRECTED)
    assert corrected.correction is not None
    rng = np.random.default_rng(3)
    for _ in range(8):
        batch = batch_of(rng, 40)
        before = float(corrected.correction.offset_H[0])
        served_B = corrected.score(batch)
        odds_B = np.log(plain.learn(batch).astype(np.float64))
        learned_B = corrected.learn(batch)
        np.testing.assert_allclose(learned_B, served_B, atol=1e-6)
        shifted_B = np.exp(odds_B) / (np.exp(odds_B) + (1 - np.exp(odds_B)) * np.exp(-before))
        np.testing.assert_allclose(learned_B, shifted_B, atol=1e-5)
    assert corrected.correction.offset_H[0] != 0
    for name, value in plain.net.state_dict().items():
        assert value.equal(corrected.net.state_dict()[name]), name
    # A version brings it, beside the net.
    brought = named_tensors(corrected.served)["correction_H"]
    assert brought.equal(torch.from_numpy(corrected.correction.offset_H))
    assert "correction_H" not in named_tensors(plain.served)


@pytest.mark.parametrize("half_life", [200, 0])
def test_a_killed_run_ends_with_the_same_correction_and_bytes(
    tmp_path: Path, half_life: int
) -> None:
    run = RunConfig(
        model=dataclasses.replace(news_model(), heads=HEADS),
        correction=CorrectionConfig(half_life=half_life),
        batch_size=24,
        publish_every_s=600,
        snapshot_every=1,
    )
    whole = train(run, Shopping(), unserved(tmp_path / "whole"))
    killed = unserved(tmp_path / "killed")
    train(run, Shopping(), killed, 9)
    again = train(run, Shopping(), killed)
    assert whole.learner.correction is not None
    assert again.learner.correction is not None
    assert all(whole.learner.correction.offset_H) or half_life == 0  # that begins with none
    assert again.learner.correction.state() == whole.learner.correction.state()
    for name, value in named_tensors(whole.learner.served).items():
        assert value.equal(named_tensors(again.learner.served)[name]), name


def test_the_program_of_a_folder_scores_with_the_correction_of_its_newest_version(
    tmp_path: Path,
) -> None:
    run = RunConfig(model=news_model(), correction=CorrectionConfig(half_life=200), batch_size=24)
    publication = Publication(tmp_path)
    trainer = Trainer(run, publication, program_cache=CACHE)
    trainer.fit(NewsSource(NEWS_CONFIG))
    assert trainer.learner.correction is not None
    assert abs(trainer.learner.correction.offset_H[0]) > 1e-3
    served = trainer.learner.served
    newest = publication.snapshot_path(publication.snapshots()[-1])
    dense = safetensors.torch.load_file(newest / TENSORS)
    assert dense["correction_H"].equal(torch.from_numpy(trainer.learner.correction.offset_H))
    check_program(served, publication.program, run.model, run.cpu)
    with torch.no_grad():
        served.get_buffer("correction_H").add_(0.5)
    check_program(served, publication.program, run.model, run.cpu)


def test_ranks_have_one_correction(tmp_path: Path) -> None:
    with rank_pool() as pool:
        (alone,) = pool.run(1, corrected_ranks)
        one, other = pool.run(2, corrected_ranks)
    assert one == other
    assert one == pytest.approx(alone, abs=1e-4)
    assert alone[0] != 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="bound is 0; give"):
        CorrectionConfig(bound=0)
    with pytest.raises(ValueError, match="half_life is -1; give"):
        CorrectionConfig(half_life=-1)
    with pytest.raises(ConfigurationError, match="correction"):
        check_supported(dataclasses.replace(CORRECTED, sync=LocalSGD(every=2)))


def test_several_heads_are_corrected_in_a_step() -> None:
    run = dataclasses.replace(CORRECTED, model=dataclasses.replace(CORRECTED.model, heads=HEADS))
    learner, rng = Learner(run), np.random.default_rng(1)
    for _ in range(5):
        batch = tasks_of(batch_of(rng, 30))
        before_BH = learner.score_heads(batch)
        np.testing.assert_allclose(learner.learn(batch), before_BH, atol=1e-6)
    assert learner.correction is not None
    assert len(set(learner.correction.offset_H.tolist())) == 2
