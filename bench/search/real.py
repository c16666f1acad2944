"""Steps of real ranks under many plans, against what a profile of one of them predicts.

    torchrun --standalone --nproc-per-node 2 -m bench.search.real -- --row-us 0,2 --plans 24

One launch: the ranks take a profile as `embertide step-profile` does, and search for a plan by it.
Then, in turns, each of many plans gets a fresh learner and takes steps of the same batches. Ranks
sleep for each row that they look up or update (`--row-us`), and for each event in the net
(`--event-us`): so they differ, and a step is the same whatever else the machine does.

It prints one JSON line: of each plan, what its steps took and what was predicted.
"""

import argparse
import dataclasses
import functools
import gc
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.keys import DENSE, zipf_keys
from bench.shapes import Shape
from embertide import _store
from embertide.trainer.config import ModelConfig, RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.keys import hash_keys
from embertide.trainer.model import learner
from embertide.trainer.model.build import build_net
from embertide.trainer.run.step_profile import measure, take_steps
from embertide.trainer.sync.placing.profile import Profile
from embertide.trainer.sync.placing.search import Space, metropolis
from embertide.trainer.sync.placing.step import StepModel, Strategy
from embertide.trainer.sync.plan import (
    EVERYWHERE,
    Owners,
    Ownership,
    balanced,
    homes_in_turn,
)
from embertide.trainer.sync.ranks import Ranks

_DIM = 32
_ROWS = (200_000, 100_000, 50_000, 20_000, 5000, 1000, 200, 20)
_EXPONENT = 1.05


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(prog="bench.search.real", description=__doc__)
    made.add_argument("--samples", type=int, default=1024, help="of a batch, all ranks together")
    made.add_argument("--steps", type=int, default=30, help="of a plan")
    made.add_argument("--row-us", default="0,0", help="that each rank sleeps for a row, by rank")
    made.add_argument("--event-us", default="0,0", help="the same for an event, forward")
    made.add_argument("--rows", default=",".join(map(str, _ROWS)), help="of the tables")
    made.add_argument("--buckets", type=int, default=8, help="of a table")
    made.add_argument("--chunks", type=int, default=1, help="of a row; plans may divide them")
    made.add_argument("--plans", type=int, default=20, help="to measure beside the two")
    made.add_argument("--search-s", type=float, default=10.0, help="CPU time of the search")
    made.add_argument("--turns", type=int, default=3, help="of all plans")
    made.add_argument("--more-turns", type=int, default=4, help="of the default and what is found")
    made.add_argument("--seed", type=int, default=1, help="of batches and plans")
    return made


def batches_of(count: int, samples: int, seed: int, rows: Sequence[int]) -> list[Batch]:
    """Return batches whose features draw from so many keys each, few of them often."""
    made = []
    for step in range(count):
        rng = np.random.default_rng([seed, step])
        keys_BF = np.stack([zipf_keys(rng, n, _EXPONENT, samples) for n in rows], axis=1)
        event_B = np.arange(step * samples, (step + 1) * samples)
        made.append(
            Batch(
                first=step * samples,
                next_offset=(step + 1) * samples,
                event_B=event_B,
                ts_ms_B=event_B,
                keys_BF=hash_keys(keys_BF.astype(np.uint64)).view(np.int64),
                dense_BD=rng.standard_normal((samples, DENSE)).astype(np.float32),
                label_B=(rng.random(samples) < 0.25).astype(np.float32),
            )
        )
    return made


def sleep_for_rows(row_s: float) -> None:
    """Have this process sleep for each row that it looks up or updates."""

    def sleeping(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: Any, bags: Sequence[Any], **options: Any) -> Any:
            time.sleep(row_s * sum(len(bag[1]) for bag in bags))
            return inner(store, bags, **options)

        return call

    store: Any = _store.TrainingStore
    store.lookup_bags = sleeping(store.lookup_bags)
    store.apply_gradients = sleeping(store.apply_gradients)


class _Slow(torch.autograd.Function):
    """Passes a tensor on after a sleep for each of its rows; the same backward, twice as long."""

    @staticmethod
    def forward(context: Any, values_BD: Tensor, event_s: float) -> Tensor:
        context.sleeps_s = 2 * event_s * len(values_BD)
        time.sleep(event_s * len(values_BD))
        return values_BD.view_as(values_BD)

    @staticmethod
    def backward(context: Any, *gradients_BD: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.sleeps_s)
        return gradients_BD[0], None


def sleep_for_events(event_s: float) -> None:
    """Have nets of this process sleep for each event, forward and backward."""
    build = build_net

    def built(model: ModelConfig) -> nn.Module:
        net = build(model)
        last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
        last.register_forward_hook(
            lambda _module, _inputs, out: _Slow.apply(out, event_s)  # type: ignore[no-untyped-call]
        )
        return net

    learner.build_net = built  # type: ignore[attr-defined, assignment]


