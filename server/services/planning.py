"""Planners at work: each answer in a process of its own, under a time limit.

A planner may compute for long, fail, or never end. Processes are forked from a server that has
imported the planners and nothing else, so that one begins within milliseconds and can be killed.
"""

import dataclasses
import logging
import multiprocessing
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Literal

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.auto import Auto
from embertide.server.core.plan.cost import costed
from embertide.server.core.plan.planner import Proposal
from embertide.server.core.reshard import Posed

LIMIT_S = 20.0
_MODULE = "embertide.server.core.plan.planners"
_log = logging.getLogger(__name__)

_Outcome = (
    tuple[Literal["proposal"], Proposal]
    | tuple[Literal["refused"], Code, str]
    | tuple[Literal["failed"], str]
)


def _think(answers: Connection, posed: Posed) -> None:
    """Ask the planner, and send what comes of it."""
    outcome: _Outcome
    asked = posed.planner
    if isinstance(asked, Auto):
        asked = dataclasses.replace(asked, clock=time.monotonic)
    try:
        outcome = "proposal", costed(posed.problem, asked.propose(posed.problem))
    except RefusedError as error:
        outcome = "refused", error.code, error.message
    except Exception:
        outcome = "failed", traceback.format_exc()
    answers.send(outcome)


class Planning:
    """Asks planners, one at a time. Safe from many threads."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        """Give each answer so many seconds."""
        self._limit_s = limit_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_MODULE])
        self._one = threading.Lock()

    def propose(self, posed: Posed) -> Proposal:
        """Return a planner's answer.

        Raises:
            RefusedError: It has none, fails, or takes too long.
        """
        if not self._one.acquire(timeout=self._limit_s):
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED, "another planner is at work; try again in a while"
            )
        try:
            began_s = time.monotonic()
            proposal = self._propose(posed)
            _log.info("planner %s: %.2f s", posed.name, time.monotonic() - began_s)
            return proposal
        finally:
            self._one.release()

    def _propose(self, posed: Posed) -> Proposal:
        receiving, sending = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_think, args=(sending, posed), daemon=True)
        try:
            process.start()
            sending.close()
            if not receiving.poll(self._limit_s):
                raise RefusedError(
                    Code.DEADLINE_EXCEEDED,
                    f"planner {posed.name!r} found no answer within {self._limit_s:g} s; nothing "
                    "has changed: use another planner, or a longer --planner-limit-s",
                )
            outcome: _Outcome = receiving.recv()
        except EOFError:
            outcome = "failed", "its process ended without a word"
        finally:
            process.kill()
            process.join()
            receiving.close()
        if outcome[0] == "proposal":
            return outcome[1]
        if outcome[0] == "refused":
            raise RefusedError(outcome[1], outcome[2])
        _log.error("planner %s failed: %s", posed.name, outcome[1])
        raise RefusedError(
            Code.INTERNAL,
            f"planner {posed.name!r} failed and nothing has changed; the log says why: use another",
        )
