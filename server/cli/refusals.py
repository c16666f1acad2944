"""What the commands share: an error is one message on stderr and exit status 1."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from embertide._store import StoreError
from embertide.server.adapters.process import ProcessError
from embertide.server.adapters.triton import find_backends, find_programs

Backends = Annotated[
    Path,
    typer.Option(
        envvar="EMBERTIDE_BACKENDS",
        help="The folder that holds embertide/libtriton_embertide.so.",
        show_default="the installed package's, or build/cpp/backends of the checkout",
    ),
]
DEFAULT_BACKENDS = find_backends()
DEFAULT_CACHE = find_programs()
HealthListen = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of the health service alone, in plain text: for Kubernetes' probes, which "
        "have no certificate."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextlib.contextmanager
def refusals(as_json: bool = False) -> Iterator[None]:
    """Turn what is raised on purpose into a message and exit status 1, Ctrl-C into 130."""
    try:
        yield
    except (ProcessError, StoreError) as error:
        if as_json:
            print_json({"error": str(error)})
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        # Whatever was started has been stopped on the way here.
        typer.echo("stopped; nothing is left running", err=True)
        raise typer.Exit(130) from None


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout."""
    typer.echo(json.dumps(value, indent=1))


def read_secret(option: str, path: Path) -> str:
    """Return the token or key that a file holds, alone; `option` named the file.

    Raises:
        ProcessError: It cannot be read.
    """
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ProcessError(f"{option} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProcessError(f"{option} {path} is no text") from error
