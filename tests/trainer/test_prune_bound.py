"""Pruning within a bound: the loss that is measured, the ratio that follows, and killed runs."""

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killing import CACHE, train, unserved
from snapshots import newest_files
from typer.testing import CliRunner

from embertide import _store
from embertide.trainer.__main__ import app
from embertide.trainer.commands.result import of_pruning
from embertide.trainer.config import PruneConfig, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.history import with_columns
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.errors import ConfigurationError, TrainerError
from embertide.trainer.lab.prune_search import pruned_at
from embertide.trainer.model import prune_bound
from embertide.trainer.model.learner import Learner
from embertide.trainer.model.prune_bound import BACK, GAIN, LEAST_RATIO, MOST_RATIO, PruneBound
from embertide.trainer.model.unpruned import check_alone
from embertide.trainer.presets import news_counters, news_model
from embertide.trainer.run.fork import Fork
from embertide.trainer.run.loop import Trainer

PRUNE = PruneConfig(
    within=0.3, measure_events=200, ratio=4.0, half_life=20, first=(30,), every=10, least=5
)
RUN = RunConfig(
    model=news_counters(), prune=PRUNE, batch_size=64, publish_every_s=600, snapshot_every=4
)
NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=1200, users=6000, new_items_per_hour=200))


def scores(random: np.random.Generator, events: int, lost: float) -> list[Any]:
    """Labels, and scores of two models, of which the second orders fewer pairs right."""
    label_B = (random.random(events) < 0.3).astype(np.float32)
    noise_B = random.normal(size=events)
    both = [1 / (1 + np.exp(-(apart * label_B + noise_B))) for apart in (1.0, 1.0 - lost)]
    return [label_B, *(each.astype(np.float32) for each in both)]


def fed(bound: PruneBound, pieces: int, lost: float, seed: int = 1) -> PruneBound:
    random = np.random.default_rng(seed)
    for _ in range(pieces):
        assert bound.add(*scores(random, 2000, lost))
    return bound


def bound_of(within: float = 0.01, **settings: Any) -> PruneBound:
    return PruneBound(PruneConfig(within=within, measure_events=2000, **settings))


# --- what is measured -----------------------------------------------------------------------------


def test_the_loss_is_that_of_the_scores_with_an_error_that_covers_it() -> None:
    def true_auc(apart: float) -> float:
        return 0.5 * (1 + math.erf(apart / 2))

    lost = true_auc(1.0) - true_auc(0.9)
    off = []
    for seed in range(30):
        found = fed(bound_of(), 60, 0.1, seed).figures()
        off.append((found["loss"] - lost) / found["error"])
    assert abs(np.mean(off)) < 0.6  # 3 standard errors of a mean of 30
    assert 0.7 < np.std(off) < 1.4


def test_the_newest_pieces_count_most() -> None:
    bound = fed(fed(bound_of(), 60, 0.3), 30, 0.0, seed=2)
    before = fed(bound_of(), 60, 0.3).loss
    assert bound.loss < 0.2 * before
    assert bound.figures()["mean_loss"] > 0.5 * before


def test_nothing_is_said_of_too_few_pieces() -> None:
    found = fed(bound_of(), prune_bound.MIN_PIECES - 1, 0.3)
    assert (found.figures()["loss"], found.figures()["is_held"]) == (None, False)
    assert found.ratio == 2.0
    assert math.isnan(found.loss)


