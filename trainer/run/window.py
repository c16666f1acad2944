"""The window of a run: batches that are read and not learned yet, whose rows are held in DDR.

    plan      hold the rows of a batch, so that nothing drives them out      the window's threads
    collect   read those that lie on the SSD, of several batches at once
    insert    put them into DDR
    train     learn the oldest batch, then let its rows go                   the trainer's thread

One thread plans at a time, and then brings what it has planned while another one plans and brings:
the drive has something to read while rows are put into DDR and while upkeep makes room.

A batch is learned as soon as its rows are there and those before it are learned: the window never
waits to fill. So on a stream that is slower than the trainer it has one batch, and adds no delay.
docs/design/0032-window.md has the rule of its length.

Without `RunConfig.hold_bytes` it has one batch, whose rows are brought but not held; of many ranks
one, whose keys they ask of one another.
"""

import dataclasses
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from embertide.trainer.config import RunConfig
from embertide.trainer.config.run import MAX_HELD_BATCHES
from embertide.trainer.data.base import Batch
from embertide.trainer.embedding.store import TableKeys
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.learner import Learner, Prepared
from embertide.trainer.publish.threads import Workers

# Keys that are brought by one call, if more than a batch has; the store reads no more at once.
_MERGED_KEYS = 1 << 16
BRINGING = 2  # threads of a window that holds rows
_NEWEST = 0.1  # share of the newest batch in means of times
_MIN_BATCHES = 2
# A hold that failed is tried again with so many times the room; the next ones need less and less.
_MORE_ROOM, _LESS_ROOM = 1.3, 0.95

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class Waiting:
    """A batch of the window.

    Attributes:
        whole: All of its events; its rows are those of their keys.
        learn: Those that are learned; None: none.
        held_out: Those that are scored alone; None: none.
        ready: The batch to learn, once its rows are there.
        rows: The keys that are held for it; None: none are.
        missing: Those of its keys whose rows are to be brought: of `rows`, the others were held.
        ready_s: When its rows were there, by the monotonic clock.
    """

    whole: Batch
    learn: Batch | None
    held_out: Batch | None
    ready: Future[Prepared | None] = dataclasses.field(default_factory=Future)
    rows: TableKeys | None = None
    missing: TableKeys = dataclasses.field(default_factory=list)
    ready_s: float = 0.0


class _Mean:
    """A mean of what was of late, and how far it scatters."""

    def __init__(self) -> None:
        self.mean = self.scatter = 0.0
        self._empty = True

    def add(self, value: float) -> None:
        if self._empty:
            self.mean, self._empty = value, False
        self.scatter += _NEWEST * (abs(value - self.mean) - self.scatter)
        self.mean += _NEWEST * (value - self.mean)


