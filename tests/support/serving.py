"""Shared code of the end-to-end tests: a client with short verbs, reading and harming."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports

Samples = Sequence[Sequence[Sequence[int]]]
# The fixture of a server of each protocol: ours over gRPC, tritonserver's over HTTP.
FRONTS = {"grpc": "server", "http": "stock"}
MODULES: dict[str, Any] = {"grpc": tritonclient.grpc, "http": tritonclient.http}


class Client:
    """Short verbs over tritonclient, by gRPC or HTTP."""

    def __init__(self, protocol: str, server: triton.TritonServer) -> None:
        self._module = MODULES[protocol]
        url = server.grpc if protocol == "grpc" else server.http
        self.raw = self._module.InferenceServerClient(url)

    def send(
        self,
        arrays: dict[str, NDArray[Any]],
        model: str = "lookup",
        outputs: Any = None,
        **more: Any,
    ) -> Any:
        wanted = [self._module.InferRequestedOutput(name) for name in outputs] if outputs else None
        return self.raw.infer(model, self.inputs(arrays), outputs=wanted, **more)

    def inputs(self, arrays: dict[str, NDArray[Any]]) -> list[Any]:
        made = []
        for name, array in arrays.items():
            tensor = self._module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            made.append(tensor)
        return made

    def loaded(self, model: str) -> bool:
        """Whether the server says so: 2.72 has an error for a model that it does not have."""
        try:
            return bool(self.raw.is_model_ready(model))
        except InferenceServerException as error:
            if error.status() != "StatusCode.NOT_FOUND":
                raise
            return False

    def rectangular(self, keys: Any, **more: Any) -> Any:
        return self.send({"KEYS": np.array(keys, np.int64)}, **more)

    def jagged(self, samples: Samples, lengths: str = "LENGTHS", **more: Any) -> Any:
        return self.send(jagged_arrays(samples, lengths), **more)


def beside(
    options: triton.ServerOptions, repository: Path, log: Path, models: Sequence[str], **more: Any
) -> triton.ServerOptions:
    """Options of one more server: ports of its own, another repository and other models."""
    grpc, metrics = free_ports(2)
    made = dataclasses.replace(
        options,
        repository=repository,
        log=log,
        models=tuple(models),
        grpc_port=grpc,
        metrics_port=metrics,
        **more,
    )
    return made if made.http_port is None else with_stock_front(made)


def with_stock_front(options: triton.ServerOptions) -> triton.ServerOptions:
    """The same behind tritonserver's own front end, at ports of its own, HTTP among them."""
    http, grpc, metrics = free_ports(3)
    return dataclasses.replace(
        options, front="triton", http_port=http, grpc_port=grpc, metrics_port=metrics
    )


class Fronts(contextlib.ExitStack):
    """One repository behind both front ends: ours over gRPC, tritonserver's over HTTP."""

    def __init__(self, options: triton.ServerOptions) -> None:
        super().__init__()
        self._options = options
        self.own = self.enter_context(triton.TritonServer(options))
        self._stock: triton.TritonServer | None = None

    def of(self, protocol: str) -> triton.TritonServer:
        if protocol == "grpc":
            return self.own
        if self._stock is None:
            log = self._options.log.with_name("stock.log")
            options = dataclasses.replace(with_stock_front(self._options), log=log)
            self._stock = self.enter_context(triton.TritonServer(options))
        return self._stock


def jagged_arrays(samples: Samples, lengths: str = "LENGTHS") -> dict[str, NDArray[Any]]:
    bags = [bag for sample in samples for bag in sample]
    return {
        "KEYS": np.array([[key for bag in bags for key in bag]], np.int64),
        lengths: np.array([[len(bag) for bag in bags]], np.int32),
    }


def parameters(result: Any) -> dict[str, Any]:
    response = result.get_response()
    if isinstance(response, dict):
        return dict(response["parameters"])
    return {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in response.parameters.items()
    }


def metric(page: str, name: str, **labels: str) -> float:
    """The sum of all samples of `name` with these labels."""
    total = 0.0
    for line in page.splitlines():
        match = re.fullmatch(rf"{name}{{(.*)}} (\S+)", line)
        if match and all(f'{key}="{value}"' in match[1] for key, value in labels.items()):
            total += float(match[2])
    return total


def change_manifest(directory: Path, **fields: Any) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
