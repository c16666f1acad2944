"""A trainer's publication goes to object storage while training goes on (docs/design/0020).

Two threads look at the folder and bring over what storage lacks, versions one, snapshots with their
checkpoints the other. Of each, the object that makes it exist goes last: `commit.pb`,
`checkpoint.json`, and `manifest.json` after that. Versions wait for the first snapshot, and an
incremental snapshot for the one with all rows and the versions that it rests on. What the
folder has dropped goes from storage once a newer snapshot is whole there. A trainer that is killed
at any moment leaves at most objects that nothing names; the next one writes them again, or removes
them.

One publisher: a lineage is claimed by an object `lineages/NUMBER` that can be written only once. A
trainer that finds a larger one stops before it makes another version exist.
"""

import dataclasses
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from embertide._common.background import BackgroundTask, describe, tend
from embertide.trainer.data.journal import journal_lines
from embertide.trainer.errors import FinalError, TrainerError
from embertide.trainer.publish.folder import CHECKPOINT, COMMIT, MANIFEST, Publication, VersionId
from embertide.trainer.publish.mirror import PROMOTED
from embertide.trainer.publish.origin import ORIGIN
from embertide.trainer.publish.storage import Storage, StorageError

LINEAGES = "lineages"
_LAST = {
    "deltas": COMMIT,
    "checkpoints": CHECKPOINT,
    "increments": CHECKPOINT,
    "snapshots": MANIFEST,
}
_LOOK_EVERY_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_SAID_EVERY_S = 60.0
_STOP_S = 5.0

log = logging.getLogger(__name__)


class OvertakenError(FinalError):
    """Another trainer publishes under the same URL now."""


@dataclasses.dataclass(slots=True)
class UploadStats:
    """Counters since the start."""

    versions: int = 0
    snapshots: int = 0  # with their checkpoints
    increments: int = 0  # incremental snapshots
    objects: int = 0
    bytes: int = 0
    removed: int = 0  # objects
    failures: int = 0  # of the library, after it has tried again; each is tried again later
    waits: int = 0  # of training, as storage was too far behind


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UploadOptions:
    """Bounds.

    Attributes:
        keep_snapshots: So many of the newest stay in storage.
        max_behind_s: Training waits while storage lacks something that is older.
        end_s: How long the end of a run may wait for storage.
    """

    keep_snapshots: int
    max_behind_s: float = 3600.0
    end_s: float = 300.0


class _Lane:
    """A task that looks, again and again. `whole_at`: when it last found nothing left to do.

    `look` says whether it left nothing. Whatever it raises is counted, said, and tried again, but
    that another trainer publishes there.
    """

    def __init__(self, name: str, look: Callable[[], bool], stats: UploadStats) -> None:
        self._look = look
        self._stats = stats
        self.whole_at = time.monotonic()
        self.error: OvertakenError | None = None  # with which it ended
        self.failure = ""  # of the last look, if it failed
        self.task = BackgroundTask(
            name,
            self._round,
            expected=(TrainerError, OSError),
            pause_s=_FIRST_PAUSE_S,
            pause_s_max=_LONGEST_PAUSE_S,
        )

    def _round(self, _stop: threading.Event) -> float | None:
        began = time.monotonic()
        try:
            whole = self._look()
        except OvertakenError as error:
            self.error = error
            return None
        except BaseException as error:
            self._stats.failures += 1
            self.failure = describe(error)
            raise
        self.failure = ""
        if whole:
            self.whole_at = began
        return _LOOK_EVERY_S


