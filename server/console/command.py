"""`console`: pages of a fleet for a browser, until Ctrl-C."""

import contextlib
import logging
from pathlib import Path
from typing import Annotated

import typer

from embertide._common.addresses import is_this_machine, split_address
from embertide._common.commands import one_address
from embertide._common.reporting import report_errors
from embertide._common.terminal import log_to_stderr, say
from embertide.server.adapters.process import ProcessError, UsageError
from embertide.server.cli.control_client import (
    CONNECTION,
    DEFAULT_CONTROL,
    Caller,
    Connection,
    Control,
    tls_towards,
)
from embertide.server.console.app import Console, ConsoleOptions
from embertide.server.console.server import ConsoleServer, HttpsFolder, check_listen
from embertide.server.services.listening import ListenError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def hosts_of(listen: str, names: list[str]) -> frozenset[str]:
    """Return the names by which browsers may reach the console.

    Raises:
        UsageError: It listens at every address of the machine, and none of its names is given.
    """
    host = split_address(listen)[0].lower()
    if host in ("0.0.0.0", "::"):
        if not names:
            raise UsageError(
                f"--listen {listen} is every address of this machine: give --host NAME for each "
                "name that browsers will use"
            )
        return frozenset((*_LOOPBACK, *map(str.lower, names)))
    return frozenset((*(_LOOPBACK if is_this_machine(host) else (host,)), *map(str.lower, names)))


def command(
    control: Control = DEFAULT_CONTROL,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="EMBERTIDE_MODEL", help="The model, if the control plane has several of them."
        ),
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(
            envvar="EMBERTIDE_TLS",
            help="Folder of tls.crt, tls.key and ca.crt that the control plane is asked with; the "
            "certificate must have no role there.",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(callback=one_address, help="HOST:PORT that browsers open.")
    ] = "127.0.0.1:7080",
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that browsers use for the console, beside that of --listen; give it again "
            "for each further one."
        ),
    ] = None,
    https: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the tls.crt and tls.key that browsers see, read again when they change."
        ),
    ] = None,
    plaintext: Annotated[
        bool,
        typer.Option(
            "--plaintext",
            envvar="EMBERTIDE_PLAINTEXT",
            help="Speak without TLS to browsers and to a control plane on other machines: who "
            "listens on the network reads tokens.",
        ),
    ] = False,
) -> None:
    """Serve pages of a fleet: health, freshness, timeline, nodes, operations, load, drift.

    Visitors log in with a token of the control plane, and may do there what its role allows.

    Example: embertide console --control 127.0.0.1:7070
    """
    log_to_stderr(times=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with report_errors(), contextlib.ExitStack() as stack:
        connection = CONNECTION.set(Connection(model=model, tls=tls, plaintext=plaintext))
        stack.callback(CONNECTION.reset, connection)
        try:
            check_listen(listen, https, plaintext=plaintext)
            towards = tls_towards(control, shows_token=True)

            def dial(token: str | None) -> Caller:
                return Caller(control, token, model, towards)

            certificate = HttpsFolder(https) if https is not None else None
            console = Console(
                ConsoleOptions(
                    control=control,
                    dial=dial,
                    hosts=hosts_of(listen, host or []),
                    https=certificate is not None,
                )
            )
            stack.callback(console.close)
            server = stack.enter_context(ConsoleServer(console.app, listen, certificate))
        except ListenError as error:
            raise ProcessError(str(error)) from error
        scheme = "https" if certificate is not None else "http"
        say(f"console of {control} at {scheme}://{server.address}; Ctrl-C stops it")
        server.wait()
        raise ProcessError("the console has ended: see what it logged above and start it again")
