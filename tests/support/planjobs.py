"""Runs that look for a plan of their ranks: functions that a process of `rankpool` can import."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killing import CACHE
from rankjobs import RUNS
from rankpool import die

from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run import auto_plan, step_profile
from embertide.trainer.run.auto_plan import AutoPlan, AutoPlanner
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.plan_record import PlanRecord
from embertide.trainer.sync.plan import Ownership, text
from embertide.trainer.sync.ranks import Ranks

RUN = dataclasses.replace(RUNS["news"], batch_size=16, snapshot_every=2)
NEWS = NewsSource(NewsConfig(hours=5, views_per_hour=60, users=80, new_items_per_hour=5))
OPTIONS = AutoPlan(is_supervised=True, warm_up=1, steps=6, search_s=0.2, min_gain=-1e9)
_SLOW_S = 0.05  # of a step that is to be the slower one

_LAST = Ownership(2, tuple(np.full(1 << t.bucket_bits, 1, np.uint16) for t in RUN.model.tables))


def train(ranks: Ranks, folder: str) -> int:
    """Train to the end without a plan; return how many events were learned."""
    trainer = Trainer(RUN, Publication(Path(folder)), program_cache=CACHE, ranks=ranks)
    trainer.fit(NEWS)
    return trainer.state.events


def look(ranks: Ranks, folder: str, outcome: str, lost: int = -1, stage: str = "") -> Any:
    """Train as a start of a run that looks for a plan does; return what came of it.

    The search is a real one, and the plan that it gives is one by which the last rank owns all.

    Args:
        ranks: Those of the run.
        folder: Its folder.
        outcome: "kept" or "refused": steps of the other one are slow.
        lost: The rank that is killed; -1: none.
        stage: When: "profile", "search", "restart" before its record is there, "restarted" after,
            or "trial".
    """
    with pytest.MonkeyPatch.context() as patched:
        return _look(patched, ranks, folder, outcome, stage if ranks.rank == lost else "")


def _look(
    patched: pytest.MonkeyPatch, ranks: Ranks, folder: str, outcome: str, stage: str
) -> dict[str, Any]:
    found, ends, write = AutoPlanner._found, AutoPlanner.ends, PlanRecord.write

    def ending(self: AutoPlanner, *values: Any) -> bool:
        if stage == self.record.stage == "search":
            die()
        return ends(self, *values)

    def forced(self: AutoPlanner, events: int) -> dict[str, Any]:
        assert self._search is not None
        self._search.wait()
        result = found(self, events)
        return {**result, "plan": text(RUN.model, _LAST)} if "plan" in result else result

    def written(self: PlanRecord, where: Path) -> None:
        if self.stage == "trial" and stage == "restart":
            die()
        write(self, where)
        if self.stage == "trial" and stage == "restarted":
            die()

    def measured(*values: Any, **named: Any) -> Any:
        if stage == "profile":
            die()
        return step_profile.measure(*values, **named)

    patched.setattr(AutoPlanner, "_found", forced)
    patched.setattr(AutoPlanner, "ends", ending)
    patched.setattr(PlanRecord, "write", written)
    patched.setattr(auto_plan, "measure", measured)
    patched.setattr(auto_plan, "_age_s", lambda: 0.0)
    trainer = Trainer(
        RUN, Publication(Path(folder)), program_cache=CACHE, ranks=ranks, auto_plan=OPTIONS
    )
    planner = trainer._planner
    assert planner is not None
    is_planned = planner.owners is not None
    learn = trainer.learner.learn

    def slow(*values: Any) -> Any:
        if stage == planner.record.stage == "trial" and planner._steps > 2:
            die()
        if is_planned == (outcome == "refused"):
            time.sleep(_SLOW_S)
        return learn(*values)

    trainer.learner.learn = slow  # type: ignore[method-assign, assignment]
    trainer.fit(NEWS)
    return {
        "replans": trainer.replans,
        "events": trainer.state.events,
        "is_planned": is_planned,
        "owns": [each.tolist() for each in trainer.state.rows.ownership.owners_T],
        **planner.record.figures(),
    }


def supervised(start: Callable[[], list[Any]], most: int = 4) -> list[dict[str, Any]]:
    """Start ranks until none asks for it again, as the supervisor does; return the first's words.

    Raises:
        AssertionError: They ask more often than they may.
    """
    said: list[dict[str, Any]] = []
    for _ in range(most):
        every = start()
        assert len({each["replans"] for each in every}) == 1
        said.append(every[0])
        if not every[0]["replans"]:
            return said
    raise AssertionError(f"the ranks asked for a start {most} times: {said}")
