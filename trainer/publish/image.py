"""PublishedImage: the rows that nodes hold, from which a version may leave out the least important.

Without a byte budget a version carries every row that changed. With one
(`PublishBudget`, docs/design/0012-priority-deltas.md) it carries the rows that have moved farthest
from what nodes hold, and the others wait, for a bounded number of versions. What nodes hold then
differs from what the trainer holds, so the trainer keeps a copy: a serving store that is fed with
exactly the batches that are published. Snapshots are written from it, which makes a node that
starts from a snapshot and one that follows deltas equal, byte for byte. Histories
(embedding/histories.py) never wait; their bytes come out of the budget first.

Of a table that is served in another type than it is trained in, a row has moved as far as what
nodes would read of it has: one that reads as before has not.

Which rows a version carries depends on nothing but the trainer's rows, the image and the version's
number. A run that resumes therefore makes the same choice again.

Shapes: N rows of one bucket, M of them that nodes hold, D values of a row.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.config import PublishBudget
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.publish.folder import PARTITIONS, Publication
from embertide.trainer.publish.publisher import Change
from embertide.trainer.publish.snapshot_rows import read_buckets
from embertide.trainer.sync.channel import ALONE, Channel

# An odd 64-bit number (SplitMix64's seed): the top half of a product with it is a hash of the key.
_MIX = np.uint64(0x9E3779B97F4A7C15)
_ROWLESS = (4, 5)  # sources of keys without a row: default, pruned


@dataclasses.dataclass(slots=True)
class ImageStats:
    """Counters since the start."""

    deferred_rows: int = 0  # that a version left out, counted once a version
    overdue_rows: int = 0  # that were sent beside the budget, since it was their turn


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one bucket that nodes hold otherwise, or not at all; keys ascend.

    A row's gain is how far it has moved from what nodes hold, a byte of its record.
    """

    key_N: NDArray[np.uint64]
    gain_N: NDArray[np.float64]
    size_N: NDArray[np.int64]  # encoded bytes

    def at(self, place: NDArray[Any]) -> "_Rows":
        """Return the rows at places, or where a mask is true."""
        return _Rows(self.key_N[place], self.gain_N[place], self.size_N[place])

    def __add__(self, other: "_Rows") -> "_Rows":
        key_N = np.concatenate([self.key_N, other.key_N])
        both = _Rows(
            key_N,
            np.concatenate([self.gain_N, other.gain_N]),
            np.concatenate([self.size_N, other.size_N]),
        )
        return both.at(np.argsort(key_N, kind="stable"))


_NONE = _Rows(np.empty(0, np.uint64), np.empty(0, np.float64), np.empty(0, np.int64))


