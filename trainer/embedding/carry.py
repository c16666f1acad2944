"""Rows carried over to a table of another form: other buckets, width, chunks or dtype.

A wider row keeps its values, and its new ones begin as those of a new row do; so the new values
learn, and what a net computes from the old ones stays. A narrower row keeps its first values.

Shapes: N rows, D values of a row, C chunks of a row.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.data.keys import Keys, buckets_of, initial_values
from embertide.trainer.embedding.records import encode_rows, unstorable
from embertide.trainer.errors import FinalError

Floats = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A bucket's rows, and what training keeps of them; None: nothing is known."""

    records: bytes
    state: "_store.BucketState | None"


class RowCarrier:
    """Carries the rows of one table over, a few buckets at a time. Used by one thread.

    Attributes:
        same: Whether the tables have one form, so that records stay as they are.

    Args:
        old: The table that they are of.
        new: The table that they go to.
        state: Whether what training keeps of a row goes along: the optimizers are of one kind.
        counters: Whether the counts that rows hold go along: both tables count alike.
    """

    def __init__(
        self, old: _store.TableConfig, new: _store.TableConfig, *, state: bool, counters: bool
    ) -> None:
        """Name both tables."""
        self.old, self.new = old, new
        self._state, self._counters = state, counters
        self._bits = min(old.bucket_bits, new.bucket_bits)
        self.same = _form(old) == _form(new) and (counters or not old.counter_chunks)

    def groups(self) -> Iterator[tuple[range, range]]:
        """Yield (old buckets, new buckets) that hold the same keys, each bucket once."""
        more_old, more_new = self.old.bucket_bits - self._bits, self.new.bucket_bits - self._bits
        for group in range(1 << self._bits):
            yield (
                range(group << more_old, (group + 1) << more_old),
                range(group << more_new, (group + 1) << more_new),
            )

    def records(self, records: bytes, live_N: NDArray[np.uint16] | None = None) -> bytes:
        """Return rows of the old table as records of the new one, in their order.

        Args:
            records: Of rows, no tombstones.
            live_N: Masks of the chunks that are live in the new ones; None: as in the old ones.

        Raises:
            TrainerError: A value does not fit the new dtype.
        """
        if self.same and live_N is None:
            return records
        keys_N, held_N, _, values_ND = _store.decode_records(self.old.layout, records)
        return self._records(keys_N, held_N if live_N is None else live_N, values_ND)

    def carry(self, parts: Sequence[Part], into: range) -> Iterator[tuple[int, Part]]:
        """Yield (bucket, rows) of the new table from the buckets of one group.

        Args:
            parts: The parts of all old buckets of the group.
            into: The group's new buckets.

        Raises:
            TrainerError: A value does not fit the new dtype.
        """
        if self.same and len(parts) == len(into) == 1:
            yield into[0], Part(parts[0].records, parts[0].state if self._state else None)
            return
        rows = [_store.decode_records(self.old.layout, part.records) for part in parts]
        keys_N = np.concatenate([each[0] for each in rows])
        live_N = np.concatenate([each[1] for each in rows])
        values_ND = np.concatenate([each[3] for each in rows])
        states = [part.state for part in parts]
        state: list[NDArray[Any]] | None = None
        if self._state and all(each is not None for each in states):
            state = [np.concatenate(a) for a in zip(*(s for s in states if s), strict=True)]
        order_N = np.argsort(keys_N, kind="stable")
        bucket_N = buckets_of(keys_N, self.new.bucket_bits)[order_N]
        for bucket in into:
            mine = order_N[bucket_N == bucket]
            yield (
                bucket,
                Part(
                    self._records(keys_N[mine], live_N[mine], values_ND[mine]),
                    None if state is None else self._states([each[mine] for each in state]),
                ),
            )

    def _records(self, keys_N: Keys, live_N: NDArray[np.uint16], values_ND: Floats) -> bytes:
        layout, old = self.new.layout, self.old.layout
        learned = layout.dim - self.new.counter_chunks * layout.chunk_dim
        held = old.dim - self.old.counter_chunks * old.chunk_dim
        kept = min(learned, held)
        new_ND = np.zeros((len(keys_N), layout.dim), np.float32)
        new_ND[:, :kept] = values_ND[:, :kept]
        if kept < learned:
            new_ND[:, kept:learned] = initial_values(self.new, keys_N, range(kept, learned))
        if self._counters and self.new.counter_chunks:
            counts_NC = values_ND[:, held:]
            new_ND[:, learned : learned + counts_NC.shape[1]] = counts_NC
        bad = unstorable(layout, new_ND)
        if bad is not None:
            row, d = bad
            raise FinalError(
                f"table {self.new.name!r}: value {new_ND[row, d]} of key {keys_N[row]} does not fit"
                f" {layout.dtype}: keep {old.dtype}, or choose bf16"
            )
        mask_N = self._masks(live_N)
        pieces: list[tuple[NDArray[np.intp], list[bytes]]] = []
        for mask in np.unique(mask_N).tolist():
            of = np.flatnonzero(mask_N == mask)
            pieces.append((of, _encoded(layout, mask, keys_N[of], new_ND[of])))
        records: list[bytes] = [b""] * len(keys_N)
        for of, encoded in pieces:
            for place, record in zip(of.tolist(), encoded, strict=True):
                records[place] = record
        return b"".join(records)

    def _masks(self, live_N: NDArray[np.uint16]) -> NDArray[np.uint16]:
        """Return which chunks of the new rows are live: pruned ones stay so, new ones are."""
        layout, old = self.new.layout, self.old.layout
        learned, held = (
            table.layout.chunks - table.counter_chunks for table in (self.new, self.old)
        )
        if layout.chunk_dim != old.chunk_dim:  # chunks of the two are not the same values
            mask_N = np.full(len(live_N), (1 << learned) - 1)
        else:
            common = (1 << min(learned, held)) - 1
            grown = ((1 << learned) - 1) & ~common
            mask_N = (live_N.astype(np.int64) & common) | grown
        if self.new.counter_chunks and self._counters:
            counts_N = (live_N.astype(np.int64) >> held) & ((1 << self.new.counter_chunks) - 1)
            mask_N = mask_N | (counts_N << learned)
        return mask_N.astype(np.uint16)

    def _states(self, state: "list[NDArray[Any]]") -> "_store.BucketState":
        accumulator_N, age_N, utility_NC, steps_N, elements_NE = state
        learned = self.new.layout.chunks - self.new.counter_chunks
        dim = learned * self.new.layout.chunk_dim if elements_NE.shape[1] else 0
        return (
            accumulator_N,
            age_N,
            _resized(utility_NC, learned),
            steps_N,
            _resized(elements_NE, dim),
        )


