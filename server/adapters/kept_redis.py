"""A state store of our own that is started again when it ends, once its disk has room.

A Redis that has each write on the disk before it answers ends at the first one that the disk
refuses. It has then promised nothing that it does not have, so it goes on from its file.
"""

import logging
import threading
import time

from embertide._common.background import BackgroundTask
from embertide._common.room import RoomWatch, no_room
from embertide.server.adapters.kept_server import Restarts
from embertide.server.adapters.process import ProcessError, Stopped, how_ended
from embertide.server.adapters.redis import RedisError, RedisOptions, RedisServer

_LOOK_S = 0.25
_LONGEST_PAUSE_S = 2.0  # between looks at a disk without room
_LAST_PAUSE_S = 30.0  # from one start to the next, of a server that ends again and again
_log = logging.getLogger(__name__)


class KeptRedis(Stopped):
    """A redis-server and the thread that watches it. A context manager: leaving it stops both.

    The kernel ends a server whose starting thread has ended; this one lasts until `stop`.

    Attributes:
        task: The thread, whose health says why the server is away.
        restarts: Times that it was started again.
    """

    def __init__(self, options: RedisOptions) -> None:
        """Start a server and wait until it answers. Requires: it keeps its state in a folder.

        Raises:
            RedisError: It is not installed, ended, or its folder is not this user's alone.
            ProcessError: Another server listens at the socket.
        """
        assert options.append_only is not None
        self._folder = options.append_only
        self._server = RedisServer(options)
        self._began_s = time.monotonic()
        self._due_s: float | None = None  # of the next start; None: it runs
        self._restarts = Restarts()
        self._room = RoomWatch(self._folder)
        self.restarts = 0
        self.task = BackgroundTask(
            "state-store", self._round, expected=(ProcessError,), pause_s_max=_LONGEST_PAUSE_S
        )
        self.task.start()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return self._server.url

    def why_away(self) -> str:
        """Return why it is away and what to do, one line; empty: as far as is known it runs."""
        health = self.task.health()
        return "" if health.ok else health.error

    def _round(self, stop: threading.Event) -> float:
        if self._server.alive():
            return _LOOK_S
        now_s = time.monotonic()
        if self._due_s is None:
            self._room.full()  # as far as anybody knows: where there is room, it is tried
            pause_s = self._restarts.pause_s(now_s - self._began_s)
            self._due_s = now_s + (_LAST_PAUSE_S if pause_s is None else pause_s)
            _log.error(
                "the state store ended by %s; see %s",
                how_ended(self._server.process.code or 0),
                self._server.former_log,
            )
        try:
            self._room.check()
        except OSError as error:
            raise RedisError(
                f"{no_room(self._folder, error)}: free some, and the state store starts again"
            ) from error
        if now_s < self._due_s:
            raise RedisError(
                f"the state store has ended again; it starts in {self._due_s - now_s:.0f} s, see "
                f"{self._server.former_log}"
            )
        self._server.restart()
        self._began_s, self._due_s = time.monotonic(), None
        self.restarts += 1
        _log.warning("the state store is started again")
        return _LOOK_S

    def stop(self) -> int:
        """Stop both, and return the server's exit code."""
        self.task.stop()
        return self._server.stop()
