"""A server that is somebody else's, or broken: whatever it answers, a call ends as it says it does.

The server is a gRPC one that sends the bytes it is told to.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from embertide.client import Client, ClientError

ROWS = 3
SCHEMA: dict[str, Any] = {
    "features": [{"name": "user", "dim": 2, "pooling": "sum"}],
    "dense": {"columns": 1, "names": ["price"]},
    "heads": ["click", "buy"],
    "bins": [],
}
SAID = {"version": 5, "watermark_ms": 7, "plan_epoch": 1, "degraded_keys": 0, "staleness_ms": 3}
CALL = {"user": [1, 2, 3], "price": [0.5, None, 2.0]}


class Liar(grpc.GenericRpcHandler):
    """A server that answers each method with bytes, as they are."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.compressed = False
        options = [("grpc.max_send_message_length", -1)]
        self._server = grpc.server(futures.ThreadPoolExecutor(4), [self], options=options)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]

        def answer(request: bytes, context: Any) -> bytes:
            if self.compressed:
                context.set_compression(grpc.Compression.Gzip)
            return self.answers[name]

        return grpc.unary_unary_rpc_method_handler(answer)

    def tell(self, schema: Any = SCHEMA, **fields: Any) -> None:
        """Answer what a model takes: `schema` is text, or becomes JSON."""
        config = service_pb2.ModelConfigResponse().config
        config.name, config.backend, config.max_batch_size = "m", "embertide", 8
        for name in ("SCORE", "SCORE_buy"):
            config.output.add(name=name)
        config.parameters["kind"].string_value = "ranking"
        text = schema if isinstance(schema, str) else json.dumps(schema)
        config.parameters["schema"].string_value = text
        for name, value in fields.items():
            if name in ("name", "backend", "max_batch_size"):
                setattr(config, name, value)
            else:
                config.parameters[name].string_value = value
        whole = service_pb2.ModelConfigResponse(config=config)
        self.answers["ModelConfig"] = whole.SerializeToString()

    def infer(self, response: Any) -> None:
        """Answer a ranking so."""
        self.answers["ModelInfer"] = response.SerializeToString()


def right(rows: int = ROWS) -> Any:
    """The answer that a node would give."""
    response = service_pb2.ModelInferResponse(model_name="m")
    for name in ("SCORE", "SCORE_buy"):
        response.outputs.add(name=name, datatype="FP32", shape=[rows, 1])
        response.raw_output_contents.append(np.ones(rows, np.float32).tobytes())
    for name, value in SAID.items():
        response.parameters[name].int64_param = value
    response.parameters["node"].string_param = "node-0"
    return response


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    running = Liar()
    yield running
    running._server.stop(None).wait()


def ask(liar: Liar) -> bool:
    """Rank; a right answer has a score a row, all else is a ClientError that one line says."""
    with Client(liar.address, tries=1, timeout_s=20) as client:
        try:
            ranked = client.rank("m", CALL)
        except ClientError as error:
            text = str(error)
            assert "\n" not in text
            assert "\x1b" not in text
            assert len(text) < 1500
            return False
        assert all(len(each) == ROWS for each in ranked.heads.values())
        assert ranked.version >= 0
        return True


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
OFTEN = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def honest(liar: Liar) -> Liar:
    liar.tell()
    liar.infer(right())
    return liar


def test_a_right_answer_is_taken(honest: Liar) -> None:
    assert ask(honest)


@st.composite
def schemas(draw: st.DrawFn) -> Any:
    """A schema with one place of it replaced, or none at all."""
    whole = json.loads(json.dumps({**SCHEMA, "bins": [{"feature": "user", "dense": 0}]}))
    places: list[tuple[Any, Any]] = [(whole, key) for key in whole]
    places += [(whole["dense"], key) for key in whole["dense"]]
    places += [(whole["features"][0], key) for key in (*whole["features"][0], "more")]
    places += [(whole["bins"][0], key) for key in ("feature", "dense", "edges")]
    places += [(whole["features"], 0), (whole["bins"], 0)]
    at, key = draw(st.sampled_from(places))
    at[key] = draw(ANY)
    return draw(st.sampled_from([whole, whole, whole, draw(ANY)]))


