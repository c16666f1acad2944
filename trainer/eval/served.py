"""A ranking model in Triton, asked over gRPC (KServe v2).

Shapes: B samples, F features, D dense columns.
"""

import dataclasses
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from embertide._common import kserve
from embertide.client.settings import Settings
from embertide.trainer.data.bags import jagged
from embertide.trainer.data.base import Batch
from embertide.trainer.errors import TrainerError
from embertide.trainer.eval.context_form import ContextForm

_TIMEOUT_S = 30.0
# A node that restarts is away for seconds; one that is away for a minute is gone.
_TRIES = 120
_PAUSE_S = 0.5
_AWAY = ("UNAVAILABLE", "DEADLINE_EXCEEDED")


class ServingError(TrainerError):
    """The served model refuses a request, or cannot be reached; the message says which."""


class VersionNotHeldError(ServingError):
    """The model does not hold the version that was asked for: it left the window, or is to come."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Scores, and the response parameters that say what they were made of."""

    score_B: NDArray[np.float32]
    version: int
    watermark_ms: int
    plan_epoch: int
    node: str
    failures: int  # requests that failed before this one was answered
    sent_ms: int  # wall clock
    latency_us: int  # of the request that was answered


class ServedModel:
    """One model of one server. Thread-safe: gRPC channels are.

    Args:
        url: host:port of gRPC.
        model: Name in Triton.
        calling: Its TLS and its token are those of each call; None: plain text, and no token.

    Raises:
        ServingError: A file of TLS cannot be read, or a token would travel in plain text.
    """

    def __init__(self, url: str, model: str, calling: Settings | None = None) -> None:
        """Name the model; nothing is sent yet."""
        self.url, self.model = url, model
        self._calling = calling or Settings()
        self._form: ContextForm | None = None
        self._asked = False  # how requests are to be
        try:
            self._calling.check(url)
            self._line = kserve.Line(url, self._calling.credentials())
        except ValueError as error:
            raise ServingError(str(error)) from error

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the connection."""
        self._line.close()

    def ready(self) -> bool:
        """Return whether the model is loaded and its server answers."""
        try:
            request = service_pb2.ModelReadyRequest(name=self.model)
            metadata = self._calling.metadata()
            return bool(self._line.call("ModelReady", request, _TIMEOUT_S, metadata).ready)
        except kserve.CallError:
            return False

    def score(self, batch: Batch, *, version: int | None = None) -> Answer:
        """Score events in one request; all of them by one version, the newest or that given.

        A server that is away is asked again for a minute.

        Raises:
            VersionNotHeldError: It does not hold the version that is given.
            ServingError: It refuses the request, or stays away.
        """
        parameters = {"version": version} if version is not None else {}
        if batch.lists:  # only the shape of a rectangular request tells which columns it has
            parameters["columns"] = batch.keys_BF.shape[1]
        for failures in range(_TRIES):
            try:
                self._ask_form()
                request = kserve.infer_request(
                    self.model,
                    self._tensors(batch),
                    ["SCORE"],
                    timeout_s=_TIMEOUT_S,
                    parameters=parameters,
                )
                sent_ms, began = time.time_ns() // 1_000_000, time.perf_counter()
                response = self._line.infer(request, _TIMEOUT_S, self._calling.metadata())
            except kserve.CallError as error:
                if error.status not in _AWAY:
                    gone = version is not None and error.status == "NOT_FOUND"
                    kind = VersionNotHeldError if gone else ServingError
                    raise kind(f"model {self.model!r} at {self.url}: {error}") from error
                time.sleep(_PAUSE_S)
                continue
            said = kserve.parameters_of(response)
            return Answer(
                score_B=np.asarray(kserve.arrays_of(response)["SCORE"], np.float32).reshape(-1),
                version=int(said["version"]),
                watermark_ms=int(said["watermark_ms"]),
                plan_epoch=int(said["plan_epoch"]),
                node=str(said["node"]),
                failures=failures,
                sent_ms=sent_ms,
                latency_us=round((time.perf_counter() - began) * 1e6),
            )
        raise ServingError(
            f"model {self.model!r} at {self.url} did not answer for {_TRIES * _PAUSE_S:.0f} s: is "
            "the node running?"
        )

    def _ask_form(self) -> None:
        """Ask once whether requests may carry a user's columns once for all of its candidates.

        A server that does not tell gets whole rows.

        Raises:
            CallError: The server did not answer.
        """
        if self._asked:
            return
        request = service_pb2.ModelConfigRequest(name=self.model)
        metadata = self._calling.metadata()
        try:
            told = self._line.call("ModelConfig", request, _TIMEOUT_S, metadata)
        except kserve.CallError as error:
            if error.status in _AWAY:
                raise
            self._asked = error.status != "NOT_FOUND"  # such a model may be loaded later
        else:
            self._form, self._asked = ContextForm.told(told, self.model), True

    def _tensors(self, batch: Batch) -> dict[str, NDArray[Any]]:
        if self._form is not None and self._form.takes(batch):
            return self._form.tensors(batch)
        return _tensors(batch)


class ServedNodes:
    """The nodes that serve one model, asked in turn. Thread-safe.

    From an event on, the first node may get a larger share of the requests, as when a load balancer
    sends it the traffic of another site.
    """

    def __init__(
        self,
        nodes: Sequence[ServedModel],
        *,
        shift_from: int | None = None,
        shift_share: float = 0.0,
    ) -> None:
        """Begin with the first.

        Args:
            nodes: The nodes.
            shift_from: The event from which the first one gets `shift_share`; None: never.
            shift_share: Its share of the requests; the other nodes share the rest evenly.
        """
        self._nodes = nodes
        self._even = itertools.cycle(nodes)
        self._others = itertools.cycle(nodes[1:] or nodes)
        self._shift_from, self._shift_share = shift_from, shift_share
        self._due = 0.0  # requests that the first node should have had since, less those it had
        self._turn = threading.Lock()

    def _next(self, first_event: int) -> ServedModel:
        with self._turn:
            if self._shift_from is None or first_event < self._shift_from:
                return next(self._even)
            self._due += self._shift_share
            if self._due < 1:
                return next(self._others)
            self._due -= 1
            return self._nodes[0]

    def score(self, batch: Batch, *, version: int | None = None) -> Answer:
        """Score events at the node whose turn it is; errors are those of `ServedModel.score`."""
        return self._next(batch.first).score(batch, version=version)


def _tensors(batch: Batch) -> dict[str, NDArray[Any]]:
    """Return what a request of whole rows carries, jagged where it has lists."""
    if not batch.lists:
        arrays: dict[str, NDArray[Any]] = {"KEYS": batch.keys_BF, "DENSE": batch.dense_BD}
    else:
        keys = jagged(batch.bags())
        arrays = {"KEYS": keys.keys_N, "LENGTHS": keys.lengths_BF, "DENSE": batch.dense_BD}
        if keys.weights_N is not None:
            arrays["WEIGHTS"] = keys.weights_N
        arrays = {name: array.reshape(1, -1) for name, array in arrays.items()}
    if not batch.dense_BD.size:
        del arrays["DENSE"]
    return arrays
