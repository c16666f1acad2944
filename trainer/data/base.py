"""An input of events: schema, batch, source, and where rejected rows go.

Every reader of `embertide.trainer.data` gives `Batch`es through the `EventSource` contract below;
`assemble.py` holds the step that they share. Array suffixes: B events of a batch, F features,
D dense columns.
"""

import abc
import itertools
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from embertide._common.quoting import shown
from embertide.trainer.config import compatibility
from embertide.trainer.data.bags import Bags
from embertide.trainer.data.lines_file import LinesFile

MISSING_KEY = -1
"""Key of a null in an integer column; a null string has the key of the empty string instead."""

PADDING_KEY = -(1 << 63)
"""Key of a place of a sequence that is not taken: it gets no row. No column may mean it.

It also stands in `Batch.keys_BF` where the feature has a list, which is in `Batch.lists`.
"""

MAX_EDGES = 65_536
"""Most edges of a feature of bins: nodes tell them to every client in one message."""

_SHOWN_LETTERS = 80  # of a rejected value

MAX_GROUP = 65_536
"""Most events of one ts: a larger group would let one batch grow without bound."""

_MAX_TIMES_S = 10**9  # three decades

MAX_UNIT_MS = 7 * 86_400_000
"""Most milliseconds of a unit of time: a week."""

NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?"

