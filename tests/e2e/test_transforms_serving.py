"""Dense features in a real tritonserver: the bytes that the net gets are those of training.

One of `shop`'s features is the bin of its price, which the client makes.

A trainer learns `shop`, and a hook notes what its net gets. `echo` has the transforms file of that
run's snapshot, and a net that answers with the column that the sample's key names: what a request's
DENSE became is read off the scores.

Shapes: B samples, T columns that the net gets.
"""

import asyncio
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
from serving import Client, Fronts, beside, change_manifest, flip_byte, metric
from shop import RUN, Shop
from torch import Tensor, nn
from tritonclient.utils import InferenceServerException
from waiting import wait_until

from embertide import _store
from embertide.client import AsyncClient, InputError
from embertide.client import Client as NamedClient
from embertide.server.adapters import triton
from embertide.server.adapters.schema import schema_of
from embertide.trainer.config import FeatureConfig, ModelConfig, TableConfig
from embertide.trainer.embedding.store import store_table
from embertide.trainer.model.export import export_dense, tensor_bytes
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot import (
    TRANSFORMS,
    DensePart,
    SnapshotInfo,
    read_transforms,
    write_snapshot,
)
from embertide.trainer.run.loop import Trainer

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
SHOP = Shop(600, edges=(0.3, 1.0, 2.5, 8.0))
COLUMNS = RUN.model.dense_columns
NAMES = [column.name for column in RUN.model.dense]
# What requests of `changed`, which is `shop` otherwise, carried once; the newest first.
FORMER = [
    {"keys": ["it", "gone", "user"], "dense": ["stars", "old"]},
    {"keys": ["it"], "dense": ["stars", "price"]},
]
# Row k of its table is [k].
ECHO = ModelConfig(
    name="echo",
    tables=(TableConfig(name="column", dim=1),),
    features=(FeatureConfig(name="column", table="column"),),
    dense=RUN.model.dense,
)


