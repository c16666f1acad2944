"""`serve`: one node over a snapshot, or over a trainer's publication as it grows."""

import contextlib
import re
import secrets
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote, unquote, urlsplit

import typer

from embertide._common.addresses import join_address
from embertide._common.commands import a_name, address, bare_host, one_address
from embertide._common.private import own_folder, write_private
from embertide._common.reporting import report_errors
from embertide._common.terminal import say
from embertide.server.adapters import silence, triton
from embertide.server.adapters.kept_server import KeptServer
from embertide.server.adapters.limits import check_limits
from embertide.server.adapters.process import ProcessError, UsageError
from embertide.server.adapters.schema import model_of, schema_of
from embertide.server.adapters.server_command import Front
from embertide.server.cli import schema_switch
from embertide.server.cli.common_options import (
    DEFAULT_BACKENDS,
    Backends,
    HealthListen,
    Triton,
    read_secret,
)
from embertide.server.cli.mirror import Mirror
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


def command(
    place: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A snapshot, or the publication that a trainer writes; or the URL of its copy in "
            "object storage, as s3://BUCKET/PREFIX.",
        ),
    ],
    bus: Annotated[
        str | None,
        typer.Option(
            help="Redis URL of the trainer; without it a publication's files are followed."
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="ranking (scores) or lookup (embeddings, needs no dense net).")
    ] = "ranking",
    name: Annotated[
        str | None,
        typer.Option(
            callback=a_name, help="The model's name in Triton.", show_default="the name that it has"
        ),
    ] = None,
    devices: Annotated[int, typer.Option(help="CPU devices that share the rows.")] = 1,
    numa_nodes: Annotated[
        str,
        typer.Option(
            help="NUMA nodes whose memory those devices are in, in turn: auto (all, if there are "
            "several), none, or numbers as 0,1."
        ),
    ] = "auto",
    instances: Annotated[int, typer.Option(help="Requests that are answered at a time.")] = 2,
    threads: Annotated[
        int, typer.Option(help="Threads of an instance that share a request's samples.", min=1)
    ] = 1,
    ddr_mib: Annotated[int, typer.Option(help="DDR budget, MiB.")] = 1024,
    ssd_mib: Annotated[int, typer.Option(help="SSD budget, MiB; 0: no SSD tier.")] = 0,
    ssd_directory: Annotated[
        Path | None, typer.Option(help="Where the SSD tier's log lies.")
    ] = None,
    index: Annotated[
        str,
        typer.Option(
            help="How it keeps where rows lie: plain; or lean: fewer bytes a row, a slower lookup."
        ),
    ] = "plain",
    ddr_policy: Annotated[
        str | None,
        typer.Option(help="Which rows DDR holds: clock, or clock:2 to enter at the second read."),
    ] = None,
    table_budget: Annotated[
        list[str] | None,
        typer.Option(
            help="Budget reserved for one table, and its policy: "
            "TABLE=DDR_BYTES[/SSD_BYTES[/POLICY]]; may be given several times. "
            "`embertide cache-sim` compares the policies."
        ),
    ] = None,
    hbm_mib: Annotated[
        int, typer.Option(help="HBM budget of each GPU, MiB, for copies of hot rows; 0: no GPU.")
    ] = 0,
    hbm_devices: Annotated[
        int, typer.Option(help="GPUs, from the first that the process sees.", min=1)
    ] = 1,
    hbm_kind: Annotated[
        str, typer.Option(help="gpu; or twin: host memory in a GPU's place, to try it without one.")
    ] = "gpu",
    hbm_policy: Annotated[
        str | None,
        typer.Option(
            help="At which read rows enter HBM, of all tables and of some: "
            "POLICY[,TABLE=POLICY...], each clock, clock:2 to clock:15 or none (clock:2)."
        ),
    ] = None,
    ssd_engine: Annotated[
        str, typer.Option(help="How it is read: auto, io_uring, libaio or pread.")
    ] = "auto",
    guard: Annotated[
        bool,
        typer.Option(help="Answer at versions that `embertide guard` promoted (docs/guard.md)."),
    ] = False,
    guard_timeout_s: Annotated[
        float,
        typer.Option(
            help="With --guard: a version that waited so long for a decision is served; 0: never.",
            min=0,
        ),
    ] = 0.0,
    ssd_seal_s: Annotated[
        float,
        typer.Option(
            help="Seconds between seals of the SSD tier, from which a start after a kill reads it; "
            "0: none, all rows are read from the snapshot.",
            min=0,
        ),
    ] = 300.0,
    node: Annotated[
        str, typer.Option(callback=a_name, help="What this node calls itself.")
    ] = "node-0",
    state: Annotated[
        str | None,
        typer.Option(
            help="Redis URL of the plans: the node shares the model with others, holds what the "
            "plan says and asks its peers for the rest. Needs --peer."
        ),
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(callback=address, help="HOST:PORT of the control plane to register with."),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            callback=one_address, help="HOST:PORT where peers reach this node; it listens there."
        ),
    ] = None,
    health_listen: HealthListen = None,
    group: Annotated[
        int, typer.Option(help="Lookups stay inside a group as long as it answers.", min=0)
    ] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the tokens, one a line, that peers and the control plane ask for: all "
            "are accepted, the first is sent. Read again when it changes."
        ),
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(
            envvar="EMBERTIDE_TLS",
            help="Folder of tls.crt, tls.key and ca.crt, read again when they change: peers and "
            "the control plane are spoken to by TLS both ways (docs/security.md).",
        ),
    ] = None,
    plaintext: Annotated[
        bool,
        typer.Option(
            "--plaintext",
            envvar="EMBERTIDE_PLAINTEXT",
            help="Answer peers without TLS where other machines can reach it: who listens on the "
            "network reads rows and tokens.",
        ),
    ] = False,
    peer_listen: Annotated[
        str | None,
        typer.Option(
            callback=one_address,
            help="HOST:PORT to listen on for peers, if not --peer: 0.0.0.0:7200 is all addresses.",
        ),
    ] = None,
    max_degraded_share: Annotated[
        float | None,
        typer.Option(
            help="Largest share of a request's keys that may be defaults because no owner answers; "
            "requests above it fail. Default: 0.05 for ranking, 0 for lookup.",
            min=0,
            max=1,
        ),
    ] = None,
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
    max_output_mib: Annotated[
        int | None, typer.Option(help="Of a request's answer, MiB (256).", min=1, max=2048)
    ] = None,
    peer_timeout_ms: Annotated[
        int | None,
        typer.Option(help="For peers, where a request names no timeout, ms (100).", min=1),
    ] = None,
    window_versions: Annotated[
        int | None,
        typer.Option(help="Versions that may be asked for by number (8).", min=1, max=1024),
    ] = None,
    ready_staleness_ms: Annotated[
        int | None,
        typer.Option(
            help="The node is not ready while its newest version was committed so long before the "
            "newest published one, ms (60000).",
            min=0,
        ),
    ] = None,
    join_step_mib: Annotated[
        int | None,
        typer.Option(help="Rows of a step in which buckets come to the node, MiB (1).", min=1),
    ] = None,
    join_rest: Annotated[
        int | None,
        typer.Option(
            help="Rest after each step in which buckets come to the node, as a multiple of what "
            "the step took (1).",
            min=0,
            max=1000,
        ),
    ] = None,
    hot_rows_mib: Annotated[
        int,
        typer.Option(help="For copies of peers' rows that are read often, MiB; 0: none.", min=0),
    ] = 32,
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
    grpc_port: Annotated[int, typer.Option(help="KServe v2 over gRPC.", min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Prometheus metrics.", min=1, max=65535)] = 8002,
    backends: Backends = DEFAULT_BACKENDS,
    tritonserver: Triton = None,
) -> None:
    """Serve a model by Triton until Ctrl-C.

    Example: embertide serve build/news --bus redis://127.0.0.1:6379 --ddr-mib 256 --ssd-mib 4096
    """
    with report_errors(), contextlib.ExitStack() as stack:
        if kind not in ("ranking", "lookup"):
            raise UsageError(f"kind is {kind!r}; use ranking or lookup")
        chosen: Literal["ranking", "lookup"] = "ranking" if kind == "ranking" else "lookup"
        if hbm_kind not in ("gpu", "twin"):
            raise UsageError(f"hbm_kind is {hbm_kind!r}; use gpu or twin")
        device: Literal["gpu", "twin"] = "gpu" if hbm_kind == "gpu" else "twin"
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
        if snapshot and bus is not None:
            raise UsageError(f"{path} is one snapshot: it has no updates, leave --bus out")
        try:
            options = triton.ModelOptions(
                snapshot=path if snapshot else None,
                publication=None if snapshot else path,
                bus=without_password("bus", bus, directory),
                kind=chosen,
                instances=instances,
                threads=threads,
                max_queue_size=max_queue,
                max_wait_ms=max_wait_ms,
                max_output_bytes=max_output_mib * _MIB if max_output_mib else None,
                window_versions=window_versions,
                ready_staleness_ms=None if snapshot else ready_staleness_ms,
                devices=devices,
                numa_nodes=numa_nodes,
                ddr_budget_bytes=ddr_mib * _MIB,
                ssd_budget_bytes=ssd_mib * _MIB,
                ssd_directory=ssd_directory or (directory / "ssd" if ssd_mib else None),
                hbm_budget_bytes=hbm_mib * _MIB if hbm_mib else None,
                hbm_devices=hbm_devices if hbm_mib else None,
                hbm_kind=device if hbm_mib else None,
                hbm_policy=hbm_policy,
                index=index,
                ddr_policy=ddr_policy,
                table_budgets=tuple(table_budget or ()),
                ssd_engine=ssd_engine,
                ssd_seal_interval_ms=round(1000 * ssd_seal_s) if ssd_mib else None,
                guard="on" if guard else None,
                guard_timeout_ms=round(1000 * guard_timeout_s) if guard else None,
                schema=_schema(path),
                node=node,
                state=without_password("state", state, directory),
                control=control,
                peer_address=peer,
                group=group if state else None,
                plan_file=directory / "plan.bin" if state else None,
                token_file=token_file,
                tls_folder=tls if state else None,
                plaintext=plaintext and state is not None,
                peer_listen=peer_listen if state else None,
                health_listen=health_listen if state else None,
                peer_timeout_ms=peer_timeout_ms if state else None,
                join_step_bytes=join_step_mib * _MIB if state and join_step_mib else None,
                join_rest=join_rest if state else None,
                max_degraded_share=max_degraded_share if state else None,
                hot_rows_bytes=hot_rows_mib * _MIB if state else None,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        options = schema_switch.placed(options)
        # One of its own: Triton may load all that it finds there.
        repository = directory / "models" / name
        triton.write_model(repository, name, options)
        explicit = admin_key_file is not None or not (snapshot or state)
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
            plaintext=plaintext,
            caller_calls=caller_calls,
            caller_bytes=caller_mib * _MIB if caller_mib else None,
        )
        say(f"starting {node} over {place}", err=True)
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
        switch = None if snapshot else schema_switch.SchemaSwitch(server, name, options, tell)
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
