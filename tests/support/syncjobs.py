"""The work of ranks in tests of strategies of synchronisation: functions for `rankpool`."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fp64 import batch_of
from killing import CACHE
from numpy.typing import NDArray
from rankjobs import NEWS, RUNS, STEP
from rankpool import die
from torch import nn

from embertide.trainer.config import DCT, Sync
from embertide.trainer.model.learner import Learner, NotFiniteError
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer
from embertide.trainer.sync.dct import LargestGradients
from embertide.trainer.sync.plan import balanced
from embertide.trainer.sync.ranks import Ranks
from embertide.trainer.sync.strategy import make_dense_sync

Arrays = list[NDArray[Any]]
SHAPES = ((40, 50), (50,), (50, 60), (70_000,), (7,))
"""Shapes of gradients: large, small, large, one whose positions are far apart, small."""


@dataclasses.dataclass(frozen=True)
class Synced:
    """The findings of a rank in some steps, each by step, and its state at the end."""

    given: list[Arrays]
    taken: list[Arrays]
    residuals: Arrays
    entries: list[int]
    sent_bytes: int


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def gradients(rank: int, step: int) -> Arrays:
    """Few are large, as those of a net."""
    rng = np.random.default_rng([rank, step])
    return [
        (rng.standard_normal(shape) ** 3 * 1e-2).astype(np.float32) * (rng.random(shape) < 0.5)
        for shape in SHAPES
    ]


def sync_steps(
    ranks: Ranks,
    sync: Sync,
    steps: int,
    own_messages: bool = False,
    scales: tuple[float, ...] = (1.0,) * len(SHAPES),
) -> Synced:
    """Bring made-up gradients together.

    `own_messages`: by those of DCT, whatever the density. `scales`: of each tensor's gradients.
    """
    learned, channel = parameters(), ranks.channel("dense")
    strategy: Any = make_dense_sync(sync, learned, channel)
    if own_messages:
        assert isinstance(sync, DCT)
        strategy = LargestGradients(learned, channel, sync)
    found = Synced([], [], [], [], 0)
    for step in range(steps):
        given = [
            each * np.float32(scale)
            for each, scale in zip(gradients(ranks.rank, step), scales, strict=True)
        ]
        for parameter, gradient in zip(learned, given, strict=True):
            parameter.grad = torch.from_numpy(gradient.copy())
        before = getattr(strategy, "entries", 0)
        beside = strategy.finish(torch.full((3,), float(ranks.rank + 1)))()
        assert beside.tolist() == [ranks.size * (ranks.size + 1) / 2] * 3
        found.given.append(given)
        found.taken.append([g.numpy().copy() for each in learned if (g := each.grad) is not None])
        found.entries.append(getattr(strategy, "entries", 0) - before)
        if state := strategy.state():
            found.residuals.append(state["residual_N"])
    return dataclasses.replace(found, sent_bytes=channel.traffic["dense"].bytes)


def learned_steps(ranks: Ranks, sync: Sync, steps: int) -> tuple[Arrays, Arrays]:
    """The net, and what its strategy keeps, after some steps of a model."""
    learner = Learner(dataclasses.replace(STEP, sync=sync), ranks, balanced(STEP.model, ranks.size))
    rng = np.random.default_rng(3)
    for _ in range(steps):
        learner.learn(batch_of(rng, 12))
    net = [value.numpy() for value in learner.net.state_dict().values()]
    return net, list(learner.sync.state().values())


def poisoned_step(ranks: Ranks, sync: Sync) -> tuple[str, bool, Arrays, Arrays]:
    """A batch that is not finite on one rank, between two that are: what it leaves as it was."""
    learner = Learner(dataclasses.replace(STEP, sync=sync), ranks, balanced(STEP.model, ranks.size))
    rng = np.random.default_rng(3)
    learner.learn(batch_of(rng, 12))
    before = [value.copy() for value in learner.sync.state().values()]
    batch = batch_of(rng, 12)
    weight_B = np.ones(12, np.float32)
    weight_B[0] = np.nan  # of the first rank's part
    reason = ""
    try:
        learner.learn(dataclasses.replace(batch, weight_B=weight_B))
    except NotFiniteError as error:
        reason = error.reason
    after = list(learner.sync.state().values())
    same = all(np.array_equal(*each) for each in zip(before, after, strict=True))
    learner.learn(batch)
    return reason, same, before, [value.numpy() for value in learner.net.state_dict().values()]


def restored(ranks: Ranks, sync: Sync, states_R: list[dict[str, NDArray[Any]]]) -> Any:
    """Return a rank's state once it has taken a checkpoint's."""
    strategy = make_dense_sync(sync, parameters(), ranks.channel("dense"))
    strategy.restore(states_R)
    return strategy.state()


def train_with(
    ranks: Ranks, sync: Sync, folder: str, batches: int = 0, allow: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Train to the end, or until the last rank dies before it learns batch `batches`."""
    run = dataclasses.replace(RUNS["news"], sync=sync)
    publication = Publication(Path(folder))
    trainer = Trainer(run, publication, program_cache=CACHE, ranks=ranks, allow_change=allow)
    began_at, learned, left = trainer.state.number, trainer.learner.learn, batches

    def learn(*batch: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and ranks.rank == ranks.size - 1:
            die()
        return learned(*batch)

    trainer.learner.learn = learn  # type: ignore[method-assign, assignment]
    trainer.fit(NEWS)
    state = trainer.learner.sync.state()
    return {
        "began_at": began_at,
        "events": trainer.state.events,
        "scores": trainer.state.prequential.hourly(),
        "held_back": float(np.abs(state["residual_N"]).sum()) if state else 0.0,
    }
