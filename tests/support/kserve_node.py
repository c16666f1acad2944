"""A ranking model behind KServe's gRPC that fails, waits and answers as it is told."""

import collections
import json
import threading
import time
from concurrent import futures
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

SCHEMA = {"features": [{"name": "user", "dim": 2}], "dense": {"columns": 0}}
Failure = tuple[grpc.StatusCode, str]


class Node(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A ranking model whose score is the key, of head n so many times it; fails as it is told."""

    def __init__(self, port: int = 0) -> None:
        self.fails: collections.deque[Failure] = collections.deque()
        self.always: Failure | None = None  # what every RPC fails with
        self.ready = True
        self.absent: Failure | None = None  # what ModelReady fails with
        self.answers = threading.Event()  # not set: it stands still
        self.answers.set()
        self.works = threading.Event()  # not set: it takes requests, and does not answer them
        self.works.set()
        self.deadlines: list[float | None] = []  # of gRPC
        self.cancelled = 0
        self.seen: list[Any] = []
        self.ended: list[str] = []  # ids of those that no longer wait
        self.metadata: list[dict[str, str]] = []
        self.version, self.degraded_keys = 5, 0
        self.slow_s = 0.0
        self.told: dict[str, Any] = SCHEMA
        self._server = grpc.server(futures.ThreadPoolExecutor(64))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def _outputs(self) -> list[str]:
        return ["SCORE", *(f"SCORE_{head}" for head in self.told.get("heads", [])[1:])]

    def _take(self, context: Any) -> None:
        """Note what gRPC says of a call; wait and fail as told."""
        left_s = context.time_remaining()  # without a deadline some 10^18
        self.deadlines.append(left_s if left_s is not None and left_s < 1e9 else None)
        self.answers.wait(60)
        if self.always is not None:
            context.abort(*self.always)

    def ModelReady(self, request: Any, context: Any) -> Any:
        self._take(context)
        if self.absent is not None:
            context.abort(*self.absent)
        return service_pb2.ModelReadyResponse(ready=self.ready)

    def ModelConfig(self, request: Any, context: Any) -> Any:
        self._take(context)
        reply = service_pb2.ModelConfigResponse()
        config = reply.config
        config.name, config.backend, config.max_batch_size = request.name, "embertide", 2
        config.input.add(name="KEYS")
        for name in self._outputs():
            config.output.add(name=name)
        config.parameters["kind"].string_value = "ranking"
        if self.told:
            config.parameters["schema"].string_value = json.dumps(self.told)
        return reply

    def ModelInfer(self, request: Any, context: Any) -> Any:
        self._take(context)
        self.seen.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.works.wait(60)
        time.sleep(self.slow_s)
        self.cancelled += not context.is_active()
        self.ended.append(request.id)
        if self.fails:
            context.abort(*self.fails.popleft())
        keys = np.frombuffer(request.raw_input_contents[0], np.int64)
        reply = service_pb2.ModelInferResponse(model_name=request.model_name)
        asked = {output.name for output in request.outputs}
        for n, name in enumerate(self._outputs(), 1):
            if name in asked:
                reply.outputs.add(name=name, datatype="FP32", shape=[len(keys), 1])
                reply.raw_output_contents.append((n * keys).astype(np.float32).tobytes())
        said = {"version": self.version, "watermark_ms": 77, "degraded_keys": self.degraded_keys}
        for name, value in said.items():
            reply.parameters[name].int64_param = value
        reply.parameters["node"].string_param = self.url
        return reply
