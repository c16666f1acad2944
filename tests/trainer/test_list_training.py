"""Models over lists: a step equals torch's EmbeddingBag's; killed and resumed, the same bytes.

Shapes: B events, N keys, rows of width d.
"""

import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from killing import train
from lists import DIM, FEATURES, KEYS, MODEL, source
from numpy.typing import NDArray
from snapshots import snapshot_files
from torch import Tensor, nn

from embertide.trainer.commands.inputs import check_model
from embertide.trainer.config import (
    CountersConfig,
    FeatureConfig,
    FeatureKeys,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SequenceConfig,
)
from embertide.trainer.data.bags import Bags
from embertide.trainer.data.base import Batch
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.learner import Learner
from embertide.trainer.publish.folder import Publication

RATE = 20.0  # a step that is seen
RUN = RunConfig(model=MODEL, batch_size=24, publish_every_s=60, snapshot_every=4)


def some_batch(path: Path, events: int = 64) -> Batch:
    (batch,) = source(path, events).batches(batch_size=1000)
    return batch


# --- a step ---------------------------------------------------------------------------------------


class Reference:
    """The same rows in torch's EmbeddingBags."""

    def __init__(self, learner: Learner) -> None:
        self.tables = [
            nn.EmbeddingBag.from_pretrained(
                torch.from_numpy(learner.rows.store.lookup(t, np.arange(KEYS))[0].copy()),
                freeze=False,
                mode="sum",
            )
            for t in (0, 1)
        ]
        self.net = copy.deepcopy(learner.net)

    def _pooled(self, table: int, bags: Bags, *, mean: bool) -> Tensor:
        weights = None if bags.weights_N is None else torch.from_numpy(bags.weights_N)
        sums_Bd: Tensor = self.tables[table](
            torch.from_numpy(bags.keys_N),
            torch.from_numpy(bags.offsets_B1[:-1].astype(np.int64)),
            per_sample_weights=weights,
        )
        sizes_B = torch.from_numpy(np.maximum(bags.sizes_B, 1)).float()
        return sums_Bd / sizes_B[:, None] if mean else sums_Bd

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """One step of SGD for the rows; the scores before."""
        item = Bags.of(batch.keys_BF[:, 0].copy(), np.ones(len(batch), np.int64))
        parts = [
            self._pooled(0, item, mean=False),
            self._pooled(0, batch.lists[1], mean=True),
            self._pooled(1, batch.lists[2], mean=False),
            self._pooled(1, batch.lists[3], mean=True),
        ]
        logits_B = self.net(torch.from_numpy(batch.dense_BD), torch.cat(parts, dim=1))
        label_B = torch.from_numpy(batch.label_B)
        nn.functional.binary_cross_entropy_with_logits(logits_B, label_B).backward()
        for table in self.tables:
            assert table.weight.grad is not None
            table.weight.data -= RATE * table.weight.grad
        scores_B: NDArray[np.float32] = torch.sigmoid(logits_B).detach().numpy()
        return scores_B


def test_a_step_over_lists_is_that_of_torchs_embedding_bags(tmp_path: Path) -> None:
    sgd = OptimizerConfig(name="sgd", sparse_learning_rate=RATE)
    learner = Learner(dataclasses.replace(RUN, optimizer=sgd))
    for table in (0, 1):
        learner.rows.store.ensure_rows(table, np.arange(KEYS))
    batch = some_batch(tmp_path / "in.parquet")
    assert all((batch.lists[f].sizes_B == 0).any() for f in (1, 2, 3))
    reference = Reference(learner)
    before = [table.weight.detach().clone() for table in reference.tables]
    wanted_B = reference.step(batch)
    np.testing.assert_allclose(learner.score(batch), wanted_B, rtol=1e-5)
    np.testing.assert_allclose(learner.learn(batch), wanted_B, rtol=1e-5)
    for table, were in zip((0, 1), before, strict=True):
        rows_Nd = learner.rows.store.lookup(table, np.arange(KEYS))[0]
        want_Nd = reference.tables[table].weight.detach().numpy()
        np.testing.assert_allclose(rows_Nd, want_Nd, rtol=1e-4, atol=1e-6)
        assert np.abs(want_Nd - were.numpy()).max() > 0.02


