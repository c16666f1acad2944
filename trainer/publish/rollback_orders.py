"""Orders to roll back, which the control plane writes to the bus and the trainer carries out.

The trainer has the publication's files, and the control plane has not. A trainer that takes an
order does what `embertide rollback` does beside it: it is superseded, and ends when it would
publish next.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import redis
from google.protobuf.message import DecodeError

from embertide._common.background import BackgroundTask, describe
from embertide._common.quoting import terminal_text
from embertide._common.redis_url import client_of
from embertide.trainer.errors import TrainerError
from embertide.trainer.publish.bus import Keys
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.promotion import maker
from embertide.trainer.publish.publisher import SupersededError, superseded_by_rollback
from embertide.trainer.publish.rollback import Restored, roll_back
from embertide.v1 import update_pb2

OUTCOME_KEPT_S = 7 * 86_400
"""The outcome's key lives so long."""
_EVERY_S = 2.0
_TIMEOUT_S = 1.0
# An order that is under way is carried out before the process ends, or is left behind.
_END_S = 600.0
_ERROR_MAX = 2000

# Only the trainer whose lineage is the newest takes an order, and an order is taken once.
_TAKE = """
if tonumber(redis.call('GET', KEYS[1]) or '0') ~= tonumber(ARGV[1]) then return false end
local order = redis.call('GET', KEYS[2])
if order then redis.call('DEL', KEYS[2]) end
return order
"""

log = logging.getLogger(__name__)


class RollbackOrders:
    """Carries out orders for one publication, in a thread of its own. A context manager.

    Args:
        url: The URL of the bus.
        model: Its name there.
        publication: What the trainer publishes to.
        lineage: The trainer's.
        carry_out: Restores a version, as a name says who asks for it.
    """

    def __init__(
        self,
        url: str,
        model: str,
        publication: Publication,
        lineage: int,
        carry_out: Callable[[int, str], Restored] | None = None,
    ) -> None:
        """Nothing is read yet."""
        self._redis: Any = client_of(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
        )
        self._keys, self._lineage = Keys(model), lineage
        self._carry_out = carry_out or (
            lambda version, by: roll_back(publication, version, bus=url, by=by)
        )
        self._restored = update_pb2.RollbackOutcome()
        self._task = BackgroundTask("rollback orders", self._look, expected=(redis.RedisError,))

    def _look(self, stop: threading.Event) -> float | None:
        keys = (self._keys.lineage, self._keys.rollback_order)
        message = self._redis.eval(_TAKE, len(keys), *keys, str(self._lineage))
        if message is None:
            return _EVERY_S
        try:
            order = update_pb2.RollbackOrder.FromString(message)
        except DecodeError:
            log.warning("an order on the bus is of no build that is known: left out")
            return _EVERY_S
        outcome = update_pb2.RollbackOutcome(order=order)
        self._tell(outcome)
        self._restore(order, outcome)
        outcome.ended_ms = time.time_ns() // 1_000_000
        self._tell(outcome)
        if outcome.error:
            return _EVERY_S
        self._restored = outcome
        return None  # who restores is superseded

    def _restore(
        self, order: update_pb2.RollbackOrder, outcome: update_pb2.RollbackOutcome
    ) -> None:
        who = terminal_text(order.author) or "an operator"
        by = f"{who} by {maker('trainer')}"
        log.warning("%s orders version %d to be restored", who, order.version)
        try:
            outcome.version = self._carry_out(order.version, by).version
        except TrainerError as error:
            outcome.error = str(error)[:_ERROR_MAX]
        except Exception as error:  # what it was is told to who asked
            outcome.error = describe(error)[:_ERROR_MAX]
            log.exception("version %d was not restored", order.version)
            return
        if outcome.error:
            log.warning("version %d was not restored: %s", order.version, outcome.error)
        else:
            log.warning("version %d restores version %d", outcome.version, order.version)

    def _tell(self, outcome: update_pb2.RollbackOutcome) -> None:
        with contextlib.suppress(redis.RedisError):  # the promotion record tells, too
            key = self._keys.rollback_outcome
            self._redis.set(key, outcome.SerializeToString(), ex=OUTCOME_KEPT_S)

    def __enter__(self) -> Self:
        """Look for orders from now on."""
        self._task.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let an order that is under way end.

        Raises:
            SupersededError: The trainer was superseded by an order of its own: the message says so.
        """
        self._task.stop(_END_S)
        self._redis.close()
        number, to = self._restored.version, self._restored.order.version
        if isinstance(error, SupersededError) and number:
            raise superseded_by_rollback(number, to) from error
