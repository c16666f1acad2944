"""A run that begins with what another one has learned, its model changed or not."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from killing import CACHE, Killed, train, unserved

from bench.criteo import criteo
from embertide.trainer.config import (
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    PruneConfig,
    PublishBudget,
    RunConfig,
    TableConfig,
)
from embertide.trainer.data.base import Batch, DerivedSource, EventSource
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.history import extend
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.presets import PRESETS, news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.rollback import RollbackError, roll_back
from embertide.trainer.publish.snapshot import read_manifest
from embertide.trainer.publish.snapshot_rows import read_buckets
from embertide.trainer.run.checkpoint.checkpoint import CheckpointError
from embertide.trainer.run.checkpoint.settings import parsed, settings
from embertide.trainer.run.fork import Fork
from embertide.trainer.run.loop import Trainer

NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))
HALF = NEWS.total_events() // 2
RUN = RunConfig(
    model=news_model(), batch_size=24, publish_every_s=600, snapshot_every=4, keep_snapshots=50
)


class Chosen(DerivedSource):
    """Events with some of their features."""

    def __init__(self, source: EventSource, model: ModelConfig) -> None:
        names = [feature.name for feature in model.features]
        features = source.schema.features
        self._kept = [f for f, feature in enumerate(features) if feature.name in names]
        schema = dataclasses.replace(source.schema, features=tuple(features[f] for f in self._kept))
        super().__init__(source, schema)

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        for batch in self._source.batches(batch_size=batch_size, start=start):
            yield self.chosen(batch)

    def chosen(self, batch: Batch) -> Batch:
        return dataclasses.replace(batch, keys_BF=batch.keys_BF[:, self._kept])


def trained(run: RunConfig, path: Path, source: EventSource | None = None) -> Trainer:
    """A run over the first events."""
    trainer = Trainer(run, unserved(path))
    trainer.fit(FirstEvents(source or NEWS, HALF))
    return trainer


def forked(run: RunConfig, path: Path, origin: Trainer, *, keep_place: bool = True) -> Trainer:
    """A run that has begun with another's state, and has read no event of its own."""
    return Trainer(
        run,
        unserved(path),
        fork=Fork(publication=origin.publication, keep_place=keep_place),
    )


def contents(trainer: Trainer) -> list[bytes]:
    """Every row, and every tensor of the net."""
    rows = [records for _, _, records in trainer.state.rows.buckets()]
    net = trainer.learner.net.state_dict()
    return [*rows, *(net[name].numpy().tobytes() for name in sorted(net))]


def next_batch(run: RunConfig, trainer: Trainer) -> Batch:
    """The events after those that a run has learned, with the columns that it makes."""
    batch = next(NEWS.batches(batch_size=64, start=trainer.state.offset))
    return extend(trainer.state.histories, batch)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return trained(RUN, tmp_path_factory.mktemp("origin") / "pub")


def without(model: ModelConfig, *names: str) -> ModelConfig:
    """A model without some of its features, and without the tables of those alone."""
    features = tuple(each for each in model.features if each.name not in names)
    used = {feature.table for feature in features}
    tables = tuple(table for table in model.tables if table.name in used)
    return dataclasses.replace(model, features=features, tables=tables)


@pytest.mark.parametrize("preset", ["news", "news-counters", "news-history"])
def test_a_fork_learns_what_its_origin_would_have_learned(preset: str, tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, model=PRESETS[preset]())
    origin = trained(run, tmp_path / "a")
    before = contents(origin)
    fork = forked(run, tmp_path / "b", origin)
    assert contents(fork) == before
    assert fork.forked is not None
    assert fork.forked.fresh == fork.forked.fresh_tables == fork.forked.dropped_tables == ()
    assert fork.forked.renewed_units == 0
    fork.fit(NEWS)
    origin.fit(NEWS)
    assert fork.state.events == origin.state.events == NEWS.total_events()
    assert fork.state.prequential.hourly() == origin.state.prequential.hourly()
    if preset == "news":  # counts are as of a version, and those of the two end at other times
        assert contents(fork) == contents(origin)


