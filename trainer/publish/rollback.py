"""Rollback: a new version whose state is that of an older one (docs/design/0011).

Its delta holds every row that any version after the older one changed, as it was then. So it leads
to that state from any of these versions, and a node may skip what lies between.
"""

import dataclasses
import struct
import time
from collections.abc import Iterator

import numpy as np

from embertide import _store
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.publish.chain import (
    MissingVersionError,
    Place,
    VersionFiles,
    read_records,
)
from embertide.trainer.publish.folder import PARTITIONS, Publication, VersionId
from embertide.trainer.publish.promotion import Undone, maker
from embertide.trainer.publish.publisher import Change, Publisher, promotion_record
from embertide.v1 import update_pb2


class RollbackError(ConfigurationError):
    """A version cannot be restored; the message says what is missing. Nothing was published."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The result of a rollback."""

    version: int  # the new one
    to: int
    undone: int  # versions
    buckets: int
    rows: int
    tombstones: int
    checksum: str  # of the restored state, in all buckets that were touched
    seconds: float


class _Target:
    """The state of a version, and what came after it.

    Args:
        publication: Where it is.
        newest: The version to come back from.
        number: The version to come back to.

    Raises:
        RollbackError: Files that it takes are no longer kept.
        PublicationError: A file fails its checksum.
    """

    def __init__(self, publication: Publication, newest: VersionId, number: int) -> None:
        """Find the files; rows are read later."""
        self._publication = publication
        self._deltas = set(publication.deltas())
        self.undone = self._walk(newest, number)
        try:
            self.files = VersionFiles(publication, VersionId.of(self.undone[0].commit.previous))
        except MissingVersionError as error:
            raise RollbackError(str(error)) from error
        schemas = {file.commit.schema_id for file in (*self.files.commits, *self.undone)}
        if schemas != {self.files.manifest["schema_id"]}:
            raise RollbackError(
                f"version {number} is of another model than {newest.number}: the model changes back"
                " by `embertide train --change-model` with its former settings; what was learned"
                " since stays"
            )

    def _commit(self, version: VersionId) -> update_pb2.CommitFile:
        if version not in self._deltas:
            raise RollbackError(
                f"{self._publication.path} no longer keeps the delta of version {version.number}: "
                "name a version after it"
            )
        return self._publication.read_commit(version)

    def _walk(self, newest: VersionId, number: int) -> list[update_pb2.CommitFile]:
        """Return the commits after version `number`, oldest first."""
        chain: list[update_pb2.CommitFile] = []
        at = newest
        while at.number > number:
            chain.append(self._commit(at))
            at = VersionId.of(chain[-1].commit.previous)
        if not chain:
            raise RollbackError(
                f"version {number} is not older than {newest.number}, the newest: nothing to undo"
            )
        if at.number != number:
            raise RollbackError(
                f"there is no version {number} on the way to {newest.number}; the one before it "
                f"is {at.number}"
            )
        return chain[::-1]

    def dense(self) -> bytes:
        """Return the dense tensors, proved; empty for a model without."""
        try:
            return self.files.dense()
        except MissingVersionError as error:
            raise RollbackError(str(error)) from error

    def undo(self, partition: int) -> Iterator[tuple[Place, bytes, bytes]]:
        """Yield (place, records that restore it, its state) of each bucket that was touched.

        What the files and these records make is compared with the state, byte for byte.

        Raises:
            RollbackError: They differ.
        """
        changed = read_records(self._publication, self.undone, partition)
        before = read_records(self._publication, self.files.commits, partition)
        for fields in self.files.manifest["buckets"]:
            info = _store.BucketFileInfo(**fields)
            table = next(each for each in self.files.tables.values() if each.name == info.table)
            place = (table.id, info.bucket)
            if place not in changed:
                continue
            layout = table.layout
            records = _store.read_bucket_file(str(self.files.snapshot), table, info)
            state = _store.merge_records(layout, records, before.get(place, []))
            keys = [_store.record_keys(layout, each) for each in changed[place]]
            restoring = _store.restore_records(layout, state, np.unique(np.concatenate(keys)))
            if _store.merge_records(layout, state, [*changed[place], restoring]) != state:
                raise RollbackError(
                    f"bucket {info.bucket} of table {info.table} would not become what it was at "
                    f"version {self.files.number}: please report this"
                )
            yield place, restoring, state


def roll_back(
    publication: Publication, number: int, *, bus: str | None, by: str | None = None
) -> Restored:
    """Publish a version whose state is that of version `number`, and promote it.

    The trainer that runs is superseded. The promotion record says who did it: `by`, or else this
    process.

    Raises:
        RollbackError: The version cannot be restored; nothing was published.
        PublicationError: A file fails its checksum; nothing was published.
        BusError: Redis cannot be reached.
    """
    began = time.monotonic()
    versions = publication.versions()
    if not versions:
        raise RollbackError(f"{publication.path} holds no version")
    # An impossible rollback is refused before the trainer is superseded.
    manifest = _Target(publication, versions[-1], number).files.manifest
    publisher = Publisher(
        publication,
        bus=bus,
        model=manifest["model"],
        schema_id=manifest["schema_id"],
        exclusive=False,
    )
    newest = publisher.newest
    assert newest is not None
    target = _Target(publication, newest, number)  # versions that came meanwhile are undone too
    checksum = 0
    buckets = 0

    def changes() -> Iterator[Change]:
        nonlocal checksum, buckets
        for partition in range(PARTITIONS):
            for (table, bucket), restoring, state in target.undo(partition):
                header = struct.pack("<IIIQ", checksum, table, bucket, len(state))
                checksum = _store.crc32c(header + state)
                buckets += 1
                yield target.files.tables[table], bucket, restoring

    version = publisher.publish(
        newest.number + 1,
        watermark_ms=target.files.watermark_ms,
        changes=changes(),
        dense=target.dense(),
        rollback_to=number,
    )
    entry = Undone(
        number=version.number,
        to=number,
        to_watermark_ms=target.files.watermark_ms,
        watermark_ms=target.undone[-1].commit.watermark_ms,
        by=by or maker("rollback"),
        at_ms=time.time_ns() // 1_000_000,
    )
    promotion_record(publication, bus=bus, model=manifest["model"]).undo(entry)
    commit = publication.read_commit(version)
    tombstones = sum(
        batch.tombstones
        for partition in commit.partitions
        for batch in publication.read_delta(version, partition)
    )
    return Restored(
        version=version.number,
        to=number,
        undone=len(target.undone),
        buckets=buckets,
        rows=publisher.stats.rows - tombstones,
        tombstones=tombstones,
        checksum=f"{checksum:08x}",
        seconds=round(time.monotonic() - began, 3),
    )
