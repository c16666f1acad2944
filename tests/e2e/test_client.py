"""embertide.Client against a real Triton: the right vectors, by name, whatever the columns."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import tritonclient.grpc
from serving import beside
from tritonclient.utils import InferenceServerException
from waiting import wait_until

from bench.authority import Authority
from embertide.client import (
    AsyncClient,
    Client,
    InputError,
    RefusedError,
    Source,
    Tls,
    UnavailableError,
    VersionGoneError,
)
from embertide.server.adapters import triton
from embertide.server.adapters.schema import schema_of

MODEL = "named"
ITEMS, USERS, HISTORIES, TAGS = (
    [0, 7, 987_654_321],
    [1, 2, 999],
    [[14, 21], [], [28]],
    [[100], [101, 102], [103]],
)
COLUMNS = {"item_id": ITEMS, "user_id": USERS, "history": HISTORIES, "tags": TAGS}
SAMPLES = [
    [[item], [user], history, tags]
    for item, user, history, tags in zip(ITEMS, USERS, HISTORIES, TAGS, strict=True)
]
NAMES = ("item_id", "user_id", "history", "tags")


@pytest.fixture(scope="module")
def served(
    server: triton.TritonServer, snapshot: tuple[Path, Any]
) -> Iterator[triton.TritonServer]:
    """The shared server, with a model that tells its features."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as raw:
        options = triton.ModelOptions(
            snapshot=snapshot[0],
            max_batch_size=8,
            max_samples=8,
            max_keys=60,
            node="node-named",
            schema=schema_of(snapshot[0]),
        )
        triton.write_model(server.options.repository, MODEL, options)
        raw.load_model(MODEL)
        yield server
        raw.unload_model(MODEL)


@pytest.fixture
def client(served: triton.TritonServer) -> Iterator[Client]:
    with Client(served.grpc, timeout_s=20) as made:
        yield made


def joined(embeddings: Any) -> Any:
    """All vectors of each sample, one after the other."""
    return np.concatenate([np.stack(list(embeddings[name])) for name in NAMES], axis=1)


def test_vectors_are_the_right_ones_by_name_and_kind(client: Client, reference: Any) -> None:
    expected = reference.answer(SAMPLES)
    looked = client.lookup(MODEL, dict(reversed(COLUMNS.items())), sources=True)
    np.testing.assert_allclose(joined(looked.embeddings), expected, rtol=1e-6)
    assert (looked.version, looked.watermark_ms) == (41, 1_700_000_000_000)
    assert (looked.nodes, looked.degraded, looked.requests) == (("node-named",), None, 1)
    assert looked.sources is not None
    assert looked.sources["item_id"].tolist() == [Source.DDR, Source.DDR, Source.DEFAULT]
    assert len(looked.sources["history"]) == 3
    frame = pd.DataFrame(COLUMNS, index=["a", "b", "c"])
    found = client.lookup(MODEL, frame).embeddings
    np.testing.assert_allclose(joined(found), expected, rtol=1e-6)
    assert list(found.index) == ["a", "b", "c"]
    for table in (pa.table(COLUMNS), pa.RecordBatch.from_pydict(COLUMNS)):
        arrow = client.lookup(MODEL, table).embeddings
        assert arrow.schema.field("tags").type == pa.list_(pa.float32(), 4)
        vectors = {name: arrow.column(name).to_pylist() for name in NAMES}
        np.testing.assert_allclose(joined(vectors), expected, rtol=1e-6)


def test_what_is_too_large_for_a_request_is_cut(client: Client, reference: Any) -> None:
    rng = np.random.default_rng(3)
    samples = [
        [[int(rng.integers(3000))], [int(rng.integers(50))], rng.integers(0, 3000, n).tolist(), []]
        for n in rng.integers(0, 12, 200)
    ]
    columns = {name: [sample[f] for sample in samples] for f, name in enumerate(NAMES)}
    looked = client.lookup(MODEL, columns)
    assert looked.requests >= 25
    np.testing.assert_allclose(joined(looked.embeddings), reference.answer(samples), rtol=1e-6)