class Echo(nn.Module):
    """The column of what it gets whose number is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        return torch.gather(dense_BD, 1, embeddings_BE.round().long()).squeeze(1)


@dataclasses.dataclass
class Served:
    """A trainer that is done, what its net got, and a server of its last version and of `echo`."""

    trainer: Trainer
    dense_NT: NDArray[np.float32]
    echo: Path
    server: triton.TritonServer
    fronts: Fronts


def write_echo(directory: Path, transforms: _store.Transforms) -> None:
    program = directory.parent / "echo.pt2"
    net = Echo()
    export_dense(net, program, dense_features=COLUMNS, embedding_dim=1, cache=CACHE)
    table = store_table(ECHO.tables[0], 0, 1)
    records = [
        (key, _store.encode_payload(table.layout, 1, np.array([key], np.float32)))
        for key in range(COLUMNS)
    ]
    data = b"".join(_store.encode_record(key, 1, 0, payload) for key, payload in records)
    info = SnapshotInfo.of(ECHO, lineage=1, version=1, watermark_ms=0, transforms=transforms)
    part = DensePart(program=program, cpu="x86-64-v3", tensors=tensor_bytes(net))
    write_snapshot(directory, info, [table], [(table, 0, data)], part)


@pytest.fixture(scope="module")
def served(server_options: triton.ServerOptions, tmp_path_factory: Any) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("transforms")
    publication = Publication(directory / "shop")
    trainer = Trainer(RUN, publication, program_cache=CACHE)
    got: list[NDArray[np.float32]] = []
    trainer.learner.net.register_forward_pre_hook(
        lambda _net, inputs: got.append(inputs[0].numpy().copy())
    )
    trainer.fit(SHOP)
    snapshot = publication.snapshot_path(publication.snapshots()[-1])
    transforms = read_transforms(snapshot)
    assert transforms is not None
    write_echo(directory / "echo", transforms)
    assert (directory / "echo" / TRANSFORMS).read_bytes() == (snapshot / TRANSFORMS).read_bytes()
    shutil.copytree(snapshot, directory / "changed")
    change_manifest(directory / "changed", dense_names=NAMES, former=FORMER)
    models = {"shop": snapshot, "echo": directory / "echo", "counted": directory / "echo"}
    models |= {"changed": directory / "changed", "looked": snapshot}
    options = beside(server_options, directory / "models", directory / "log", tuple(models))
    for name, path in models.items():
        made = triton.ModelOptions(
            snapshot=path,
            kind="lookup" if name == "looked" else "ranking",
            max_batch_size=1024,
            threads=2,
            schema=schema_of(path) if path == snapshot else None,
        )
        triton.write_model(options.repository, name, made)
    with Fronts(options) as fronts:
        yield Served(trainer, np.concatenate(got), directory / "echo", fronts.own, fronts)


@pytest.fixture
def client(protocol: str, served: Served) -> Iterator[Client]:
    made = Client(protocol, served.fronts.of(protocol))
    yield made
    made.raw.close()


def echoed(client: Client, dense_BD: NDArray[np.float32], *, jagged: bool) -> NDArray[np.float32]:
    """What the served net got for DENSE, column by column."""
    columns = []
    for t in range(COLUMNS):
        keys_B1 = np.full((len(dense_BD), 1), t, np.int64)
        arrays: dict[str, NDArray[Any]] = {"KEYS": keys_B1, "DENSE": dense_BD}
        if jagged:
            arrays = {name: array.reshape(1, -1) for name, array in arrays.items()}
            arrays["LENGTHS"] = np.ones((1, len(dense_BD)), np.int32)
        columns.append(client.send(arrays, model="echo").as_numpy("SCORE").reshape(-1))
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("jagged", [False, True])
def test_the_net_gets_the_bytes_that_it_learned_from(
    served: Served, client: Client, jagged: bool
) -> None:
    whole = SHOP.whole
    assert served.dense_NT.shape == (len(whole), COLUMNS)
    assert np.isnan(whole.dense_BD).any(axis=0).all()
    made_NT = echoed(client, whole.dense_BD, jagged=jagged)
    assert made_NT.dtype == np.float32
    assert made_NT.tobytes() == served.dense_NT.tobytes()
    # It is no constant that is the same.
    price, missing, age, stars = (len(np.unique(column)) for column in made_NT.T)
    assert missing == 2
    assert min(price, age) > 300
    assert stars > 3


def test_served_scores_are_those_of_the_trainers_net(served: Served, client: Client) -> None:
    whole = SHOP.whole
    arrays: dict[str, NDArray[Any]] = {"KEYS": whole.keys_BF, "DENSE": whole.dense_BD}
    scores_B = client.send(arrays, model="shop").as_numpy("SCORE")[:, 0]
    np.testing.assert_allclose(scores_B, served.trainer.learner.score(whole), atol=1e-6)
    assert len(np.unique(scores_B)) > 500


def test_a_caller_sends_the_amount_and_gets_the_score_of_its_bin(served: Served) -> None:
    """As the trainer scores the events, in which both are: by either client."""
    whole = SHOP.whole
    assert len(np.unique(whole.keys_BF[:, 1])) == 6  # five bins, and none
    call: dict[str, Any] = {name: whole.dense_BD[:, d] for d, name in enumerate(NAMES)}
    call["user"] = whole.keys_BF[:, 0]

    async def ask() -> Any:
        async with AsyncClient(served.server.grpc, timeout_s=20) as client:
            return (await client.rank("shop", call)).scores

    with NamedClient(served.server.grpc, timeout_s=20) as client:
        ranked = client.rank("shop", call)
        worked_out = client.rank("shop", {**call, "it": whole.keys_BF[:, 1]})
        without = client.rank("shop", {**call, "it": [None] * len(whole)})
        with pytest.raises(InputError, match="feature 'it', row 0 is 9, where 'price' is"):
            client.rank("shop", {**call, "it": np.full(len(whole), 9)})
    np.testing.assert_allclose(ranked.scores, served.trainer.learner.score(whole), atol=1e-6)
    assert (without.scores != ranked.scores).mean() > 0.8
    assert (worked_out.scores == ranked.scores).all()
    assert (asyncio.run(ask()) == ranked.scores).all()


def test_vectors_of_bins_are_looked_up_by_the_amount(served: Served) -> None:
    """A model that is looked up takes no DENSE."""
    keys_BF = SHOP.whole.keys_BF
    user = {"user": keys_BF[:, 0]}
    with NamedClient(served.server.grpc, timeout_s=20) as client:
        looked = client.lookup("looked", {**user, "price": SHOP.whole.dense_BD[:, 0]})
        expected = client.lookup("looked", {**user, "it": keys_BF[:, 1]})
    np.testing.assert_array_equal(looked.embeddings["it"], expected.embeddings["it"])
    assert len(np.unique(looked.embeddings["it"], axis=0)) == 6


def test_missing_values_are_counted(served: Served) -> None:
    client = Client("grpc", served.server)
    dense_BD = np.array([[np.nan, 1, np.nan], [1, 2, 3]], np.float32)
    client.send({"KEYS": np.zeros((2, 1), np.int64), "DENSE": dense_BD}, model="counted")

    def count() -> float:
        return metric(served.server.metrics(), "embertide_dense_missing_total", model="counted")

    wait_until(lambda: count() == 2)
    client.raw.close()


def test_an_infinite_value_is_an_error_for_that_request_alone(client: Client) -> None:
    dense_BD = np.array([[1, 2, 3], [1, -np.inf, np.nan]], np.float32)
    keys_B1 = np.zeros((2, 1), np.int64)
    arrays: dict[str, NDArray[Any]] = {"KEYS": keys_B1, "DENSE": dense_BD}
    with pytest.raises(InferenceServerException) as error:
        client.send(arrays, model="echo")
    assert "DENSE of sample 1 is not finite in column 1 (age): -inf" in str(error.value)
    arrays["DENSE"] = np.zeros((2, 3), np.float32)
    client.send(arrays, model="echo")


def other_width(directory: Path) -> None:
    change_manifest(directory, dense_features=4)


def other_text(directory: Path) -> None:
    """Transforms that are properly signed, and none."""
    data = b"{}"
    (directory / TRANSFORMS).write_bytes(data)
    named = {"role": "transforms", "path": TRANSFORMS}
    replace_transforms(directory, {**named, "bytes": len(data), "crc32c": _store.crc32c(data)})


def replace_transforms(directory: Path, *parts: dict[str, Any]) -> None:
    dense = json.loads((directory / "manifest.json").read_text())["dense"]
    kept = [each for each in dense if each["role"] != "transforms"]
    change_manifest(directory, dense=[*kept, *parts])


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda d: flip_byte(d / TRANSFORMS, 99), "transforms.json"),
    "other_width": (other_width, "takes 3 columns, the manifest says 4"),
    "no_transforms": (other_text, "format"),
    "left_out": (replace_transforms, "the dense program takes 4 + 1 inputs"),
}


@pytest.mark.parametrize("name", HARM)
def test_transforms_that_do_not_fit_are_refused_at_load(
    served: Served, tmp_path: Path, name: str
) -> None:
    harm, says = HARM[name]
    shutil.copytree(served.echo, tmp_path / "snapshot")
    harm(tmp_path / "snapshot")
    options = triton.ModelOptions(snapshot=tmp_path / "snapshot", kind="ranking")
    triton.write_model(served.server.options.repository, "bad", options)
    client = Client("grpc", served.server)
    with pytest.raises(InferenceServerException) as error:
        client.raw.load_model("bad")
    assert says in str(error.value)
    client.raw.close()


def bags(columns: list[NDArray[np.int64]], lengths: list[int]) -> dict[str, NDArray[Any]]:
    """A jagged request: each sample has the first keys of its row of each column."""
    samples = range(len(columns[0]))
    keys = [columns[f][s][:n] for s in samples for f, n in enumerate(lengths)]
    return {
        "KEYS": np.concatenate(keys)[None],
        "LENGTHS": np.array([lengths * len(samples)], np.int32),
    }


def scored(client: Client, arrays: dict[str, NDArray[Any]], **more: Any) -> NDArray[np.float32]:
    return np.asarray(
        client.send(arrays, model="changed", outputs=["SCORE"], **more).as_numpy("SCORE")
    )


def test_requests_of_former_layouts_are_answered_as_whole_ones(
    client: Client, protocol: str, served: Served
) -> None:
    server, name = served.fronts.of(protocol), "embertide_former_requests_total"
    before = metric(server.metrics(), name, model="changed")
    rng = np.random.default_rng(3)
    user_B, it_B, gone_B = rng.integers(0, 50, (3, 40))
    stars_B, price_B, old_B = rng.lognormal(1, 1, (3, 40)).astype(np.float32)
    none_B = np.full(40, np.nan, np.float32)
    no_key_B = np.full(40, -(2**63))

    def sent(keys: list[NDArray[Any]], dense: list[NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {"KEYS": np.stack(keys, 1), "DENSE": np.stack(dense, 1)}

    newest = sent([it_B, gone_B, user_B], [stars_B, old_B])
    whole = scored(client, sent([user_B, it_B], [none_B, none_B, stars_B]))
    np.testing.assert_array_equal(scored(client, newest), whole)
    older = sent([it_B], [stars_B, price_B])
    other = scored(client, sent([no_key_B, it_B], [price_B, none_B, stars_B]))
    np.testing.assert_array_equal(scored(client, older), other)
    assert np.any(whole != other)

    # Jagged: what came since is an empty bag; of a former layout by its parameter, or as it fits.
    keys = [rng.integers(0, 50, (40, 3)) for _ in range(3)]
    jagged = bags(keys, [2, 1, 3])
    jagged["DENSE"] = newest["DENSE"].reshape(1, -1)
    by_bags = bags([keys[2], keys[0]], [3, 2])
    by_bags["DENSE"] = np.stack([none_B, none_B, stars_B], 1).reshape(1, -1)
    expected = scored(client, by_bags)
    np.testing.assert_array_equal(scored(client, jagged), expected)
    np.testing.assert_array_equal(scored(client, jagged, parameters={"columns": 3}), expected)
    lone = bags(keys[:1], [2]) | {"DENSE": older["DENSE"].reshape(1, -1)}
    by_bags = bags([keys[0], keys[0]], [0, 2])
    by_bags["DENSE"] = np.stack([price_B, none_B, stars_B], 1).reshape(1, -1)
    np.testing.assert_array_equal(
        scored(client, lone, parameters={"columns": 1}), scored(client, by_bags)
    )
    wait_until(lambda: metric(server.metrics(), name, model="changed") == before + 5)


def test_a_request_of_no_layout_is_refused_as_ever(client: Client) -> None:
    keys, dense = np.ones((4, 3), np.int64), np.ones((4, 3), np.float32)
    for columns, named in ((keys, "KEYS"), (keys[:, :1], "KEYS"), (keys[:, :2], None)):
        arrays: dict[str, NDArray[Any]] = {"KEYS": columns, "DENSE": dense}
        if named is None:  # today's
            assert scored(client, arrays).shape == (4, 1)
        else:
            with pytest.raises(InferenceServerException, match=named):
                scored(client, arrays)
    infinite = np.array([[1, np.inf]], np.float32)
    with pytest.raises(InferenceServerException, match=r"not finite in column 1 \(old\)"):
        scored(client, {"KEYS": keys[:1], "DENSE": infinite})