def test_what_it_begins_with_is_its_first_version(origin: Trainer, tmp_path: Path) -> None:
    fork = forked(RUN, tmp_path / "b", origin)
    assert fork.publication.versions() == []
    fork.fit(FirstEvents(NEWS, HALF + 30))
    first = fork.publication.snapshots()[0]
    assert fork.forked is not None
    assert first.number == fork.state.number_at(fork.forked.watermark_ms or 0)


def test_a_fork_that_was_stopped_goes_on_by_itself(origin: Trainer, tmp_path: Path) -> None:
    fork = forked(RUN, tmp_path / "b", origin)
    fork.fit(FirstEvents(NEWS, HALF + 200))
    learned = contents(fork)
    again = forked(RUN, tmp_path / "b", origin)
    assert again.forked is None
    assert contents(again) == learned
    assert again.state.events == fork.state.events > origin.state.events


def test_a_feature_that_comes_leaves_scores_nearly_as_they_were(tmp_path: Path) -> None:
    small = dataclasses.replace(RUN, model=without(news_model(), "prev", "hour_of_day"))
    events = Chosen(NEWS, small.model)
    origin = trained(small, tmp_path / "a", events)
    fork = forked(RUN, tmp_path / "b", origin)
    assert fork.forked is not None
    assert fork.forked.fresh == ()
    assert fork.forked.grown
    assert fork.forked.renewed_units == (256 + 64) // 4
    batch = next_batch(RUN, origin)
    np.testing.assert_allclose(
        fork.learner.score(batch),
        origin.learner.score(events.chosen(batch)),
        atol=0.02,  # some units of the net start fresh
    )
    fork.fit(NEWS)
    assert fork.state.events == NEWS.total_events()
    assert fork.publication.snapshots()


def test_a_feature_that_goes_takes_its_table_along(origin: Trainer, tmp_path: Path) -> None:
    model = without(news_model(), "user")
    fork = forked(dataclasses.replace(RUN, model=model), tmp_path / "b", origin)
    assert fork.forked is not None
    assert fork.forked.dropped_tables == ("user",)
    assert fork.forked.renewed_units == 0
    assert set(fork.forked.rows) == {table.name for table in model.tables}


def test_rows_may_become_wider_and_of_another_dtype(origin: Trainer, tmp_path: Path) -> None:
    tables = tuple(
        dataclasses.replace(table, dim=2 * table.dim, dtype="fp16", bucket_bits=2)
        for table in news_model().tables
    )
    model = dataclasses.replace(news_model(), tables=tables)
    fork = forked(dataclasses.replace(RUN, model=model), tmp_path / "b", origin)
    assert fork.forked is not None
    assert sum(fork.forked.rows.values()) == origin.state.rows.stats()["rows"]
    batch = next_batch(RUN, origin)
    difference_B = fork.learner.score(batch) - origin.learner.score(batch)
    assert np.abs(difference_B).max() < 0.02  # new values are small, and those of the net are new
    fork.fit(FirstEvents(NEWS, HALF + 200))
    fork.state.rows.store.check_integrity()


def test_another_net_or_optimizer_begins_with_the_rows(origin: Trainer, tmp_path: Path) -> None:
    model = dataclasses.replace(news_model(), net="dcn_v2")
    run = dataclasses.replace(RUN, model=model, optimizer=OptimizerConfig(name="adagrad"))
    fork = forked(run, tmp_path / "b", origin)
    assert fork.forked is not None
    assert fork.forked.fresh
    theirs = [records for *_, records in origin.state.rows.buckets()]
    assert [records for *_, records in fork.state.rows.buckets()] == theirs
    fork.fit(FirstEvents(NEWS, HALF + 100))


def test_a_warm_start_reads_from_the_beginning(origin: Trainer, tmp_path: Path) -> None:
    warm = forked(RUN, tmp_path / "b", origin, keep_place=False)
    assert warm.state.offset == warm.state.events == 0
    assert contents(warm) == contents(origin)
    warm.fit(FirstEvents(NEWS, 100))
    assert json.loads(warm.publication.log.read_text().splitlines()[0])["number"] == 1
    assert warm.state.events == 100


