"""Checkpoints: the read offset, the dense net, all optimizer state, beside a snapshot's rows.

A checkpoint belongs to a snapshot of the same version and holds what serving has no use for
(docs/formats.md):

    PUB/checkpoints/NUMBER-LINEAGE/
      rows.safetensors      what learning knows of the rows: a safetensors file for each bucket
                            file of the snapshot, one after the other; each of many ranks writes one
                            with its own buckets (rows-1.safetensors ...); behind them the
                            unpruned rows, where pruning has a bound, and their state
      dense.safetensors     net and optimizer
      scores.safetensors    the scores of the current day
      sync.safetensors      what the strategy of synchronisation keeps, if it does: one file a rank
                            (sync-1.safetensors ...)
      checkpoint.json       last: all else, and the hash of every file and bucket

It is written before the snapshot appears, and counts once the snapshot is there: so a snapshot is
never without one, wherever its trainer was killed. It names the snapshot by the hash of its
manifest, which names every file of it by checksum. Nothing in it is code: no pickle.

That of an incremental snapshot (increment.py) has a folder of its own, PUB/increments, belongs to
the snapshot that it rests on, and exists once its checkpoint.json does.

Shapes: N rows of a bucket, C chunks of a row.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import safetensors.numpy
import safetensors.torch
from numpy.typing import NDArray
from torch import Tensor

from embertide import _store
from embertide.trainer.data.history import HistoryState
from embertide.trainer.data.labels import DelayedLabelState
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.errors import FinalError
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.model.unpruned import UnprunedState
from embertide.trainer.publish.folder import (
    CHECKPOINT,
    MANIFEST,
    Publication,
    PublicationError,
    VersionId,
    sync_folder,
    write_synced,
)
from embertide.trainer.publish.promotion import PromotionRecord
from embertide.trainer.publish.snapshot import (
    Layout,
    SnapshotError,
    read_former,
    read_manifest,
    read_transforms,
)
from embertide.trainer.publish.snapshot_rows import read_buckets
from embertide.trainer.run.checkpoint.increment import (
    BrokenChainError,
    ChainReader,
    ChangedKeys,
    Increment,
    Keys,
    overlaid,
)
from embertide.trainer.sync import plan
from embertide.trainer.sync.channel import ALONE, Channel

FORMAT = 7
OLDEST = 5  # that is read; what has changed since stands where it is read
_OF_ONE_RANK = 6  # written by one rank: builds before many ranks read it
_PARTIAL = f".{CHECKPOINT}"
_ROWS = "rows.safetensors"  # of rank 0; that of another has its number before the dot
_SYNC = "sync.safetensors"  # as _ROWS
_DENSE = "dense.safetensors"
_SCORES = "scores.safetensors"
_MONITOR = "monitor.safetensors"
_STREAM = "stream.safetensors"
_PLAIN = (
    *("config", "changed", "changes", "offset", "done", "events", "origin_ms", "plan", "load"),
    *("cursor", "generation", "journals", "origin"),
)
# Values of the later fields of `_PLAIN` in a checkpoint that lacks them.
_BEFORE: dict[str, Any] = {
    **{"changed": None, "changes": [], "plan": "", "load": [], "cursor": []},
    "generation": 0,
    **{"journals": {}, "origin": {}},
}
_WAITING = "waiting"  # of a bucket
_TRAINED = "trained"  # of one of a table that is served in another type
_UNPRUNED = "unpruned"  # in checkpoint.json, and before the names of its arrays
_OF_UNPRUNED = "unpruned/"  # before the table of a bucket of such rows: no table has such a name
_KEYS = "key_N"  # of the rows whose state an increment has
_INCREMENT = "increment"
_JOIN = "join."  # of impressions that wait for labels, before the names of their arrays
_HARMED = ".harmed"
_STATE = ("accumulator_N", "age_N", "utility_NC", "steps_N", "elements_NE")


class CheckpointError(FinalError):
    """A checkpoint cannot be written or used; the message names the file and what differs."""


class UnwrittenError(CheckpointError):
    """A checkpoint could not be written; the run can go on from the one before."""

    final = False


class HarmedCheckpointError(CheckpointError):
    """A checkpoint, or the snapshot that it belongs to, is not what was written.

    Attributes:
        version: The version of the checkpoint.
    """

    def __init__(self, message: str, version: VersionId) -> None:
        """Name the version."""
        super().__init__(message)
        self.version = version


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The state of a trainer at a version, its rows excepted."""

    version: VersionId
    config: dict[str, Any]  # settings.settings of the run: another one cannot go on from here
    changed: list[str] | None  # settings.changed_from_default of it; None: its build did not say
    changes: list[dict[str, Any]]  # settings that were changed on the way, oldest first
    offset: int  # event index of the batch to read first
    done: int  # events before this index are learned
    events: int  # trained on so far
    origin_ms: int  # where versions are counted from
    net: dict[str, Tensor]
    optimizer: dict[str, Any]
    rows: tuple[int, int, list[bytes]]  # EmbeddingStore.progress, the last by rank
    prequential: Prequential
    histories: list[HistoryState]  # by sequence, as of `done`
    plan: str = ""  # of the ranks, as plan.text has it
    load: list[list[int]] = dataclasses.field(default_factory=list)  # plan.balanced's
    heads: tuple[dict[str, Any], dict[str, NDArray[Any]]] = ({}, {})  # Heads.state
    monitor: tuple[dict[str, Any], dict[str, NDArray[Any]]] = ({}, {})  # Monitor.state
    # PrecisionCheck.state; of a checkpoint that was read, among others.
    precision: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    cursor: list[int] = dataclasses.field(default_factory=list)  # of merged inputs, at `offset`
    generation: int = 0  # the first version of this model; 0: of the run's first
    journals: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # journal_lines
    origin: dict[str, str] = dataclasses.field(default_factory=dict)  # FolderOrigin's fields
    waiting: DelayedLabelState | None = None  # impressions whose labels are to come, as of `done`
    # DenseSync.state of this rank; of a checkpoint that was read, `sync_states` has all ranks'.
    sync: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    unpruned: UnprunedState | None = None  # where pruning has a bound