def test_lists_of_one_key_learn_as_one_key_does_beside_counters(tmp_path: Path) -> None:
    counted = dataclasses.replace(
        MODEL.tables[0], counters=CountersConfig(feature="item", half_lives_s=(600,))
    )
    one, listed = (
        dataclasses.replace(
            MODEL,
            tables=(counted, MODEL.tables[1]),
            features=(FEATURES[0], FeatureConfig(name="seen", table="item", keys=keys)),
        )
        for keys in ("one", "list")
    )
    batch = some_batch(tmp_path / "in.parquet")
    seen_B = (np.arange(len(batch)) % KEYS).astype(np.int64)
    keys_BF = np.column_stack((batch.keys_BF[:, 0], seen_B))
    plain = dataclasses.replace(batch, keys_BF=keys_BF, lists={})
    bags = Bags.of(seen_B, np.ones(len(batch), np.int64))
    both = [
        (Learner(RunConfig(model=one)), plain),
        (Learner(RunConfig(model=listed)), dataclasses.replace(plain, lists={1: bags})),
    ]
    for step in range(1, 5):
        scores = [learner.learn(part) for learner, part in both]
        np.testing.assert_array_equal(scores[0], scores[1])
        for learner, _ in both:
            learner.refresh(int(batch.ts_ms_B[-1]) + step)
    rows = [learner.rows.store.lookup(0, np.arange(KEYS))[0] for learner, _ in both]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert (rows[0][:, DIM:] != 0).any(), "events were counted"


def test_lists_say_what_labels_follow(tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, features=FEATURES[:1])
    rates = OptimizerConfig(sparse_learning_rate=0.3)
    with_lists, without = (
        Learner(RunConfig(model=each, optimizer=rates)) for each in (MODEL, model)
    )
    losses: dict[str, list[float]] = {"with": [], "without": []}
    batch = some_batch(tmp_path / "in.parquet")
    for _ in range(60):
        alone = dataclasses.replace(batch, keys_BF=batch.keys_BF[:, :1], lists={})
        for name, learner, part in (("with", with_lists, batch), ("without", without, alone)):
            score_B = np.clip(learner.learn(part), 1e-6, 1 - 1e-6)
            losses[name].append(-np.log(np.where(batch.label_B > 0, score_B, 1 - score_B)).mean())
    assert losses["with"][-1] < 0.2 < 0.4 < losses["without"][-1]


# --- killed and resumed ---------------------------------------------------------------------------


def test_a_killed_run_over_lists_ends_with_the_bytes_of_one_never_killed(tmp_path: Path) -> None:
    events = source(tmp_path / "in.parquet")
    whole = train(RUN, events, Publication(tmp_path / "whole"))
    (tmp_path / "pub").mkdir()
    shutil.copyfile(whole.publication.program, tmp_path / "pub" / "program.pt2")
    publication = Publication(tmp_path / "pub")
    for batches in (9, 7):  # what is resumed lies within a batch
        train(RUN, events, publication, batches)
    resumed = train(RUN, events, publication)
    assert resumed.state.number == whole.state.number > 5
    files = [
        snapshot_files(each.snapshot_path(each.snapshots()[-1]))
        for each in (publication, whole.publication)
    ]
    assert files[0] == files[1]
    assert resumed.state.prequential.daily_summaries() == whole.state.prequential.daily_summaries()


# --- refusals -------------------------------------------------------------------------------------


def with_keys(feature: int, keys: FeatureKeys) -> ModelConfig:
    features = list(FEATURES)
    features[feature] = dataclasses.replace(FEATURES[feature], keys=keys)
    return dataclasses.replace(MODEL, features=tuple(features))


@pytest.mark.parametrize(
    ("feature", "keys", "message"),
    [
        (0, "list", "feature 'item' has keys='list'; the events have 'one'"),
        (1, "one", "feature 'seen' has keys='one'; the events have 'list'"),
        (2, "list", "feature 'tags' has keys='list'; the events have 'weighed'"),
    ],
)
def test_a_model_of_other_lists_than_the_events_is_refused(
    feature: int, keys: FeatureKeys, message: str, tmp_path: Path
) -> None:
    events = source(tmp_path / "in.parquet", 20)
    check_model(MODEL, events)
    with pytest.raises(ConfigurationError, match=message):
        check_model(with_keys(feature, keys), events)


def test_a_learner_refuses_weights_that_the_model_does_not_know(tmp_path: Path) -> None:
    learner = Learner(dataclasses.replace(RUN, model=with_keys(2, "list")))
    with pytest.raises(ValueError, match="'tags' has keys='list', the events have 'weighed'"):
        learner.learn(some_batch(tmp_path / "in.parquet", 20))


def test_features_that_cannot_be_are_refused() -> None:
    many: Any = "many"
    with pytest.raises(ValueError, match="keys is 'many'; use one of"):
        FeatureConfig(name="f", table="t", keys=many)
    for user, item in (("item", "seen"), ("seen", "item")):
        sequence = SequenceConfig(name="hist", user=user, item=item)
        with pytest.raises(ValueError, match="feature 'seen' has keys='list'; user and item"):
            dataclasses.replace(MODEL, sequences=(sequence,), net="history")
