"""`control`: the control plane of a fleet, until Ctrl-C or until another one takes over."""

import contextlib
import importlib
from pathlib import Path
from typing import Annotated

import typer

from embertide._common.commands import one_address
from embertide._common.private import own_folder
from embertide._common.quoting import without_secrets
from embertide._common.redis_url import check_url
from embertide._common.reporting import report_errors
from embertide._common.terminal import log_to_stderr, say
from embertide.server.adapters.kept_redis import KeptRedis
from embertide.server.adapters.limits import check_limits
from embertide.server.adapters.process import ProcessError, UsageError
from embertide.server.adapters.redis import own_state
from embertide.server.adapters.state import RedisState
from embertide.server.cli.common_options import HealthListen, read_secret
from embertide.server.core.control import ControlOptions
from embertide.server.core.demand import Clock
from embertide.server.core.drift.options import DriftOptions, FreezeWindow, ModeName
from embertide.server.core.errors import RefusedError
from embertide.server.services.control_server import ControlServer, ServerOptions
from embertide.server.services.heap import collect_seldom
from embertide.server.services.listening import ListenError, listening_tls
from embertide.server.services.planning import LIMIT_S
from embertide.server.services.standby import Standby
from embertide.server.services.tokens import Tokens, TokensError

DEFAULTS = DriftOptions()


def _check_url(option: str, url: str) -> str:
    try:
        check_url(url)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error
    return url


