"""`serve`: one node over a snapshot, or over a trainer's publication as it grows."""

import contextlib
import re
import secrets
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, unquote, urlsplit

import typer

from embertide._common.addresses import join_address
from embertide._common.commands import a_name, bare_host
from embertide._common.private import own_folder, write_private
from embertide._common.reporting import report_errors
from embertide._common.terminal import say
from embertide.server.adapters import silence, triton
from embertide.server.adapters.kept_server import KeptServer
from embertide.server.adapters.limits import check_limits
from embertide.server.adapters.process import ProcessError, UsageError
from embertide.server.adapters.schema import context_of, model_of, schema_of
from embertide.server.adapters.server_command import Front
from embertide.server.cli import schema_switch
from embertide.server.cli.common_options import (
    DEFAULT_BACKENDS,
    Backends,
    Triton,
    read_secret,
)
from embertide.server.cli.metrics_page import MetricsPage
from embertide.server.cli.mirror import Mirror
from embertide.server.cli.node_flags import options_of, with_node_flags
from embertide.server.cli.snapshot import newest_snapshot

_MIB = 1 << 20
_POLL_S = 0.5
# Less than the time that a pod answers on once it is ending (k8s/base/node.yaml, preStop).
_CONNECTION_AGE_MS = 10_000
_KEY = re.compile(r"[A-Za-z0-9_-]{16,256}")


def _is_snapshot(path: Path) -> bool:
    if (path / "manifest.json").is_file():
        return True
    if (path / "snapshots").is_dir():
        return False
    raise UsageError(
        f"{path} holds neither a snapshot (manifest.json) nor a publication (snapshots/): give the "
        "folder that `embertide import` or `embertide train` wrote"
    )


def _schema(path: Path) -> str | None:
    """Return what clients are told of requests; None where there is no version yet to tell of."""
    try:
        return schema_of(newest_snapshot(path))
    except (OSError, ValueError, KeyError) as error:
        say(f"clients are told no features of this model: {error}", err=True)
        return None  # what the net needs, the backend proves, too
    except ProcessError:
        return None


