"""What both clients share: where requests go, how long, how often; what was counted.

A request changes nothing, so any may be sent again. It is sent again where that can help, which is
UNAVAILABLE (a node is away, its queue is full, too many keys are degraded) and RESOURCE_EXHAUSTED
(docs/serving.md, Deadlines and load), at the next endpoint, and never beyond the call's deadline.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tenacity
import tritonclient.grpc
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from embertide.client.errors import (
    ClientError,
    DeadlineError,
    DegradedError,
    InputError,
    RefusedError,
    UnavailableError,
    VersionGoneError,
)
from embertide.client.requests import (
    Columns,
    Request,
    cut,
    embeddings_of,
    scores_of,
    sources_of,
)
from embertide.client.results import Looked, Ranked, facts_of
from embertide.client.schema import Schema

_REPEATABLE = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
_LOCAL = ("127.", "localhost", "[::1]", "unix:")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Certificates of gRPC, PEM files.

    Attributes:
        ca: Who signed the servers'; None: those that gRPC trusts.
        certificate: The client's own, with `key`, where servers ask for one.
        key: Of `certificate`.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a client calls.

    Attributes:
        timeout_s: Of a call, all its requests and repeats; calls may name their own.
        try_s: Of one request before the next endpoint is asked; None: what is left of the call.
        tries: Times that a request is sent at most.
        wait_s: Before the first repeat, on average half; doubled with each, at most `wait_most_s`.
        concurrency: Requests of a call that are under way at once.
        tls: None: plain text.
        token: Sent as `authorization: Bearer ...`; a function is asked before each request.
        schemas: By model, of those that do not tell theirs (docs/serving.md, Schema).
    """

    timeout_s: float = 2.0
    try_s: float | None = None
    tries: int = 5
    wait_s: float = 0.02
    wait_most_s: float = 1.0
    concurrency: int = 4
    tls: Tls | None = None
    token: str | Callable[[], str] | None = None
    schemas: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be called with."""
        for name in ("timeout_s", "tries", "concurrency", "wait_s", "wait_most_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be more than 0")
        if self.try_s is not None and self.try_s <= 0:
            raise ValueError(f"try_s is {self.try_s}; it must be more than 0, or None")

    def connection(self) -> dict[str, Any]:
        """Return what tritonclient's clients are made with."""
        if self.tls is None:
            return {}
        ca, certificate, key = (
            None if path is None else str(path)
            for path in (self.tls.ca, self.tls.certificate, self.tls.key)
        )
        return {
            "ssl": True,
            "root_certificates": ca,
            "private_key": key,
            "certificate_chain": certificate,
        }

    def headers(self) -> dict[str, str]:
        """Return the metadata of a request."""
        token = self.token() if callable(self.token) else self.token
        return {} if token is None else {"authorization": f"Bearer {token}"}


class Calling:
    """Endpoints in turn, and counters. Thread-safe."""

    def __init__(self, endpoints: str | Sequence[str], settings: Settings) -> None:
        """Name the endpoints, host:port of gRPC; nothing is sent yet."""
        self.endpoints = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        self.settings = settings
        if not self.endpoints:
            raise ValueError("there is no endpoint; give host:port of a node's gRPC")
        for each in self.endpoints:
            if "://" in each or ":" not in each:
                raise ValueError(f"endpoint {each!r} is not host:port, as 127.0.0.1:8001")
            if settings.token is not None and settings.tls is None and not each.startswith(_LOCAL):
                raise ValueError(
                    f"a token would travel to {each} in plain text: give tls=Tls(ca=...)"
                )
        self._lock = threading.Lock()
        self._at = 0
        self._counts: collections.Counter[str] = collections.Counter()

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += by

    def counters(self) -> dict[str, int]:
        """Return what was counted since the start."""
        with self._lock:
            return dict(self._counts)

    @property
    def at(self) -> int:
        """The endpoint whose turn it is."""
        return self._at

    def leave(self, at: int) -> None:
        """Go on to the next endpoint, unless somebody has left this one already."""
        with self._lock:
            if self._at == at and len(self.endpoints) > 1:
                self._at = (at + 1) % len(self.endpoints)
                self._counts["endpoints_left"] += 1


