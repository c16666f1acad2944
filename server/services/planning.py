"""Planners at work: each answer in a process of its own, under a time limit.

A planner may compute for long, fail, or never end. Processes are forked from a server that has
imported all that a task takes, so that one begins within milliseconds and can be killed.
A large request whose planner takes no time is prepared in one too: in a thread of the control plane
it would hold up beats and ticks for seconds, as Python runs one thread at a time.
"""

import dataclasses
import logging
import multiprocessing
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Literal, cast

from embertide._common.background import describe
from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.auto import Auto
from embertide.server.core.plan.cost import costed
from embertide.server.core.plan.planner import Proposal
from embertide.server.core.reshard import PlannerTask
from embertide.server.core.tasks import Result, Task, TaskResult
from embertide.server.services.heap import collect_seldom

LIMIT_S = 20.0
# Imported once, by the server that processes are forked from: all that a task takes.
_MODULES = [
    "embertide.server.core.plan.planners",
    "embertide.server.services.planning",
    "scipy.optimize",
]
_log = logging.getLogger(__name__)

_Outcome = (
    tuple[Literal["answer"], TaskResult[object]]
    | tuple[Literal["refused"], Code, str]
    | tuple[Literal["failed"], str]
)


def _work(answers: Connection, task: Task[TaskResult[object]]) -> None:
    """Run a task, and send what comes of it."""
    collect_seldom()
    outcome: _Outcome
    try:
        outcome = "answer", task.run(_propose)
    except RefusedError as error:
        outcome = "refused", error.code, error.message
    except Exception:
        outcome = "failed", traceback.format_exc()
    answers.send(outcome)


def _propose(task: PlannerTask) -> Proposal:
    """Ask a planner, which may say how long others took, and add the costs of its plan."""
    planner = task.planner
    if isinstance(planner, Auto):
        planner = dataclasses.replace(planner, clock=time.monotonic)
    return costed(task.problem, planner.propose(task.problem))


class Planning:
    """Runs tasks, one process at a time. Safe from many threads."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        """Give each answer so many seconds."""
        self._limit_s = limit_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_MODULES)
        self._one = threading.Lock()

    def run(self, task: Task[Result]) -> Result:
        """Run a task: a quick one here and now, any other in a process of its own.

        Raises:
            RefusedError: It has no answer, it fails, or it takes too long.
        """
        if task.is_quick:
            return task.run()
        if not self._one.acquire(timeout=self._limit_s):
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED, "another planner is at work; try again in a while"
            )
        try:
            began_s = time.monotonic()
            result = self._run_in_process(task)
            _log.info("planner %s: %.2f s", task.name, time.monotonic() - began_s)
            return result
        finally:
            self._one.release()

    def _run_in_process(self, task: Task[Result]) -> Result:
        name = task.name
        receiving, sending = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(sending, task), daemon=True)
        try:
            process.start()
        except (OSError, EOFError, RuntimeError, MemoryError) as error:
            receiving.close()
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED,
                f"planner {name!r} gets no process ({describe(error)}); nothing has changed: raise "
                "the limit of processes or of memory, and try again",
            ) from error
        finally:
            sending.close()
        try:
            if not receiving.poll(self._limit_s):
                raise RefusedError(
                    Code.DEADLINE_EXCEEDED,
                    f"planner {name!r} found no answer within {self._limit_s:g} s; nothing "
                    "has changed: use another planner, or a longer --planner-limit-s",
                )
            outcome: _Outcome = receiving.recv()
        except EOFError:
            outcome = "failed", "its process ended without a word"
        finally:
            process.kill()
            process.join()
            receiving.close()
        if outcome[0] == "answer":
            return cast(Result, outcome[1])
        if outcome[0] == "refused":
            raise RefusedError(outcome[1], outcome[2])
        _log.error("planner %s failed: %s", name, outcome[1])
        raise RefusedError(
            Code.INTERNAL,
            f"planner {name!r} failed and nothing has changed; the log says why: use another",
        )