def plans(
    count: int, buckets_T: Sequence[int], seed: int, chunks: int = 1
) -> list[tuple[str, Ownership]]:
    """Return plans of two ranks, of many kinds; of several chunks a row, some are column-wise."""
    chance = random.Random(seed)

    def owners(of: Callable[[int], Owners]) -> Ownership:
        return Ownership(2, tuple(of(size) for size in buckets_T))

    def share(size: int, first: float) -> Owners:
        return np.array([int(chance.random() >= first) for _ in range(size)], np.uint16)

    def mixed(size: int) -> Owners:
        kind = chance.choice(("everywhere", "whole", "share"))
        if kind == "everywhere":
            return np.full(size, EVERYWHERE, np.uint16)
        if kind == "whole":
            return np.full(size, chance.randrange(2), np.uint16)
        return share(size, chance.random())

    made = [
        ("all at rank 0", owners(lambda size: np.full(size, 0, np.uint16))),
        ("all at rank 1", owners(lambda size: np.full(size, 1, np.uint16))),
        ("everywhere", owners(lambda size: np.full(size, EVERYWHERE, np.uint16))),
    ]
    while len(made) < count:
        if chunks > 1:
            first_T = [chance.randrange(chunks + 1) for _ in buckets_T]
            parts_TC = [(0,) * first + (1,) * (chunks - first) for first in first_T]
            ranks_TC = tuple(part if len(set(part)) > 1 else () for part in parts_TC)
            homes_T = (homes_in_turn(t, size, 2) for t, size in enumerate(buckets_T))
            made.append(("columns", Ownership(2, tuple(homes_T), ranks_TC)))
        first = chance.random()
        made += [
            ("whole", owners(lambda size: np.full(size, chance.randrange(2), np.uint16))),
            (f"{first:.0%} at rank 0", owners(functools.partial(share, first=first))),
            ("mixed", owners(mixed)),
        ]
    return made[:count]


def _took(run: RunConfig, batches: Sequence[Batch], ranks: Ranks, owners: Ownership) -> float:
    made = learner.Learner(run, ranks, owners)
    took = take_steps(made, list(made.warm_up(iter(batches))))
    del made
    gc.collect()
    return float(max(ranks.channel("profile").gather(took)))


def _searched(profile: Profile, seconds: float, ranks: Ranks) -> Ownership:
    """Return the owners that the first rank's search finds."""
    found: list[Any] = [[], []]
    if ranks.first:
        began = time.process_time()
        best = metropolis(
            Space(profile=profile, ranks=(ranks.size,)),
            100_000,
            1,
            used=lambda: (time.process_time() - began) / seconds,
        )
        owners = best.strategy.owners
        found = [[owner_P.tolist() for owner_P in owners.owners_T], owners.ranks_TC]
    owners_T, ranks_TC = ranks.channel("profile").gather(found)[0]
    return Ownership(
        ranks.size,
        tuple(np.array(owner_P, np.uint16) for owner_P in owners_T),
        tuple(map(tuple, ranks_TC)),
    )


def main() -> None:
    """Run as a rank that torchrun started."""
    given = parser().parse_args()
    ranks = Ranks.join()
    sleep_for_rows(float(given.row_us.split(",")[ranks.rank]) / 1e6)
    sleep_for_events(float(given.event_us.split(",")[ranks.rank]) / 1e6)
    rows = [int(each) for each in given.rows.split(",")]
    shape = Shape(name="drawn", rows=1, dim=_DIM, tables=len(rows), buckets=given.buckets)
    # The net takes little beside its sleeps.
    model = dataclasses.replace(shape.config(), bottom_mlp=(32, _DIM), top_mlp=(64, 32))
    tables = (dataclasses.replace(table, chunks=given.chunks) for table in model.tables)
    model = dataclasses.replace(model, tables=tuple(tables))
    run = RunConfig(model=model, batch_size=given.samples, seed=given.seed)
    batches = batches_of(given.steps, given.samples, given.seed, rows)
    profile = measure(run, batches, ranks)
    found = _searched(profile, given.search_s, ranks)
    buckets_T = [given.buckets] * len(rows)
    measured = [
        ("of a fresh run", balanced(model, ranks.size)),
        ("found", found),
        *plans(given.plans, buckets_T, given.seed, given.chunks),
    ]
    took: list[list[float]] = [[] for _ in measured]
    for turn in range(given.turns + given.more_turns):
        for n, (_name, owners) in enumerate(measured if turn < given.turns else measured[:2]):
            took[n].append(_took(run, batches, ranks, owners))
    if ranks.first:
        steps = StepModel(profile, ranks.size)
        said = [
            {"plan": name, "took_s": each, "predicted_s": steps.step_s(Strategy(owners))}
            for (name, owners), each in zip(measured, took, strict=True)
        ]
        print(
            json.dumps(
                {"plans": said, "links": [dataclasses.asdict(each) for each in profile.ranks]}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
