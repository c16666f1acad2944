"""`--model`, `--tls` and `--plaintext` of every command that talks to a control plane.

The options are added to commands in one place: they hand nothing on, and `calling` asks for them.
"""

import functools
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from embertide.server.cli.context import not_for
from embertide.server.cli.control_client import CONNECTION, Connection, TokenFile

_Model = Annotated[
    str | None,
    typer.Option(
        envvar="EMBERTIDE_MODEL", help="The model, if the control plane has several of them."
    ),
]
_Tls = Annotated[
    Path | None,
    typer.Option(envvar="EMBERTIDE_TLS", help="Folder of your tls.crt, tls.key and ca.crt."),
]
_Plaintext = Annotated[
    bool,
    typer.Option(
        "--plaintext",
        envvar="EMBERTIDE_PLAINTEXT",
        help="Speak without TLS to another machine: who listens on the network reads your token.",
    ),
]
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": (_Model, None),
    "tls": (_Tls, None),
    "plaintext": (_Plaintext, False),
}


def _own(called: typer.Context, options: dict[str, Any], theirs: Collection[str]) -> dict[str, Any]:
    """Return options by name, None where a context put the value into the environment."""

    def own(name: str) -> bool:
        source = called.get_parameter_source(name)
        said = source is not None and source.name == "ENVIRONMENT"
        return not said or f"EMBERTIDE_{name.upper()}" not in theirs

    return {name: value if own(name) else None for name, value in options.items()}


def add_connection_options(app: typer.Typer) -> None:
    """Add the options to all commands of an app that show a control plane a token."""
    for command in app.registered_commands:
        command.callback = _with_options(command.callback)
    if app.registered_callback is not None:
        app.registered_callback.callback = _with_options(app.registered_callback.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_connection_options(group.typer_instance)


def _with_options(command: Callable[..., Any] | None) -> Callable[..., Any] | None:
    if command is None:
        return None
    signature = inspect.signature(command)
    takes = signature.parameters
    if "model" in takes or "token_file" not in takes or takes["token_file"].annotation != TokenFile:
        return command
    context = inspect.Parameter(
        "called_as", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
    )
    asks = next((name for name, each in takes.items() if each.annotation is typer.Context), "")

    @functools.wraps(command)
    def run(
        *arguments: Any,
        model: str | None = None,
        tls: Path | None = None,
        plaintext: bool = False,
        **options: Any,
    ) -> Any:
        called: typer.Context = options[asks] if asks else options.pop(context.name)
        theirs = not_for(options.get("control"))
        if theirs:
            # A context's settings are for its control plane alone: another one gets none of them.
            given: dict[str, Any] = {"model": model, "tls": tls, "plaintext": plaintext}
            given = _own(called, {**given, "token_file": options["token_file"]}, theirs)
            model, tls, plaintext = given["model"], given["tls"], bool(given["plaintext"])
            options["token_file"] = given["token_file"]
        before = CONNECTION.get()
        token = CONNECTION.set(
            Connection(
                model=model or before.model,
                tls=tls or before.tls,
                plaintext=plaintext or before.plaintext,
            )
        )
        try:
            return command(*arguments, **options)
        finally:
            CONNECTION.reset(token)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in _OPTIONS.items()
    ]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*takes.values(), *added, *([] if asks else [context])]
    )
    run.__annotations__ = {
        **command.__annotations__,
        **{name: kind for name, (kind, _) in _OPTIONS.items()},
        **({} if asks else {context.name: typer.Context}),
    }
    return run
