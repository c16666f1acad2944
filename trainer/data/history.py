"""Histories made from the stream itself: the items that each event's user liked before it.

A history is what was before the event's ts: a group of equal ts, as the impressions of one click,
sees none of its own labels, which are added once all of it is read. It becomes columns, which
`SequenceConfig` names. A request may carry them as it carries every other key. Where versions carry
the histories (`SequenceConfig.published`), nodes make the columns, as of the version.

The state is a function of the events before. A trainer keeps it beside its rows, as of the events
that it has learned, and in its checkpoints: a stream need not be read again from its beginning.
`HistorySource` is for readers that have no checkpoint; it does read what is before its start.

Shapes: B events of a batch, F features, L places of a sequence, T of them with times, U users.
"""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import ModelConfig, SequenceConfig
from embertide.trainer.data.base import (
    MISSING_KEY,
    PADDING_KEY,
    Batch,
    DerivedSource,
    EventSchema,
    EventSource,
    FeatureColumn,
)
from embertide.trainer.data.crosses import crossed
from embertide.trainer.data.limit import FirstEvents

_FIRST_SLOTS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HistoryState:
    """All that a `History` holds, for a checkpoint.

    Attributes:
        user_U: Keys of the users, the one not seen for longest first.
        items_UL: Their items, newest first, padded with `PADDING_KEY`.
        times_UT: The items' times, in ms, padded alike; as wide as items, or 0 without times.
        forgotten: As `History.forgotten`.
    """

    user_U: NDArray[np.int64]
    items_UL: NDArray[np.int64]
    times_UT: NDArray[np.int64]
    forgotten: int


