"""Hot rows of a store: out to the ranks that answer for them, and home again.

A version, a snapshot, a checkpoint and a pass of pruning find all rows at home, as of a run without
hot rows, so none of them knows of any. Between two of them a host has its rows in a store of their
own (`guests`); what stands at home meanwhile is old, and nobody asks for it.

    bring_home    rows that have changed at their hosts, and what learning keeps of them, go home
    send_out      the rows of a set, from home to their hosts; keys without a row leave the set

All ranks call either together, while no rank has asked for keys that it has not yet learned from.

Shapes: K hot rows of all tables, U keys of a table, N rows of a message, R ranks.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.sync.channel import Channel
from embertide.trainer.sync.exchange import Asked, Exchange
from embertide.trainer.sync.hot import AskCounts, Asks, HotSet, Keys, candidates, choose

STATE = ("accumulator_N", "age_N", "utility_NC", "steps_N", "elements_NE")
# The guests' budget has pages of every table and size of row, half full, beside a row's own bytes.
_BASE_BYTES, _OVER_ROWS = 1 << 20, 2
_ENTRY_BYTES = 64  # of a row: in the index, and what learning keeps of it as a whole
COUNTED = (
    *("clipped_gradients", "refused_gradients", "dropped_gradients", "failed_keys"),
    *("placed_keys", "stale_places"),
)

Rows = dict[str, NDArray[Any]]
"""Rows of a message, by table and what it is of them."""


def guests_bytes(tables: Sequence[_store.TableConfig], max_rows: int) -> int:
    """Return the budget of a rank for rows that it hosts, however large the largest are."""
    row_bytes = max(2 * 4 * table.layout.dim for table in tables) + _ENTRY_BYTES
    return _BASE_BYTES + _OVER_ROWS * max_rows * row_bytes


def check_hot_rows(
    tables: Sequence[_store.TableConfig], max_rows: int, budget_bytes: int, ranks: int
) -> None:
    """Refuse hot rows that nobody else can answer for, or that memory has no room for.

    Raises:
        ConfigurationError: The message says what to give.
    """
    if ranks == 1:
        raise ConfigurationError(
            f"hot_rows is {max_rows}, and one rank alone has all rows: leave it out, or start more"
            " ranks (--nproc)"
        )
    needed = guests_bytes(tables, max_rows)
    if needed <= budget_bytes // 2:
        return
    row_bytes = guests_bytes(tables, 1) - guests_bytes(tables, 0)
    fits = max(0, budget_bytes // 2 - _BASE_BYTES) // row_bytes
    raise ConfigurationError(
        f"hot_rows is {max_rows}, of which a rank may host all in {needed} bytes, more than half of"
        f" ddr_budget_bytes = {budget_bytes}: give at most hot_rows={fits}, or more DDR"
    )


@dataclasses.dataclass(slots=True)
class HotStats:
    """Counters of hot rows on this rank since the start.

    Attributes:
        sets: Sets that were sent out.
        asks: Keys that were asked of this rank, in all steps.
        hot_asks: Those of them that were of hot rows.
        sent_rows: Rows that this rank sent "out" to hosts, and "home".
        sent_bytes: Bytes of these.
    """

    sets: int = 0
    asks: int = 0
    hot_asks: int = 0
    sent_rows: Counter[str] = dataclasses.field(default_factory=Counter)
    sent_bytes: int = 0


class HotRows:
    """The hot rows of a run, as one rank has them. For the thread that learns.

    Args:
        store: This rank's, of all rows that are at home here.
        guests: The tables that are learned, as hosts have them: each in one bucket.
        exchange: This rank's.
        options: Those of the guests' store that its rows learn by: optimizer and utilities.
        max_rows: A bound on the rows of a set.

    Attributes:
        rows: The set that is out.
        guests: The rows that this rank hosts; None: no row is out.
        stats: Counters.
    """

    def __init__(
        self,
        store: _store.TrainingStore,
        guests: Sequence[_store.TableConfig],
        exchange: Exchange,
        options: dict[str, Any],
        max_rows: int,
    ) -> None:
        """Begin with all rows at home."""
        self.rows = HotSet.none()
        self.guests: _store.TrainingStore | None = None
        self.stats = HotStats()
        self.max_rows = max_rows
        self._store, self._tables, self._exchange = store, guests, exchange
        self._options = options
        everywhere = exchange.everywhere
        self._counted = [t for t in range(len(guests)) if t not in everywhere]
        self._counts = AskCounts(len(guests), max_rows, left_out=everywhere)
        self._load_R = np.zeros(exchange.ranks.size)
        self._dropped: Counter[str] = Counter()  # counters of guests that are gone
        self._channel = exchange.ranks.channel("rows")

    # --- what is asked ----------------------------------------------------------------------------

    def note(self, asked: Asked) -> None:
        """Count the keys that ranks asked of this one in a step that is learned."""
        tables = len(self._tables)
        for keys_T in asked.keys_RT:
            hot = sum(map(len, keys_T[tables:]))
            self.stats.hot_asks += hot
            self.stats.asks += hot + sum(map(len, keys_T[:tables]))
        if not self._counts.add(asked.keys_RT):
            return
        for keys_T in asked.keys_RT:
            self._load_R[self._channel.rank] += sum(len(keys_T[t]) for t in self._counted)
            for t, key_U in enumerate(keys_T[tables:]):
                home_U = self._exchange.router.owners(t, key_U)
                self._load_R += np.bincount(home_U, minlength=len(self._load_R))

    def choose(self) -> HotSet:
        """Return the set for the keys that were asked for since the last call; alike on all ranks.

        Raises:
            RankLostError: A rank is gone.
        """
        load_R = self._exchange.summed(self._load_R, "hot")
        asks = self._counts.asks()
        mine = candidates(asks, self._homes(asks), load_R)
        packed = np.stack([mine.table_K.astype(np.int64), mine.key_K, mine.count_K])
        found = [
            np.frombuffer(each, np.int64).reshape(3, -1)
            for each in self._channel.gather_bytes(packed.tobytes(), "hot")
        ]
        table_K, key_K, count_K = _merged(np.concatenate(found, axis=1))
        every = Asks(table_K.astype(np.int32), key_K, count_K)
        self._counts.clear()
        self._load_R = np.zeros(len(load_R))
        return choose(every, self._homes(every), load_R, self.max_rows)

    def _homes(self, asks: Asks | HotSet) -> NDArray[np.uint16]:
        home_K = np.empty(len(asks.key_K), np.uint16)
        for t in np.unique(asks.table_K).tolist():
            of_t = asks.table_K == t
            home_K[of_t] = self._exchange.router.owners(t, asks.key_K[of_t])
        return home_K

    # --- steps ------------------------------------------------------------------------------------

    def look_up(
        self, bags: "Sequence[_store.BagLookup]", *, threads: int, places: bool
    ) -> "list[_store.RowPlaces]":
        """Look bags up whose tables stand behind all others."""
        assert self.guests is not None
        tables = len(self._tables)
        hosted: list[Any] = [(bag[0] - tables, *bag[1:]) for bag in bags]
        return self.guests.lookup_bags(hosted, threads=threads, places=places)

    def apply(
        self,
        apply: Callable[..., int],
        bags: "Sequence[_store.BagGradients]",
        places: "Sequence[_store.RowPlaces | None]",
    ) -> "tuple[int, list[_store.BagGradients], list[_store.RowPlaces | None]]":
        """Take the step of the guests; return how many there were, and the bags of other rows.

        Guests take every step, with gradients or without: what learning keeps of a row has its age.

        Args:
            apply: Takes a step of a store with bags and places.
            bags: The bags of all rows.
            places: As of `apply_gradients`.
        """
        if self.guests is None:
            return 0, list(bags), list(places)
        tables = len(self._tables)
        hosted: list[Any] = [(bag[0] - tables, *bag[1:]) for bag in bags if bag[0] >= tables]
        known = [place for bag, place in zip(bags, places, strict=False) if bag[0] >= tables]
        updated = apply(self.guests, hosted, places=known)
        self.guests.maintain()
        return (
            updated,
            [bag for bag in bags if bag[0] < tables],
            [place for bag, place in zip(bags, places, strict=False) if bag[0] < tables],
        )

    # --- where rows are ---------------------------------------------------------------------------

    def bring_home(self) -> HotSet:
        """Have all rows be at home; return the set that was out.

        Raises:
            RankLostError: A rank is gone.
            StoreError: A row on an SSD cannot be read.
        """
        was, self.rows = self.rows, HotSet.none()
        if not len(was.key_K):
            return was
        assert self.guests is not None
        parts_R: list[Rows] = [{} for _ in range(self._channel.size)]
        with self._channel.together():
            for t, table in enumerate(self._tables):
                records = self.guests.take_changes(t, 0)
                key_U = _store.record_keys(table.layout, records)
                home_U = self._exchange.router.owners(t, key_U.view(np.int64))
                for rank in np.unique(home_U).tolist():
                    parts_R[rank] |= self._copied(self.guests, t, key_U[home_U == rank])
        came = self._swap(parts_R)
        with self._channel.together():
            for rows in came:
                for t, records, state in _unpacked(rows):
                    self._store.put_rows(t, records, state)
        stats = self.guests.stats()
        self._dropped.update({name: stats[name] for name in COUNTED})
        self.guests = None
        self._set_hosts()
        return was

    def send_out(self, rows: HotSet) -> None:
        """Have hosts answer for the rows of a set; all are at home.

        Raises:
            RankLostError: A rank is gone.
            StoreError: A row on an SSD cannot be read.
        """
        if not len(rows.key_K):
            return
        mine = self._channel.rank
        home_K = self._homes(rows)
        parts_R: list[Rows] = [{} for _ in range(self._channel.size)]
        missing: list[int] = []
        with self._channel.together():
            for t, table in enumerate(self._tables):
                for rank in np.unique(rows.host_K).tolist():
                    at_N = np.flatnonzero(
                        (home_K == mine) & (rows.table_K == t) & (rows.host_K == rank)
                    )
                    key_N = rows.key_K[at_N].view(np.uint64)
                    part = self._copied(self._store, t, key_N)
                    parts_R[rank] |= part
                    there = np.empty(0, np.uint64)
                    for _, records, _ in _unpacked(part):
                        there = _store.record_keys(table.layout, records)
                    missing += at_N[~np.isin(key_N, there)].tolist()
        stays_K = np.ones(len(rows.key_K), np.bool_)
        for of_rank in self._channel.gather(missing, "hot"):
            stays_K[of_rank] = False
        came = self._swap(parts_R)
        with self._channel.together():
            guests = _store.TrainingStore(
                tables=list(self._tables),
                ddr_budget_bytes=guests_bytes(self._tables, self.max_rows),
                **self._options,
            )
            for part in came:
                for t, records, state in _unpacked(part):
                    guests.import_records(t, 0, records)
                    keys = _store.record_keys(self._tables[t].layout, records)
                    guests.set_states(t, keys, state)
            self.guests = guests
        self.rows = rows.of(stays_K)
        self.stats.sets += 1
        self._set_hosts()

    def _set_hosts(self) -> None:
        """Route what is asked for to the hosts of the set."""
        tables = len(self._tables)
        for t in range(tables):
            of_t = self.rows.table_K == t
            key_U, host_U = self.rows.key_K[of_t], self.rows.host_K[of_t]
            self._exchange.router.set_hosts(t, tables + t, key_U, host_U)

    def _copied(self, store: _store.TrainingStore, table: int, key_U: NDArray[np.uint64]) -> Rows:
        """Return rows as a message has them; none of no keys."""
        if not len(key_U):
            return {}
        records, state = store.export_rows(table, key_U)
        self.stats.sent_rows["home" if store is self.guests else "out"] += len(state[0])
        return packed(table, records, state)

    def _swap(self, parts_R: Sequence[Rows]) -> list[Rows]:
        """Send each rank its rows, and return what came, by rank."""
        came_R, sent_bytes = swap_rows(self._channel, parts_R, "hot")
        self.stats.sent_bytes += sent_bytes
        return came_R

    # --- figures ----------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return the counters of the steps of guests, by the names that a store has for them."""
        now = {} if self.guests is None else self.guests.stats()
        return {name: int(now.get(name, 0)) + self._dropped[name] for name in COUNTED}

    def figures(self) -> dict[str, int]:
        """Return what is hot, and what was; of all ranks, their sums.

        Hot `rows` are hosted here now, in `bytes`. Of the `asks` of this rank `hot_asks` were for
        such rows. `out` rows left this rank for their hosts, and `home` ones for their homes;
        `sent_bytes` are theirs. `sets` is counted by the first rank.
        """
        stats = {} if self.guests is None else self.guests.stats()
        return {
            "rows": int((self.rows.host_K == self._channel.rank).sum()),
            "bytes": sum(stats.get(name, 0) for name in ("ddr_payload_bytes", "index_bytes")),
            "sets": self.stats.sets if self._channel.first else 0,
            "asks": self.stats.asks,
            "hot_asks": self.stats.hot_asks,
            "out": self.stats.sent_rows["out"],
            "home": self.stats.sent_rows["home"],
            "sent_bytes": self.stats.sent_bytes,
        }


