"""Planners at work: each answer in a process of its own, under a time limit.

A planner may compute for long, fail, or never end. Processes are forked from a server that has
imported the planners and nothing else, so that one begins within milliseconds and can be killed.
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

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.auto import Auto
from embertide.server.core.plan.cost import costed
from embertide.server.core.plan.planner import Proposal
from embertide.server.core.preparation import PreparedOperation, prepare_operation
from embertide.server.core.reshard import Asked, Posed
from embertide.server.services.heap import collect_seldom

LIMIT_S = 20.0
_MODULE = "embertide.server.core.plan.planners"
_log = logging.getLogger(__name__)

_Outcome = (
    tuple[Literal["answer"], Proposal | PreparedOperation]
    | tuple[Literal["refused"], Code, str]
    | tuple[Literal["failed"], str]
)


def _work(answers: Connection, task: Posed | Asked) -> None:
    """Do a task, and send what comes of it."""
    collect_seldom()
    outcome: _Outcome
    try:
        outcome = "answer", _prepared(task) if isinstance(task, Asked) else _proposed(task)
    except RefusedError as error:
        outcome = "refused", error.code, error.message
    except Exception:
        outcome = "failed", traceback.format_exc()
    answers.send(outcome)


def _prepared(asked: Asked) -> PreparedOperation:
    return prepare_operation(asked, _proposed(asked.posed) if asked.posed.thinks else None)


def _proposed(posed: Posed) -> Proposal:
    planner = posed.planner
    if isinstance(planner, Auto):
        planner = dataclasses.replace(planner, clock=time.monotonic)
    return costed(posed.problem, planner.propose(posed.problem))


class Planning:
    """Asks planners, one at a time. Safe from many threads."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        """Give each answer so many seconds."""
        self._limit_s = limit_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_MODULE, "scipy.optimize"])
        self._one = threading.Lock()

    def prepare_operation(self, asked: Asked) -> PreparedOperation:
        """Return what a request comes to.

        Raises:
            RefusedError: It cannot be done, or what `do` raises.
        """
        if not asked.posed.thinks and not asked.posed.large:
            return prepare_operation(asked)
        return cast(PreparedOperation, self.do(asked))

    def do(self, task: Posed | Asked) -> Proposal | PreparedOperation:
        """Return a planner's answer, or what a request comes to.

        Raises:
            RefusedError: There is no answer, the planner fails, or it takes too long.
        """
        name = task.posed.name if isinstance(task, Asked) else task.name
        if not self._one.acquire(timeout=self._limit_s):
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED, "another planner is at work; try again in a while"
            )
        try:
            began_s = time.monotonic()
            answer = self._answer(task, name)
            _log.info("planner %s: %.2f s", name, time.monotonic() - began_s)
            return answer
        finally:
            self._one.release()

    def _answer(self, task: Posed | Asked, name: str) -> Proposal | PreparedOperation:
        receiving, sending = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(sending, task), daemon=True)
        try:
            process.start()
            sending.close()
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
            return outcome[1]
        if outcome[0] == "refused":
            raise RefusedError(outcome[1], outcome[2])
        _log.error("planner %s failed: %s", name, outcome[1])
        raise RefusedError(
            Code.INTERNAL,
            f"planner {name!r} failed and nothing has changed; the log says why: use another",
        )
