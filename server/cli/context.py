"""`context`: control planes by name, so that commands need no --control, --tls and --token-file.

Names are kept in contexts.json in the user's folder of settings (~/.config/embertide on Linux),
readable by the user alone. It has the path of a token's file and never a token. An option of a
command, or its variable in the environment, goes before what a context says.
"""

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from embertide.server.adapters.process import ProcessError
from embertide.server.cli.refusals import Json, print_json, refusals

app = typer.Typer(
    help="Control planes by name: `add` one, `use` it, and commands ask it.", no_args_is_help=True
)
_FOLDER = "EMBERTIDE_CONFIG"  # another folder of settings, as tests have
_MOST = 256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What commands are told of a control plane.

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
    """All contexts, and the one in use; empty: none is."""

    used: str
    contexts: dict[str, Context]

    def named(self, name: str) -> Context:
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts)) or "none"
            raise ProcessError(f"there is no context {name!r}; there is {known}")
        return self.contexts[name]


def _path() -> Path:
    folder = os.environ.get(_FOLDER) or typer.get_app_dir("embertide")
    return Path(folder) / "contexts.json"


def _read() -> _Kept:
    path = _path()
    try:
        said = json.loads(path.read_text())
        contexts = {name: Context(**fields) for name, fields in said["contexts"].items()}
        return _Kept(str(said["used"]), contexts)
    except FileNotFoundError:
        return _Kept("", {})
    except OSError as error:
        raise ProcessError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProcessError(
            f"{path} is not what `embertide context` wrote ({error}): correct it, or move it away"
        ) from error


def _write(kept: _Kept) -> None:
    path = _path()
    contexts = {name: dataclasses.asdict(each) for name, each in sorted(kept.contexts.items())}
    text = json.dumps({"used": kept.used, "contexts": contexts}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # mkstemp's files are the user's alone.
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".contexts-")
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        Path(partial).rename(path)
    except OSError as error:
        raise ProcessError(f"{path}: {error.strerror}") from error


def apply_context(name: str | None, *, first: bool = False) -> None:
    """Tell the commands of this process what a context says, where the environment does not.

    Args:
        name: Of the context; None: the one in use, if there is one.
        first: Whether it goes before the environment: it was named on the command line.

    Raises:
        ProcessError: There is no such context, or the file is harmed.
    """
    kept = _read()
    if name is None and not kept.used:
        return
    for variable, value in kept.named(name or kept.used).variables().items():
        if first or variable not in os.environ:
            os.environ[variable] = value


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.expanduser().absolute())


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="What to call it, as prod.")],
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
    with refusals():
        kept = _read()
        if not name or not control:
            raise ProcessError("give a name, and the control plane's HOST:PORT with --control")
        if name not in kept.contexts and len(kept.contexts) >= _MOST:
            raise ProcessError(f"there are {_MOST} contexts: remove some")
        added = Context(
            control=control,
            tls=_absolute(tls),
            token_file=_absolute(token_file),
            model=model or "",
            plaintext=plaintext,
        )
        used = name if use_it or not kept.used else kept.used
        _write(_Kept(used, {**kept.contexts, name: added}))
        typer.echo(f"{name}: {control}" + (", in use" if used == name else ""))


@app.command()
def use(name: Annotated[str, typer.Argument(help="Of a context.")]) -> None:
    """Use a context from now on."""
    with refusals():
        kept = _read()
        kept.named(name)
        _write(_Kept(name, kept.contexts))
        typer.echo(f"{name} is in use")


@app.command()
def remove(name: Annotated[str, typer.Argument(help="Of a context.")]) -> None:
    """Forget a context; if it was in use, none is."""
    with refusals():
        kept = _read()
        kept.named(name)
        left = {each: context for each, context in kept.contexts.items() if each != name}
        _write(_Kept("" if kept.used == name else kept.used, left))
        typer.echo(f"{name} is forgotten")


@app.command("list")
def list_all(as_json: Json = False) -> None:
    """List all contexts; a star marks the one in use."""
    with refusals(as_json):
        kept = _read()
        if as_json:
            contexts: dict[str, Any] = {
                name: dataclasses.asdict(each) for name, each in kept.contexts.items()
            }
            print_json({"used": kept.used, "contexts": contexts})
            return
        table = Table(box=None)
        for title in ("", "name", "control", "model"):
            table.add_column(title, overflow="fold")
        for name, each in sorted(kept.contexts.items()):
            star = "*" if name == kept.used else ""
            table.add_row(star, name, each.control, each.model)
        Console().print(table)


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="Of a context; default: in use.")] = None,
) -> None:
    """Show what commands are told, and what the environment says instead."""
    with refusals():
        kept = _read()
        chosen = name or kept.used
        if not chosen:
            raise ProcessError("no context is in use: `embertide context add NAME --control ...`")
        typer.echo(f"context {chosen}")
        for variable, value in kept.named(chosen).variables().items():
            stands = os.environ.get(variable)
            instead = f"  (the environment says {stands})" if stands not in (None, value) else ""
            typer.echo(f"  {variable:22}{value}{instead}")