class Window:
    """Batches in the order of their events, the oldest of which is learned next.

    For the trainer's thread; `_plan` is for threads of its own.

    Args:
        learner: The learner whose rows are brought. Its `prepare` is called in the window's thread,
            of which there is one where no rows are held.
        run: The run, which says how much may be held, and for how many batches.

    Attributes:
        holds: Whether rows are held.

    Raises:
        ConfigurationError: The rows of the window that the run asks for may not fit its bytes; or
            it holds rows, and many ranks share them.
    """

    def __init__(self, learner: Learner, run: RunConfig) -> None:
        """Begin empty."""
        self.holds = run.hold_bytes > 0
        self._learner, self._rows = learner, learner.rows
        self._batches = run.hold_batches
        self._workers = Workers("keys", BRINGING if self.holds else 1)
        self._waiting: deque[Waiting] = deque()  # of them, those that no thread has come to
        self._entries: deque[Waiting] = deque()
        self._lock = threading.Lock()  # of what the threads share
        self._planning = threading.Lock()  # of who holds rows: batches are held in their order
        self._bringing = 0  # threads that bring rows, or make room for the next ones
        self._idle = threading.Condition(self._lock)  # none does
        self._held = self._released = 0  # batches whose rows are held; that were let go
        self._short = False  # the oldest that waits has no room before another is let go
        self._bring_s, self._learn_s, self._delay_s = _Mean(), _Mean(), _Mean()
        self._began_s = 0.0
        self._before = (0, 0)
        self._counts = dict.fromkeys(("hits", "misses", "unheld", "short"), 0)
        self._wait_s = self._most_delay_s = 0.0
        self._most_held = (0, 0)
        self._wanted_bytes = 0.0  # of room for one more batch, beside others
        if self.holds:
            _check(run, learner)
            self._rows.maintains = False  # `_plan` does, beside the net

    def __len__(self) -> int:
        """Return how many batches wait to be learned."""
        return len(self._entries)

    def has_room(self) -> bool:
        """Return whether one more batch may come before the oldest is learned."""
        with self._lock:
            return not self._short and len(self._entries) < self._length()

    def _length(self) -> int:
        """Return how many batches it shall have at most."""
        if not self.holds:
            return 1
        if self._batches > 0:
            return self._batches
        if self._learn_s.mean <= 0:
            return _MIN_BATCHES
        ratio = (self._bring_s.mean + 2 * self._bring_s.scatter) / self._learn_s.mean
        return min(max(_MIN_BATCHES, 1 + math.ceil(2 * ratio)), MAX_HELD_BATCHES)

    def put(self, whole: Batch, learn: Batch | None, held_out: Batch | None) -> None:
        """Add a batch, whose rows are held and brought from now on."""
        entry = Waiting(whole, learn, held_out)
        self._entries.append(entry)
        with self._lock:
            self._waiting.append(entry)
        self._workers.submit(self._plan)

    def enter(
        self,
        whole: Batch,
        learn: Batch | None,
        held_out: Batch | None,
        learn_next: Callable[[Callable[[], None]], None],
    ) -> None:
        """Add a batch as `put` does, after those have been learned for which it has no room.

        Args:
            whole: As of `put`, as the next two are.
            learn: The part of it to learn.
            held_out: The part of it that is only scored.
            learn_next: Learns the oldest batch that waits, and calls what it is given once that
                one's rows are in use.
        """
        put = functools.partial(self.put, whole, learn, held_out)
        while self.holds and not self.has_room():
            learn_next(lambda: None)
        if self.has_room():
            put()
        else:
            learn_next(put)

    def take(self) -> Waiting:
        """Return the oldest batch once its rows are there; `done` is to follow.

        Raises:
            StoreError: A row could not be brought.
            ValueError: A list is one in the batch and another thing in the model.
        """
        entry = self._entries[0]
        asked_s = time.monotonic()
        there = entry.ready.done()
        entry.ready.result()  # else it stays, for `clear` to let go of its rows
        self._entries.popleft()
        self._began_s = time.monotonic()
        delay_s = self._began_s - entry.ready_s if there else 0.0
        self._delay_s.add(delay_s)
        self._most_delay_s = max(self._most_delay_s, delay_s)
        self._wait_s += self._began_s - asked_s
        if self.holds:
            self._before = self._lookups()
        return entry

    def done(self, entry: Waiting) -> None:
        """Let go of the rows of a batch that was learned."""
        self._learn_s.add(time.monotonic() - self._began_s)
        if entry.rows is None:
            return
        hits, misses = self._lookups()
        self._counts["hits"] += hits - self._before[0]
        self._counts["misses"] += misses - self._before[1]
        self._let_go(entry)
        with self._lock:
            waits = bool(self._waiting)
        if waits:
            self._workers.submit(self._plan)

    def _let_go(self, entry: Waiting) -> None:
        assert entry.rows is not None
        self._rows.release(entry.rows)
        entry.rows = None
        with self._lock:
            self._held -= 1
            self._released += 1
            self._short = False

    def clear(self) -> None:
        """Forget all batches, and let go of their rows: a run has come to its end, or failed."""
        with self._lock:
            self._waiting.clear()
        if self.holds:  # else nobody waits for the thread, which may wait for a rank that is gone
            with self._planning:
                with self._idle:  # the threads have done what they had begun
                    self._idle.wait_for(lambda: self._bringing == 0)
                for entry in self._entries:
                    if entry.rows is not None:
                        self._let_go(entry)
        self._entries.clear()
        with self._lock:
            self._short = False

    def _lookups(self) -> tuple[int, int]:
        """Return keys looked up whose rows were in DDR, and whose had to be read, steps' too."""
        stats = self._rows.stats()
        return stats["hits"]["ddr"], stats["hits"]["ssd"] + stats["step_reads"]

    def figures(self) -> dict[str, float]:
        """Return what it holds and what it took; empty if it holds no rows.

        `batches` wait now and `length` may; `held_rows` and `held_bytes` are held, `most_held_rows`
        and `most_held_bytes` were, `bound_bytes` may be now. `delay_ms` is for how long a batch
        whose rows were there waited for those before it, of late, and `most_delay_ms` at most;
        `wait_s` for how long the trainer waited for rows. `bring_ms` and `learn_ms` are of a batch,
        of late. `hits` are lookups that found a row in DDR while a batch was learned whose rows
        were held, `misses` those that did not. `unheld` batches had no room, and were learned all
        the same; `short` counts when a batch had to wait for another's room.
        """
        if not self.holds:
            return {}
        rows, held_bytes, bound_bytes = self._rows.store.held()
        return {
            "batches": len(self._entries),
            "length": self._length(),
            "held_rows": rows,
            "held_bytes": held_bytes,
            "most_held_rows": self._most_held[0],
            "most_held_bytes": self._most_held[1],
            "bound_bytes": bound_bytes,
            "delay_ms": 1e3 * self._delay_s.mean,
            "most_delay_ms": 1e3 * self._most_delay_s,
            "wait_s": self._wait_s,
            "bring_ms": 1e3 * self._bring_s.mean,
            "learn_ms": 1e3 * self._learn_s.mean,
            **self._counts,
        }

    # --- the window's threads ---------------------------------------------------------------------

    def _plan(self) -> None:
        """Hold and bring the rows of batches that wait, as far as there is room for them."""
        while some := self._begin_next():
            try:
                self._bring(some)
                if self.holds:
                    self._rows.store.maintain()  # room for the next ones
            finally:
                with self._idle:
                    self._bringing -= 1
                    self._idle.notify_all()

    def _begin_next(self) -> list[Waiting]:
        """Return what `_next` does, and count the thread among those that bring rows."""
        with self._planning:
            some = self._next()
            with self._lock:
                self._bringing += bool(some)
            return some

    def _next(self) -> list[Waiting]:
        """Return the next batches, whose rows are held if rows are; none: there is no room."""
        some, keys = list[Waiting](), 0
        while keys < _MERGED_KEYS:
            with self._lock:
                entry = self._waiting[0] if self._waiting else None
            if entry is None:
                break
            try:
                if self.holds and not self._hold(entry):
                    break
            except BaseException as error:
                entry.ready.set_exception(error)
            else:
                some.append(entry)
                keys += entry.whole.keys_BF.size
            with self._lock:
                if self._waiting and self._waiting[0] is entry:  # else all were forgotten
                    self._waiting.popleft()
        return some

    def _hold(self, entry: Waiting) -> bool:
        """Hold a batch's rows; False: another's are to be let go first."""
        keys = self._learner.table_keys(entry.whole)
        while True:
            with self._lock:
                released, alone = self._released, self._held == 0
            if alone or self._is_worth_trying():
                missing = self._hold_now(keys, alone=alone)
                if missing is not None:
                    entry.rows, entry.missing = keys, missing
                    return True
            with self._lock:
                if released != self._released:
                    continue
                if self._held > 0:
                    self._short = True
                    self._counts["short"] += 1
                    return False
            self._counts["unheld"] += 1
            if self._counts["unheld"] == 1:
                log.warning(
                    "the rows of a batch of %d events do not fit the %d bytes of DDR that may be"
                    " held now: it is learned without, which costs time and changes nothing; raise"
                    " hold_bytes and ddr_budget_bytes, or lower batch_size",
                    len(entry.whole),
                    self._rows.store.held()[2],
                )
            entry.missing = keys
            return True

    def _is_worth_trying(self) -> bool:
        """Return whether there may be room: a hold that fails costs as much as another."""
        _rows, held_bytes, bound_bytes = self._rows.store.held()
        if bound_bytes - held_bytes >= self._wanted_bytes:
            return True
        self._wanted_bytes *= _LESS_ROOM
        return False

    def _hold_now(self, keys: TableKeys, *, alone: bool) -> TableKeys | None:
        """Hold these keys, if there is room, and return those that no other batch held.

        `alone`: no other batch is held.
        """
        _rows, before_bytes, bound_bytes = self._rows.store.held()
        missing = self._rows.hold(keys)
        if missing is None:
            self._wanted_bytes = _MORE_ROOM * (bound_bytes - before_bytes)
            return None
        with self._lock:
            self._held += 1
        rows, held_bytes, _bound = self._rows.store.held()
        most = self._most_held
        self._most_held = max(most[0], rows), max(most[1], held_bytes)
        if not alone:  # else it shared its rows with no other
            self._wanted_bytes = held_bytes - before_bytes
        return missing

    def _bring(self, some: list[Waiting]) -> None:
        """Bring the rows of some batches."""
        began_s = time.monotonic()
        try:
            if self.holds:
                self._rows.bring([each for entry in some for each in entry.missing])
                found = [
                    None if each.learn is None else Prepared(each.learn, each.learn, 0, None)
                    for each in some
                ]
            else:
                found = [
                    None if each.learn is None else self._learner.prepare(each.learn)
                    for each in some
                ]
        except BaseException as error:
            for entry in some:
                entry.ready.set_exception(error)
            return
        now_s = time.monotonic()
        for entry, prepared in zip(some, found, strict=True):
            self._bring_s.add((now_s - began_s) / len(some))
            entry.ready_s = now_s
            entry.ready.set_result(prepared)


def _check(run: RunConfig, learner: Learner) -> None:
    """Refuse a window whose rows may not fit.

    Of keys that come in lists nothing says how many there are: such a window is shorter where they
    do not fit.
    """
    if learner.ranks.size > 1:
        raise ConfigurationError(
            f"hold_bytes is {run.hold_bytes}, and {learner.ranks.size} ranks ask one another for"
            " rows when a batch comes, not ahead: leave it out, or train with one rank"
        )
    if any(feature.keys != "one" for feature in run.model.features):
        return
    batch_bytes = run.batch_size * learner.rows.hold_bytes_of_event()
    if run.hold_batches * batch_bytes > run.hold_bytes:
        raise ConfigurationError(
            f"a window of hold_batches={run.hold_batches} batches of {run.batch_size} events may"
            f" hold {run.hold_batches * batch_bytes} bytes of rows, more than hold_bytes ="
            f" {run.hold_bytes}: give that many, of which ddr_budget_bytes must be twice as many;"
            f" or hold_batches={run.hold_bytes // batch_bytes}, where 0 chooses by what fits"
        )
