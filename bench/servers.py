"""One tritonserver with every side's backend, and the models that it is asked to load.

`build/bench/backends` holds ours (a link to the build), the wheel's Python backend with the stub of
this Python, and links to those of `bench/backends`, which are built here.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import grpc
import tritonclient.grpc

from bench import aoti
from bench.models import Files
from bench.shapes import Shape
from embertide.server.adapters import triton
from embertide.server.adapters.installation import find_installation
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.tls import TlsFolder, dial
from embertide.v1 import node_pb2, node_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
_MAX_BATCH = 1024
_DENSE = 13
_START_S = 60.0

# The Python backend's stub sees neither this environment nor the checkout.
_PEER_MODEL = """import sys

sys.path[:0] = {paths}
from {module} import TritonPythonModel
"""

Kind = Literal["ranking", "lookup"]
Side = Literal["ours", "python", "aoti", "fill"]
Form = Literal["", "stacked", "bf16"] | aoti.Form
_FORM_NAMES: dict[Form, str] = {
    "": "",
    "stacked": "tables stacked, ",
    "bf16": "",
    "bags": "EmbeddingBag, ",
    "rows": "its lookups fused, ",
    "tuned": "its lookups fused, max-autotune, ",
}


class BenchError(RuntimeError):
    """The benchmark cannot run; the message says what to do."""


# --- backends -------------------------------------------------------------------------------------


def _make_python_backend(directory: Path) -> None:
    root = find_installation().root
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise BenchError(f"{stub} is missing: the wheel has no Python backend for {version}")
    shutil.copytree(root / "backends" / "python", directory, dirs_exist_ok=True)
    shutil.copy(stub, directory / stub.name)


def build_target(target: str, remedy: str = "`make cpp` says more") -> None:
    """Build what is not part of the default C++ build; BenchError with the remedy if it fails."""
    command = ["cmake", "--build", str(BUILD / "cpp"), "--target", target]
    if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode != 0:
        raise BenchError(f"{target} does not build: {remedy}")


def make_backends(ours: Path, built: Sequence[str] = ("aoti", "fill")) -> Path:
    """Return a folder with all backends; `ours` holds libtriton_embertide.so.

    Args:
        ours: Folder of our backend.
        built: Those of `bench/backends` that are wanted.

    Raises:
        BenchError: The wheel lacks this Python's stub, or a backend of `bench/backends` does not
            build.
    """
    directory = BUILD / "bench" / "backends"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "embertide").symlink_to(ours.resolve())
    _make_python_backend(directory / "python")
    for name in built:
        build_target(f"triton_{name}")
        (directory / name).symlink_to(BUILD / "cpp" / "bench" / "backends" / name)
    return directory


# --- models ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One side of a comparison at given instance and thread counts."""

    side: Side
    kind: Kind
    instances: int = 1
    threads: int = 1  # of each instance; of the peers', torch's
    batching: bool = True  # Triton puts waiting requests together
    # "stacked": the Python peer holds all tables in one EmbeddingBag; "bf16": its net is in bf16.
    form: Form = ""

    @property
    def model(self) -> str:
        """Name the model in Triton."""
        form = f"_{self.form}" if self.form else ""
        batching = "" if self.batching else "_alone"
        return f"{self.side}_{self.kind}_i{self.instances}_t{self.threads}{batching}{form}"

    @property
    def label(self) -> str:
        """Describe the variant in a report."""
        threads = "" if self.side == "fill" else f" x {self.threads} threads"
        batching = "" if self.batching else ", no batching"
        return f"{_FORM_NAMES[self.form]}{self.instances} instances{threads}{batching}"


def _parameter(key: str, value: str) -> str:
    return f"parameters {{ key: {json.dumps(key)} value: {{ string_value: {json.dumps(value)} }} }}"


def _our_config(variant: Variant, shape: Shape, files: Files) -> str:
    options = triton.ModelOptions(
        snapshot=files.snapshot,
        kind=variant.kind,
        instances=variant.instances,
        threads=variant.threads,
        max_batch_size=_MAX_BATCH,
        max_queue_delay_us=0 if variant.batching else None,
        # Rows, index and headroom: nothing may spill in a comparison of memory with memory.
        ddr_budget_bytes=2 * shape.row_bytes + (1 << 30),
    )
    lines = triton.model_config(variant.model, options).splitlines()
    # perf_analyzer asks for every output; a client that wants scores asks for scores.
    extras = ('name: "SOURCE"', 'name: "VERSION"')
    kept = [line for line in lines if not any(extra in line for extra in extras)]
    return "\n".join(kept)


def _peer_parameters(variant: Variant, shape: Shape, files: Files) -> dict[str, str]:
    if variant.side == "fill":
        return {"width": str(shape.tables * shape.dim)}
    if variant.side == "aoti":
        if variant.form not in aoti.FORMS:
            raise BenchError(f"{variant.model} has no form of {', '.join(aoti.FORMS)}")
        program = aoti.program(shape, files.peer, variant.form, variant.threads)
        return {
            "program": str(program),
            "inputs": "KEYS,DENSE",
            "instances": str(variant.instances),
            "threads": str(variant.threads),
        }
    return {
        "kind": variant.kind,
        "directory": str(files.peer),
        "jagged": str(int(shape.bag > 1)),
        "stacked": str(int(variant.form == "stacked")),
        "bf16": str(int(variant.form == "bf16")),
        "threads": str(variant.threads),
        "shape": json.dumps(dataclasses.asdict(shape)),
    }


