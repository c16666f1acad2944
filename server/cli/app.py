"""`embertide`: the one command. Every subcommand is a module beside this one, or the trainer's."""

import importlib.metadata
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from embertide.server.adapters.process import interrupt_on_signals
from embertide.server.cli import (
    context,
    control,
    doctor,
    drift,
    explain,
    hot,
    node,
    plan,
    reshard,
    serve,
    snapshot,
    status,
)
from embertide.server.cli.chaos import command as chaos
from embertide.server.cli.connection_options import add_connection_options
from embertide.server.cli.context import apply_context
from embertide.server.cli.demo import command as demo
from embertide.server.cli.flags import show_flags
from embertide.server.cli.processes import MIRROR, TRAINER
from embertide.server.cli.refusals import refusals

# What --help shows together.
_LEARN, _SERVE, _OPERATE = "Learn", "Serve", "Operate a fleet"
_INSPECT, _TRY = "Look inside", "Try out"

app = typer.Typer(
    name="embertide",
    help="Train embedding models continuously and serve them while they change.\n\n"
    "Start with `embertide doctor`, then `embertide demo`; with a file of yours, `embertide init`.",
    epilog="Exit status: 0 done; 1 failed or refused; 2 wrong options or configuration, where "
    "trying again cannot help; 130 ended by Ctrl-C. docs/cli.md has more.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"embertide {importlib.metadata.version('embertide')}")
        raise typer.Exit


@app.callback()
def _common(
    called: typer.Context,
    name: Annotated[
        str | None,
        typer.Option(
            "--context",
            envvar="EMBERTIDE_CONTEXT",
            metavar="NAME",
            help="Whose control plane to ask, by a name of `embertide context`; without it, the "
            "one in use.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    if called.invoked_subcommand in _OF_A_CONTEXT:
        source = called.get_parameter_source("name")
        with refusals():
            apply_context(name, first=source is not None and source.name == "COMMANDLINE")


def _forward(name: str, text: str, panel: str, command: Sequence[str] = ()) -> None:
    """Add a command that the trainer's process takes over, options, help and all."""
    words = command or (*TRAINER, name)

    def forward(context: typer.Context) -> None:
        os.execv(words[0], [*words, *context.args])

    forward.__doc__ = text
    settings = {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],  # --help too is the trainer's to answer
    }
    app.command(name, context_settings=settings, rich_help_panel=panel)(forward)


_forward("init", "Guess a file's columns, and write the run that learns from it.", _LEARN)
_forward("train", "Train on a stream of events and publish as the model learns.", _LEARN)
_forward("send-events", "Add a file's events to a Redis Stream, for a trainer to read.", _LEARN)
_forward("prune-search", "Find the fewest bytes whose loss of AUC is within a bound.", _LEARN)
_forward("transform-search", "Find transforms of dense features that lower the log loss.", _LEARN)
_forward("import", "Turn an existing model into a snapshot.", _LEARN)
_forward("export-dense", "Compile any nn.Module for serving.", _LEARN)
_forward("eval", "Score a file by a published version, and print how good the scores are.", _LEARN)
_forward("compare", "Compare two published versions on the same events.", _LEARN)
_forward("backtest", "Learn to the end of each day, score the next.", _LEARN)

app.command("serve", rich_help_panel=_SERVE)(serve.command)
_forward("mirror", "Keep a copy of object storage in a folder that nodes read.", _SERVE, MIRROR)
_forward("guard", "Judge versions by labelled events before ordinary requests see them.", _SERVE)
_forward("rollback", "Restore the state of an older version, as a new version.", _SERVE)
_forward("cache-sim", "Simulate the policies of a tier on a trace of keys.", _SERVE)
_forward("capacity", "Plan tier sizes for a latency goal from a trace of keys.", _SERVE)

app.command("control", rich_help_panel=_OPERATE)(control.command)
app.command("status", rich_help_panel=_OPERATE)(status.command)
app.add_typer(node.app, name="node", rich_help_panel=_OPERATE)
app.add_typer(plan.app, name="plan", rich_help_panel=_OPERATE)
app.add_typer(reshard.app, name="reshard", rich_help_panel=_OPERATE)
app.add_typer(drift.app, name="drift", rich_help_panel=_OPERATE)
app.command("hot", rich_help_panel=_OPERATE)(hot.command)
app.add_typer(context.app, name="context", rich_help_panel=_OPERATE)

app.add_typer(snapshot.app, name="snapshot", rich_help_panel=_INSPECT)
# A key may be negative.
app.command("explain", context_settings={"ignore_unknown_options": True}, rich_help_panel=_INSPECT)(
    explain.command
)
app.command("doctor", rich_help_panel=_INSPECT)(doctor.command)

app.command("demo", rich_help_panel=_TRY)(demo.command)
app.command("chaos", rich_help_panel=_TRY)(chaos.command)

# Those that ask a control plane; servers and trainers have settings of their own.
_OF_A_CONTEXT = {"status", "node", "plan", "reshard", "drift", "hot", "explain"}

add_connection_options(app)
show_flags(app)


def main() -> None:
    """Run the command."""
    interrupt_on_signals()
    app(prog_name="embertide")