def test_calls_of_many_tasks_share_a_client(served: triton.TritonServer, reference: Any) -> None:
    async def run() -> list[Any]:
        async with AsyncClient(served.grpc, timeout_s=20) as client:
            calls = [client.lookup(MODEL, COLUMNS, version=41) for _ in range(20)]
            answers: list[Any] = await asyncio.gather(*calls)
            return answers

    for looked in asyncio.run(run()):
        np.testing.assert_allclose(joined(looked.embeddings), reference.answer(SAMPLES), rtol=1e-6)


def test_refusals_are_errors_of_their_own(client: Client) -> None:
    with pytest.raises(VersionGoneError, match="41"):
        client.lookup(MODEL, COLUMNS, version=7)
    with pytest.raises(InputError, match="feature 'user_id', row 2: 'x' is no integer"):
        client.lookup(MODEL, {**COLUMNS, "user_id": [1, 2, "x"]})
    with pytest.raises(InputError, match="row 0 alone has 63 keys; model 'named' takes 60"):
        client.lookup(MODEL, {**COLUMNS, "history": [[1] * 60, [], []]})
    with pytest.raises(RefusedError, match=r"is of kind lookup: call lookup\(\)"):
        client.rank(MODEL, COLUMNS)
    with pytest.raises(RefusedError, match="absent"):
        client.lookup("absent", COLUMNS)


def test_an_endpoint_that_is_away_costs_a_try(served: triton.TritonServer, reference: Any) -> None:
    with Client(["127.0.0.1:1", served.grpc], timeout_s=20) as client:
        looked = client.lookup(MODEL, COLUMNS)
        np.testing.assert_allclose(joined(looked.embeddings), reference.answer(SAMPLES), rtol=1e-6)
        assert client.counters()["endpoints_left"] == 1


def test_a_schema_of_another_model_is_refused_at_load(
    served: triton.TritonServer, snapshot: tuple[Path, Any]
) -> None:
    other = schema_of(snapshot[0]).replace("user_id", "user")
    options = triton.ModelOptions(snapshot=snapshot[0], schema=other)
    triton.write_model(served.options.repository, "other", options)
    with tritonclient.grpc.InferenceServerClient(served.grpc) as raw:
        says = "names the features item_id, user, history, tags; the model has item_id, user_id"
        with pytest.raises(InferenceServerException, match=says):
            raw.load_model("other")


def has_metrics(server: triton.TritonServer) -> bool:
    """They come up last."""
    assert server.alive(), server.log_text()
    with contextlib.suppress(triton.TritonError):
        return bool(server.metrics())
    return False


@pytest.mark.parametrize("front", ["own", "triton"])
def test_tls_holds_both_ways(
    server_options: triton.ServerOptions,
    snapshot: tuple[Path, Any],
    tmp_path: Path,
    front: triton.Front,
) -> None:
    Authority().issue(tmp_path / "server", "node")
    files = {name: tmp_path / "server" / name for name in ("tls.crt", "tls.key", "ca.crt")}
    by_front: dict[str, dict[str, Any]] = {
        "own": {"tls": tmp_path / "server"},
        "triton": {
            "extra": (
                "--grpc-use-ssl=1",
                "--grpc-use-ssl-mutual=1",
                f"--grpc-server-cert={files['tls.crt']}",
                f"--grpc-server-key={files['tls.key']}",
                f"--grpc-root-cert={files['ca.crt']}",
            )
        },
    }
    options = beside(
        server_options,
        tmp_path / "models",
        tmp_path / "triton.log",
        [MODEL],
        front=front,
        **by_front[front],
    )
    model = triton.ModelOptions(snapshot=snapshot[0], schema=schema_of(snapshot[0]))
    triton.write_model(options.repository, MODEL, model)
    # The starter of the server asks ours at a socket of its own, and Triton's in plain text.
    with triton.TritonServer(options, wait=front == "own") as running:
        wait_until(lambda: has_metrics(running), 60)
        ours = Tls(ca=files["ca.crt"], certificate=files["tls.crt"], key=files["tls.key"])
        with Client(running.grpc, tls=ours, token="secret", timeout_s=10) as client:
            assert client.lookup(MODEL, COLUMNS).version == 41
        for wrong in (None, Tls(ca=files["ca.crt"])):
            client = Client(running.grpc, tls=wrong, tries=1, timeout_s=5)
            with client, pytest.raises(UnavailableError):
                client.lookup(MODEL, COLUMNS)