class Call:
    """One call of a client: a deadline, and the tries of its requests."""

    def __init__(self, calling: Calling, model: str, timeout_s: float | None) -> None:
        """Start the clock."""
        self.calling, self.model = calling, model
        self.timeout_s = calling.settings.timeout_s if timeout_s is None else timeout_s
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be more than 0")
        self._end = time.monotonic() + self.timeout_s
        self.tries = 0

    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def policy(self) -> dict[str, Any]:
        """Return the arguments of tenacity, sync or not."""
        settings = self.calling.settings
        return {
            "retry": tenacity.retry_if_exception_type(AgainError),
            "wait": tenacity.wait_random_exponential(settings.wait_s, settings.wait_most_s),
            "stop": tenacity.stop_any(
                tenacity.stop_after_attempt(settings.tries),
                _Late(self),
            ),
            "reraise": True,
        }

    def arguments(self, failure: ClientError | None = None) -> dict[str, Any]:
        """Return those of one try, after the failure of the request's last one.

        Raises:
            ClientError: That failure; no time is left, for the wait took longer than asked.
            DeadlineError: No time is left for a first try.
        """
        left_s = self.left_s()
        if left_s <= 0:
            raise self._late(failure)
        self.tries += 1
        self.calling.count("requests")
        one_s = self.calling.settings.try_s
        return {
            "client_timeout": left_s if one_s is None else min(one_s, left_s),
            "headers": self.calling.settings.headers(),
        }

    def failed(
        self,
        error: InferenceServerException,
        at: int,
        pinned: bool,
        before: ClientError | None = None,
    ) -> ClientError:
        """Return what a try's failure is; a kind of `AgainError` where another one may help.

        Where the call's time ran out in this try, it is the failure of the one before, if any.
        """
        status = str(error.status() or "INTERNAL").removeprefix("StatusCode.")
        place = f"model {self.model!r} at {self.calling.endpoints[at]}: "
        text = place + str(error.message() or status)
        self.calling.count(f"failed_{status.lower()}")
        if status == "DEADLINE_EXCEEDED":
            # A try's own bound, or the call's.
            if self.left_s() <= 0.001 or self.calling.settings.try_s is None:
                return self._late(before)
            self.calling.leave(at)
            return AgainError(text)
        if status in _REPEATABLE:
            self.calling.leave(at)
            return DegradedAgainError(text) if "max_degraded_share" in text else AgainError(text)
        if status == "NOT_FOUND" and pinned:
            return VersionGoneError(text)
        return RefusedError(f"{text} ({status})")

    def gave_up(self, error: "AgainError", tries: int) -> UnavailableError:
        """Return what a caller is told once there are no more tries."""
        self.calling.count("given_up")
        kind = DegradedError if isinstance(error, DegradedAgainError) else UnavailableError
        return kind(f"{error} (tried {tries} times in {self.timeout_s} s)").after(tries)

    def _late(self, failure: ClientError | None) -> ClientError:
        if failure is not None:
            return failure
        self.calling.count("late")
        return DeadlineError(
            f"model {self.model!r}: the call's {self.timeout_s} s are over; tried {self.tries} "
            "requests"
        )


class _Late(tenacity.stop.stop_base):
    """Stops where the next try would come too late."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        return retry_state.upcoming_sleep >= self._call.left_s()


class AgainError(UnavailableError):
    """A try failed, and another one may help."""


class DegradedAgainError(AgainError):
    """... as too many keys were degraded."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One response."""

    arrays: Mapping[str, NDArray[Any]]
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, result: Any, outputs: Sequence[str]) -> "Reply":
        """Read what tritonclient gives."""
        parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice"))
            for name, value in result.get_response().parameters.items()
        }
        return cls({name: result.as_numpy(name) for name in outputs}, parameters)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a call asks for, whichever client sends it."""

    columns: Columns
    sources: bool
    version: int | None
    heads: Sequence[str] = ()  # of a ranking model

    @property
    def schema(self) -> Schema:
        """The model's."""
        return self.columns.schema

    @property
    def outputs(self) -> list[str]:
        """Tensors to ask for."""
        answers = [self.schema.output_of(head) for head in self.heads] or [self.schema.output]
        return [*answers, *(["SOURCE"] if self.sources else [])]

    def requests(self, version: int | None = None) -> list[Request]:
        """Return the requests, at the version that is given or asked for."""
        return cut(self.columns, self.version if version is None else version)

    def tensors(self, request: Request) -> list[tritonclient.grpc.InferInput]:
        """Return the inputs of a request, for either of tritonclient's gRPC clients."""
        inputs = []
        for name, array in request.arrays.items():
            whole = np.ascontiguousarray(array)
            dtype = np_to_triton_dtype(whole.dtype)
            tensor = tritonclient.grpc.InferInput(name, whole.shape, dtype)
            inputs.append(tensor.set_data_from_numpy(whole))
        return inputs

    def result(self, requests: Sequence[Request], replies: Sequence[Reply], call: Call) -> Any:
        """Return the answer in the kind that the features came in."""
        sources = None
        if self.sources:
            found = [reply.arrays["SOURCE"] for reply in replies]
            sources = sources_of(found, requests, self.schema)
        keys = sum(int(request.lengths_BF.sum()) for request in requests)
        said = [reply.parameters for reply in replies]
        facts = facts_of(said, keys=keys, sources=sources, tries=call.tries)
        if facts["degraded"] is not None:
            call.calling.count("degraded_answers")
            call.calling.count("degraded_keys", facts["degraded"].keys)
        if self.schema.ranking:
            scores = {head: self._scores(head, replies) for head in self.heads}
            return Ranked(scores=scores[self.heads[0]], heads=scores, **facts)
        parts = [reply.arrays[self.schema.output] for reply in replies]
        vectors = embeddings_of(parts, requests, self.schema)
        return Looked(embeddings=self.columns.table.embeddings(vectors), **facts)

    def _scores(self, head: str, replies: Sequence[Reply]) -> Any:
        parts = [reply.arrays[self.schema.output_of(head)] for reply in replies]
        name = "score" if head == self.schema.heads[0] else head
        return self.columns.table.scores(scores_of(parts, self.columns), name)


def chosen(schema: Schema, heads: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the heads that a call asks for.

    Raises:
        InputError: One is not the model's.
    """
    if heads is None:
        return schema.heads
    asked = (heads,) if isinstance(heads, str) else tuple(dict.fromkeys(heads))
    unknown = [head for head in asked if head not in schema.heads]
    if unknown or not asked:
        what = f"head {unknown[0]!r} is unknown" if unknown else "no head is named"
        raise InputError(f"{what}; model {schema.model!r} has {', '.join(schema.heads)}")
    return asked


def check_kind(schema: Schema, *, ranking: bool) -> None:
    """Refuse a call that the model is not for.

    Raises:
        RefusedError: It is of the other kind.
    """
    if schema.ranking != ranking:
        kind, verb = ("ranking", "rank") if schema.ranking else ("lookup", "lookup")
        raise RefusedError(f"model {schema.model!r} is of kind {kind}: call {verb}()")
