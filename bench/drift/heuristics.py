"""Greedy placements by a simple figure of each table, as NeuroShard is compared with.

Tables whole, the largest figure first, each to the device where the figures add up to the least and
there is room. A table that is larger than some share of a device is split by rows over all devices;
the shares that are tried are those of `_WHOLE`, so that something fits where memory is tight.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from bench.drift.simulator import Placement, Shard
from bench.drift.tasks import Task

_WHOLE = (1.0, 0.5, 0.25, 0.1, 0.0)
_SEED = 7
_FIGURES: Mapping[str, Callable[[Task, int], float]] = {
    "dim": lambda task, at: task.tables[at].dim,
    "size": lambda task, at: task.tables[at].bytes,
    "lookup": lambda task, at: task.tables[at].dim * task.tables[at].pooling,
    "size and lookup": lambda task, at: (
        task.tables[at].dim * task.tables[at].pooling * math.log10(task.tables[at].rows)
    ),
    "random": lambda task, at: float(np.random.default_rng([_SEED, at]).random()),
}


def placements(task: Task) -> Iterator[Placement]:
    """Yield every placement of a heuristic that fits."""
    for figure in _FIGURES.values():
        for whole in _WHOLE:
            placement = _greedy(task, [figure(task, at) for at in range(len(task.tables))], whole)
            if placement is not None:
                yield placement


def _greedy(task: Task, figures: list[float], whole: float) -> Placement | None:
    """Return a placement, or None where memory is too small for it."""
    placement: list[list[Shard]] = [[] for _ in task.tables]
    room_D = np.full(task.devices, float(task.capacity))
    sum_D = np.zeros(task.devices)
    split = [at for at, table in enumerate(task.tables) if table.bytes > whole * task.capacity]
    for at in split:
        placement[at] = by_rows(task, at)
        room_D -= task.tables[at].bytes / task.devices
    kept = sorted(set(range(len(task.tables))) - set(split), key=lambda at: (-figures[at], at))
    for at in kept:
        table = task.tables[at]
        device = int(np.where(room_D >= table.bytes, sum_D, np.inf).argmin())
        if room_D[device] < table.bytes:
            return None
        placement[at] = [
            Shard(key_share=1.0, row_share=1.0, devices=(device,), columns=(0, table.dim))
        ]
        room_D[device] -= table.bytes
        sum_D[device] += figures[at]
    return placement if (room_D >= 0).all() else None


def by_rows(task: Task, at: int) -> list[Shard]:
    """Return equal ranges of rows, one a device."""
    return [
        Shard(
            key_share=task.spreads[at].of_rows(device / task.devices, (device + 1) / task.devices),
            row_share=1 / task.devices,
            devices=(device,),
            columns=(0, task.tables[at].dim),
        )
        for device in range(task.devices)
    ]