def _folder(publication: Publication, version: VersionId, *, increment: bool = False) -> Path:
    return publication.path / ("increments" if increment else "checkpoints") / version.folder


def folder_of(publication: Publication, version: VersionId) -> Path:
    """Return where the checkpoint of a version lies."""
    return _folder(publication, version, increment=is_increment(publication, version))


def _of_rank(path: str, rank: int) -> str:
    return path if rank == 0 else path.replace(".", f"-{rank}.", 1)


def _state_name(rank: int) -> str:
    return "prune_state" if rank == 0 else f"prune_state{rank}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _text(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def is_complete(publication: Publication, version: VersionId) -> bool:
    """Return whether a version has a snapshot and a checkpoint, so that a run can go on there."""
    return _is_whole(publication, version) or is_increment(publication, version)


def is_increment(publication: Publication, version: VersionId) -> bool:
    """Return whether a version has an incremental snapshot, and none with all rows."""
    there = (_folder(publication, version, increment=True) / CHECKPOINT).is_file()
    return there and not _is_whole(publication, version)


def _is_whole(publication: Publication, version: VersionId) -> bool:
    snapshot = publication.snapshot_path(version) / MANIFEST
    return snapshot.is_file() and (_folder(publication, version) / CHECKPOINT).is_file()


class CheckpointWriter:
    """Writes the checkpoint of a version, in `with`; it exists after `finish`. For one thread.

    Of many ranks, each makes one of these and adds its own buckets.
    """

    def __init__(
        self,
        publication: Publication,
        version: VersionId,
        channel: Channel = ALONE,
        increment: Increment | None = None,
    ) -> None:
        """Begin; what a writer that was killed left of it goes.

        With `increment`, that of an incremental snapshot: `add` gives what changed alone.
        """
        self._folder = _folder(publication, version, increment=increment is not None)
        self._increment = increment
        self._channel = channel
        with channel.together():
            if channel.first:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.mkdir(parents=True)
        with channel.together():
            self._rows = (self._folder / _of_rank(_ROWS, channel.rank)).open("wb")
        self._buckets: list[dict[str, Any]] = []
        self._files: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close its file; what was not finished goes."""
        try:
            self._rows.close()
        finally:
            if self._channel.first and not (self._folder / CHECKPOINT).exists():
                shutil.rmtree(self._folder, ignore_errors=True)

    def add(
        self,
        table: str,
        bucket: int,
        state: "_store.BucketState",
        waiting: bytes = b"",
        keys: Keys | None = None,
        *,
        trained: bytes | None = None,
        is_unpruned: bool = False,
    ) -> None:
        """Write the state of a bucket's trained rows, in key order.

        `waiting` are the records of those that the snapshot has otherwise, or not at all; `trained`
        those of all rows, where the snapshot has them in another type; `keys` says which rows an
        increment has the state of. A bucket that `is_unpruned` is written whole: no snapshot has
        its records.
        """
        arrays: dict[str, NDArray[Any]] = dict(zip(_STATE, state, strict=True))
        if waiting:
            arrays[_WAITING] = np.frombuffer(waiting, np.uint8)
        if trained is not None:
            arrays[_TRAINED] = np.frombuffer(trained, np.uint8)
        if keys is not None:
            arrays[_KEYS] = keys
        data = safetensors.numpy.save(arrays)
        name = f"{_OF_UNPRUNED}{table}" if is_unpruned else table
        place = {"table": name, "bucket": bucket, "at": self._rows.tell()}
        if self._channel.rank:
            place["rank"] = self._channel.rank
        self._buckets.append({**place, "bytes": len(data), "sha256": _hash(data)})
        self._rows.write(data)

    def _write(self, path: str, data: bytes) -> None:
        write_synced(self._folder / path, data)
        self._files.append({"path": path, "bytes": len(data), "sha256": _hash(data)})

    def finish(self, checkpoint: Checkpoint, manifest: str | None) -> None:
        """Write all else; `manifest` is the text of the snapshot's, which the first rank has.

        Of an increment, it is that of the base.
        """
        with self._channel.together():
            self._rows.flush()
            os.fsync(self._rows.fileno())
            if checkpoint.sync:
                data = safetensors.numpy.save(checkpoint.sync)
                self._write(_of_rank(_SYNC, self._channel.rank), data)
        said = self._channel.gather([self._buckets, self._files], "places")
        self._buckets = [bucket for buckets, _ in said for bucket in buckets]
        self._files = [file for _, files in said for file in files]
        with self._channel.together():
            if self._channel.first:
                assert manifest is not None
                self._write_rest(checkpoint, manifest)

    def _write_rest(self, checkpoint: Checkpoint, manifest: str) -> None:
        tensors = {f"net.{name}": tensor for name, tensor in checkpoint.net.items()}
        optimizer = _without_tensors(checkpoint.optimizer, "optimizer", tensors)
        self._write(_DENSE, safetensors.torch.save(tensors))
        steps, pruned_at, prune_states = checkpoint.rows
        stream: dict[str, NDArray[Any]] = {
            _state_name(rank): np.frombuffer(state, np.uint8)
            for rank, state in enumerate(prune_states)
        }
        for place, history in enumerate(checkpoint.histories):
            stream |= {f"users{place}": history.user_U, f"items{place}": history.items_UL}
            if history.times_UT.shape[1]:
                stream[f"times{place}"] = history.times_UT
        waiting = checkpoint.waiting
        if waiting is not None:
            stream |= {f"{_JOIN}{name}": array for name, array in waiting.arrays.items()}
        unpruned = checkpoint.unpruned
        if unpruned is not None:
            stream |= {f"{_UNPRUNED}.{name}": array for name, array in unpruned.arrays.items()}
        self._write(_STREAM, safetensors.numpy.save(stream))
        figures, arrays = checkpoint.prequential.state()
        of_heads, more = checkpoint.heads
        self._write(_SCORES, safetensors.numpy.save(arrays | more | checkpoint.precision))
        numbers, arrays = checkpoint.monitor
        self._write(_MONITOR, safetensors.numpy.save(arrays))
        body = {
            "format": _OF_ONE_RANK if self._channel.size == 1 else FORMAT,
            "version": checkpoint.version._asdict(),
            **{name: getattr(checkpoint, name) for name in _PLAIN},
            "optimizer": optimizer,
            "rows": [steps, pruned_at],
            "ranks": self._channel.size,
            "forgotten": [history.forgotten for history in checkpoint.histories],
            "join": None if waiting is None else dict(waiting.counts),
            "prequential": figures,
            "heads": of_heads,
            "monitor": numbers,
            "manifest_sha256": _hash(manifest.encode()),
            **({} if self._increment is None else {_INCREMENT: self._increment.as_json()}),
            **(
                {}
                if unpruned is None
                else {_UNPRUNED: {"steps": unpruned.steps, "figures": unpruned.figures}}
            ),
            "files": self._files,
            "buckets": self._buckets,
        }
        text = _text({"sha256": _hash(_text(body)), "checkpoint": body})
        write_synced(self._folder / _PARTIAL, text)
        (self._folder / _PARTIAL).rename(self._folder / CHECKPOINT)
        sync_folder(self._folder)
        sync_folder(self._folder.parent)


class _Files:
    """Files of rows that are being read, open until a stack ends."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, BinaryIO] = {}

    def open(self, path: Path) -> BinaryIO:
        if path not in self._open:
            self._open[path] = self._stack.enter_context(path.open("rb"))
        return self._open[path]