_COMPARISONS = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureColumn:
    """One sparse feature and the column it comes from.

    Attributes:
        name: The feature's name, as models and tables use it.
        column: The input's column. For "hour_of_day" it is the schema's `ts` column.
        transform: "key" takes an integer column as the raw 64-bit key (null: `MISSING_KEY`) and
            hashes strings with xxh3_64 to a signed key (null: that of the empty string); "keys"
            takes a list of such, of which none may be null (a null list is an empty one);
            "hour_of_day" gives the hour, 0 to 23, of the event's time; "bin" takes a column of
            the schema's `dense` and gives the number of `edges` that are not above its value, both
            as floats of 32 bits (missing: `MISSING_KEY`). Versions say the edges, and
            `embertide.Client` makes the number of the value that is asked with.
        rows: The hashing trick (Weinberger et al. 2009): keys are hashed to 0, ..., rows - 1, so
            that several share a row; 0 leaves them as they are. Who asks for scores must do the
            same.
        weights: For "keys": the column of lists of numbers, one a key, that their rows are
            multiplied by; empty: 1 each.
        max_keys: For "keys": an event with more in its list is rejected. One event may not take the
            memory, or the time of a request, that thousands of others do.
        edges: For "bin": where one bin ends and the next begins, ascending. A run keeps them.
        kind: The kind of the keys: "int" or "string" of any input, so that a file and a stream, or
            two files, give a value the same key. As "string" a number is hashed as it is written; a
            key that is missing is that of the empty string, where the input does not tell that the
            column is one of text. Empty: the type of the input tells, or what the texts of its
            first rows look like.
    """

    name: str
    column: str
    transform: Literal["key", "keys", "hour_of_day", "bin"] = "key"
    rows: int = 0
    weights: str = ""
    max_keys: int = 1000
    edges: tuple[float, ...] = ()
    kind: Literal["", "int", "string"] = ""

    def __post_init__(self) -> None:
        """Refuses a transform that does not exist, and what only a list or a bin has."""
        if self.kind not in ("", "int", "string"):
            raise ValueError(
                f"feature {self.name!r}: kind {self.kind!r} does not exist; use 'int' or 'string'"
            )
        if self.transform not in ("key", "keys", "hour_of_day", "bin"):
            raise ValueError(
                f"feature {self.name!r}: transform {self.transform!r} does not exist; "
                "use 'key', 'keys', 'hour_of_day' or 'bin'"
            )
        if (self.transform == "bin") != bool(self.edges):
            raise ValueError(
                f"feature {self.name!r}: transform {self.transform!r} with edges {self.edges}; "
                "'bin' needs one or more, and no other has any"
            )
        ascend = all(low < high for low, high in itertools.pairwise(self.edges))
        if not (ascend and all(map(math.isfinite, self.edges))):
            raise ValueError(
                f"feature {self.name!r}: edges are {self.edges}; give finite numbers, ascending"
            )
        if len(self.edges) > MAX_EDGES:
            raise ValueError(
                f"feature {self.name!r}: there are {len(self.edges):,} edges; give {MAX_EDGES:,} "
                "at most"
            )
        if self.rows < 0:
            raise ValueError(f"feature {self.name!r}: rows is {self.rows}; give 0 or more")
        if self.weights and not self.is_list:
            raise ValueError(
                f"feature {self.name!r}: weights {self.weights!r} with transform "
                f"{self.transform!r}; only the keys of a list are weighed: 'keys'"
            )
        if self.max_keys < 1:
            raise ValueError(f"feature {self.name!r}: max_keys is {self.max_keys}; give 1 or more")

    @property
    def is_list(self) -> bool:
        """Whether an event has any number of keys of it."""
        return self.transform == "keys"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTimes:
    """Bounds on events' times; docs/training.md says what becomes of events beyond them.

    Attributes:
        max_lateness_s: An event that is late by no more is learned when it comes.
        max_jump_s: An event that is further ahead of those before it needs others that confirm it.
            A false one that is not makes events late for so long.
        max_future_s: For a stream whose entries have the time when they came: an event that is
            further ahead of that needs others, too.
    """

    max_lateness_s: float = 0.0
    max_jump_s: float = 3600.0
    max_future_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what is no length of time."""
        for name in ("max_lateness_s", "max_jump_s", "max_future_s"):
            seconds = getattr(self, name)
            if not 0 <= seconds <= _MAX_TIMES_S:
                raise ValueError(f"{name} is {seconds}; give 0 to {_MAX_TIMES_S:,} seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Positive:
    """Which values of a label's column mean 1; all others that are there mean 0.

    Attributes:
        compare: ">=", ">", "<=", "<" or "==".
        value: A number; or text, which is compared by "==" alone, blanks around it apart. Text that
            looks like a number is given in quotes: "== '1'".
    """

    compare: str
    value: float | str

    @classmethod
    def of(cls, rule: str) -> "Positive":
        """Read a rule such as ">= 4" or "== yes".

        Raises:
            ValueError: It is none.
        """
        found = re.fullmatch(r"\s*(>=|<=|==|>|<)\s*(.*\S)\s*", rule, re.DOTALL)
        if found is None:
            raise ValueError(f"positive is {rule!r}; write such as '>= 4' or '== yes'")
        compare, text = found[1], found[2]
        if re.fullmatch(NUMBER, text):
            return cls(compare=compare, value=float(text))
        if compare != "==":
            raise ValueError(
                f"positive is {rule!r}: {text!r} is no number, and text has no order; use =="
            )
        quoted = text[1:-1] if text[0] == text[-1] == "'" else ""
        return cls(compare=compare, value=quoted if re.fullmatch(NUMBER, quoted) else text)

    @property
    def is_text(self) -> bool:
        """Whether the label is text."""
        return isinstance(self.value, str)

    def holds(self, value_N: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether each of N values means 1: numbers, or bytes where the label is text."""
        if isinstance(self.value, str):
            wanted = self.value.encode("utf-8", "surrogatepass")
            texts = (value.strip() == wanted for value in value_N)
            return np.fromiter(texts, np.bool_, len(value_N))
        holds_N: NDArray[np.bool_] = _COMPARISONS[self.compare](value_N, self.value)
        return holds_N


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSchema:
    """Which columns of an input are read, and as what.

    Attributes:
        features: The sparse features, in the order of `Batch.keys_BF`.
        label: Column of the label, 0 or 1, unless `positive` says what else it holds; None where
            labels come as a stream of their own.
        more_labels: Columns of further labels, 0 or 1, for a model of several heads; null: unknown.
        weight: Column of what each event counts in the loss, 0 or more; None: 1 each.
        dense: Dense columns, in the order of `Batch.dense_BD`.
        ts: Column of the event's time: a number, a timestamp or date, or text of ISO 8601 (UTC
            where it names no zone). None: the order of rows is time; the event index counts as
            milliseconds then.
        ts_unit_ms: Milliseconds in one unit of a numeric `ts`: 1000 for seconds, 0.001 for
            microseconds. A timestamp type carries its own.
        positive: Which values of the label's column mean 1, as ">= 4" of ratings or "== yes" of
            text (`Positive`); empty: the column holds 0 and 1.
        list_separator: The text between the items of a list in text; an empty field is an empty
            list. Parquet and Arrow have lists of their own.
        times: How late events may be, and how far ahead.
        id: Column of integers or strings that feedback names an impression by; None: none. One that
            is null has no label to come.
    """

    features: tuple[FeatureColumn, ...]
    label: str | None
    more_labels: tuple[str, ...] = ()
    weight: str | None = None
    dense: tuple[str, ...] = ()
    ts: str | None = None
    ts_unit_ms: float = 1000
    positive: str = ""
    list_separator: str = "|"
    times: EventTimes = EventTimes()
    id: str | None = None

    def __post_init__(self) -> None:
        """Refuses a schema that no input could satisfy."""
        if not self.features and self.id is None:
            raise ValueError("features is empty; name at least one FeatureColumn")
        names = [feature.name for feature in self.features]
        if len(set(names)) != len(names):
            raise ValueError(f"features {names} repeat a name; give each its own")
        unit_ms = self.ts_unit_ms
        whole = 1 <= unit_ms <= MAX_UNIT_MS and float(unit_ms).is_integer()
        if not whole and not any(math.isclose(unit_ms, part) for part in (1e-3, 1e-6)):
            raise ValueError(
                f"ts_unit_ms is {self.ts_unit_ms}; give whole milliseconds, 1 to {MAX_UNIT_MS:,}, "
                "or 0.001 for microseconds, 0.000001 for nanoseconds"
            )
        if self.positive:
            Positive.of(self.positive)
        if not self.list_separator:
            raise ValueError("list_separator is empty; give '|' or such")
        for feature in self.features:
            if feature.transform == "hour_of_day" and feature.column != self.ts:
                raise ValueError(
                    f"feature {feature.name!r}: hour_of_day reads the ts column {self.ts!r}, "
                    f"not {feature.column!r}; name that one"
                )
            if feature.transform == "bin" and feature.column not in self.dense:
                raise ValueError(
                    f"feature {feature.name!r}: bins are of a column of dense, which has no "
                    f"{feature.column!r}; name it there, too"
                )
        targets = self.target_columns
        for column in targets:
            if targets.count(column) > 1 or column == self.label:
                raise ValueError(f"label or weight {column!r} repeats; give each a column")
        uses = Counter({*self._single, *self.key_columns, *self.dense, *targets})
        uses.update((*self.list_columns, *self.weight_columns))
        for column in (*self.list_columns, *self.weight_columns):
            if uses[column] > 1:
                raise ValueError(
                    f"column {column!r} is read as a list of keys and as something else; give each "
                    "a column of its own"
                )

    @property
    def has_clock(self) -> bool:
        """Whether events have a time; else their order counts as one."""
        return self.ts is not None

    @property
    def text_label(self) -> bool:
        """Whether the label's column is compared as text."""
        return bool(self.positive) and Positive.of(self.positive).is_text

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Columns that are read as one key an event, each once."""
        keys = (f.column for f in self.features if f.transform == "key")
        return tuple(dict.fromkeys(keys))

    @property
    def list_columns(self) -> tuple[str, ...]:
        """Columns that are read as lists of keys, each once."""
        return tuple(dict.fromkeys(f.column for f in self.features if f.is_list))

    @property
    def weight_columns(self) -> tuple[str, ...]:
        """Columns that are read as lists of weights, each once."""
        return tuple(dict.fromkeys(f.weights for f in self.features if f.weights))

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, each once."""
        times = () if self.ts is None else (self.ts,)
        lists = (*self.list_columns, *self.weight_columns)
        values = (*self.key_columns, *lists, *self.dense, *self._single, *self.target_columns)
        return tuple(dict.fromkeys((*times, *values)))

    def kind_of(self, column: str) -> Literal["", "int", "string"]:
        """Return `FeatureColumn.kind` of a column; the first feature that names one counts."""
        kinds = (f.kind for f in self.features if f.column == column and f.transform != "bin")
        return next((kind for kind in kinds if kind), "")

    @property
    def one_use_each(self) -> bool:
        """Whether no column is read as two things."""
        lists = (*self.list_columns, *self.weight_columns)
        values = (*self.key_columns, *lists, *self.dense, *self._single, *self.target_columns)
        return len(values) == len(self.columns)

    @property
    def _single(self) -> tuple[str, ...]:
        """Columns of one value an event that are no features."""
        return tuple(name for name in (self.ts, self.label, self.id) if name is not None)

    @property
    def target_columns(self) -> tuple[str, ...]:
        """Columns of further labels, and of weights."""
        return (*self.more_labels, *(() if self.weight is None else (self.weight,)))


