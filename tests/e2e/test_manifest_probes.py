"""A node that is started by the words of its manifest answers what the manifest has asked of it."""

import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import wait_until

from bench.nodes import make_plan, publication_of, publish_plan
from embertide._common.direct_http import open_url
from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer

NODES = Path(__file__).parents[2] / "k8s" / "base" / "group" / "nodes.yaml"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def container() -> dict[str, Any]:
    """The container `node` of the manifest."""
    pod = yaml.safe_load(NODES.read_text())["spec"]["template"]["spec"]
    return next(each for each in pod["containers"] if each["name"] == "node")


def passes(probe: dict[str, Any], ports: dict[str, int]) -> bool:
    """Whether a probe is content, as a kubelet asks; raises where nobody is there."""
    if "httpGet" in probe:
        asked = probe["httpGet"]
        with open_url(f"http://127.0.0.1:{ports[str(asked['port'])]}{asked['path']}", 5) as reply:
            return bool(reply.status == 200)
    with grpc.insecure_channel(f"127.0.0.1:{ports[str(probe['grpc']['port'])]}") as channel:
        said = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return bool(said.status == health_pb2.HealthCheckResponse.SERVING)


def test_a_node_answers_its_probes(
    snapshot: tuple[Path, Any], tmp_path: Path, backends: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERTIDE_BACKENDS", str(backends))
    node, given = container(), {}
    for each, free in zip(node["ports"], free_ports(len(node["ports"])), strict=True):
        given[each["name"]] = given[str(each["containerPort"])] = free
    assert given.keys() >= {"8001", "8002", "7200", "7201"}
    (tmp_path / "token").write_text("a-token-of-these-tests\n")
    publication = publication_of(snapshot[0], tmp_path / "publication")
    with RedisServer(RedisOptions(log=tmp_path / "redis.log")) as redis:
        # The plan that the control plane would make.
        peer = f"127.0.0.1:{given['peer']}"
        publish_plan(redis.url, "news", make_plan(snapshot[0], [peer]))
        values = {
            "/publication/news": str(publication),
            "--bus=$(REDIS_BUS)": f"--bus={redis.url}",
            "--state=$(REDIS_STATE)": f"--state={redis.url}",
            "--control=embertide-control:7100": "--kind=lookup",  # of the snapshot of these tests
            "--token-file=/etc/embertide/token": f"--token-file={tmp_path / 'token'}",
            "--node=$(POD_NAME)": "--node=node-0",
            "--peer=$(POD_NAME).embertide-nodes:7200": f"--peer={peer}",
            "--peer-listen=0.0.0.0:7200": f"--peer-listen={peer}",
            "--health-listen=0.0.0.0:7201": f"--health-listen=127.0.0.1:{given['probe']}",
            "--directory=/run/embertide": f"--directory={tmp_path / 'run'}",
            "--host=0.0.0.0": "--host=127.0.0.1",
            "--grpc-port=8001": f"--grpc-port={given['grpc']}",
            "--metrics-port=8002": f"--metrics-port={given['metrics']}",
            "--leave-s=15": "--leave-s=0",
        }
        words = node["command"]
        assert values.keys() <= set(words)
        command = [sys.executable, "-m", "embertide.server.cli"]
        command += [values.get(word, word) for word in words[1:]]
        with Child(command, log=tmp_path / "serve.log") as child:
            wait_until(lambda: "is ready" in child.log_text() or not child.alive(), 60)
            assert child.alive(), child.log_text()
            assert [each for each in PROBES if not passes(node[each], given)] == []
