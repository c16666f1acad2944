"""Every method of KServe v2 over gRPC, as two servers answer it: `--target PEER OURS`.

A generic client sends bytes to a path: good calls, unknown models and versions, requests that are
no message, and what else callers get wrong. Of each it notes the status, the message of an error
and the answer, the latter without times and counts, which no two servers share. The whole table is
`build/bench/front/conformance.json`, and `conformance.md` beside it.
"""

import argparse
import contextlib
import dataclasses
import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb

from bench import report
from bench.front import targets
from bench.front.questions import SERVICE, requests
from bench.front.targets import LOOKUP, RANKING, Kept, Site, Target
from bench.servers import BUILD
from embertide._common import kserve

CLAIM = "B.6"
NO_MESSAGE = b"\x0a\xff\xff\xff\xff\x0f"  # a text that says it is longer than what follows
_UNKNOWN = "no_such_model"
_TIMEOUT_S = 20.0
_SHOWN = 160
# Fields that differ from run to run: times, and counts of earlier requests.
_VOLATILE = ("ns", "count", "lastInference", "executionCount", "inferenceCount")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A call, or several of one stream."""

    method: str
    name: str
    sent: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call: the status, its message, and the answers as JSON."""

    status: str
    message: str
    body: str


# --- cases ----------------------------------------------------------------------------------------


def _case(method: str, name: str, *sent: Any) -> Case:
    texts = (each if isinstance(each, bytes) else each.SerializeToString() for each in sent)
    return Case(method, name, tuple(texts))


def _of_a_model(method: str, request: Any) -> Iterator[Case]:
    """Give the calls of a method whose request has a name and a version."""
    yield _case(method, "good", request(name=LOOKUP))
    yield _case(method, "good, version 1", request(name=LOOKUP, version="1"))
    yield _case(method, "unknown model", request(name=_UNKNOWN))
    yield _case(method, "unknown version", request(name=LOOKUP, version="7"))
    yield _case(method, "a version that is no number", request(name=LOOKUP, version="one"))
    yield _case(method, "no name", request())
    yield _case(method, "no message", NO_MESSAGE)


def _infer(kind: str = LOOKUP, batch: int = 2) -> Any:
    return next(requests(kind, batch, 1))


def _changed(change: Any, kind: str = LOOKUP) -> Any:
    request = _infer(kind)
    change(request)
    return request


def _infers() -> Iterator[tuple[str, Any]]:
    """Give requests of ModelInfer by name."""
    yield "good", _infer()
    yield "good, ranking", _infer(RANKING)

    def typed(request: Any) -> None:
        keys = [
            int.from_bytes(request.raw_input_contents[0][i : i + 8], "little")
            for i in range(0, len(request.raw_input_contents[0]), 8)
        ]
        del request.raw_input_contents[:]
        request.inputs[0].contents.int64_contents.extend(keys)

    changes: dict[str, Any] = {
        "good, with an id": lambda r: setattr(r, "id", "mine"),
        "good, without named outputs": lambda r: r.ClearField("outputs"),
        "good, values as typed contents": typed,
        "unknown model": lambda r: setattr(r, "model_name", _UNKNOWN),
        "unknown version": lambda r: setattr(r, "model_version", "7"),
        "a version that is no number": lambda r: setattr(r, "model_version", "one"),
        "no name": lambda r: setattr(r, "model_name", ""),
        "unknown input": lambda r: setattr(r.inputs[0], "name", "NO_SUCH"),
        "unknown output": lambda r: setattr(r.outputs[0], "name", "NO_SUCH"),
        "no input": lambda r: (r.ClearField("inputs"), r.ClearField("raw_input_contents")),
        "the same input twice": lambda r: (
            r.inputs.add().CopyFrom(r.inputs[0]),
            r.raw_input_contents.append(r.raw_input_contents[0]),
        ),
        "another type": lambda r: setattr(r.inputs[0], "datatype", "FP32"),
        "no such type": lambda r: setattr(r.inputs[0], "datatype", "INT65"),
        "too few bytes": lambda r: r.raw_input_contents.__setitem__(0, b"\0" * 8),
        "more contents than inputs": lambda r: r.raw_input_contents.append(b"\0" * 8),
        "no contents": lambda r: r.ClearField("raw_input_contents"),
        "contents in both forms": lambda r: r.inputs[0].contents.int64_contents.append(1),
        "a negative dim": lambda r: r.inputs[0].shape.__setitem__(0, -1),
        "a huge dim": lambda r: r.inputs[0].shape.__setitem__(0, 2**63 - 1),
        "no dims": lambda r: r.inputs[0].ClearField("shape"),
        "a batch of 0": lambda r: (
            r.inputs[0].shape.__setitem__(0, 0),
            r.raw_input_contents.__setitem__(0, b""),
        ),
        "shared memory that nobody registered": lambda r: (
            r.inputs[0].parameters["shared_memory_region"].__setattr__("string_param", "none"),
            r.inputs[0].parameters["shared_memory_byte_size"].__setattr__("int64_param", 8),
            r.ClearField("raw_input_contents"),
        ),
        "a timeout of a microsecond": lambda r: r.parameters["timeout"].__setattr__(
            "int64_param", 1
        ),
        "a timeout that is a text": lambda r: r.parameters["timeout"].__setattr__(
            "string_param", "soon"
        ),
        "a parameter of the reserved kind": lambda r: r.parameters[
            "triton_enable_empty_final_response"
        ].__setattr__("int64_param", 1),
        "a priority": lambda r: r.parameters["priority"].__setattr__("uint64_param", 1),
        "a sequence": lambda r: r.parameters["sequence_id"].__setattr__("int64_param", 5),
        "a parameter that nobody knows": lambda r: r.parameters["mine"].__setattr__(
            "string_param", "x"
        ),
    }
    for name, change in changes.items():
        yield name, _changed(change)
    yield "no message", NO_MESSAGE
    yield "an empty message", b""