def context_columns(path: Path, flags: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns that are the user's: those given, else those that the snapshot names."""
    if flags["context"] or flags["kind"] != "ranking":
        return tuple(flags["context"] or ())
    try:
        return context_of(newest_snapshot(path))
    except (OSError, ValueError, ProcessError):
        return ()  # no version yet, or the backend says what is wrong


def precision(page: MetricsPage, name: str) -> str | None:
    """Say what a model's dense net is computed in; None: its run chose no reduced precision."""
    family = "embertide_dense_reduced_versions_total"
    types = page.labels(family, "type", model=name)
    if not types:
        return None
    (kind,) = types
    if page.sum("embertide_dense_reduced", model=name):
        return f"the dense net is computed in {kind}"
    if page.sum(family, model=name, result="no_cpu"):
        return f"the dense net is computed in fp32: this CPU lacks the instructions for {kind}"
    return f"the dense net is computed in fp32: {kind} is not taken, the log says why"


def _model_name(path: Path) -> str:
    """Return the name of the model in a snapshot or a publication.

    Raises:
        ProcessError: It is not said, or no name for Triton.
    """
    try:
        return model_of(newest_snapshot(path))
    except (OSError, ValueError) as error:
        raise ProcessError(f"{path} names no model ({error}): give one, --name") from error


def _admin_key(path: Path | None) -> str:
    """Return the key of a file, or one that nobody knows."""
    if path is None:
        return secrets.token_urlsafe(32)
    key = read_secret("--admin-key-file", path)
    if not _KEY.fullmatch(key):
        raise UsageError(
            f"--admin-key-file {path} holds no key: give one line of 16 to 256 letters, digits, "
            "- and _, as `openssl rand -hex 32` makes it"
        )
    return key


def without_password(name: str, url: str | None, directory: Path) -> str | None:
    """Put the password of a Redis URL in a file of ours: Triton shows its configuration to all."""
    parts = urlsplit(url or "")
    if "password=" in parts.query:
        raise UsageError(f"--{name} has a password in its query; write ?password_file=PATH")
    if url is None or not parts.password:
        return url
    path = (directory / f"{name}.password").absolute()
    write_private(path, unquote(parts.password).encode())
    place = parts.netloc.rpartition("@")[2]
    query = "&".join(filter(None, (parts.query, f"password_file={quote(str(path))}")))
    user = f"{parts.username}@" if parts.username else ""
    return parts._replace(netloc=user + place, query=query).geturl()


@with_node_flags
def command(
    place: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A snapshot, or the publication that a trainer writes; or the URL of its copy in "
            "object storage, as s3://BUCKET/PREFIX.",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            callback=a_name, help="The model's name in Triton.", show_default="the name that it has"
        ),
    ] = None,
    hps_names: Annotated[
        bool,
        typer.Option(
            "--hps-names",
            help="Call tensors as HugeCTR's HPS does, NUMKEYS and OUTPUT0: for --kind lookup, and "
            "clients of a model that `import --hps` brought.",
        ),
    ] = False,
    instances: Annotated[int, typer.Option(help="Requests that are answered at a time.")] = 2,
    max_queue: Annotated[
        int, typer.Option(help="Requests that may wait; more are refused: UNAVAILABLE.", min=1)
    ] = 1000,
    max_wait_ms: Annotated[
        int,
        typer.Option(
            help="A request that waited so long, or as long as its own timeout, is refused: "
            "UNAVAILABLE.",
            min=1,
        ),
    ] = 2000,
    start_timeout_s: Annotated[
        float, typer.Option(help="Time that loading may take.", min=1)
    ] = 3600.0,
    silent_s: Annotated[
        float,
        typer.Option(
            help="A server that is ready, and then answers nobody for so many seconds, is ended "
            "and started again; 0: never. One that is loading or busy is left alone.",
            min=0,
        ),
    ] = silence.DEFAULT_S,
    leave_s: Annotated[
        float,
        typer.Option(
            help="Seconds to answer on once told to end (SIGTERM, Ctrl-C), while callers leave: "
            "connections of HTTP that they keep are ended between requests. A second signal ends "
            "it at once.",
            min=0,
            max=3600,
        ),
    ] = 0.0,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key that callers of Triton's model repository, shared memory, "
            "trace and logging APIs must send (docs/security.md); without it "
            "nobody may call them."
        ),
    ] = None,
    directory: Annotated[
        Path, typer.Option(help="Folder of the model repository and the log.")
    ] = Path("build/serve"),
    host: Annotated[
        str, typer.Option(callback=bare_host, help="Address to listen on.")
    ] = "127.0.0.1",
    front: Annotated[
        Front,
        typer.Option(
            help="Who answers callers: own is embertide_server, over Triton's core; triton is "
            "tritonserver's own front end (docs/serving.md)."
        ),
    ] = "own",
    front_tls: Annotated[
        Path | None,
        typer.Option(
            help="Folder of tls.crt, tls.key and ca.crt, read again when they change: callers are "
            "spoken to by TLS, and show a certificate of ca.crt's authorities "
            "(docs/security.md)."
        ),
    ] = None,
    front_tokens: Annotated[
        Path | None,
        typer.Option(
            help="File of lines ROLE[@MODEL][/NAME]:TOKEN, read again when it changes: callers may "
            "show a token, an operator's to load and unload models."
        ),
    ] = None,
    known_callers: Annotated[
        bool,
        typer.Option(
            "--known-callers",
            help="Answer readers and operators alone, by certificate (--front-tls) or token "
            "(--front-tokens); with tokens, callers by TLS need no certificate.",
        ),
    ] = False,
    caller_calls: Annotated[
        int | None,
        typer.Option(
            help="Inferences of one caller at once: an identity that has a name, else an address "
            "(2048).",
            min=1,
            max=1_000_000,
        ),
    ] = None,
    caller_mib: Annotated[
        int | None,
        typer.Option(help="Their requests and answers, MiB (512).", min=1, max=1 << 20),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            help="KServe v2 over HTTP as JSON, in plain text. With --front triton one request of a "
            "stranger can end it: for callers that you trust (docs/serving.md).",
            show_default="closed",
            min=1,
            max=65535,
        ),
    ] = None,
    spans_to: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Collector that takes spans of OpenTelemetry, one for each request, below that of "
            "its caller: over gRPC, as http://HOST:4317; with --front triton over HTTP, as "
            "http://HOST:4318/v1/traces.",
        ),
    ] = None,
    spans_every: Annotated[
        int,
        typer.Option(
            help="Of requests without a traceparent, one in so many has a span.",
            min=1,
            max=1_000_000,
        ),
    ] = 1,
    grpc_port: Annotated[int, typer.Option(help="KServe v2 over gRPC.", min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Prometheus metrics.", min=1, max=65535)] = 8002,
    backends: Backends = DEFAULT_BACKENDS,
    tritonserver: Triton = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Serve a model by Triton until Ctrl-C.

    Example: embertide serve build/news --bus redis://127.0.0.1:6379 --ddr-mib 256 --ssd-mib 4096
    """
    with report_errors(), contextlib.ExitStack() as stack:
        options_of(flags)  # what is no choice is said before anything starts
        silence.check_bound(silent_s)
        check_limits()
        own_folder(directory)
        path, mirror = Path(place), None
        if "://" in place:
            path = directory / "publication"
            mirror = stack.enter_context(Mirror(place, path, log=directory / "mirror.log"))
            mirror.wait_for_snapshot(start_timeout_s)
        snapshot = _is_snapshot(path)
        if name is None:
            name = _model_name(path)
        if snapshot and flags["bus"] is not None:
            raise UsageError(f"{path} is one snapshot: it has no updates, leave --bus out")
        shared = bool(flags["state"])
        ssd = flags["ssd_directory"] or (directory / "ssd" if flags["ssd_mib"] else None)
        try:
            options = triton.ModelOptions(
                hps_names=hps_names,
                instances=instances,
                max_queue_size=max_queue,
                max_wait_ms=max_wait_ms,
                **options_of(
                    flags,
                    snapshot=path if snapshot else None,
                    publication=None if snapshot else path,
                    bus=without_password("bus", flags["bus"], directory),
                    state=without_password("state", flags["state"], directory),
                    ssd_directory=ssd,
                    warm_up_file=directory / "warm_up.keys" if flags["warm_up_mib"] else None,
                    plan_file=directory / "plan.bin",
                    schema=_schema(path),
                    context=context_columns(path, flags),
                ),
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        options = schema_switch.placed(options)
        # One of its own: Triton may load all that it finds there.
        repository = directory / "models" / name
        triton.write_model(repository, name, options)
        explicit = admin_key_file is not None or not (snapshot or shared)
        server_options = triton.ServerOptions(
            repository=repository,
            backends=backends,
            log=directory / "node.log",
            triton=tritonserver,
            front=front,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            # Else no model is loaded or unloaded after the start, whatever key is sent.
            explicit=explicit,
            models=(name,) if explicit else (),
            admin_key=_admin_key(admin_key_file),
            start_timeout_s=start_timeout_s,
            grpc_connection_age_ms=_CONNECTION_AGE_MS,
            tls=front_tls,
            tokens=front_tokens,
            known_callers=known_callers,
            plaintext=flags["plaintext"],
            caller_calls=caller_calls,
            caller_bytes=caller_mib * _MIB if caller_mib else None,
            spans_to=spans_to,
            spans_every=spans_every,
        )
        say(f"starting {flags['node']} over {place}", err=True)
        server = stack.enter_context(triton.TritonServer(server_options))
        watch = silence.SilenceWatch(server, name, silent_s)
        version = server.version() or "of unknown version"
        if repaired := server.advice(version):
            say(f"tritonserver {version}: {repaired}", err=True)
        say(
            f"model {name!r} is ready: Triton {version}, gRPC {server.grpc}, "
            + (f"HTTP {server.http}, " if http_port is not None else "")
            + f"metrics http://{join_address(host, metrics_port)}/metrics; "
            f"log {server_options.log}; Ctrl-C stops it"
        )
        tell = partial(say, err=True)
        with contextlib.suppress(triton.TritonError):  # metrics late: they go on saying it
            if said := precision(MetricsPage(server.metrics()), name):
                tell(f"model {name!r}: {said}")
        switch = None
        if not snapshot:
            own_context = bool(flags["context"])
            switch = schema_switch.SchemaSwitch(
                server, name, options, tell, own_context=own_context
            )
        kept = KeptServer(server, tell, watch, switch.server_ended if switch else lambda: None)
        try:
            while True:
                if kept.poll() and switch is not None:
                    with contextlib.suppress(triton.TritonError):  # metrics late: asked again
                        switch.poll()
                time.sleep(_POLL_S)
                if mirror is not None:
                    mirror.keep()
        except KeyboardInterrupt:
            server.leave(leave_s)  # a second signal ends it at once
            raise
