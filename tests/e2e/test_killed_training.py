"""A trainer killed at random, again and again: each end is byte for byte that of one never killed.

Each start takes memory alone or an SSD tier, by chance: no byte depends on it. A second model is
pruned, in memory, and has histories and counters; a third the same within a bound of AUC. A fourth
has a net of its own, with batch norm and dropout, whose class the run's file defines. A fifth gets
its labels late, as a second file: every impression is learned exactly once.

`EMBERTIDE_KILLS` says how often each is (`make kill-test`: 50), `EMBERTIDE_SEED` at which moments.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import own_net
import pytest
from late import late, write
from snapshots import snapshot_files
from waiting import wait_until

from embertide.server.adapters.process import Child
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.checkpoint.checkpoint import is_complete

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
KILLS = int(os.environ.get("EMBERTIDE_KILLS", "3"))
SEED = int(os.environ.get("EMBERTIDE_SEED", "20"))
HOURS = 6
# Checkpoints follow one another so closely that one is nearly always being written.
HOURS_GIVEN = ("--demo", "--hours", str(HOURS))
OPTIONS = (*HOURS_GIVEN, "--publish-every-s", "300", "--snapshot-every", "2")
TIERS = {"memory": (), "ssd": ("--ddr-mib", "1", "--ssd-mib", "64")}
PRUNED = """\
from embertide.trainer.config import PruneConfig, RunConfig
from embertide.trainer.presets import news_counters, news_rates

run = RunConfig(
    model=news_counters(),
    optimizer=news_rates(),
    prune=PruneConfig(bytes=200_000),
    publish_every_s=300,
    snapshot_every=2,
)
"""
BOUNDED = PRUNED.replace("bytes=200_000", "within=0.02, ratio=4.0, measure_events=500")
OWN_NET = """\
import dataclasses

from own_net import Tower

from embertide.trainer.config import RunConfig
from embertide.trainer.presets import news_model, news_rates


class Mine(Tower):
    pass


run = RunConfig(
    model=dataclasses.replace(news_model(), net="run_file:Mine", net_arguments={"width": 24}),
    optimizer=news_rates(),
    publish_every_s=300,
    snapshot_every=2,
)
"""
CONFIGS = {"pruned": PRUNED, "bounded": BOUNDED, "own net": OWN_NET}
LATE = """\
import dataclasses

from embertide.trainer.config import LabelJoin, RunConfig
from embertide.trainer.data import feedback_schema, joined, open_events
from embertide.trainer.data.base import news_schema
from embertide.trainer.presets import news_model, news_rates