def news_schema() -> EventSchema:
    """Schema of the news stream, made up or a portal's: ten features, ts in seconds."""
    columns = {"user": "user_id", "prev": "prev_article", "cand": "cand"}
    same = ("env", "device", "os", "country", "region", "referrer")
    columns |= {name: name for name in same}
    features = [FeatureColumn(name=name, column=column) for name, column in columns.items()]
    features.append(FeatureColumn(name="hour", column="ts", transform="hour_of_day"))
    return EventSchema(features=tuple(features), label="y", ts="ts")


def feedback_schema(*, id: str, ts: str, ts_unit_ms: int = 1000) -> EventSchema:
    """Schema of feedback: one event for each click, with the impression's id and its own time."""
    return EventSchema(features=(), label=None, ts=ts, ts_unit_ms=ts_unit_ms, id=id)


def known_schema(columns: Sequence[str]) -> EventSchema | None:
    """That of the news stream if its columns are all there; None if not."""
    schema = news_schema()
    return schema if set(schema.columns) <= set(columns) else None


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise compatibility.missing(__name__, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the rows of a batch of several merged inputs come from (data/merge.py).

    Attributes:
        part_B: Which input.
        index_B: Event index in that input.
        feedback_B: Whether it is feedback on an impression, and no impression.
        cursor: By input: the event index to read it from for the first row.
        next_cursor: ... for what follows the last.
    """

    part_B: NDArray[np.int64]
    index_B: NDArray[np.int64]
    feedback_B: NDArray[np.bool_]
    cursor: tuple[int, ...]
    next_cursor: tuple[int, ...]

    def cut(self, begin: int, end: int) -> "Origin":
        """Return that of rows `begin` to `end`."""
        return Origin(
            part_B=self.part_B[begin:end],
            index_B=self.index_B[begin:end],
            feedback_B=self.feedback_B[begin:end],
            cursor=self._cursor_at(begin),
            next_cursor=self._cursor_at(end),
        )

    def _cursor_at(self, row: int) -> tuple[int, ...]:
        if row == 0:
            return self.cursor
        cursor = list(self.next_cursor)
        for part in range(len(cursor)):
            later_R = np.flatnonzero(self.part_B[row:] == part)
            if len(later_R):
                cursor[part] = int(self.index_B[row + later_R[0]])
        return tuple(cursor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Consecutive accepted events, ts ascending; never empty.

    Attributes:
        first: Event index of the first row.
        next_offset: Event index to resume from: that of the first row of the batch after this
            one, or the end of the input. Rows rejected in between lie before it.
        event_B: Event index of each row: its place in the whole input, rejected rows counted.
        ts_ms_B: Time of each event in milliseconds.
        keys_BF: Raw 64-bit keys, one column a feature of the schema; of a list `PADDING_KEY`.
        dense_BD: Dense values as they were read; NaN: missing, which is null or NaN.
        label_B: 0.0 or 1.0.
        weight_B: The weight of each event in the loss, which stays divided by B; None: 1.
        more_labels_BL: The schema's further labels, 0.0 or 1.0; NaN: unknown. None: it has none.
        lists: The bags of the features that are lists, by their column of `keys_BF`.
        id_B: The id by which feedback names each event; None: the schema has no ids.
        origin: The place of each row in merged inputs; None: there is one input.
    """

    first: int
    next_offset: int
    event_B: NDArray[np.int64]
    ts_ms_B: NDArray[np.int64]
    keys_BF: NDArray[np.int64]
    dense_BD: NDArray[np.float32]
    label_B: NDArray[np.float32]
    weight_B: NDArray[np.float32] | None = None
    more_labels_BL: NDArray[np.float32] | None = None
    lists: Mapping[int, Bags] = field(default_factory=dict)
    id_B: NDArray[np.int64] | None = None
    origin: Origin | None = None

    def __len__(self) -> int:
        """Number of events."""
        return len(self.label_B)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.event_B, self.ts_ms_B, self.keys_BF, self.dense_BD, self.label_B)
        lists = sum(bags.nbytes for bags in self.lists.values())
        beside = (self.weight_B, self.more_labels_BL)
        lists += sum(array.nbytes for array in beside if array is not None)
        return sum(array.nbytes for array in arrays) + lists

    def labels(self, heads: int) -> NDArray[np.float32]:
        """Return label_B, or of several heads labels_BH.

        Requires: the schema has as many labels.
        """
        if heads == 1:
            return self.label_B
        assert self.more_labels_BL is not None
        return np.column_stack((self.label_B, self.more_labels_BL))

    def bags(self) -> list[Bags]:
        """One `Bags` a column of `keys_BF`: of one key an event, but where it is a list.

        A place of a sequence that is not taken is an empty bag.
        """
        bags_F: list[Bags] = []
        for f, keys_B in enumerate(self.keys_BF.T):
            if f in self.lists:
                bags_F.append(self.lists[f])
                continue
            taken_B = keys_B != PADDING_KEY
            bags_F.append(Bags.of(keys_B[taken_B], taken_B.astype(np.int64)))
        return bags_F

    @property
    def watermark_ms(self) -> int:
        """Time of the last event: all accepted events up to it are in this batch or before."""
        return int(self.ts_ms_B[-1])