def packed(table: int, records: bytes, state: Any) -> Rows:
    """Return rows of a table, and what learning keeps of them, as a message has them."""
    named = zip(STATE, state, strict=True)
    return {f"{table}.records": np.frombuffer(records, np.uint8)} | {
        f"{table}.{name}": values for name, values in named
    }


def unpacked(table: int, rows: Rows) -> tuple[bytes, Any]:
    """Return records and states of a table in a message."""
    return rows[f"{table}.records"].tobytes(), tuple(rows[f"{table}.{name}"] for name in STATE)


def swap_rows(channel: Channel, parts_R: Sequence[Rows], kind: str) -> tuple[list[Rows], int]:
    """Send each rank its rows; return what came, by rank, and how many bytes went to others."""
    data_R = [safetensors.numpy.save(rows) if rows else b"" for rows in parts_R]
    sent_bytes = sum(map(len, data_R)) - len(data_R[channel.rank])
    came_R = swap(channel, data_R, kind)
    return [safetensors.numpy.load(data) if data else {} for data in came_R], sent_bytes


def swap(channel: Channel, data_R: Sequence[bytes], kind: str = "hot") -> list[bytes]:
    """Send each rank its bytes, and return those that came, by rank."""
    sizes = torch.tensor([len(data) for data in data_R])
    ones = [1] * channel.size
    came = channel.exchange(sizes, ones, ones, kind).wait().tolist()
    sent = torch.frombuffer(bytearray(b"".join(data_R) or b"\0"), dtype=torch.uint8)
    sent = sent[: sum(map(len, data_R))]
    got = channel.exchange(sent, [len(data) for data in data_R], came, kind).wait()
    ends = np.cumsum(came).tolist()
    data = got.numpy().tobytes()
    return [data[end - size : end] for end, size in zip(ends, came, strict=True)]


def _unpacked(rows: Rows) -> "list[tuple[int, bytes, _store.BucketState]]":
    """Return (table, records, states) of a message."""
    found: list[tuple[int, bytes, Any]] = []
    for name in sorted(name for name in rows if name.endswith(".records")):
        table = name.removesuffix(".records")
        found.append((int(table), *unpacked(int(table), rows)))
    return found


def _merged(asks_3K: NDArray[np.int64]) -> tuple[Keys, Keys, NDArray[np.int64]]:
    """Return tables, keys and counts; a key that several ranks counted stands there once."""
    key_2U, place_K = np.unique(asks_3K[:2], axis=1, return_inverse=True)
    count_U = np.zeros(key_2U.shape[1], np.int64)
    np.add.at(count_U, place_K.reshape(-1), asks_3K[2])
    return key_2U[0], key_2U[1], count_U
