"""`--model` of every command that talks to a control plane, which may have several models.

The option is added to commands in one place: they hand nothing on, and `calling` asks for it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from embertide.server.cli.control_plane import MODEL, TokenFile

Model = Annotated[
    str | None,
    typer.Option(
        envvar="EMBERTIDE_MODEL", help="The model, if the control plane has several of them."
    ),
]


def add_model_option(app: typer.Typer) -> None:
    """Add the option to all commands of an app that show a control plane a token."""
    for command in app.registered_commands:
        command.callback = _with_model(command.callback)
    if app.registered_callback is not None:
        app.registered_callback.callback = _with_model(app.registered_callback.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_model_option(group.typer_instance)


def _with_model(command: Callable[..., Any] | None) -> Callable[..., Any] | None:
    if command is None:
        return None
    signature = inspect.signature(command)
    takes = signature.parameters
    if "model" in takes or "token_file" not in takes or takes["token_file"].annotation != TokenFile:
        return command

    @functools.wraps(command)
    def run(*arguments: Any, model: str | None = None, **options: Any) -> Any:
        token = MODEL.set(model or MODEL.get())
        try:
            return command(*arguments, **options)
        finally:
            MODEL.reset(token)

    option = inspect.Parameter(
        "model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Model
    )
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*takes.values(), option]
    )
    run.__annotations__ = {**command.__annotations__, "model": Model}
    return run
