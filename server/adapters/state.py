"""The state store (docs/formats.md): one in Redis, and a twin in memory that behaves the same.

Each commit is one Lua script, so that the term, the epoch and all that is written agree: a writer
whose term is not the highest, or whose plan does not follow the newest, changes nothing.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from embertide.server.adapters.redis import connect
from embertide.server.core.errors import StateUnavailableError, SupersededError
from embertide.server.core.plan.layout import LaidPlan
from embertide.server.core.state import PLANS_KEPT, Saved, Writes
from embertide.v1 import control_pb2, plan_pb2

_TIMEOUT_S = 2.0

# KEYS: term, epoch, nodes, operations, decisions, settings, the plan's, the plan's that goes.
# ARGV: term, epoch before, plan or "", settings or "", number of fields of nodes, then (name,
# bytes) each, then the same for operations and decisions; empty bytes remove a field.
_COMMIT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return {'term', redis.call('GET', KEYS[1]) or 'none'}
end
if ARGV[3] ~= '' then
  local epoch = redis.call('GET', KEYS[2]) or '0'
  if epoch ~= ARGV[2] then return {'epoch', epoch} end
  redis.call('SET', KEYS[7], ARGV[3])
  redis.call('SET', KEYS[2], string.format('%.0f', tonumber(epoch) + 1))
  redis.call('DEL', KEYS[8])
end
if ARGV[4] ~= '' then redis.call('SET', KEYS[6], ARGV[4]) end
local at = 5
for which = 3, 5 do
  local last = at + 2 * tonumber(ARGV[at])
  for i = at + 1, last, 2 do
    if ARGV[i + 1] == '' then redis.call('HDEL', KEYS[which], ARGV[i])
    else redis.call('HSET', KEYS[which], ARGV[i], ARGV[i + 1]) end
  end
  at = last + 1
end
return {'done', ''}
"""


def _check_follows(plan: LaidPlan | None, epoch: int) -> None:
    if plan is not None and plan.head.epoch != epoch + 1:
        raise SupersededError(f"plan {plan.head.epoch} does not follow epoch {epoch}")


def _read(plan: bytes) -> LaidPlan:
    return LaidPlan.of(plan_pb2.Plan.FromString(plan))


class MemoryState:
    """The twin: what Redis would hold, as bytes, for tests and for nobody else's eyes."""

    def __init__(self) -> None:
        """Begin empty."""
        self._lock = threading.Lock()
        self._term = 0
        self._epoch = 0
        self._plans: dict[int, bytes] = {}
        self._nodes: dict[str, bytes] = {}
        self._operations: dict[str, bytes] = {}
        self._decisions: dict[str, bytes] = {}
        self._settings: bytes | None = None

    def take_term(self) -> int:
        """Take a term above all others."""
        with self._lock:
            self._term += 1
            return self._term

    def term(self) -> int:
        """Return the highest term taken."""
        return self._term

    def load(self) -> Saved:
        """Return what was written last."""
        with self._lock:
            plan = self._plans.get(self._epoch)
            return Saved(
                plan=_read(plan) if plan is not None else None,
                nodes={
                    name: control_pb2.RegisterNodeRequest.FromString(each)
                    for name, each in self._nodes.items()
                },
                operations={
                    id: control_pb2.OperationRecord.FromString(each)
                    for id, each in self._operations.items()
                },
                decisions={
                    id: control_pb2.Decision.FromString(each)
                    for id, each in self._decisions.items()
                },
                settings=control_pb2.DriftSettings.FromString(self._settings)
                if self._settings is not None
                else None,
            )

    def commit(self, term: int, writes: Writes) -> None:
        """Write all of it, or raise SupersededError."""
        with self._lock:
            if term != self._term:
                raise SupersededError(f"term {self._term} was taken after {term}")
            _check_follows(writes.plan, self._epoch)
            if writes.plan is not None:
                self._epoch = writes.plan.head.epoch
                self._plans[self._epoch] = writes.plan.whole().SerializeToString()
                self._plans.pop(self._epoch - PLANS_KEPT, None)
            for held, wanted in (
                (self._nodes, writes.nodes),
                (self._operations, writes.operations),
                (self._decisions, writes.decisions),
            ):
                for name, message in wanted.items():
                    if message is None:
                        held.pop(name, None)
                    else:
                        held[name] = message.SerializeToString()
            if writes.settings is not None:
                self._settings = writes.settings.SerializeToString()

    def plan(self, epoch: int) -> LaidPlan | None:
        """Return the plan of an epoch."""
        found = self._plans.get(epoch)
        return _read(found) if found is not None else None


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except redis.RedisError as error:
        raise StateUnavailableError(str(error)) from error