class Uploader:
    """Brings one publication to storage, in `with`. Its methods are for the training thread."""

    def __init__(self, storage: Storage, publication: Publication, options: UploadOptions) -> None:
        """Look at what storage has.

        Raises:
            StorageError: It cannot be used.
        """
        self.storage = storage
        self.stats = UploadStats()
        self._publication = publication
        self._options = options
        # Names that have any object, and those of them that exist.
        self._names: dict[str, set[VersionId]] = {}
        self._whole: dict[str, set[VersionId]] = {}
        self._read_names()
        self._lineage = 0
        self._promoted = b""
        self._beside: dict[str, bytes] = {}  # journals and the like, as storage has them
        self._beside_lock = threading.Lock()
        self._put: set[str] = set()  # objects of the version on its way, by lane's own names
        self._then: list[tuple[float, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._lanes: list[_Lane] = []

    def _read_names(self) -> None:
        for kind, last in _LAST.items():
            self._names[kind] = set(self.storage.names(kind))
            self._whole[kind] = {
                version
                for version in self._names[kind]
                if self.storage.exists(f"{kind}/{version.folder}/{last}")
            }

    # --- one publisher ----------------------------------------------------------------------------

    def versions(self, kind: str) -> list[VersionId]:
        """Return those of `deltas`, `snapshots` or `checkpoints` that exist in storage."""
        return sorted(self._whole[kind])

    def newest(self) -> VersionId | None:
        """Return the newest version in storage."""
        return max(self._whole["deltas"] | self._whole["snapshots"], default=None)

    def largest_lineage(self) -> int:
        """Return the largest lineage that anybody has claimed or published as; 0: none.

        Raises:
            StorageError: It cannot be told.
        """
        named = {version.lineage for names in self._names.values() for version in names}
        return max([*self._claims(), *named], default=0)

    def _claims(self) -> list[int]:
        keys = self.storage.keys(LINEAGES)
        return [int(name) for key in keys if (name := key.rpartition("/")[2]).isdecimal()]

    def begin(self, lineage: int) -> None:
        """Claim a lineage, as which the folder is brought over in `with`.

        Raises:
            OvertakenError: Another trainer has the lineage, or has published since we looked.
            StorageError: Storage cannot be used.
        """
        who = f"pid {os.getpid()} on {socket.gethostname()} at {time.time_ns()}".encode()
        before = self.newest()
        if not self.storage.claim(f"{LINEAGES}/{lineage:06d}", who):
            raise self._overtaken(lineage)
        self._lineage = lineage
        self._check_lineage()
        self._read_names()
        if self.newest() != before:
            raise OvertakenError(
                f"another trainer has published to {self.storage.url} just now: stop one of the "
                "two, and start the other again"
            )
        older = [each for each in self._claims() if each < lineage]
        self.storage.remove([f"{LINEAGES}/{each:06d}" for each in older])

    def _overtaken(self, by: int) -> OvertakenError:
        return OvertakenError(
            f"a trainer of lineage {by} publishes to {self.storage.url}: stop this one, or give it "
            "another URL"
        )

    def _check_lineage(self) -> None:
        newest = max(self._claims(), default=0)
        if newest > self._lineage:
            raise self._overtaken(newest)

    # --- the two threads --------------------------------------------------------------------------

    def _look_for_versions(self) -> bool:
        # From versions alone no trainer could go on, and none could begin beside them.
        if not self._whole["snapshots"]:
            return not self._publication.snapshots()
        path = self._publication.path / PROMOTED
        promoted = path.read_bytes() if path.is_file() else b""
        for version in self._publication.deltas():
            if version not in self._whole["deltas"]:
                self._put_beside()
                done = self._bring("deltas", version, self._publication.delta_path(version))
                self.stats.versions += done
        if promoted != self._promoted:
            self._check_lineage()
            self.storage.put_bytes(PROMOTED, promoted)
            self._promoted = promoted
        return True

    def _look_for_snapshots(self) -> bool:
        began = time.monotonic()
        for version in self._publication.snapshots():
            folder = self._publication.path / "checkpoints" / version.folder
            both = [self._whole["snapshots"]]
            if (folder / CHECKPOINT).is_file():
                both.append(self._whole["checkpoints"])
            if all(version in each for each in both):
                continue
            self._put_logs()
            if len(both) > 1:
                self._bring("checkpoints", version, folder)
            snapshot = self._publication.snapshot_path(version)
            self.stats.snapshots += self._bring("snapshots", version, snapshot)
            self._prune()
        whole = self._look_for_increments()
        due = min(began, *(lane.whole_at for lane in self._lanes))
        with self._lock:
            ready = [then for at, then in self._then if at < due]
            self._then = [(at, then) for at, then in self._then if at >= due]
        for then in ready:
            then()
        return whole

    def _look_for_increments(self) -> bool:
        """Bring the newest incremental snapshot over; False: what it rests on is not there yet."""
        newest = max(self._publication.increments(), default=None)
        base = max(self._publication.snapshots(), default=None)
        if newest is None or base is None or newest < base or newest in self._whole["increments"]:
            return True
        after = [v for v in self._publication.deltas() if base.number < v.number <= newest.number]
        if base not in self._whole["snapshots"] or not self._whole["deltas"].issuperset(after):
            return False
        self._put_logs()
        folder = self._publication.path / "increments" / newest.folder
        if not self._bring("increments", newest, folder):
            return False
        self.stats.increments += 1
        for version in sorted(self._names["increments"] - {newest}):
            self._remove("increments", version)
        return True

    def _put_logs(self) -> None:
        self._put_beside()
        for log_file in (self._publication.log, self._publication.set_aside):
            if log_file.is_file():
                self._put_file(log_file.name, log_file)

    def _put_beside(self) -> None:
        """Bring over what decides about versions that the folder has, before these.

        Journals are on the drive before a version relies on them, so what is read here after the
        version is there has all that it needs.
        """
        folder = self._publication.path
        with self._beside_lock:
            found = {
                name: "".join(f"{line}\n" for line in lines).encode()
                for name, lines in journal_lines(folder).items()
            }
            if (folder / ORIGIN).is_file():
                found[ORIGIN] = (folder / ORIGIN).read_bytes()
            for name, data in found.items():
                if self._beside.get(name) != data:
                    self.storage.put_bytes(name, data)
                    self._beside[name] = data
                    self.stats.bytes += len(data)
                    self.stats.objects += 1

    def _put_file(self, key: str, path: Path) -> None:
        self.stats.bytes += self.storage.put(key, path)
        self.stats.objects += 1

    def _bring(self, kind: str, version: VersionId, folder: Path) -> bool:
        """Bring a folder over, the file that makes it exist last; False: it has gone meanwhile."""
        prefix, last = f"{kind}/{version.folder}", _LAST[kind]
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        data = [name for name in names if name != last and not name.startswith(".")]
        keys = {f"{prefix}/{name}": folder / name for name in sorted(data)}
        self._names[kind].add(version)

        def put(key: str, path: Path) -> None:
            self._put_file(key, path)
            self._put.add(key)

        try:
            self.storage.side_by_side(
                [functools.partial(put, *each) for each in keys.items() if each[0] not in self._put]
            )
            self._check_lineage()
            self._put_file(f"{prefix}/{last}", folder / last)
        except (StorageError, OSError):
            if (folder / last).is_file():
                raise
            return False  # the folder is pruned while storage lags
        finally:
            if not (folder / last).is_file():
                self._put -= keys.keys()
        self._put -= keys.keys()
        self._whole[kind].add(version)
        return True

    def _prune(self) -> None:
        """Drop what the folder has dropped, once newer snapshots are whole here."""
        mine, theirs = self._publication.snapshots(), self.versions("snapshots")
        if not mine or len(theirs) < self._options.keep_snapshots:
            return
        oldest = min(mine[0], theirs[-self._options.keep_snapshots])
        for kind, names in self._names.items():
            for version in sorted(names):
                old = version < oldest if kind != "deltas" else version.number <= oldest.number
                # An unfinished version of a trainer that was killed while uploading; our own may be
                # on its way.
                half = version not in self._whole[kind] and version.lineage < self._lineage
                if old or half:
                    self._remove(kind, version)

    def _remove(self, kind: str, version: VersionId) -> None:
        prefix = f"{kind}/{version.folder}"
        self.storage.remove([f"{prefix}/{_LAST[kind]}"])
        self._whole[kind].discard(version)
        keys = self.storage.keys(prefix)
        self.storage.remove(keys)
        self._names[kind].discard(version)
        self.stats.removed += 1 + len(keys)

    # --- for the training thread ------------------------------------------------------------------

    @property
    def behind_s(self) -> float:
        """For how long the folder has had something that storage lacks; 0.2 s mean nothing."""
        now = time.monotonic()
        return now - min((lane.whole_at for lane in self._lanes), default=now)

    def once_there(self, then: Callable[[], None]) -> None:
        """Call `then`, in another thread, once all that is in the folder now is in storage."""
        with self._lock:
            self._then.append((time.monotonic(), then))

    def check(self, stopping: Callable[[], bool]) -> None:
        """Return at once, or, where storage is too far behind, when it has caught up.

        Args:
            stopping: Whether not to wait any longer.

        Raises:
            OvertakenError: Another trainer publishes there.
        """
        waited = 0.0
        while True:
            tend()  # should a lane's thread not have started
            for lane in self._lanes:
                if lane.error is not None:
                    raise lane.error
            if self.behind_s <= self._options.max_behind_s or stopping():
                return
            self.stats.waits += waited == 0
            if waited % _SAID_EVERY_S < _LOOK_EVERY_S:
                log.error(
                    "training waits, since %s is %.0f s behind: %s",
                    self.storage.url,
                    self.behind_s,
                    "; ".join(lane.failure for lane in self._lanes if lane.failure) or "it is slow",
                )
            time.sleep(_LOOK_EVERY_S)
            waited += _LOOK_EVERY_S

    def __enter__(self) -> Self:
        """Begin to look, and return it."""
        self._lanes = [
            _Lane("upload-versions", self._look_for_versions, self.stats),
            _Lane("upload-snapshots", self._look_for_snapshots, self.stats),
        ]
        for lane in self._lanes:
            lane.task.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait until storage has all, `end_s` at most.

        Raises:
            OvertakenError: Another trainer publishes there.
            StorageError: Storage lacks something still, and no other error is under way.
        """
        began = time.monotonic()
        while min(lane.whole_at for lane in self._lanes) <= began:
            tend()
            failed = [lane.error for lane in self._lanes if lane.error is not None]
            if failed or time.monotonic() - began > self._options.end_s:
                break
            time.sleep(_LOOK_EVERY_S / 4)
        behind = min(lane.whole_at for lane in self._lanes) <= began
        for lane in self._lanes:
            lane.task.stop(_STOP_S)
        if not behind:
            for _, then in self._then:
                then()
        if kind is not None:
            return
        for lane in self._lanes:
            if lane.error is not None:
                raise lane.error
        if behind:
            newest = max(self._whole["checkpoints"] | self._whole["increments"], default=None)
            raise StorageError(
                f"{self.storage.url} lacks the last versions after {self._options.end_s:.0f} s; its"
                f" newest checkpoint is {'none' if newest is None else newest.number}: keep "
                f"{self._publication.path}, and start the trainer with it again"
            )
