"""The work of ranks that are not at the same step, in tests of them."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from killing import CACHE
from numpy.typing import NDArray
from rankjobs import NEWS, RUNS

from embertide.trainer.config import (
    AllReduce,
    CountersConfig,
    Hop,
    LocalSGD,
    ModelConfig,
    PartialAllReduce,
)
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.checkpoint.checkpoint import is_complete
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress
from embertide.trainer.sync.plan import FORMAT
from embertide.trainer.sync.ranks import Ranks


def _counted() -> ModelConfig:
    """Return the news model with counts of articles."""
    model = news_model()
    user, prev, cand, *others = model.tables
    cand = dataclasses.replace(cand, chunks=2, counters=CountersConfig(feature="cand"))
    return dataclasses.replace(model, tables=(user, prev, cand, *others), bottom_mlp=(16,))


APART = {
    "news": dataclasses.replace(RUNS["news"], sync=LocalSGD(every=4)),
    "held out, sampled": dataclasses.replace(
        RUNS["under a budget"],
        sync=LocalSGD(every=4),
        negative_rate=0.5,
    ),
    "counters": dataclasses.replace(RUNS["news"], model=_counted(), sync=LocalSGD(every=4)),
}
# Few versions, at which ranks wait for one another, and no bound that they reach.
_FREE = LocalSGD(every=1000, max_row_staleness=1000, max_batches_apart=1000)
APART["free"] = dataclasses.replace(APART["news"], batch_size=4, publish_every_s=7200, sync=_FREE)
_MEETING = PartialAllReduce(group_size=2, max_row_staleness=1000, max_batches_apart=1000)
APART["meeting"] = dataclasses.replace(APART["free"], sync=_MEETING)
_HOP = Hop(max_row_staleness=1000, max_batches_apart=1000)
APART["hop"] = dataclasses.replace(APART["free"], sync=_HOP)
_SKIPPING = dataclasses.replace(_HOP, backup=1, max_jump=4)
APART["hop that skips"] = dataclasses.replace(APART["free"], sync=_SKIPPING)
APART["hop, versions"] = dataclasses.replace(APART["news"], sync=_HOP)
TOGETHER = {
    f"{name}, together": dataclasses.replace(run, sync=AllReduce()) for name, run in APART.items()
}


def train_apart(
    ranks: Ranks,
    name: str,
    folder: str,
    batches: int = 0,
    by: str = "",
    slow_s: float = 0.0,
) -> dict[str, Any]:
    """Train to the end; the last rank may be slow, stop after so many batches, or be killed.

    It is killed by the first rank that begins a batch once a checkpoint holds events.
    """
    run = (APART | TOGETHER)[name]
    publication = Publication(Path(folder))
    *_, last_pid = ranks.channel("processes").gather(os.getpid())
    trainer = Trainer(run, publication, program_cache=CACHE, ranks=ranks)
    began_at, began_events = trainer.state.number, trainer.state.events
    last = ranks.rank == ranks.size - 1
    left = batches
    learned: list[NDArray[np.int64]] = []
    times: list[NDArray[np.int64]] = []
    whole = trainer.learner.take_step

    def take_step(*arguments: Any) -> Any:
        nonlocal left, by
        if by == "kill" and _newest_checkpoint(publication) > 1:
            by = ""
            os.kill(last_pid, signal.SIGKILL)
        found = whole(*arguments)
        learned.append(arguments[0].batch.event_B)
        times.append(arguments[0].batch.ts_ms_B)
        if last and slow_s:
            time.sleep(slow_s)
        left -= last
        if left == 0 and last and by == "stop":
            trainer.stop()
        return found

    trainer.learner.take_step = take_step  # type: ignore[method-assign, assignment]
    seen: list[Progress] = []
    trainer.fit(NEWS, progress=seen.append)
    return {
        "progress": seen[-1].apart if seen else {},
        "began_at": began_at,
        "began_events": began_events,
        "events": trainer.state.events,
        "learned": learned,
        "times": times,
        "auc": trainer.state.prequential.daily().get(0),
        "stopped": trainer.stopped,
        "version": trainer.state.number,
        "held": trainer.state.monitor.held.hourly(),
        "unsampled": trainer.steps.unsampled,
        "net": {n: v.numpy().copy() for n, v in trainer.learner.net.state_dict().items()},
    } | trainer.figures()


def _newest_checkpoint(publication: Publication) -> int:
    """Return the number of the newest version that a run can go on from; the first has no events.

    0: there is none.
    """
    whole = (each.number for each in publication.snapshots() if is_complete(publication, each))
    return max(whole, default=0)


def refused(ranks: Ranks, what: str, folder: str) -> None:
    """Begin a run that ranks which are apart cannot do."""
    run, plan_file = APART["news"], None
    if what == "everywhere":
        plan_file = Path(folder) / f"plan-{ranks.rank}.json"
        owners = {table.name: "everywhere" for table in run.model.tables}
        plan_file.write_text(json.dumps({"format": FORMAT, "ranks": ranks.size, "tables": owners}))
    else:
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, net="own_net:Tower"))
    publication = Publication(Path(folder) / "run")
    Trainer(run, publication, program_cache=CACHE, ranks=ranks, plan_file=plan_file)
