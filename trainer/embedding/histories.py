"""Histories as rows: what versions carry of them, so that nodes make a sequence's columns.

A published sequence has a table of its own behind the model's. Its rows are keyed by user and hold
the keys of the items, newest first; a chunk a place, so that a short history takes few bytes. With
times, a chunk has some items and behind them, two in a key, their seconds before the newest. The
trainer's state of a history is `History`, which its checkpoints hold; these rows are made from it
whenever a version ends, of the users that changed since the version before. From there on they are
rows like others: in deltas, snapshots, tiers and moves. docs/design/0017-columns-made-by-nodes.md.

Shapes: U users, L places of a sequence, T those with times, K keys of a row, C chunks of it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.data.base import PADDING_KEY
from embertide.trainer.data.history import History
from embertide.trainer.data.keys import buckets_of
from embertide.trainer.embedding.store import EmbeddingStore


def put_histories(histories: Sequence[History], rows: EmbeddingStore) -> None:
    """Bring the users that changed into the rows of the published sequences.

    Of many ranks, each puts those of its own buckets; all of them have the same histories.

    Raises:
        StoreError: There is no room.
    """
    published = [history for history in histories if history.config.published]
    first = len(rows.config.tables)
    for t, history in enumerate(published, first):
        table = rows.tables[t]
        user_U, items_UL, gap_UT = history.take_changes()
        keys_U = user_U.view(np.uint64)
        items_UK = history_rows(table.layout, items_UL, gap_UT)
        bucket_U = buckets_of(keys_U, table.bucket_bits)
        for bucket in np.unique(bucket_U).tolist():
            if not rows.ownership.holds(rows.ranks.rank, t, bucket):
                continue
            here_U = bucket_U == bucket
            records = _store.encode_key_records(table.layout, keys_U[here_U], items_UK[here_U])
            rows.store.import_records(t, bucket, records)
            rows.store.mark_changed(t, bucket, keys_U[here_U])


def history_rows(
    layout: _store.RowLayout, items_UL: NDArray[np.int64], gap_UT: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Return the rows of histories, [U, K]; T is 0 without times, else L.

    A chunk without an item is `PADDING_KEY` throughout, so that it takes no bytes.
    """
    users, length = items_UL.shape
    timed = gap_UT.shape[1] > 0
    in_chunk = layout.chunk_dim // 3 * 2 if timed else layout.chunk_dim
    places = layout.chunks * in_chunk
    items_UC = np.full((users, places), PADDING_KEY, np.int64)
    items_UC[:, :length] = items_UL
    if not timed:
        return items_UC
    gaps_UC = np.zeros((users, places), np.float32)
    gaps_UC[:, :length] = gap_UT
    chunked = items_UC.reshape(users, layout.chunks, in_chunk)
    times = gaps_UC.reshape(users, layout.chunks, in_chunk).view(np.int64)
    dead = (chunked == PADDING_KEY).all(axis=2, keepdims=True)
    times = np.where(dead, PADDING_KEY, times)
    rows_UK: NDArray[np.int64] = np.concatenate((chunked, times), axis=2).reshape(users, layout.dim)
    return rows_UK


def items_of_rows(
    layout: _store.RowLayout, rows_UK: NDArray[np.int64], length: int, *, timed: bool
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return items_UL and gap_UT of rows that `history_rows` made."""
    chunks = rows_UK.reshape(len(rows_UK), layout.chunks, layout.chunk_dim)
    in_chunk = layout.chunk_dim // 3 * 2 if timed else layout.chunk_dim
    items_UL = chunks[:, :, :in_chunk].reshape(len(rows_UK), -1)[:, :length]
    if not timed:
        return items_UL, np.zeros((len(rows_UK), 0), np.float32)
    times = np.ascontiguousarray(chunks[:, :, in_chunk:]).view(np.float32)
    gap_UL = times.reshape(len(rows_UK), -1)[:, :length]
    return items_UL, np.where(items_UL == PADDING_KEY, np.float32(0), gap_UL)
