"""Every net beside DLRM in a real tritonserver: a request of columns alone gives the same scores.

That of the history has counts, too, which are in rows and version and not in the request, and
crosses, which are in the request. DeepFM's has learned what keys without a row read as: it is in
the version.
The rectangular request carries a sequence as it carries features: its keys behind theirs in KEYS,
its length and whether the item is in it in DENSE.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from serving import Client, beside, parameters

from embertide.server.adapters import triton
from embertide.trainer.config import ModelConfig, RunConfig
from embertide.trainer.data.base import PADDING_KEY, Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.history import with_columns
from embertide.trainer.loop import Trainer
from embertide.trainer.presets import globo, globo_crossed
from embertide.trainer.publish.folder import Publication

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=60, users=40, new_items_per_hour=5))
DEFAULTS = tuple(dataclasses.replace(each, learned_default=True) for each in globo().features)
MODELS: dict[str, ModelConfig] = {
    "dcn_v2": dataclasses.replace(globo(), net="dcn_v2", cross_rank=16),
    "deepfm": dataclasses.replace(globo(), net="deepfm", features=DEFAULTS),
    "history": globo_crossed(),
}


@dataclasses.dataclass
class Served:
    """A trainer that is done, and a server of its last version."""

    trainers: dict[str, Trainer]
    server: triton.TritonServer


@pytest.fixture(scope="module")
def served(server_options: triton.ServerOptions, tmp_path_factory: Any) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("nets")
    options = beside(server_options, directory / "models", directory / "log", tuple(MODELS))
    trainers = {}
    for name, model in MODELS.items():
        publication = Publication(directory / name)
        run = RunConfig(model=model, batch_size=64)
        trainers[name] = Trainer(run, publication, program_cache=CACHE)
        trainers[name].fit(NEWS)
        snapshot = publication.snapshot_path(publication.snapshots()[-1])
        made = triton.ModelOptions(snapshot=snapshot, kind="ranking", max_batch_size=64)
        triton.write_model(options.repository, name, made)
    with triton.TritonServer(options) as running:
        yield Served(trainers, running)


def some_events(model: ModelConfig) -> Batch:
    """Events of the second hour, one of them about nobody and nothing that is known."""
    batch = next(with_columns(NEWS, model).batches(batch_size=60, start=NEWS.first_event(1)))
    batch.keys_BF[0, : len(model.features)] = 987_654_321
    return batch


@pytest.mark.parametrize("name", MODELS)
def test_served_scores_are_those_of_the_trainers_net(served: Served, name: str) -> None:
    trainer, batch = served.trainers[name], some_events(MODELS[name])
    client = Client("grpc", served.server)
    arrays: dict[str, NDArray[Any]] = {"KEYS": batch.keys_BF}
    if MODELS[name].dense_columns:
        arrays["DENSE"] = batch.dense_BD
    result = client.send(arrays, model=name)
    expected = trainer.learner.score(batch)
    assert len(np.unique(expected)) > 40
    np.testing.assert_allclose(result.as_numpy("SCORE")[:, 0], expected, atol=1e-6)
    assert int(parameters(result)["version"]) == trainer.number
    client.raw.close()


def test_padding_is_served_as_a_row_that_nobody_has(served: Served) -> None:
    batch = some_events(MODELS["history"])
    padded_BF = batch.keys_BF == PADDING_KEY
    assert padded_BF.any(1).sum() > 10
    assert (~padded_BF[:, len(MODELS["history"].features) :]).any(1).sum() > 10
    client = Client("grpc", served.server)

    def source(keys_BF: Any) -> Any:
        arrays = {"KEYS": keys_BF, "DENSE": batch.dense_BD}
        result = client.send(arrays, model="history", outputs=["SCORE", "SOURCE"])
        return result.as_numpy("SCORE"), result.as_numpy("SOURCE").reshape(keys_BF.shape)

    scores, sources = source(batch.keys_BF)
    missing = sources.max()
    assert (sources[padded_BF] == missing).all()
    assert (sources[~padded_BF] != missing).mean() > 0.9
    # Whatever stands in a place not taken, the score is the same.
    other_BF = np.where(padded_BF, batch.keys_BF[:, 2:3], batch.keys_BF)
    np.testing.assert_array_equal(source(other_BF)[0], scores)
    client.raw.close()
