"""Versions and snapshots come from object storage into a folder, each proved before it is seen.

What is read first is what is written last: the commit or the manifest, which names every other file
by size and checksum. Files are gathered in a hidden folder, which then gets the version's name.
"""

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from embertide import _store
from embertide._common.quoting import shown, terminal_text
from embertide.trainer.publish.folder import (
    COMMIT,
    MANIFEST,
    Publication,
    PublicationError,
    VersionId,
    parse_commit,
    sync_folder,
    write_synced,
)
from embertide.trainer.publish.storage import DamagedError, Storage
from embertide.v1 import update_pb2

_MAX_NAME, _MAX_PATH = 200, 1_000  # bytes: a file system has room for some 255, and 4,096


@contextmanager
def arriving(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder, which becomes `folder` at the end, and goes after an error."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_folder(partial)
        partial.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def inside(names: Sequence[str]) -> None:
    """Refuse names of files that lead out of their folder, or that no file of ours can have.

    Raises:
        DamagedError: One does.
    """
    found = {PurePosixPath(name) for name in names}
    for name in names:
        path = PurePosixPath(name)
        parts = path.parts
        leads_out = not parts or path.is_absolute() or any(part.startswith(".") for part in parts)
        too_long = len(name.encode(errors="replace")) > _MAX_PATH or any(
            len(part.encode(errors="replace")) > _MAX_NAME for part in parts
        )
        stands_in_a_file = any(parent in found for parent in path.parents)
        if leads_out or too_long or stands_in_a_file or terminal_text(name) != name:
            raise DamagedError(f"{shown(name)} is no name of a file of a publication")


def _fetch_all(
    storage: Storage, prefix: str, folder: Path, files: Iterable[tuple[str, int, int]]
) -> int:
    """Fetch (name, bytes, crc32c) of files of an object's folder; return their bytes."""
    jobs: list[Callable[[], None]] = []
    total = 0
    files = list(files)
    inside([name for name, _, _ in files])
    for name, size, crc in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        jobs.append(
            functools.partial(storage.fetch, f"{prefix}/{name}", path, size=size, crc32c=crc)
        )
        total += size
    storage.side_by_side(jobs)
    return total


def fetch_delta(
    storage: Storage, publication: Publication, version: VersionId
) -> tuple[update_pb2.CommitFile, int] | None:
    """Fetch what a version changed; return its commit and its bytes; None: it is not there (yet).

    Raises:
        DamagedError: A file is not what the commit says, or the commit is none.
        StorageError: It cannot be read.
    """
    prefix = f"deltas/{version.folder}"
    data = storage.read(f"{prefix}/{COMMIT}")
    if data is None:
        return None
    try:
        file = parse_commit(data, f"{storage.url}/{prefix}/{COMMIT}", version)
    except (PublicationError, ValueError) as error:
        raise DamagedError(str(error)) from error
    commit = file.commit
    files = [(each.delta_path, each.delta_bytes, each.delta_crc32c) for each in file.partitions]
    if commit.dense_path:
        files.append((commit.dense_path, commit.dense_bytes, commit.dense_crc32c))
    with arriving(publication.delta_path(version)) as folder:
        size = _fetch_all(storage, prefix, folder, files)
        write_synced(folder / COMMIT, data)
    return file, size + len(data)


def read_manifest(storage: Storage, version: VersionId) -> tuple[dict[str, Any], bytes] | None:
    """Return a snapshot's manifest and its text; None: the snapshot is not there (yet).

    Raises:
        DamagedError: It is none, or of another version.
        StorageError: It cannot be read.
    """
    key = f"snapshots/{version.folder}/{MANIFEST}"
    data = storage.read(key)
    if data is None:
        return None
    try:
        manifest: dict[str, Any] = json.loads(_store.check_manifest(data.decode()))
    except (_store.StoreError, UnicodeDecodeError) as error:
        raise DamagedError(f"{storage.url}/{key}: {error}") from error
    if (manifest["version"], manifest["lineage"]) != version:
        raise DamagedError(f"{storage.url}/{key} is of version {manifest['version']}")
    return manifest, data


def fetch_snapshot(storage: Storage, publication: Publication, version: VersionId) -> int | None:
    """Fetch a snapshot; return its bytes; None: it is not there (yet).

    Raises:
        DamagedError: A file is not what the manifest says.
        StorageError: It cannot be read.
    """
    found = read_manifest(storage, version)
    if found is None:
        return None
    manifest, data = found
    files = [
        (each["path"], each["bytes"], each["crc32c"])
        for each in (*manifest["buckets"], *manifest["dense"])
    ]
    with arriving(publication.snapshot_path(version)) as folder:
        size = _fetch_all(storage, f"snapshots/{version.folder}", folder, files)
        write_synced(folder / MANIFEST, data)
    return size + len(data)


def fetch_whole(storage: Storage, key: str, path: Path) -> bool:
    """Have a small file be what an object is, if there is one; return whether it changed.

    Raises:
        StorageError: It cannot be read.
    """
    data = storage.read(key)
    if data is None or (path.is_file() and path.read_bytes() == data):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    write_synced(temporary, data)
    temporary.rename(path)
    return True
