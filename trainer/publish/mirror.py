"""A node's mirror: the newest of a publication in object storage, in a folder that nodes read.

The folder is a publication like any other, so nodes know nothing of storage. It holds a snapshot
and every version after it. A newer snapshot is fetched only where no versions lead to it, or where
those after the older one take as many bytes: so what is fetched stays within about twice what
changes, and the folder within four times the model. Two snapshots are kept.
"""

import contextlib
import dataclasses
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from embertide._common.background import describe
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.publish.download import (
    fetch_delta,
    fetch_snapshot,
    fetch_whole,
    read_manifest,
)
from embertide.trainer.publish.folder import (
    MANIFEST,
    NoRoomError,
    Publication,
    PublicationError,
    VersionId,
    needing_room,
)
from embertide.trainer.publish.lock import FolderLock, LockedError
from embertide.trainer.publish.origin import FolderOrigin
from embertide.trainer.publish.snapshot import read_manifest as read_own_manifest
from embertide.trainer.publish.storage import DamagedError, Storage, StorageError

PROMOTED = "promoted.json"
_KEPT = 2
_SAID_EVERY_S = 60.0
_LONGEST_PAUSE_S = 30.0
_LONGEST_FULL_S = 5.0  # with a drive without room

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class MirrorStats:
    """Counters since the start."""

    rounds: int = 0  # that went through
    versions: int = 0
    snapshots: int = 0
    bytes: int = 0
    damaged: int = 0  # objects that were not what their commit or manifest says
    failures: int = 0  # rounds that storage, or a full drive, ended


@dataclasses.dataclass(frozen=True, slots=True)
class _Delta:
    previous: VersionId
    bytes: int


class MixedError(ConfigurationError):
    """A folder mirrors something else: versions of two runs in one cannot be told apart."""


def _mixed(folder: Path, mine: str, theirs: str) -> str:
    return (
        f"{folder} has {mine}, and is to have {theirs}: give another folder (of `embertide serve`, "
        "--directory), or delete this one first"
    )


