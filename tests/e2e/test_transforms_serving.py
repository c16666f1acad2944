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
import queue
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from context_page import printed_request
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
# The former request layouts of `changed`, which is `shop` otherwise; the newest first.
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
    shop: Path
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


def with_context(path: Path) -> Path:
    """A snapshot of the same run, whose dense program computes user and age once a user."""
    run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, context=("user", "age")))
    publication = Publication(path)
    Trainer(run, publication, program_cache=CACHE).fit(SHOP)
    return publication.snapshot_path(publication.snapshots()[-1])


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
    models |= {"changed": directory / "changed", "looked": snapshot, "users": snapshot}
    models |= {"once": with_context(directory / "pub")}
    options = beside(server_options, directory / "models", directory / "log", tuple(models))
    for name, path in models.items():
        made = triton.ModelOptions(
            snapshot=path,
            kind="lookup" if name == "looked" else "ranking",
            max_batch_size=1024,
            threads=2,
            context=("user", "age") if name in ("users", "once") else None,
            instances=2 if name == "users" else 1,
            schema=schema_of(path) if path == snapshot else None,
        )
        triton.write_model(options.repository, name, made)
    with Fronts(options) as fronts:
        echo = directory / "echo"
        yield Served(trainer, np.concatenate(got), snapshot, echo, fronts.own, fronts)


@pytest.fixture
def client(protocol: str, served: Served) -> Iterator[Client]:
    made = Client(protocol, served.fronts.of(protocol))
    yield made
    made.raw.close()


def echoed(client: Client, dense_BD: NDArray[np.float32], *, jagged: bool) -> NDArray[np.float32]:
    """Return the DENSE that the served net got, column by column."""
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


# --- requests with contexts: in `users`, which is `shop`, user and age are a context's ------------


@dataclasses.dataclass
class Asked:
    """Users and candidates: the request with contexts, and the one that repeats them."""

    arrays: dict[str, NDArray[Any]]
    repeated: dict[str, NDArray[Any]]

    @classmethod
    def drawn(cls, seed: int, users: int = 5, most: int = 40) -> "Asked":
        rng = np.random.default_rng(seed)
        counts_U = rng.integers(1, most, users)
        of_B = np.repeat(np.arange(users), counts_U)
        bags_U, bags_B = (
            [rng.integers(0, 60, rng.integers(0, 4)) for _ in range(n)] for n in (users, len(of_B))
        )
        age_U, price_B, stars_B = (rng.lognormal(1, 1, n) for n in (users, len(of_B), len(of_B)))
        for column in (age_U, price_B, stars_B):
            column[rng.random(len(column)) < 0.2] = np.nan
        dense_BD = np.stack([price_B, age_U[of_B], stars_B], 1).astype(np.float32)
        bags = [bag for b, u in enumerate(of_B) for bag in (bags_U[u], bags_B[b])]
        return cls(
            {
                **{f"CONTEXT_{name}": array for name, array in flat(bags_U).items()},
                "CONTEXT_DENSE": age_U.astype(np.float32)[None],
                "CANDIDATES": counts_U.astype(np.int32)[None],
                **flat(bags_B),
                "DENSE": np.ascontiguousarray(dense_BD[:, [0, 2]]).reshape(1, -1),
            },
            {**flat(bags), "DENSE": dense_BD.reshape(1, -1)},
        )