def _form(table: _store.TableConfig) -> tuple[Any, ...]:
    layout = table.layout
    return (
        table.bucket_bits,
        layout.dtype,
        layout.chunks,
        layout.chunk_dim,
        table.counter_chunks,
    )


def _resized(values_NC: Floats, columns: int) -> Floats:
    """Return the first columns, with zeros where there are too few."""
    out_NC = np.zeros((len(values_NC), columns), np.float32)
    kept = min(columns, values_NC.shape[1])
    out_NC[:, :kept] = values_NC[:, :kept]
    return out_NC


def _encoded(layout: _store.RowLayout, mask: int, keys_N: Keys, values_ND: Floats) -> list[bytes]:
    """Return the record of every row, whose live chunks are those of the mask."""
    chunks = [c for c in range(layout.chunks) if mask >> c & 1]
    if not chunks:
        return [_store.encode_record(int(key), 0, 0, b"") for key in keys_N]
    live_NCd = values_ND.reshape(len(keys_N), layout.chunks, layout.chunk_dim)[:, chunks]
    live = _store.RowLayout(dtype=layout.dtype, chunks=len(chunks), chunk_dim=layout.chunk_dim)
    records = encode_rows(live, keys_N, np.ascontiguousarray(live_NCd.reshape(len(keys_N), -1)))
    records["live"] = mask
    return [record.tobytes() for record in records]
