"""Keeps torchrun's agent running: starts a new one when the ranks of the last one have failed.

torchrun can restart ranks by itself, but not when they are spread over pods. Each of its agents
counts its own restarts, and ranks meet under that number: a pod that was replaced counts from 0 and
never meets the others. The store where ranks meet keeps the addresses of the last attempt. And an
agent that loses the one that hosts the rendezvous gives up. So here an agent starts its ranks once;
when they end too early it ends with them, and the next one, a new process, meets the others anew.

The supervisor is the process that a pod's signals reach, whatever the agent is doing: torchrun
itself ignores SIGTERM as process 1 of a container until its ranks have started.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from embertide._common.reporting import fail
from embertide._common.terminal import say
from embertide.trainer.sync import verdict

_SIGNALLED = 128
"""Exit code of a process that a signal ended, as shells give it: this and the signal's number."""
_STOPPED = _SIGNALLED + signal.SIGTERM
_CONFIGURATION = 2
_MAX_AGAIN = 8  # starts that ranks asked for: two for a plan, and what kills repeat of them
# Restarts are counted anew after ranks that lasted so long: the limit is there to end a run that
# fails each time it starts, not one that loses a machine once a month.
_SETTLED_S = 600.0


class Supervisor:
    """Runs one agent after the other. Used by the main thread, once.

    Args:
        command: Starts an agent, which ends when its ranks have.
        restarts: Most restarts before ranks have lasted for ten minutes.
        of_many: Whether this is one of several pods. If so, ranks that stopped although nobody told
            this pod to stop were stopped by another pod, which is being moved: start again.
    """

    def __init__(self, command: Sequence[str], *, restarts: int, of_many: bool) -> None:
        """Start nothing yet."""
        self._command = command
        self._restarts = restarts
        self._of_many = of_many
        self._verdict = Path()
        self._told: signal.Signals | None = None
        self._agent: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Run agents until one need not be followed; return the exit code for this process.

        0: all events are learned. 2: a configuration error, which no restart repairs. 143: told to
        stop; there is a checkpoint. Others: what no restart repairs either, which is said here once
        for all ranks; or the ranks failed more often than is allowed.
        """
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {each: signal.signal(each, self._tell) for each in signals}
        try:
            with tempfile.TemporaryDirectory(prefix="embertide-") as folder:
                self._verdict = Path(folder) / "verdict"
                return self._run()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _run(self) -> int:
        left, again = self._restarts, 0
        while True:
            began = time.monotonic()
            code = self._run_agent()
            lasted_s = time.monotonic() - began
            if (found := verdict.read(self._verdict)) is not None:
                failure, as_json = found
                fail(failure.message, failure.status, as_json=as_json)
                return failure.status
            if self._told is not None or code in (0, _CONFIGURATION):
                return code
            if code == verdict.AGAIN and again < _MAX_AGAIN:
                again += 1
                say("the ranks start again, as they asked for", err=True)
                continue
            if code == _STOPPED:
                if not self._of_many:
                    return code
                say("another pod was told to stop; starting again", err=True)
                continue
            if lasted_s >= _SETTLED_S:
                left = self._restarts
            if left == 0:
                return code
            left -= 1
            say(
                f"the ranks failed ({code}) after {lasted_s:.0f} s; starting again, "
                f"{left} of {self._restarts} restarts left",
                err=True,
            )

    def _run_agent(self) -> int:
        # The agent has a session of its own, so that Ctrl-C in a terminal reaches us alone. If we
        # are killed, it is killed, and its ranks with it: told to stop, they would publish one more
        # version, beside those of a command that is started in our place.
        self._agent = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *self._command],
            start_new_session=True,
            env=os.environ | {verdict.ENVIRONMENT: str(self._verdict)},
        )
        if self._told is not None:  # before there was an agent to tell
            self._agent.send_signal(self._told)
        code = self._agent.wait()
        if os.getpid() == 1:  # orphans are ours to bury
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        return code if code >= 0 else _SIGNALLED - code

    def _tell(self, number: int, _: FrameType | None) -> None:
        self._told = signal.Signals(number)
        if self._agent is not None:
            self._agent.send_signal(number)


def supervise(arguments: Sequence[str], *, restarts: int) -> int:
    """Run torchrun with a command line, less `--max-restarts`; return the exit code."""
    command = [sys.executable, "-m", "embertide.trainer.sync.agent", *arguments]
    of_many = "JOB_COMPLETION_INDEX" in os.environ
    return Supervisor(command, restarts=restarts, of_many=of_many).run()
