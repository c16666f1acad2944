"""Our trainer's step over several ranks, on the batches of `bench.ranks.batches`.

    torchrun --standalone --nproc-per-node 2 -m bench.ranks.ours -- --samples 4096

It prints one JSON line as `bench.ranks.torchrec_peer` does, with what each rank sent, by kind. The
model, its rates and its batches are the same. As there, each rank draws the batches itself before
the clock starts, and the next batch's keys are exchanged while one is learned. One rank alone
(`--threads 2`) is the trainer as one process.

Every rank learns from its part of the batch; all rows are made before the clock starts.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from bench.ranks.batches import ROWS, TABLES, draw
from bench.ranks.launching import step_options
from bench.shapes import Shape
from bench.store.ours import settle
from embertide.trainer.config import Codec, Codecs, RunConfig, Sync
from embertide.trainer.config.sync import parse_sync
from embertide.trainer.data.base import Batch
from embertide.trainer.data.keys import hash_keys
from embertide.trainer.model.learner import Learner, Prepared
from embertide.trainer.sync.ranks import Ranks

_SHAPE = Shape(name="Criteo DLRM", rows=ROWS, tables=TABLES)


def _batch(seed: int, step: int, samples: int) -> Batch:
    drawn = draw(seed, step, samples)
    event_B = np.arange(step * samples, (step + 1) * samples)
    return Batch(
        first=step * samples,
        next_offset=(step + 1) * samples,
        event_B=event_B,
        ts_ms_B=event_B,
        keys_BF=hash_keys(drawn.keys_BF.astype(np.uint64)).view(np.int64),
        dense_BD=drawn.dense_BD,
        label_B=drawn.label_B,
    )


class _Ours:
    """A learner whose next batch is asked for while one is learned, as the training loop does."""

    def __init__(self, ranks: Ranks, run: RunConfig) -> None:
        self.learner = Learner(run, ranks)
        self._ahead = ThreadPoolExecutor(1)
        self._asked: Future[Prepared] | None = None
        own = hash_keys(np.arange(ROWS, dtype=np.uint64)).view(np.int64)
        for t in range(TABLES):
            exchange = self.learner.rows.exchange
            keys = own if exchange is None else own[exchange.mine(t, own)]
            self.learner.rows.store.ensure_rows(t, keys)
        settle(self.learner.rows.store)  # as the peer's tables are: a step moves a page at a time

    def learn(self, batches: Iterator[Batch]) -> float:
        """Take a step and return the mean loss of the whole batch."""
        if self.learner.ranks.size == 1:
            return self._step(self.learner.prepare(next(batches)))
        asked = self._asked or self._ahead.submit(self.learner.prepare, next(batches))
        self._asked = None

        def then() -> None:
            if (following := next(batches, None)) is not None:
                self._asked = self._ahead.submit(self.learner.prepare, following)

        return self._step(asked.result(), then)

    def _step(self, ready: Prepared, then: Callable[[], None] = lambda: None) -> float:
        score_B = np.clip(self.learner.learn(ready, then), 1e-7, 1 - 1e-7)
        label_B = ready.batch.label_B
        return float(-np.mean(np.log(np.where(label_B > 0, score_B, 1 - score_B))))


def measure(
    ranks: Ranks,
    samples: int,
    *,
    threads: int,
    codecs: Codecs,
    warmup: int,
    steps: int,
    windows: int,
    seed: int,
    sync: Sync,
) -> dict[str, object]:
    """Train, and return what the program prints."""
    run = RunConfig(model=_SHAPE.config(), threads=threads, codecs=codecs, seed=seed, sync=sync)
    ours = _Ours(ranks, run)
    channel = ranks.channel("bench")
    drawn = [_batch(seed, step, samples) for step in range(warmup + steps * windows)]
    batches = iter(drawn)
    for _ in range(warmup):
        ours.learn(batches)
    before = {kind: (each.messages, each.bytes) for kind, each in ranks.traffic.items()}
    rates, losses = [], []
    for _ in range(windows):
        channel.gather(0)
        began = time.perf_counter()
        losses += [ours.learn(batches) for _ in itertools.repeat(None, steps)]
        channel.gather(0)
        rates.append(samples * steps / (time.perf_counter() - began))
    sent = {
        kind: [each.messages - before[kind][0], each.bytes - before[kind][1]]
        for kind, each in ranks.traffic.items()
        if kind in before
    }
    return {
        "program": "ours",
        "ranks": ranks.size,
        "threads": threads,
        "samples": samples,
        "samples_per_s": [round(rate, 1) for rate in rates],
        "loss": round(float(np.mean(losses)), 6),
        "steps": [warmup, warmup + steps * windows],
        "seed": seed,
        "sent": channel.gather(sent),
        "waits_s": {kind: round(each.waits_s, 3) for kind, each in ranks.traffic.items()},
    }


def timeline(ranks: Ranks, samples: int) -> list[list[object]]:
    """Return [lane, name, begin_s, end_s] of what one step did: threads, and what travelled."""
    ours = _Ours(ranks, RunConfig(model=_SHAPE.config(), threads=1))
    learner, exchange = ours.learner, ours.learner.rows.exchange
    assert exchange is not None
    spans: list[list[object]] = []
    step, asking, wire = "learning thread", "asking thread", "wire, until it is waited for"

    def timed(lane: str, name: str, owner: Any, method: str) -> None:
        inner = getattr(owner, method)

        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = inner(*arguments, **options)
            spans.append([lane, name, began, time.perf_counter()])
            return result

        setattr(owner, method, call)

    def travelling(channel: Any, method: str) -> None:
        inner = getattr(channel, method)

        def call(*arguments: Any) -> Any:
            began, pending = time.perf_counter(), inner(*arguments)
            waiting = pending.wait

            def wait() -> Any:
                got = waiting()
                spans.append([wire, str(arguments[-1]), began, time.perf_counter()])
                return got

            pending.wait = wait
            return pending

        setattr(channel, method, call)

    batches = iter([_batch(1, each, samples) for each in range(8)])
    for _ in range(6):
        ours.learn(batches)
    timed(asking, "ask", exchange, "ask")
    timed(step, "rows", exchange, "rows")
    timed(step, "forward", learner.net, "forward")
    timed(step, "backward", torch.Tensor, "backward")
    timed(step, "send gradients", learner.rows, "send")
    timed(step, "dense step", learner.optimizer, "step")
    timed(step, "rows' step", learner.rows, "step")
    for name, method in (("rows", "exchange"), ("keys", "exchange"), ("dense", "sum")):
        travelling(ranks.channel(name), method)
    ours.learn(batches)
    return spans


def main() -> None:
    """Run as a rank that torchrun started, or alone."""
    parser = step_options("bench.ranks.ours", __doc__)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--rows", default="fp32", help="codec of rows")
    parser.add_argument("--gradients", default="fp32", help="codec of gradients")
    parser.add_argument("--sync", default="all_reduce", help="strategy of the dense net")
    parser.add_argument("--timeline", default="", help="anything: also say when what was done")
    arguments = parser.parse_args()
    rows: Codec = arguments.rows
    gradients: Codec = arguments.gradients
    ranks = Ranks.join()
    torch.set_num_threads(arguments.threads)
    measured = measure(
        ranks,
        arguments.samples,
        threads=arguments.threads,
        codecs=Codecs(rows=rows, gradients=gradients),
        warmup=arguments.warmup,
        steps=arguments.steps,
        windows=arguments.windows,
        seed=arguments.seed,
        sync=parse_sync(arguments.sync),
    )
    if arguments.timeline:
        measured["timeline"] = timeline(ranks, arguments.samples)
    if ranks.first:
        print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