class History:
    """The last positive items of the users of one stream. Used by one thread.

    An event without a user (`MISSING_KEY`) has no history and makes none; an item whose key is
    `PADDING_KEY` is not kept.

    Attributes:
        forgotten: Users who were dropped because more than `SequenceConfig.users` came.
    """

    def __init__(self, config: SequenceConfig, features: Sequence[str]) -> None:
        """Begin with nobody; `features` names the first columns of KEYS."""
        self.config = config
        self.forgotten = 0
        self._user, self._item = features.index(config.user), features.index(config.item)
        # Slot 0 is the history of those who have none.
        self._items_SL = np.full((_FIRST_SLOTS, config.length), PADDING_KEY, np.int64)
        times = len(config.gap_columns)
        self._times_ST = np.full((_FIRST_SLOTS, times), PADDING_KEY, np.int64)
        self._slots: OrderedDict[int, int] = OrderedDict()  # by user, latest seen last
        self._changed: dict[int, None] = {}  # users since `take_changes`, forgotten ones too

    def extend(self, batch: Batch) -> Batch:
        """Return the batch with the sequence's columns, and add its positives to the histories.

        Requires: batches come in order, and no group of equal ts is cut.
        """
        user_B, item_B = batch.keys_BF[:, self._user], batch.keys_BF[:, self._item]
        users, items = user_B.tolist(), item_B.tolist()
        items_BL = np.empty((len(batch), self.config.length), np.int64)
        times_BT = np.empty((len(batch), self._times_ST.shape[1]), np.int64)
        positive_P = np.flatnonzero(batch.label_B).tolist()
        ends = np.flatnonzero(np.diff(batch.ts_ms_B)) + 1
        next_positive = 0
        for begin, end in itertools.pairwise([0, *ends.tolist(), len(batch)]):
            slots = [self._seen(user) for user in users[begin:end]]
            items_BL[begin:end], times_BT[begin:end] = self._items_SL[slots], self._times_ST[slots]
            while next_positive < len(positive_P) and positive_P[next_positive] < end:
                place = positive_P[next_positive]
                self._add(users[place], items[place], int(batch.ts_ms_B[place]))
                next_positive += 1
        length_B = (items_BL != PADDING_KEY).sum(axis=1)
        repeat_B = (items_BL == item_B[:, None]).any(axis=1)
        made = (length_B, repeat_B, gaps_s(times_BT))
        dense_BD = np.column_stack((batch.dense_BD, *made)).astype(np.float32)
        keys_BF = np.concatenate((batch.keys_BF, items_BL), axis=1)
        return dataclasses.replace(batch, keys_BF=keys_BF, dense_BD=dense_BD)

    def like(self, batch: Batch) -> None:
        """Add the positives of a batch that has the sequence's columns already."""
        positive_P = np.flatnonzero(batch.label_B)
        liked_P = batch.keys_BF[positive_P][:, [self._user, self._item]].tolist()
        for (user, item), ts_ms in zip(liked_P, batch.ts_ms_B[positive_P].tolist(), strict=True):
            self._add(user, item, ts_ms)

    def state(self) -> HistoryState:
        """Return a copy of all that is held."""
        slots = list(self._slots.values())
        return HistoryState(
            user_U=np.fromiter(self._slots.keys(), np.int64, len(self._slots)),
            items_UL=self._items_SL[slots],
            times_UT=self._times_ST[slots],
            forgotten=self.forgotten,
        )

    def restore(self, state: HistoryState) -> None:
        """Hold what `state` says, and nothing else."""
        users = len(state.user_U)
        self._items_SL = _with_room(state.items_UL)
        self._times_ST = _with_room(state.times_UT)
        self._slots = OrderedDict(zip(state.user_U.tolist(), range(1, users + 1), strict=True))
        self.forgotten = state.forgotten
        self._changed = {}

    def take_changes(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Return user_U, items_UL and gap_UT of those whose items changed since the last call.

        Of a sequence that is published. Users who were forgotten have no item. What `restore` gives
        back is not new. The gaps are as `gaps_s` gives them.
        """
        user_U = np.fromiter(self._changed.keys(), np.int64, len(self._changed))
        # Slot 0 is empty.
        slots = [self._slots.get(user, 0) for user in self._changed]
        self._changed = {}
        return user_U, self._items_SL[slots], gaps_s(self._times_ST[slots])

    def _seen(self, user: int) -> int:
        """Return the slot of a user, 0 for one without a history."""
        slot = self._slots.get(user, 0)
        if slot:
            self._slots.move_to_end(user)
        return slot

    def _add(self, user: int, item: int, ts_ms: int) -> None:
        if user == MISSING_KEY or item == PADDING_KEY:
            return
        slot = self._slots.get(user)
        if slot is None:
            slot = self._slots[user] = self._new_slot()
        for kept_SK, new in ((self._items_SL, item), (self._times_ST, ts_ms)):
            row = kept_SK[slot]
            row[1:] = row[:-1]
            row[:1] = new
        if self.config.published:
            self._changed[user] = None

    def _new_slot(self) -> int:
        """Return an empty slot, if need be that of the user who was not seen for longest."""
        if len(self._slots) == self.config.users:
            user, slot = self._slots.popitem(last=False)
            self._items_SL[slot] = self._times_ST[slot] = PADDING_KEY
            if self.config.published:
                self._changed[user] = None
            self.forgotten += 1
            return slot
        slot = len(self._slots) + 1
        if slot == len(self._items_SL):
            self._items_SL, self._times_ST = (
                np.concatenate((kept_SK, np.full_like(kept_SK, PADDING_KEY)))
                for kept_SK in (self._items_SL, self._times_ST)
            )
        return slot


def gaps_s(times_BT: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the seconds from each item's time, in ms, to that of the newest, the first; [B, T].

    A place that is not taken has 0.
    """
    gap_BT = (times_BT[:, :1] - times_BT) / 1000
    return np.where(times_BT == PADDING_KEY, 0, gap_BT).astype(np.float32)


def _with_room(kept_UK: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what is kept of users from slot 1 on, with room for the first more."""
    users, width = kept_UK.shape
    kept_SK = np.full((max(_FIRST_SLOTS, users + 1), width), PADDING_KEY, np.int64)
    kept_SK[1 : users + 1] = kept_UK
    return kept_SK


class HistorySource(DerivedSource):
    """The events of `source` with the columns of sequences.

    Read from a start, it first reads all that is before it, whose rejected rows are counted again.
    """

    def __init__(self, source: EventSource, sequences: Sequence[SequenceConfig]) -> None:
        """Name the events and the sequences.

        Raises:
            ValueError: The source lacks a feature that a sequence names.
        """
        self._sequences = sequences
        self._names = [feature.name for feature in source.schema.features]
        for sequence in sequences:
            for name in (sequence.user, sequence.item):
                if name not in self._names:
                    raise ValueError(
                        f"sequence {sequence.name!r} names feature {name!r}; the events have "
                        f"{', '.join(self._names)}"
                    )
                if source.schema.features[self._names.index(name)].is_list:
                    raise ValueError(
                        f"sequence {sequence.name!r}: feature {name!r} is a list; user and item "
                        "are one key an event"
                    )
        super().__init__(source, _extended(source.schema, sequences))

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yield batches as the source does, extended."""
        histories = [History(sequence, self._names) for sequence in self._sequences]
        if start > 0:
            for batch in FirstEvents(self._source, start).batches(batch_size=batch_size):
                extend(histories, batch)
        for batch in self._source.batches(batch_size=batch_size, start=start):
            yield extend(histories, batch)


def with_columns(source: EventSource, model: ModelConfig) -> EventSource:
    """Return the events with all that the model's columns are made from: crosses, sequences."""
    source = crossed(source, model)
    return HistorySource(source, model.sequences) if model.sequences else source


def for_requests(source: EventSource, model: ModelConfig) -> EventSource:
    """Return the events with the columns that a request has to carry: their own, or all.

    Nodes make crosses from an event's own columns, and sequences whose histories versions carry.
    """
    made = all(sequence.published for sequence in model.sequences)
    return source if made else with_columns(source, model)


def extend(histories: Sequence[History], batch: Batch) -> Batch:
    """Return a batch with the columns of all histories, in their order."""
    for history in histories:
        batch = history.extend(batch)
    return batch


def _extended(schema: EventSchema, sequences: Sequence[SequenceConfig]) -> EventSchema:
    """Return what a schema is with the sequences' columns, which come from those of the items."""
    column = {feature.name: feature.column for feature in schema.features}
    places = [
        FeatureColumn(name=name, column=column[sequence.item])
        for sequence in sequences
        for name in sequence.columns
    ]
    dense = [name for sequence in sequences for name in sequence.dense_columns]
    return dataclasses.replace(
        schema, features=(*schema.features, *places), dense=(*schema.dense, *dense)
    )
