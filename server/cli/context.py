"""`context`: control planes by name, so that commands need no --control, --tls and --token-file.

Names are kept in contexts.json in the user's folder of settings (~/.config/embertide on Linux),
readable by the user alone. It has the path of a token's file and never a token. An option of a
command, or its variable in the environment, goes before what a context says.
"""

import contextvars
import dataclasses
import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from embertide._common.addresses import is_local_target, split_address
from embertide._common.quoting import check_name, shown
from embertide._common.reporting import report_errors, system_error
from embertide._common.terminal import Table, print_json, say, show_table
from embertide.server.adapters.process import ProcessError, UsageError
from embertide.server.cli.common_options import Json

app = typer.Typer(
    help="Control planes by name: `add` one, `use` it, and commands ask it.", no_args_is_help=True
)
_FOLDER = "EMBERTIDE_CONFIG"  # another folder of settings, as tests have
_MOST = 256
_CONTROL = "EMBERTIDE_CONTROL"
_applied: dict[str, str] = {}  # what the environment of this process has of a context


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The settings by which commands reach a control plane.

    Attributes:
        control: host:port, several with commas between.
        tls: Folder of certificates; empty: none.
        token_file: File that holds the token; empty: none.
        model: Where the control plane has several; empty: not said.
        plaintext: Whether to speak without TLS to another machine.
    """

    control: str
    tls: str = ""
    token_file: str = ""
    model: str = ""
    plaintext: bool = False

    def __post_init__(self) -> None:
        """Refuse values of another kind, as a file that was edited may have."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value).__name__ != field.type.__name__:  # type: ignore[union-attr]
                raise TypeError(f"{field.name} is {shown(value)}")

    def variables(self) -> dict[str, str]:
        """Return what commands read from the environment where no option is given."""
        said = {
            "EMBERTIDE_CONTROL": self.control,
            "EMBERTIDE_TLS": self.tls,
            "EMBERTIDE_TOKEN_FILE": self.token_file,
            "EMBERTIDE_MODEL": self.model,
            "EMBERTIDE_PLAINTEXT": "1" if self.plaintext else "",
        }
        return {name: value for name, value in said.items() if value}


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """All contexts, and the one in use; empty: none is. Those that are not right stay apart."""

    used: str
    contexts: dict[str, Context]
    wrong: dict[str, Any] = dataclasses.field(default_factory=dict)

    def named(self, name: str) -> Context:
        if name in self.wrong:
            raise UsageError(
                f"context {name!r} in {_path()} is not right: give it again with `embertide "
                f"context add {shlex.quote(name)} --control HOST:PORT`, or `embertide context "
                f"remove {shlex.quote(name)}`"
            )
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts)) or "none"
            raise UsageError(
                f"there is no context {name!r}; there is {known}; `embertide context add` adds one"
            )
        return self.contexts[name]

    def without(self, name: str) -> dict[str, Any]:
        return {each: value for each, value in self.wrong.items() if each != name}


def _path() -> Path:
    folder = os.environ.get(_FOLDER) or typer.get_app_dir("embertide")
    return Path(folder) / "contexts.json"


