"""The state store (docs/formats.md): one in Redis, and a twin in memory that behaves the same.

Each commit is one Lua script, so that the term, the epoch and all that is written agree: a writer
whose term is not the highest, or whose plan does not follow the newest, changes nothing.
"""

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis
from google.protobuf.message import Message

from embertide._common.redis_url import cause_of
from embertide.server.adapters.redis import connect
from embertide.server.core.errors import (
    RefusedError,
    StateLostError,
    StateUnavailableError,
    SupersededError,
)
from embertide.server.core.plan.chunks import Part, Written, parts_of, read, written
from embertide.server.core.plan.layout import LaidPlan
from embertide.server.core.plan.names import names_of
from embertide.server.core.state import (
    LEASE_MS,
    PLANS_KEPT,
    SavedState,
    Writes,
    is_large,
    moves_alone,
    without_moves,
)
from embertide.v1 import control_pb2, plan_pb2

_log = logging.getLogger(__name__)
_TIMEOUT_S = 2.0
_READ_AGAIN = 5  # times that a plan is read which moved on meanwhile

# KEYS: term, epoch, nodes, operations, decisions, settings, the plan's, the plan's that goes,
# moves, the store's id, events, those of the plan's new parts, those of the parts that go.
# ARGV: term, epoch before ("any": it may be any), plan or "", settings or "", the store's id, the
# plan's epoch, number of new parts, their bytes, number of fields of nodes, then (name, bytes)
# each, then the same for operations, decisions, moves and events; empty bytes remove a field.
_COMMIT = """
local id = redis.call('GET', KEYS[10])
if id ~= ARGV[5] then return {'id', id or ''} end
local term = redis.call('GET', KEYS[1]) or '0'
if term ~= ARGV[1] then return {'term', term} end
if ARGV[3] ~= '' then
  local epoch = redis.call('GET', KEYS[2]) or '0'
  if ARGV[2] ~= 'any' and epoch ~= ARGV[2] then return {'epoch', epoch} end
  redis.call('SET', KEYS[7], ARGV[3])
  redis.call('SET', KEYS[2], ARGV[6])
  redis.call('DEL', KEYS[8])
  local new = tonumber(ARGV[7])
  for i = 1, new do redis.call('SET', KEYS[11 + i], ARGV[7 + i]) end
  for i = 12 + new, #KEYS do redis.call('DEL', KEYS[i]) end
end
if ARGV[4] ~= '' then redis.call('SET', KEYS[6], ARGV[4]) end
local at = 8 + tonumber(ARGV[7])
for _, which in ipairs({3, 4, 5, 9, 11}) do
  local last = at + 2 * tonumber(ARGV[at])
  for i = at + 1, last, 2 do
    if ARGV[i + 1] == '' then redis.call('HDEL', KEYS[which], ARGV[i])
    else redis.call('HSET', KEYS[which], ARGV[i], ARGV[i + 1]) end
  end
  at = last + 1
end
return {'done', ''}
"""


# KEYS: term, lease, the store's id. ARGV: what, term, holder, ms, a new id, the id as it was when
# the term was taken. The key `lease` expires by Redis' own clock, so that no two machines have to
# agree on the time. `restore` takes a term in a store that lost its keys, unless another has done
# so since: then the store has an id again. It may come again with the same new id, if what was to
# be written then was not.
_LEASE = """
local term = redis.call('GET', KEYS[1]) or '0'
local id = redis.call('GET', KEYS[3])
if ARGV[1] == 'try' then
  local leader = redis.call('GET', KEYS[2])
  if leader then return {'0', leader, ''} end
end
if ARGV[1] == 'take' or ARGV[1] == 'try' then
  term = string.format('%.0f', redis.call('INCR', KEYS[1]))
elseif ARGV[1] == 'restore' then
  local leader = redis.call('GET', KEYS[2])
  local ours = id == ARGV[5] and (not leader or leader == ARGV[3])
  if id and not ours and (id ~= ARGV[6] or term ~= ARGV[2]) then return {term, '', ''} end
  term = string.format('%.0f', math.max(tonumber(term), tonumber(ARGV[2])) + 1)
  redis.call('SET', KEYS[1], term)
elseif id ~= ARGV[6] or term ~= ARGV[2] then
  return {term, '', id or ''}
elseif ARGV[1] == 'release' then
  redis.call('DEL', KEYS[2])
  return {term, '', id}
end
if not id then
  id = ARGV[5]
  redis.call('SET', KEYS[3], id)
end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return {term, '', id}
"""


