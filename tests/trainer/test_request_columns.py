"""Columns that clients make: snapshots say bins, which a run keeps, and features of text."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from killing import CACHE, train, unserved
from serving import flip_byte
from shop import RUN, Shop

from embertide.server.adapters.schema import schema_of
from embertide.trainer.data.base import EventSchema, FeatureColumn
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.embedding.store import store_table
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.request_columns import Bins, RequestColumns, check_kept
from embertide.trainer.publish.snapshot import (
    CONFIG,
    SnapshotError,
    SnapshotInfo,
    read_columns,
    read_manifest,
    schema_id,
)
from embertide.trainer.run.loop import Trainer

EDGES = (0.5, 2.25, 9.1)
SHOP = Shop(600, EDGES)
BINS = (Bins(feature="it", dense=0, edges=EDGES),)
COLUMNS = RequestColumns(bins=BINS)


def newest(publication: Publication) -> Path:
    return publication.snapshot_path(publication.snapshots()[-1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Publication:
    publication = unserved(tmp_path_factory.mktemp("bins") / "pub")
    train(RUN, FirstEvents(SHOP, 400), publication)
    return publication


@pytest.fixture
def begun(trained: Publication, tmp_path: Path) -> Publication:
    """A run of 400 events, to go on from."""
    shutil.copytree(trained.path, tmp_path / "pub")
    return Publication(tmp_path / "pub")


def test_a_snapshot_says_them_to_who_serves_it(trained: Publication) -> None:
    snapshot = newest(trained)
    roles = [part["role"] for part in read_manifest(snapshot)["dense"]]
    assert roles == ["program", "tensors", "transforms", "config"]
    assert read_columns(snapshot) == COLUMNS == RequestColumns.of(SHOP.schema)
    told = json.loads(schema_of(snapshot))
    assert told["bins"] == [{"feature": "it", "dense": 0, "edges": [*EDGES]}]
    assert told["dense"]["names"][0] == "price"
    # Clients of older builds read an entry of `features` field by field.
    assert {name for each in told["features"] for name in each} == {"name", "dim", "pooling"}


def test_nodes_that_run_take_versions_with_them() -> None:
    tables = [store_table(RUN.model.tables[0], 0, 1)]
    info = SnapshotInfo.of(RUN.model, lineage=1, version=1, watermark_ms=0)
    assert schema_id(dataclasses.replace(info, columns=COLUMNS), tables) == schema_id(info, tables)


def test_a_run_goes_on_with_the_same(begun: Publication) -> None:
    train(RUN, SHOP, begun)
    assert read_columns(newest(begun)) == COLUMNS


def test_a_run_that_told_none_tells_them_from_then_on(tmp_path: Path) -> None:
    publication = unserved(tmp_path / "pub")
    train(RUN, FirstEvents(Shop(600), 400), publication)
    assert read_columns(newest(publication)) == RequestColumns()
    assert "bins" not in json.loads(schema_of(newest(publication)))
    train(RUN, SHOP, publication)
    assert read_columns(newest(publication)) == COLUMNS


OTHERS = {
    (0.5, 2.25, 9.2): r"feature 'it': its edges are \(0.5, 2.25, 9.2\); its rows were learned",
    (): "feature 'it': its edges are none; its rows were learned",
    tuple(map(float, range(20))): r"are \(0.0, 1.0, ..., 19.0\), 20 of them; its rows",
}


@pytest.mark.parametrize("edges", OTHERS)
def test_a_run_does_not_go_on_with_others(begun: Publication, edges: tuple[float, ...]) -> None:
    """The rows of a bin would be read for other amounts, and clients ask by the first bins."""
    trainer = Trainer(RUN, begun, program_cache=CACHE)
    with pytest.raises(ConfigurationError, match=OTHERS[edges]) as refusal:
        trainer.fit(Shop(600, edges))
    assert "by (0.5, 2.25, 9.1)" in str(refusal.value)
    assert "of another name, and go on with --change-model" in str(refusal.value)


def test_other_bins_may_come_under_another_name() -> None:
    column = FeatureColumn(name="It2", column="price", transform="bin", edges=(1.0,))
    schema = EventSchema(features=(column,), label="y", dense=("age", "price"), ts="ts")
    check_kept(BINS, schema)
    assert RequestColumns.of(schema).bins == (Bins(feature="it2", dense=1, edges=(1.0,)),)


def test_features_of_text_are_told_as_such(tmp_path: Path) -> None:
    """So a client hashes what is text; a run's file by `init` says the kind of each feature."""
    shop = Shop(600, EDGES)
    first, *others = shop.schema.features
    named = dataclasses.replace(first, kind="string")
    folded = dataclasses.replace(named, rows=10)
    assert RequestColumns.of(dataclasses.replace(shop.schema, features=(folded,))).texts == ()
    shop.schema = dataclasses.replace(shop.schema, features=(named, *others))
    publication = unserved(tmp_path / "pub")
    train(RUN, FirstEvents(shop, 400), publication)
    found = read_columns(newest(publication))
    assert found == RequestColumns(bins=BINS, texts=(first.name.lower(),))
    told = json.loads(schema_of(newest(publication)))
    assert told["texts"] == [first.name.lower()]
    assert {name for each in told["features"] for name in each} == {"name", "dim", "pooling"}


def test_bins_that_are_not_what_was_written_are_not_told(begun: Publication) -> None:
    flip_byte(newest(begun) / CONFIG, -20)
    with pytest.raises(SnapshotError, match=r"config\.json is not what manifest\.json says of it"):
        read_columns(newest(begun))
    with pytest.raises(ValueError, match=r"config\.json is not what manifest\.json says of it"):
        schema_of(newest(begun))
    train(RUN, SHOP, begun)
    assert read_columns(newest(begun)) == COLUMNS
