"""The state store (docs/formats.md): one in Redis, and a twin in memory that behaves the same.

Each commit is one Lua script, so that the term, the epoch and all that is written agree: a writer
whose term is not the highest, or whose plan does not follow the newest, changes nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis
from google.protobuf.message import Message

from embertide.server.adapters.redis import connect
from embertide.server.core.errors import StateUnavailableError, SupersededError
from embertide.server.core.plan.chunks import Part, Written, parts_of, read, written
from embertide.server.core.plan.layout import LaidPlan
from embertide.server.core.state import (
    LEASE_MS,
    PLANS_KEPT,
    Saved,
    Writes,
    is_large,
    moves_alone,
    without_moves,
)
from embertide.v1 import control_pb2, plan_pb2

_TIMEOUT_S = 2.0
_READ_AGAIN = 5  # times that a plan is read which moved on meanwhile

# KEYS: term, epoch, nodes, operations, decisions, settings, the plan's, the plan's that goes,
# moves, those of the plan's new parts, those of the parts that go.
# ARGV: term, epoch before, plan or "", settings or "", number of new parts, their bytes, number of
# fields of nodes, then (name, bytes) each, then the same for operations, decisions and moves; empty
# bytes remove a field.
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
  local new = tonumber(ARGV[5])
  for i = 1, new do redis.call('SET', KEYS[9 + i], ARGV[5 + i]) end
  for i = 10 + new, #KEYS do redis.call('DEL', KEYS[i]) end
end
if ARGV[4] ~= '' then redis.call('SET', KEYS[6], ARGV[4]) end
local at = 6 + tonumber(ARGV[5])
for _, which in ipairs({3, 4, 5, 9}) do
  local last = at + 2 * tonumber(ARGV[at])
  for i = at + 1, last, 2 do
    if ARGV[i + 1] == '' then redis.call('HDEL', KEYS[which], ARGV[i])
    else redis.call('HSET', KEYS[which], ARGV[i], ARGV[i + 1]) end
  end
  at = last + 1
end
return {'done', ''}
"""


# KEYS: term, lease. ARGV: what, term, holder, ms. The key `lease` expires by Redis' own clock, so
# that no two machines have to agree on the time.
_LEASE = """
local term = redis.call('GET', KEYS[1]) or '0'
if ARGV[1] == 'try' then
  local leader = redis.call('GET', KEYS[2])
  if leader then return {'0', leader} end
end
if ARGV[1] == 'take' or ARGV[1] == 'try' then
  term = string.format('%.0f', redis.call('INCR', KEYS[1]))
elseif term ~= ARGV[2] then
  return {term, ''}
elseif ARGV[1] == 'release' then
  redis.call('DEL', KEYS[2])
  return {term, ''}
end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return {term, ''}
"""


def _check_follows(plan: LaidPlan | None, epoch: int) -> None:
    if plan is not None and plan.head.epoch != epoch + 1:
        raise SupersededError(f"plan {plan.head.epoch} does not follow epoch {epoch}")


Fields = dict[str, bytes | None]


def _message_fields(wanted: Mapping[str, Message | None]) -> Fields:
    # A message that was sent is never empty: its id is required.
    return {
        name: each.SerializeToString() if each is not None else None
        for name, each in wanted.items()
    }


def _operation_fields(writes: Writes) -> tuple[Fields, Fields]:
    """Return the fields of `operations` and `moves` to write."""
    records: Fields = {}
    moves: Fields = {}
    for id, record in writes.operations.items():
        if record is None:
            records[id] = moves[id] = None
        elif is_large(record):
            records[id] = without_moves(record).SerializeToString()
            if id in writes.made:
                known = writes.encoded.get(id)
                moves[id] = known or moves_alone(record).SerializeToString()
        else:
            records[id] = record.SerializeToString()
    return records, moves


def _records(
    records: Mapping[str, bytes], moves: Mapping[str, bytes]
) -> dict[str, control_pb2.OperationRecord]:
    found = {}
    for id, each in records.items():
        found[id] = control_pb2.OperationRecord.FromString(moves.get(id, b""))
        found[id].MergeFromString(each)
    return found


