"""A node that follows a publication goes over to another schema, and answers all the while."""

import dataclasses
import json
import types
import urllib.request
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from checker import CONFIG, CheckerPublisher, Traffic
from served import Addresses, serving
from serving import MODULES, Client, flip_byte, metric
from tritonclient.utils import InferenceServerException
from waiting import wait_until

import embertide
from embertide.server.adapters import triton
from embertide.trainer.config import HeadConfig

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
# The same columns and first head, so that one client may ask before and after.
OTHER = dataclasses.replace(
    CONFIG,
    tables=(CONFIG.tables[0], dataclasses.replace(CONFIG.tables[1], dtype="fp16")),
    heads=(HeadConfig(name="click"), HeadConfig(name="buy")),
)


class Watched:
    """A node of the checker model that `embertide serve` runs, and what it says."""

    def __init__(self, addresses: Addresses, directory: Path) -> None:
        self.addresses, self._log = addresses, directory / "serve.log"
        self.server = cast("Any", types.SimpleNamespace(**addresses))

    def page(self) -> str:
        with urllib.request.urlopen(f"http://{self.addresses['metrics']}/metrics") as reply:
            return str(reply.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.page(), name, model="rank", **labels)

    def wait_for(self, version: int) -> None:
        wait_until(lambda: self.metric("embertide_version") == version)

    def wait_said(self, text: str) -> None:
        wait_until(lambda: text in self._log.read_text(), timeout_s=60)


def schema_of(snapshot: Path) -> str:
    return str(json.loads((snapshot / "manifest.json").read_text())["schema_id"])


def test_a_schema_is_switched_under_traffic(tmp_path: Path, backends: Path) -> None:
    publisher = CheckerPublisher(tmp_path / "pub", None, CACHE)
    before = schema_of(next((tmp_path / "pub").glob("snapshots/*")))
    more = ["--kind", "ranking", "--name", "rank", "--ssd-mib", "16", "--ddr-mib", "64"]
    with serving(tmp_path / "pub", tmp_path / "node", backends, *more) as addresses:
        node = Watched(addresses, tmp_path / "node")
        traffic = Traffic(node.server, threads=4, models=["rank"])
        client = Client("grpc", node.server)
        asked = embertide.Client(node.server.grpc, timeout_s=20)
        keys_BF = np.array([[1, 2], [3, 4]], np.int64)
        columns = {"fa": keys_BF[:, 0], "fb": keys_BF[:, 1]}
        try:
            publisher.publish(2)
            node.wait_for(2)
            with pytest.raises(InferenceServerException, match="SCORE_buy"):
                client.send({"KEYS": keys_BF}, model="rank", outputs=["SCORE_buy"])
            assert list(asked.rank("rank", columns).heads) == ["score"]

            # A harmed snapshot has no effect: neither a step back, nor an end.
            other = publisher.snapshot(10, OTHER)
            file = next((other / "tables" / "b").iterdir())
            flip_byte(file, 100)
            node.wait_said(f"schema {schema_of(other)} cannot be loaded")
            assert node.metric("embertide_model_loads_total", result="failed") == 1
            publisher.publish(3)
            node.wait_for(3)
            assert node.metric("embertide_schema", schema=before) == 1
            keys = node.metric("embertide_lookup_keys_total")

            flip_byte(file, 100)
            node.wait_said(f"serves schema {schema_of(other)} (version 10) in place of {before}")
            node.wait_for(10)
            publisher.snapshot(11, OTHER)
            node.wait_for(11)
            wait_until(lambda: 11 in traffic.findings.versions)
            # The further head is there, for those who ask.
            alone = client.send({"KEYS": keys_BF}, model="rank", outputs=["SCORE_buy"])
            assert alone.as_numpy("SCORE_buy").tolist() == [[22.0], [22.0]]
            assert alone.as_numpy("SCORE") is None
            assert list(asked.rank("rank", columns).scores) == [11, 11]  # it was told of one
            asked.forget("rank")
            heads = asked.rank("rank", columns).heads
            assert {name: each.tolist() for name, each in heads.items()} == {
                "click": [11, 11],
                "buy": [22, 22],
            }
        finally:
            client.raw.close()
            asked.close()
            findings = traffic.stop()
        assert not traffic.errors
        assert (findings.mixed, findings.back) == (0, 0)
        assert findings.versions >= {2, 3, 10, 11}
        # Counters go on, and nothing of the former one is left.
        assert node.metric("embertide_lookup_keys_total") > keys
        assert node.metric("embertide_model_loads_total", result="loaded") == 2
        wait_until(lambda: node.metric("embertide_schema") == 1)
        assert node.metric("embertide_schema", schema=schema_of(other)) == 1
        ssd = tmp_path / "node" / "ssd"
        wait_until(
            lambda: [f"schema-{schema_of(other)}" in p.name for p in ssd.iterdir()] == [True]
        )
        # Triton loads models now, and for nobody else.
        with MODULES["grpc"].InferenceServerClient(addresses["grpc"]) as raw:
            for headers in ({}, {triton.GRPC_ADMIN_HEADER: "k" * 40}):
                for ask in (raw.load_model, raw.unload_model):
                    with pytest.raises(InferenceServerException, match="restricted"):
                        ask("rank", headers=headers)
