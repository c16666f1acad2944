"""Calls with their right answers, as a file that callers in Python and C++ read.

The file is a row of questions; a question is four texts, each with its length before it (4 bytes,
little-endian): the path of the RPC, the request, of the answer that is right the fields that are
compared, encoded, and their numbers, a byte each. An empty third text: any answer is right.
"""

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import message
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from bench import keys, models
from bench.front.targets import LOOKUP, RANKING, SHAPE
from bench.nodes import make_plan
from bench.servers import BUILD, BenchError
from bench.shapes import Shape
from embertide._common import kserve
from embertide.trainer.data.keys import buckets_of
from embertide.v1 import node_pb2, update_pb2

SERVICE = "/inference.GRPCInferenceService/"
INFER = f"{SERVICE}ModelInfer"
NODE_SERVICE = "/embertide.v1.NodeService/"
NODE_LOOKUP, NODE_READ = f"{NODE_SERVICE}Lookup", f"{NODE_SERVICE}Read"
# The compared parts of answers: not which node or tier had a row, and not how far its peers are.
_COMPARED: dict[str, tuple[Any, tuple[str, ...]]] = {
    INFER: (service_pb2.ModelInferResponse, ("outputs", "raw_output_contents")),
    NODE_LOOKUP: (node_pb2.LookupResponse, ("results",)),
    NODE_READ: (node_pb2.ReadResponse, ("version", "embeddings")),
}
_VERSION = update_pb2.Version(lineage=1, number=1)  # of models that are made to be measured
_BATCHES = (1, 1, 1, 4, 16, 64)
_TIMEOUT_S = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A call; see above."""

    path: str
    request: bytes
    answer: bytes = b""

    def right(self, answer: bytes) -> bool:
        """Return whether that answer, as it came, is right."""
        try:
            return not self.answer or compared_of(self.path, answer) == self.answer
        except message.DecodeError:
            return False


def compared_of(path: str, answer: bytes) -> bytes:
    """Return what is compared of an answer; nothing, of calls that any answer answers."""
    if path not in _COMPARED:
        return b""
    kind, fields = _COMPARED[path]
    said = kind.FromString(answer)
    held = kind(**{each: getattr(said, each) for each in fields})
    encoded: bytes = held.SerializeToString(deterministic=True)
    return encoded


def _numbers(path: str) -> bytes:
    """Return the numbers of the fields that are compared."""
    if path not in _COMPARED:
        return b""
    kind, fields = _COMPARED[path]
    return bytes(kind.DESCRIPTOR.fields_by_name[each].number for each in fields)


def requests(
    kind: str, batch: int, count: int, *, shape: Shape = SHAPE, model: str = ""
) -> Iterator[Any]:
    """Give different requests of a model; without a name, of the small repository's of the kind."""
    keys_NFL, dense_ND = keys.draw(shape, batch * count)
    for i in range(0, batch * count, batch):
        tensors: dict[str, Any] = {"KEYS": np.ascontiguousarray(keys_NFL[i : i + batch, :, 0])}
        if kind == RANKING:
            tensors["DENSE"] = dense_ND[i : i + batch]
        output = "SCORE" if kind == RANKING else "EMBEDDING"
        outputs = (output,) if model else (output, "VERSION")
        yield kserve.infer_request(model or kind, tensors, outputs)


def answered(channel: grpc.Channel, path: str, request: bytes) -> bytes:
    """Return the answer of one call, without a deadline of gRPC's, which ends stock servers.

    Raises:
        BenchError: There is none.
    """
    try:
        call: Any = channel.unary_unary(path)
        answer: bytes = call.future(request).result(_TIMEOUT_S)
    except (grpc.RpcError, grpc.FutureTimeoutError) as error:
        raise BenchError(f"{path} is not answered: {error!r}"[:300]) from error
    return answer


def _asked_twice(channel: grpc.Channel, path: str, request: Any) -> Question:
    encoded = request.SerializeToString()
    answers = {compared_of(path, answered(channel, path, encoded)) for _ in range(2)}
    if len(answers) != 1:
        raise BenchError(f"{path} of {len(encoded)} bytes is answered in two ways")
    return Question(path, encoded, answers.pop())


