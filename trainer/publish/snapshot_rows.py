"""The rows of a snapshot's files, as nodes have them, for whoever holds tables of that model."""

from collections.abc import Iterator
from pathlib import Path

from embertide import _store
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.publish.folder import PARTITIONS
from embertide.trainer.publish.snapshot import read_manifest


def read_buckets(
    rows: EmbeddingStore, snapshot: Path, *, by_partition: bool = False
) -> Iterator[tuple[int, _store.TableConfig, int, bytes]]:
    """Yield (table index, table, bucket, records) of a snapshot's files, each proved.

    Of many ranks, of the buckets whose rows this one holds. With `by_partition`, those of one
    delta file (publish/folder.py) come after another's.

    Raises:
        StoreError: A file is not of these tables, or fails its checksum.
    """
    index = {table.name: t for t, table in enumerate(rows.served_tables)}
    buckets = read_manifest(snapshot)["buckets"]
    if by_partition:
        buckets = sorted(buckets, key=lambda fields: fields["bucket"] % PARTITIONS)
    for fields in buckets:
        info = _store.BucketFileInfo(**fields)
        t = index[info.table]
        if not rows.ownership.holds(rows.ranks.rank, t, info.bucket):
            continue
        table = rows.served_tables[t]
        yield t, table, info.bucket, _store.read_bucket_file(str(snapshot), table, info)
