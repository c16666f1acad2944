"""The simulator of a step and the search for a plan of ranks: `make bench-search PARTS="tiny"`.

Profiles are drawn or assumed (bench/search/profiles.py), but for `measured`, which compares with
steps of two ranks (bench/search/measured.py). `hot` counts what ranks ask one another for
(bench/search/hot.py), `columns` has real ranks learn column-wise tables (bench/search/columns.py),
and `refused` tries bad input (bench/search/refused.py). `pipe` measures steps over an SSD
(bench/search/pipe.py), with nothing else at work, and `live` how late a stream is learned there
(bench/search/live.py). `auto` is whether tests of
`embertide train --plan auto` hold: EMBERTIDE_KILLS=80 kills its ranks ten times.
"""

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable

from bench import parts, report
from bench.held import held
from bench.search import columns, hot, live, measured, pipe, refused
from bench.search.profiles import criteo, tiny
from embertide.trainer.config import Codecs
from embertide.trainer.config.sync import AllReduce
from embertide.trainer.sync.placing.search import (
    Found,
    Space,
    at_random,
    every_strategy,
    greedy,
    metropolis,
    propose,
    start_of,
)
from embertide.trainer.sync.placing.step import StepModel
from embertide.trainer.sync.placing.timeline import Timeline

_CHANGES = 10_000
_TINY, _TINY_EVALUATIONS = 200, 600
_LARGER = 20
_LARGER_EVALUATIONS = 1000
_OTHER_SEEDS = 200  # of spaces that nothing was chosen by
_RANKS = (2, 3, 4, 6, 8, 12, 16)
_EQUAL = 1 + 1e-9  # of two steps that differ by rounding alone


def _times(timeline: Timeline) -> list[tuple[float, float]]:
    return [(span.begin_s, span.end_s) for span in timeline.spans()]


