"""The trainer's commands, one module each; every module's `command` is a typer function.

What they share: an error is one line on stderr and exit status 1; with --json stdout is one JSON
object, `{"error": ...}` where it failed.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping

import typer

from embertide._store import StoreError
from embertide.trainer.errors import TrainerError


@contextlib.contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """Turn what the trainer raises on purpose into a message and exit status 1."""
    try:
        yield
    except (TrainerError, StoreError) as error:
        if as_json:
            print_json({"error": str(error)})
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object to stdout."""
    typer.echo(json.dumps(value, indent=1))