@dataclass(slots=True, kw_only=True)
class DeadLetters:
    """Counts rejected rows and, given a path, appends them there as JSON lines.

    Each line has `event` (index), `reason` and `value` (a short text). Nothing but the counts is
    held in memory. A run that resumes may write again what the run before had read ahead.

    Attributes:
        path: File to append to, or None to count only.
        input: Where there are several inputs: which one, for the lines.
        max_lines: Lines written at most by this object; further rows are counted only.
        by_reason: Rows rejected so far, by reason.
        lost: Lines that the file lacks, for its drive was full.
    """

    path: Path | None = None
    input: str = ""
    max_lines: int = 1_000_000
    by_reason: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    _written: int = 0
    _file: LinesFile | None = None

    @property
    def count(self) -> int:
        """Rows rejected so far."""
        return sum(self.by_reason.values())

    def add(self, event_R: Sequence[int], reason: str, value_R: Sequence[object]) -> None:
        """Records R rows that were rejected for the same reason.

        Args:
            event_R: Their event indices.
            reason: One of a fixed set of texts: it is a key of `by_reason`.
            value_R: The offending values.

        Raises:
            OSError: The file cannot be written, for another reason than a full drive.
        """
        if not event_R:
            return
        self.by_reason[reason] = self.by_reason.get(reason, 0) + len(event_R)
        room = min(self.max_lines - self._written, len(event_R))
        if self.path is None or room <= 0:
            return
        self._write(
            [
                {"event": event, "reason": reason, "value": shown(value, _SHOWN_LETTERS)}
                for event, value in zip(event_R[:room], value_R[:room], strict=True)
            ]
        )

    def add_range(self, first: int, count: int, reason: str, value: str) -> None:
        """Records `count` events from index `first` on, in one line that also has `events`.

        For what cannot be looked at event by event: an entry that does not decode, a gap.

        Raises:
            OSError: The file cannot be written, for another reason than a full drive.
        """
        self.by_reason[reason] = self.by_reason.get(reason, 0) + count
        if self.path is None or self._written >= self.max_lines:
            return
        self._write([{"event": first, "events": count, "reason": reason, "value": value[:200]}])

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        assert self.path is not None
        if self._file is None or self._file.path != self.path:
            self._file = LinesFile(self.path)
        before = {"input": self.input} if self.input else {}
        lines = [json.dumps({**before, **row}).encode() + b"\n" for row in rows]
        self._written += self._file.add(lines)
        self.lost = self._file.lost


