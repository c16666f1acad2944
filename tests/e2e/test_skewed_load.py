"""A fleet that is really read unevenly: what nodes measure, and the planner that evens it out."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checker import bucket_of
from fleet import CONFIG, KEYS, TABLE_OF_FEATURE, TABLES, Model
from numpy.typing import NDArray
from pair import Pair, start_pair
from repeated import Repeated
from serving import Client
from waiting import wait_until

from embertide.server.adapters import triton
from embertide.server.adapters.redis import RedisOptions, RedisServer

pytestmark = pytest.mark.alone

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
HOT = "node-0/0"
HOT_WEIGHT = 8  # reads of a key of its buckets, to one of any other
WINDOW_S = 5  # of load, as nodes measure it


class Reader(Repeated):
    """Asks one node for keys of which some are hot, and compares each answer with the model."""

    def __init__(self, model: Model, node: triton.TritonServer, weights: list[NDArray[np.float64]]):
        super().__init__(every_s=0)
        self.answers, self.wrong = 0, 0
        self._weights = weights
        self._client = Client("grpc", node)
        self._rng = np.random.default_rng(node.options.grpc_port)
        rows = model.versions[1]
        zero = np.zeros_like(next(iter(rows.values())))
        self._rows = [
            np.stack([rows.get((t, key), zero) for key in range(KEYS)]) for t in range(len(TABLES))
        ]

    def act(self) -> None:
        columns = [self._rng.choice(KEYS, 64, p=self._weights[t]) for t in TABLE_OF_FEATURE]
        got = self._client.send({"KEYS": np.stack(columns, 1)}, model="rank")
        pairs = zip(columns, TABLE_OF_FEATURE, strict=True)
        want = np.concatenate([self._rows[t][keys] for keys, t in pairs], 1)
        self.answers += 1
        self.wrong += not np.array_equal(got.as_numpy("EMBEDDING"), want)

    def stop(self) -> None:
        super().stop()
        self._client.raw.close()


@pytest.fixture
def site(tmp_path: Path, server_options: triton.ServerOptions) -> Iterator[tuple[Pair, Model]]:
    with contextlib.ExitStack() as stack:
        options = RedisOptions(log=tmp_path / "redis.log")
        url = stack.enter_context(RedisServer(options)).url
        model = Model(tmp_path / "publication", url, CACHE, seed=3)
        pair = start_pair(
            stack,
            tmp_path,
            server_options,
            url,
            model=CONFIG.name,
            publications=(model.publication.path,) * 2,
            kind="lookup",
            # Greedy takes a bucket's reads along as they are; it does not know yet which of them
            # copies would answer elsewhere.
            hot_rows_bytes=0,
        )
        yield pair, model


def _weights(pair: Pair) -> list[NDArray[np.float64]]:
    """By table, how often each key is read."""
    owners = pair.owners()
    weights = []
    for table in TABLES:
        hot = [owners[table.name, bucket_of(table, key)] == [HOT] for key in range(KEYS)]
        weight = np.where(hot, HOT_WEIGHT, 1.0)
        weights.append(weight / weight.sum())
    return weights


def test_greedy_evens_out_what_was_measured(site: tuple[Pair, Model]) -> None:
    pair, model = site

    def skew() -> float:
        return float(pair.ask("status")["skew"]["0"])

    readers = [Reader(model, node, _weights(pair)) for node in pair.nodes]
    for reader in readers:
        reader.start()
    try:
        wait_until(lambda: skew() >= 2.0, 4 * WINDOW_S)
        before = pair.owners()
        said = pair.command("reshard", "--planner", "greedy", "--watch")
        after = pair.owners()
        # The plan's promise, and then what is measured under the same reads.
        wait_until(lambda: skew() <= 1.2, 4 * WINDOW_S)
        for _ in range(3):
            assert skew() <= 1.2
    finally:
        for reader in readers:
            reader.stop()
    for reader in readers:
        assert reader.error is None
        assert (reader.wrong, reader.answers > 50) == (0, True)
    moved = {which for which in before if before[which] != after[which]}
    assert 0 < len(moved) < len(before)
    assert any(before[which] == [HOT] for which in moved)
    assert "max/mean" in said, said
    assert HOT in said
    assert f"{len(moved)} buckets" in said