def test_a_piece_of_rare_labels_waits_for_enough_of_them() -> None:
    bound = bound_of()
    random = np.random.default_rng(3)
    label_B = np.zeros(1000, np.float32)
    label_B[:2] = 1
    for _ in range(prune_bound.MIN_OF_A_LABEL // 2 - 1):
        score_B = random.random(1000).astype(np.float32)
        assert not bound.add(label_B, score_B, score_B)
    assert bound.add(label_B, score_B, score_B)


# --- what follows ---------------------------------------------------------------------------------


def test_more_is_pruned_while_there_is_room_and_less_once_there_is_none() -> None:
    bound = bound_of(ratio=10.0)
    ratios = []
    random = np.random.default_rng(4)
    for lost in [0.0] * 40 + [0.5] * 40:
        bound.add(*scores(random, 2000, lost))
        ratios.append(bound.ratio)
    assert ratios[39] > 12
    assert ratios[-1] < ratios[45]
    steps = np.diff(np.log(ratios))
    assert 0.5 * GAIN < steps.max() <= GAIN * 1.0001
    assert -BACK * 1.0001 <= steps.min() < -2 * GAIN


def test_a_loss_within_its_error_of_the_bound_prunes_less() -> None:
    bound = fed(bound_of(), 40, 0.1)
    loss, error = bound.loss, bound.error
    for within, more in ((1.5 * loss + 2 * error, True), (loss + 0.5 * error, False)):
        one = fed(bound_of(within=within), 39, 0.1)
        before = one.ratio
        one.add(*scores(np.random.default_rng(1), 2000, 0.1))
        assert (one.ratio > before) == more


def test_the_ratio_has_ends() -> None:
    assert fed(bound_of(ratio=1.0, within=1e-5), 60, 0.9).ratio == LEAST_RATIO
    assert fed(bound_of(ratio=990.0, within=0.4), 60, 0.0).ratio == MOST_RATIO


def test_a_broken_bound_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "embertide")
    bound = fed(bound_of(), 20, 0.5)
    assert bound.exceeds
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "0.01 is the bound: more rows are kept" in record.message
    fed(bound, 80, 0.0)
    assert not bound.exceeds
    assert [each.levelno for each in caplog.records] == [logging.WARNING, logging.INFO]


def test_a_bound_goes_on_from_what_another_said() -> None:
    random = np.random.default_rng(6)
    batches = [scores(random, 700, 0.2) for _ in range(60)]
    whole = bound_of()
    for each in batches:
        whole.add(*each)
    before, after = bound_of(), bound_of()
    for each in batches[:31]:
        before.add(*each)
    figures, arrays = before.state()
    after.restore(json.loads(json.dumps(figures)), arrays)
    for each in batches[31:]:
        after.add(*each)
    assert after.figures() == whole.figures()
    assert after.state()[0] == whole.state()[0]


# --- the rows of all keys -------------------------------------------------------------------------


def learned(learner: Learner, batches: int = 100) -> Learner:
    """Learn some batches, with the ends of versions between them."""
    source = with_columns(NEWS, learner.run.model)
    found = source.batches(batch_size=learner.run.batch_size)
    for number, batch in zip(range(batches), learner.warm_up(found), strict=False):
        learner.learn(batch)
        if number % 10 == 9:
            learner.refresh(int(batch.ts_ms_B[-1]))
            learner.rows.forget_changes()
    return learner


def contents(rows: EmbeddingStore) -> list[bytes]:
    return [rows.store.export_bucket(t, bucket) for t, _, bucket in rows.places()]


def net_of(learner: Learner) -> list[bytes]:
    return [each.numpy().tobytes() for each in learner.net.state_dict().values()]


@pytest.fixture(scope="module")
def bounded() -> Learner:
    return learned(Learner(RUN))


def test_net_and_unpruned_rows_are_those_of_a_run_that_does_not_prune(bounded: Learner) -> None:
    plain = learned(Learner(dataclasses.replace(RUN, prune=None)))
    assert bounded.unpruned is not None
    assert contents(bounded.unpruned.rows) == contents(plain.rows)
    assert net_of(bounded) == net_of(plain)
    figures = bounded.unpruned.figures()
    assert figures["unpruned_rows"] == plain.rows.stats()["rows"] > bounded.rows.stats()["rows"]
    assert (
        figures["unpruned_bytes"]
        == plain.rows.stats()["ddr_payload_bytes"] + (plain.rows.stats()["index_bytes"])
    )
    assert figures["pieces"] >= 20


