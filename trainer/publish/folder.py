"""The publication: the folder through which a trainer gives its versions away (docs/formats.md).

    PUB/snapshots/NUMBER-LINEAGE/    a snapshot each
    PUB/deltas/NUMBER-LINEAGE/       what one version changed; it exists once commit.pb does
    PUB/checkpoints/NUMBER-LINEAGE/  what the trainer goes on from (checkpoint.py)
    PUB/increments/NUMBER-LINEAGE/   the same, of what changed since a snapshot (increment.py)
    PUB/versions.jsonl               a line for every version, kept when its files are pruned
    PUB/set-aside.jsonl              events that the trainer would not learn from (quarantine.py)

The nodes' side is backend_cpp/bus/delta.h. Names ascend as versions do.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import NamedTuple

from embertide import _store
from embertide._common.room import is_no_room, no_room
from embertide.trainer.errors import FinalError
from embertide.trainer.publish.threads import Workers
from embertide.trainer.sync.channel import ALONE, Channel, RankError
from embertide.v1 import update_pb2

PARTITIONS = 64
"""Groups of a model's buckets; each has a delta file, and its streams one slot of Redis Cluster."""
_DELTA_MAGIC = b"EMDLT001"
_COMMIT_MAGIC = b"EMCMT001"
COMMIT = "commit.pb"
"""The file that makes a version's changes exist."""
_DENSE_FILE = "dense.safetensors"
CHECKPOINT = "checkpoint.json"
"""The file that makes a checkpoint exist, and an incremental snapshot."""
MANIFEST = "manifest.json"
"""The file that makes a snapshot exist."""
_NAME = re.compile(r"(\d{12,19})-(\d{6,19})")
_PARTIAL = re.compile(r"\.(\d{12,19})-(\d{6,19})\.partial")
_SPOOLED = 64 << 10  # of a partition, in memory
_COPIED = 1 << 20  # at a time
_SYNCED = 8  # files that are written side by side

log = logging.getLogger(__name__)


class PublicationError(FinalError):
    """The publication's files are not what they should be; the message names the path."""

    remedy = "bring it back from a copy; `embertide snapshot verify` tells what is whole"


class NoRoomError(PublicationError):
    """The drive has no room for a version; the message names the folder and what is free."""

    final = False  # there may be some soon
    remedy = ""  # its texts have their own


@contextlib.contextmanager
def needing_room(folder: Path) -> Iterator[None]:
    """Say what is meant where the drive of `folder` is full.

    Raises:
        NoRoomError: It is.
    """
    try:
        yield
    except (OSError, RankError) as error:  # another rank's writing counts as ours
        if not is_no_room(error):
            raise
        raise NoRoomError(
            f"{no_room(folder, error)}: make some, or keep fewer snapshots (keep_snapshots, "
            "keep_snapshots_s)"
        ) from error


class VersionId(NamedTuple):
    """A version's name. Ordered by number: numbers rise across lineages."""

    number: int
    lineage: int

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.number:012d}-{self.lineage:06d}"

    @classmethod
    def of(cls, version: update_pb2.Version) -> "VersionId":
        """Read it from a message."""
        return cls(version.number, version.lineage)

    @classmethod
    def read(cls, name: str) -> "VersionId | None":
        """Read the name of a version's folder; None if it is none."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]))


def _named(parent: Path) -> Iterator[tuple[Path, VersionId]]:
    """Yield the folders that are named as a version, finished or not."""
    for path in parent.iterdir() if parent.is_dir() else ():
        if version := VersionId.read(path.name):
            yield path, version


def _list(parent: Path, file: str) -> list[VersionId]:
    return sorted(version for path, version in _named(parent) if (path / file).is_file())


def write_synced(path: Path, data: bytes | bytearray) -> None:
    """Write a file; its bytes are on the drive when this returns."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the drive."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise PublicationError(f"{path} is missing") from None


