"""`capacity`: tier sizes that meet a latency goal, from a trace of keys."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import rich.progress
import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import (
    ProgressText,
    Table,
    print_json,
    progress_bar,
    say,
    show_table,
    text,
)
from embertide._store import cache_policies
from embertide.trainer.data.trace import read_trace
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.picture import new_picture
from embertide.trainer.lab import cache, capacity

_MIB = 1 << 20
# Beside what `Policies()` says: the key of a slot, and its place in the map from keys to slots.
_SLOT_BYTES = 13
_COSTS = capacity.TierCosts()


def _advance(
    bar: rich.progress.Progress, task: rich.progress.TaskID, done: int, total: int
) -> None:
    bar.update(task, completed=done, total=total)


def _policy_bytes(name: str) -> int:
    """Return what a policy needs in DDR for each row; clock lives in the index."""
    base, _, accesses = name.partition(":")
    if base == "clock":
        return 0
    for each in cache_policies():
        if each.name == base:
            sketch = 16 if accesses else 0  # 8 bytes a slot, of a power of two of slots
            return int(each.slot_bytes + each.history_bytes + _SLOT_BYTES + sketch)
    raise ConfigurationError(f"policy {name!r} does not exist; there are {cache.policy_names()}")


def _cost(what: str, name: str) -> Any:
    return typer.Option(help=f"{what}.", show_default=f"{getattr(_COSTS, name):g}, assumed")


def _costs(
    given: Mapping[str, float | None], measured: Mapping[str, float]
) -> tuple[capacity.TierCosts, dict[str, str]]:
    """Return the costs, and of each whether it was given, measured or is assumed."""
    chosen = {name: us for name, us in given.items() if us is not None}
    sources = {
        name: "given" if name in chosen else "measured" if name in measured else "assumed"
        for name in given
    }
    return capacity.TierCosts(**{**measured, **chosen}), sources


def _show(plans: dict[str, capacity.Plan], goal: capacity.Goal, title: str) -> None:
    wanted = [
        f"{name} {value:g} us"
        for name, value in (("mean", goal.mean_us), ("p99", goal.p99_us))
        if value is not None
    ]
    table = Table(title=f"{title}\ngoal: {' and '.join(wanted)} for requests of {goal.keys} keys")
    for name in ("policy", "HBM", "DDR", "SSD", "rows in DDR", "HBM hits", "DDR hits", "mean us"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    table.add_column("p99 us", justify="right")
    table.add_column("goal")
    for policy, plan in plans.items():
        sizes = (plan.hbm_bytes, plan.ddr_bytes, plan.ssd_bytes)
        table.add_row(
            policy,
            *(f"{size / _MIB:,.1f} MiB" for size in sizes),
            f"{plan.ddr_rows:,}",
            f"{plan.hbm_hits:.2%}",
            f"{plan.ddr_hits:.2%}",
            f"{plan.mean_us:,.1f}",
            f"{plan.p99_us:,.1f}",
            "met" if plan.meets else text("not met, whatever the size", "bold"),
        )
    show_table(table)


def command(
    trace: Annotated[
        str,
        typer.Argument(
            help="Keys in the order in which they were asked for, as for cache-sim: .parquet, "
            ".csv (see --column), .trace or .trace.xz; also fsspec URLs."
        ),
    ],
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a row, as it is stored.")],
    latency_goal: Annotated[
        float | None, typer.Option(help="Mean of a request, in microseconds.")
    ] = None,
    p99_goal: Annotated[
        float | None, typer.Option(help="99 of 100 requests, in microseconds.")
    ] = None,
    keys: Annotated[int, typer.Option(min=1, help="Keys that a request reads.")] = 26,
    column: Annotated[str | None, typer.Option(help="The key column of the trace.")] = None,
    accesses: Annotated[int | None, typer.Option(min=1, help="Read the first ones alone.")] = None,
    total_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of the model; default: the keys of the trace.")
    ] = None,
    hbm_mib: Annotated[int, typer.Option(min=0, help="HBM that there is, MiB.")] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Eviction policy of DDR; may be given several times.", show_default="clock"
        ),
    ] = None,
    sizes: Annotated[
        int, typer.Option(help="Number of sizes to simulate a policy at, 2 to 24.")
    ] = 12,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="Take the costs that benchmarks measured here: build/bench/costs.json, written by "
            "`make bench-store` and `make bench-ssd`. What is not there nor given is assumed."
        ),
    ] = None,
    hbm_us: Annotated[float | None, _cost("Read of a row in HBM", "hbm_us")] = None,
    ddr_us: Annotated[float | None, _cost("Read of a row in DDR", "ddr_us")] = None,
    ssd_us: Annotated[float | None, _cost("Read of a request's first SSD row", "ssd_us")] = None,
    ssd_more_us: Annotated[
        float | None, _cost("Read of each further SSD row of it", "ssd_more_us")
    ] = None,
    base_us: Annotated[float | None, _cost("Fixed cost of a request", "base_us")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit-rate curves and sizes: .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Plan tier sizes: the smallest DDR budget whose predicted latency meets a goal.

    Hit rates come from the policies' own code on your trace, latencies from what a read of each
    tier costs: assumed, unless you give it or what was measured. DDR counts index and policy.

    Example: embertide capacity clicks.parquet --column cand --row-bytes 64 --latency-goal 200
    """
    with report_errors(as_json):
        goal = capacity.Goal(mean_us=latency_goal, p99_us=p99_goal, keys=keys)
        given = {
            "hbm_us": hbm_us,
            "ddr_us": ddr_us,
            "ssd_us": ssd_us,
            "ssd_more_us": ssd_more_us,
            "base_us": base_us,
        }
        known = {} if measured is None else capacity.measured_costs(measured, row_bytes)
        costs, sources = _costs(given, known)
        picture = None if plot is None else new_picture(plot)
        needs = {name: _policy_bytes(name) for name in policy or ["clock"]}
        keys_N = read_trace(trace, column=column, accesses=accesses)
        curves = {}
        bar = progress_bar(ProgressText("{task.description}"), rich.progress.BarColumn())
        with bar:
            for name in needs:
                task = bar.add_task(name)
                curves[name] = capacity.hit_curve(
                    keys_N,
                    name,
                    sizes=sizes,
                    progress=partial(_advance, bar, task),
                )
        plans = {
            name: capacity.plan(
                curve,
                goal,
                costs,
                row_bytes=row_bytes,
                total_rows=total_rows,
                hbm_bytes=hbm_mib * _MIB,
                policy_bytes=needs[name],
            )
            for name, curve in curves.items()
        }
        if picture and plot:
            capacity.draw(picture, list(curves.values()), list(plans.values()), plot)
    if as_json:
        as_said = {
            name: {"us": getattr(costs, name), "from": source} for name, source in sources.items()
        }
        print_json(
            {"costs": as_said, "plans": {name: plan.as_json() for name, plan in plans.items()}}
        )
    else:
        _show(plans, goal, f"{len(keys_N):,} accesses of {Path(trace).name}")
        said = (f"{n} {getattr(costs, n):g} ({source})" for n, source in sources.items())
        say(f"costs: {', '.join(said)}")
    if not all(plan.meets for plan in plans.values()):
        raise typer.Exit(1)