def _check(ours: int, our_id: str, term: int, id: str) -> None:
    """Prove that a term of ours, taken in a store of an id, is the highest in that store.

    Raises:
        SupersededError: Another was taken.
        StateLostError: It is another store, or one without an id: it lost its keys.
    """
    if id != our_id:
        raise StateLostError(
            f"another control plane has begun anew in it, with term {term}" if id else "all of them"
        )
    if term > ours:
        raise SupersededError(f"term {term} was taken after {ours}")
    if term < ours:
        raise StateLostError(f"its term is {term}, and was {ours}")


def _check_follows(plan: LaidPlan, epoch: int) -> None:
    if plan.head.epoch != epoch + 1:
        # Nobody but us has written since our term, and we wrote no such epoch.
        raise StateLostError(f"its plan is {epoch}, and was {plan.head.epoch - 1}")


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


def _saved(saved: SavedState, plan_of: Callable[[int], LaidPlan | None]) -> SavedState:
    """Name the nodes of records that a build before wrote, as far as their plans are kept.

    While an operation is at work, no position changes: the newest plan does for it as well.
    """
    names: dict[int, list[str]] = {}
    oldest = saved.plan.epoch - PLANS_KEPT if saved.plan is not None else 0
    for record in saved.operations.values():
        epoch = record.operation.base_epoch or record.request.target.base_epoch
        if record.nodes or not epoch:
            continue
        if epoch > oldest and epoch not in names:
            plan = plan_of(epoch)
            names[epoch] = names_of(plan.head.topology) if plan is not None else []
        record.nodes.extend(names.get(epoch, ()))
        at_work = record.operation.base_epoch and not record.operation.ended_ms
        if at_work and not record.nodes and saved.plan is not None:
            record.nodes.extend(names_of(saved.plan.head.topology))
    return saved


class _Plans:
    """A writer's knowledge of the newest plan and of the parts that the kept plans have."""

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
        self._ids = itertools.count(1)
        self._terms: dict[int, str] = {}  # id of the store in which each term was taken last
        # Id and term of the restoration by whoever had a term: it may come again.
        self._restored: dict[int, tuple[str, int]] = {}
        self.lose()

    def lose(self) -> None:
        """Lose all keys, as a Redis that is flushed."""
        self._id = ""
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
        self._events: dict[str, bytes] = {}
        self._settings: bytes | None = None

    def take_term(self, holder: str = "") -> int:
        """Take a term above all others and its lease."""
        with self._lock:
            return self._take(holder)

    def _take(self, holder: str) -> int:
        # Above all that anybody took, also before a loss: several control planes share this
        # object, and their terms alone tell them apart.
        self._term = max(self._terms, default=0) + 1
        self._id = self._id or f"store-{next(self._ids)}"
        self._terms[self._term] = self._id
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
            try:
                self.check(term)
            except SupersededError:
                return False
            self._lease = (time.monotonic() + LEASE_MS / 1000, holder)
            return True

    def release(self, term: int) -> None:
        """End the lease of the highest term."""
        with self._lock:
            if term == self._term:
                self._lease = (0.0, "")

    def term(self) -> int:
        """Return the highest term taken."""
        return self._term

    def check(self, term: int) -> None:
        """Prove that a term is the highest, of this store."""
        _check(term, self._terms[term], self._term, self._id)

    def restore(self, term: int, holder: str, writes: Writes) -> int:
        """Write all of it into a store that lost its keys."""
        with self._lock:
            now = self._id, self._term
            if self._id and now not in ((self._terms[term], term), self._restored.get(term)):
                raise SupersededError(f"term {self._term} was taken in a store without our keys")
            new = self._take(holder)
            self._restored[term] = self._id, new
        self.commit(new, writes)
        return new

    def load(self, term: int = 0) -> SavedState:
        """Return what was written last."""
        with self._lock:
            if term and self._id != self._terms[term]:
                _check(term, self._terms[term], self._term, self._id)
            plan, head = self._plan(self._epoch)
            self._known.know(plan, head)
            return _saved(
                SavedState(
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
                    events={
                        number: control_pb2.FleetEvent.FromString(each)
                        for number, each in self._events.items()
                    },
                ),
                self.plan,
            )

    def commit(self, term: int, writes: Writes) -> None:
        """Write all of it, or raise SupersededError or StateLostError."""
        with self._lock:
            self.check(term)
            if writes.plan is not None:
                if not writes.jumps:
                    _check_follows(writes.plan, self._epoch)
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
                (self._events, _message_fields(writes.events)),
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