def parse_commit(data: bytes, path: Path | str, version: "VersionId") -> update_pb2.CommitFile:
    """Read the bytes of a commit file, which came from `path`.

    Raises:
        PublicationError: They fail their checksum or are of another version.
    """
    message = data[16:]
    header = _COMMIT_MAGIC + struct.pack("<II", len(message), _store.crc32c(message))
    if data[:16] != header:
        raise PublicationError(f"{path} fails its checksum")
    file = update_pb2.CommitFile.FromString(message)
    if VersionId.of(file.commit.version) != version:
        raise PublicationError(f"{path} is the commit of another version")
    return file


def _remove(folder: Path, file: str) -> None:
    """Remove a folder that `file` makes exist: that one goes first, so none is there in part."""
    (folder / file).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _unfinished(parent: Path, file: str) -> Iterator[tuple[int, Path]]:
    """Yield (number, folder) of what a writer that was killed has left: folders without `file`."""
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _PARTIAL.fullmatch(path.name) or _NAME.fullmatch(path.name)
        if match and (match.re is _PARTIAL or not (path / file).exists()):
            yield int(match[1]), path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A bucket's batches in a version: what ranks tell one another of what they write."""

    rank: int
    table_id: int
    bucket: int
    sequence: int  # of the last batch
    batches: int
    bytes: int
    crc32c: int

    @property
    def partition(self) -> int:
        return self.bucket % PARTITIONS


