"""`ranking` in a real tritonserver: the scores of the trainer's own net, at the same version."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from serving import Client, Fronts, beside, change_manifest, flip_byte, metric, parameters
from tritonclient.utils import InferenceServerException
from waiting import wait_until

from embertide.server.adapters import triton
from embertide.trainer.config import (
    DenseConfig,
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    TableConfig,
)
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.model.dlrm import Dlrm, Probability
from embertide.trainer.model.export import export_dense, tensor_bytes
from embertide.trainer.publish.snapshot import DensePart, SnapshotInfo, write_snapshot

ROOT = Path(__file__).parents[2]
VERSION = 12
CONFIG = ModelConfig(
    name="rank",
    tables=(
        TableConfig(name="item", dim=8, chunks=2, bucket_bits=2),
        TableConfig(name="user", dim=8),
    ),
    features=(
        FeatureConfig(name="cand", table="item"),
        FeatureConfig(name="seen", table="item", pooling="mean"),
        FeatureConfig(name="user", table="user"),
    ),
    dense=(DenseConfig(name="price"), DenseConfig(name="age")),
    bottom_mlp=(8,),
    top_mlp=(16,),
)


@dataclasses.dataclass
class Trained:
    """A model after some steps, and the snapshot of it."""

    rows: EmbeddingStore
    net: Probability
    directory: Path

    def scores(
        self, samples: list[list[list[int]]], dense_BD: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return the scores of the trainer's own net for bags of keys."""
        parts = []
        for f, feature in enumerate(CONFIG.features):
            bags = [sample[f] for sample in samples]
            offsets = np.cumsum([0, *map(len, bags)]).astype(np.uint32)
            keys = np.array([key for bag in bags for key in bag], np.int64)
            table = CONFIG.table_index(feature.table)
            values, _, _ = self.rows.store.lookup(
                table, keys, pooling=feature.pooling, offsets=offsets
            )
            parts.append(values)
        with torch.no_grad():
            score = self.net(torch.from_numpy(dense_BD), torch.from_numpy(np.concatenate(parts, 1)))
        return np.asarray(score.numpy())


def train(rows: EmbeddingStore, net: Dlrm) -> None:
    rng = np.random.default_rng(3)
    rows.train()
    for _ in range(20):
        logits = net(torch.from_numpy(dense(rng, 64)), rows(rng.integers(0, 500, (64, 3))))
        torch.nn.functional.binary_cross_entropy_with_logits(
            logits, torch.from_numpy(rng.integers(0, 2, 64).astype(np.float32))
        ).backward()
        rows.step()
    rows.eval()


