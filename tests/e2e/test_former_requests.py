"""Requests of a former layout to a model whose nodes make columns, and has sequences.

test_transforms_serving.py has those with dense features.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from serving import FRONTS, Client, change_manifest

from embertide.server.adapters import triton

NO_KEY = -(2**63)


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, new_snapshot: Callable[[], Path]) -> Iterator[Client]:
    """A client of the model `changed`: it had user_id and gone, and now crosses two of four."""
    server = request.getfixturevalue(FRONTS[request.param])
    snapshot = new_snapshot()
    features = json.loads((snapshot / "manifest.json").read_text())["features"]
    both = {"name": "both", "table": "item", "pooling": "sum", "crossed": ["item_id", "user_id"]}
    features.insert(1, both)
    features[-1]["weighed"] = True  # tags
    former = [{"keys": ["gone", "user_id"], "dense": []}]
    change_manifest(snapshot, features=features, former=former)
    options = triton.ModelOptions(snapshot=snapshot, max_batch_size=64)
    triton.write_model(server.options.repository, "changed", options)
    made = Client(request.param, server)
    made.raw.load_model("changed")
    yield made
    made.raw.unload_model("changed")
    made.raw.close()


def embeddings(client: Client, columns: int, **arrays: NDArray[Any]) -> NDArray[np.float32]:
    more = {"parameters": {"columns": columns}} if "LENGTHS" in arrays else {}
    result = client.send(arrays, model="changed", outputs=["EMBEDDING"], **more)
    return np.asarray(result.as_numpy("EMBEDDING"))


def test_columns_are_made_from_what_a_former_request_has(client: Client) -> None:
    user_B, gone_B = np.random.default_rng(5).integers(0, 60, (2, 8))
    no_key_B = np.full(8, NO_KEY)
    got = embeddings(client, 2, KEYS=np.stack([gone_B, user_B], 1))
    own = np.stack([no_key_B, user_B, no_key_B, no_key_B], 1)
    ones = np.ones((8, 4), np.float32)
    np.testing.assert_array_equal(got, embeddings(client, 4, KEYS=own, WEIGHTS=ones))
    assert np.any(got)


def test_of_a_jagged_one_only_what_others_are_made_from_gets_a_key(client: Client) -> None:
    user_B, gone_B = np.random.default_rng(6).integers(0, 60, (2, 8))
    got = embeddings(
        client,
        2,
        KEYS=np.stack([gone_B, gone_B, user_B], 1).reshape(1, -1),
        LENGTHS=np.array([[2, 1] * 8], np.int32),
        WEIGHTS=np.full((1, 24), 0.5, np.float32),
    )
    own = embeddings(
        client,
        4,
        KEYS=np.stack([np.full(8, NO_KEY), user_B], 1).reshape(1, -1),
        LENGTHS=np.array([[1, 1, 0, 0] * 8], np.int32),
        WEIGHTS=np.array([[1, 0.5] * 8], np.float32),
    )
    np.testing.assert_array_equal(got, own)