def _shared(key: str) -> Iterator[Case]:
    """Give the calls of shared memory, over a region of this machine."""
    system, cuda = "SystemSharedMemory", "CudaSharedMemory"
    register, status, unregister = "Register", "Status", "Unregister"
    a = pb.SystemSharedMemoryRegisterRequest(name="a", key=key, byte_size=64)
    yield _case(system + status, "good, none", pb.SystemSharedMemoryStatusRequest())
    yield _case(system + status, "unknown region", pb.SystemSharedMemoryStatusRequest(name="x"))
    yield _case(system + status, "no message", NO_MESSAGE)
    yield _case(system + register, "good", a)
    yield _case(system + register, "a name twice", a)
    none = pb.SystemSharedMemoryRegisterRequest(name="b", key="/no_such", byte_size=64)
    yield _case(system + register, "unknown key", none)
    yield _case(system + register, "no message", NO_MESSAGE)
    yield _case(system + status, "good, one", pb.SystemSharedMemoryStatusRequest())
    one = pb.SystemSharedMemoryUnregisterRequest(name="a")
    yield _case(system + unregister, "good", one)
    yield _case(system + unregister, "unknown region", one)
    yield _case(system + unregister, "good, all", pb.SystemSharedMemoryUnregisterRequest())
    yield _case(system + unregister, "no message", NO_MESSAGE)
    yield _case(cuda + status, "good, none", pb.CudaSharedMemoryStatusRequest())
    yield _case(cuda + status, "unknown region", pb.CudaSharedMemoryStatusRequest(name="x"))
    yield _case(cuda + status, "no message", NO_MESSAGE)
    garbage = pb.CudaSharedMemoryRegisterRequest(name="a", raw_handle=b"x" * 64, byte_size=64)
    yield _case(cuda + register, "a handle of nothing", garbage)
    yield _case(cuda + register, "no message", NO_MESSAGE)
    yield _case(cuda + unregister, "good, all", pb.CudaSharedMemoryUnregisterRequest())
    gone = pb.CudaSharedMemoryUnregisterRequest(name="x")
    yield _case(cuda + unregister, "unknown region", gone)
    yield _case(cuda + unregister, "no message", NO_MESSAGE)