def _tensor(kind: str, name: str, dtype: str, dim: int) -> str:
    ragged = " allow_ragged_batch: true" if dim < 0 and kind == "input" else ""
    return f'{kind} [ {{ name: "{name}" data_type: {dtype} dims: [ {dim} ]{ragged} }} ]'


def _tensors(variant: Variant, shape: Shape) -> list[str]:
    jagged = shape.bag > 1
    ranking = variant.kind == "ranking"
    tensors = [_tensor("input", "KEYS", "TYPE_INT64", -1 if jagged else shape.tables)]
    if jagged:
        tensors.append(_tensor("input", "LENGTHS", "TYPE_INT32", -1))
    if ranking:
        tensors.append(_tensor("input", "DENSE", "TYPE_FP32", -1 if jagged else _DENSE))
    width = -1 if jagged else 1 if ranking else shape.tables * shape.dim
    answer = "SCORE" if ranking else "EMBEDDING"
    return [*tensors, _tensor("output", answer, "TYPE_FP32", width)]


def _other_config(variant: Variant, shape: Shape, files: Files) -> str:
    parameters = _peer_parameters(variant, shape, files)
    lines = [
        f'name: "{variant.model}"',
        f'backend: "{variant.side}"',
        f"max_batch_size: {_MAX_BATCH}",
        *_tensors(variant, shape),
        f"instance_group [ {{ count: {variant.instances} kind: KIND_CPU }} ]",
        *(["dynamic_batching { }"] if variant.batching else []),
    ]
    lines += [_parameter(key, value) for key, value in parameters.items()]
    return "\n".join(lines)


def write_model(repository: Path, variant: Variant, shape: Shape, files: Files) -> None:
    """Write the directory of a variant into a model repository."""
    directory = repository / variant.model
    (directory / "1").mkdir(parents=True)
    make = _our_config if variant.side == "ours" else _other_config
    text = make(variant, shape, files)
    (directory / "config.pbtxt").write_text(text + "\n", encoding="utf-8")
    if variant.side == "python":
        write_python(directory / "1" / "model.py", "bench.peer")


def write_python(path: Path, module: str) -> None:
    """Write the file of a Python backend's model, whose class a module of the benchmark has."""
    paths = [sysconfig.get_paths()["purelib"], str(ROOT), str(ROOT / "typings")]
    path.write_text(_PEER_MODEL.format(paths=paths, module=module))


# --- server ---------------------------------------------------------------------------------------


def path_without_venv() -> str:
    """Return PATH without this venv: the stub's Python may have another standard library."""
    venv = str(Path(sys.prefix) / "bin")
    return os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if each != venv)


class BenchServer:
    """A tritonserver over the variants of one shape; models are loaded when first asked for."""

    def __init__(self, backends: Path, shape: Shape, files: Files) -> None:
        """Start a server without models."""
        self.shape, self.files = shape, files
        self._repository = BUILD / "bench" / "repository"
        shutil.rmtree(self._repository, ignore_errors=True)
        self._repository.mkdir(parents=True)
        grpc_port, metrics = free_ports(2)
        options = triton.ServerOptions(
            repository=self._repository,
            backends=backends,
            log=BUILD / "bench" / f"triton-{shape.name}.log",
            grpc_port=grpc_port,
            metrics_port=metrics,
            explicit=True,
            environment={"PATH": path_without_venv()},
        )
        self._loaded: set[Variant] = set()
        self.triton = triton.TritonServer(options)
        self.client = tritonclient.grpc.InferenceServerClient(self.triton.grpc)

    def load(self, variant: Variant) -> str:
        """Load a variant, if it is not loaded, and return its model's name."""
        if variant not in self._loaded:
            write_model(self._repository, variant, self.shape, self.files)
            self.client.load_model(variant.model)
            self._loaded.add(variant)
        return variant.model

    def unload(self, variants: set[Variant]) -> None:
        """Unload variants and give their memory back."""
        for variant in variants & self._loaded:
            self.client.unload_model(variant.model)
            shutil.rmtree(self._repository / variant.model)
        self._loaded -= variants

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop it."""
        self.client.close()
        self.triton.stop()


# --- fleets ---------------------------------------------------------------------------------------


def await_peer(address: str, tls: Path | None = None) -> None:
    """Wait until the node whose peers reach it at `address` has found one of them.

    Args:
        address: HOST:PORT.
        tls: Folder of a node's certificate, if it is asked by TLS.

    Raises:
        BenchError: It does not.
    """
    deadline = time.monotonic() + _START_S
    with dial(address, TlsFolder(tls) if tls else None) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        while True:
            with contextlib.suppress(grpc.RpcError):
                status = stub.GetStatus(node_pb2.NodeServiceGetStatusRequest(), timeout=1.0)
                if status.counters["peers_alive"] == 1:
                    return
            if time.monotonic() > deadline:
                raise BenchError(f"the node at {address} finds no peer: see its log")
            time.sleep(0.1)
