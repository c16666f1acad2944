"""The trainer's commands, one module each; every module's `command` is a typer function.

What they share: an error is one line on stderr and exit status 1, or 2 where running the same
command again cannot help (usage, input that is not there or not what it should be); with --json
stdout is one JSON object, `{"error": ...}` where it failed.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping

import rich.console
import rich.progress
import typer

from embertide._store import StoreError
from embertide.trainer.errors import ConfigurationError, TrainerError

_FAILED, _CONFIGURATION = 1, 2


@contextlib.contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """Turn what the trainer raises on purpose into a message and an exit status."""
    try:
        yield
    except (TrainerError, StoreError) as error:
        if as_json:
            print_json({"error": str(error)})
        typer.echo(f"error: {error}", err=True)
        status = _CONFIGURATION if isinstance(error, ConfigurationError) else _FAILED
        raise typer.Exit(status) from error


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object to stdout."""
    typer.echo(json.dumps(value, indent=1))


def progress_bar(*columns: rich.progress.ProgressColumn) -> rich.progress.Progress:
    """Return a bar on stderr, for people alone."""
    return rich.progress.Progress(
        *columns, console=rich.console.Console(stderr=True), disable=not sys.stderr.isatty()
    )


def event_bar(verb: str) -> rich.progress.Progress:
    """Return the bar of a command that goes through events; its task has a field `state`."""
    return progress_bar(
        rich.progress.TextColumn(verb),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[state]}"),
        rich.progress.TimeRemainingColumn(),
    )


def trial_bar(what: str) -> rich.progress.Progress:
    """Return the bar of a command that counts trials; `what`: shown before it."""
    return progress_bar(
        rich.progress.TextColumn(what),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
    )