def _repository() -> Iterator[Case]:
    index, load, unload = "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"
    yield _case(index, "good", pb.RepositoryIndexRequest())
    yield _case(index, "good, those that are ready", pb.RepositoryIndexRequest(ready=True))
    other = pb.RepositoryIndexRequest(repository_name="other")
    yield _case(index, "unknown repository", other)
    yield _case(index, "no message", NO_MESSAGE)
    yield _case(unload, "good", pb.RepositoryModelUnloadRequest(model_name=RANKING))
    yield _case(unload, "unloaded already", pb.RepositoryModelUnloadRequest(model_name=RANKING))
    yield _case(unload, "unknown model", pb.RepositoryModelUnloadRequest(model_name=_UNKNOWN))
    yield _case(unload, "no message", NO_MESSAGE)
    yield _case("ModelReady", "an unloaded model", pb.ModelReadyRequest(name=RANKING))
    yield _case("ModelInfer", "an unloaded model", _infer(RANKING))
    yield _case(load, "good", pb.RepositoryModelLoadRequest(model_name=RANKING))
    yield _case(load, "loaded already", pb.RepositoryModelLoadRequest(model_name=LOOKUP))
    yield _case(load, "unknown model", pb.RepositoryModelLoadRequest(model_name=_UNKNOWN))
    yield _case(load, "no name", pb.RepositoryModelLoadRequest())
    wrong = pb.RepositoryModelLoadRequest(model_name=LOOKUP)
    wrong.parameters["config"].string_param = "{"
    yield _case(load, "a configuration that is no JSON", wrong)
    yield _case(load, "no message", NO_MESSAGE)
    yield _case("ModelInfer", "good, after all that", _infer())


def cases(key: str) -> Iterator[Case]:
    """Give all calls, in the order in which they are made.

    Args:
        key: The key of shared memory of this machine, of 64 bytes or more.
    """
    for method, request in (
        ("ServerLive", pb.ServerLiveRequest()),
        ("ServerReady", pb.ServerReadyRequest()),
        ("ServerMetadata", pb.ServerMetadataRequest()),
    ):
        yield _case(method, "good", request)
        yield _case(method, "no message", NO_MESSAGE)
    yield from _of_a_model("ModelReady", pb.ModelReadyRequest)
    yield from _of_a_model("ModelMetadata", pb.ModelMetadataRequest)
    yield from _of_a_model("ModelConfig", pb.ModelConfigRequest)
    for name, request in _infers():
        yield _case("ModelInfer", name, request)
    unknown = _changed(lambda r: setattr(r, "model_name", _UNKNOWN))
    version = _changed(lambda r: setattr(r, "model_version", "7"))
    stream = "ModelStreamInfer"
    yield _case(stream, "good, one", _infer())
    yield _case(stream, "good, three", _infer(), _infer(RANKING), _infer())
    yield _case(stream, "none", *())
    yield _case(stream, "unknown model", unknown)
    yield _case(stream, "unknown version", version)
    yield _case(stream, "unknown model between good ones", _infer(), unknown, _infer())
    yield _case(stream, "no message", NO_MESSAGE)
    yield from _of_a_model("ModelStatistics", pb.ModelStatisticsRequest)
    yield from _repository()
    yield from _shared(key)
    yield _case("TraceSetting", "good", pb.TraceSettingRequest())
    yield _case("TraceSetting", "unknown model", pb.TraceSettingRequest(model_name=_UNKNOWN))
    odd = pb.TraceSettingRequest()
    odd.settings["no_such"].value.append("1")
    yield _case("TraceSetting", "unknown setting", odd)
    yield _case("TraceSetting", "no message", NO_MESSAGE)
    yield _case("LogSettings", "good", pb.LogSettingsRequest())
    unsettled = pb.LogSettingsRequest()
    unsettled.settings["no_such"].bool_param = True
    yield _case("LogSettings", "unknown setting", unsettled)
    yield _case("LogSettings", "no message", NO_MESSAGE)
    yield _case("NoSuchMethod", "good", b"")


# --- asking ---------------------------------------------------------------------------------------


def _steady(value: Any) -> Any:
    """Return JSON without what differs from run to run."""
    if isinstance(value, dict):
        return {name: "..." if name in _VOLATILE else _steady(each) for name, each in value.items()}
    return [_steady(each) for each in value] if isinstance(value, list) else value


def _body(method: str, answers: Sequence[bytes]) -> str:
    message = getattr(pb, f"{method}Response", None)
    if message is None:
        return repr(answers) if answers else ""
    said = [_steady(json_format.MessageToDict(message.FromString(each))) for each in answers]
    return "\n".join(json.dumps(each, sort_keys=True) for each in said)


def ask(channel: grpc.Channel, case: Case) -> Answer:
    """Make a call, without a deadline of gRPC's, and return what came of it."""
    path, answers = SERVICE + case.method, []
    stream = case.method == "ModelStreamInfer"
    calls: Any = channel.stream_stream(path) if stream else channel.unary_unary(path)
    try:
        if stream:
            call = calls(iter(case.sent))
            late = threading.Timer(_TIMEOUT_S, call.cancel)
            late.start()
            try:
                answers = list(call)
            finally:
                late.cancel()
        else:
            answers = [calls.future(case.sent[0]).result(_TIMEOUT_S)]
    except grpc.RpcError as error:
        failed: Any = error
        return Answer(failed.code().name, failed.details() or "", "")
    except grpc.FutureTimeoutError:
        return Answer("no answer", f"in {_TIMEOUT_S:.0f} s", "")
    return Answer("OK", "", _body(case.method, answers))