def test_rows_that_are_served_are_the_unpruned_ones_bit_for_bit(bounded: Learner) -> None:
    assert bounded.unpruned is not None
    assert bounded.rows.pruned is not None
    assert bounded.rows.passes > 5
    assert bounded.unpruned.brought > 100
    there = lacking = 0
    for t, table, bucket in bounded.rows.places():
        if t >= len(RUN.model.tables):
            continue  # histories
        mine = bounded.rows.store.export_bucket(t, bucket)
        records, states = bounded.unpruned.rows.store.export_rows(
            t, _store.record_keys(table.layout, mine)
        )
        if table.layout.chunks == 1:
            assert mine == records
        keys_N, live_N, _, values_ND = _store.decode_records(table.layout, mine)
        for i, live in enumerate(live_N.tolist()):
            held = _store.decode_records(table.layout, records)[3][i]
            for c in range(table.layout.chunks):
                part = slice(c * table.layout.chunk_dim, (c + 1) * table.layout.chunk_dim)
                if live >> c & 1:
                    assert (values_ND[i][part] == held[part]).all()
                else:
                    lacking += 1
        _, own = bounded.rows.store.export_rows(t, keys_N)
        learned_N = live_N & 1 == 1  # what is lacking learns nothing
        assert (own[0][learned_N] == states[0][learned_N]).all()
        there += len(keys_N)
    assert there == bounded.rows.stats()["rows"] > 300
    assert lacking > 0


def test_a_row_that_loses_chunks_in_the_step_that_makes_it_is_brought_without_them() -> None:
    prune = dataclasses.replace(PRUNE, first=(), every=1, least=1, counts_worth=0.0001)
    learner = learned(Learner(dataclasses.replace(RUN, prune=prune)))
    assert learner.rows.pruned is not None
    assert learner.rows.passes > 50
    assert learner.unpruned is not None
    assert learner.unpruned.brought > 100


def test_scores_are_those_of_the_rows_that_are_served() -> None:
    learner = learned(Learner(RUN))
    batch = next(with_columns(NEWS, RUN.model).batches(batch_size=64))
    served, unpruned = learner.score(batch), learner.score_unpruned(batch)
    assert (served != unpruned).any()
    assert (learner.learn(batch) == served).all()


def test_the_run_prunes_by_the_ratio_that_the_bound_leads_to(bounded: Learner) -> None:
    assert bounded.unpruned is not None
    assert bounded.rows.prune_ratio == bounded.unpruned.bound.ratio > 4.0


def test_rows_of_another_type_follow_and_unpruned_ones_are_of_fp32(tmp_path: Path) -> None:
    model = news_model()
    tables = tuple(dataclasses.replace(each, dtype="fp16") for each in model.tables)
    run = dataclasses.replace(
        RUN,
        model=dataclasses.replace(model, tables=tables),
        ddr_budget_bytes=1 << 20,
        ssd_budget_bytes=8 << 20,
        ssd_directory=str(tmp_path),
    )
    learner = learned(Learner(run))
    assert learner.unpruned is not None
    assert {each.layout.dtype for each in learner.unpruned.rows.tables} == {"fp32"}
    assert (tmp_path / "unpruned").is_dir()
    assert learner.unpruned.brought > 100
    records = b"".join(learner.rows.store.export_bucket(0, b) for b in range(1 << 4))
    keys = _store.record_keys(learner.rows.tables[0].layout, records).view(np.int64)
    assert len(keys) > 100
    mine, _, _ = learner.rows.store.lookup(0, keys)
    whole, _, _ = learner.unpruned.rows.store.lookup(0, keys)
    assert (mine == whole.astype(np.float16)).all()


def test_ranks_are_refused_with_what_to_do() -> None:
    check_alone(1)
    with pytest.raises(ConfigurationError, match="there are 2: leave --nproc out, or find a ratio"):
        check_alone(2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"within": -0.1}, "within is -0.1; give a loss of AUC, as 0.001"),
        ({"within": 0.7}, "within is 0.7"),
        ({"within": 0.001, "bytes": 1000}, "finds the bytes by itself: give one of them"),
        ({"within": 0.001, "measure_events": 0}, "measure_events is 0"),
        ({}, "give one of them, above 0"),
    ],
)
def test_a_bound_that_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PruneConfig(**wrong)


