"""`--plan auto`: a run measures its own steps, searches for a plan, and tries what it finds.

    steps as they are --> profile --> search --> ranks end at a version with a checkpoint, and start
    again with the plan --> steps with the plan --> kept, or refused and ended once more

The first rank decides, and all ranks hear of it at versions with a checkpoint, where each of them
could have been killed as well: what follows is what follows a kill, so nothing is lost and each
event counts once. Owners alone are searched, which change no bit of what is learned
(docs/design/0036-auto-plan.md).
"""

import contextlib
import dataclasses
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run import plan_record
from embertide.trainer.run.plan_record import PlanRecord
from embertide.trainer.run.step_profile import (
    MIN_BATCHES,
    check_run,
    hot_rows_of,
    machine,
    measure,
)
from embertide.trainer.sync import plan
from embertide.trainer.sync.channel import Channel
from embertide.trainer.sync.placing.profile import write
from embertide.trainer.sync.plan import Ownership
from embertide.trainer.sync.ranks import Ranks

log = logging.getLogger(__name__)

_KEPT = 8  # batches that a profile is measured by


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AutoPlan:
    """How a run looks for a plan.

    Attributes:
        is_supervised: Whether something starts ranks again that end with `verdict.AGAIN`.
        warm_up: Steps of a start that are not measured.
        steps: Steps that are, before and with a plan.
        search_s: CPU time of a search, on one core, in a process of its own.
        min_gain: Part of a step that a plan has to save by prediction, to be tried.
    """

    is_supervised: bool
    warm_up: int = 20
    steps: int = 40
    search_s: float = 5.0
    min_gain: float = 0.05

    def __post_init__(self) -> None:
        """Refuse what measures nothing."""
        if self.steps < MIN_BATCHES or self.warm_up < 0 or not 0 < self.search_s <= 600:
            raise ValueError(f"{self}: give {MIN_BATCHES} steps or more, and 0 to 600 s of search")


