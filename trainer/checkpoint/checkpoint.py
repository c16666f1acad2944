"""Checkpoints: the read offset, the dense net, all optimizer state, beside a snapshot's rows.

A checkpoint belongs to a snapshot of the same version and holds what serving has no use for:

    PUB/checkpoints/NUMBER-LINEAGE.pt

It is written before the snapshot, by rename, and counts once the snapshot is there: so a snapshot
is never without one, wherever its trainer was killed. The file is 8 bytes of magic, the u32 CRC32C
of what follows, and a pickle: only files of one's own publication are read.
"""

import dataclasses
import io
import os
import struct
from pathlib import Path
from typing import Any

import torch

from embertide import _store
from embertide.trainer.data.history import HistoryState
from embertide.trainer.errors import TrainerError
from embertide.trainer.eval.metrics import Prequential
from embertide.trainer.publish.folder import Publication, VersionId

FORMAT = 4
_MAGIC = b"EMCKP004"


class CheckpointError(TrainerError):
    """A checkpoint cannot be used; the message names the file and what differs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The state of a trainer at a version, its rows excepted."""

    version: VersionId
    config: dict[str, Any]  # of the run: another one cannot go on from here
    offset: int  # event index of the batch to read first
    done: int  # events before this index are learned
    events: int  # trained on so far
    origin_ms: int  # where versions are counted from
    net: dict[str, Any]
    optimizer: dict[str, Any]
    states: dict[tuple[int, int], "_store.BucketState"]  # by (table, bucket)
    rows: tuple[int, int, bytes]  # EmbeddingStore.progress
    prequential: Prequential
    histories: list[HistoryState]  # by sequence, as of `done`


def _path(publication: Publication, version: VersionId) -> Path:
    return publication.path / "checkpoints" / f"{version.folder}.pt"


def save(publication: Publication, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; it counts once the snapshot of its version is there."""
    path = _path(publication, checkpoint.version)
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(Checkpoint)}
    pickled = io.BytesIO()
    torch.save({"format": FORMAT, **fields}, pickled)
    data = pickled.getvalue()
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(_MAGIC + struct.pack("<I", _store.crc32c(data)))
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def load_newest(publication: Publication) -> Checkpoint | None:
    """Return the newest checkpoint whose snapshot is there; None if there is none.

    Raises:
        CheckpointError: It is of another format, or its bytes are not those that were written.
    """
    for version in reversed(publication.snapshots()):
        path = _path(publication, version)
        if not path.is_file():
            continue
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if data[:8] != _MAGIC:
            raise CheckpointError(f"{path} has another format than {FORMAT}")
        pickled = data[12:]
        if data[8:12] != struct.pack("<I", _store.crc32c(pickled)):
            raise CheckpointError(
                f"{path} fails its checksum: remove it, and the run goes on from the one before"
            )
        fields = torch.load(io.BytesIO(pickled), weights_only=False)
        fields.pop("format")
        return Checkpoint(**{**fields, "version": VersionId(*fields["version"])})
    return None


def prune(publication: Publication) -> None:
    """Drop the checkpoints whose snapshots are gone, and what was never finished."""
    kept = {_path(publication, version) for version in publication.snapshots()}
    for path in (publication.path / "checkpoints").iterdir():
        if path not in kept:
            path.unlink()
