"""`embertide`: the one command. Every subcommand is a module beside this one, or the trainer's."""

import importlib.metadata
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from embertide._common.commands import Command, add_lazy, lazy_app, show_flags
from embertide._common.private import close_umask
from embertide._common.reporting import report_errors
from embertide._common.terminal import say
from embertide.server.adapters.process import interrupt_on_signals
from embertide.server.cli.context import try_context
from embertide.server.cli.processes import MIRROR, TRAINER

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
        say(f"embertide {importlib.metadata.version('embertide')}")
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
            help="The control plane to ask, by its name in `embertide context`; without it, "
            "the one in use.",
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
        with report_errors():
            try_context(name, first=source is not None and source.name == "COMMANDLINE")


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


def _connected(app: typer.Typer) -> None:
    """Add the options of a connection, where one is made."""
    from embertide.server.cli.connection_options import add_connection_options

    add_connection_options(app)


def _ours(name: str, text: str, panel: str, *, module: str | None = None, **settings: bool) -> None:
    """Add a command of this package."""
    command = Command(
        module=f"embertide.server.cli.{module or name}", text=text, panel=panel, settings=settings
    )
    add_lazy(app, name, command, _connected)


lazy_app(app)
_forward("init", "Guess a file's columns, and write the run that learns from it.", _LEARN)
_forward("train", "Train on a stream of events and publish as the model learns.", _LEARN)
_forward("send-events", "Add a file's events to a Redis Stream, for a trainer to read.", _LEARN)
_forward("prune-search", "Find the fewest bytes whose loss of AUC is within a bound.", _LEARN)
_forward("transform-search", "Find transforms of dense features that lower the log loss.", _LEARN)
_forward("step-profile", "Measure what a step costs, for `plan ranks --search`.", _LEARN)
_forward("import", "Turn an existing model into a snapshot.", _LEARN)
_forward("export-dense", "Compile any nn.Module for serving.", _LEARN)
_forward("eval", "Score a file by a published version, and print how good the scores are.", _LEARN)
_forward("compare", "Compare two published versions on the same events.", _LEARN)
_forward("backtest", "Learn to the end of each day, score the next.", _LEARN)

_ours("serve", "Serve a model by Triton until Ctrl-C.", _SERVE)
_forward("mirror", "Keep a copy of object storage in a folder that nodes read.", _SERVE, MIRROR)
_forward("guard", "Judge versions by labelled events before ordinary requests see them.", _SERVE)
_forward("rollback", "Restore the state of an older version, as a new version.", _SERVE)
_forward("cache-sim", "Simulate the policies of a tier on a trace of keys.", _SERVE)
_forward("capacity", "Plan tier sizes for a latency goal from a trace of keys.", _SERVE)

_ours("control", "Run the control plane until Ctrl-C.", _OPERATE)
_ours("status", "Show what a node serves, or how a whole fleet is.", _OPERATE)
_ours("node", "The nodes of a fleet: list, drain, remove, add-group, remove-group.", _OPERATE)
_ours("plan", "Plans: which devices hold which buckets, and why.", _OPERATE)
_ours(
    "reshard",
    "Move buckets between devices while they are served; no request fails for it.",
    _OPERATE,
)
_ours(
    "drift", "Show what the control plane decides about drift; set its mode, freeze it.", _OPERATE
)
_ours("hot", "Show the hottest keys, where reads are answered, and each device's load.", _OPERATE)
_ours("slow", "Show the slowest requests, and where their time went.", _OPERATE)
_ours("sizing", "Say how many nodes, and how much memory and disk, a model needs.", _OPERATE)
_ours("versions", "Show the newest versions: quality, verdicts, rollbacks.", _OPERATE)
_ours("timeline", "Show what happened to a fleet: when, who did it, why.", _OPERATE)
add_lazy(
    app,
    "console",
    Command(
        module="embertide.server.console.command",
        text="Serve pages of a fleet to browsers: health, timeline, nodes, operations, drift.",
        panel=_OPERATE,
    ),
)
_ours("context", "Control planes by name: `add` one, `use` it, and commands ask it.", _OPERATE)

_ours(
    "snapshot", "Snapshots: what they hold, whether every byte is right, how two differ.", _INSPECT
)
# A key may be negative.
_ours(
    "explain",
    "Show where the row of a key lives: tier, device, live chunks, version, use.",
    _INSPECT,
    ignore_unknown_options=True,
)
_ours("doctor", "Check everything that a start depends on, and say how to fix it.", _INSPECT)

_ours(
    "demo",
    "Watch a model learn from a drifting news stream while Triton serves it.",
    _TRY,
    module="demo.command",
)
_ours(
    "chaos",
    "Inject seeded faults into a fleet, check every answer, see that it heals.",
    _TRY,
    module="chaos.command",
)

# Those that ask a control plane; servers and trainers have settings of their own.
_OF_A_CONTEXT = {
    "status",
    "node",
    "plan",
    "reshard",
    "drift",
    "hot",
    "slow",
    "explain",
    "timeline",
    "versions",
}

show_flags(app)


def main() -> None:
    """Run the command."""
    interrupt_on_signals()
    close_umask()
    app(prog_name="embertide")