class RedisState:
    """The state of one model in a Redis."""

    def __init__(self, url: str, model: str) -> None:
        """Name the Redis and the model; connects when first asked.

        Raises:
            ValueError: The URL is not one of Redis.
        """
        # Asks once: a commit whose reply was lost would come again and be taken for another's.
        self._redis = connect(url, _TIMEOUT_S)
        self._prefix = f"c:{{{model}}}:"
        self._commit = self._redis.register_script(_COMMIT)

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _number(self, name: str) -> int:
        with _reached():
            value: Any = self._redis.get(self._key(name))
        return int(value or 0)

    def take_term(self) -> int:
        """Take a term above all others."""
        with _reached():
            taken: Any = self._redis.incr(self._key("term"))
        return int(taken)

    def term(self) -> int:
        """Return the highest term taken."""
        return self._number("term")

    def load(self) -> Saved:
        """Return what was written last."""
        epoch = self._number("epoch")
        with _reached():
            nodes: Any = self._redis.hgetall(self._key("nodes"))
            operations: Any = self._redis.hgetall(self._key("operations"))
            decisions: Any = self._redis.hgetall(self._key("decisions"))
            settings: Any = self._redis.get(self._key("drift-settings"))
        return Saved(
            plan=self.plan(epoch) if epoch else None,
            nodes={
                name.decode(): control_pb2.RegisterNodeRequest.FromString(each)
                for name, each in nodes.items()
            },
            operations={
                id.decode(): control_pb2.OperationRecord.FromString(each)
                for id, each in operations.items()
            },
            decisions={
                id.decode(): control_pb2.Decision.FromString(each) for id, each in decisions.items()
            },
            settings=control_pb2.DriftSettings.FromString(settings) if settings else None,
        )

    def commit(self, term: int, writes: Writes) -> None:
        """Write all of it, or raise SupersededError."""
        plan = writes.plan
        epoch = plan.head.epoch if plan is not None else 0
        arguments: list[str | bytes | int] = [
            term,
            max(epoch - 1, 0),
            plan.whole().SerializeToString() if plan is not None else b"",
            writes.settings.SerializeToString() if writes.settings is not None else b"",
        ]
        for wanted in (writes.nodes, writes.operations, writes.decisions):
            arguments.append(len(wanted))
            for name, message in wanted.items():
                # A message that was sent is never empty: its id is required.
                arguments += [name, message.SerializeToString() if message is not None else b""]
        names = ("term", "epoch", "nodes", "operations", "decisions", "drift-settings")
        plans = (f"plan:{epoch}", f"plan:{epoch - PLANS_KEPT}")
        with _reached():
            reply: Any = self._commit(
                keys=[self._key(name) for name in (*names, *plans)], args=arguments
            )
        what, value = (part.decode() for part in reply)
        if what == "term":
            raise SupersededError(f"term {value} was taken after {term}")
        if what == "epoch":
            raise SupersededError(f"plan {epoch} does not follow epoch {value}")

    def plan(self, epoch: int) -> LaidPlan | None:
        """Return the plan of an epoch."""
        with _reached():
            found: Any = self._redis.get(self._key(f"plan:{epoch}"))
        return _read(found) if found is not None else None

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
