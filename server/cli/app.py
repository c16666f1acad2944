"""`embertide`: the one command. Every subcommand is a module beside this one, or the trainer's."""

import os
from collections.abc import Sequence

import typer

from embertide.server.adapters.process import interrupt_on_signals
from embertide.server.cli import (
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
from embertide.server.cli.demo import command as demo
from embertide.server.cli.processes import MIRROR, TRAINER

app = typer.Typer(
    name="embertide",
    help="Train embedding models continuously and serve them while they change. Start with "
    "`embertide doctor`, then `embertide demo`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _forward(name: str, text: str, command: Sequence[str] = ()) -> None:
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
    app.command(name, context_settings=settings)(forward)


_forward("init", "Guess what a file's columns are, and write a run's file that learns from it.")
_forward("train", "Train on a stream of events and publish as the model learns.")
_forward("send-events", "Add the events of a file to a Redis Stream, for a trainer to read.")
_forward("guard", "Judge versions by labelled events before ordinary requests see them.")
_forward(
    "mirror", "Keep a publication in object storage in a folder that nodes read.", command=MIRROR
)
_forward("rollback", "Restore the state of an older version, as a new version.")
app.command("serve")(serve.command)
app.command("status")(status.command)
app.command("control")(control.command)
app.add_typer(node.app, name="node")
app.add_typer(plan.app, name="plan")
# A key may be negative.
app.command("explain", context_settings={"ignore_unknown_options": True})(explain.command)
app.command("hot")(hot.command)
app.add_typer(reshard.app, name="reshard")
app.add_typer(drift.app, name="drift")
app.add_typer(snapshot.app, name="snapshot")
_forward("import", "Turn an existing model into a snapshot.")
_forward("export-dense", "Compile any nn.Module for serving.")
_forward("prune-search", "Find the fewest bytes whose loss of AUC is within a bound.")
_forward("cache-sim", "Simulate the policies of a tier on a trace of keys.")
_forward("eval", "Score a file by a published version, and print how good the scores are.")
_forward("compare", "Compare two published versions on the same events.")
_forward("backtest", "Learn to the end of each day, score the next.")
_forward("capacity", "Plan tier sizes for a latency goal from a trace of keys.")
app.command("doctor")(doctor.command)
app.command("demo")(demo.command)
app.command("chaos")(chaos.command)

add_connection_options(app)


def main() -> None:
    """Run the command."""
    interrupt_on_signals()
    app(prog_name="embertide")
