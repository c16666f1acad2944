"""A run goes on where its folder is not: from the copy of its publication in object storage."""

import functools
import hashlib
import json
import logging
import shutil
from typing import Any

from embertide.trainer.data.journal import INPUTS, SILENCES, is_journal
from embertide.trainer.publish.download import (
    arriving,
    fetch_delta,
    fetch_snapshot,
    fetch_whole,
    inside,
)
from embertide.trainer.publish.folder import (
    CHECKPOINT,
    Publication,
    PublicationError,
    VersionId,
    write_synced,
)
from embertide.trainer.publish.mirror import PROMOTED
from embertide.trainer.publish.storage import DamagedError, Storage
from embertide.trainer.publish.upload import Uploader
from embertide.trainer.run.checkpoint.checkpoint import CheckpointError
from embertide.trainer.run.checkpoint.increment import Increment

log = logging.getLogger(__name__)


def restore(uploader: Uploader, publication: Publication) -> VersionId | None:
    """Bring the newest checkpoint that is whole, and all versions after it, into the folder.

    A folder that has all that storage has stays as it is. Killed at any moment, it is called again.

    Returns:
        Whose checkpoint came; None: nothing had to.

    Raises:
        CheckpointError: Folder and storage have each what the other lacks, or storage has versions
            and no checkpoint that is whole.
        StorageError: It cannot be read.
    """
    storage, newest = uploader.storage, uploader.newest()
    mine = publication.versions()
    if newest is None or newest in mine:
        return None
    if mine and mine[-1] not in {*uploader.versions("deltas"), *uploader.versions("snapshots")}:
        raise CheckpointError(
            f"{publication.path} has version {mine[-1].number} of lineage {mine[-1].lineage}, which"
            f" {storage.url} lacks, and that has version {newest.number} of lineage "
            f"{newest.lineage}: two trainers went on from one state. Nodes follow the URL: move the"
            " folder away, and this run goes on from there"
        )
    whole = {*uploader.versions("checkpoints")} & {*uploader.versions("snapshots")}
    for version in sorted({*whole, *uploader.versions("increments")}, reverse=True):
        try:
            if version in whole:
                _fetch(storage, publication, version)
            else:
                _fetch_increment(storage, publication, version)
        except DamagedError as error:
            log.error("%s; the checkpoint before is taken", error)
            continue
        for delta in uploader.versions("deltas"):
            _fetch_version(storage, publication, delta, after=version)
        _fill_log(publication)
        log.info("version %d came from %s", version.number, storage.url)
        return version
    raise CheckpointError(
        f"{storage.url} has versions up to {newest.number} and no checkpoint that is whole: train "
        "under another URL; nodes serve this one as it is, so keep it until they follow the new one"
    )


def _fetch(storage: Storage, publication: Publication, version: VersionId) -> None:
    journals = [key for key in (SILENCES, *storage.keys(INPUTS)) if is_journal(key)]
    for path in (publication.log, publication.set_aside, publication.path / PROMOTED):
        fetch_whole(storage, path.name, path)
    for name in journals:
        fetch_whole(storage, name, publication.path / name)
    # The snapshot last: with it, the checkpoint counts.
    if version not in publication.snapshots():
        _fetch_checkpoint(storage, publication, version)
        if fetch_snapshot(storage, publication, version) is None:
            raise DamagedError(f"{storage.url}/snapshots/{version.folder} is gone")


def _fetch_increment(storage: Storage, publication: Publication, version: VersionId) -> None:
    data = storage.read(f"increments/{version.folder}/{CHECKPOINT}")
    try:
        increment = Increment.from_json(json.loads(data or b"")["checkpoint"]["increment"])
    except (ValueError, KeyError, TypeError) as error:
        path = f"{storage.url}/increments/{version.folder}/{CHECKPOINT}"
        raise DamagedError(f"{path} is no incremental snapshot") from error
    _fetch(storage, publication, increment.base)
    # Its own version last: until that is here, a start that was killed is made again.
    if version not in publication.increments():
        _fetch_checkpoint(storage, publication, version, "increments")
    try:
        for each, _ in increment.chain:
            if each not in publication.deltas() and fetch_delta(storage, publication, each) is None:
                raise DamagedError(f"{storage.url}/deltas/{each.folder} is gone")
    except DamagedError:
        shutil.rmtree(publication.path / "increments" / version.folder)
        raise


def _fetch_version(
    storage: Storage, publication: Publication, version: VersionId, *, after: VersionId
) -> None:
    """Fetch what a version changed. A damaged one is left out: nodes cannot read it either."""
    if version.number <= after.number or version in publication.deltas():
        return
    try:
        fetch_delta(storage, publication, version)
    except DamagedError as error:
        log.error("%s; nodes need the next snapshot to pass it", error)


def _fetch_checkpoint(
    storage: Storage, publication: Publication, version: VersionId, kind: str = "checkpoints"
) -> None:
    prefix = f"{kind}/{version.folder}"
    data = storage.read(f"{prefix}/{CHECKPOINT}")
    try:
        body: dict[str, Any] = json.loads(data or b"")["checkpoint"]
        sizes = {each["path"]: int(each["bytes"]) for each in body["files"]}
        sums = {each["path"]: [(0, each["bytes"], each["sha256"])] for each in body["files"]}
        for each in body["buckets"]:
            rank = each.get("rank", 0)
            path = f"rows-{rank}.safetensors" if rank else "rows.safetensors"
            end = each["at"] + each["bytes"]
            sizes[path] = max(sizes.get(path, 0), end)
            sums.setdefault(path, []).append((each["at"], each["bytes"], each["sha256"]))
        for rank in range(body.get("ranks", 1)):
            path = f"rows-{rank}.safetensors" if rank else "rows.safetensors"
            sizes.setdefault(path, 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{storage.url}/{prefix}/{CHECKPOINT} is no checkpoint") from error
    inside(list(sizes))
    with arriving(publication.path / prefix) as folder:
        storage.side_by_side(
            functools.partial(
                storage.fetch, f"{prefix}/{path}", folder / path, size=size, crc32c=None
            )
            for path, size in sizes.items()
        )
        for path, parts in sums.items():
            with (folder / path).open("rb") as file:
                for at, size, wanted in parts:
                    file.seek(at)
                    if hashlib.sha256(file.read(size)).hexdigest() != wanted:
                        raise DamagedError(f"{storage.url}/{prefix}/{path} fails its checksum")
        write_synced(folder / CHECKPOINT, data or b"")


def _fill_log(publication: Publication) -> None:
    """Note the versions that came out after the log was written."""
    lines = publication.log.read_bytes().splitlines() if publication.log.is_file() else []
    noted = set()
    for line in lines:
        try:
            said = json.loads(line)
            noted.add((said["number"], said["lineage"]))
        except (ValueError, KeyError, TypeError):
            continue  # a writer was killed within it
    for version in publication.deltas():
        if version in noted:
            continue
        try:
            commit = publication.read_commit(version).commit
        except PublicationError:
            continue
        publication.note(
            version, watermark_ms=commit.watermark_ms, committed_ms=commit.committed_ms
        )
