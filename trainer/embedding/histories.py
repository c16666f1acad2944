"""Histories as rows: what versions carry of them, so that nodes make a sequence's columns.

A published sequence has a table of its own behind the model's. Its rows are keyed by user and hold
the keys of the items, newest first; a chunk a place, so that a short history takes few bytes. The
trainer's state of a history is `History`, which its checkpoints hold; these rows are made from it
whenever a version ends, of the users that changed since the version before. From there on they are
rows like others: in deltas, snapshots, tiers and moves. docs/design/0017-columns-made-by-nodes.md.

Shapes: U users, L places of a sequence, K keys of a row.
"""

from collections.abc import Sequence

import numpy as np

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
        user_U, items_UL = history.take_changes()
        keys_U = user_U.view(np.uint64)
        items_UK = np.full((len(user_U), table.layout.dim), PADDING_KEY, np.int64)
        items_UK[:, : items_UL.shape[1]] = items_UL
        bucket_U = buckets_of(keys_U, table.bucket_bits)
        for bucket in np.unique(bucket_U).tolist():
            if not rows.ownership.holds(rows.ranks.rank, t, bucket):
                continue
            here_U = bucket_U == bucket
            records = _store.encode_key_records(table.layout, keys_U[here_U], items_UK[here_U])
            rows.store.import_records(t, bucket, records)
            rows.store.mark_changed(t, bucket, keys_U[here_U])