class _Bucket(NamedTuple):
    """A bucket of a checkpoint.

    Attributes:
        records: As they are trained; those that wait may be as nodes hold them.
        waiting: Trained records that nodes hold otherwise or lack.
        state: State of the trained rows.
        changed: Keys of the rows that an increment has the state of.
    """

    records: bytes
    waiting: bytes
    state: "_store.BucketState"
    changed: Keys | None = None


class SavedCheckpoint:
    """A checkpoint as it lies in a publication, each file proved as it is read.

    Attributes:
        checkpoint: The checkpoint, the rows' state excepted.
        snapshot: The version of the snapshot that has its rows, or rows that it rests on.
        increment: The increment that it rests on; None: it rests on nothing else.
        changed: Rows that changed since that snapshot, once `restore_rows` has read them.

    Raises:
        HarmedCheckpointError: Anything in it is not what was written, or its snapshot is another.
        CheckpointError: It is of another format, or a file cannot be read now.
    """

    def __init__(self, publication: Publication, version: VersionId) -> None:
        """Read and prove it, the rows' state excepted."""
        self._version = version
        incremental = is_increment(publication, version)
        self._folder = _folder(publication, version, increment=incremental)
        body = self._body(version)
        self.increment: Increment | None = None
        if incremental:
            self.increment = self._read_increment(body)
        self.changed = ChangedKeys()
        self.snapshot = version if self.increment is None else self.increment.base
        self._snapshot = publication.snapshot_path(self.snapshot)
        self._files = {each["path"]: each for each in body["files"]}
        self._buckets = {(each["table"], each["bucket"]): each for each in body["buckets"]}
        self._format: int = body["format"]
        self._ranks: int = body.get("ranks", 1)
        self._infos: dict[tuple[str, int], dict[str, Any]] | None = None  # of the snapshot's files
        self._check_snapshot(body["manifest_sha256"])
        self._base: SavedCheckpoint | None = None
        self._chain: ChainReader | None = None
        if self.increment is not None:
            with self._resting():
                self._base = SavedCheckpoint(publication, self.snapshot)
                self._chain = ChainReader(publication, self.increment)
        tensors = safetensors.torch.load(self._read(_DENSE))
        stream = safetensors.numpy.load(self._read(_STREAM))
        scores = safetensors.numpy.load(self._read(_SCORES))
        self.checkpoint = Checkpoint(
            version=version,
            **{name: body[name] for name in _PLAIN},
            net={
                name.removeprefix("net."): tensor
                for name, tensor in tensors.items()
                if name.startswith("net.")
            },
            optimizer=_with_tensors(body["optimizer"], tensors),
            rows=(
                *body["rows"],
                [stream[_state_name(rank)].tobytes() for rank in range(self._ranks)],
            ),
            histories=[
                HistoryState(
                    user_U=stream[f"users{place}"],
                    items_UL=stream[f"items{place}"],
                    times_UT=stream.get(
                        f"times{place}", np.empty((len(stream[f"users{place}"]), 0), np.int64)
                    ),
                    forgotten=forgotten,
                )
                for place, forgotten in enumerate(body["forgotten"])
            ],
            waiting=_waiting(body.get("join"), stream),
            prequential=Prequential.from_state(body["prequential"], scores),
            heads=(body.get("heads", {}), scores),
            precision=scores,
            # Older builds did not have it.
            monitor=(body["monitor"], safetensors.numpy.load(self._read(_MONITOR)))
            if "monitor" in body
            else ({}, {}),
            unpruned=_unpruned(body.get(_UNPRUNED), stream),
        )

    def restore_unpruned(self, rows: EmbeddingStore) -> None:
        """Bring the unpruned rows and their state into `rows`, which must hold none.

        Raises:
            HarmedCheckpointError: A file of it is not what was written.
            CheckpointError: It cannot be read now.
            StoreError: There is no room.
        """
        with contextlib.ExitStack() as stack:
            files = _Files(stack)
            for t, table, bucket in rows.places():
                arrays = self._arrays(files, f"{_OF_UNPRUNED}{table.name}", bucket)
                state = _state_of(arrays)
                rows.store.import_records(t, bucket, _records_of(arrays, _WAITING))
                rows.store.set_bucket_state(t, bucket, state)

    def sync_states(self) -> list[dict[str, NDArray[Any]]]:
        """Return what `DenseSync.state` gave on each rank, by rank; empty: it kept nothing.

        Raises:
            HarmedCheckpointError: A file of it is not what was written.
            CheckpointError: It cannot be read now.
        """
        paths = [_of_rank(_SYNC, rank) for rank in range(self._ranks)]
        return [safetensors.numpy.load(self._read(each)) for each in paths if each in self._files]

    def _refusal(self, path: Path, what: str) -> CheckpointError:
        return HarmedCheckpointError(f"{path} {what}", self._version)

    def _read_increment(self, body: Mapping[str, Any]) -> Increment:
        try:
            return Increment.from_json(body[_INCREMENT])
        except (KeyError, TypeError, ValueError) as error:
            raise self._refusal(self._folder / CHECKPOINT, f"names no base ({error})") from error

    @contextlib.contextmanager
    def _resting(self) -> Iterator[None]:
        """Say whose increment cannot be used where what it rests on is harmed."""
        try:
            yield
        except (BrokenChainError, HarmedCheckpointError, PublicationError, ValueError) as error:
            raise self._refusal(self._folder, f"rests on what is harmed ({error})") from error

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise self._refusal(path, "is missing") from error
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}); bring it back from a copy"
            ) from error

    def _bytes(self, path: Path) -> bytes:
        with self._reading(path):
            return path.read_bytes()

    def _body(self, version: VersionId) -> dict[str, Any]:
        path = self._folder / CHECKPOINT
        try:
            said = json.loads(self._bytes(path))
            body: dict[str, Any] = said["checkpoint"]
            if body["format"] not in range(OLDEST, FORMAT + 1):
                raise CheckpointError(
                    f"{path} has format {body['format']}, this build reads {OLDEST} to {FORMAT}: go"
                    " on with the build that wrote it"
                )
            if said["sha256"] != _hash(_text(body)):
                raise self._refusal(path, "fails its checksum")
        except (ValueError, KeyError, TypeError) as error:
            raise self._refusal(path, f"is no checkpoint ({error})") from error
        if VersionId(**body["version"]) != version:
            raise self._refusal(path, f"is of version {VersionId(**body['version']).folder}")
        return {**_BEFORE, **body}

    def _check_snapshot(self, sha256: str) -> None:
        path = self._snapshot / MANIFEST
        found = _hash(self._bytes(path))
        if found != sha256:
            raise self._refusal(path, f"has sha256 {found}, {CHECKPOINT} names {sha256}")

    def _prove(self, name: str, data: bytes, named: Mapping[str, Any]) -> bytes:
        for field, found in (("bytes", len(data)), ("sha256", _hash(data))):
            if found != named[field]:
                raise self._refusal(
                    self._folder / name, f"has {field} {found}, {CHECKPOINT} names {named[field]}"
                )
        return data

    def _read(self, path: str) -> bytes:
        return self._prove(path, self._bytes(self._folder / path), self._files[path])

    def _arrays(self, files: "_Files", table: str, bucket: int) -> dict[str, NDArray[Any]]:
        named = self._buckets.get((table, bucket), {})
        rank = named.get("rank", 0)
        path = _of_rank(_ROWS, rank)
        name = f"{path}, bucket {bucket} of table {table}"
        if not named:
            raise self._refusal(self._folder / name, f"is not named by {CHECKPOINT}")
        with self._reading(self._folder / path):
            rows = files.open(self._folder / path)
        rows.seek(named["at"])
        return safetensors.numpy.load(self._prove(name, rows.read(named["bytes"]), named))

    def _trained(self, arrays: Mapping[str, NDArray[Any]], table: str, bucket: int) -> bytes:
        """Return the trained rows of a bucket that the snapshot has in another type."""
        if _TRAINED not in arrays:
            raise self._refusal(
                self._folder / _ROWS, f"lacks the trained rows of table {table}, bucket {bucket}"
            )
        return _records_of(arrays, _TRAINED)

    def _progress(self, rows: EmbeddingStore) -> tuple[int, int, list[bytes]]:
        steps, pruned_at, states = self.checkpoint.rows
        if self._format == 5:
            states = [
                rows.store.prune_state_of_format_5(0, each) if each else each for each in states
            ]
        return steps, pruned_at, states

    def restore_rows(self, rows: EmbeddingStore) -> None:
        """Bring the rows and what their learning knows into `rows`, which must hold none.

        Tables must be those of the checkpoint; devices, budgets and tiers may be others, for each
        bucket stands alone in both files.

        Raises:
            HarmedCheckpointError: A file of it, or of the snapshot, is not what was written.
            CheckpointError: It cannot be read now.
            StoreError: There is no room.
        """
        with contextlib.ExitStack() as stack:
            files = _Files(stack)
            for t, served, bucket, records in self._buckets_of_snapshot(rows):
                found = self._rows_of(files, rows.tables[t], served, bucket, records)
                if found.changed is not None:
                    self.changed.add((t, bucket), found.changed)
                rows.store.import_records(t, bucket, found.records)
                rows.store.import_records(t, bucket, found.waiting)
                rows.store.set_bucket_state(t, bucket, found.state)
                waiting = _store.record_keys(rows.tables[t].layout, found.waiting)
                rows.store.mark_changed(t, bucket, waiting)
            rows.resume(
                self._progress(rows),
                same_owners=self.checkpoint.plan == plan.text(rows.config, rows.ownership),
            )

    def _rows_of(
        self,
        files: "_Files",
        table: _store.TableConfig,
        served: _store.TableConfig,
        bucket: int,
        records: bytes,
    ) -> "_Bucket":
        """Return a bucket, `records` being those of the snapshot."""
        apart = table.layout.dtype != served.layout.dtype
        if self._base is None or self._chain is None:
            arrays = self._arrays(files, table.name, bucket)
            state, waiting = _state_of(arrays), _records_of(arrays, _WAITING)
            if apart:
                trained = self._trained(arrays, table.name, bucket)
                waiting = _held_otherwise(table.layout, trained, served.layout, records)
                records = trained
            return _Bucket(records, waiting, state)
        before = _store.record_keys(served.layout, records)
        of_base = self._base._arrays(files, table.name, bucket)
        changed: tuple[Keys, _store.BucketState] | None = None
        more = b""
        if (table.name, bucket) in self._buckets:
            arrays = self._arrays(files, table.name, bucket)
            changed = arrays[_KEYS], _state_of(arrays)
            more = self._trained(arrays, table.name, bucket) if apart else b""
        steps = self.checkpoint.rows[0] - self._base.checkpoint.rows[0]
        with self._resting():
            records = _store.merge_records(
                served.layout, records, self._chain.records(table.id, bucket)
            )
            key_N = _store.record_keys(served.layout, records)
            state = overlaid(key_N, (before, _state_of(of_base)), changed, steps)
            if apart:
                trained = self._base._trained(of_base, table.name, bucket)
                records = _trained_at(table.layout, key_N, trained, more)
        return _Bucket(records, b"", state, None if changed is None else changed[0])

    def _buckets_of_snapshot(
        self, rows: EmbeddingStore
    ) -> Iterator[tuple[int, _store.TableConfig, int, bytes]]:
        by_partition = self.increment is not None
        try:
            yield from read_buckets(rows, self._snapshot, by_partition=by_partition)
        except _store.StoreError as error:
            raise self._refusal(self._snapshot, f"is harmed ({error})") from error

    def read_bucket(
        self, table: _store.TableConfig, served: _store.TableConfig, bucket: int
    ) -> "tuple[bytes, _store.BucketState]":
        """Return the records of a bucket's trained rows, and the state of each.

        Args:
            table: Its table, as its run trains it.
            served: The same as its snapshot has it.
            bucket: Which of its buckets.

        Raises:
            HarmedCheckpointError: A file of it, or of the snapshot, is not what was written.
            CheckpointError: It cannot be read now.
        """
        if self._infos is None:
            fields = read_manifest(self._snapshot)["buckets"]
            self._infos = {(each["table"], each["bucket"]): each for each in fields}
        info = _store.BucketFileInfo(**self._infos[table.name, bucket])
        try:
            records = _store.read_bucket_file(str(self._snapshot), served, info)
        except _store.StoreError as error:
            raise self._refusal(self._snapshot, f"is harmed ({error})") from error
        with contextlib.ExitStack() as stack:
            found = self._rows_of(_Files(stack), table, served, bucket, records)
        if found.waiting:
            records = _store.merge_records(table.layout, found.records, [found.waiting])
            return records, found.state
        return found.records, found.state

    @property
    def watermark_ms(self) -> int:
        """Event time of the version, ms."""
        if self._chain is not None:
            return self._chain.watermark_ms
        return int(read_manifest(self._snapshot)["watermark_ms"])

    def former(self) -> tuple[Layout, ...]:
        """Return the former layouts of the model, as its snapshot lists them."""
        return read_former(self._snapshot)

    def transforms(self) -> _store.Transforms | None:
        """Return what the net wants done to DENSE; None: nothing.

        Raises:
            HarmedCheckpointError: The snapshot's file is not what its manifest says.
        """
        try:
            return read_transforms(self._snapshot)
        except (SnapshotError, _store.StoreError) as error:
            raise self._refusal(self._snapshot, f"is harmed ({error})") from error