class RedisState:
    """The state of one model in a Redis."""

    def __init__(self, url: str, model: str, why_away: Callable[[], str] = str) -> None:
        """Name the Redis and the model; connects when first asked.

        Args:
            url: The URL of the Redis.
            model: The model that the state is of.
            why_away: Says why a Redis of our own is away, and what to do; empty: nothing is known.

        Raises:
            ValueError: The URL is not one of Redis.
        """
        # Asks once: a commit whose reply was lost would come again and be taken for another's.
        self._redis = connect(url, _TIMEOUT_S)
        self._why_away = why_away
        self._prefix = f"c:{{{model}}}:"
        self._id = ""  # of the store, as it was when we took a term last
        self._next_id = uuid.uuid4().hex  # that we give to one that has none
        self._known = _Plans()
        self._commit = self._redis.register_script(_COMMIT)
        self._lease_script = self._redis.register_script(_LEASE)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as error:
            why = self._why_away() if isinstance(error, redis.ConnectionError) else ""
            cause = f"is away: {why}" if why else cause_of("--state", error)
            raise StateUnavailableError(f"state Redis {cause}") from error

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _number(self, name: str) -> int:
        with self._reached():
            value: Any = self._redis.get(self._key(name))
        return int(value or 0)

    def take_term(self, holder: str = "") -> int:
        """Take a term above all others and its lease."""
        term, _, self._id = self._lease("take", 0, holder)
        return term

    def try_term(self, holder: str) -> tuple[int, str]:
        """Take a term if nobody has a lease."""
        term, leader, id = self._lease("try", 0, holder)
        if term:
            self._id = id
        return term, leader

    def renew(self, term: int, holder: str) -> bool:
        """Keep the lease of the highest term."""
        highest, _, id = self._lease("renew", term, holder)
        try:
            _check(term, self._id, highest, id)
        except SupersededError:
            return False
        return True

    def release(self, term: int) -> None:
        """End the lease of the highest term."""
        self._lease("release", term, "")

    def _lease(self, what: str, term: int, holder: str) -> tuple[int, str, str]:
        """Return a term, the holder of the lease where it is not ours, and the store's id."""
        with self._reached():
            reply: Any = self._lease_script(
                keys=[self._key("term"), self._key("lease"), self._key("id")],
                args=[what, term, holder, LEASE_MS, self._next_id, self._id],
            )
        return int(reply[0]), reply[1].decode(), reply[2].decode()

    def term(self) -> int:
        """Return the highest term taken."""
        return self._number("term")

    def check(self, term: int) -> None:
        """Prove that a term is the highest, of this store."""
        with self._reached():
            found: Any = self._redis.mget([self._key("term"), self._key("id")])
        _check(term, self._id, int(found[0] or 0), (found[1] or b"").decode())

    def restore(self, term: int, holder: str, writes: Writes) -> int:
        """Write all of it into a store that lost its keys."""
        new, _, id = self._lease("restore", term, holder)
        if not id:
            raise SupersededError(f"term {new} was taken in a store without our keys")
        before, self._id = self._id, id
        self._known.forget()
        try:
            self.commit(new, writes)
        except RefusedError:
            self._id = before  # nobody knows whether it was done: it is done again
            raise
        self._next_id = uuid.uuid4().hex
        return new

    def load(self, term: int = 0) -> SavedState:
        """Return what was written last."""
        plan, head = self._newest(self._id if term else "")
        self._known.know(plan, head)
        with self._reached():
            nodes: Any = self._redis.hgetall(self._key("nodes"))
            operations: Any = self._redis.hgetall(self._key("operations"))
            moves: Any = self._redis.hgetall(self._key("moves"))
            decisions: Any = self._redis.hgetall(self._key("decisions"))
            events: Any = self._redis.hgetall(self._key("events"))
            settings: Any = self._redis.get(self._key("drift-settings"))
        saved = SavedState(
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
            events={
                number.decode(): control_pb2.FleetEvent.FromString(each)
                for number, each in events.items()
            },
        )
        return _saved(saved, self.plan)

    def _newest(self, our_id: str) -> tuple[LaidPlan | None, plan_pb2.Plan | None]:
        """Return the newest plan and its head; None: none was made, or the store lost it.

        Raises:
            StateLostError: The store is not the one in which we took a term.
        """
        last = None
        for _ in range(_READ_AGAIN):
            with self._reached():
                found: Any = self._redis.mget([self._key("epoch"), self._key("id")])
            if our_id and (id := (found[1] or b"").decode()) != our_id:
                raise StateLostError("another has begun anew in it" if id else "all of them")
            epoch = int(found[0] or 0)
            plan, head = self._plan(epoch) if epoch else (None, None)
            if plan is not None or not epoch:
                return plan, head
            if epoch == last:  # it did not move on while we read: it is not there
                _log.error("plan %d is not in the state Redis any more, or not whole", epoch)
                return None, None
            last = epoch
        raise StateUnavailableError(f"plan {epoch} moves on whenever it is read")

    def commit(self, term: int, writes: Writes) -> None:
        """Write all of it, or raise SupersededError or StateLostError."""
        plan = writes.plan
        epoch = plan.epoch if plan is not None else 0
        new, gone = self._known.write(plan, self._head) if plan is not None else (None, [])
        parts = new.parts if new is not None else {}
        arguments: list[str | bytes | int] = [
            term,
            "any" if writes.jumps else max(epoch - 1, 0),
            new.head.SerializeToString() if new is not None else b"",
            writes.settings.SerializeToString() if writes.settings is not None else b"",
            self._id,
            epoch,
            len(parts),
            *parts.values(),
        ]
        records, moves = _operation_fields(writes)
        nodes, decisions = _message_fields(writes.nodes), _message_fields(writes.decisions)
        events = _message_fields(writes.events)
        for fields in (nodes, records, decisions, moves, events):
            arguments.append(len(fields))
            for name, each in fields.items():
                arguments += [name, each or b""]
        names = ["term", "epoch", "nodes", "operations", "decisions", "drift-settings"]
        names += [f"plan:{epoch}", f"plan:{epoch - PLANS_KEPT}", "moves", "id", "events"]
        names += [f"chunk:{part.name}" for part in (*parts, *gone)]
        try:
            with self._reached():
                reply: Any = self._commit(keys=[self._key(name) for name in names], args=arguments)
        except StateUnavailableError:
            self._known.forget()
            raise
        what, value = (part.decode() for part in reply)
        if what != "done":
            self._known.forget()
        if what == "id":
            _check(term, self._id, 0, value)
        if what == "term":
            _check(term, self._id, int(value), self._id)
        if what == "epoch" and plan is not None:
            _check_follows(plan, int(value))
        if plan is not None and new is not None:
            self._known.wrote(plan, new)

    def plan(self, epoch: int) -> LaidPlan | None:
        """Return the plan of an epoch."""
        return self._plan(epoch)[0]

    def _head(self, epoch: int) -> plan_pb2.Plan | None:
        with self._reached():
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
            with self._reached():
                found = self._redis.mget([self._key(f"chunk:{part.name}") for part in parts])
        if None in found:
            return None, None
        return read(head, dict(zip(parts, found, strict=True))), head

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
