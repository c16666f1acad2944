"""How a client calls, and which endpoints it may call so."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from embertide._common import kserve
from embertide._common.addresses import is_local_target, split_address
from embertide.client import tracing

_MIN_PATIENCE_S = 0.02  # machines have pauses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Certificates of gRPC, PEM files.

    Attributes:
        ca: Who signed the servers'; None: those that gRPC trusts.
        certificate: The client's own, with `key`, where servers ask for one.
        key: The private key of `certificate`.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a client calls.

    Attributes:
        timeout_s: Deadline of a call with all its requests and repeats; a call may give its own.
        try_s: That a request waits before another endpoint is asked, too; None: a part of the
            call's time, and only where the endpoint answers nobody.
        tries: Times that a request is sent at most.
        wait_s: Before the first repeat, on average half; doubled with each, at most `wait_most_s`.
        concurrency: Requests of a call that are under way at once.
        tls: None: plain text.
        token: Sent as `authorization: Bearer ...`; a function is asked before each request.
        schemas: By model, of those that do not tell theirs (docs/serving.md, Schema).
        trace: Where the traceparent of a call's requests comes from. "given": of the caller, or of
            OpenTelemetry's active span; "always": else a new one; "spans": of a span of
            OpenTelemetry that each call is, which needs the extra `otel`.
        max_answer_bytes: Bound on the answer to one request. Calls are cut so that answers fit.
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
    trace: tracing.How = "given"
    max_answer_bytes: int = kserve.MAX_ANSWER_BYTES

    def __post_init__(self) -> None:
        """Refuse what cannot be called with."""
        times = ("timeout_s", "wait_s", "wait_most_s")
        for name in (*times, "tries", "concurrency", "max_answer_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be more than 0")
        if self.trace not in tracing.HOWS:
            raise ValueError(f"trace is {self.trace!r}; give {', '.join(map(repr, tracing.HOWS))}")
        if self.try_s is not None and not self.try_s > 0:
            raise ValueError(f"try_s is {self.try_s}; it must be more than 0, or None")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return those of TLS; None: plain text.

        Raises:
            ValueError: A file cannot be read.
        """
        if self.tls is None:
            return None
        files = (self.tls.ca, self.tls.key, self.tls.certificate)
        try:
            pems = [None if path is None else Path(path).read_bytes() for path in files]
        except OSError as error:
            raise ValueError(f"tls: {error.filename}: {error.strerror}") from None
        return grpc.ssl_channel_credentials(*pems)

    def metadata(self) -> kserve.Metadata:
        """Return the metadata of a request."""
        token = self.token() if callable(self.token) else self.token
        return () if token is None else (("authorization", f"Bearer {token}"),)

    def patience_s(self, timeout_s: float, endpoints: int) -> float:
        """Return how long a request waits before another endpoint is asked, too."""
        if self.try_s is not None:
            return self.try_s
        return max(timeout_s / (endpoints + 1), _MIN_PATIENCE_S)

    def check(self, endpoint: str) -> None:
        """Refuse what is no endpoint, or one that a token would travel to in plain text.

        Raises:
            ValueError: It is one of them.
        """
        if not endpoint.startswith(("unix:", "unix-abstract:")):
            try:
                split_address(endpoint)
            except ValueError:
                raise ValueError(
                    f"endpoint {endpoint!r} is not host:port, as 127.0.0.1:8001"
                ) from None
        if self.token is not None and self.tls is None and not is_local_target(endpoint):
            raise ValueError(
                f"a token would travel to {endpoint} in plain text: give tls=Tls(ca=...)"
            )