def command(
    state: Annotated[
        str | None,
        typer.Option(help="Redis URL of the state store; without it one is started here."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="The model whose fleet it is; give it again for each further model.",
            show_default="news",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(callback=one_address, help="HOST:PORT to listen on.")
    ] = "127.0.0.1:7070",
    expect_nodes: Annotated[
        int, typer.Option(help="Nodes that must have registered before the first plan.", min=1)
    ] = 1,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="File of ROLE[@MODEL][/NAME]:TOKEN lines (reader, operator, node), read again "
            "when it changes; without it and --tls, open to all."
        ),
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(
            envvar="EMBERTIDE_TLS",
            help="Folder of tls.crt, tls.key and ca.crt, read again when they change: gRPC is TLS, "
            "and callers show a certificate (docs/security.md).",
        ),
    ] = None,
    plaintext: Annotated[
        bool,
        typer.Option(
            "--plaintext",
            envvar="EMBERTIDE_PLAINTEXT",
            help="Listen without TLS where other machines can reach it: who listens on the network "
            "reads tokens.",
        ),
    ] = False,
    example_tokens: Annotated[
        bool,
        typer.Option(
            "--example-tokens",
            help="Accept tokens of the repository's examples, which everybody can read.",
        ),
    ] = False,
    health_listen: HealthListen = None,
    bus: Annotated[
        str | None,
        typer.Option(help="Redis URL that versions come by: `status` then says what is committed."),
    ] = None,
    node_token_file: Annotated[
        Path | None, typer.Option(help="File that holds the token that nodes ask for.")
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(
            help="File of audit lines; /dev/stdout is the command's own output.",
            show_default="audit.jsonl in --directory",
        ),
    ] = None,
    heartbeat_ms: Annotated[int, typer.Option(help="From one beat to the next.", min=10)] = 200,
    longest_deadline_ms: Annotated[
        int, typer.Option(help="How long a source holds on after it has left.", min=0)
    ] = 2000,
    clock: Annotated[
        Clock,
        typer.Option(help="The clock for counting reads; event: the stream's time, for replays."),
    ] = "wall",
    planner_limit_s: Annotated[
        float, typer.Option(help="How long a planner may take, at most 25 s.", min=0.1, max=25)
    ] = LIMIT_S,
    mode: Annotated[
        ModeName,
        typer.Option(
            help="Whether it follows drift by itself: auto acts, advise only records what it would "
            "do. `embertide drift mode` changes it later."
        ),
    ] = DEFAULTS.mode,
    drift_planner: Annotated[
        str, typer.Option(help="Planner that is asked when a detector fires.")
    ] = DEFAULTS.planner,
    drift_interval_s: Annotated[
        float, typer.Option(help="From one look at the drift to the next.", min=0.5)
    ] = DEFAULTS.interval_s,
    drift_half_life_s: Annotated[
        int, typer.Option(help="Reads count half after this long: 60, 600, 3600 or 86400.")
    ] = DEFAULTS.half_life_s,
    drift_horizon_s: Annotated[
        float, typer.Option(help="A move must pay for itself within this time.", min=1)
    ] = DEFAULTS.horizon_s,
    drift_cooldown_s: Annotated[
        float, typer.Option(help="From one move to the next, at least.", min=0)
    ] = DEFAULTS.cooldown_s,
    drift_min_gain: Annotated[
        float, typer.Option(help="Share of the cost that a plan must save.", min=0, max=0.99)
    ] = DEFAULTS.min_gain,
    drift_probe_share: Annotated[
        float,
        typer.Option(
            help="Share of a plan's buckets that moves until a gain was measured; 0: all.",
            min=0,
            max=0.99,
        ),
    ] = DEFAULTS.probe_share,
    drift_bytes_per_s: Annotated[
        int, typer.Option(help="Bandwidth of its moves; 0: no bound.", min=0)
    ] = DEFAULTS.bytes_per_s,
    drift_bytes_per_day: Annotated[
        int, typer.Option(help="Bytes that it may move in 24 hours; 0: no bound.", min=0)
    ] = DEFAULTS.bytes_per_day,
    drift_operations_per_day: Annotated[
        int, typer.Option(help="Operations that it may start in 24 hours.", min=1)
    ] = DEFAULTS.operations_per_day,
    drift_p99_ms: Annotated[
        float, typer.Option(help="Its moves wait while a node's p99 is above; 0: no bound.", min=0)
    ] = 0,
    freeze: Annotated[
        list[str] | None,
        typer.Option(help="Time of each day, in UTC, in which it begins nothing: 22:00-06:00."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Port of /metrics for Prometheus; without it there is none."),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address of this machine that /metrics listens on, without TLS.")
    ] = "127.0.0.1",
    spans: Annotated[
        bool,
        typer.Option(
            "--spans",
            help="Make each call a span of OpenTelemetry (docs/control.md, Traces); needs the "
            "extra otel.",
        ),
    ] = False,
    standby: Annotated[
        bool, typer.Option(help="Wait until no other one leads; without it, take over at once.")
    ] = False,
    advertise: Annotated[
        str,
        typer.Option(
            callback=one_address,
            help="HOST:PORT that others are told.",
            show_default="where it listens",
        ),
    ] = "",
    directory: Annotated[
        Path, typer.Option(help="Folder of the audit log and of a state store of our own.")
    ] = Path("build/control"),
) -> None:
    """Run the control plane: who is in the fleet, which plan holds, which operations run.

    It is not on the serving path: nodes go on without it, and one that starts again carries on.

    Example: embertide control --state redis://127.0.0.1:6380/0 --model news --expect-nodes 2
    """
    log_to_stderr(times=True)
    collect_seldom()
    importlib.import_module("scipy.optimize")  # a second that no beat shall wait for
    models = list(dict.fromkeys(model or ["news"]))
    with report_errors(), contextlib.ExitStack() as stack:
        check_limits()
        if not state or audit is None:  # else nothing goes there: a container may have no room
            own_folder(directory)
        try:
            options = ServerOptions(
                control=ControlOptions(
                    model=models[0],
                    expect_nodes=expect_nodes,
                    heartbeat_ms=heartbeat_ms,
                    longest_deadline_ms=longest_deadline_ms,
                    clock=clock,
                    drift=DriftOptions(
                        mode=mode,
                        planner=drift_planner,
                        interval_s=drift_interval_s,
                        half_life_s=drift_half_life_s,
                        horizon_s=drift_horizon_s,
                        cooldown_s=drift_cooldown_s,
                        min_gain=drift_min_gain,
                        probe_share=drift_probe_share,
                        bytes_per_s=drift_bytes_per_s,
                        bytes_per_day=drift_bytes_per_day,
                        operations_per_day=drift_operations_per_day,
                        p99_us=round(drift_p99_ms * 1000),
                        freeze=tuple(map(FreezeWindow.parse, freeze or ())),
                    ),
                ),
                listen=listen,
                tokens=Tokens(tokens, examples=example_tokens) if tokens else None,
                tls=listening_tls(listen, tls, plaintext=plaintext),
                health_listen=health_listen,
                audit=audit or directory / "audit.jsonl",
                node_token_file=node_token_file,
                bus=_check_url("--bus", bus) if bus else None,
                planner_limit_s=planner_limit_s,
                advertise=advertise,
                metrics=(metrics_host, metrics_port) if metrics_port is not None else None,
                spans=spans,
            )
            kept = None if state else stack.enter_context(KeptRedis(own_state(directory)))
            url = kept.url if kept is not None else _check_url("--state", state or "")
            if node_token_file is not None:
                read_secret("--node-token-file", node_token_file)
                if tokens is None and tls is None:
                    raise UsageError(
                        "--node-token-file without --tokens or --tls: the nodes' token would go to "
                        "whoever registers as a node; give one of them"
                    )
            why_away = kept.why_away if kept is not None else str
            stores = {name: RedisState(url, name, why_away) for name in models}
            for store in stores.values():
                stack.callback(store.close)
            if standby:
                with Standby(
                    listen, stores[models[0]], advertise, options.tls, health_listen
                ) as waiting:
                    say(f"standing by at {waiting.address}; Ctrl-C stops it")
                    waiting.wait()
            server = stack.enter_context(ControlServer(options, stores.pop(models[0]), stores))
        except (TokensError, ValueError) as error:
            raise UsageError(str(error)) from error
        except (RefusedError, ListenError) as error:
            raise ProcessError(str(error)) from error
        asked = " and ".join(filter(None, ("certificates" * bool(tls), "tokens" * bool(tokens))))
        # The URL that nodes are given, but for a password.
        shown = without_secrets(url).partition("?")[0]
        say(
            f"control plane of model {', '.join(map(repr, models))} at {server.address}, "
            f"state at {shown}, "
            f"{f'{asked} asked for' if asked else 'open to everybody'}; Ctrl-C stops it"
        )
        server.wait()
        raise ProcessError(
            f"{server.driver.why_superseded}; this one has written nothing since: see who leads by "
            "`embertide status`"
        )
