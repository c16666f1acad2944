"""A run of several ranks whose compute is emulated by sleeping, so that one core can have many.

    torchrun --standalone --nproc-per-node 4 -m bench.sync.apart -- --sync local-sgd --slow 5

A rank sleeps for each event that it learns; the last rank `--slow` times as long. It may stop for
some seconds (`--stop-s`): in its step alone, or by SIGSTOP (`--signal`), which stops all that it
does; it owns no rows then. It prints one JSON line: events a second from the first step to the
last, the AUC, and what each rank did.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.servers import BUILD
from bench.train.quality import DLRM as NEWS
from embertide.trainer.config import ModelConfig, RunConfig
from embertide.trainer.config.sync import parse_sync
from embertide.trainer.data import open_events
from embertide.trainer.data.base import EventSource
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.history import with_columns
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.model.learner import Learned, Learner
from embertide.trainer.presets import news_model, news_rates
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer
from embertide.trainer.sync.plan import FORMAT
from embertide.trainer.sync.ranks import Ranks

_HOURS = 12
_NEVER_S = 30 * 24 * 3600  # no version ends within the run, but the first and the last


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.sync.apart", description=__doc__)
    parser.add_argument("--sync", required=True)
    parser.add_argument("--data", type=Path, help="the news file; without it, generated news")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--events", type=int, default=4096, help="of the stream, about")
    parser.add_argument("--event-ms", type=float, default=12.0, help="that a rank takes for one")
    parser.add_argument("--slow", type=float, default=1.0, help="times as long for the last rank")
    parser.add_argument("--stop-s", type=float, default=0.0, help="the last rank stops once")
    parser.add_argument("--after", type=int, default=3, help="batches, by then")
    parser.add_argument("--signal", action="store_true", help="by SIGSTOP; it owns no rows")
    parser.add_argument("--seed", type=int, default=1)
    return parser


class _Sleeper:
    """Takes the steps of a learner, and sleeps as long as a rank would compute."""

    def __init__(
        self, learner: Learner, event_s: float, stop_s: float, after: int, *, by_signal: bool
    ) -> None:
        self._take_step = learner.take_step
        self._event_s, self._stop_s, self._after = event_s, stop_s, after
        self._by_signal = by_signal
        self.ends: list[tuple[float, int]] = []
        self.took_s: list[float] = []
        self.began_s = 0.0
        learner.take_step = self.take_step  # type: ignore[method-assign, assignment]

    def take_step(self, batch: Any, *arguments: Any) -> Learned:
        began_s = time.time()
        self.began_s = self.began_s or began_s
        if self._stop_s and len(self.ends) == self._after:
            self._stop()
        events = 0 if batch.part is None else len(batch.part)
        time.sleep(events * self._event_s)
        learned = self._take_step(batch, *arguments)
        self.ends.append((time.time(), events))
        self.took_s.append(time.time() - began_s)
        return learned

    def _stop(self) -> None:
        if not self._by_signal:
            time.sleep(self._stop_s)
            return
        # It is stopped while it sleeps for its events.
        me = os.getpid()
        stop = f"kill -STOP {me}; sleep {self._stop_s}; kill -CONT {me}"
        subprocess.Popen(["/bin/sh", "-c", stop])


def _plan_without_last(model: ModelConfig, ranks: int, path: Path) -> Path:
    """Write a plan by which the last rank owns nothing."""
    tables = {
        table.name: [bucket % (ranks - 1) for bucket in range(1 << table.bucket_bits)]
        for table in model.tables
    }
    path.write_text(json.dumps({"format": FORMAT, "ranks": ranks, "tables": tables}))
    return path


def main() -> None:
    """Train, and print what came of it."""
    given = _parser().parse_args()
    ranks = Ranks.join()
    run = dataclasses.replace(
        NEWS if given.data else RunConfig(model=news_model(), optimizer=news_rates()),
        batch_size=given.batch,
        publish_every_s=_NEVER_S,
        seed=given.seed,
        sync=parse_sync(given.sync),
    )
    source: EventSource
    if given.data:
        source = with_columns(FirstEvents(open_events(str(given.data)), given.events), run.model)
    else:
        views = given.events // _HOURS
        source = NewsSource(
            NewsConfig(hours=_HOURS, views_per_hour=views, users=2000, new_items_per_hour=20)
        )
    channel = ranks.channel("bench")
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        path = channel.gather(folder)[0]
        plan = None
        if given.signal:
            plan = _plan_without_last(run.model, ranks.size, Path(folder) / f"plan-{ranks.rank}")
        trainer = Trainer(
            run,
            Publication(Path(path) / "publication"),
            ranks=ranks,
            plan_file=plan,
            program_cache=BUILD / "cache" / "dense",
        )
        last = ranks.rank == ranks.size - 1
        event_s = given.event_ms / 1000 * (given.slow if last else 1.0)
        stop_s = given.stop_s if last else 0.0
        sleeper = _Sleeper(trainer.learner, event_s, stop_s, given.after, by_signal=given.signal)
        trainer.fit(source)
        figures = trainer.figures()
        every = channel.gather([sleeper.began_s, sleeper.ends])
        took_s_R = channel.gather(sleeper.took_s)
        if ranks.first:
            began_s = min(began for began, _ in every)
            took_s = max(ends[-1][0] for _, ends in every if ends) - began_s
            found = {
                "took_s": took_s,
                "steps_s": took_s_R,
                "events": trainer.state.events,
                "events_per_s": trainer.state.events / took_s,
                "auc": trainer.state.prequential.live_auc()[0],
                "ends": [[[at - began_s, n] for at, n in ends] for _, ends in every],
                "apart": figures["apart"],
                "traffic": figures["traffic"],
            }
            print(json.dumps(found))


if __name__ == "__main__":
    main()
