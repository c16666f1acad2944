"""Models over lists in a real tritonserver: a jagged request gives the trainer's own scores."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lists import plain, source
from serving import beside

from embertide.server.adapters import triton
from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.eval.served import ServedModel
from embertide.trainer.loop import Trainer
from embertide.trainer.publish.folder import Publication

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"


MODELS = {"plain": plain()}


@dataclasses.dataclass
class Served:
    """Trainers that are done, and a server of their last versions."""

    trainers: dict[str, Trainer]
    batches: dict[str, Batch]
    server: triton.TritonServer


@pytest.fixture(scope="module")
def served(server_options: triton.ServerOptions, tmp_path_factory: Any) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("lists")
    options = beside(server_options, directory / "models", directory / "log", tuple(MODELS))
    trainers, batches = {}, {}
    for name, config in MODELS.items():
        publication = Publication(directory / name)
        events = source(directory / "events.parquet", weighed=name == "weighed")
        run = RunConfig(model=config, batch_size=64)
        trainers[name] = Trainer(run, publication, program_cache=CACHE)
        trainers[name].fit(events)
        batches[name] = next(events.batches(batch_size=300))
        snapshot = publication.snapshot_path(publication.snapshots()[-1])
        made = triton.ModelOptions(snapshot=snapshot, kind="ranking", max_batch_size=64)
        triton.write_model(options.repository, name, made)
    with triton.TritonServer(options) as running:
        yield Served(trainers, batches, running)


@pytest.mark.parametrize("name", MODELS)
def test_served_scores_over_lists_are_the_trainers(served: Served, name: str) -> None:
    batch, trainer = served.batches[name], served.trainers[name]
    expected = trainer.learner.score(batch)
    assert len(np.unique(expected)) > 200
    with ServedModel(served.server.grpc, name) as model:
        answer = model.score(batch)
    np.testing.assert_allclose(answer.score_B, expected, atol=1e-6)
    assert answer.version == trainer.number
