"""How a server of a node is started: its options, and the command line of each front end.

Both have the same core, Triton's, with its backends, scheduler and metrics. `own` is
embertide_server, whose front end lives through what callers do (docs/serving.md); `triton` is
tritonserver, which alone answers inference over HTTP.
"""

import dataclasses
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from embertide import server
from embertide._common.addresses import is_this_machine, join_address
from embertide._common.quoting import without_secrets
from embertide.server.adapters.installation import Installation
from embertide.server.adapters.process import ProcessError

Front = Literal["own", "triton"]
PACKAGE = Path(server.__file__).resolve().parent.parent
"""The installed package, or a checkout."""
ADMIN_HEADER = "embertide-admin"
"""HTTP header of the key that APIs for operators ask for; over gRPC `GRPC_ADMIN_HEADER`."""
GRPC_ADMIN_HEADER = f"triton-grpc-protocol-{ADMIN_HEADER}"
# Triton's APIs that change what it serves, map memory of the machine, or write files. Requests for
# scores need none of them.
_OPERATORS_APIS = "model-repository,shared-memory,trace,logging"
_PROGRAM = "embertide_server"
_OTLP_GRPC_PORT = 4317
# tritonserver makes headers that match it parameters of the request; ours does so by itself.
_TRACE_HEADER = "(?i)traceparent"


class TritonError(ProcessError):
    """The server could not be started; the message says why and what to do."""