def _read() -> _Kept:
    path = _path()
    try:
        said = json.loads(path.read_text())
        kept = _Kept(str(said["used"]), {})
        for name, fields in said["contexts"].items():
            try:
                kept.contexts[check_name("context", name)] = Context(**fields)
            except (TypeError, ValueError):
                kept.wrong[name] = fields
        return kept
    except FileNotFoundError:
        return _Kept("", {})
    except OSError as error:
        raise ProcessError(system_error(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not what `embertide context` wrote ({error}): correct it, or move it away"
        ) from error


def _write(kept: _Kept) -> None:
    path = _path()
    contexts = {name: dataclasses.asdict(each) for name, each in sorted(kept.contexts.items())}
    contexts |= kept.wrong
    text = json.dumps({"used": kept.used, "contexts": contexts}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # mkstemp's files are the user's alone.
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".contexts-")
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        Path(partial).rename(path)
    except OSError as error:
        raise ProcessError(system_error(error)) from error


_fault: contextvars.ContextVar[ProcessError | None] = contextvars.ContextVar("fault", default=None)


def try_context(name: str | None, *, first: bool = False) -> None:
    """Do what `apply_context` does; what it raises, `check_context` raises.

    Commands that end up asking no control plane need no context.
    """
    _fault.set(None)
    try:
        apply_context(name, first=first)
    except ProcessError as error:
        _fault.set(error)


def check_context() -> None:
    """Return if the commands of this process were told what their context says.

    Raises:
        ProcessError: They could not be.
    """
    fault = _fault.get()
    if fault is not None:
        raise fault


def apply_context(name: str | None, *, first: bool = False) -> None:
    """Tell the commands of this process what a context says, where the environment does not.

    It says nothing where the environment names another control plane.

    Args:
        name: The context's name; None: the one in use, if there is one.
        first: Whether it goes before the environment: it was named on the command line.

    Raises:
        ProcessError: There is no such context, or the file is corrupt.
    """
    for variable, value in _applied.items():
        if os.environ.get(variable) == value:
            del os.environ[variable]
    _applied.clear()
    kept = _read()
    if name is None and not kept.used:
        return
    context = kept.named(name or kept.used)
    if not first and _is_another(os.environ.get(_CONTROL), context.control):
        return
    for variable, value in context.variables().items():
        if first or variable not in os.environ:
            os.environ[variable] = _applied[variable] = value


def not_for(control: str | None) -> frozenset[str]:
    """Return the variables whose values are a context's, if a command asks somebody else.

    A token and a certificate go to the control plane that they were added for, and to no other.
    """
    another = _is_another(control, _applied.get(_CONTROL))
    return frozenset(_applied) if another else frozenset()


def _is_another(control: str | None, of_context: str | None) -> bool:
    """Return whether an address is none of a context's."""
    if control is None or of_context is None:
        return False
    return not {*control.split(",")} <= {*of_context.split(",")}


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.expanduser().absolute())


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="The new context's name, as prod.")],
    control: Annotated[
        str, typer.Option(help="HOST:PORT of the control plane; several with commas between.")
    ],
    tls: Annotated[
        Path | None, typer.Option(help="Folder of your tls.crt, tls.key and ca.crt.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds your token, alone.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, if the control plane has several of them.")
    ] = None,
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="Speak without TLS to another machine.")
    ] = False,
    use_it: Annotated[bool, typer.Option("--use", help="Use it from now on.")] = False,
) -> None:
    """Add a context, or change the one of that name; the first one is used at once.

    Example: embertide context add prod --control control.prod:7070 --tls ~/certs --use
    """
    with report_errors():
        kept = _read()
        try:
            check_name("context", name)
            for each in control.split(","):
                if not is_local_target(each):
                    split_address(each, what="--control")
        except ValueError as error:
            raise UsageError(str(error)) from error
        if name not in kept.contexts and len(kept.contexts) >= _MOST:
            raise UsageError(f"there are {_MOST} contexts: remove some")
        added = Context(
            control=control,
            tls=_absolute(tls),
            token_file=_absolute(token_file),
            model=model or "",
            plaintext=plaintext,
        )
        used = name if use_it or not kept.used else kept.used
        _write(_Kept(used, {**kept.contexts, name: added}, kept.without(name)))
        say(f"{name}: {control}" + (", in use" if used == name else ""))


@app.command()
def use(name: Annotated[str, typer.Argument(help="The context's name.")]) -> None:
    """Use a context from now on."""
    with report_errors():
        kept = _read()
        kept.named(name)
        _write(_Kept(name, kept.contexts, kept.wrong))
        say(f"{name} is in use")


@app.command()
def remove(name: Annotated[str, typer.Argument(help="The context's name.")]) -> None:
    """Forget a context; if it was in use, none is."""
    with report_errors():
        kept = _read()
        if name not in kept.wrong:
            kept.named(name)
        left = {each: context for each, context in kept.contexts.items() if each != name}
        _write(_Kept("" if kept.used == name else kept.used, left, kept.without(name)))
        say(f"{name} is forgotten")


@app.command("list")
def list_all(as_json: Json = False) -> None:
    """List all contexts; a star marks the one in use."""
    with report_errors(as_json):
        kept = _read()
        if as_json:
            contexts: dict[str, Any] = {
                name: dataclasses.asdict(each) for name, each in kept.contexts.items()
            }
            print_json({"used": kept.used, "contexts": contexts, "wrong": sorted(kept.wrong)})
            return
        table = Table("", "name", "control", "model", names=("name", "control", "model"))
        for name, each in sorted(kept.contexts.items()):
            star = "*" if name == kept.used else ""
            table.add_row(star, name, each.control, each.model)
        for name in sorted(kept.wrong):
            table.add_row("*" if name == kept.used else "", name, "not right: add it again", "")
        show_table(table)


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="The context; default: in use.")] = None,
) -> None:
    """Show what commands are told, and what the environment says instead."""
    with report_errors():
        kept = _read()
        chosen = name or kept.used
        if not chosen:
            raise UsageError("no context is in use: `embertide context add NAME --control ...`")
        say(f"context {chosen}")
        for variable, value in kept.named(chosen).variables().items():
            stands = os.environ.get(variable)
            instead = f"  (the environment says {stands})" if stands not in (None, value) else ""
            say(f"  {variable:22}{value}{instead}")
