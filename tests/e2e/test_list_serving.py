"""Models over lists in a real tritonserver: a jagged request gives the trainer's own scores."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from lists import KEYS, MODEL, plain, source
from serving import Client, beside
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from embertide._common import kserve
from embertide.server.adapters import triton
from embertide.server.adapters.schema import schema_of
from embertide.server.adapters.tiny_inference import request_of
from embertide.trainer.__main__ import app
from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.eval.records import Records
from embertide.trainer.eval.served import ServedModel
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"


SAMPLES = 1500  # more keys than one thread looks up
MODELS = {"plain": plain(), "weighed": MODEL}


@dataclasses.dataclass
class Served:
    """Trainers that are done, and a server of their last versions."""

    trainers: dict[str, Trainer]
    batches: dict[str, Batch]
    server: triton.TritonServer


@pytest.fixture(scope="module")
def served(server_options: triton.ServerOptions, tmp_path_factory: Any) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("lists")
    options = beside(server_options, directory / "models", directory / "log", (*MODELS, "rows"))
    trainers, batches = {}, {}
    for name, config in MODELS.items():
        publication = Publication(directory / name)
        events = source(directory / "events.parquet", weighed=name == "weighed")
        run = RunConfig(model=config, batch_size=64)
        trainers[name] = Trainer(run, publication, program_cache=CACHE)
        trainers[name].fit(events)
        batches[name] = next(events.batches(batch_size=300))
        snapshot = publication.snapshot_path(publication.snapshots()[-1])
        schema = schema_of(snapshot)
        made = triton.ModelOptions(
            snapshot=snapshot, kind="ranking", max_batch_size=64, schema=schema
        )
        triton.write_model(options.repository, name, made)
    rows = triton.ModelOptions(snapshot=snapshot, max_batch_size=SAMPLES, threads=3, schema=schema)
    triton.write_model(options.repository, "rows", rows)
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
    assert answer.version == trainer.state.number


@pytest.mark.parametrize("name", [*MODELS, "rows"])
def test_models_take_the_question_whether_their_server_answers(served: Served, name: str) -> None:
    with kserve.Line(served.server.grpc) as line:
        config = line.call("ModelConfig", service_pb2.ModelConfigRequest(name=name), 10).config
        answer = line.infer(request_of(config), 10)
    assert (
        int(kserve.arrays_of(answer)["VERSION"][0, 0])
        == served.trainers["weighed" if name == "rows" else name].state.number
    )


def test_a_weighed_model_refuses_requests_without_weights(served: Served) -> None:
    client = Client("grpc", served.server)
    with pytest.raises(InferenceServerException, match="input WEIGHTS is missing: the model has"):
        client.rectangular([[1, 2, 3, 4]], model="weighed")
    with pytest.raises(
        InferenceServerException, match=r"WEIGHTS has shape \[1,3\]; KEYS has \[1,4\]"
    ):
        client.send(request(np.array([[1, 2, 3, 4]]), np.ones((1, 3))), model="weighed")
    client.raw.close()


def test_both_forms_of_a_request_take_weights(served: Served) -> None:
    rng = np.random.default_rng(1)
    keys_BF, weights_BF = rng.integers(0, KEYS, (SAMPLES, 4)), rng.standard_normal((SAMPLES, 4))
    client = Client("grpc", served.server)
    both = [
        client.send(
            request(keys_BF.reshape(shape), weights_BF.reshape(shape), **more), model="rows"
        ).as_numpy("EMBEDDING")
        for shape, more in (
            ((SAMPLES, 4), {}),
            ((1, -1), {"LENGTHS": np.ones((1, 4 * SAMPLES), np.int32)}),
        )
    ]
    rows = served.trainers["weighed"].state.rows
    unweighed_BE = rows(keys_BF).detach().numpy()
    wanted_BE = unweighed_BE * np.repeat(weights_BF.astype(np.float32), 4, axis=1)
    np.testing.assert_allclose(both[0], wanted_BE, rtol=1e-6)
    np.testing.assert_array_equal(both[0], both[1].reshape(SAMPLES, -1))
    client.raw.close()


def test_replay_asks_for_lists_by_the_runs_file(served: Served, tmp_path: Path) -> None:
    events = source(tmp_path / "events.parquet")
    run = tmp_path / "run.py"
    run.write_text(
        "from pathlib import Path\n"
        "from lists import MODEL, source\n"
        "from embertide.trainer.config import RunConfig\n"
        f"source = source(Path({str(tmp_path / 'events.parquet')!r}))\n"
        "run = RunConfig(model=MODEL)\n"
    )
    command = ["replay", str(tmp_path / "scores"), "--config", str(run), "--model", "weighed"]
    done = CliRunner().invoke(app, [*command, "--url", served.server.grpc, "--events", "400"])
    assert done.exit_code == 0, done.output
    scores = pq.read_table(Records(tmp_path / "scores").scores)
    batch = next(FirstEvents(events, 400).batches(batch_size=1000))
    assert scores["event"].to_pylist() == batch.event_B.tolist()
    expected = served.trainers["weighed"].learner.score(batch)
    np.testing.assert_allclose(scores["score"].to_numpy(), expected, atol=1e-6)
    refused = CliRunner().invoke(app, [*command, "--data", "other.parquet"])
    assert refused.exit_code == 2
    assert "other.parquet: there is no such file" in refused.stderr


def request(keys: Any, weights: Any, **more: Any) -> dict[str, Any]:
    return {"KEYS": keys.astype(np.int64), "WEIGHTS": weights.astype(np.float32), **more}