def find_program() -> Path:
    """Return embertide_server: EMBERTIDE_SERVER, or of the installed package, or of a build.

    Raises:
        TritonError: It is not there.
    """
    named = os.environ.get("EMBERTIDE_SERVER")
    places = [PACKAGE / "bin" / _PROGRAM, PACKAGE / "build" / "cpp" / _PROGRAM]
    found = next((each for each in ([Path(named)] if named else places) if each.is_file()), None)
    if found is None:
        raise TritonError(
            f"{_PROGRAM} is missing: build it with `make cpp`, pip install a wheel of embertide "
            "that carries it, or serve by tritonserver's own front end: --front triton"
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """How to start a server."""

    repository: Path
    backends: Path  # holds embertide/libtriton_embertide.so
    log: Path
    triton: Path | None = None  # as `find_installation` takes it; None: that of the wheel
    front: Front = "own"  # who answers callers
    host: str = "127.0.0.1"
    # Port of inferences over HTTP, in plain text; None: closed. With front `triton`, a hundred
    # bytes of anybody end or fill version 2.51 (docs/security.md).
    http_port: int | None = None
    grpc_port: int = 8001
    metrics_port: int = 8002
    explicit: bool = False  # models are loaded by name, over the API
    models: Sequence[str] = ()  # with explicit: loaded at the start
    admin_key: str | None = None  # asked for by the APIs for operators; None: they are open
    start_timeout_s: float = 120.0
    exit_timeout_s: int = 3  # for requests in flight, once it is told to end
    # Front `own` alone: what callers prove their identity by (docs/security.md).
    tls: Path | None = None  # folder of tls.crt, tls.key and ca.crt; None: plain text
    tokens: Path | None = None  # lines of ROLE[@MODEL][/NAME]:TOKEN
    known_callers: bool = False  # readers and operators alone may ask
    plaintext: bool = False  # tokens may travel so, and those of the examples will do
    # Front `own` alone: the most of one caller at once; None: half of what all have.
    caller_calls: int | None = None
    caller_bytes: int | None = None
    # URL of a collector that takes spans as OTLP, of front `own` over gRPC and of `triton` over
    # HTTP; None: no spans.
    spans_to: str | None = None
    spans_every: int = 1  # of requests without a traceparent, one in so many has spans
    # Connections of gRPC are ended so long after they were made, when no call is at work, so that
    # clients find nodes that have come and leave those that are ending; None: never.
    grpc_connection_age_ms: int | None = None
    extra: Sequence[str] = ()  # further arguments of tritonserver
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def asks_callers(self) -> bool:
        """Return whether callers are asked who they are, who started the server among them."""
        return self.tls is not None or self.tokens is not None or self.known_callers

    def ports(self) -> dict[str, int]:
        """Return the ports by what they serve."""
        http = {"http": self.http_port} if self.http_port is not None else {}
        return {**http, "grpc": self.grpc_port, "metrics": self.metrics_port}

    def evhtp_host(self) -> str:
        """Return the host as Triton's HTTP servers want it."""
        return f"ipv6:{self.host}" if ":" in self.host else self.host

    def reached(self, port: int) -> str:
        """Return HOST:PORT by which this machine reaches one of the ports."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return join_address(host, port)


def _http(options: ServerOptions) -> list[str]:
    if options.http_port is None:
        return ["--allow-http=false"]
    return [
        f"--http-address={options.evhtp_host()}",
        f"--http-port={options.http_port}",
        f"--http-header-forward-pattern={_TRACE_HEADER}",
    ]


def _restrictions(options: ServerOptions) -> list[str]:
    if options.admin_key is None:
        return []
    asked = f"{_OPERATORS_APIS}:{ADMIN_HEADER}={options.admin_key}"
    http = [f"--http-restricted-api={asked}"] if options.http_port is not None else []
    return [*http, f"--grpc-restricted-protocol={asked}"]


def _spans(options: ServerOptions) -> list[str]:
    if options.spans_to is None:
        return []
    values = ("mode=opentelemetry", "level=TIMESTAMPS", f"rate={options.spans_every}")
    return [
        *(f"--trace-config={each}" for each in values),
        f"--trace-config=opentelemetry,url={options.spans_to}",
    ]


def triton_arguments(options: ServerOptions, root: Path) -> list[str]:
    """Return the arguments of tritonserver; `root` is that of its installation."""
    return [
        f"--model-repository={options.repository.resolve()}",
        f"--backend-directory={options.backends.resolve()}",
        f"--cache-directory={root / 'caches'}",
        *_http(options),
        f"--grpc-address={join_address(options.host, 0).removesuffix(':0')}",
        f"--metrics-address={options.evhtp_host()}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-port={options.metrics_port}",
        f"--grpc-header-forward-pattern={_TRACE_HEADER}",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        *(
            [f"--grpc-max-connection-age={options.grpc_connection_age_ms}"]
            if options.grpc_connection_age_ms is not None
            else []
        ),
        *(["--model-control-mode=explicit"] if options.explicit else []),
        *(f"--load-model={model}" for model in options.models),
        *_restrictions(options),
        *_spans(options),
        *options.extra,
    ]


def _of_callers(options: ServerOptions) -> list[str]:
    values = {
        "tls": options.tls,
        "tokens": options.tokens,
        "max-calls-of-one": options.caller_calls,
        "max-bytes-of-one": options.caller_bytes,
    }
    return [
        *(f"--{name}={value}" for name, value in values.items() if value is not None),
        *(["--known-callers"] if options.known_callers else []),
        *(["--example-tokens"] if options.plaintext else []),
    ]


def _own_spans(options: ServerOptions) -> list[str]:
    if options.spans_to is None:
        return []
    parts = urllib.parse.urlsplit(options.spans_to)
    collector = join_address(parts.hostname or "", parts.port or _OTLP_GRPC_PORT)
    return [f"--spans-to={collector}", f"--spans-every={options.spans_every}"]


def _own_arguments(
    options: ServerOptions, installation: Installation, own_socket: Path | None
) -> list[str]:
    age_ms = options.grpc_connection_age_ms
    json_address = join_address(options.host, options.http_port or 0)
    return [
        f"--triton={installation.library}",
        f"--repository={options.repository.resolve()}",
        f"--backends={options.backends.resolve()}",
        f"--grpc={join_address(options.host, options.grpc_port)}",
        f"--http={join_address(options.host, options.metrics_port)}",
        f"--exit-timeout-s={options.exit_timeout_s}",
        *([] if options.http_port is None else [f"--http-infer={json_address}"]),
        *([f"--connection-age-ms={age_ms}"] if age_ms is not None else []),
        *([f"--own-socket={own_socket}"] if own_socket is not None else []),
        *_own_spans(options),
        *_of_callers(options),
        *(["--by-name"] if options.explicit else []),
        *(f"--model={model}" for model in options.models),
        *options.extra,
    ]


def _check_callers(options: ServerOptions) -> None:
    if options.front == "triton" and options.asks_callers():
        raise TritonError(
            "tritonserver's own front end asks nobody who he is: leave --front-tls, "
            "--front-tokens and --known-callers out, or serve by --front own"
        )
    if options.known_callers and options.tls is None and options.tokens is None:
        raise TritonError(
            "--known-callers: nobody could say who he is; give --front-tokens, --front-tls or both"
        )
    by_http = options.http_port is not None and options.front == "own"
    if by_http and options.asks_callers() and options.tokens is None:
        raise TritonError(
            "--http-port: who asks over HTTP can show a token alone; give --front-tokens, or leave "
            "it out"
        )
    exposed = options.tokens is not None and (options.tls is None or by_http)
    if exposed and not options.plaintext and not is_this_machine(options.host):
        raise TritonError(
            f"tokens would travel to {options.host} in plain text: give --front-tls with a folder "
            "of certificates and no --http-port, or --plaintext on a network that nobody else "
            "listens to"
        )


def _collector_path(url: str) -> str | None:
    """Return the path of a collector's URL; None: it is none."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    plain = url.isascii() and url.isprintable() and not set(url) & set(" ,@?#")
    if not plain or parts.scheme != "http" or not parts.hostname or port == 0:
        return None
    return parts.path.removesuffix("/")


def _check_spans(options: ServerOptions) -> None:
    if options.spans_to is None:
        if options.spans_every != 1:
            raise TritonError(
                f"--spans-every {options.spans_every}: there are no spans without --spans-to; give "
                "both, or neither"
            )
        return
    path = _collector_path(options.spans_to)
    shown = repr(without_secrets(options.spans_to))
    own = options.front == "own"
    if path is None:
        form = (
            "gRPC in plain text, as http://HOST:4317"
            if own
            else "plain HTTP, as http://HOST:4318/v1/traces"
        )
        raise TritonError(
            f"--spans-to {shown} is no place that spans can be sent to: give the URL of a "
            f"collector that takes OTLP over {form}"
        )
    if own and path:
        raise TritonError(
            f"--spans-to {shown} has a path, as OTLP over HTTP has: our own front end sends OTLP "
            "over gRPC; give http://HOST:4317, where most collectors take it, or serve by "
            "--front triton"
        )
    if not own and not path:
        raise TritonError(
            f"--spans-to {shown} has no path, as OTLP over gRPC: tritonserver's own front end "
            "sends OTLP over HTTP; give http://HOST:4318/v1/traces, or serve by --front own"
        )


def check(options: ServerOptions, installation: Installation) -> None:
    """Prove that a server can be started so.

    Raises:
        ProcessError: Its program is missing or too old, or cannot do what the options want, such
            as to ask callers who they are, or to make spans.
    """
    _check_callers(options)
    _check_spans(options)
    if options.front == "triton":
        installation.check_options(triton_arguments(options, installation.root))
        return
    find_program()


def command(
    options: ServerOptions, installation: Installation, own_socket: Path | None = None
) -> tuple[list[str], Mapping[str, str]]:
    """Return the command line of a server, and what its environment has beside ours.

    Args:
        options: The server's options.
        installation: The installation that has Triton's core.
        own_socket: With front `own`: a socket where the process that starts the server may ask
            everything.
    """
    if options.front == "triton":
        arguments = triton_arguments(options, installation.root)
        return [str(installation.binary), *arguments], installation.environment()
    # A command line is read by everybody on the machine.
    key = {"EMBERTIDE_ADMIN_KEY": options.admin_key} if options.admin_key else {}
    arguments = _own_arguments(options, installation, own_socket)
    return [str(find_program()), *arguments], {**installation.environment(), **key}
