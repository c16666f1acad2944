"""Where a version's state lies: the newest snapshot that leads to it, and the deltas since."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from embertide import _store
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.snapshot import (
    TENSORS,
    dense_id,
    manifest_tables,
    read_manifest,
)
from embertide.v1 import update_pb2

Place = tuple[int, int]
"""Table id and bucket."""


class MissingVersionError(ConfigurationError):
    """A version, or what leads to it, is not kept any more; the message names what there is."""


def find_version(publication: Publication, number: int | None) -> VersionId:
    """Return the version of that number, of the newest lineage that has it; None: the newest.

    Raises:
        MissingVersionError: There is none.
    """
    versions = publication.versions()
    if not versions:
        raise MissingVersionError(f"{publication.path} holds no version")
    found = [each for each in versions if number in (None, each.number)]
    if not found:
        raise MissingVersionError(
            f"{publication.path} has no version {number}; it keeps {versions[0].number} to "
            f"{versions[-1].number}"
        )
    return found[-1]


def read_records(
    publication: Publication, files: Sequence[update_pb2.CommitFile], partition: int
) -> dict[Place, list[bytes]]:
    """Return what commits changed in the buckets of a partition, oldest first.

    Raises:
        PublicationError: A file fails its checksum.
    """
    records = defaultdict(list)
    for file in files:
        for each in file.partitions:
            if each.partition == partition:
                version = VersionId.of(file.commit.version)
                for batch in publication.read_delta(version, each):
                    records[batch.table_id, batch.bucket].append(batch.records)
    return records


class VersionFiles:
    """The files of one version. Used by one thread; rows are read when they are asked for.

    Attributes:
        publication: Where they are.
        version: Which version; None: of a snapshot by itself.
        snapshot: The folder of the snapshot that leads to it.
        commits: The commits after the snapshot, oldest first.
        manifest: The manifest of the snapshot.
        tables: By id.
        watermark_ms: Event time up to which the version has learned.
        dense_id: The id of the version's dense tensors.

    Raises:
        MissingVersionError: Files that it takes are no longer kept.
        PublicationError: A commit file fails its checksum.
        SnapshotError: The snapshot is none.
    """

    def __init__(self, publication: Publication, version: VersionId) -> None:
        """Find the files."""
        self.publication = publication
        self.version: VersionId | None = version
        self.commits = self._walk(version)
        base = VersionId.of(self.commits[0].commit.previous) if self.commits else version
        self._open(publication.snapshot_path(base))

    @classmethod
    def of_snapshot(cls, folder: Path) -> "VersionFiles":
        """Take a snapshot by itself, as `embertide import` writes it."""
        made = cls.__new__(cls)
        made.publication, made.version, made.commits = Publication(folder), None, []
        made._open(folder)
        return made

    def _open(self, snapshot: Path) -> None:
        self.snapshot = snapshot
        self.manifest: dict[str, Any] = read_manifest(snapshot)
        self.tables = manifest_tables(self.manifest)
        last = self.commits[-1].commit if self.commits else None
        self.watermark_ms = last.watermark_ms if last else int(self.manifest["watermark_ms"])
        self.dense_id = last.dense_id if last else str(self.manifest["dense_id"])

    def _walk(self, version: VersionId) -> list[update_pb2.CommitFile]:
        snapshots, deltas = set(self.publication.snapshots()), set(self.publication.deltas())
        chain: list[update_pb2.CommitFile] = []
        at = version
        while at not in snapshots:
            if at not in deltas:
                least = f": name a version from {min(snapshots).number} on" if snapshots else ""
                raise MissingVersionError(
                    f"{self.publication.path}: no snapshot that is kept leads to version "
                    f"{version.number}{least}"
                )
            chain.append(self.publication.read_commit(at))
            at = VersionId.of(chain[-1].commit.previous)
        return chain[::-1]

    def dense(self) -> bytes:
        """Return the version's dense tensors, proved; empty for a model without.

        Raises:
            MissingVersionError: They are not those that the version names.
        """
        if not self.dense_id:
            return b""
        tensors = (self.snapshot / TENSORS).read_bytes()
        for file in self.commits:
            tensors = self.publication.read_dense(file.commit) or tensors
        if dense_id(tensors) != self.dense_id:
            raise MissingVersionError(
                f"the dense tensors found for version {self.number} are not those that it names: "
                "restore the publication's files"
            )
        return tensors

    @property
    def number(self) -> int:
        """The version's number."""
        return int(self.manifest["version"]) if self.version is None else self.version.number

    def buckets(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (table id, bucket, records) of the snapshot, each file proved.

        Raises:
            StoreError: A file fails its checksum.
        """
        by_name = {table.name: table for table in self.tables.values()}
        for fields in self.manifest["buckets"]:
            info = _store.BucketFileInfo(**fields)
            table = by_name[info.table]
            yield table.id, info.bucket, _store.read_bucket_file(str(self.snapshot), table, info)

    def changes(self) -> Iterator[Iterator[tuple[int, int, bytes]]]:
        """Yield (table id, bucket, records) of what each version after the snapshot changed.

        Raises:
            PublicationError: A file fails its checksum.
        """
        for file in self.commits:
            batches = self.publication.read_batches(VersionId.of(file.commit.version))
            yield ((each.table_id, each.bucket, each.records) for each in batches)