def newest(publication: Publication) -> VersionId | None:
    """Return the version of the newest checkpoint whose snapshot is there; None if there is none.

    Incremental ones count. Those of versions that a rollback undid are passed over.

    Raises:
        CheckpointError: A rollback undid all.
    """
    undone = PromotionRecord(publication).read().undone
    passed_over = 0
    for version in sorted({*publication.snapshots(), *publication.increments()}, reverse=True):
        if not is_complete(publication, version):
            continue
        if not any(each.to < version.number < each.number for each in undone):
            return version
        passed_over += 1
    if passed_over:
        raise CheckpointError(
            f"{publication.path} has no checkpoint from before the versions that a rollback undid "
            f"({passed_over} after it): train in a new folder and keep this one"
        )
    return None


def saved_settings(publication: Publication) -> dict[str, Any]:
    """Return the settings of the newest checkpoint, unproved; none where it has no such.

    For who decides about a run before it is resumed: that proves all, and says what is wrong.
    """
    try:
        version = newest(publication)
        if version is None:
            return {}
        text = (folder_of(publication, version) / CHECKPOINT).read_bytes()
        found = json.loads(text)["checkpoint"]["config"]
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return {}
    return found if isinstance(found, dict) else {}


def load_newest(publication: Publication) -> SavedCheckpoint | None:
    """Return the newest checkpoint, as `newest` finds it; None if there is none.

    Raises:
        HarmedCheckpointError: It is not what was written.
        CheckpointError: It is of another format; or a rollback undid all.
    """
    version = newest(publication)
    return None if version is None else SavedCheckpoint(publication, version)