class _Plans:
    """What a writer knows of the newest plan and of the parts that the kept ones have."""

    def __init__(self) -> None:
        self.newest: LaidPlan | None = None
        self._parts: dict[int, list[Part]] = {}

    def forget(self) -> None:
        """Know nothing, as when nobody knows whether a write was done."""
        self.newest = None
        self._parts = {}

    def know(self, plan: LaidPlan | None, head: plan_pb2.Plan | None) -> None:
        """Take in the newest plan as it was read."""
        self.forget()
        if plan is not None and head is not None:
            self.newest = plan
            self._parts[plan.epoch] = parts_of(head)

    def write(
        self, plan: LaidPlan, head_of: Callable[[int], plan_pb2.Plan | None]
    ) -> tuple[Written, list[Part]]:
        """Return what to write for the next plan, and the parts that go with the oldest one."""
        before = self.newest if self.newest and self.newest.epoch == plan.epoch - 1 else None
        new = written(plan, before, self._parts.get(plan.epoch - 1, []))
        oldest = plan.epoch - PLANS_KEPT
        for epoch in (oldest, oldest + 1):
            if epoch > 0 and epoch not in self._parts:
                head = head_of(epoch)
                self._parts[epoch] = parts_of(head) if head is not None else []
        kept = set(self._parts.get(oldest + 1, ()))
        return new, [part for part in self._parts.get(oldest, ()) if part not in kept]

    def wrote(self, plan: LaidPlan, new: Written) -> None:
        """Take in that it was written."""
        self.newest = plan
        self._parts[plan.epoch] = parts_of(new.head)
        self._parts.pop(plan.epoch - PLANS_KEPT, None)


