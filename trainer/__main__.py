"""`python -m embertide.trainer`: the trainer's commands, which `embertide` starts as processes."""

import typer

from embertide.trainer.commands import (
    backtest,
    cache_sim,
    capacity,
    compare,
    describe,
    evaluate,
    export_dense,
    guard,
    import_model,
    init,
    prune_search,
    replay,
    rollback,
    send,
    train,
    transform_search,
    verify,
)
from embertide.trainer.commands.flags import show_flags

app = typer.Typer(
    name="embertide.trainer",
    help="Train, publish, evaluate and import models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("init")(init.command)
app.command("train")(train.command)
app.command("import")(import_model.command)
app.command("export-dense")(export_dense.command)
app.command("cache-sim")(cache_sim.command)
app.command("capacity")(capacity.command)
app.command("prune-search")(prune_search.command)
app.command("transform-search")(transform_search.command)
app.command("describe")(describe.command)
app.command("send-events")(send.command)
app.command("guard")(guard.command)
app.command("rollback")(rollback.command)
app.command("replay")(replay.command)
app.command("backtest")(backtest.command)
app.command("compare")(compare.command)
app.command("eval")(evaluate.command)
app.command("verify")(verify.command)

show_flags(app)

if __name__ == "__main__":
    app(prog_name="embertide")
