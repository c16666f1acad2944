"""Several inputs read as one, in order of time: impressions and their feedback, partitions.

Each input is an `EventSource` of its own, with its own order in time, its own dead letters and its
own event indices; a thread reads it. Rows are merged by time, then by input. The index of a merged
row is its place in the merged order, so whoever reads on needs the place in each input too: the
cursor (`Origin`), which a checkpoint holds.

A row may go on only when every other input has come as far. Of a file that is known. A live input
that has had nothing for `silent_s`, while others went on, counts as silent up to their time; where
nothing comes from any, the batch ends there. Reading again would not show either, so it is first
written down (`silences.jsonl`): whoever reads again from a checkpoint beside it gets the same rows
in the same batches. What a silent input brings later from that time is not lost; it counts at the
first time that is not given yet (`late_after_silence`).

Shapes: as in base.py.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide._common.background import BackgroundTask, tend
from embertide.trainer.data.bags import Bags
from embertide.trainer.data.base import (
    PADDING_KEY,
    Batch,
    DeadLetters,
    EventSchema,
    EventSource,
    Origin,
)
from embertide.trainer.data.journal import INPUTS, SILENCES, Journal
from embertide.trainer.data.order import NO_TS_MS
from embertide.trainer.data.rows import Rows, check_bounds, concatenate
from embertide.trainer.errors import ConfigurationError

_EVER_MS = 1 << 62
# Bytes that an input's thread may be ahead by.
_MAX_BYTES = 16 << 20
# Rows of one read: of files for speed, of what is live so that they come soon.
_ROWS, _LIVE_ROWS = 4096, 32
_LEAVE_S = 10.0
_NAMED = 4  # inputs
_PARTS, _PLACES = 6, 8  # where they stand in the arrays of merged rows

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class _Silence:
    """An input's silence from one of its events on: nothing up to `ts_ms` is to be waited for."""

    part: int
    at: int
    ts_ms: int


class _Memory:
    """Decisions made by waiting: silences by input, and where batches ended. For one thread."""

    def __init__(self, path: Path | None, parts: int) -> None:
        """Reads what was written down."""
        self._journal = Journal(path)
        self.silences: list[list[_Silence]] = [[] for _ in range(parts)]
        self.ends: list[int] = []
        for said in self._journal.lines():
            if "end" in said:
                self.ends.append(said["end"])
            else:
                self.silences[said["part"]].append(_Silence(**said))
        self._rewrite()

    def silent(self, silence: _Silence) -> None:
        self.silences[silence.part].append(silence)
        self._journal.add(dataclasses.asdict(silence))

    def end(self, at: int) -> None:
        self.ends.append(at)
        self._journal.add({"end": at})

    def forget_before(self, start: int, cursor: Sequence[int]) -> None:
        """Drop what nobody needs who reads from there; of silences the last before it holds on."""
        self.ends = [end for end in self.ends if end > start]
        for part, at in enumerate(cursor):
            before = [each for each in self.silences[part] if each.at <= at]
            after = [each for each in self.silences[part] if each.at > at]
            latest = max(before, key=lambda each: each.ts_ms, default=None)
            self.silences[part] = after if latest is None else [latest, *after]
        self._rewrite()

    def _rewrite(self) -> None:
        said = [dataclasses.asdict(each) for of in self.silences for each in of]
        self._journal.replace([*said, *({"end": end} for end in self.ends)])


