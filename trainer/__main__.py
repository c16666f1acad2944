"""`python -m embertide.trainer`: the trainer's commands, which `embertide` starts as processes."""

import typer

from embertide._common.commands import Command, add_lazy, lazy_app, show_flags
from embertide._common.private import close_umask

app = typer.Typer(
    name="embertide.trainer",
    help="Train, publish, evaluate and import models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
# `embertide --help` says what each is for.
_MODULES = {"import": "import_model", "send-events": "send", "eval": "evaluate"}
_COMMANDS = (
    *("init", "train", "import", "export-dense", "cache-sim", "capacity", "prune-search"),
    *("transform-search", "describe", "send-events", "guard", "rollback", "replay", "backtest"),
    *("compare", "eval", "verify", "step-profile", "plan-search"),
)
lazy_app(app)
for _name in _COMMANDS:
    _module = _MODULES.get(_name, _name.replace("-", "_"))
    add_lazy(app, _name, Command(module=f"embertide.trainer.commands.{_module}"))
show_flags(app)

if __name__ == "__main__":
    close_umask()
    app(prog_name="embertide")