class Mirror:
    """Brings a folder up to what storage has. For one thread."""

    def __init__(self, storage: Storage, publication: Publication) -> None:
        """Take the folder's lock.

        Raises:
            LockedError: Another process writes to the folder.
            MixedError: The folder mirrors another URL.
        """
        self.storage = storage
        self.publication = publication
        self.stats = MirrorStats()
        self._is_same = False  # what the folder has, and what storage has
        try:
            self._lock = FolderLock(publication.path)
        except LockedError as error:
            raise LockedError(
                f"{publication.path} is in use: give the mirror a folder of its own"
            ) from error
        said = FolderOrigin.read(publication.path)
        if said.storage not in ("", storage.url):
            raise MixedError(_mixed(publication.path, said.storage, storage.url))
        self._deltas: dict[VersionId, _Delta] = {}
        for version in publication.deltas():
            try:
                commit = publication.read_commit(version).commit
            except PublicationError as error:
                log.warning("%s; it is fetched again", error)
                shutil.rmtree(publication.delta_path(version), ignore_errors=True)
                continue
            size = sum(each.stat().st_size for each in publication.delta_path(version).iterdir())
            self._deltas[version] = _Delta(VersionId.of(commit.previous), size)

    def newest(self) -> VersionId | None:
        """Return the newest version that the folder leads to; None: it has no snapshot."""
        snapshots = self.publication.snapshots()
        return self._tip(snapshots[-1]) if snapshots else None

    def _tip(self, base: VersionId) -> VersionId:
        """Return where the versions after `base` lead without a gap."""
        after = {each.previous: version for version, each in sorted(self._deltas.items())}
        tip = base
        while (following := after.get(tip)) is not None and following > tip:
            tip = following
        return tip

    def round(self) -> None:
        """Fetch what is new, drop what is old.

        Raises:
            StorageError: Storage failed; what has arrived is there.
            NoRoomError: The drive is full.
            MixedError: Storage has another model than the folder.
        """
        with needing_room(self.publication.path):
            self._prove_same()
            self._snapshot()
            self._versions()
            fetch_whole(self.storage, PROMOTED, self.publication.path / PROMOTED)
            self._prune()
        self.stats.rounds += 1

    def _prove_same(self) -> None:
        """Have the folder say what it is a mirror of, once it is known that it is of that."""
        if self._is_same:
            return
        model = ""
        for version in reversed(self.storage.names("snapshots")):
            with contextlib.suppress(DamagedError):  # `_snapshot` says it
                found = read_manifest(self.storage, version)
                if found is not None:
                    model = str(found[0]["model"])
                    break
        mine = self.publication.snapshots()
        if not model:
            return
        if mine:
            path = self.publication.snapshot_path(mine[-1])
            before = str(read_own_manifest(path)["model"])
            if before != model:
                raise MixedError(_mixed(self.publication.path, f"model {before!r}", repr(model)))
        FolderOrigin(model=model, storage=self.storage.url).write(self.publication.path)
        self._is_same = True

    def _snapshot(self) -> None:
        mine = self.publication.snapshots()
        for version in reversed(self.storage.names("snapshots")):
            if mine and (version <= mine[-1] or not self._wants(version, mine[-1])):
                return
            try:
                size = fetch_snapshot(self.storage, self.publication, version)
            except DamagedError as error:
                self._damaged(error)
                continue  # an older one may lead on
            if size is not None:
                self.stats.snapshots += 1
                self.stats.bytes += size
                return

    def _wants(self, version: VersionId, mine: VersionId) -> bool:
        if self._tip(mine).number < version.number:
            # Perhaps its versions are there, and only not yet here.
            self._versions()
        tip = self._tip(mine)
        if tip.number < version.number or (tip.number == version.number and tip != version):
            return True
        bytes_after = sum(each.bytes for v, each in self._deltas.items() if v > mine)
        folder = self.publication.snapshot_path(mine)
        held = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        return bytes_after >= held

    def _versions(self) -> None:
        mine = self.publication.snapshots()
        if not mine:
            return
        for version in self.storage.names("deltas"):
            if version.number <= mine[0].number or version in self._deltas:
                continue
            try:
                found = fetch_delta(self.storage, self.publication, version)
            except DamagedError as error:
                self._damaged(error)
                continue
            if found is not None:
                file, size = found
                self._deltas[version] = _Delta(VersionId.of(file.commit.previous), size)
                self.stats.versions += 1
                self.stats.bytes += size

    def _prune(self) -> None:
        self.publication.prune(_KEPT)
        kept = set(self.publication.deltas())
        self._deltas = {v: each for v, each in self._deltas.items() if v in kept}

    def _damaged(self, error: DamagedError) -> None:
        self.stats.damaged += 1
        log.error("%s; it is asked for again, or a newer snapshot leads past it", error)

    @staticmethod
    def _longest_pause_s(error: Exception) -> float:
        # Looking for room asks nothing of storage, and room is used soon once it is there.
        return _LONGEST_FULL_S if isinstance(error, NoRoomError) else _LONGEST_PAUSE_S

    def run(
        self, every_s: float, ended: threading.Event, show: Callable[[MirrorStats], None]
    ) -> None:
        """Go on until `ended`; what fails is counted and tried again, after growing pauses."""
        pause_s, said = every_s, -_SAID_EVERY_S
        while not ended.wait(pause_s if self.stats.rounds + self.stats.failures else 0):
            try:
                self.round()
                pause_s = every_s
            except MixedError:
                raise
            except Exception as error:  # the barrier: nodes need the rounds after this one
                self.stats.failures += 1
                pause_s = min(max(2 * pause_s, 1.0), self._longest_pause_s(error))
                if time.monotonic() - said >= _SAID_EVERY_S:
                    said = time.monotonic()
                    foreseen = isinstance(error, StorageError | PublicationError | OSError)
                    log.warning(
                        "%s; trying again in %.0f s",
                        describe(error),
                        pause_s,
                        exc_info=not foreseen,
                    )
            show(self.stats)


def snapshot_is_there(publication: Publication) -> bool:
    """Return whether a node could begin."""
    return any(publication.path.glob(f"snapshots/[!.]*/{MANIFEST}"))