def answers_of(target: Target, made: Sequence[Case]) -> list[Answer]:
    """Return what a server answers to all cases; one that a call ends is started again."""
    answers = []
    with (
        Kept(target.server) as kept,
        grpc.insecure_channel(target.address, kserve.OPTIONS) as channel,
    ):
        for case in made:
            ends = kept.ends.total()
            answers.append(ask(channel, case))
            if not target.server.answers():
                kept.await_answers()
            if kept.ends.total() > ends:
                how = ", ".join(kept.ends)
                answers[-1] = dataclasses.replace(
                    answers[-1], message=f"it ended the server: {how}"
                )
    return answers


# --- report ---------------------------------------------------------------------------------------


def _difference(peer: Answer, ours: Answer) -> str:
    if peer.status != ours.status:
        return "status"
    if peer.message != ours.message:
        return "message"
    return "" if peer.body == ours.body else "answer"


def _short(answer: Answer) -> str:
    text = f"{answer.status} {answer.message or answer.body}".replace("\n", " ")
    text = text.replace("|", "\\|").replace("`", "'")
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _write(
    folder: Path, names: tuple[str, str], made: Sequence[Case], answers: Sequence[Sequence[Answer]]
) -> None:
    rows = [
        {
            "method": case.method,
            "case": case.name,
            "differs": _difference(peer, ours),
            "peer": dataclasses.asdict(peer),
            "ours": dataclasses.asdict(ours),
        }
        for case, peer, ours in zip(made, *answers, strict=True)
    ]
    document = {"commit": report.commit(BUILD.parent), "peer": names[0], "ours": names[1]}
    text = json.dumps({**document, "rows": rows}, indent=1)
    (folder / "conformance.json").write_text(text + "\n", encoding="utf-8")
    lines = [f"| method | call | {names[0]} | {names[1]} | differs |", "|---|---|---|---|---|"]
    lines += [
        f"| {case.method} | {case.name} | {_short(peer)} | "
        f"{_short(ours) if ours != peer else 'the same'} | {_difference(peer, ours)} |"
        for case, peer, ours in zip(made, *answers, strict=True)
    ]
    (folder / "conformance.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def rows_of(
    name: str, peer_name: str, made: Sequence[Case], answers: Sequence[Sequence[Answer]]
) -> Iterator[report.Row]:
    """Give a row for each method: how many of its calls end with the same status."""
    found = list(zip(made, *answers, strict=True))
    for method in dict.fromkeys(case.method for case in made):
        differences = [
            _difference(peer, ours) for case, peer, ours in found if case.method == method
        ]
        same = [float(each != "status") for each in differences]
        said = ", ".join(sorted({each for each in differences if each})) or "nothing"
        yield report.measure(
            (f"{method}, {name} beside {peer_name}", f"same status, of {len(same)}", "count"),
            [sum(same)],
            better="higher",
            target=0,
            claim=CLAIM,
        )
        yield report.measure(
            (f"{method}, {name} beside {peer_name}", f"calls that differ, in {said}", "count"),
            [sum(map(bool, differences))],
            better="lower",
            target=0,
            claim=CLAIM,
        )


def run(options: argparse.Namespace) -> Iterator[report.Row]:
    """Ask the second target beside the first; one alone is asked twice, started anew."""
    names = (options.target * 2)[:2]
    base = BUILD / "bench" / "front"
    base.mkdir(parents=True, exist_ok=True)
    answers, shown = [], []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
        repository = targets.small_repository(folder / "repository")
        memory = SharedMemory(create=True, size=64)
        stack.callback(memory.unlink)
        stack.callback(memory.close)
        made = list(cases(f"/{memory.name.lstrip('/')}"))
        for n, name in enumerate(names):
            site = Site(
                folder=folder / f"{n}-{name}", repository=repository, models=(LOOKUP, RANKING)
            )
            with targets.TARGETS[name](site) as target:
                answers.append(answers_of(target, made))
                shown.append(target.name)
    _write(base, (shown[0], shown[1]), made, answers)
    yield from rows_of(shown[1], shown[0], made, answers)
