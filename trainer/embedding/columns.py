"""Column-wise tables of a store: the chunks of their rows lie at several ranks (ZionEX, section 4).

Each rank that a plan names has some chunks of every row of such a table, its *part*, in a store of
their own. The rank that owns the row's bucket is its *home*: it has the row whole, as it was when
rows last came home, decides which keys have one, and writes it. So versions, snapshots, checkpoints
and passes of pruning, before each of which rows come home, know nothing of columns.

A step of a rank that has a part:

    squares   it adds up its part of each key's gradients, in the order of ranks, and tells the
              other ranks with a part the squares, by chunk: what clips and optimizers need of the
              whole row, in the order in which a whole row's are added up
    new keys  the gradients of keys without a row go home, where the step treats them as those of
              any other key; whatever row it makes goes to the ranks with parts
    step      its part of each row takes the step of the whole row

All ranks call all methods together. docs/design/0038-column-wise-tables.md has the alternatives.

Shapes: U keys of a table, each once; N keys, as often as they came; C chunks of a whole row, D its
floats; c and d those of a part, with one chunk more in the store, so that a row whose chunks here
are all dead is one; R ranks.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.data.keys import buckets_of
from embertide.trainer.embedding.hot import COUNTED, Rows, packed, swap_rows, unpacked
from embertide.trainer.embedding.records import chunks_of, records_of
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.sync.channel import Channel
from embertide.trainer.sync.exchange import Exchange, Part

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]
Squares = NDArray[np.float64]

_PART_KEYS = 1024  # of a part of a step: kPartKeys of backend_cpp/store/training_step.cc
_ROWS_AT_ONCE = 1 << 15  # of a table, that a rank sends in one message


def check_columns(exchange: Exchange, tables: Sequence[_store.TableConfig], *, hot: bool) -> None:
    """Refuse column-wise tables that cannot be.

    Raises:
        ConfigurationError: The message names the table, and says what to give.
    """
    for t in exchange.columns:
        table = tables[t]
        whole = f"table {table.name!r} is column-wise in the plan"
        instead = "give its buckets to ranks, or the whole table to one"
        if table.counter_chunks:
            raise ConfigurationError(f"{whole}, and its rows count events: {instead}")
        if table.layout.dtype == "int8":
            raise ConfigurationError(
                f"{whole}, and rows of int8 have one scale for all of their chunks: {instead}, or"
                " use fp16"
            )
        if exchange.codecs.gradients == "int8":
            raise ConfigurationError(
                f"{whole}, and int8 keeps what a whole row's gradient lost: {instead}, or use"
                ' Codecs(gradients="fp16")'
            )
        if hot:
            raise ConfigurationError(
                f"{whole}, and hot_rows may give its rows other ranks: {instead}, or leave"
                " hot_rows out"
            )


@dataclasses.dataclass(slots=True)
class ColumnStats:
    """Counters of column-wise tables on this rank since the start.

    Attributes:
        new_rows: Rows that this rank made, as their home, and sent to the ranks with parts.
        sent_rows: Parts of rows that this rank sent "out" from home, and "home".
        sent_bytes: Bytes that it sent for all of it, squares among them.
    """

    new_rows: int = 0
    sent_rows: Counter[str] = dataclasses.field(default_factory=Counter)
    sent_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """Gradients of one table in a step: keys as often as they came, in the order of ranks."""

    keys_N: Keys
    counts_N: NDArray[np.uint32] | None
    gradients_Nd: Floats
    has_row_N: NDArray[np.bool_]

    def of(self, mask_N: NDArray[np.bool_]) -> "_Given":
        counts = None if self.counts_N is None else self.counts_N[mask_N]
        return _Given(
            self.keys_N[mask_N], counts, self.gradients_Nd[mask_N], self.has_row_N[mask_N]
        )


class ColumnTables:
    """The column-wise tables of a run, as one rank has them. For the thread that learns.

    Args:
        store: This rank's, of all rows that are at home here.
        tables: Those that are learned.
        exchange: This rank's.
        options: Those that rows learn by: optimizer and utilities.
        budget_bytes: Of memory for this rank's parts.

    Attributes:
        parts: The store of this rank's parts; None: all rows are at home, or it has none.
        stats: Counters.
    """

    def __init__(
        self,
        store: _store.TrainingStore,
        tables: Sequence[_store.TableConfig],
        exchange: Exchange,
        options: Mapping[str, Any],
        budget_bytes: int,
    ) -> None:
        """Begin with all rows at home."""
        self.parts: _store.TrainingStore | None = None
        self.stats = ColumnStats()
        self._store, self._exchange = store, exchange
        self._tables = {t: tables[t] for t in exchange.columns}
        self._options, self._budget_bytes = dict(options), budget_bytes
        self._channel: Channel = exchange.ranks.channel("rows")
        mine = self._channel.rank
        self._here: dict[int, Part] = {
            t: part
            for t, parts in exchange.columns.items()
            for part in parts
            if part.columns.rank == mine
        }
        self._place = {t: n for n, t in enumerate(self._here)}  # in the store of parts
        self._is_out = False
        self._new_keys: dict[int, NDArray[np.uint64]] = {}
        self._is_any_new = False
        self._dropped: Counter[str] = Counter()  # counters of stores of parts that are gone

    def has(self, table: int) -> bool:
        """Whether a table is column-wise."""
        return table in self._tables

    # --- steps ------------------------------------------------------------------------------------

    def look_up(
        self, bags: "Sequence[_store.BagLookup]", *, threads: int, places: bool
    ) -> "list[_store.RowPlaces]":
        """Look up this rank's parts of rows."""
        assert self.parts is not None
        asked: list[_store.BagLookup] = []
        for bag in bags:
            wide = np.empty((len(bag[1]), self._part_layout(bag[0]).dim), np.float32)
            asked.append((self._place[bag[0]], bag[1], None, "sum", wide))
        told = self.parts.lookup_bags(asked, threads=threads, places=places)
        for bag, its in zip(bags, asked, strict=True):
            bag[4][:] = its[4][:, : bag[4].shape[1]]
        return told

    def apply(
        self,
        apply: Callable[..., int],
        bags: "Sequence[_store.BagGradients]",
        places: "Sequence[_store.RowPlaces | None]",
    ) -> "tuple[int, list[_store.BagGradients], list[_store.RowPlaces | None]]":
        """Take the step of this rank's parts.

        Returns how many there were, the bags of all other rows, and their places: those of keys
        that have no row yet, and of which this rank is the home, are among them. `send_new` is to
        be called after their step.

        Args:
            apply: Takes a step of a store with bags and places.
            bags: The bags of all rows.
            places: As of `apply_gradients`.

        Raises:
            RankLostError: A rank is gone.
        """
        self.begin()
        left = [n for n, bag in enumerate(bags) if not self.has(bag[0])]
        others, other_places = [bags[n] for n in left], [places[n] for n in left]
        given_T: dict[int, _Given] = {}
        for t in self._here:
            at_N = [n for n, bag in enumerate(bags) if bag[0] == t]
            given_T[t] = self._given(t, [bags[n] for n in at_N], [places[n] for n in at_N])
        parts_R: list[Rows] = [{} for _ in range(self._channel.size)]
        known_T: dict[int, tuple[_Given, NDArray[np.uint32], Squares]] = {}
        for t, given in given_T.items():
            known = given.of(given.has_row_N)
            layout = self._layout(self._here[t].columns.chunks, t)
            place_N, squares_Uc = _store.squares_of_keys(layout, known.keys_N, known.gradients_Nd)
            known_T[t] = known, place_N, squares_Uc
            for part in self._exchange.columns[t]:
                if part is not self._here[t]:
                    parts_R[part.columns.rank][f"{t}.squares"] = squares_Uc
            self._send_home(t, given, parts_R)
        came_R = self._swap(parts_R)
        self._is_any_new = any(f"{t}.new" in came for came in came_R for t in self._tables)
        updated = 0
        if self.parts is not None:
            own: list[_store.BagGradients] = []
            for t, (known, place_N, squares_Uc) in known_T.items():
                squares_UC = self._whole(t, squares_Uc, came_R)
                wide = self._with_squares(t, known.gradients_Nd, squares_UC[place_N])
                own.append((self._place[t], known.keys_N, None, wide, known.counts_N))
            which = {
                self._place[t]: (part.columns.first, self._tables[t].layout.chunks)
                for t, part in self._here.items()
            }
            updated = apply(self.parts, own, parts=which)
            self.parts.maintain()
        self._new_keys = {}
        for t, table in self._tables.items():
            if (bag := self._bag_of_new(t, came_R)) is not None:
                others.append(bag)
                other_places.append(None)
                self._new_keys[t] = np.unique(bag[1].view(np.uint64))
                records, _ = self._store.copy_rows(t, self._new_keys[t].view(np.int64))
                if records:
                    raise _apart(table, "a row at home is not known to the ranks with its parts")
        return updated, others, other_places

    def send_new(self) -> None:
        """Send the rows that the step has made here to the ranks that have parts of them.

        Raises:
            RankLostError: A rank is gone.
        """
        if not self._is_any_new:
            return
        parts_R: list[Rows] = [{} for _ in range(self._channel.size)]
        for t, key_U in self._new_keys.items():
            self.stats.new_rows += self._copy_out(t, key_U, parts_R)
        self._take_in(self._swap(parts_R))
        self._new_keys, self._is_any_new = {}, False

    def _given(
        self,
        table: int,
        bags: "Sequence[_store.BagGradients]",
        places: "Sequence[_store.RowPlaces | None]",
    ) -> _Given:
        dim = self._here[table].dim
        if not bags:
            return _Given(
                np.empty(0, np.int64),
                None,
                np.empty((0, dim), np.float32),
                np.empty(0, np.bool_),
            )
        counts = [bag[4] for bag in bags if len(bag) > 4 and bag[4] is not None]
        return _Given(
            np.concatenate([bag[1] for bag in bags]),
            np.concatenate(counts) if counts else None,
            np.concatenate([bag[3] for bag in bags]),
            np.concatenate(
                [
                    self._has_row(table, bag[1], place)
                    for bag, place in zip(bags, places, strict=True)
                ]
            ),
        )

    def _has_row(
        self, table: int, keys_U: Keys, places: "_store.RowPlaces | None"
    ) -> NDArray[np.bool_]:
        if places is None:
            assert self.parts is not None
            out = np.empty((len(keys_U), self._part_layout(table).dim), np.float32)
            (places,) = self.parts.lookup_bags(
                [(self._place[table], keys_U, None, "sum", out)], places=True
            )
        return places.found()

    def _send_home(self, table: int, given: _Given, parts_R: list[Rows]) -> None:
        """Add this rank's part of the gradients of new keys to what their homes get."""
        if given.has_row_N.all():
            return
        if self._here[table] is self._exchange.columns[table][0]:
            for part in parts_R:  # else nobody knows whether rows will come
                part[f"{table}.new"] = np.empty(0, np.uint8)
        home_N = self._exchange.router.owners(table, given.keys_N)
        for rank in np.unique(home_N[~given.has_row_N]).tolist():
            its = given.of(~given.has_row_N & (home_N == rank))
            parts_R[rank] |= {
                f"{table}.keys": its.keys_N,
                f"{table}.gradients": its.gradients_Nd,
                f"{table}.all": np.array([(home_N == rank).sum()]),
            }
            if its.counts_N is not None:
                parts_R[rank][f"{table}.counts"] = its.counts_N

    def _bag_of_new(self, table: int, came_R: Sequence[Rows]) -> "_store.BagGradients | None":
        """Return the whole gradients of keys that have no row yet, in the order of ranks."""
        parts = self._exchange.columns[table]
        first = came_R[parts[0].columns.rank]
        if f"{table}.keys" not in first:
            return None
        keys_N = first[f"{table}.keys"]
        whole_ND = np.empty((len(keys_N), self._tables[table].layout.dim), np.float32)
        for part in parts:
            came = came_R[part.columns.rank]
            _check_same(self._tables[table], keys_N, came[f"{table}.keys"])
            whole_ND[:, part.first : part.first + part.dim] = came[f"{table}.gradients"]
        # Where room is short, who comes first gets a row: as in a step of all of the table's keys.
        parts_bits = (int(first[f"{table}.all"][0]) // _PART_KEYS).bit_length()
        order_N = np.argsort(buckets_of(keys_N.view(np.uint64), parts_bits), kind="stable")
        counts_N = first.get(f"{table}.counts")
        if counts_N is not None:
            counts_N = counts_N[order_N]
        return table, keys_N[order_N], None, whole_ND[order_N], counts_N

    def _whole(self, table: int, squares_Uc: Squares, came_R: Sequence[Rows]) -> Squares:
        """Return the squares of whole rows."""
        every = [
            squares_Uc
            if part is self._here[table]
            else came_R[part.columns.rank][f"{table}.squares"]
            for part in self._exchange.columns[table]
        ]
        return np.ascontiguousarray(np.concatenate(every, axis=1))

    def _with_squares(self, table: int, gradients_Nd: Floats, squares_NC: Squares) -> Floats:
        """Return gradients as the store of parts takes them."""
        part, dim = self._here[table], self._part_layout(table).dim
        wide = np.zeros((len(gradients_Nd), dim + 2 * squares_NC.shape[1]), np.float32)
        wide[:, : part.dim] = gradients_Nd
        wide[:, dim:] = np.ascontiguousarray(squares_NC).view(np.float32)
        return wide

    # --- where rows are ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Have ranks have their parts of all rows, if they have none.

        Raises:
            RankLostError: A rank is gone.
            StoreError: A row on an SSD cannot be read, or there is no room for parts.
        """
        if self._is_out:
            return
        self._is_out = True
        with self._channel.together():
            if self._here:
                self.parts = _store.TrainingStore(
                    tables=[
                        _store.TableConfig(
                            name=self._tables[t].name, id=t, layout=self._part_layout(t)
                        )
                        for t in self._here
                    ],
                    ddr_budget_bytes=self._budget_bytes,
                    **self._options,
                )
        for t, table in self._tables.items():
            found = [np.empty(0, np.uint64)]
            with self._channel.together():
                for bucket in range(1 << table.bucket_bits):
                    if self._exchange.ownership.publishes(self._channel.rank, t, bucket):
                        records = self._store.export_bucket(t, bucket)
                        found.append(_store.record_keys(table.layout, records))
            for key_U in self._rounds(np.concatenate(found)):
                parts_R: list[Rows] = [{} for _ in range(self._channel.size)]
                with self._channel.together():
                    self.stats.sent_rows["out"] += self._copy_out(t, key_U, parts_R)
                came_R = self._swap(parts_R)
                with self._channel.together():
                    self._take_in(came_R)

    def bring_home(self) -> None:
        """Have all rows be at home as they are now; ranks keep their parts.

        Raises:
            RankLostError: A rank is gone.
            StoreError: A row on an SSD cannot be read.
        """
        if not self._is_out:
            return
        for t, table in self._tables.items():
            changed = np.empty(0, np.uint64)
            with self._channel.together():
                if t in self._here:
                    assert self.parts is not None
                    records = self.parts.take_changes(self._place[t], 0)
                    changed = _store.record_keys(self._part_layout(t), records)
            for key_U in self._rounds(changed):
                parts_R: list[Rows] = [{} for _ in range(self._channel.size)]
                with self._channel.together():
                    home_U = self._exchange.router.owners(t, key_U.view(np.int64))
                    for rank in np.unique(home_U).tolist():
                        assert self.parts is not None
                        key_N = key_U[home_U == rank]
                        found = self.parts.export_rows(self._place[t], key_N)
                        parts_R[rank] |= packed(t, *found)
                        self.stats.sent_rows["home"] += len(key_N)
                came_R = self._swap(parts_R)
                with self._channel.together():
                    self._put(t, table, came_R)

    def recall(self) -> None:
        """Bring all rows home, where they may then change by other ways than steps.

        Raises:
            RankLostError: A rank is gone.
            StoreError: A row on an SSD cannot be read.
        """
        self.bring_home()
        if self.parts is not None:
            stats = self.parts.stats()
            self._dropped.update({name: stats[name] for name in COUNTED})
        self.parts, self._is_out = None, False

    def _rounds(self, key_U: NDArray[np.uint64]) -> Iterator[NDArray[np.uint64]]:
        """Give some keys after the other, as often on each rank; none at last where others have."""
        rounds = -(-max(self._channel.gather(len(key_U), "columns")) // _ROWS_AT_ONCE)
        for n in range(rounds):
            yield key_U[n * _ROWS_AT_ONCE : (n + 1) * _ROWS_AT_ONCE]

    def _copy_out(self, table: int, key_U: NDArray[np.uint64], parts_R: list[Rows]) -> int:
        """Add the parts of rows that are at home here to what ranks get; return how many rows."""
        if not len(key_U):
            return 0
        layout = self._tables[table].layout
        records, state = self._store.export_rows(table, key_U)
        if not records:
            return 0
        keys_N, live_N, chunks_NCb = chunks_of(layout, records)
        accumulator_N, age_N, utility_NC, steps_N, elements_NE = state
        for part in self._exchange.columns[table]:
            here = slice(part.columns.first, part.columns.first + part.columns.chunks)
            count = part.columns.chunks
            live = (live_N >> here.start & ((1 << count) - 1)) | (1 << count)
            payload = np.zeros((len(keys_N), count + 1, chunks_NCb.shape[2]), np.uint8)
            payload[:, :count] = chunks_NCb[:, here]
            utility = np.zeros((len(keys_N), count + 1), np.float32)
            utility[:, :count] = utility_NC[:, here]
            width = self._part_layout(table, count).dim if elements_NE.shape[1] else 0
            elements = np.zeros((len(keys_N), width), np.float32)
            if width:
                elements[:, : part.dim] = elements_NE[:, part.first : part.first + part.dim]
            part_layout = self._part_layout(table, count)
            parts_R[part.columns.rank] |= packed(
                table,
                records_of(part_layout, keys_N, live.astype(np.uint16), payload),
                (accumulator_N, age_N, utility, steps_N, elements),
            )
        return len(keys_N)

    def _take_in(self, came_R: Sequence[Rows]) -> None:
        """Keep parts of rows that come from their homes."""
        for came in came_R:
            for t, at in self._place.items():
                if f"{t}.records" not in came:
                    continue
                assert self.parts is not None
                records, state = unpacked(t, came)
                self.parts.import_records(at, 0, records)
                self.parts.set_states(at, _store.record_keys(self._part_layout(t), records), state)

    def _put(self, table: int, config: _store.TableConfig, came_R: Sequence[Rows]) -> None:
        """Join the parts of rows that come home, and keep them."""
        parts = self._exchange.columns[table]
        if f"{table}.records" not in came_R[parts[0].columns.rank]:
            return
        live: Any = np.uint16(0)
        payloads: list[NDArray[np.uint8]] = []
        utilities: list[Floats] = []
        elements: list[Floats] = []
        first: Any = None
        for part in parts:
            records, state = unpacked(table, came_R[part.columns.rank])
            count = part.columns.chunks
            keys_N, live_N, chunks_Ncb = chunks_of(self._part_layout(table, count), records)
            first = first or (keys_N, state)
            _check_same(config, first[0], keys_N)
            _check_same(config, first[1][0], state[0])
            live = live | (live_N & ((1 << count) - 1)) << part.columns.first
            payloads.append(chunks_Ncb[:, :count])
            utilities.append(state[2][:, :count])
            elements.append(state[4][:, : part.dim])
        accumulator_N, age_N, _, steps_N, _ = first[1]
        self._store.put_rows(
            table,
            records_of(
                config.layout,
                first[0],
                np.asarray(live, np.uint16),
                np.concatenate(payloads, axis=1),
            ),
            (
                accumulator_N,
                age_N,
                np.ascontiguousarray(np.concatenate(utilities, axis=1)),
                steps_N,
                np.ascontiguousarray(np.concatenate(elements, axis=1)),
            ),
        )

    def _layout(self, chunks: int, table: int) -> _store.RowLayout:
        layout = self._tables[table].layout
        return _store.RowLayout(dtype=layout.dtype, chunks=chunks, chunk_dim=layout.chunk_dim)

    def _part_layout(self, table: int, chunks: int | None = None) -> _store.RowLayout:
        """Return the layout of parts, this rank's or others', with the chunk that always lives."""
        if chunks is None:
            chunks = self._here[table].columns.chunks
        return self._layout(chunks + 1, table)

    def _swap(self, parts_R: Sequence[Rows]) -> list[Rows]:
        came_R, sent_bytes = swap_rows(self._channel, parts_R, "columns")
        self.stats.sent_bytes += sent_bytes
        return came_R

    # --- figures ----------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return the counters of the steps of parts, by the names that a store has for them."""
        now = {} if self.parts is None else self.parts.stats()
        return {name: int(now.get(name, 0)) + self._dropped[name] for name in COUNTED}

    def figures(self) -> dict[str, int]:
        """Return what this rank has of column-wise tables, and what it sent; of all, their sums.

        `rows` are parts of rows, in `bytes`. Of the others see `ColumnStats`.
        """
        stats = {} if self.parts is None else self.parts.stats()
        return {
            "rows": stats.get("rows", 0),
            "bytes": sum(stats.get(name, 0) for name in ("ddr_payload_bytes", "index_bytes")),
            "new": self.stats.new_rows,
            "out": self.stats.sent_rows["out"],
            "home": self.stats.sent_rows["home"],
            "sent_bytes": self.stats.sent_bytes,
        }


def _check_same(table: _store.TableConfig, first: NDArray[Any], other: NDArray[Any]) -> None:
    """Crash where two ranks have learned different things of the same rows."""
    if not np.array_equal(first, other):
        raise _apart(table, "ranks have other keys, or another state of the same rows")


def _apart(table: _store.TableConfig, what: str) -> RuntimeError:
    return RuntimeError(
        f"the parts of rows of table {table.name!r} have come apart, which is a defect: {what};"
        " start the run again, which goes on from its checkpoint, by a plan without columns"
    )
