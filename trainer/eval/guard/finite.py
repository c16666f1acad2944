"""Rows and dense tensors that are not finite, found in delta files: of every key, asked for or not.

A later finite value, or a tombstone, makes a key good again.
"""

import numpy as np
import safetensors.numpy

from embertide import _store
from embertide.trainer.publish.folder import Publication, VersionId

_ROOM = 64 << 20  # of one batch's rows, which are 1 MiB encoded at most


class FiniteScan:
    """Follows the versions of a publication, oldest first. Used by one thread.

    Args:
        publication: Its folder.
        tables: By id.
    """

    def __init__(self, publication: Publication, tables: dict[int, _store.TableConfig]) -> None:
        """Nothing is read yet."""
        self._publication, self._tables = publication, tables
        self._keys: set[tuple[int, int]] = set()
        self._dense = False

    def restart(self) -> None:
        """Forget what was found: a version that is known to be good comes next."""
        self._keys.clear()
        self._dense = False

    def read(self, version: VersionId) -> None:
        """Take in what a version changed.

        Raises:
            PublicationError: A file is gone, or fails its checksum.
        """
        commit = self._publication.read_commit(version).commit
        if tensors := self._publication.read_dense(commit):
            values = safetensors.numpy.load(tensors).values()
            self._dense = not all(np.isfinite(each).all() for each in values)
        for batch in self._publication.read_batches(version):
            table = self._tables[batch.table_id]
            if table.layout.dtype == "keys":
                continue  # any 64 bits are a key
            keys = _store.record_keys(table.layout, batch.records)
            alone = _store.TableConfig(name="t", id=0, layout=table.layout)
            store = _store.ServingStore(tables=[alone], ddr_budget_bytes=_ROOM)
            store.stage_records(1, 0, 0, batch.records)
            store.commit(1)
            rows_ND, _, _ = store.lookup(0, keys.astype(np.int64))
            bad_N = ~np.isfinite(rows_ND).all(axis=1)
            named = [(batch.table_id, key) for key in keys.tolist()]
            self._keys.difference_update(named)
            self._keys.update(each for each, bad in zip(named, bad_N, strict=True) if bad)

    def found(self) -> str:
        """Say what is not finite now; empty: nothing."""
        dense = "dense tensors" if self._dense else ""
        rows = f"{len(self._keys)} rows" if self._keys else ""
        return " and ".join(filter(None, (rows, dense)))
