"""Checkpoints: the read offset, the dense net, all optimizer state, beside a snapshot's rows.

A checkpoint belongs to a snapshot of the same version and holds what serving has no use for:

    PUB/checkpoints/NUMBER-LINEAGE.pt

It is written after the snapshot, by rename; the newest whose snapshot is there counts. It is a
pickle: only files of one's own publication are read.
"""

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embertide.trainer.errors import TrainerError
from embertide.trainer.eval.metrics import Prequential
from embertide.trainer.publish.folder import Publication, VersionId

FORMAT = 1


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
    adagrad: dict[tuple[int, int], NDArray[np.float32]]  # (table, bucket), rows in key order
    prequential: Prequential


def _path(publication: Publication, version: VersionId) -> Path:
    return publication.path / "checkpoints" / f"{version.folder}.pt"


def save(publication: Publication, checkpoint: Checkpoint) -> None:
    """Write a checkpoint. Requires: the snapshot of its version is there."""
    path = _path(publication, checkpoint.version)
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(Checkpoint)}
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save({"format": FORMAT, **fields}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def load_newest(publication: Publication) -> Checkpoint | None:
    """Return the newest checkpoint whose snapshot is there; None if there is none.

    Raises:
        CheckpointError: It is of another format, or cannot be read.
    """
    for version in reversed(publication.snapshots()):
        path = _path(publication, version)
        if not path.is_file():
            continue
        try:
            fields = torch.load(path, weights_only=False)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if fields.pop("format", None) != FORMAT:
            raise CheckpointError(f"{path} has another format than {FORMAT}")
        return Checkpoint(**{**fields, "version": VersionId(*fields["version"])})
    return None


def prune(publication: Publication) -> None:
    """Drop the checkpoints whose snapshots are gone."""
    kept = {_path(publication, version) for version in publication.snapshots()}
    for path in (publication.path / "checkpoints").glob("*.pt"):
        if path not in kept:
            path.unlink()