class EventSource(abc.ABC):
    """A stream of events in time order that can be resumed.

    Events of equal ts are never split over two batches: a batch grows past `batch_size` to finish
    its group. Batches are filled greedily from `start`, so their bounds depend on nothing else:
    reading from any batch's `next_offset` gives exactly the batches after it. A row whose ts lies
    before that of an accepted one is rejected.

    Attributes:
        schema: The schema that it is read by.
        dead_letters: Where rejected rows go; reading twice counts them twice.
    """

    schema: EventSchema
    dead_letters: DeadLetters

    @property
    def name(self) -> str:
        """Where the events are, for people; empty: nowhere that has a name."""
        return str(getattr(self, "path", ""))

    @property
    def live(self) -> bool:
        """Whether events may be long in coming, which says nothing of their time."""
        return False

    @property
    def is_read(self) -> bool:
        """Whether all that came until now was read, as far as is known; for live sources."""
        return True

    @property
    def joined(self) -> bool:
        """Whether it gives impressions, and feedback on them, for `RunConfig.labels`."""
        return False

    @abc.abstractmethod
    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yields the events from `start` on.

        Args:
            batch_size: Events in a batch, at least; the last one may be smaller.
            start: Event index to begin at: 0 or some batch's `next_offset`.

        Raises:
            ValueError: `batch_size` is below 1 or `start` below 0.
            DataError: The input cannot be read or lacks a column, `start` lies beyond its end, or
                a group of equal ts has more than `MAX_GROUP` events.
        """

    @abc.abstractmethod
    def total_events(self) -> int | None:
        """Events in the whole input, rejected ones counted; None if only reading tells."""

    def checkpointed(self, offset: int) -> None:  # noqa: B027  most sources have nothing to do
        """Takes note that a complete checkpoint goes on from event index `offset`.

        Called by the trainer's thread while another may be reading. Never raises: what could not
        be noted is noted with the next checkpoint.
        """

    def counters(self) -> dict[str, int]:
        """Counts of events of this source beside dead letters, by name; empty for most."""
        return {}

    def lag(self) -> dict[str, int]:
        """Messages that were not read yet, by input; empty where nobody tells."""
        return {}

    def leave(self) -> None:  # noqa: B027  most end soon by themselves
        """Has `batches` end soon: called by another thread than the one that reads."""

    def letters_to(self, path: Path) -> None:
        """Has rejected rows appended to a file."""
        self.dead_letters.path = path

    def seek(self, cursor: Sequence[int]) -> None:  # noqa: B027  most are one input
        """Says where each of several merged inputs stands at the `start` of the next `batches`."""

    def remember_in(self, folder: Path) -> None:  # noqa: B027  most have nothing to remember
        """Names the folder for what was decided by waiting, so that reading again decides it so."""


class DerivedSource(EventSource):
    """An `EventSource` over another's events: a subclass says what `batches` does to them."""

    def __init__(self, source: EventSource, schema: EventSchema | None = None) -> None:
        """Stand before `source`, with its schema unless there is another."""
        self._source = source
        self.schema = schema or source.schema

    @property
    def source(self) -> EventSource:
        """The source behind."""
        return self._source

    @property
    def dead_letters(self) -> DeadLetters:  # type: ignore[override]
        """As the source's are now."""
        return self._source.dead_letters

    @property
    def name(self) -> str:
        """As the source."""
        return self._source.name

    def total_events(self) -> int | None:
        """As the source."""
        return self._source.total_events()

    def checkpointed(self, offset: int) -> None:
        """As the source."""
        self._source.checkpointed(offset)

    def counters(self) -> dict[str, int]:
        """As the source."""
        return self._source.counters()

    def lag(self) -> dict[str, int]:
        """As the source."""
        return self._source.lag()

    def leave(self) -> None:
        """As the source."""
        self._source.leave()

    def letters_to(self, path: Path) -> None:
        """As the source."""
        self._source.letters_to(path)

    @property
    def live(self) -> bool:
        """As the source."""
        return self._source.live

    @property
    def is_read(self) -> bool:
        """As the source."""
        return self._source.is_read

    @property
    def joined(self) -> bool:
        """As the source."""
        return self._source.joined

    def seek(self, cursor: Sequence[int]) -> None:
        """As the source."""
        self._source.seek(cursor)

    def remember_in(self, folder: Path) -> None:
        """As the source."""
        self._source.remember_in(folder)
