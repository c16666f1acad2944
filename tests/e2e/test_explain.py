"""`embertide explain` where a model is shared: whichever node is asked says where the row is."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checker import CONFIG as CHECKED
from checker import CheckerPublisher, bucket_of
from commands import embertide
from fleet import TABLES, FleetSite, start_fleet
from pair import start_pair
from serving import Client
from typer.testing import Result
from waiting import wait_until

from embertide.server.adapters import triton
from embertide.server.adapters.redis import RedisOptions, RedisServer

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "cache" / "dense"
NODES = 3
ITEM = 1  # a table
UNKNOWN = 100_000


def explain(*words: object) -> Result:
    return embertide("explain", *words)


def said(*words: object) -> dict[str, Any]:
    done = explain(*words, "--json")
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FleetSite]:
    more = {"ddr_bytes": 64 << 20, "hbm_bytes": 16 << 20, "hbm_kind": "twin"}
    with start_fleet(tmp_path, nodes=NODES, devices=1, seed=6, **more) as running:
        yield running


def owner(site: FleetSite, key: int) -> int:
    return site.writer.owners[ITEM, bucket_of(TABLES[ITEM], key)][0][0]


def test_every_node_says_where_a_row_is(site: FleetSite) -> None:
    present = [key for table, key in site.model.versions[1] if table == ITEM]
    key = next(key for key in present if owner(site, key) == 2)
    gone = next(k for k in range(600) if k not in present and owner(site, k) == 2)
    there = site.nodes[2].address
    for node in site.nodes:
        row = said("item", key, "--node", node.address)
        assert (row["asked"], row["node"], row["remote"]) == (
            node.address,
            there,
            node.address != there,
        )
        assert (row["resident"], row["tier"], row["payload_bytes"]) == (True, "ddr", 16)
        assert row["hbm_copy"] is None
        absent = said("item", gone, "--node", node.address)
        assert (absent["node"], absent["resident"], absent["tier"]) == (there, False, None)
    text = explain("item", key, "--node", site.nodes[0].address).stdout
    assert f"it asks {there} (remote)" in " ".join(text.split())
    # A row that is asked for at its owner gets a copy in HBM, which ends with its next version.
    local = [[key] if bag == 1 else [] for bag in range(4)]

    def copied() -> bool:
        site.nodes[2].read(local)
        return bool(said("item", key, "--node", site.nodes[0].address)["hbm_copy"] == 0)

    wait_until(copied)


def test_a_dead_owner_is_named(site: FleetSite) -> None:
    key = next(k for t, k in site.model.versions[1] if t == ITEM and owner(site, k) == 1)
    site.nodes[1].process.kill()
    done = explain("item", key, "--node", site.nodes[0].address)
    assert done.exit_code == 1
    assert f"{site.nodes[0].address} does not hold bucket" in done.stderr
    assert f"no node that shares a model answers at {site.nodes[1].address}" in done.stderr


def test_triton_nodes_of_several_instances_explain_one_model(
    tmp_path: Path, server_options: triton.ServerOptions
) -> None:
    with contextlib.ExitStack() as stack:
        redis_options = RedisOptions(log=tmp_path / "redis.log")
        redis = stack.enter_context(RedisServer(redis_options))
        publisher = CheckerPublisher(tmp_path / "publication", redis.url, CACHE)
        pair = start_pair(
            stack,
            tmp_path,
            server_options,
            redis.url,
            model=CHECKED.name,
            publications=(publisher.publication.path,) * 2,
            kind="lookup",
        )
        peers = {n["name"]: n["address"] for n in pair.ask("plan", "show")["topology"]["nodes"]}
        owners = pair.owners()
        client = stack.enter_context(contextlib.closing(Client("grpc", pair.nodes[0]).raw))
        assert client.is_model_ready("rank")
        for key in range(8):
            planned = pair.ask("explain", "a", str(key))
            holder = owners["a", planned["bucket"]][0]
            where = peers[holder.split("/")[0]]
            assert (planned["node"], planned["remote"]) == (where, False)
            assert f"{holder.split('/')[0]}/{planned['device']}" == holder
            for address in peers.values():
                row = said("a", key, "--node", address)
                assert (row["node"], row["remote"]) == (where, address != where)
                assert (row["resident"], row["version"]) == (True, publisher.newest)
        absent = said("a", UNKNOWN, "--node", peers["node-0"])
        assert not absent["resident"]