impressions = dataclasses.replace(news_schema(), label=None, id="impression")
run = RunConfig(
    model=news_model(),
    optimizer=news_rates(),
    labels=LabelJoin(wait_s=900, correct_s=1800),
    publish_every_s=300,
    snapshot_every=2,
)
source = joined(
    open_events("{impressions}", schema=impressions),
    open_events("{clicks}", schema=feedback_schema(id="impression", ts="ts")),
)
"""
# Moments of kills: while the process starts and reads its checkpoint, while one is being written,
# any time.
MOMENTS, SHARES = ("start", "write", "any"), (0.15, 0.45, 0.4)


class Run:
    """One publication and the trainers that fill it, one after the other."""

    def __init__(self, folder: Path, options: Sequence[str], *, pruned: bool) -> None:
        self.publication = Publication(folder / "pub")
        self._logs = folder
        self._options = options
        self._is_pruned = pruned
        self.starts: list[str] = []  # the tier of each
        self.child: Child

    def start(self, tier: str = "memory") -> None:
        """Start the command as anybody would."""
        self.starts.append(tier)
        command = [sys.executable, "-m", "embertide.trainer", "train", str(self.publication.path)]
        command += [*self._options, "--cache", str(CACHE), "--json"]
        log = self._logs / f"{len(self.starts)}.log"
        self.child = Child([*command, *TIERS[tier]], log=log)

    def ended(self) -> bool:
        """Whether the trainer came to its end, which must be a good one."""
        assert self.child.code in (None, 0), self.child.log_text()
        return self.child.code == 0

    def learns(self) -> bool:
        """Whether it has learned from an event, or is at its end."""
        return self.ended() or "progress" in self.child.log_text()

    def writes(self) -> bool:
        """Whether a snapshot is being written."""
        return any((self.publication.path / "snapshots").glob(".*.partial")) or self.ended()

    def kill(self, moment: str, rng: np.random.Generator) -> bool:
        """Kill it at such a moment; False: it was at its end before."""
        delay_s = rng.uniform(0, 3)
        if moment != "start":
            wait_until(self.learns, timeout_s=60)
        if moment == "write":
            wait_until(self.writes, timeout_s=60, every_s=0.001)
            delay_s = rng.uniform(0, 0.1)
        until = time.monotonic() + delay_s
        wait_until(lambda: time.monotonic() >= until or self.ended(), every_s=0.001)
        if self.ended():
            return False
        self.child.kill()
        return self.child.code == -signal.SIGKILL

    def left_half(self) -> set[str]:
        """Return what the killed trainer has not brought to an end."""
        publication, path = self.publication, self.publication.path
        complete = [v for v in publication.snapshots() if is_complete(publication, v)]
        # A folder that has not got the file which makes it exist.
        half = {
            "checkpoint": [each / "checkpoint.json" for each in path.glob("checkpoints/*")],
            "delta": [each / "commit.pb" for each in path.glob("deltas/*")],
            "snapshot": [each.with_name("none") for each in path.glob("snapshots/.*.partial")],
        }
        found = {name for name, files in half.items() if not all(file.exists() for file in files)}
        # Versions are out that the newest checkpoint has not learned.
        return found | ({"versions"} if publication.versions()[-1:] > complete[-1:] else set())

    def end(self) -> tuple[dict[str, bytes], dict[str, object]]:
        """The files of the last snapshot, and what the trainer says of the whole stream."""
        assert self.child.wait(120) == 0, self.child.log_text()
        result = json.loads(self.child.log_text().splitlines()[-1])["result"]
        assert (result["store"]["evictions_to_ssd"] > 0) == (self.starts[-1] == "ssd")
        assert (result["pruning"] is not None) == self._is_pruned
        said = {name: result[name] for name in ("events", "version", "auc_by_day", "labels")}
        last = self.publication.snapshots()[-1]
        return snapshot_files(self.publication.snapshot_path(last)), said


@pytest.mark.parametrize(
    "model", ["whole", *(pytest.param(m, marks=pytest.mark.long) for m in sorted(CONFIGS))]
)
def test_a_trainer_killed_at_random_ends_byte_for_byte_as_one_never_killed(
    tmp_path: Path, model: str
) -> None:
    options: Sequence[str] = OPTIONS
    tiers = sorted(TIERS)
    if model in CONFIGS:
        # Beside a module that it imports.
        (tmp_path / "run.py").write_text(CONFIGS[model])
        shutil.copy(own_net.__file__, tmp_path)
        options, tiers = (*HOURS_GIVEN, "--config", str(tmp_path / "run.py")), ["memory"]
    _check(options, tiers, model in ("pruned", "bounded"), tmp_path, KILLS)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_labels_that_come_late_are_learned_exactly_once_whenever_it_is_killed(
    tmp_path: Path, kills: int
) -> None:
    news = NewsSource(NewsConfig(hours=HOURS))
    events = late(news, 1800)
    impressions, clicks = write(events, tmp_path)
    (tmp_path / "run.py").write_text(LATE.format(impressions=impressions, clicks=clicks))
    said = _check(("--config", str(tmp_path / "run.py")), ["memory"], False, tmp_path, kills)
    labels = said["labels"]
    assert isinstance(labels, dict)
    # Every impression counts as one of the three, every click as one.
    learned = labels["positives"] + labels["negatives"]
    assert learned + labels["waiting"] == labels["impressions"] == events.total
    in_time = labels["positives"] + labels["waiting_positives"]
    assert in_time + labels["corrected"] + labels["unmatched"] == events.positives
    assert labels["corrected"] > 0
    assert said["events"] == learned + labels["corrected"]


def _check(
    options: Sequence[str], tiers: Sequence[str], pruned: bool, tmp_path: Path, most: int
) -> dict[str, object]:
    """Kill runs until there were so many kills; return what the run never killed said."""
    rng = np.random.default_rng(SEED)
    never = Run(tmp_path / "never", options, pruned=pruned)
    never.start()
    wanted = never.end()
    kills: Counter[str] = Counter()
    left: Counter[str] = Counter()
    runs = [Run(tmp_path / "run-0", options, pruned=pruned)]
    runs[-1].start()
    while kills.total() < most:
        run, moment = runs[-1], str(rng.choice(MOMENTS, p=SHARES))
        if run.kill(moment, rng):
            kills[moment] += 1
            left.update(run.left_half())
        else:
            assert run.end() == wanted, f"seed {SEED}, starts {run.starts}"
            runs.append(Run(tmp_path / f"run-{len(runs)}", options, pruned=pruned))
        runs[-1].start(str(rng.choice(tiers)))
    assert runs[-1].end() == wanted, f"seed {SEED}, starts {runs[-1].starts}"
    print(f"seed {SEED}: {len(runs)} runs, kills {dict(kills)}, left half {dict(left)}")
    if most > 2:
        assert left["snapshot"] > 0
        assert left["versions"] > 0
    return wanted[1]