def test_rows_that_a_budget_held_back_come_along(tmp_path: Path) -> None:
    budget = PublishBudget(bytes_per_s=1, image_bytes=64 << 20)
    run = dataclasses.replace(RUN, publish_budget=budget)
    publication = Publication(tmp_path / "a")
    publication.path.mkdir()
    publication.program.touch()
    train(run, NEWS, publication, 22)
    resumed = Trainer(run, publication, program_cache=CACHE)
    snapshot = publication.snapshot_path(publication.snapshots()[-1])
    published = [records for *_, records in read_buckets(resumed.state.rows, snapshot)]
    assert published != [records for *_, records in resumed.state.rows.buckets()]
    assert contents(forked(RUN, tmp_path / "b", resumed)) == contents(resumed)


def test_nodes_get_all_rows_where_versions_have_a_budget(origin: Trainer, tmp_path: Path) -> None:
    budget = PublishBudget(bytes_per_s=1, image_bytes=64 << 20)
    fork = forked(dataclasses.replace(RUN, publish_budget=budget), tmp_path / "b", origin)
    begun_with = [records for *_, records in fork.state.rows.buckets()]
    fork.versions.publish(fork.state.number, 0, snapshot=True)
    first = fork.publication.snapshot_path(fork.publication.snapshots()[0])
    assert [records for *_, records in read_buckets(fork.state.rows, first)] == begun_with


def test_a_pruned_run_goes_on_pruned(tmp_path: Path) -> None:
    prune = PruneConfig(bytes=10_000, half_life=20, first=(3,), every=5, least=2)
    run = dataclasses.replace(RUN, prune=prune)
    origin = trained(run, tmp_path / "a")
    fork = forked(run, tmp_path / "b", origin)
    fork.fit(NEWS)
    origin.fit(NEWS)
    assert contents(fork) == contents(origin)
    ratio = dataclasses.replace(RUN, prune=PruneConfig(ratio=4))
    with pytest.raises(ConfigurationError, match=r"prune\.ratio.*PruneConfig\(bytes="):
        forked(
            dataclasses.replace(ratio, model=without(news_model(), "user")), tmp_path / "c", origin
        )


# --- the model of a run changes in place ---------------------------------------------------------


SMALL = dataclasses.replace(RUN, model=without(news_model(), "prev", "hour_of_day"))
OF_SMALL = Chosen(NEWS, SMALL.model)


def changed(run: RunConfig, path: Path, *, change: bool = True) -> Trainer:
    return Trainer(run, Publication(path), program_cache=CACHE, change_model=change)


def schemas(publication: Publication) -> list[int]:
    """The schema of every version since the first that is kept, in order."""
    commits = [publication.read_commit(each).commit for each in publication.deltas()]
    return [commit.schema_id for commit in commits]


@pytest.fixture
def small(tmp_path: Path) -> Trainer:
    publication = Publication(tmp_path / "pub")
    publication.path.mkdir()
    trainer = Trainer(SMALL, publication, program_cache=CACHE)
    trainer.fit(FirstEvents(OF_SMALL, HALF))
    return trainer


def test_a_run_goes_on_with_a_changed_model(small: Trainer) -> None:
    publication, before = small.publication, small.versions.publisher.newest
    batch = next_batch(RUN, small)
    theirs = small.learner.score(OF_SMALL.chosen(batch))
    assert before is not None
    with pytest.raises(CheckpointError, match=r"model\.\S+ = .*--change-model"):
        changed(RUN, publication.path, change=False)
    trainer = changed(RUN, publication.path)
    np.testing.assert_allclose(trainer.learner.score(batch), theirs, atol=0.02)
    trainer.fit(NEWS)
    assert trainer.state.events == NEWS.total_events()
    found = schemas(publication)
    assert len(set(found)) == 2
    assert found == sorted(found, key=found.index)  # it changes once
    first = next(
        version
        for version in publication.deltas()
        if publication.read_commit(version).commit.schema_id == found[-1]
    )
    assert first.number == before.number + 1
    settings_changed = {each["setting"] for each in trainer.state.changes}
    assert settings_changed == {"model.tables", "model.features"}
    again = changed(RUN, publication.path, change=False)  # it needs no permission any more
    assert contents(again) == contents(trainer)


def test_a_net_that_changes_alone_is_another_schema(small: Trainer) -> None:
    model = dataclasses.replace(SMALL.model, top_mlp=(32,))
    trainer = changed(dataclasses.replace(SMALL, model=model), small.publication.path)
    trainer.fit(OF_SMALL)
    found = schemas(small.publication)
    assert len(set(found)) == 2
    again = changed(dataclasses.replace(SMALL, model=model), small.publication.path, change=False)
    assert again.versions.publisher.schema_id == found[-1]


