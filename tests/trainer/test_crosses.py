"""Crossed features: one key for several, behind the events' own; counted, learned and resumed."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killing import train, unserved

from embertide import _store
from embertide.trainer.config import (
    CountersConfig,
    FeatureConfig,
    ModelConfig,
    RunConfig,
    TableConfig,
)
from embertide.trainer.data.crosses import CrossedSource, cross_keys, crossed
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.history import with_columns
from embertide.trainer.presets import news_history, news_model
from embertide.trainer.publish.snapshot import read_manifest

NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=60, users=40, new_items_per_hour=5))


def with_cross(model: ModelConfig, *crossed: str, **feature: Any) -> ModelConfig:
    """A model that crosses features, and counts how often they come together."""
    dim = model.tables[0].dim
    counters = CountersConfig(feature="both", half_lives_s=(600, 3600))
    table = TableConfig(name="both", dim=dim, chunks=dim // 4, counters=counters)
    both = FeatureConfig(name="both", table="both", crossed=crossed, **feature)
    return dataclasses.replace(
        model, tables=(*model.tables, table), features=(*model.features, both), bottom_mlp=(8,)
    )


MODEL = with_cross(news_model(), "prev", "cand")


def test_a_key_of_several_is_hashed_one_by_one_by_the_stores_hash() -> None:
    keys_BC = np.array([[1, 2, 3], [-1, -(1 << 63), 7], [2, 1, 3]])

    def signed(number: int) -> int:
        return number - (1 << 64) if number >= 1 << 63 else number

    def by_hand(keys: list[int]) -> int:
        hashed = 0
        for key in keys:
            hashed = signed(_store.hash_key(hashed ^ key))
        return hashed

    wanted = [by_hand(keys.tolist()) for keys in keys_BC]
    assert cross_keys(keys_BC).tolist() == wanted
    assert len(set(wanted)) == 3


def test_a_cross_stands_behind_the_features_and_before_the_sequences() -> None:
    model = with_cross(news_history(), "referrer", "cand", "hour")
    names = [feature.name for feature in model.features]
    source = with_columns(NEWS, model)
    assert [each.name for each in source.schema.features] == [each.name for each in model.columns]
    (plain,) = NEWS.batches(batch_size=10_000)
    (batch,) = source.batches(batch_size=10_000)
    np.testing.assert_array_equal(batch.keys_BF[:, :10], plain.keys_BF)
    columns = [names.index(name) for name in ("referrer", "cand", "hour")]
    np.testing.assert_array_equal(batch.keys_BF[:, 10], cross_keys(plain.keys_BF[:, columns]))
    assert len(np.unique(batch.keys_BF[:, 10])) > len(np.unique(plain.keys_BF[:, columns[1]]))
    (history,) = with_columns(NEWS, news_history()).batches(batch_size=10_000)
    np.testing.assert_array_equal(batch.keys_BF[:, 11:], history.keys_BF[:, 10:])


def test_a_source_of_a_model_without_crosses_is_itself() -> None:
    assert crossed(NEWS, news_model()) is NEWS


def test_events_that_lack_a_feature_that_is_crossed_are_refused() -> None:
    model = ModelConfig(
        name="m",
        tables=(TableConfig(name="t"),),
        features=(
            FeatureConfig(name="cand", table="t"),
            FeatureConfig(name="who", table="t"),
            FeatureConfig(name="both", table="t", crossed=("cand", "who")),
        ),
    )
    with pytest.raises(ValueError, match="'both' crosses 'who'; the events have user, prev, cand"):
        CrossedSource(NEWS, model)


WRONG: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "one": (("cand",), {}),
    "unknown": (("cand", "who"), {}),
    "itself": (("cand", "both"), {}),
    "of a list": (("cand", "user"), {"keys": "list"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_cross_of_what_is_not_there_is_refused(name: str) -> None:
    crossed, feature = WRONG[name]
    with pytest.raises(ValueError, match=r"'both' crosses \(.*: give two or more of features"):
        with_cross(news_model(), *crossed, **feature)


def test_a_cross_before_the_features_of_events_is_refused() -> None:
    features = (MODEL.features[-1], *MODEL.features[:-1])
    with pytest.raises(ValueError, match="behind all that cross none"):
        dataclasses.replace(MODEL, features=features)


def test_a_killed_run_with_crosses_ends_with_the_rows_of_one_never_killed(tmp_path: Path) -> None:
    run = RunConfig(model=MODEL, batch_size=32, publish_every_s=600, snapshot_every=2)
    whole = train(run, NEWS, unserved(tmp_path / "whole"))
    publication = unserved(tmp_path / "killed")
    train(run, NEWS, publication, 9)
    assert len(publication.snapshots()) > 0
    resumed = train(run, NEWS, publication)
    rows = [list(each.state.rows.buckets()) for each in (whole, resumed)]
    (both,) = (records for table, _, records in rows[0] if table.name == "both")
    assert len(both) > 10_000
    assert [records for *_, records in rows[1]] == [records for *_, records in rows[0]]
    newest = publication.snapshot_path(publication.snapshots()[-1])
    names = [each["name"] for each in read_manifest(newest)["features"]]
    assert names[-1] == "both"