class MemoryState:
    """The twin: what Redis would hold, as bytes, for tests and for nobody else's eyes."""

    def __init__(self) -> None:
        """Begin empty."""
        self._lock = threading.Lock()
        self._term = 0
        self._lease = (0.0, "")  # until when, and whose
        self._epoch = 0
        self._plans: dict[int, bytes] = {}
        self._nodes: dict[str, bytes] = {}
        self._operations: dict[str, bytes] = {}
        self._moves: dict[str, bytes] = {}
        self._parts: dict[Part, bytes] = {}
        self._known = _Plans()
        self._decisions: dict[str, bytes] = {}
        self._settings: bytes | None = None

    def take_term(self, holder: str = "") -> int:
        """Take a term above all others and its lease."""
        with self._lock:
            return self._take(holder)

    def _take(self, holder: str) -> int:
        self._term += 1
        self._lease = (time.monotonic() + LEASE_MS / 1000, holder)
        return self._term

    def try_term(self, holder: str) -> tuple[int, str]:
        """Take a term if nobody has a lease."""
        with self._lock:
            if time.monotonic() < self._lease[0]:
                return 0, self._lease[1]
            return self._take(holder), ""

    def renew(self, term: int, holder: str) -> bool:
        """Keep the lease of the highest term."""
        with self._lock:
            if term == self._term:
                self._lease = (time.monotonic() + LEASE_MS / 1000, holder)
            return term == self._term

    def release(self, term: int) -> None:
        """End the lease of the highest term."""
        with self._lock:
            if term == self._term:
                self._lease = (0.0, "")

    def term(self) -> int:
        """Return the highest term taken."""
        return self._term

    def load(self) -> Saved:
        """Return what was written last."""
        with self._lock:
            plan, head = self._plan(self._epoch)
            self._known.know(plan, head)
            return Saved(
                plan=plan,
                nodes={
                    name: control_pb2.RegisterNodeRequest.FromString(each)
                    for name, each in self._nodes.items()
                },
                operations=_records(self._operations, self._moves),
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
                new, gone = self._known.write(writes.plan, lambda epoch: self._plan(epoch)[1])
                self._epoch = writes.plan.epoch
                self._plans[self._epoch] = new.head.SerializeToString()
                self._plans.pop(self._epoch - PLANS_KEPT, None)
                self._parts |= new.parts
                for part in gone:
                    del self._parts[part]
                self._known.wrote(writes.plan, new)
            records, moves = _operation_fields(writes)
            for held, wanted in (
                (self._nodes, _message_fields(writes.nodes)),
                (self._operations, records),
                (self._decisions, _message_fields(writes.decisions)),
                (self._moves, moves),
            ):
                for name, message in wanted.items():
                    if message is None:
                        held.pop(name, None)
                    else:
                        held[name] = message
            if writes.settings is not None:
                self._settings = writes.settings.SerializeToString()

    def plan(self, epoch: int) -> LaidPlan | None:
        """Return the plan of an epoch."""
        return self._plan(epoch)[0]

    def _plan(self, epoch: int) -> tuple[LaidPlan | None, plan_pb2.Plan | None]:
        if epoch not in self._plans:
            return None, None
        head = plan_pb2.Plan.FromString(self._plans[epoch])
        return read(head, self._parts), head

    def part_names(self) -> set[str]:
        """Return the names of the parts that are kept."""
        return {part.name for part in self._parts}


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
        self._known = _Plans()
        self._commit = self._redis.register_script(_COMMIT)
        self._lease_script = self._redis.register_script(_LEASE)

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _number(self, name: str) -> int:
        with _reached():
            value: Any = self._redis.get(self._key(name))
        return int(value or 0)

    def take_term(self, holder: str = "") -> int:
        """Take a term above all others and its lease."""
        return int(self._lease("take", 0, holder)[0])

    def try_term(self, holder: str) -> tuple[int, str]:
        """Take a term if nobody has a lease."""
        term, leader = self._lease("try", 0, holder)
        return int(term), leader.decode()

    def renew(self, term: int, holder: str) -> bool:
        """Keep the lease of the highest term."""
        return int(self._lease("renew", term, holder)[0]) == term

    def release(self, term: int) -> None:
        """End the lease of the highest term."""
        self._lease("release", term, "")

    def _lease(self, what: str, term: int, holder: str) -> tuple[bytes, bytes]:
        """Return a term, and the holder of the lease where it is not ours."""
        with _reached():
            reply: Any = self._lease_script(
                keys=[self._key("term"), self._key("lease")], args=[what, term, holder, LEASE_MS]
            )
        return reply[0], reply[1]

    def term(self) -> int:
        """Return the highest term taken."""
        return self._number("term")

    def load(self) -> Saved:
        """Return what was written last."""
        for _ in range(_READ_AGAIN):
            epoch = self._number("epoch")
            plan, head = self._plan(epoch) if epoch else (None, None)
            if plan is not None or not epoch:
                break
        else:
            raise StateUnavailableError(f"plan {epoch} is not whole in the state Redis")
        self._known.know(plan, head)
        with _reached():
            nodes: Any = self._redis.hgetall(self._key("nodes"))
            operations: Any = self._redis.hgetall(self._key("operations"))
            moves: Any = self._redis.hgetall(self._key("moves"))
            decisions: Any = self._redis.hgetall(self._key("decisions"))
            settings: Any = self._redis.get(self._key("drift-settings"))
        return Saved(
            plan=plan,
            nodes={
                name.decode(): control_pb2.RegisterNodeRequest.FromString(each)
                for name, each in nodes.items()
            },
            operations=_records(
                {id.decode(): each for id, each in operations.items()},
                {id.decode(): each for id, each in moves.items()},
            ),
            decisions={
                id.decode(): control_pb2.Decision.FromString(each) for id, each in decisions.items()
            },
            settings=control_pb2.DriftSettings.FromString(settings) if settings else None,
        )

    def commit(self, term: int, writes: Writes) -> None:
        """Write all of it, or raise SupersededError."""
        plan = writes.plan
        epoch = plan.epoch if plan is not None else 0
        new, gone = self._known.write(plan, self._head) if plan is not None else (None, [])
        parts = new.parts if new is not None else {}
        arguments: list[str | bytes | int] = [
            term,
            max(epoch - 1, 0),
            new.head.SerializeToString() if new is not None else b"",
            writes.settings.SerializeToString() if writes.settings is not None else b"",
            len(parts),
            *parts.values(),
        ]
        records, moves = _operation_fields(writes)
        nodes, decisions = _message_fields(writes.nodes), _message_fields(writes.decisions)
        for fields in (nodes, records, decisions, moves):
            arguments.append(len(fields))
            for name, each in fields.items():
                arguments += [name, each or b""]
        names = ["term", "epoch", "nodes", "operations", "decisions", "drift-settings"]
        names += [f"plan:{epoch}", f"plan:{epoch - PLANS_KEPT}", "moves"]
        names += [f"chunk:{part.name}" for part in (*parts, *gone)]
        try:
            with _reached():
                reply: Any = self._commit(keys=[self._key(name) for name in names], args=arguments)
        except StateUnavailableError:
            self._known.forget()
            raise
        what, value = (part.decode() for part in reply)
        if what == "term":
            raise SupersededError(f"term {value} was taken after {term}")
        if what == "epoch":
            raise SupersededError(f"plan {epoch} does not follow epoch {value}")
        if plan is not None and new is not None:
            self._known.wrote(plan, new)

    def plan(self, epoch: int) -> LaidPlan | None:
        """Return the plan of an epoch."""
        return self._plan(epoch)[0]

    def _head(self, epoch: int) -> plan_pb2.Plan | None:
        with _reached():
            found: Any = self._redis.get(self._key(f"plan:{epoch}"))
        return plan_pb2.Plan.FromString(found) if found is not None else None

    def _plan(self, epoch: int) -> tuple[LaidPlan | None, plan_pb2.Plan | None]:
        """Return a plan and its head; None if it went, as a whole or in part, while we read."""
        head = self._head(epoch)
        if head is None:
            return None, None
        parts = parts_of(head)
        found: Any = []
        if parts:
            with _reached():
                found = self._redis.mget([self._key(f"chunk:{part.name}") for part in parts])
        if None in found:
            return None, None
        return read(head, dict(zip(parts, found, strict=True))), head

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