def flat(bags: list[NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
    return {
        "KEYS": np.concatenate(bags).astype(np.int64)[None],
        "LENGTHS": np.array([[len(bag) for bag in bags]], np.int32),
    }


def test_candidates_are_scored_as_if_each_had_its_context(client: Client, served: Served) -> None:
    scores = []
    for seed in range(8):
        asked = Asked.drawn(seed, users=1 + seed)
        got = client.send(asked.arrays, model="users")
        wanted = client.send(asked.repeated, model="shop").as_numpy("SCORE")
        np.testing.assert_array_equal(got.as_numpy("SCORE"), wanted)
        again = client.send(asked.repeated, model="users").as_numpy("SCORE")
        np.testing.assert_array_equal(again, wanted)
        keys = asked.arrays["CONTEXT_KEYS"].size + asked.arrays["KEYS"].size
        assert got.as_numpy("SOURCE").shape == (1, keys)
        assert got.as_numpy("VERSION").shape == (1, 1)
        scores.append(wanted.ravel())
    assert len(np.unique(np.concatenate(scores))) > 100


def test_the_net_computes_what_is_a_contexts_once(served: Served) -> None:
    """In `once`, by another program; a request without contexts still runs the plain one."""
    client = Client("grpc", served.server)

    def by_program(model: str) -> float:
        of = "candidates_in_context_program"
        return metric(served.server.metrics(), "embertide_contexts_total", model=model, of=of)

    client.send(Asked.drawn(70).arrays, model="once")
    wait_until(lambda: by_program("once") > 0)
    time.sleep(1.5)  # counters of what was asked before reach the page
    before, candidates = by_program("once"), 0
    for seed in range(8):
        asked = Asked.drawn(seed, users=1 + seed)
        wanted = client.send(asked.repeated, model="shop").as_numpy("SCORE")
        got = client.send(asked.arrays, model="once").as_numpy("SCORE")
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
        plain = client.send(asked.repeated, model="once").as_numpy("SCORE")
        np.testing.assert_array_equal(plain, wanted)
        candidates += got.size
    wait_until(lambda: by_program("once") - before == candidates)
    assert by_program("users") == 0  # its program was made without contexts
    log = served.server.log_text()
    assert log.count("computes the dense net whole for each candidate: the dense program was m") > 0
    assert "model once computes" not in log
    client.raw.close()


def test_keys_of_a_context_are_looked_up_and_counted_once(served: Served) -> None:
    client = Client("grpc", served.server)
    of = ("requests", "contexts", "candidates", "keys_saved")

    def counted() -> list[float]:
        page = served.server.metrics()
        names = [metric(page, "embertide_contexts_total", model="users", of=each) for each in of]
        return [*names, metric(page, "embertide_lookup_keys_total", model="users")]

    client.send(Asked.drawn(90).repeated, model="users")
    wait_until(lambda: counted()[-1] > 0)
    asked = Asked.drawn(91)
    keys = asked.arrays["CONTEXT_KEYS"].size + asked.arrays["KEYS"].size
    saved = asked.repeated["KEYS"].size - keys
    candidates = int(asked.arrays["CANDIDATES"].sum())
    assert saved > 50
    time.sleep(1.5)  # counters of what was asked before reach the page
    before = counted()
    client.send(asked.arrays, model="users")
    expected = [b + more for b, more in zip(before, (1, 5, candidates, saved, keys), strict=True)]
    wait_until(lambda: counted() == expected)
    client.raw.close()


def test_the_printed_request_is_answered_as_the_page_says(client: Client) -> None:
    arrays = printed_request()
    assert arrays["CANDIDATES"].tolist() == [[2, 1]]
    user, it = [[7], [7], [8, 9]], [[100], [101], [102]]
    bags = [np.array(bag) for pair in zip(user, it, strict=True) for bag in pair]
    dense = np.array([[9.5, 30, 4, 12, 30, 3, 9.5, 41, 5]], np.float32)
    wanted = client.send({**flat(bags), "DENSE": dense}, model="shop").as_numpy("SCORE")
    got = client.send(arrays, model="users").as_numpy("SCORE")
    np.testing.assert_array_equal(got, wanted)
    assert got.shape == (1, 3)


def ints(*values: int) -> NDArray[np.int32]:
    return np.array([values], np.int32)


# By name: what of the printed request is otherwise, None where it is left out; and what is said.
WRONG_CONTEXTS: dict[str, tuple[dict[str, NDArray[Any] | None], str]] = {
    "too few": ({"CANDIDATES": ints(1, 1)}, "CANDIDATES sum to 2 but the request has 3 cand"),
    "too many": ({"CANDIDATES": ints(2, 2)}, "CANDIDATES sum to 4 but"),
    "huge": ({"CANDIDATES": ints(2**31 - 1, 2**31 - 1)}, "CANDIDATES sum to 4294967294 but"),
    "none of one": ({"CANDIDATES": ints(3, 0)}, "CANDIDATES of context 1 is 0; it must be at"),
    "negative": ({"CANDIDATES": ints(4, -1)}, "CANDIDATES of context 1 is -1"),
    "another count": ({"CANDIDATES": ints(3)}, r"CANDIDATES has shape \[1,1\]; for 2 contexts"),
    "no counts": ({"CANDIDATES": None}, "input CANDIDATES is missing"),
    "no keys": ({"CONTEXT_KEYS": None}, "input CONTEXT_KEYS is missing"),
    "no context": (
        {"CONTEXT_KEYS": np.zeros((1, 0), np.int64), "CONTEXT_LENGTHS": ints()},
        "the request has no context",
    ),
    "no candidate": ({"KEYS": np.zeros((1, 0), np.int64)}, "the request has no candidate"),
    "lengths": ({"CONTEXT_LENGTHS": ints(1, 1)}, "CONTEXT_LENGTHS sum to 2 but CONTEXT_KEYS has 3"),
    "no age": ({"CONTEXT_DENSE": None}, "input CONTEXT_DENSE is missing: the model takes 1 dense"),
    "all dense": ({"DENSE": np.ones((1, 9), np.float32)}, "for 3 samples of 2 dense features"),
    "infinite": (
        {"CONTEXT_DENSE": np.array([[1, np.inf]], np.float32)},
        r"CONTEXT_DENSE of sample 1 is not finite in column 0 \(age\)",
    ),
}


@pytest.mark.parametrize("name", WRONG_CONTEXTS)
def test_a_wrong_request_with_contexts_is_refused_by_itself(
    client: Client, served: Served, protocol: str, name: str
) -> None:
    changed, says = WRONG_CONTEXTS[name]
    good = printed_request()
    wrong = {tensor: array for tensor, array in {**good, **changed}.items() if array is not None}
    with pytest.raises(InferenceServerException, match=says):
        client.send(wrong, model="users")
    with pytest.raises(InferenceServerException, match="input"):
        client.send(good, model="shop")
    assert client.send(good, model="users").as_numpy("SCORE").shape == (1, 3)


def test_requests_of_both_forms_and_wrong_ones_are_answered_together(served: Served) -> None:
    client = Client("grpc", served.server)
    drawn = [Asked.drawn(100 + n, users=2, most=20) for n in range(40)]
    wanted = [client.send(each.repeated, model="shop").as_numpy("SCORE") for each in drawn]
    wrong = {**drawn[0].arrays, "CANDIDATES": ints(1, 1)}
    answers: list[queue.SimpleQueue[Any]] = []
    for n, each in enumerate(drawn):
        for arrays in (each.arrays, each.repeated, wrong if n % 4 == 0 else each.arrays):
            answers.append(queue.SimpleQueue())
            take = partial(_take, answers[-1])
            client.raw.async_infer("users", client.inputs(arrays), callback=take)
    for at, answer in enumerate(answers):
        result, error = answer.get(timeout=20)
        if at % 12 == 2:
            assert "CANDIDATES sum to 2" in str(error)
        else:
            assert error is None
            # In another batch the net's sums are rounded otherwise.
            np.testing.assert_allclose(result.as_numpy("SCORE"), wanted[at // 3], atol=1e-6)
    client.raw.close()


def _take(answer: queue.SimpleQueue[Any], result: Any, error: Any) -> None:
    answer.put((result, error))


def test_the_client_sends_a_context_once(served: Served) -> None:
    rng = np.random.default_rng(8)
    call = {"price": rng.lognormal(1, 1, 500), "stars": rng.integers(0, 6, 500)}
    context = {"user": [3, 44, 7], "age": 0.25}

    def saved() -> float:
        page = served.server.metrics()
        return metric(page, "embertide_contexts_total", model="users", of="keys_saved")

    time.sleep(1.5)  # counters of what was asked before reach the page
    before = saved()
    with NamedClient(served.server.grpc, timeout_s=20) as client:
        wanted = client.rank("shop", call, context=context)
        ranked = client.rank("users", call, context=context)
        wait_until(lambda: saved() - before == 3 * 499)
        with_sources = client.rank("users", call, context=context, sources=True)
    np.testing.assert_array_equal(ranked.scores, wanted.scores)
    np.testing.assert_array_equal(with_sources.scores, wanted.scores)
    assert with_sources.sources is not None
    assert with_sources.sources["user"].shape == (1500,)


def test_columns_that_no_request_carries_are_no_context(
    served: Served,
) -> None:
    client = Client("grpc", served.server)
    for names, says in (
        (("user", "who"), "which is no feature of the model"),
        (("age",), "one at least has to be the context"),
        (("user", "it"), "one at least has to be a candidate"),
    ):
        made = triton.ModelOptions(snapshot=served.shop, kind="ranking", context=names)
        triton.write_model(served.server.options.repository, "wrong", made)
        with pytest.raises(InferenceServerException, match=says):
            client.raw.load_model("wrong")
    client.raw.close()
