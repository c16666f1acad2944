"""Our planners against TorchRec's, and neuroshard against heuristics, on 50 sharding tasks.

The simulator judges all placements alike: the cost is the time of the busiest device. TorchRec's is
the best of four plans (torchrec.py). Planners that go by the cost model get the prices of the
simulator's machine (placed.py).
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench import plot, report
from bench.drift import heuristics, torchrec
from bench.drift.local import FOLDER
from bench.drift.placed import outcome, planned, problem_of
from bench.drift.tasks import Source, Task, tasks
from bench.report import CONSOLE
from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.planners import COMPARED, planner

_TASKS, _SEED = 50, 1
_LARGE, _LARGE_TASKS = 200, 5
_TIGHT, _NEVER, _LIMIT_S, _GAIN = 0.90, 1.0, 10.0, 0.95
_NAMES = (*COMPARED, "auto")
CLAIM = "19.5"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The result of a task: the busiest device's us a batch, and seconds, by planner.

    Attributes:
        task: Its name.
        memory: How tight memory is.
        us: By planner; infinite where it has no plan that fits.
        seconds: Seconds of one core that each took.
    """

    task: str
    memory: str
    us: Mapping[str, float]
    seconds: Mapping[str, float]


def compare(task: Task, names: Sequence[str]) -> Compared:
    """Plan a task by all planners, TorchRec's and the heuristics."""
    us: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for way in torchrec.WAYS:
        plan = torchrec.plan(task, *way)
        came = math.inf if plan.placement is None else outcome(task, plan.placement).busiest_us
        name = "torchrec, " + " ".join(way)
        us[name], seconds[name] = came, plan.seconds
    us["torchrec"] = min(us.values())
    us["heuristic"] = min(
        (outcome(task, each).busiest_us for each in heuristics.placements(task)), default=math.inf
    )
    ours, took = plan_by(task, names)
    return Compared(
        task=task.name, memory=task.memory, us={**us, **ours}, seconds={**seconds, **took}
    )


def plan_by(task: Task, names: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the busiest device's us and the seconds of a core by our planners."""
    problem = problem_of(task, _LIMIT_S)
    us: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for name in names:
        begin = time.process_time()
        us[name] = _busiest_us(task, problem, name)
        seconds[name] = time.process_time() - begin
    return us, seconds


def _busiest_us(task: Task, problem: Problem, name: str) -> float:
    try:
        came = planned(task, problem, planner(name))
    except RefusedError:
        return math.inf
    # Buckets are not of whole bytes.
    return came.busiest_us if came.bytes_D.max() <= task.capacity + 1 else math.inf


def measure(all_sources: Sequence[Source]) -> list[report.Row]:
    """Compare all planners, and time those that search on 200 tables."""
    found = []
    for task in tasks(all_sources, _TASKS, _SEED):
        found.append(compare(task, _NAMES))
        last = found[-1].us
        CONSOLE.print(
            f"[dim]{task.name}: TorchRec {last['torchrec']:,.0f} us, "
            + ", ".join(f"{name} {last[name] / last['torchrec']:.2f}" for name in _NAMES)
        )
    large = [
        plan_by(task, ("neuroshard", "auto"))[1]
        for task in tasks(all_sources, _LARGE_TASKS, _SEED + 1, (_LARGE, _LARGE))
    ]
    if not all(np.isfinite(each.us["torchrec"]) for each in found):
        CONSOLE.print("[yellow]TorchRec has no plan for some tasks; they are left out of ratios")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "torchrec_tasks.json").write_text(
        json.dumps([dataclasses.asdict(each) for each in found], indent=1) + "\n"
    )
    _draw(found, FOLDER / "torchrec.svg")
    return [*_against_torchrec(found), *_against_heuristics(found), *_times(large)]


def _ratios(found: Sequence[Compared], name: str, peer: str) -> list[float]:
    return [each.us[name] / each.us[peer] for each in found if np.isfinite(each.us[peer])]


def _against_torchrec(found: Sequence[Compared]) -> list[report.Row]:
    rows = []
    for name in _NAMES:
        barred = name in {"neuroshard", "auto"}
        ratios = _ratios(found, name, "torchrec")
        tight = _ratios([each for each in found if each.memory == "tight"], name, "torchrec")
        rows += [
            report.measure(
                (f"{name}, {len(tight)} tasks of tight memory", "busiest device / TorchRec's", ""),
                tight,
                better="lower",
                target=_TIGHT if barred else 0,
                claim=CLAIM,
            ),
            report.measure(
                (f"{name}, {len(tight)} tasks of tight memory", f"tasks at most {_TIGHT}", "share"),
                [float(np.mean([ratio <= _TIGHT for ratio in tight]))],
                better="higher",
                target=0,
                claim=CLAIM,
            ),
            report.measure(
                (f"{name}, {len(ratios)} tasks", "busiest device / TorchRec's, worst", ""),
                # The last digits of sums in another order.
                [round(max(ratios), 6)],
                better="lower",
                target=_NEVER if barred else 0,
                claim=CLAIM,
            ),
        ]
    return rows


def _against_heuristics(found: Sequence[Compared]) -> list[report.Row]:
    ratios = _ratios(found, "neuroshard", "heuristic")
    case = f"neuroshard, {len(ratios)} tasks"
    return [
        report.measure(
            (case, "busiest device / best heuristic's, mean", ""),
            [float(np.mean(ratios))],
            better="lower",
            target=_GAIN,
            claim=CLAIM,
        ),
        report.measure(
            (case, "busiest device / best heuristic's, worst", ""),
            [round(max(ratios), 6)],
            better="lower",
            target=_NEVER,
            claim=CLAIM,
        ),
    ]


def _times(large: Sequence[Mapping[str, float]]) -> list[report.Row]:
    return [
        report.measure(
            (f"{name}, {_LARGE} tables", "planning", "s of a core"),
            [each[name] for each in large],
            better="lower",
            target=_LIMIT_S,
            claim=CLAIM,
        )
        for name in ("neuroshard", "auto")
    ]


def _draw(found: Sequence[Compared], path: Path) -> None:
    """Draw each planner's ratios, sorted."""
    lines: Mapping[str, Callable[[Compared], bool]] = {
        "tight memory": lambda each: each.memory == "tight",
        "medium and loose memory": lambda each: each.memory != "tight",
    }
    plot.curves(
        "Busiest device, ours / TorchRec's planner (1.0: the same)",
        ("tasks, sorted", "ratio"),
        {
            f"{name}, {memory}": [
                (float(at), ratio, 0.0)
                for at, ratio in enumerate(
                    sorted(
                        ratio
                        for ratio in _ratios([each for each in found if of(each)], name, "torchrec")
                        if np.isfinite(ratio)
                    )
                )
            ]
            for name in ("neuroshard", "auto")
            for memory, of in lines.items()
        },
        path,
        in_time=True,
    )