def _simulator(_: object) -> Iterable[report.Row]:
    """Change tasks of steps at random, and compare with simulations of everything."""
    for ranks in (4, 8, 16):
        model = StepModel(criteo(1, ranks, slow_links=1, slow_cores=1), ranks)
        space = Space(profile=model.profile, ranks=(ranks,))
        strategy = start_of(space)
        model.step_s(strategy)
        timeline, chance = model.timeline, random.Random(ranks)
        case = f"{ranks} ranks, {len(timeline.tasks)} tasks"
        equal, quick, whole = [], [], []
        for _n in range(_CHANGES // 3 + 1):
            number = chance.randrange(len(timeline.tasks))
            took, lead = timeline.seconds_of(number)
            factor = chance.choice((0.5, 0.9, 1.1, 2.0))
            began = time.perf_counter()
            timeline.retime({number: (took * factor, lead * factor)})
            quick.append(time.perf_counter() - began)
            found = _times(timeline)
            began = time.perf_counter()
            timeline.simulate_all()
            whole.append(time.perf_counter() - began)
            equal.append(float(found == _times(timeline)))
            timeline.retime({number: (took, lead)})
        yield report.measure(
            (case, "random changes with the times of a whole simulation", "share"),
            [min(equal)],
            better="higher",
            target=1,
            claim="E.4",
        )
        yield report.measure(
            (case, "whole simulation / change of a task, median", "times"),
            [statistics.median(whole) / statistics.median(quick)],
            better="higher",
            target=10,
            claim="E.4",
        )
        yield report.measure(
            (case, "whole simulation / change of a task, mean", "times"),
            [statistics.mean(whole) / statistics.mean(quick)],
            better="higher",
            target=0,
        )
        quick, whole = [], []
        for _n in range(300):
            proposed = propose(space, strategy, chance)
            began = time.perf_counter()
            model.step_s(proposed)
            quick.append(time.perf_counter() - began)
            began = time.perf_counter()
            timeline.simulate_all()
            whole.append(time.perf_counter() - began)
            model.step_s(strategy)
        yield report.measure(
            (case, "a proposal of the search, costs and times", "ms"),
            [1e3 * statistics.median(quick)],
            better="lower",
            target=0,
        )


def _tiny(_: object) -> Iterable[report.Row]:
    """Search spaces whose strategies can all be timed."""
    found: dict[str, list[float]] = {"Metropolis": [], "greedy": [], "random": []}
    sizes = []
    for seed in range(_TINY):
        profile = tiny(seed)
        ranks = len(profile.ranks)
        space = Space(profile=profile, ranks=(ranks,), syncs=_SUMS)
        model = StepModel(profile, ranks)
        steps = [model.step_s(strategy) for strategy in every_strategy(space)]
        sizes.append(len(steps))
        for name, search in _SEARCHES.items():
            best = search(space, _TINY_EVALUATIONS, seed)
            found[name].append(float(best.step_s <= min(steps) * _EQUAL))
    case = f"{_TINY} spaces of {min(sizes)} to {max(sizes)} strategies"
    for name, hits in found.items():
        yield report.measure(
            (case, f"{name}: optimum in {_TINY_EVALUATIONS} evaluations", "share"),
            [statistics.mean(hits)],
            better="higher",
            target=0.95 if name == "Metropolis" else 0,
            claim="E.5" if name == "Metropolis" else "",
        )


_SUMS = (AllReduce(), AllReduce(values="fp16"))
_SEARCHES: dict[str, Callable[[Space, int, int], Found]] = {
    "Metropolis": metropolis,
    "greedy": greedy,
    "random": at_random,
}


def _larger(_: object) -> Iterable[report.Row]:
    """Search spaces of Criteo 1TB's tables, at equal evaluations."""
    yield from _compared(0, f"{_LARGER} spaces of Criteo 1TB, {_LARGER_EVALUATIONS} evaluations")
    yield from _compared(_OTHER_SEEDS, f"{_LARGER} other ones, {_LARGER_EVALUATIONS} evaluations")


def _compared(first: int, case: str) -> Iterable[report.Row]:
    wins: dict[str, list[float]] = {"greedy": [], "random": []}
    ratios: dict[str, list[float]] = {"greedy": [], "random": [], "without a plan": []}
    took = []
    for seed in range(first, first + _LARGER):
        chance = random.Random(seed)
        ranks = _RANKS[seed % len(_RANKS)]
        profile = criteo(
            seed,
            ranks,
            events=chance.choice((16_384, 65_536)),
            gbit_per_s=chance.choice((2.5, 10.0)),
            slow_links=chance.choice((0, 1)),
            slow_cores=chance.choice((0, 1)),
            skew=chance.choice((0.3, 1.0)),
        )
        space = Space(
            profile=profile,
            ranks=tuple(range(max(1, ranks // 2), ranks + 1)),
            syncs=_SUMS,
            codecs=(Codecs(), Codecs(rows="fp16", gradients="fp16")),
        )
        usual_s = StepModel(profile, ranks).step_s(start_of(space))
        best: dict[str, float] = {}
        for name, search in _SEARCHES.items():
            began = time.process_time()
            best[name] = search(space, _LARGER_EVALUATIONS, seed).step_s
            if name == "Metropolis":
                took.append(time.process_time() - began)
        report.CONSOLE.print(f"{seed}: {ranks} ranks {best} usual {usual_s:.4f}")
        for name in wins:
            wins[name].append(float(best["Metropolis"] <= best[name] * _EQUAL))
            ratios[name].append(best["Metropolis"] / best[name])
        ratios["without a plan"].append(best["Metropolis"] / usual_s)
    for name, won in wins.items():
        yield report.measure(
            (case, f"Metropolis as good as {name}, or better", "share"),
            [statistics.mean(won)],
            better="higher",
            target=1,
            claim="E.5",
        )
    yield report.measure(
        (case, "step by Metropolis / by greedy, the longest", "ratio"),
        [max(ratios["greedy"])],
        better="lower",
        target=0,
    )
    for name, of in ratios.items():
        mean = math.exp(statistics.mean(map(math.log, of)))
        yield report.measure(
            (case, f"step by Metropolis / by {name}, geometric mean", "ratio"),
            [mean],
            better="lower",
            target=0,
        )
    yield report.measure(
        (case, "CPU time of one search, the longest", "s"),
        [max(took)],
        better="lower",
        target=30,
        claim="E.5",
    )


# Claims that tests hold: case, tests, the words that choose them.
_AUTO = (
    ("killed in each stage, ends as without", "tests/trainer/test_auto_plan.py", "killed or tried"),
    ("command killed at random, nodes following", "tests/e2e/test_killed_ranks.py", "auto"),
    ("in the demo", "tests/e2e/test_demo.py", "plan"),
)


def _options() -> argparse.ArgumentParser:
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--rows", type=int, default=200_000, help="of a table, for pipe and live")
    more.add_argument("--steps", type=int, default=40, help="of a turn, for pipe and live")
    return more


if __name__ == "__main__":
    sys.exit(
        parts.main(
            "bench.search",
            "The search for a plan",
            {
                "simulator": _simulator,
                "tiny": _tiny,
                "larger": _larger,
                "hot": hot.measure,
                "columns": columns.measure,
                "refused": refused.run,
                "pipe": pipe.run,
                "live": live.run,
                "measured": measured.run,
                "auto": lambda _: (held(*each, claim="E.6") for each in _AUTO),
            },
            __doc__,
            _options(),
            usual=("simulator", "tiny", "larger", "hot", "refused"),
        )
    )
