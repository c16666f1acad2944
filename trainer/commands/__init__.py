"""The trainer's commands, one module each; every module's `command` is a typer function.

An error is one message on stderr and exit status 1, or 2 where running the same command again
cannot help (usage, input that is not there or not what it should be); with --json stdout is one
JSON object, `{"error": ...}` where it failed (embertide._common.reporting).
"""

import rich.progress

from embertide._common.terminal import ProgressText, progress_bar


def event_bar(verb: str) -> rich.progress.Progress:
    """Return the bar of a command that goes through events; its task has a field `state`."""
    return progress_bar(
        ProgressText(verb),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        ProgressText("{task.fields[state]}"),
        rich.progress.TimeRemainingColumn(),
    )


def trial_bar(what: str) -> rich.progress.Progress:
    """Return the bar of a command that counts trials; `what`: shown before it."""
    return progress_bar(
        ProgressText(what),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
    )