class _Reader:
    """One input and the thread that reads it; `changed` guards what both use, of all inputs."""

    def __init__(self, source: EventSource, start: int, changed: threading.Condition) -> None:
        self.source = source
        self.next = start  # event index after what was taken
        self.latest_ms = NO_TS_MS  # every row from here on is later
        self.heard = time.monotonic()
        self._changed = changed
        self._batches: deque[Batch] = deque()
        self._bytes = 0
        self._reads = self._ended = self._left = False
        self._error: BaseException | None = None
        rows = _LIVE_ROWS if source.live else _ROWS
        batches = source.batches(batch_size=rows, start=start)
        self.task = BackgroundTask("merged", lambda _stop: self._read(batches))
        self.task.start()

    def _read(self, batches: Iterator[Batch]) -> None:
        with self._changed:
            self._reads, self.heard = True, time.monotonic()
        try:
            for batch in batches:
                self.task.works()
                with self._changed:
                    self._batches.append(batch)
                    self._bytes += batch.nbytes
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._left or self._bytes < _MAX_BYTES)
                    if self._left:
                        break
        except BaseException as error:
            self._error = error
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    @property
    def has_news(self) -> bool:
        """Whether `take` has more than it had, under `changed`."""
        return bool(self._batches) or (self._ended and not self.is_over)

    @property
    def is_over(self) -> bool:
        """Whether all was taken."""
        return self.latest_ms == _EVER_MS

    def is_silent(self, since_s: float) -> bool:
        """Whether it is live, and nothing came since then, nor is there anything to come.

        Not while the system starts no thread to read it. What the source read before it said so is
        in `_batches` by then.
        """
        is_read = self._reads and self.source.is_read
        return self.source.live and self.heard <= since_s and is_read and not self._batches

    def take(self) -> list[Batch]:
        """Return what was read, under `changed`; an input's error is raised after what came."""
        found, self._bytes = list(self._batches), 0
        self._batches.clear()
        if found:
            self.next, self.latest_ms = found[-1].next_offset, found[-1].watermark_ms
            self.heard = time.monotonic()
        elif self._ended:
            if self._error is not None:
                raise self._error
            self.latest_ms = _EVER_MS
        self._changed.notify_all()
        return found

    def leave(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()
        self.source.leave()


class MergedSource(EventSource):
    """An `EventSource` over several others. Used by one thread, but for `checkpointed`, `counters`.

    It is `joined` if some of them are feedback. Its events are accepted rows: those that an input
    rejects have no index here.
    """

    def __init__(
        self,
        parts: Sequence[EventSource],
        feedback: Sequence[EventSource] = (),
        *,
        silent_s: float = 10.0,
    ) -> None:
        """Name the inputs.

        Args:
            parts: Inputs of events; all of one schema.
            feedback: Inputs of feedback on them, of `feedback_schema`.
            silent_s: A live input without an event for so long holds others up no more. Longer than
                what the inputs wait for before they give their last events (5 s).

        Raises:
            ConfigurationError: Schemas do not fit, or events have no time.
        """
        if not parts or silent_s <= 0:
            raise ConfigurationError(
                f"{len(parts)} inputs, silent_s {silent_s}; give one or more, and seconds"
            )
        self.schema = parts[0].schema
        for each in (*parts, *feedback):
            if each.schema.ts is None:
                raise ConfigurationError("inputs are merged by time; give ts= in each schema")
        if feedback and self.schema.target_columns:
            raise ConfigurationError(
                f"columns {', '.join(self.schema.target_columns)} are further labels or weights, "
                "which impressions do not have; leave them out"
            )
        if any(each.schema != self.schema for each in parts):
            raise ConfigurationError("inputs that are merged differ in schema; give all the same")
        for each in feedback:
            if each.schema.id is None or self.schema.id is None or each.schema.features:
                raise ConfigurationError(
                    "impressions need EventSchema(id=...) and label=None, and feedback is read with"
                    " feedback_schema(id=..., ts=...), so that one finds the other"
                )
        if feedback and self.schema.label is not None:
            raise ConfigurationError(
                f"impressions have the label {self.schema.label!r} and feedback too; give label="
                "None where labels come as a stream of their own"
            )
        self._parts = [*parts, *feedback]
        self._first_feedback = len(parts)
        self._silent_s = silent_s
        self._folder: Path | None = None
        self._cursor: tuple[int, ...] = ()
        self._given: deque[tuple[int, tuple[int, ...]]] = deque()  # offsets since a checkpoint
        self._checkpointed: tuple[int, tuple[int, ...]] | None = None
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._counts = dict.fromkeys(("silences", "late_after_silence"), 0)

    @property
    def parts(self) -> Sequence[EventSource]:
        """The inputs, those of feedback last."""
        return self._parts

    @property
    def name(self) -> str:
        """Those of the inputs, the first few."""
        names = [part.name for part in self._parts]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"{'; '.join(names[:_NAMED])}{more}"

    @property
    def joined(self) -> bool:
        """Whether some are feedback."""
        return self._first_feedback < len(self._parts)

    @property
    def live(self) -> bool:
        """Whether any is."""
        return any(part.live for part in self._parts)

    @property
    def dead_letters(self) -> DeadLetters:  # type: ignore[override]
        """Counts of all inputs; each has its own file."""
        by_reason: dict[str, int] = {}
        for p, part in enumerate(self._parts):
            before = "feedback: " if p >= self._first_feedback else ""
            for reason, count in part.dead_letters.by_reason.copy().items():
                name = before + reason
                by_reason[name] = by_reason.get(name, 0) + count
        lost = sum(part.dead_letters.lost for part in self._parts)
        return DeadLetters(by_reason=by_reason, lost=lost)

    def total_events(self) -> int | None:
        """Events of all inputs, if all tell; rejected ones get no index, so it is a bound."""
        totals = [part.total_events() for part in self._parts]
        known = [total for total in totals if total is not None]
        return sum(known) if len(known) == len(totals) else None

    def counters(self) -> dict[str, int]:
        """Silences that were waited for; rows that came late after one; then those of inputs."""
        with self._lock:
            counts = dict(self._counts)
        for part in self._parts:
            for name, count in part.counters().items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def lag(self) -> dict[str, int]:
        """Those of all inputs."""
        return {name: count for part in self._parts for name, count in part.lag().items()}

    def leave(self) -> None:
        """See `EventSource.leave`."""
        self._leaving.set()
        for part in self._parts:
            part.leave()

    def letters_to(self, path: Path) -> None:
        """See `EventSource.letters_to`; each line names its input, if that has a name."""
        for part in self._parts:
            part.letters_to(path)

    def seek(self, cursor: Sequence[int]) -> None:
        """See `EventSource.seek`.

        Raises:
            ConfigurationError: It is of another number of inputs.
        """
        if cursor and len(cursor) != len(self._parts):
            raise ConfigurationError(
                f"the checkpoint was made from {len(cursor)} inputs, and {len(self._parts)} are "
                "given: give the same inputs or partitions, or train in a new folder"
            )
        self._cursor = tuple(cursor)

    def remember_in(self, folder: Path) -> None:
        """See `EventSource.remember_in`."""
        self._folder = folder
        for p, part in enumerate(self._parts):
            part.remember_in(folder / INPUTS / str(p))

    def checkpointed(self, offset: int) -> None:
        """See `EventSource.checkpointed`: each input is told of its own place."""
        found = None
        with self._lock:
            while self._given and self._given[0][0] <= offset:
                found = self._given.popleft()
            if found is not None:
                self._checkpointed = found
        if found is not None:
            for part, at in zip(self._parts, found[1], strict=True):
                part.checkpointed(at)

    # --- reading ----------------------------------------------------------------------------------

    def batches(self, *, batch_size: int, start: int = 0) -> Generator[Batch]:
        """See `EventSource.batches`; `start` goes with the cursor that `seek` was given.

        Whoever closes it has its threads end.

        Raises:
            ValueError: There is no cursor for this `start`.
        """
        check_bounds(batch_size, start)
        self._leaving.clear()
        if start and not self._cursor:
            raise ValueError(f"start {start} of merged inputs needs their cursor: seek it first")
        return self._batches(batch_size, start)

    def _batches(self, batch_size: int, start: int) -> Generator[Batch]:
        cursor = self._cursor or (0,) * len(self._parts)
        self._cursor = ()
        memory = _Memory(
            None if self._folder is None or not self.live else self._folder / SILENCES,
            len(self._parts),
        )
        memory.forget_before(start, cursor)
        changed = threading.Condition()
        readers = [_Reader(part, at, changed) for part, at in zip(self._parts, cursor, strict=True)]
        merging = _Merging(self, readers, memory, start, cursor)
        older: tuple[int, tuple[int, ...]] | None = None  # a checkpoint may turn out harmed
        try:
            while not self._leaving.is_set():
                progress = merging.take(changed, self._silent_s)
                for batch in merging.cut(batch_size):
                    assert batch.origin is not None
                    with self._lock:
                        self._given.append((batch.next_offset, batch.origin.next_cursor))
                    yield batch
                if merging.is_over:
                    return
                if not progress:
                    merging.wait(changed, self._silent_s)
                with self._lock:
                    done, self._checkpointed = self._checkpointed, None
                if done is not None:
                    if older is not None:
                        memory.forget_before(*older)
                    older = done
        finally:
            for reader in readers:
                reader.leave()
            for reader in readers:
                reader.task.stop(_LEAVE_S)

    def count(self, name: str, more: int = 1) -> None:
        """Count what happened while it was read."""
        with self._lock:
            self._counts[name] += more

    def uniform(self, part: int, batch: Batch) -> Rows:
        """Return an input's batch as merged rows: those of feedback have no key and no value."""
        n, schema = len(batch), self.schema
        is_feedback = part >= self._first_feedback
        id_N = np.zeros(n, np.int64) if batch.id_B is None else batch.id_B
        keys_NF, dense_ND, label_N = batch.keys_BF, batch.dense_BD, batch.label_B
        lists = batch.lists
        if schema.target_columns:
            targets = (batch.label_B, batch.more_labels_BL, batch.weight_B)
            label_N = np.column_stack([each for each in targets if each is not None])
        if is_feedback:
            keys_NF = np.full((n, len(schema.features)), PADDING_KEY, np.int64)
            dense_ND = np.full((n, len(schema.dense)), np.nan, np.float32)
            label_N = np.ones(n, np.float32)
            lists = {f: _empty(n, bool(each.weights)) for f, each in _lists(schema)}
        arrays = (batch.event_B, batch.ts_ms_B, keys_NF, dense_ND, label_N, id_N)
        origin = (np.full(n, part), np.full(n, is_feedback), batch.event_B)
        return Rows((*arrays, *origin), lists)


def _lists(schema: EventSchema) -> Iterator[tuple[int, Any]]:
    return ((f, each) for f, each in enumerate(schema.features) if each.is_list)


def _empty(bags: int, weighed: bool) -> Bags:
    none = np.empty(0, np.int64)
    weights = np.empty(0, np.float32) if weighed else None
    return Bags.of(none, np.zeros(bags, np.int64), weights)


class _Merging:
    """The rows that were read and not given. Of one thread."""

    def __init__(
        self,
        source: MergedSource,
        readers: Sequence[_Reader],
        memory: _Memory,
        start: int,
        cursor: tuple[int, ...],
    ) -> None:
        self._source = source
        self._readers = readers
        self._memory = memory
        self._at = start  # of the first row of `_ready`
        self._cursor = cursor
        self._pending: list[list[Rows]] = [[] for _ in readers]  # of inputs, in their order
        self._ready: list[Rows] = []  # in order of time
        self._safe_ms = NO_TS_MS  # no row up to it is to come
        self._idle = False

    @property
    def is_over(self) -> bool:
        return self._safe_ms == _EVER_MS

    def take(self, changed: threading.Condition, silent_s: float) -> bool:
        """Take what the inputs have, and bring into order what may be; whether there was any."""
        with changed:
            found = [reader.take() for reader in self._readers]
        for part, batches in enumerate(found):
            for batch in batches:
                rows = self._moved(part, self._source.uniform(part, batch))
                self._pending[part].append(rows)
        now = time.monotonic()
        self._bring_on(now, silent_s)
        safe_ms = min(self._known_ms(part) for part in range(len(self._readers)))
        self._idle = all(
            reader.latest_ms == _EVER_MS or reader.is_silent(now - silent_s)
            for reader in self._readers
        )
        if safe_ms > self._safe_ms:
            self._safe_ms = safe_ms
            self._order(safe_ms)
        return any(found)

    def _bring_on(self, now: float, silent_s: float) -> None:
        """Let inputs that are silent hold up others no more; where all are, what is here goes."""
        quiet, known = list[int](), list[int]()
        for part, reader in enumerate(self._readers):
            if reader.is_silent(now - silent_s) and not reader.is_over:
                quiet.append(part)
            elif not reader.is_over:
                known.append(self._known_ms(part))
        waiting = [int(rows.times_ms[-1]) for of in self._pending for rows in of]
        reach_ms = min(known) if known else max(waiting, default=NO_TS_MS)
        for part in quiet:
            if reach_ms > self._known_ms(part):
                self._memory.silent(_Silence(part, self._readers[part].next, reach_ms))
                self._source.count("silences")

    def wait(self, changed: threading.Condition, silent_s: float) -> None:
        """Wait until an input has more, or has been silent for long enough."""
        tend()  # should a reader's thread not have started
        now = time.monotonic()
        left = [
            reader.heard + silent_s - now
            for reader in self._readers
            if reader.source.live and not reader.is_over
        ]
        due = [each for each in left if each > 0]
        with changed:
            if not any(reader.has_news for reader in self._readers):
                changed.wait(min([*due, 1.0, silent_s]))

    def _known_ms(self, part: int) -> int:
        """The time up to which all rows of an input are here."""
        reader = self._readers[part]
        silent = [each.ts_ms for each in self._memory.silences[part] if each.at <= reader.next]
        return max([reader.latest_ms, *silent])

    def _moved(self, part: int, rows: Rows) -> Rows:
        """Give rows that came after a silence the first time that is not given yet."""
        times_ms = rows.times_ms
        for each in self._memory.silences[part]:
            late_N = (rows.events >= each.at) & (times_ms <= each.ts_ms)
            if late_N.any():
                self._source.count("late_after_silence", int(late_N.sum()))
                times_ms = np.where(late_N, each.ts_ms + 1, times_ms)
        return rows.at_times(times_ms)

    def _order(self, safe_ms: int) -> None:
        """Bring the rows up to a time into order."""
        parts: list[Rows] = []
        for p, pending in enumerate(self._pending):
            if not pending:
                continue
            rows = concatenate(pending)
            end = int(np.searchsorted(rows.times_ms, safe_ms, side="right"))
            if end:
                parts.append(rows.cut(0, end))
            self._pending[p] = [rows.cut(end, len(rows))] if end < len(rows) else []
        if parts:
            rows = concatenate(parts)
            order_N = np.lexsort((rows.arrays[_PARTS], rows.times_ms))
            self._ready.append(rows.at(order_N))

    def cut(self, batch_size: int) -> Iterator[Batch]:
        """Yield the batches that are complete."""
        if not self._ready:
            return
        rows = concatenate(self._ready)
        self._ready = []
        begin = 0
        while begin < len(rows):
            end = self._end(rows, begin, batch_size)
            if end is None:
                break
            yield self._batch(rows, begin, end)
            begin = end
        if begin < len(rows):
            self._ready = [rows.cut(begin, len(rows))]

    def _end(self, rows: Rows, begin: int, batch_size: int) -> int | None:
        """Return where the batch that begins there ends; None: that is not known yet."""
        at = self._at
        ends = [end - at for end in self._memory.ends if 0 < end - at <= batch_size]
        left = len(rows) - begin
        if ends and ends[0] <= left:
            return begin + ends[0]
        if left >= batch_size:
            # All rows of a time are here together.
            last_ms = rows.times_ms[begin + batch_size - 1]
            return int(np.searchsorted(rows.times_ms, last_ms, side="right"))
        if self.is_over:
            return len(rows)
        if self._idle and not any(self._pending):
            self._memory.end(at + left)
            return len(rows)
        return None

    def _batch(self, rows: Rows, begin: int, end: int) -> Batch:
        first, self._at = self._at, self._at + end - begin
        before, self._cursor = self._cursor, self._cursor_at(rows, end)
        piece = rows.cut(begin, end)
        part_B, feedback_B, index_B = piece.arrays[_PARTS:]
        plain = Rows((np.arange(first, self._at), *piece.arrays[1:_PARTS]), piece.lists)
        origin = Origin(
            part_B=part_B,
            index_B=index_B,
            feedback_B=feedback_B,
            cursor=before,
            next_cursor=self._cursor,
        )
        return dataclasses.replace(plain.batch(self._at), origin=origin)

    def _cursor_at(self, rows: Rows, end: int) -> tuple[int, ...]:
        """Return the event index of each input's first row from there on."""
        part_N, index_N = rows.arrays[_PARTS][end:], rows.arrays[_PLACES][end:]
        cursor = []
        for p, reader in enumerate(self._readers):
            later_R = np.flatnonzero(part_N == p)
            if len(later_R):
                cursor.append(int(index_N[later_R[0]]))
            elif self._pending[p]:
                cursor.append(int(self._pending[p][0].events[0]))
            else:
                cursor.append(reader.next)
        return tuple(cursor)
