"""Runs in a pod that is none of ours: tries every door, and prints what became of it as JSON."""

import json
import socket
from collections.abc import Callable
from typing import Any

import grpc
import redis
import tritonclient.grpc as triton
from google.protobuf.message import Message
from tritonclient.utils import InferenceServerException

from embertide.v1 import control_pb2, control_pb2_grpc, node_pb2, node_pb2_grpc

DOORS = (("embertide-bus", 6379), ("embertide-nodes", 7200), ("embertide-control", 7100))
CONTROL, NODE = "embertide-control:7100", "embertide-node-0.embertide-nodes:7200"


def reach(name: str, port: int) -> str:
    try:
        socket.create_connection((name, port), 3).close()
    except OSError as error:
        return type(error).__name__
    return "yes"


def ask_redis(**how: Any) -> str:
    try:
        client = redis.Redis("embertide-bus", socket_timeout=3, socket_connect_timeout=3, **how)
        return str(client.xlen("e:x"))
    except redis.RedisError as error:
        return f"refused: {type(error).__name__}"


def ask(stub: Any, request: Message) -> str:
    """Call GetStatus of a service of ours."""
    try:
        stub.GetStatus(request, timeout=5)
    except grpc.RpcError as error:
        return f"refused: {error.code().name}"
    return "answered"


def ask_control(channel: grpc.Channel) -> str:
    stub = control_pb2_grpc.ControlServiceStub(channel)
    return ask(stub, control_pb2.ControlServiceGetStatusRequest())


def ask_node(channel: grpc.Channel) -> str:
    stub = node_pb2_grpc.NodeServiceStub(channel)
    return ask(stub, node_pb2.NodeServiceGetStatusRequest())


def ask_triton(what: Callable[[Any], Any]) -> str:
    with triton.InferenceServerClient("embertide:8001") as client:
        try:
            what(client)
        except InferenceServerException as error:
            return f"refused: {error.status()}"
    return "answered"


def main() -> None:
    """Try all of them."""
    tls: dict[str, Any] = {"ssl": True, "ssl_cert_reqs": "none"}
    nobody = grpc.ssl_channel_credentials()
    found = {f"reach {name}": reach(name, port) for name, port in DOORS} | {
        "Redis in plain text": ask_redis(),
        "Redis without a user": ask_redis(**tls),
        "Redis as its probe": ask_redis(**tls, username="probe", password="x"),
        "control plane in plain text": ask_control(grpc.insecure_channel(CONTROL)),
        "control plane without a certificate": ask_control(grpc.secure_channel(CONTROL, nobody)),
        "a node in plain text": ask_node(grpc.insecure_channel(NODE)),
        "a node without a certificate": ask_node(grpc.secure_channel(NODE, nobody)),
        "Triton's HTTP": f"refused: {http}"
        if (http := reach("embertide-nodes", 8000)) != "yes"
        else "yes",
        "Triton's unload": ask_triton(lambda client: client.unload_model("news")),
        "Triton's load": ask_triton(lambda client: client.load_model("news")),
        "Triton's trace setting": ask_triton(lambda client: client.get_trace_settings()),
    }
    print(json.dumps(found))


main()