def dense(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    return rng.standard_normal((count, 2)).astype(np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    torch.manual_seed(5)
    directory = tmp_path_factory.mktemp("rank") / "snapshot"
    rows = EmbeddingStore(CONFIG, optimizer=OptimizerConfig(sparse_learning_rate=0.5))
    net = Dlrm(CONFIG)
    train(rows, net)
    served = Probability(net)
    program = directory.parent / "program.pt2"
    export_dense(
        served,
        program,
        dense_features=2,
        embedding_dim=rows.embedding_dim,
        cache=ROOT / "build" / "cache" / "dense",
    )
    buckets = (
        (table, bucket, rows.store.export_bucket(i, bucket))
        for i, table in enumerate(rows.tables)
        for bucket in range(1 << table.bucket_bits)
    )
    info = SnapshotInfo.of(CONFIG, lineage=1, version=VERSION, watermark_ms=77_000)
    part = DensePart(program=program, cpu="x86-64-v3", tensors=tensor_bytes(served))
    write_snapshot(directory, info, rows.tables, buckets, part)
    return Trained(rows, served, directory)


@pytest.fixture(scope="module")
def fronts(
    trained: Trained, server_options: triton.ServerOptions, tmp_path_factory: Any
) -> Iterator[Fronts]:
    directory = tmp_path_factory.mktemp("ranking-triton")
    options = beside(server_options, directory, directory / "triton.log", ("rank",))
    triton.write_model(
        directory,
        "rank",
        triton.ModelOptions(
            snapshot=trained.directory,
            kind="ranking",
            instances=2,
            max_batch_size=64,
            max_queue_delay_us=1000,
        ),
    )
    with Fronts(options) as running:
        yield running
        for protocol in ("grpc", "http"):
            server = running.of(protocol)
            assert server.alive(), server.log_text()


@pytest.fixture(scope="module")
def server(fronts: Fronts) -> triton.TritonServer:
    return fronts.own


@pytest.fixture
def client(protocol: str, fronts: Fronts) -> Iterator[Client]:
    made = Client(protocol, fronts.of(protocol))
    yield made
    made.raw.close()


def jagged(
    samples: list[list[list[int]]], dense_BD: NDArray[np.float32]
) -> dict[str, NDArray[Any]]:
    bags = [bag for sample in samples for bag in sample]
    return {
        "KEYS": np.array([[key for bag in bags for key in bag]], np.int64),
        "LENGTHS": np.array([[len(bag) for bag in bags]], np.int32),
        "DENSE": dense_BD.reshape(1, -1),
    }


def test_rectangular_scores_are_those_of_the_trainers_net(client: Client, trained: Trained) -> None:
    rng = np.random.default_rng(1)
    for count in (1, 2, 17, 64):
        keys = rng.integers(0, 600, (count, 3))  # some unknown
        dense_BD = dense(rng, count)
        result = client.send({"KEYS": keys, "DENSE": dense_BD}, model="rank")
        expected = trained.scores([[[int(k)] for k in row] for row in keys], dense_BD)
        assert result.as_numpy("SCORE").shape == (count, 1)
        np.testing.assert_allclose(result.as_numpy("SCORE")[:, 0], expected, atol=1e-6)
        assert np.all(result.as_numpy("VERSION") == VERSION)
        assert int(parameters(result)["watermark_ms"]) == 77_000


def test_jagged_scores_pool_each_feature_as_its_config_says(
    client: Client, trained: Trained
) -> None:
    rng = np.random.default_rng(2)
    samples = [
        [rng.integers(0, 600, rng.integers(0, 5)).tolist() for _ in CONFIG.features]
        for _ in range(23)
    ]
    dense_BD = dense(rng, 23)
    result = client.send(jagged(samples, dense_BD), model="rank")
    assert result.as_numpy("SCORE").shape == (1, 23)
    expected = trained.scores(samples, dense_BD)
    np.testing.assert_allclose(result.as_numpy("SCORE")[0], expected, atol=1e-6)


def test_scores_differ_with_the_key_and_are_no_constant(client: Client) -> None:
    keys = np.stack([np.arange(50)] * 3, 1)
    result = client.send({"KEYS": keys, "DENSE": np.zeros((50, 2), np.float32)}, model="rank")
    assert len(np.unique(result.as_numpy("SCORE"))) > 40


BAD: dict[str, tuple[dict[str, NDArray[Any]], str]] = {
    "no_dense": ({"KEYS": np.zeros((2, 3), np.int64)}, "DENSE is missing"),
    "dense_columns": (
        {"KEYS": np.zeros((2, 3), np.int64), "DENSE": np.zeros((2, 3), np.float32)},
        "[2,2]",
    ),
    "dense_nan": (
        {"KEYS": np.zeros((2, 3), np.int64), "DENSE": np.array([[0, 1], [2, np.nan]], np.float32)},
        "sample 1 is not finite in column 1",
    ),
    "key_columns": (
        {"KEYS": np.zeros((2, 4), np.int64), "DENSE": np.zeros((2, 2), np.float32)},
        "[batch,3]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_dense_input_is_refused_for_that_request_alone(
    client: Client, protocol: str, fronts: Fronts, name: str
) -> None:
    arrays, says = BAD[name]
    server = fronts.of(protocol)
    before = metric(server.metrics(), "embertide_requests_refused_total", model="rank")
    with pytest.raises(InferenceServerException, match=r".*") as error:
        client.send(arrays, model="rank")
    assert says in str(error.value)
    keys = np.zeros((1, 3), np.int64)
    client.send({"KEYS": keys, "DENSE": np.zeros((1, 2), np.float32)}, model="rank")
    wait_until(
        lambda: metric(server.metrics(), "embertide_requests_refused_total", model="rank") > before
    )


def drop_dense(directory: Path) -> None:
    change_manifest(directory, dense=[], dense_id="", dense_cpu="")


def other_net(directory: Path) -> None:
    """Tensors of a net of another shape, properly signed."""
    other = Probability(Dlrm(dataclasses.replace(CONFIG, top_mlp=(8,))))
    data = tensor_bytes(other)
    path = directory / "dense" / "tensors.safetensors"
    path.write_bytes(data)
    from embertide import _store

    program = (directory / "dense" / "program.pt2").read_bytes()
    files = [
        ("program", "dense/program.pt2", program),
        ("tensors", "dense/tensors.safetensors", data),
    ]
    change_manifest(
        directory,
        dense=[
            {"role": role, "path": name, "bytes": len(data), "crc32c": _store.crc32c(data)}
            for role, name, data in files
        ],
    )


def sequence(directory: Path) -> None:
    features = json.loads((directory / "manifest.json").read_text())["features"]
    features[0]["pooling"] = "none"
    change_manifest(directory, features=features)


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "other_cpu": (lambda d: change_manifest(d, dense_cpu="x86-64-v9"), "x86-64-v9"),
    "no_dense_part": (drop_dense, "lookup only"),
    "flipped_program": (lambda d: flip_byte(d / "dense" / "program.pt2", 999), "program.pt2"),
    "cut_tensors": (
        lambda d: (d / "dense" / "tensors.safetensors").write_bytes(b"12345678"),
        "tensors.safetensors",
    ),
    "other_net": (other_net, "net.top.0.bias"),
    "sequence": (sequence, "the dense net takes one vector a feature"),
}


@pytest.mark.parametrize("name", HARM)
def test_a_dense_part_that_does_not_fit_is_refused_at_load(
    server: triton.TritonServer, trained: Trained, tmp_path: Path, name: str
) -> None:
    harm, says = HARM[name]
    directory = tmp_path / "snapshot"
    shutil.copytree(trained.directory, directory)
    harm(directory)
    triton.write_model(
        server.options.repository, "bad", triton.ModelOptions(snapshot=directory, kind="ranking")
    )
    client = Client("grpc", server)
    with pytest.raises(InferenceServerException) as error:
        client.raw.load_model("bad")
    assert says in str(error.value)
    client.send(
        {"KEYS": np.zeros((1, 3), np.int64), "DENSE": np.zeros((1, 2), np.float32)}, model="rank"
    )
    client.raw.close()