def former(publication: Publication) -> list[dict[str, list[str]]]:
    """Return the former layouts in the manifest of the newest snapshot."""
    snapshot = publication.snapshot_path(publication.snapshots()[-1])
    return list(read_manifest(snapshot).get("former", []))


def test_manifests_list_the_layouts_of_the_models_before(small: Trainer) -> None:
    publication = small.publication
    of_small, of_run = (
        {"keys": [column.name for column in run.model.columns], "dense": list(dense)}
        for run in (SMALL, RUN)
        for dense in [run.model.raw_columns]
    )
    assert former(publication) == []
    count = NEWS.total_events()
    changed(RUN, publication.path).fit(FirstEvents(NEWS, (HALF + count) // 2))
    assert former(publication) == [of_small]
    changed(RUN, publication.path, change=False).fit(FirstEvents(NEWS, count * 7 // 8))
    assert former(publication) == [of_small]
    third = dataclasses.replace(RUN, model=without(news_model(), "os"))
    changed(third, publication.path).fit(Chosen(NEWS, third.model))
    assert former(publication) == [of_run, of_small]


def test_a_rollback_does_not_cross_a_change(small: Trainer) -> None:
    before = small.state.number
    trainer = changed(RUN, small.publication.path)
    trainer.fit(NEWS)
    with pytest.raises(RollbackError, match=rf"version {before}.*--change-model"):
        roll_back(small.publication, before, bus=None)


def test_a_change_that_was_killed_is_made_again(small: Trainer) -> None:
    def killed(*_: object, **__: object) -> None:
        raise Killed

    publication = small.publication
    trainer = changed(RUN, publication.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.versions.saver, "save", killed, raising=True)
        with pytest.raises(Killed):
            trainer.fit(NEWS)
    assert publication.snapshots()[-1] != publication.versions()[-1]
    trainer = changed(RUN, publication.path)
    trainer.fit(NEWS)
    assert trainer.state.events == NEWS.total_events()
    assert publication.snapshots()[-1] == publication.versions()[-1]


def test_a_change_that_was_killed_is_given_up(small: Trainer) -> None:
    publication, program = small.publication, small.publication.program.read_bytes()
    trainer = changed(RUN, publication.path)
    assert publication.program.read_bytes() != program
    trainer.versions.publisher.publish(
        trainer.state.number + 1, watermark_ms=0, changes=[], dense=b""
    )
    back = changed(SMALL, publication.path, change=False)
    assert publication.program.read_bytes() == program
    back.fit(OF_SMALL)
    assert back.state.events == NEWS.total_events()
    # Past the version of the other model nothing but a snapshot leads.
    after = [each for each in publication.deltas() if each.number > trainer.state.number + 1]
    assert after[0] in publication.snapshots()


def test_only_the_newest_state_may_change(small: Trainer) -> None:
    publication = small.publication
    small.versions.publisher.publish(small.state.number + 1, watermark_ms=0, changes=[], dense=b"")
    with pytest.raises(CheckpointError, match=r"stop it \(SIGTERM\), then change the model"):
        changed(RUN, publication.path)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    empty = Trainer.__new__(Trainer)
    empty.publication = Publication(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"nothing holds no checkpoint to begin with"):
        forked(RUN, tmp_path / "b", empty)
    shutil.rmtree(tmp_path / "b")


@pytest.mark.parametrize("model", [*PRESETS.values(), criteo])
def test_a_model_is_read_from_the_settings_of_a_checkpoint(
    model: Callable[[], ModelConfig],
) -> None:
    run = dataclasses.replace(RUN, model=model())
    assert parsed(ModelConfig, settings(run)["model"]) == run.model
    odd = dataclasses.replace(
        run.model,
        name="odd",
        tables=(TableConfig(name="t", chunks=4),),
        features=(FeatureConfig(name="f", table="t", keys="weighed"),),
        sequences=(),
        net="dlrm",
    )
    assert parsed(ModelConfig, settings(dataclasses.replace(RUN, model=odd))["model"]) == odd
