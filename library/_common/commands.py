"""Commands of typer: loaded when they are called, and flags without a type in help.

A command loads what it needs and no more, so a machine needs the packages of the commands that it
runs: one of `embertide[train]` has no Triton.
"""

import dataclasses
import functools
import importlib
import inspect
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption

from embertide._common.addresses import split_address
from embertide._common.errors import OperatingError
from embertide._common.quoting import check_name
from embertide._common.reporting import (
    COMMAND,
    CONFIGURATION,
    fail,
    missing_package,
    system_error,
)


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _bare(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        told = COMMAND.set(ctx.command_path.replace("embertide.trainer", "embertide"))
        try:
            return super().invoke(ctx)
        finally:
            COMMAND.reset(told)


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _bare(super().get_params(ctx))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command before it is loaded.

    Attributes:
        module: The module that defines the command as `app` or else as `command`.
        text: Its line in the list of commands; its own help says more.
        panel: Under which it stands there; None: under none.
        settings: Settings of click's context.
    """

    module: str
    text: str = ""
    panel: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class _Stub(TyperCommand):
    """Stands in the list of commands; `load` returns the command itself."""

    load: Callable[[], Any]


def loaded(command: Any) -> Any:
    """Return a command itself, loaded if it is not yet."""
    return command.load() if isinstance(command, _Stub) else command


class _LazyGroup(_Group):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, loaded(command), rest


def lazy_app(app: typer.Typer) -> None:
    """Make an app one whose commands `add_lazy` may add."""
    app.info.cls = _LazyGroup


def add_lazy(
    app: typer.Typer,
    name: str,
    command: Command,
    prepare: Callable[[typer.Typer], None] = lambda loaded: None,
) -> None:
    """Add a command that is loaded when it is called.

    Where a package is missing, the command ends with the extra that brings it.

    Args:
        app: One that `lazy_app` was told of.
        name: The command's name.
        command: Where it is.
        prepare: Told of an app that has the command alone, once it is loaded.
    """

    def load() -> Any:
        try:
            module = importlib.import_module(command.module)
        except ModuleNotFoundError as error:
            message = missing_package(f"embertide {name}", error)
            raise fail(message, CONFIGURATION) from error
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        if hasattr(module, "app"):
            alone.add_typer(module.app, name=name)
        else:
            alone.command(name, context_settings=dict(command.settings))(module.command)
        prepare(alone)
        show_flags(alone)
        return typer.main.get_group(alone).commands[name]

    stub = type("_Stub", (_Stub,), {"load": staticmethod(load)})
    app.command(name, cls=stub, help=command.text, rich_help_panel=command.panel)(lambda: None)


def show_flags(app: typer.Typer) -> None:
    """Have the flags of all commands of an app be shown without a type."""
    if not (isinstance(app.info.cls, type) and issubclass(app.info.cls, _Group)):
        app.info.cls = _Group
    for command in app.registered_commands:
        if command.cls is None or not issubclass(command.cls, _Stub):
            command.cls = _Command
    for group in app.registered_groups:
        group.cls = _Group
        if group.typer_instance is not None:
            show_flags(group.typer_instance)


def address(value: str | None) -> str | None:
    """Return the value of an option that is HOST:PORT, or several with commas between.

    Raises:
        BadParameter: It is not; nothing has been started yet.
    """
    for each in (value or "").split(",") if value else ():
        if each.startswith(("unix:", "unix-abstract:")):
            continue
        try:
            split_address(each)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return value


def addresses(values: list[str] | None) -> list[str] | None:
    """Return the values of an option that is given several times, each HOST:PORT.

    Raises:
        BadParameter: One is not.
    """
    for each in values or ():
        one_address(each)
    return values


def a_name(value: str | None) -> str | None:
    """Return the value of an option that names a node or a model.

    Raises:
        BadParameter: It has a letter that keys, labels and file names cannot have.
    """
    try:
        return value if value is None else check_name("name", value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def one_address(value: str | None) -> str | None:
    """Return the value of an option that is one HOST:PORT, where something listens.

    Raises:
        BadParameter: It is not.
    """
    if value is not None and "," in value:
        raise typer.BadParameter(f"{value!r} are several; give one HOST:PORT")
    return address(value)


def bare_host(value: str) -> str:
    """Return a host to listen on, an IPv6 one without brackets.

    Raises:
        BadParameter: It has a port.
    """
    host = value.removeprefix("[").removesuffix("]")
    if not host or (":" in host and not _is_ipv6(host)):
        raise typer.BadParameter(
            f"{value!r} is no host; give an address alone, as 127.0.0.1 or ::1, and its port apart"
        )
    return host


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _bare(params: list[Any]) -> list[Any]:
    for each in params:
        if isinstance(each, TyperOption) and each.is_flag and each.metavar is None:
            each.metavar = ""
    return params


def read_secret(option: str, path: Path, refusal: type[OperatingError]) -> str:
    """Return the token or key that a file holds, alone; `option` named the file.

    Raises:
        OperatingError: A `refusal`: it cannot be read.
    """
    try:
        return path.read_text().strip()
    except OSError as error:
        raise refusal(f"{option} {system_error(error)}") from error
    except UnicodeDecodeError as error:
        raise refusal(f"{option} {path} is no text; give another file") from error


def with_options(
    command: Callable[..., None], collected: str, added: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Give a command more options than its signature names; it gets their values by name.

    Args:
        command: The command.
        collected: Its parameter that gets them, a dict.
        added: The options, behind those that it has.
    """
    signature = inspect.signature(command)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {each.name: given.pop(each.name) for each in added}
        command(**{collected: values}, **given)

    own = [each for name, each in signature.parameters.items() if name != collected]
    run.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
    return run