def make(address: str) -> list[Question]:
    """Return questions about both models, answered by a quiet server, each twice alike.

    Raises:
        BenchError: It answers one question in two ways.
    """
    found = []
    with grpc.insecure_channel(address, kserve.OPTIONS) as channel:
        for kind in (LOOKUP, RANKING):
            for n, batch in enumerate(_BATCHES):
                request = list(requests(kind, batch, n + 1))[-1]
                found.append(_asked_twice(channel, INFER, request))
    ready = service_pb2.ModelReadyRequest(name=LOOKUP).SerializeToString()
    metadata = service_pb2.ModelMetadataRequest(name=RANKING).SerializeToString()
    found.append(Question(f"{SERVICE}ModelReady", ready))
    found.append(Question(f"{SERVICE}ModelMetadata", metadata))
    return found


# --- of peers -------------------------------------------------------------------------------------


def _lookup(keys_NF: NDArray[np.int64], pooling: int) -> node_pb2.LookupRequest:
    """Return what a peer asks the first node of a plan of two for: its keys, by table."""
    plan = make_plan(models.make(SHAPE, BUILD).snapshot, ("", ""))
    mine = {
        (each.table_id, each.bucket_begin) for each in plan.assignments if not each.owners[0].node
    }
    request = node_pb2.LookupRequest(plan_epoch=1, asker="node-1")
    for table in plan.tables:
        keys_K = np.unique(keys_NF[:, table.id]).astype(np.uint64)
        bucket_K = buckets_of(keys_K, table.bucket_bits)
        owned = [int(key) for key, b in zip(keys_K, bucket_K, strict=True) if (table.id, b) in mine]
        if not owned:
            continue
        part = request.parts.add(table_id=table.id, keys=owned, pooling=pooling)
        part.version.CopyFrom(_VERSION)
        if pooling == node_pb2.PART_POOLING_SUM:
            part.bag_offsets.extend(range(len(owned) + 1))
            part.bag_keys.extend(range(len(owned)))
    return request


def of_peers(address: str) -> list[Question]:
    """Return questions that peers ask the first of two nodes, answered while it is quiet.

    Sums and reads hold the rows that the model was made of, bit for bit.

    Raises:
        BenchError: They do not, or one question is answered in two ways.
    """
    rows_TRd = np.load(models.make(SHAPE, BUILD).peer / "tables.npy", mmap_mode="r")
    found = []
    with grpc.insecure_channel(address, kserve.OPTIONS) as channel:
        for n, batch in enumerate(_BATCHES):
            keys_NF = keys.draw(SHAPE, batch * (n + 1))[0][-batch:, :, 0]
            rows = _lookup(keys_NF, node_pb2.PART_POOLING_ROWS)
            sums = _lookup(keys_NF, node_pb2.PART_POOLING_SUM)
            read = node_pb2.ReadRequest(keys=keys_NF.ravel(), lengths=[1] * keys_NF.size)
            found += [
                _asked_twice(channel, NODE_LOOKUP, rows),
                _asked_twice(channel, NODE_LOOKUP, sums),
                _asked_twice(channel, NODE_READ, read),
            ]
            results = node_pb2.LookupResponse.FromString(found[-2].answer).results
            for part, result in zip(sums.parts, results, strict=True):
                _check(result.sums, rows_TRd[part.table_id][list(part.keys)])
            said = node_pb2.ReadResponse.FromString(found[-1].answer)
            _check(said.embeddings, rows_TRd[np.arange(SHAPE.tables), keys_NF])
    found.append(Question(NODE_LOOKUP, node_pb2.LookupRequest(asker="node-1").SerializeToString()))
    return found


def _check(said: Sequence[float], rows: NDArray[np.float32]) -> None:
    if not np.array_equal(np.asarray(said), rows.astype(np.float64).ravel()):
        raise BenchError("a node answers other rows than the model was made of")


# --- the file -------------------------------------------------------------------------------------


def write(path: Path, questions: Sequence[Question]) -> None:
    """Write the file."""
    texts = (
        text for q in questions for text in (q.path.encode(), q.request, q.answer, _numbers(q.path))
    )
    path.write_bytes(b"".join(struct.pack("<I", len(text)) + text for text in texts))


def read(path: Path) -> list[Question]:
    """Read the file."""
    data, at, texts = path.read_bytes(), 0, []
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        texts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return [
        Question(path.decode(), request, answer)
        for path, request, answer in zip(texts[::4], texts[1::4], texts[2::4], strict=True)
    ]