def test_a_search_for_a_ratio_has_no_bound() -> None:
    found = pruned_at(RUN, 7.0).prune
    assert found is not None
    assert (found.ratio, found.within, found.every) == (7.0, 0.0, PRUNE.every)


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = Trainer(RUN, unserved(tmp_path_factory.mktemp("whole") / "pub"))
    trainer.fit(NEWS)
    return trainer


@pytest.mark.parametrize("full_every", [1, 4])
@pytest.mark.parametrize("batches", [29, 90])
def test_a_run_killed_between_batches_ends_as_one_never_killed(
    whole: Trainer, tmp_path: Path, batches: int, full_every: int
) -> None:
    publication = unserved(tmp_path / "pub")
    run = dataclasses.replace(RUN, full_snapshot_every=full_every, snapshot_every=1)
    train(run, NEWS, publication, batches)
    trainer = Trainer(run, publication, program_cache=CACHE)
    trainer.fit(NEWS)
    assert newest_files(publication) == newest_files(whole.publication)
    one, other = trainer.learner.unpruned, whole.learner.unpruned
    assert one is not None
    assert other is not None
    assert one.bound.pieces > 10
    assert one.bound.state()[0] == other.bound.state()[0]
    assert trainer.figures()["pruning"]["within"]["loss"] == other.bound.loss
    assert contents(one.rows) == contents(other.rows)


def test_a_checkpoint_without_unpruned_rows_is_refused(tmp_path: Path) -> None:
    publication = unserved(tmp_path / "pub")
    plain = dataclasses.replace(PRUNE, within=0.0)
    train(dataclasses.replace(RUN, prune=plain), NEWS, publication, 30)
    with pytest.raises(TrainerError, match="has no unpruned rows"):
        Trainer(RUN, publication, allow_change=["prune.within"])


def test_a_fork_is_refused_as_pruned_rows_are_lost(whole: Trainer, tmp_path: Path) -> None:
    fork = Fork(publication=whole.publication, keep_place=True)
    with pytest.raises(ConfigurationError, match="begin without --fork"):
        Trainer(RUN, unserved(tmp_path / "pub"), fork=fork)


def test_the_command_bounds_and_says_what_came_of_it(tmp_path: Path) -> None:
    path, log = tmp_path / "pub", tmp_path / "log.jsonl"
    arguments = ["--demo", "--hours", "3", "--cache", str(CACHE), "--prune-within", "0.002"]
    more = ["--set", "prune.measure_events=2000", "--log", str(log)]
    done = CliRunner().invoke(app, ["train", str(path), *arguments, *more])
    assert done.exit_code == 0, done.output
    assert "times fewer bytes than unpruned" in done.output
    result = json.loads(log.read_text().splitlines()[-1])["result"]
    within = result["pruning"]["within"]
    assert within["bound"] == 0.002
    assert within["pieces"] >= 5
    assert 0 < within["error"] < 0.1
    assert within["unpruned_bytes"] > within["bytes"] > 0
    progress = [
        json.loads(line)["progress"]
        for line in log.read_text().splitlines()
        if "progress" in json.loads(line)
    ]
    assert progress[-1]["pruning"]["bound"] == 0.002


def test_options_that_make_no_bound_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", str(tmp_path), "--demo", "--prune-within", "3"])
    assert done.exit_code != 0
    assert "--prune-within 3.0: prune: within is 3.0" in done.output


FIGURES: dict[str, Any] = {
    **{"bound": 0.001, "loss": 0.0007, "error": 0.0002, "factor": 9.96, "ratio": 11.0},
    **{"is_held": True, "exceeds": False, "unpruned_bytes": 99},
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "loss of AUC 0.00070 ± 0.00020, bound 0.001"),
        ({"is_held": False}, "loss of AUC 0.00070 ± 0.00020, at its bound 0.001"),
        (
            {"is_held": False, "exceeds": True, "loss": 0.002},
            "loss of AUC 0.00200 ± 0.00020, NOT within 0.001",
        ),
        ({"loss": None}, "10.0 times fewer bytes than unpruned; its loss of AUC is not known"),
    ],
)
def test_the_result_says_whether_the_bound_holds(changed: dict[str, Any], said: str) -> None:
    assert said in next(iter(of_pruning(FIGURES | changed)))
