"""torchrun's agent for one meeting of the ranks; `supervisor` starts the next one.

`python -m embertide.trainer.sync.agent` takes torchrun's command line.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    DEFAULT_PORT,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from embertide._common.terminal import say
from embertide.trainer.sync.launch import run

_FAILED = 1
_BACKEND = "c10d-once"
# torch waits for an answer for ever, even from a machine that has lost its power. An answer takes
# milliseconds.
_ANSWER_S = 20.0
# While the object of a lost pod is there, its name gives an address where nothing answers, not even
# with a refusal. There torch would stay for two minutes.
_CONNECT_S = 2.0
_PAUSE_S = 0.2


def kill_children() -> None:
    """Kill the ranks: what the main thread has started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for pid in children.read_text(encoding="ascii").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _end_without_host() -> None:
    """End this process, whose main thread waits for a machine that is gone."""
    say(f"the pod of index 0 has not answered for {_ANSWER_S:.0f} s", err=True)
    kill_children()
    os._exit(_FAILED)


def wait_for_host(host: str, port: int, timeout_s: float) -> None:
    """Wait until somebody listens there; the name is looked up anew for each try.

    Raises:
        RendezvousConnectionError: Nobody does within the time.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host, port), _CONNECT_S):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise RendezvousConnectionError(f"{host}:{port}: {error}") from error
        time.sleep(_PAUSE_S)


class OneMeeting(RendezvousHandler):
    """torchrun's c10d rendezvous, which lets agents meet once.

    Where a pod is replaced before the others notice that it was gone, torchrun would have them meet
    in the store that they have, which still names the lost pod's ranks.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        """Connect to the store, which the pod of index 0 hosts."""
        if params.get_as_bool("is_host") is False:
            host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
            wait_for_host(host, port, params.get_as_int("read_timeout", 60) or 60)
        backend, store = create_backend(params)
        self._handler: Any = create_handler(store, backend, params)
        self._met = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents.

        Raises:
            RendezvousClosedError: It is the second time.
        """
        if self._met:
            raise RendezvousClosedError("a pod came anew; all meet again")
        self._met = True
        info: RendezvousInfo = self._handler.next_rendezvous()
        return info

    def get_backend(self) -> str:
        """See base class."""
        return _BACKEND

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return bool(self._handler.use_agent_store)

    def is_closed(self) -> bool:
        """See base class."""
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        """See base class."""
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return how many agents have come since; if any, one of those that met is gone.

        Our ranks may not know it, where a machine has ended without closing its connections. They
        wait for its ranks and cannot stop in order, so they are killed: the agent then ends.
        """
        timer = threading.Timer(_ANSWER_S, _end_without_host)
        timer.daemon = True
        timer.start()
        try:
            waiting = int(self._handler.num_nodes_waiting())
        finally:
            timer.cancel()
        if waiting:
            kill_children()
        return waiting

    def get_run_id(self) -> str:
        """See base class."""
        return str(self._handler.get_run_id())

    def shutdown(self) -> bool:
        """See base class."""
        return bool(self._handler.shutdown())


def main(arguments: Sequence[str]) -> int:
    """Run the agent; return the exit code of the rank that failed first."""
    rendezvous_handler_registry.register(_BACKEND, OneMeeting)
    os.environ.setdefault("PET_RDZV_BACKEND", _BACKEND)
    try:
        return run(arguments)
    except RendezvousError as error:
        say(f"the pods of this run do not meet: {error or type(error).__name__}", err=True)
        return _FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
