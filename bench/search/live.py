"""Freshness of a live stream: what a window of batches adds between an event and its step.

The learners of pipe.py, of which all rows lie in DDR or a tenth of them, take a stream that comes
at a rate of its own: a thread reads ahead as a run's does, and a batch is there when its last event
is. The delay of a batch is from then until it is learned. Rates are shares of what the learner with
a window can take, measured first.

Learners take turns. At a rate that is too high the backlog grows for as long as the stream lasts;
there the time counts for which a batch whose rows are there waited in the window for others.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bench import keys, report
from bench.report import CONSOLE
from bench.search.pipe import BATCH, Side, folder, sides_of
from bench.shapes import Shape
from bench.store import ours
from embertide.trainer.data.ahead import read_ahead
from embertide.trainer.data.base import Batch

_WARM, _REPETITIONS = 3, 5
_RATES = (0.5, 0.8)
_TOO_HIGH = 1.5
_NONE_MS = 1.0  # a window that adds no delay adds less than that
_READ_AHEAD_BYTES = 64 << 20


def _paced(batches: list[Batch], every_s: float, came_s: list[float]) -> Iterator[Batch]:
    """Yield each batch when its last event comes, and note when that was to be."""
    began_s = time.monotonic()
    for n, batch in enumerate(batches):
        due_s = began_s + (n + 1) * every_s
        time.sleep(max(0.0, due_s - time.monotonic()))
        came_s.append(due_s)
        yield batch


def _delays_ms(side: Side, batches: list[Batch], every_s: float) -> list[float]:
    """Return how long after its last event each batch was learned."""
    came_s = list[float]()
    with read_ahead(
        _paced(batches, every_s, came_s), _READ_AHEAD_BYTES, meanwhile=side.learn_meanwhile
    ) as stream:
        side.learn(stream)
    return [1e3 * (done - came) for done, came in zip(side.learned_s, came_s, strict=True)]


def _slower(
    sides: dict[str, Side], turns: Iterator[list[Batch]], step_s: float, share: float
) -> Iterator[report.Row]:
    """Compare delays of a stream that the learners can follow."""
    case = f"a stream of {share:.0%} of what the learner with a window can take"
    delays: dict[str, list[float]] = {name: [] for name in sides}
    longest: dict[str, list[float]] = {name: [] for name in sides}
    added = list[float]()
    for _ in range(_REPETITIONS):
        batches = next(turns)
        for name, side in sides.items():
            found = _delays_ms(side, batches, step_s / share)
            delays[name].append(statistics.median(found))
            longest[name].append(max(found))
        added.append(sides["window"].window.figures()["delay_ms"])
        CONSOLE.print(f"[dim]{share:.0%}: {delays}, {sides['window'].window.figures()}")
    for metric, of, claim in (
        ("from a batch's last event until it is learned, median", delays, "E.1"),
        ("the longest such time", longest, ""),
    ):
        for peer, name in (("DDR", "all rows in DDR"), ("today", "today's policy")):
            yield report.compare(
                (case, metric, "ms"),
                of["window"],
                of[peer],
                peer_name=name,
                better="lower",
                target=1.1 if claim and peer == "today" else 0,
                claim=claim if peer == "today" else "",
            )
    yield report.measure(
        (case, "wait in the window of a batch whose rows are there", "ms"),
        added,
        better="lower",
        target=_NONE_MS,
        claim="E.1",
    )


def _too_quick(side: Side, batches: list[Batch], every_s: float) -> Iterator[report.Row]:
    """Measure what a window adds to a backlog: no more than the batches that it has."""
    _delays_ms(side, batches, every_s)
    found = side.window.figures()
    bound_ms = found["length"] * found["learn_ms"]
    CONSOLE.print(f"[dim]{_TOO_HIGH:.0%}: {found}")
    yield report.measure(
        (
            f"a stream of {_TOO_HIGH:.0%} of it",
            "wait of a batch whose rows are there / the window's batches times a step",
            "share",
        ),
        [found["delay_ms"] / bound_ms],
        better="lower",
        target=1,
        claim="E.1",
    )
    for metric, unit, value in (
        ("that wait", "ms", found["delay_ms"]),
        ("length of the window", "batches", found["length"]),
    ):
        yield report.measure(
            (f"a stream of {_TOO_HIGH:.0%} of it", metric, unit), [value], better="lower", target=0
        )


def run(given: Any) -> Iterator[report.Row]:
    """Yield the rows of the report."""
    torch.set_num_threads(2)
    shape = Shape(name="Criteo DLRM", rows=given.rows)
    count = _WARM + len(_RATES) * _REPETITIONS + 2
    drawn = keys.draw(shape, BATCH * count * given.steps)
    batches = list(ours.batches(*drawn, count * given.steps))
    turns = iter(np.array_split(np.arange(len(batches)), count))
    with folder():
        sides, _ = sides_of(shape)
        each = ([batches[n] for n in turn] for turn in turns)
        for _ in range(_WARM):
            warm = next(each)
            for side in sides.values():
                side.learn(warm)
        last = next(each)
        step_s = report.seconds(lambda: sides["window"].learn(last)) / len(last)
        for name in ("DDR", "today"):
            sides[name].learn(last)
        CONSOLE.print(f"[dim]a step with a window takes {1e3 * step_s:.0f} ms")
        for share in _RATES:
            yield from _slower(sides, each, step_s, share)
        yield from _too_quick(sides["window"], next(each), step_s / _TOO_HIGH)