@OFTEN
@given(schema=schemas())
def test_a_schema_of_anything_is_refused_or_right(honest: Liar, schema: Any) -> None:
    honest.tell(schema)
    ask(honest)


@OFTEN
@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "name": st.text(max_size=5).filter(lambda text: "\0" not in text),
            "backend": st.text(max_size=5),
            "max_batch_size": st.integers(-(2**31), 2**31 - 1),
            "max_samples": st.text("0123456789-x", max_size=25),
            "max_keys": st.text("0123456789-x", max_size=25),
            "max_output_bytes": st.text("0123456789-x", max_size=25),
            "kind": st.text(max_size=5),
        },
    )
)
def test_a_configuration_of_anything_is_refused_or_right(
    honest: Liar, fields: dict[str, Any]
) -> None:
    honest.tell(**fields)
    ask(honest)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"features":' * 50_000, "NaN", "\x1b[2J", "1"])
def test_a_schema_that_is_no_object_is_refused(honest: Liar, text: str) -> None:
    honest.tell(text)
    assert not ask(honest)


INTS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def responses(draw: st.DrawFn) -> Any:
    """A right answer with one or two things of it changed."""
    response = right()
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, max(0, len(response.outputs) - 1)))
        match draw(st.integers(0, 8)):
            case 0:
                name = draw(st.sampled_from([*SAID, "node"]))
                kind = draw(st.sampled_from(["int64_param", "string_param", "bool_param", ""]))
                response.parameters.pop(name, None)
                value = {"int64_param": draw(INTS), "string_param": "x\x1b\n" * 99}
                if kind:
                    setattr(response.parameters[name], kind, value.get(kind, True))
                elif draw(st.booleans()):
                    response.parameters[name].SetInParent()
            case 1 if response.outputs:
                del response.outputs[at]
            case 2 if response.raw_output_contents:
                del response.raw_output_contents[0]
            case 3 if response.outputs:
                del response.outputs[at].shape[:]
                response.outputs[at].shape.extend(draw(st.lists(INTS, max_size=40)))
            case 4 if response.outputs:
                types = ("BYTES", "FP64", "UINT8", "INT64", "BOOL", "", "\x1b")
                response.outputs[at].datatype = draw(st.sampled_from(types))
            case 5 if response.raw_output_contents:
                response.raw_output_contents[0] = draw(st.binary(max_size=40))
            case 6 if response.outputs:
                response.outputs[at].name = draw(st.text(max_size=5))
            case 7:
                response.raw_output_contents.append(draw(st.binary(max_size=9)))
            case _:
                rows = draw(st.integers(0, 5))
                response = right(rows)
    return response


@OFTEN
@given(response=responses())
def test_an_answer_of_anything_is_refused_or_right(honest: Liar, response: Any) -> None:
    honest.infer(response)
    ask(honest)


@OFTEN
@given(rpc=st.sampled_from(["ModelConfig", "ModelInfer"]), data=st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(honest: Liar, rpc: str, data: bytes) -> None:
    honest.tell()
    honest.infer(right())
    honest.answers[rpc] = data
    assert not ask(honest)


# Prints the memory that the call adds to the highest use of the client's process before.
TAKES = """
import sys
from pathlib import Path
from embertide.client import Client, ClientError

def most():
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if "VmHWM" in line).split()[1]) >> 10

before = most()
with Client(sys.argv[1], tries=1, timeout_s=20) as client:
    try:
        client.rank("m", {"user": [1, 2, 3], "price": [1, 2, 3]})
    except ClientError as error:
        print(most() - before, error)
"""


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
def test_an_answer_that_is_too_large_is_not_taken(honest: Liar, compressed: bool) -> None:
    response = right()
    response.raw_output_contents[0] = bytes(200 << 20)
    honest.infer(response)
    honest.compressed = compressed  # a bomb: gRPC would open it by itself
    try:
        command = [sys.executable, "-c", TAKES, honest.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    finally:
        honest.compressed = False
    taken_mib, _, error = done.stdout.partition(" ")
    assert error
    assert int(taken_mib) < 40