def put_aside(publication: Publication, version: VersionId) -> Path:
    """Take a harmed checkpoint out of the way, so that the one before is the newest.

    Returns:
        Where it is now.
    """
    folder = folder_of(publication, version)
    aside = folder.with_name(f"{folder.name}{_HARMED}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def prune(publication: Publication, keep_increments: int = 1) -> None:
    """Drop the checkpoints whose snapshots are gone, and what was never finished.

    Of those put aside the newest stays, for who wants to know what happened.

    Args:
        publication: The publication to prune.
        keep_increments: So many of the newest that follow the newest snapshot stay.
    """
    snapshots = publication.snapshots()
    kept = {_folder(publication, version) for version in snapshots}
    _drop_others(publication.path / "checkpoints", kept)
    following = [v for v in publication.increments() if not snapshots or v > snapshots[-1]]
    newest = following[-keep_increments:]
    kept = {_folder(publication, version, increment=True) for version in newest}
    _drop_others(publication.path / "increments", kept)


def _drop_others(parent: Path, kept: set[Path]) -> None:
    kept = kept | set(sorted(parent.glob(f"*{_HARMED}"))[-1:])
    for path in parent.iterdir() if parent.is_dir() else ():
        if path in kept:
            continue
        if path.is_dir():
            (path / CHECKPOINT).unlink(missing_ok=True)  # first: none is there in part
            shutil.rmtree(path)
        else:
            path.unlink()


def _state_of(arrays: Mapping[str, NDArray[Any]]) -> "_store.BucketState":
    accumulator_N, age_N, utility_NC, steps_N, elements_NE = (arrays[each] for each in _STATE)
    return accumulator_N, age_N, utility_NC, steps_N, elements_NE


def _records_of(arrays: Mapping[str, NDArray[Any]], name: str) -> bytes:
    return arrays[name].tobytes() if name in arrays else b""


def _held_otherwise(
    layout: _store.RowLayout, trained: bytes, served: _store.RowLayout, held: bytes
) -> bytes:
    """Return the trained records that nodes, which have `held`, would not read as they are."""
    encoded = _store.convert_records(layout, served, trained)
    waiting = _store.differing_records(served, encoded, held)
    return _store.restore_records(layout, trained, _store.record_keys(served, waiting))


def _trained_at(layout: _store.RowLayout, key_N: Keys, base: bytes, changed: bytes) -> bytes:
    """Return the trained records of `key_N`, ascending: those that changed, and else the base's.

    Raises:
        ValueError: A row is in neither.
    """
    records = _store.merge_records(layout, base, [changed])
    lacking = int((~np.isin(key_N, _store.record_keys(layout, records))).sum())
    if lacking:
        raise ValueError(f"{lacking} rows have no trained values")
    return _store.restore_records(layout, records, key_N)


def _waiting(
    counts: dict[str, int] | None, stream: Mapping[str, NDArray[Any]]
) -> DelayedLabelState | None:
    if counts is None:
        return None
    arrays = {name[len(_JOIN) :]: each for name, each in stream.items() if name.startswith(_JOIN)}
    return DelayedLabelState(arrays=arrays, counts=counts)


def _unpruned(
    found: Mapping[str, Any] | None, stream: Mapping[str, NDArray[Any]]
) -> UnprunedState | None:
    if found is None:
        return None
    begin = f"{_UNPRUNED}."
    return UnprunedState(
        steps=found["steps"],
        figures=found["figures"],
        arrays={n.removeprefix(begin): a for n, a in stream.items() if n.startswith(begin)},
    )


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON can hold it; each tensor goes to `tensors`, its name stays."""
    if isinstance(value, Tensor):
        tensors[name] = value.contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        # Pairs: keys may be numbers.
        return {
            "items": [[k, _without_tensors(v, f"{name}.{k}", tensors)] for k, v in value.items()]
        }
    if isinstance(value, list | tuple):
        return [_without_tensors(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `_without_tensors`; tuples have become lists."""
    if isinstance(value, list):
        return [_with_tensors(each, tensors) for each in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {key: _with_tensors(each, tensors) for key, each in value["items"]}
    return value
