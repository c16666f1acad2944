"""A trainer's sign of life on the bus: who trains, where, up to what, and how it ended.

It stands beside the lineage (docs/formats.md, "Bus"), and only the holder of the newest lineage
sets it. Redis away costs the sign alone: it is set again once Redis is back.
"""

import dataclasses
import datetime
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import redis
from google.protobuf.message import DecodeError

from embertide._common.background import BackgroundTask, describe
from embertide._common.errors import OperatingError
from embertide._common.quoting import terminal_text
from embertide._common.redis_url import client_of, failure
from embertide.trainer.publish.bus import BusError, Keys, connect
from embertide.trainer.publish.lock import LockedError
from embertide.v1 import update_pb2

KEPT_S = 7 * 86_400
"""The key lives so long after it was set."""
SILENT_S = 10.0
"""A trainer whose sign is older has ended without a word, or cannot reach Redis."""
_EVERY_S = 2.0
_TIMEOUT_S = 1.0
_AGAIN_S = 1.0  # at most, after Redis was away: whoever looks waits ten seconds for a sign
_FAILED, _INTERRUPTED, _TERMINATED = 1, 130, 143

# DEL comes first: a full Redis refuses what may grow, but not in a script that has freed memory.
_SET = """
if tonumber(redis.call('GET', KEYS[1]) or '0') > tonumber(ARGV[1]) then return 0 end
redis.call('DEL', KEYS[2])
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
return 1
"""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Up to where a run is.

    Attributes:
        version: Newest that is out; 0: none.
        watermark_ms: Event time of the last event that it learned; 0: none.
        learned_ms: Wall clock of when it learned that; 0: never.
        events: That it has learned.
        unread: Messages of its source that it has not read; None: the source does not tell.
        quality: Figures of its scores of the current day; None: there are none yet.
    """

    version: int
    watermark_ms: int
    learned_ms: int
    events: int
    unread: int | None
    quality: update_pb2.LiveQuality | None = None


class Scores(Protocol):
    """Figures of scores; nan where one does not exist."""

    @property
    def events(self) -> int:
        """Their number."""

    @property
    def auc(self) -> float:
        """Area under the ROC curve."""

    @property
    def log_loss(self) -> float:
        """In nats."""

    @property
    def calibration(self) -> float:
        """Mean score over mean label."""


def live_quality(scores: Scores) -> update_pb2.LiveQuality | None:
    """Return figures as a sign carries them; None: there are no scores yet."""
    if not scores.events:
        return None
    found = update_pb2.LiveQuality(events=scores.events)
    for name in ("auc", "log_loss", "calibration"):
        if math.isfinite(value := float(getattr(scores, name))):
            setattr(found, name, value)
    return found


class SignOfLife:
    """Sets a trainer's sign while it runs. A context manager, whose end sets the last one.

    What its methods are given is read by a thread of its own.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        folder: Path,
        lineage: int,
        place: Callable[[], Place],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set the first sign.

        Args:
            url: The URL of the bus.
            model: Its name there.
            folder: That the trainer publishes to.
            lineage: The trainer's.
            place: Says where it is; called by the thread.
            stopped: Says at the end whether the run was told to stop before its events ended.
        """
        self._redis = client_of(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._keys = Keys(model)
        self._place, self._stopped = place, stopped
        self._sign = update_pb2.TrainerSign(
            host=socket.gethostname(),
            pid=os.getpid(),
            folder=str(folder.absolute()),
            lineage=lineage,
            started_ms=time.time_ns() // 1_000_000,
        )
        self._task: BackgroundTask | None = None
        self._set_if_possible()

    def _set(self) -> None:
        place = self._place()
        sign = self._sign
        sign.version, sign.events = place.version, place.events
        sign.watermark_ms, sign.learned_ms = place.watermark_ms, place.learned_ms
        if place.unread is not None:
            sign.unread = place.unread
        if place.quality is not None:
            sign.quality.CopyFrom(place.quality)
        keys = (self._keys.lineage, self._keys.trainer)
        self._redis.eval(
            _SET, len(keys), *keys, str(sign.lineage), sign.SerializeToString(), str(KEPT_S)
        )

    def _set_if_possible(self) -> None:
        try:
            self._set()
        except redis.RedisError as error:
            log.warning("the sign of life cannot be set now: %s", error)

    def _beat(self, stop: threading.Event) -> float:
        self._set()
        return _EVERY_S

    def __enter__(self) -> "SignOfLife":
        """Set it anew from now on."""
        for field in ("ended_ms", "exit_status", "error"):
            self._sign.ClearField(field)
        self._task = BackgroundTask(
            "sign of life", self._beat, expected=(redis.RedisError,), pause_s_max=_AGAIN_S
        )
        self._task.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say how the run ended."""
        if self._task is not None:
            self._task.stop()
        self._sign.ended_ms = time.time_ns() // 1_000_000
        if error is not None:
            self._sign.exit_status = _status(error)
            self._sign.error = describe(error)
        elif self._stopped():
            self._sign.exit_status = _TERMINATED
        self._set_if_possible()
        self._redis.close()


def _status(error: BaseException) -> int:
    """Return with what status a command ends that raises an error."""
    if isinstance(error, OperatingError):
        return error.exit_status
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED


def read_sign(client: Any, model: str) -> tuple[update_pb2.TrainerSign, float] | None:
    """Return a model's newest sign and its age in seconds by Redis' clock; None: there is none.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    pipe = client.pipeline(transaction=True)
    pipe.get(Keys(model).trainer)
    pipe.pttl(Keys(model).trainer)
    message, left_ms = pipe.execute()
    if message is None:
        return None
    try:
        return update_pb2.TrainerSign.FromString(message), max(0.0, KEPT_S - left_ms / 1000)
    except DecodeError:
        return None  # of a build to come


def whose(sign: update_pb2.TrainerSign) -> str:
    """Say which trainer a sign is of: where it runs, and which folder it publishes to."""
    since = datetime.datetime.fromtimestamp(sign.started_ms / 1000, datetime.UTC)
    return (
        f"pid {sign.pid} on {terminal_text(sign.host)}, folder {terminal_text(sign.folder)}, "
        f"since {since:%Y-%m-%d %H:%M:%S} UTC"
    )


def refuse_another(url: str, model: str, folder: Path) -> None:
    """Refuse to publish beside a trainer that lives and publishes the model from another folder.

    It would end that one, and nodes would get versions of two runs. Of the same folder the later
    trainer takes over.

    Raises:
        BusError: Redis cannot be reached; the message says where.
        LockedError: There is one; the message says where.
    """
    with connect(url) as client:
        try:
            found = read_sign(client, model)
        except redis.ResponseError:
            return  # a user that may not read it
        except redis.RedisError as error:
            raise BusError(failure("--bus", url, error)) from error
    if found is None:
        return
    sign, age_s = found
    lives = not sign.ended_ms and age_s <= SILENT_S
    is_ours = sign.pid == os.getpid() and sign.host == socket.gethostname()
    if lives and not is_ours and sign.folder != str(folder.absolute()):
        raise LockedError(
            f"model {model!r} is published on this bus by {whose(sign)}: give this run a model of "
            "another name, or another --bus; or stop that trainer first"
        )