def _joined(begins: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (begin, bytes) of what lies together of pieces that do not overlap, in their order."""
    begin = end = -1
    for at, size in zip(begins, sizes, strict=True):
        if at != end:
            if end > begin:
                yield begin, end - begin
            begin = at
        end = at + size
    if end > begin:
        yield begin, end - begin


def _write_at(fd: int, data: bytes, at: int) -> None:
    """Write all of it; a drive may take it in parts."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


class Written:
    """One rank's batches of a version, encoded, until they have gone out on the bus.

    Held in memory, and on the drive what exceeds `_SPOOLED` a partition.

    Attributes:
        channel: The channel of the ranks that write the version together.
    """

    def __init__(self, folder: Path, channel: Channel = ALONE) -> None:
        """Begin with none; `folder` is on the drive that has room for them."""
        self.channel = channel
        self._folder = folder
        self._rank = channel.rank
        self._spools: dict[int, tempfile.SpooledTemporaryFile[bytes]] = {}
        self._places: list[_Place] = []

    def add(self, batch: update_pb2.RowBatch) -> None:
        """Add a batch; those of a bucket come one after the other."""
        message = batch.SerializeToString()
        data = struct.pack("<I", len(message)) + message
        place = _Place(
            rank=self._rank,
            table_id=batch.table_id,
            bucket=batch.bucket,
            sequence=batch.sequence,
            batches=1,
            bytes=len(data),
            crc32c=_store.crc32c(data),
        )
        before = self._places[-1] if self._places else None
        if before and (before.table_id, before.bucket) == (place.table_id, place.bucket):
            self._places[-1] = dataclasses.replace(
                place,
                batches=before.batches + 1,
                bytes=before.bytes + len(data),
                crc32c=_store.crc32c(data, before.crc32c),
            )
        else:
            self._places.append(place)
        if place.partition not in self._spools:
            self._spools[place.partition] = tempfile.SpooledTemporaryFile(  # noqa: SIM115
                _SPOOLED, dir=str(self._folder)
            )
        self._spools[place.partition].write(data)

    @property
    def places(self) -> list[_Place]:
        """Its buckets, in the order in which they were added."""
        return self._places

    def messages(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield (table id, bucket, place in the bucket, message), partition after partition."""
        for partition, spool in sorted(self._spools.items()):
            spool.seek(0)
            for place in self._places:
                if place.partition != partition:
                    continue
                for i in range(place.batches):
                    (length,) = struct.unpack("<I", spool.read(4))
                    yield place.table_id, place.bucket, i, spool.read(length)

    def write_to(self, partition: int, fd: int, begins: Sequence[int], head: bytes) -> None:
        """Write a partition's buckets to a file, each where it begins, in their order.

        Threads may write partitions side by side.

        Args:
            partition: Which.
            fd: The file, open for writing.
            begins: Where each of this rank's buckets begins.
            head: The begin of the file, if this rank writes it.
        """
        mine = [place for place in self._places if place.partition == partition]
        spool = self._spools.get(partition)
        if spool is not None:
            spool.seek(0)
        # Each write waits for the drive, so what lies together goes together.
        for begin, size in _joined(begins, [place.bytes for place in mine]):
            assert spool is not None
            at, end = begin, begin + size
            while at < end:
                data = spool.read(min(end - at, _COPIED))
                if head and at == len(head):
                    data, at, head = head + data, 0, b""
                _write_at(fd, data, at)
                at += len(data)
        if head:
            _write_at(fd, head, 0)

    def close(self) -> None:
        """Let go of them."""
        for spool in self._spools.values():
            spool.close()


def _partition_commit(
    version: VersionId, partition: int, places: list[_Place], rank: int
) -> tuple[update_pb2.PartitionCommit, list[int]]:
    """Return what is to be said of a partition's file, and where a rank's buckets begin in it."""
    commit = update_pb2.PartitionCommit(
        lineage=version.lineage,
        version=version.number,
        partition=partition,
        delta_path=f"p-{partition:02d}.delta",
        delta_bytes=len(_DELTA_MAGIC),
        delta_crc32c=_store.crc32c(_DELTA_MAGIC),
    )
    begins: list[int] = []
    for place in places:
        if place.rank == rank:
            begins.append(commit.delta_bytes)
        commit.buckets.add(
            table_id=place.table_id,
            bucket=place.bucket,
            sequence=place.sequence,
            batches=place.batches,
        )
        commit.delta_crc32c = _store.join_crc32c(commit.delta_crc32c, place.crc32c, place.bytes)
        commit.delta_bytes += place.bytes
    return commit, begins


@functools.cache
def _writers() -> Workers:
    return Workers("delta", _SYNCED)


def _side_by_side(jobs: Sequence[Callable[[], None]]) -> None:
    """Do jobs that wait for the drive, some at a time; it makes their bytes safe together.

    When this returns or raises, none is under way.
    """
    doing = [_writers().submit(job) for job in jobs]
    wait(doing)
    for each in doing:
        each.result()


class Publication:
    """One publication folder. One publisher at a time writes to it (lineage, on the bus)."""

    def __init__(self, path: Path) -> None:
        """Name the folder; it is made when something is written."""
        self.path = path

    @property
    def program(self) -> Path:
        """Where the compiled dense program lies."""
        return self.path / "program.pt2"

    @property
    def set_aside(self) -> Path:
        """Where the events of batches that were put aside are kept."""
        return self.path / "set-aside.jsonl"

    def snapshots(self) -> list[VersionId]:
        """Return the versions that have a snapshot, ascending."""
        return _list(self.path / "snapshots", MANIFEST)

    def deltas(self) -> list[VersionId]:
        """Return the versions that have a committed delta folder, ascending."""
        return _list(self.path / "deltas", COMMIT)

    def increments(self) -> list[VersionId]:
        """Return the versions that have an incremental snapshot, ascending."""
        return _list(self.path / "increments", CHECKPOINT)

    def versions(self) -> list[VersionId]:
        """Return all versions that are there in either form, ascending."""
        return sorted({*self.snapshots(), *self.deltas()})

    def largest_lineage(self) -> int:
        """Return the largest lineage that any version has, be it finished or not; 0: no version.

        Reads names alone: cheap enough for every version.
        """
        parents = [self.path / "snapshots", self.path / "deltas"]
        versions = (version for parent in parents for _, version in _named(parent))
        return max((version.lineage for version in versions), default=0)

    def snapshot_path(self, version: VersionId) -> Path:
        """Return the directory of a snapshot."""
        return self.path / "snapshots" / version.folder

    def delta_path(self, version: VersionId) -> Path:
        """Return the directory of what a version changed."""
        return self.path / "deltas" / version.folder

    @property
    def log(self) -> Path:
        """Where every version is noted, oldest first."""
        return self.path / "versions.jsonl"

    def note(self, version: VersionId, *, watermark_ms: int, committed_ms: int) -> None:
        """Note a version that is about to exist; after a crash it may never have."""
        line = {
            "number": version.number,
            "lineage": version.lineage,
            "watermark_ms": watermark_ms,
            "committed_ms": committed_ms,
        }
        self.path.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab+") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            # A writer killed within a line must not spoil the next one.
            begin = b"\n" if file.read(1) not in (b"", b"\n") else b""
            file.write(begin + json.dumps(line).encode() + b"\n")

    def writing(self, channel: Channel) -> Written:
        """Return what takes a version's batches, for the ranks on a channel."""
        folder = self.path / "deltas"
        folder.mkdir(parents=True, exist_ok=True)
        return Written(folder, channel)

    def write_delta(
        self,
        version: VersionId,
        dense: bytes,
        file: update_pb2.CommitFile,
        written: Written,
    ) -> None:
        """Write one version: delta files, dense tensors, and last the commit file.

        Adds the partition commits to `file`, and names them and the tensors in its commit. After
        this returns, the version exists. Of many ranks, each writes its own buckets' parts of the
        delta files, side by side, and the first one the rest; it exists for all or for none.

        Args:
            version: Its name.
            dense: The tensors, if the version brings any.
            file: Holds what else the commit is to say.
            written: Has this rank's batches, those of a bucket one after the other.

        Raises:
            PublicationError: The version exists already.
            OSError: The drive refuses; nothing of the version is left.
            TrainerError: Another rank could not write its part.
        """
        folder, channel = self.delta_path(version), written.channel
        with channel.together():
            if channel.first:
                if (folder / COMMIT).exists():
                    raise PublicationError(f"{folder} exists; a version is never written again")
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
        try:
            self._write_files(folder, version, written, dense, file)
        except BaseException:
            if channel.first and not (folder / COMMIT).exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _write_files(
        self,
        folder: Path,
        version: VersionId,
        written: Written,
        dense: bytes,
        file: update_pb2.CommitFile,
    ) -> None:
        channel = written.channel
        fields = [list(dataclasses.astuple(place)) for place in written.places]
        names = [field.name for field in dataclasses.fields(_Place)]
        places = [
            _Place(**dict(zip(names, each, strict=True)))
            for said in channel.gather(fields, "places")
            for each in said
        ]
        places.sort(key=lambda place: (place.partition, place.table_id, place.bucket))
        with channel.together():
            parts: list[Callable[[], None]] = []
            for partition, group in itertools.groupby(places, key=lambda place: place.partition):
                commit, begins = _partition_commit(version, partition, list(group), channel.rank)
                file.partitions.append(commit)
                if begins or channel.first:
                    path = folder / commit.delta_path
                    parts.append(
                        functools.partial(self._write_part, path, partition, begins, written)
                    )
            _side_by_side(parts)
            for partition_commit in file.partitions:
                reference = file.commit.partitions.add()
                reference.partition = partition_commit.partition
                reference.crc32c = _store.crc32c(
                    partition_commit.SerializeToString(deterministic=True)
                )
            if dense:
                file.commit.dense_path = _DENSE_FILE
                file.commit.dense_bytes = len(dense)
                file.commit.dense_crc32c = _store.crc32c(dense)
                if channel.first:
                    write_synced(folder / _DENSE_FILE, dense)
        with channel.together():
            if channel.first:
                self._write_commit(folder, file)

    @staticmethod
    def _write_part(path: Path, partition: int, begins: Sequence[int], written: Written) -> None:
        """Write this rank's part of a partition's file; it is on the drive when this returns."""
        # Synced as it is written: a client of NFS may else write whole pages, and with them zeros
        # where other ranks write.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_DSYNC, 0o644)
        try:
            written.write_to(partition, fd, begins, _DELTA_MAGIC if written.channel.first else b"")
        finally:
            os.close(fd)

    @staticmethod
    def _write_commit(folder: Path, file: update_pb2.CommitFile) -> None:
        message = file.SerializeToString()
        header = _COMMIT_MAGIC + struct.pack("<II", len(message), _store.crc32c(message))
        temporary = folder / f".{COMMIT}"
        write_synced(temporary, header + message)
        temporary.rename(folder / COMMIT)
        sync_folder(folder)
        sync_folder(folder.parent)

    def read_commit(self, version: VersionId) -> update_pb2.CommitFile:
        """Read a version's commit file.

        Raises:
            PublicationError: It is absent, fails its checksum or is of another version.
        """
        path = self.delta_path(version) / COMMIT
        return parse_commit(_read(path), path, version)

    def read_batches(self, version: VersionId) -> Iterable[update_pb2.RowBatch]:
        """Yield all row batches of a version's delta files.

        Raises:
            PublicationError: A file is not what its commit says.
        """
        for partition in self.read_commit(version).partitions:
            yield from self.read_delta(version, partition)

    def salvage(self, version: VersionId, damaged: set[int]) -> Iterator[update_pb2.RowBatch]:
        """Yield the row batches of what can be read of a version.

        Args:
            version: Its name.
            damaged: Takes the partitions that cannot be read; all, where the commit file cannot.
        """
        try:
            partitions = self.read_commit(version).partitions
        except PublicationError as error:
            log.error("%s; which rows version %d had is not known", error, version.number)
            damaged.update(range(PARTITIONS))
            return
        for partition in partitions:
            try:
                yield from self.read_delta(version, partition)
            except PublicationError as error:
                log.error("%s; which rows version %d had there is not known", error, version.number)
                damaged.add(partition.partition)

    def read_delta(
        self, version: VersionId, partition: update_pb2.PartitionCommit
    ) -> Iterator[update_pb2.RowBatch]:
        """Yield the row batches of one of a version's delta files.

        Raises:
            PublicationError: The file is not what its commit says.
        """
        path = self.delta_path(version) / partition.delta_path
        data = _read(path)
        if _store.crc32c(data) != partition.delta_crc32c or data[:8] != _DELTA_MAGIC:
            raise PublicationError(f"{path} fails its checksum")
        at = len(_DELTA_MAGIC)
        while at < len(data):
            (length,) = struct.unpack_from("<I", data, at)
            yield update_pb2.RowBatch.FromString(data[at + 4 : at + 4 + length])
            at += 4 + length

    def read_dense(self, commit: update_pb2.GlobalCommit) -> bytes:
        """Return the dense tensors that a commit file brings; empty if it brings none.

        Raises:
            PublicationError: They are not what the commit says.
        """
        if not commit.dense_path:
            return b""
        path = self.delta_path(VersionId.of(commit.version)) / commit.dense_path
        data = _read(path)
        if _store.crc32c(data) != commit.dense_crc32c:
            raise PublicationError(f"{path} fails its checksum")
        return data

    def _written_s(self, version: VersionId) -> float:
        return (self.snapshot_path(version) / MANIFEST).stat().st_mtime

    def remove_snapshot(self, version: VersionId) -> None:
        """Remove a snapshot, if it is there."""
        _remove(self.snapshot_path(version), MANIFEST)

    def prune(
        self,
        keep_snapshots: int,
        *,
        keep_s: float = 0.0,
        served: Callable[[int], bool] | None = None,
    ) -> int:
        """Drop old snapshots, the deltas that no kept snapshot needs, and what was never finished.

        Args:
            keep_snapshots: So many of the newest stay.
            keep_s: Those written in the last so many seconds stay as well.
            served: The newest of a version number for which it holds stays as well: nodes that
                start now begin there.

        Returns:
            How many folders went.
        """
        snapshots = self.snapshots()
        if len(snapshots) < keep_snapshots:
            return 0
        kept = snapshots[-keep_snapshots:]
        kept += [
            v for v in snapshots[:-keep_snapshots] if self._written_s(v) > time.time() - keep_s
        ]
        kept += [v for v in snapshots if served and served(v.number)][-1:]
        oldest = min(kept)
        gone = [(self.snapshot_path(v), MANIFEST) for v in snapshots if v < oldest]
        deltas = [v for v in self.deltas() if v.number <= oldest.number]
        gone += [(self.delta_path(v), COMMIT) for v in deltas]
        for parent, file in (("snapshots", MANIFEST), ("deltas", COMMIT)):
            for number, path in _unfinished(self.path / parent, file):
                if number <= oldest.number:
                    gone.append((path, file))
        for path, file in gone:
            _remove(path, file)
        return len(gone)