class AutoPlanner:
    """The search for a plan of one start of a run. All ranks make the same calls, in one thread.

    Leaving its context ends a search that is under way.

    Attributes:
        record: How far it is, the same on all ranks but for times.
        owners: Who owns which bucket in this start; None: as without a plan.
        total_events: Events of the stream, where its end is known; the first rank's.
    """

    def __init__(
        self,
        run: RunConfig,
        publication: Publication,
        options: AutoPlan,
        *,
        ranks: Ranks,
        channel: Channel,
    ) -> None:
        """Go on by what the folder says."""
        self._run, self._publication, self._options = run, publication, options
        self._ranks, self._channel = ranks, channel
        self._took_s: list[float] = []
        self._steps = 0
        self._batches: deque[Batch] = deque(maxlen=_KEPT)
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the search
        self._search: subprocess.Popen[bytes] | None = None
        self._starting_s = 0.0  # from the process to its first step
        self.total_events: int | None = None
        found, reason = PlanRecord(), ""
        with channel.together():
            if ranks.first:
                where = machine()
                found, reason = plan_record.read(publication.path, run.model, ranks.size, where)
        self.record = PlanRecord(**channel.gather(dataclasses.asdict(found))[0])
        if reason:
            self._say(
                "the run looks for a plan anew, for its record counts for nothing: %s", reason
            )
        self.owners: Ownership | None = self.record.owners(run.model)
        self._is_planned = self.owners is not None
        # Rows are hot from the first version of a start on.
        hot_rows = hot_rows_of(run, self.owners)
        self._waits_for_hot_rows = hot_rows > 0 and ranks.size > 1
        self._owes = False  # whether the folder does not know yet what took place since
        if self.record.stage == "profile" and (why := self._why_not()):
            # Not for the folder: another start may differ in that.
            self._change(stage="none", why=why)
            self._say("no plan: %s", why)

    def __enter__(self) -> Self:
        """Begin nothing: a search comes later."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End a search."""
        if self._search is not None:
            self._search.kill()
            self._search.wait()
            self._search = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _why_not(self) -> str:
        """Return why this run gets no plan whatever its steps take; empty: nothing is known."""
        run = self._run
        if self._ranks.size == 1:
            return "one rank owns all rows"
        if not self._options.is_supervised:
            return "nothing starts the ranks again: start them with --nproc, or as kubectl does"
        if run.prune is not None:
            return "the run prunes, and each rank remembers of its own rows what it pruned"
        if run.ssd_budget_bytes:
            return "rows lie on an SSD, whose steps cannot be measured yet"
        try:
            check_run(run)
        except ConfigurationError as error:
            return str(error)
        return ""

    # --- steps ------------------------------------------------------------------------------------

    def step(self, batch: Batch, took_s: float) -> None:
        """Take note of a step, if it was of a whole batch."""
        if not self.record.is_open or len(batch) < self._run.batch_size:
            return
        if self._steps == 0:
            self._starting_s = _age_s()
            if self.record.stage == "trial" and not self.record.stop_s:
                self._change(stop_s=max(0.0, time.time() - self.record.stopped_at_s))
                self._owes = True
        self._steps += 1
        if self.record.stage == "profile":
            self._batches.append(batch)
        if (
            self._steps > self._options.warm_up
            and self.record.stage != "search"
            and not self._waits_for_hot_rows
        ):
            self._took_s.append(took_s)

    def look(self, finish: Callable[[], None], owners: Ownership) -> None:
        """Measure and decide what there is to decide, between two batches.

        Args:
            finish: Learns all batches that wait.
            owners: Who owns what in this start.

        Raises:
            RankLostError: A rank is gone.
        """
        if self._owes:
            self._write()
        if self.record.stage not in ("profile", "trial") or len(self._took_s) < self._options.steps:
            return
        finish()
        step_s = max(self._channel.gather(statistics.median(self._took_s)))
        if self.record.stage == "profile":
            self._profile(step_s, owners)
        else:
            self._judge(step_s)

    def _profile(self, step_s: float, owners: Ownership) -> None:
        """Measure the parts of a step, and have the first rank search."""
        began = time.monotonic()
        # Its rows are its own, so that nothing of the run's changes.
        run = dataclasses.replace(self._run, hold_bytes=0)
        with torch.random.fork_rng(devices=[]):
            profile = measure(run, list(self._batches), self._ranks, owners=owners, step_s=step_s)
        self._batches.clear()
        took_s = time.monotonic() - began
        self._change(stage="search", default_s=step_s, profile_s=took_s)
        self._say(
            "a step takes %.1f ms; its parts were measured in %.1f s, and a plan is looked for",
            1e3 * step_s,
            took_s,
        )
        with self._channel.together():
            if self._ranks.first:
                self._folder = tempfile.TemporaryDirectory(prefix="embertide-plan-")
                folder = Path(self._folder.name)
                write(profile, folder / "profile.json")
                now = dataclasses.replace(owners, hot_rows=hot_rows_of(run, owners))
                names = [table.name for table in run.model.tables]
                (folder / "now.json").write_text(plan.text_for(names, now), encoding="utf-8")
                self._search = self._started(folder)

    def _started(self, folder: Path) -> "subprocess.Popen[bytes]":
        """Start a search by the files of a folder; it ends with this process."""
        words = [str(folder / "profile.json"), str(self._ranks.size)]
        words += ["--plan", str(folder / "now.json"), "--output", str(folder / "plan.json")]
        words += ["--seconds", str(self._options.search_s), "--json"]
        command = [sys.executable, "-m", "embertide.trainer", "plan-search", *words]
        with (folder / "said").open("wb") as said, (folder / "failed").open("wb") as failed:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command], stdout=said, stderr=failed
            )

    def _judge(self, step_s: float) -> None:
        """Keep a plan or refuse it, by what its steps take."""
        self._change(measured_s=step_s)
        default_s = self.record.default_s
        words = f"a step takes {1e3 * step_s:.1f} ms with it, and took {1e3 * default_s:.1f} ms"
        self._decide("kept" if step_s <= default_s else "refused", words)

    # --- versions with a checkpoint ---------------------------------------------------------------

    def ends(self, events: int, is_checkpointed: Callable[[], bool]) -> bool:
        """Return whether all ranks are to end here, at a version that has a checkpoint.

        Args:
            events: Events learned up to here.
            is_checkpointed: Waits for the checkpoint, and says whether it is there; all ranks call
                it together.

        Raises:
            OSError: The record cannot be written.
            RankLostError: A rank is gone.
        """
        self._waits_for_hot_rows = False
        if self.record.stage == "search":
            found: dict[str, Any] = {}
            with self._channel.together():
                if self._ranks.first:
                    found = self._found(events)
            found = self._channel.gather(found)[0]
            if found.get("stage") == "none":
                self._change(
                    **{name: found[name] for name in found if name not in ("stage", "why")}
                )
                self._decide("none", found["why"])
            elif found and is_checkpointed():
                self._change(**found, stopped_at_s=time.time())
                self._write()
                self._say("the ranks start again with a plan: %s", self.record.why)
                return True
            return False
        if self.record.stage == "refused" and self._is_planned and is_checkpointed():
            self._say("the ranks start again without the plan: %s", self.record.why)
            return True
        return False

    def _found(self, events: int) -> dict[str, Any]:
        """Return what the search has come to, as fields of the record; empty: nothing yet."""
        assert self._search is not None
        assert self._folder is not None
        code = self._search.poll()
        if code is None:
            return {}
        folder = Path(self._folder.name)
        if code:
            words = (folder / "failed").read_text(encoding="utf-8", errors="replace")
            last = words.strip().splitlines()[-1:] or [f"it ended with {code}"]
            return {"stage": "none", "why": f"the search failed: {last[0][:500]}"}
        said = json.loads((folder / "said").read_text(encoding="utf-8"))
        now_s, then_s = float(said["usual_s"]), float(said["step_s"])
        saved = 1 - then_s / now_s
        figures = {"searched": int(said["evaluations"]), "predicted_s": then_s}
        words = (
            f"{said['evaluations']:,} plans were timed; the best is predicted to take"
            f" {1e3 * then_s:.1f} ms in place of {1e3 * now_s:.1f} ms ({saved:.0%} saved)"
        )
        if saved < self._options.min_gain:
            few = f"{words}, and less than {self._options.min_gain:.0%} is no reason to start again"
            return {"stage": "none", **figures, "why": few}
        if self.total_events is not None:
            left = max(0, self.total_events - events) / self._run.batch_size
            if left * (now_s - then_s) < self._starting_s:
                few = (
                    f"{words}, which saves {left * (now_s - then_s):.0f} s of what is left, and a"
                    f" start takes {self._starting_s:.0f} s"
                )
                return {"stage": "none", **figures, "why": few}
        text = (folder / "plan.json").read_text(encoding="utf-8")
        return {"stage": "trial", "plan": text, **figures, "why": words}

    # --- the record -------------------------------------------------------------------------------

    def _say(self, words: str, *values: object) -> None:
        """Log it once for all ranks."""
        if self._ranks.first:
            log.warning(words, *values)

    def _change(self, **fields: Any) -> None:
        self.record = dataclasses.replace(self.record, **fields)

    def _decide(self, stage: plan_record.Stage, why: str) -> None:
        self._change(stage=stage, why=why)
        words = {"none": "no plan", "kept": "the plan is kept", "refused": "the plan is refused"}
        self._say("%s: %s", words[stage], why)
        self._write()

    def _write(self) -> None:
        self._owes = False
        with self._channel.together():
            if self._ranks.first:
                self.record.write(self._publication.path)


def _age_s() -> float:
    """Return how long ago this process began; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = int(
            Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
        )
        up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return up_s - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0