class PublishedImage:
    """The nodes' state at the newest version. Used by one thread.

    Attributes:
        store: The rows as a node has them; its versions are numbered by itself.
        stats: Counters.

    Takes the payload and index of every row a second time, without optimizer state, and 24 bytes
    for each row that waits.
    """

    def __init__(
        self,
        rows: EmbeddingStore,
        budget: PublishBudget,
        *,
        publish_every_s: int,
        channel: Channel = ALONE,
    ) -> None:
        """Start with no rows. `rows` are those that are trained.

        Of many ranks, each has the image of what it publishes; the budget is of all together.
        """
        self._channel = channel
        self._rows = rows
        self._budget = budget
        self._bytes_a_version = budget.bytes_per_s * publish_every_s
        self._ordinals = {table.id: t for t, table in enumerate(rows.tables)}
        self.store = _store.ServingStore(
            tables=rows.served_tables, ddr_budget_bytes=budget.image_bytes, window_versions=1
        )
        self._waiting = {(t, bucket): _NONE for t, _, bucket in rows.places()}
        self._commits = 0  # of the image's own store, which counts versions by itself
        self._number = 0  # the version that the image is at
        # (table, bucket) of which nodes may hold what the image does not say: a file is damaged.
        self._unknown: set[tuple[int, int]] = set()
        self.stats = ImageStats()
        self._commit()

    def choose(self, number: int, *, everything: bool) -> list[Change]:
        """Take the trained rows' changes and return those that version `number` is to carry.

        Args:
            number: The number of the version.
            everything: Leave nothing out.
        """
        places = list(self._rows.places())
        removed: dict[tuple[int, int], list[bytes]] = {}
        histories = {
            (t, bucket): self._take_whole(t, bucket)
            for t, table, bucket in places
            if table.layout.dtype == "keys"
        }
        found = [
            _NONE if (t, bucket) in histories else self._differing(t, bucket, removed)
            for t, _, bucket in places
        ]
        if everything:
            taken = [np.ones(len(each.key_N), np.bool_) for each in found]
        else:
            # Versions are counted in event time: a gap in the events gives the next one more.
            versions = number - self._number
            histories_bytes = sum(self._channel.gather(sum(map(len, histories.values()))))
            budget_bytes = self._bytes_a_version * versions - histories_bytes
            taken = self._within(number, found, budget_bytes)
        changes = []
        for (t, _, bucket), each, taken_N in zip(places, found, taken, strict=True):
            table = self._rows.served_tables[t]
            if (t, bucket) in histories:
                if histories[t, bucket]:
                    changes.append((table, bucket, histories[t, bucket]))
                continue
            whole = (t, bucket) in self._unknown
            self._waiting[t, bucket] = _NONE if whole else each.at(~taken_N)
            key_N = self._all_keys(t, bucket) if whole else each.key_N[taken_N]
            self._rows.store.mark_changed(t, bucket, key_N)
            records = self._rows.take_changes(t, bucket)
            if not whole and (gone := removed.get((t, bucket))):
                records = _merged(table.layout, records, b"".join(gone))
            if records:
                changes.append((table, bucket, records))
        self.stats.deferred_rows += self.waiting_rows
        return changes

    def _take_whole(self, t: int, bucket: int) -> bytes:
        """Take all changes of a bucket of histories: no number says how far one has moved."""
        if (t, bucket) in self._unknown:
            self._rows.store.mark_changed(t, bucket, self._all_keys(t, bucket))
        return self._rows.store.take_changes(t, bucket)

    def _all_keys(self, t: int, bucket: int) -> NDArray[np.uint64]:
        """Return the keys of a bucket's rows, trained or held by nodes, ascending."""
        trained = self._rows.store.export_bucket(t, bucket)
        held = self.store.export_bucket(t, bucket)
        keys = [
            _store.record_keys(self._rows.tables[t].layout, trained),
            _store.record_keys(self._rows.served_tables[t].layout, held),
        ]
        return np.unique(np.concatenate(keys))

    def _differing(self, t: int, bucket: int, removed: dict[tuple[int, int], list[bytes]]) -> _Rows:
        """Return the rows of a bucket that nodes do not hold as they are trained now.

        The tombstones of rows that nodes hold go to `removed`: they take twelve bytes each, and
        the key may come back as another row, so that none waits.
        """
        waiting = self._waiting[t, bucket]
        records = self._rows.take_changes(t, bucket)
        if not records:
            return waiting
        table = self._rows.served_tables[t]
        key_N, live_N, begin_N, value_ND = _store.decode_records(table.layout, records)
        held, source_N = self.store.copy_rows(t, key_N.view(np.int64))
        held_N = ~np.isin(source_N, _ROWLESS)
        _, held_live_M, _, held_MD = _store.decode_records(table.layout, held)
        removed_N = live_N == 0
        for i in np.flatnonzero(removed_N & held_N).tolist():
            removed.setdefault((t, bucket), []).append(records[begin_N[i] : begin_N[i + 1]])
        # Where nodes hold no row they answer the default row.
        away_ND = value_ND - np.array(table.default_row or [0.0], np.float32)
        away_ND[held_N] = value_ND[held_N] - held_MD
        differs_N = np.ones(len(key_N), np.bool_)
        differs_N[held_N] = (live_N[held_N] != held_live_M) | away_ND[held_N].any(axis=1)
        size_N = np.diff(begin_N).astype(np.int64)
        gain_N = np.sqrt(np.einsum("ND,ND->N", away_ND, away_ND, dtype=np.float64)) / size_N
        changed = _Rows(key_N, gain_N, size_N).at(differs_N & ~removed_N)
        return waiting.at(~np.isin(waiting.key_N, key_N)) + changed

    def _within(
        self, number: int, found: list[_Rows], budget_bytes: int
    ) -> list[NDArray[np.bool_]]:
        """Take the rows that gain the most within the budget, and those whose turn it is."""
        key, gain, size = (
            np.concatenate([getattr(each, name) for each in found])
            for name in ("key_N", "gain_N", "size_N")
        )
        # Each key's turn comes once in `max_age_versions`, whatever else waits.
        turn = ((key * _MIX) >> np.uint64(32)) + np.uint64(number)
        taken: NDArray[np.bool_] = turn % np.uint64(self._budget.max_age_versions) == 0
        self.stats.overdue_rows += int(taken.sum())
        left = np.flatnonzero(~taken)
        mine = np.column_stack((gain[left], size[left].astype(np.float64)))
        said = self._channel.gather_bytes(mine.tobytes(), "gains")
        parts = [np.frombuffer(each).reshape(-1, 2) for each in said]
        every = np.concatenate(parts)
        # Stable: rows of equal gain go in the order of ranks, buckets and keys, in every run.
        order = np.argsort(-every[:, 0], kind="stable")
        fits = np.zeros(len(every), np.bool_)
        fits[order] = np.cumsum(every[order, 1]) <= budget_bytes
        begin = sum(map(len, parts[: self._channel.rank]))
        taken[left] = fits[begin : begin + len(left)]
        return np.split(taken, np.cumsum([len(each.key_N) for each in found])[:-1])

    @property
    def waiting_rows(self) -> int:
        """Rows that nodes hold otherwise than they were trained when `choose` was last called."""
        return sum(len(rows.key_N) for rows in self._waiting.values())

    def load(self, snapshot: Path, number: int) -> None:
        """Take the rows of a snapshot, where the image has none.

        Raises:
            StoreError: A file of it is not what its manifest says, or there is no room.
        """
        for t, _, bucket, records in read_buckets(self._rows, snapshot):
            self.store.stage_records(self._commits + 1, t, bucket, records)
        self._commit()
        self._number = number

    def follow(self, publication: Publication, number: int) -> None:
        """Bring the image to version `number`, which others published, from the delta files.

        What a damaged file held is not known: the next version has every row of its buckets.
        """
        damaged = set[int]()
        for version in publication.deltas():
            if self._number < version.number <= number:
                for batch in publication.salvage(version, damaged):
                    if (self._ordinals[batch.table_id], batch.bucket) not in self._waiting:
                        continue  # another rank's
                    self._stage(batch.table_id, batch.bucket, batch.records)
        self._unknown |= {
            (t, bucket) for t, _, bucket in self._rows.places() if bucket % PARTITIONS in damaged
        }
        self._commit()
        self._number = max(self._number, number)

    def apply(self, number: int, changes: Iterable[Change]) -> None:
        """Bring the image to version `number`, whose changes these are."""
        for table, bucket, records in changes:
            self._stage(table.id, bucket, records)
        self._commit()
        self._number = number
        self._unknown.clear()

    @property
    def is_known(self) -> bool:
        """Whether every file could be read from which nodes have their rows."""
        return not self._unknown

    def _stage(self, table_id: int, bucket: int, records: bytes) -> None:
        self.store.stage_records(self._commits + 1, self._ordinals[table_id], bucket, records)

    def _commit(self) -> None:
        self._commits += 1
        self.store.commit(self._commits)

    def buckets(self) -> Iterator[tuple[_store.TableConfig, int, bytes]]:
        """Yield all rows as (table, bucket, records), one bucket at a time."""
        for t, _, bucket in self._rows.places():
            yield self._rows.served_tables[t], bucket, self.store.export_bucket(t, bucket)

    def waiting(self, t: int, bucket: int) -> bytes:
        """Return the trained rows of a bucket that nodes hold otherwise, or not at all.

        Requires: the table is served in the type in which it is trained.
        """
        trained = self._rows.store.export_bucket(t, bucket)
        held = self.store.export_bucket(t, bucket)
        return _store.differing_records(self._rows.tables[t].layout, trained, held)


def _merged(layout: _store.RowLayout, *parts: bytes) -> bytes:
    """Return the records of all parts in ascending key order."""
    records = list[tuple[int, bytes]]()
    for part in parts:
        key_N, _, begin_N, _ = _store.decode_records(layout, part)
        ends = zip(key_N.tolist(), begin_N[:-1].tolist(), begin_N[1:].tolist(), strict=True)
        records += ((key, part[begin:end]) for key, begin, end in ends)
    return b"".join(record for _, record in sorted(records))
