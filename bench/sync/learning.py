"""Learns the news or Criteo's ads under one strategy after the other, each from the beginning.

    torchrun --standalone --nproc-per-node 2 -m bench.sync.learning -- --data CLICKS --sync dct

It prints one JSON line. Every event is scored before it is learned; the AUC is of the second half.
Bytes are what the sockets of the dense net's channel sent in the second half, as the kernel counts
them, headers and acknowledgements too, less the scores, losses and flags that travel there besides.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bench.criteo import schema
from bench.sync import sockets
from bench.train.criteo import DLRM as ADS
from bench.train.quality import DLRM as NEWS
from embertide.trainer.config import RunConfig
from embertide.trainer.config.sync import DCT, parse_sync
from embertide.trainer.data import open_events
from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.data.history import with_columns
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.eval.metrics import auc
from embertide.trainer.model.learner import Learner, part_of
from embertide.trainer.sync.dense import GradientSum
from embertide.trainer.sync.ranks import Ranks

RUNS = {"news": NEWS, "criteo": ADS}


class _Clock:
    """CPU time that this thread spent in the strategy; waits take none."""

    def __init__(self, learner: Learner) -> None:
        self.seconds = 0.0
        sync: Any = learner.sync
        finish = self._timed(sync.finish)
        sync.finish = lambda *arguments: self._timed(finish(*arguments))
        if isinstance(sync, GradientSum):  # it begins while backward goes on
            sync._made = self._timed(sync._made)  # type: ignore[method-assign]

    def _timed(self, call: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            found = call(*arguments)
            self.seconds += time.thread_time() - began
            return found

        return timed


def _source(name: str, data: Path, run: RunConfig, events: int) -> EventSource:
    source = open_events(str(data), schema=schema if name == "criteo" else None)
    return with_columns(FirstEvents(source, events), run.model)


def _half(batches: Iterator[Batch], events: int) -> Iterator[tuple[bool, Batch]]:
    seen = 0
    for batch in batches:
        yield seen >= events // 2, batch
        seen += len(batch)


def _keep_largest(learner: Learner, share: float) -> None:
    """Let the net see the largest values of a batch's rows alone, in learning and in scoring."""

    def mask(_: Any, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        dense_BD, rows_BE = inputs
        size_BE = rows_BE.detach().abs()
        count = max(1, round(share * size_BE.numel()))
        least = size_BE.reshape(-1).topk(count, sorted=False).values.min()
        return dense_BD, rows_BE * (size_BE >= least)

    learner.net.register_forward_pre_hook(mask)


def _beside(ranks: Ranks, run: RunConfig, events: int, own: tuple[int, int]) -> int:
    """Return the bytes of scores, of the loss and of two flags that a rank sends in a step."""
    if isinstance(run.sync, DCT) and run.sync.density != 1:
        return (ranks.size - 1) * 4 * (own[1] - own[0] + 3)
    return 2 * (ranks.size - 1) * 4 * (events + 3) // ranks.size  # by a ring


def learn(
    ranks: Ranks,
    name: str,
    data: Path,
    run: RunConfig,
    events: int,
    dense: set[int],
    *,
    kept: float = 1,
) -> dict[str, Any]:
    """Learn so many events; return what came of it. `kept`: of the values of rows."""
    learner = Learner(run, ranks)
    if kept < 1:
        _keep_largest(learner, kept)
    clock = _Clock(learner)
    batches = learner.warm_up(_source(name, data, run, events).batches(batch_size=run.batch_size))
    labels, scores = [], []
    began = cpu = sync_cpu = 0.0
    steps = sent = beside = 0
    for counts, batch in _half(batches, events):
        if counts and not steps:
            began, cpu, sync_cpu = time.monotonic(), time.thread_time(), clock.seconds
            sent = sockets.bytes_on_the_wire(dense)
        score_B = learner.learn(batch)
        learner.rows.forget_changes()
        if counts:
            steps += 1
            beside += _beside(ranks, run, len(batch), part_of(batch, ranks.rank, ranks.size))
            labels.append(batch.label_B)
            scores.append(score_B)
    took_s, cpu = time.monotonic() - began, time.thread_time() - cpu
    mine = [
        sockets.bytes_on_the_wire(dense) - sent - beside if ranks.size > 1 else 0,
        clock.seconds - sync_cpu,
        cpu,
    ]
    every = ranks.channel("bench").gather(mine)
    parameters = sum(each.numel() for each in learner.net.parameters())
    return {
        "auc": auc(np.concatenate(labels), np.concatenate(scores)),
        "steps": steps,
        "parameters": parameters,
        "bytes_per_step": sum(each[0] for each in every) / steps / ranks.size,
        "sync_cpu_ms": 1e3 * sum(each[1] for each in every) / steps / ranks.size,
        "step_cpu_ms": 1e3 * sum(each[2] for each in every) / steps / ranks.size,
        "step_ms": 1e3 * took_s / steps,
        "sent_share": getattr(learner.sync, "entries", 0) / parameters / (2 * steps),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as a rank that torchrun started."""
    parser = argparse.ArgumentParser(prog="bench.sync.learning", description=__doc__)
    parser.add_argument("--set", choices=list(RUNS), default="news")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kept", type=float, default=1, help="share of the values of rows")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--sync", action="append", required=True, metavar="NAME[:SETTING=VALUE]")
    given = parser.parse_args(arguments)
    ranks = Ranks.join()
    before = sockets.opened()
    ranks.channel("dense")
    dense = sockets.opened() - before
    found = []
    for seed in range(1, given.seeds + 1):
        for text in given.sync:
            run = dataclasses.replace(RUNS[given.set], seed=seed, sync=parse_sync(text))
            if given.batch:
                run = dataclasses.replace(run, batch_size=given.batch)
            one = learn(ranks, given.set, given.data, run, given.events, dense, kept=given.kept)
            found.append({"sync": text, "seed": seed, "ranks": ranks.size, **one})
    if ranks.first:
        print(json.dumps({"runs": found}), flush=True)


if __name__ == "__main__":
    main()
