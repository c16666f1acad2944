"""Writing snapshots: bucket files, dense program and tensors, and last the manifest.

The bytes are those of docs/formats.md; bucket files are written by the store's library. Equal
states give equal files, so two runs can be compared byte for byte.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from embertide import _store
from embertide.trainer.config import FeatureConfig, ModelConfig
from embertide.trainer.errors import FinalError
from embertide.trainer.publish.folder import (
    MANIFEST,
    Publication,
    VersionId,
    sync_folder,
    write_synced,
)
from embertide.trainer.publish.request_columns import RequestColumns, from_text, to_text
from embertide.trainer.sync.channel import ALONE, Channel

PROGRAM = "dense/program.pt2"
TENSORS = "dense/tensors.safetensors"
TRANSFORMS = "dense/transforms.json"
CONFIG = "dense/config.json"
_NO_COLUMNS = RequestColumns()
_BUCKET_FIELDS = ("path", "table", "bucket", "version", "rows", "bytes", "crc32c")


class SnapshotError(FinalError):
    """A snapshot cannot be written or read; the message names the path."""

    remedy = "`embertide snapshot verify` tells what is whole; give another folder"


def dense_id(tensors: bytes) -> str:
    """Name dense tensors by what they hold; empty for none."""
    return hashlib.sha256(tensors).hexdigest()[:16] if tensors else ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DensePart:
    """The dense net of a snapshot: a package, what it was compiled for, a version's tensors."""

    program: Path
    cpu: str
    tensors: bytes  # of a safetensors file

    @property
    def id(self) -> str:
        """Name the tensors by what they hold."""
        return dense_id(self.tensors)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The columns of a request: names of features and of columns of DENSE, in their order.

    A model whose nodes make columns has two layouts: all columns, and those that nodes do not make.
    """

    keys: tuple[str, ...]
    dense: tuple[str, ...]


MAX_FORMER = 8
"""Former layouts of a manifest, at most."""


def layouts(config: ModelConfig) -> tuple[Layout, ...]:
    """Return what requests to a model may carry: all columns; and those that nodes do not make."""
    published = [sequence for sequence in config.sequences if sequence.published]
    made = {feature.name for feature in config.features if feature.crossed}
    made |= {name for sequence in published for name in sequence.columns}
    made_dense = {name for sequence in published for name in sequence.dense_columns}
    keys = tuple(column.name for column in config.columns)
    whole = Layout(keys=keys, dense=config.raw_columns)
    own = Layout(
        keys=tuple(name for name in keys if name not in made),
        dense=tuple(name for name in config.raw_columns if name not in made_dense),
    )
    return (whole,) if own == whole else (whole, own)


def former_layouts(
    config: ModelConfig, before: ModelConfig, listed: Sequence[Layout]
) -> tuple[Layout, ...]:
    """Return the former layouts of a model that follows another one, newest first.

    Args:
        config: The model.
        before: The one that it follows.
        listed: The former layouts of that one.
    """
    own = layouts(config)
    found = dict.fromkeys((*layouts(before), *listed))  # each once, in order
    return tuple(layout for layout in found if layout not in own)[:MAX_FORMER]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotInfo:
    """A manifest's content beside the lists of files, and the transforms that requests go through.

    Attributes:
        dense_names: Names of DENSE's columns, dense_features of them; asked for where `former` is
            given, and written there and with `context`.
        heads: Names of the dense net's heads, where there are several.
        context: Names of the features and columns of DENSE that are the user's.
        former: The request layouts from before changes of the model, newest first, at most
            `MAX_FORMER`: nodes answer such requests too.
        columns: Those that clients make; written where there is a dense net.
    """

    model: str
    lineage: int
    version: int
    watermark_ms: int
    dense_features: int
    features: Sequence[FeatureConfig]
    sequences: Sequence[dict[str, object]] = ()  # those that nodes make, as the manifest has them
    transforms: _store.Transforms | None = None  # of DENSE; None: the net gets it as it is
    committed_ms: int = 0  # 0: not known
    generation: int = 0  # the first version of this model; 0: of the run's first
    dense_names: Sequence[str] = ()
    heads: Sequence[str] = ()
    context: Sequence[str] = ()
    former: Sequence[Layout] = ()
    columns: RequestColumns = _NO_COLUMNS

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        lineage: int,
        version: int,
        watermark_ms: int,
        transforms: _store.Transforms | None = None,
        committed_ms: int = 0,
        generation: int = 0,
        former: Sequence[Layout] = (),
        columns: RequestColumns = _NO_COLUMNS,
    ) -> "SnapshotInfo":
        """Describe a version of a model."""
        return cls(
            model=config.name,
            lineage=lineage,
            version=version,
            watermark_ms=watermark_ms,
            dense_features=len(config.raw_columns),
            features=config.columns,
            sequences=_sequences(config),
            transforms=transforms,
            committed_ms=committed_ms,
            generation=generation,
            dense_names=config.raw_columns,
            heads=[head.name for head in config.heads] if config.outputs > 1 else (),
            context=config.context,
            former=former,
            columns=columns,
        )


def _table_json(table: _store.TableConfig) -> dict[str, object]:
    return {
        "name": table.name,
        "id": table.id,
        "dim": table.layout.dim,
        "chunks": table.layout.chunks,
        "dtype": table.layout.dtype,
        "bucket_bits": table.bucket_bits,
        "init_seed": table.init_seed,
        "init_scale": table.init_scale,
        "default_row": table.default_row,
    }


def _feature_json(feature: FeatureConfig) -> dict[str, object]:
    said: dict[str, object] = {
        "name": feature.name,
        "table": feature.table,
        "pooling": feature.pooling,
    }
    # Only where it is: nodes that do not understand it serve all others.
    return said | {"weighed": True} if feature.keys == "weighed" else said


def _made_json(feature: FeatureConfig) -> dict[str, object]:
    """Return what nodes make a column from. It is not part of the schema: no row depends on it."""
    return {"crossed": feature.crossed} if feature.crossed else {}


def _names_dense(info: SnapshotInfo) -> bool:
    """Return whether nodes look for columns of DENSE by their names."""
    return bool(info.dense_names and (info.former or info.context))


def _former_json(info: SnapshotInfo) -> dict[str, object]:
    """Return what nodes bring requests of former layouts by: only where there are such."""
    if not info.former:
        return {}
    former = [{"keys": list(each.keys), "dense": list(each.dense)} for each in info.former]
    return {"former": former}


def _sequences(config: ModelConfig) -> list[dict[str, object]]:
    """Return what nodes make the columns of published sequences from."""
    return [
        {
            "name": sequence.name,
            "user": sequence.user,
            "item": sequence.item,
            "table": sequence.table,
            "columns": sequence.columns,
            "dense": config.raw_columns.index(sequence.dense_columns[0]),
            **({"times": True} if sequence.times else {}),
        }
        for sequence in config.sequences
        if sequence.published
    ]


def schema_id(info: SnapshotInfo, tables: Sequence[_store.TableConfig]) -> int:
    """Number features, tables, the dense net's inputs and heads: equal for equal ones, never 0.

    So is what a change of the model came with: the net may be another one, and nothing else.
    """
    schema = [
        [_table_json(table) for table in tables],
        [_feature_json(feature) for feature in info.features],
        info.dense_features,
        *([info.transforms.text] if info.transforms else []),
        *([{"heads": list(info.heads)}] if info.heads else []),
        *([info.generation] if info.generation else []),
    ]
    digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1 | 1


def _dense_json(directory: Path, role: str, path: str) -> dict[str, object]:
    data = (directory / path).read_bytes()
    return {"role": role, "path": path, "bytes": len(data), "crc32c": _store.crc32c(data)}


def keep_program(publication: Publication, version: VersionId) -> None:
    """Make a publication's program that of a version's snapshot, if it is another one.

    It is where a run was about to change its model, and goes on without.

    Raises:
        SnapshotError: There is no such snapshot.
    """
    snapshot = publication.snapshot_path(version)
    named = [each for each in read_manifest(snapshot)["dense"] if each["role"] == "program"]
    for part in named:
        if publication.program.exists():
            data = publication.program.read_bytes()
            if (len(data), _store.crc32c(data)) == (part["bytes"], part["crc32c"]):
                continue
        partial = publication.program.with_name(f".{publication.program.name}.partial")
        shutil.copyfile(snapshot / part["path"], partial)
        partial.rename(publication.program)


def _write_dense(directory: Path, dense: DensePart, info: SnapshotInfo) -> list[dict[str, object]]:
    (directory / "dense").mkdir(exist_ok=True)
    # Programs never change under their name: a link costs nothing where links are possible.
    try:
        os.link(dense.program, directory / PROGRAM)
    except OSError:
        shutil.copyfile(dense.program, directory / PROGRAM)
    write_synced(directory / TENSORS, dense.tensors)
    files = {"program": PROGRAM, "tensors": TENSORS}
    if info.transforms is not None:
        write_synced(directory / TRANSFORMS, info.transforms.text.encode())
        files["transforms"] = TRANSFORMS
    if info.columns:
        write_synced(directory / CONFIG, to_text(info.columns).encode())
        files["config"] = CONFIG
    return [_dense_json(directory, role, path) for role, path in files.items()]


def write_snapshot(
    directory: Path,
    info: SnapshotInfo,
    tables: Sequence[_store.TableConfig],
    buckets: Iterable[tuple[_store.TableConfig, int, bytes]],
    dense: DensePart | None = None,
    *,
    before: Callable[[str | None], None] = lambda manifest: None,
    channel: Channel = ALONE,
) -> None:
    """Write a snapshot to `directory`, which must not exist; it appears whole or not at all.

    Of many ranks, each writes the files of its own buckets, and the first one the rest.

    Args:
        directory: Where it will be.
        info: The manifest's facts about the version.
        tables: All tables, ascending by id.
        buckets: (table, bucket, records), each bucket once, of one rank; consumed one at a time.
        dense: The dense net; None for a snapshot that serves `lookup` only.
        before: Called when every file is written, before the snapshot appears: with the text of
            the manifest on the first rank, with None on others. It may speak to all ranks.
        channel: The channel of the ranks that write.

    Raises:
        SnapshotError: `directory` exists.
        StoreError: The records are none of their bucket, or the disk failed.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    with contextlib.ExitStack() as stack:
        with channel.together():
            if channel.first:
                if directory.exists():
                    raise SnapshotError(f"{directory} exists; a snapshot is never overwritten")
                stack.callback(shutil.rmtree, partial, ignore_errors=True)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        mine: list[dict[str, Any]] = []
        with channel.together():
            for table, bucket, records in buckets:
                file = _store.write_bucket_file(str(partial), table, bucket, info.version, records)
                mine.append({field: getattr(file, field) for field in _BUCKET_FIELDS})
        order = {table.name: t for t, table in enumerate(tables)}
        files = [file for said in channel.gather(mine, "files") for file in said]
        files.sort(key=lambda file: (order.get(file["table"], 0), file["bucket"]))
        text: str | None = None
        with channel.together():
            if channel.first:
                text = _write_rest(partial, info, tables, files, dense)
        before(text)
        with channel.together():
            if channel.first:
                partial.rename(directory)
                sync_folder(directory.parent)


def _write_rest(
    partial: Path,
    info: SnapshotInfo,
    tables: Sequence[_store.TableConfig],
    buckets: Sequence[Mapping[str, Any]],
    dense: DensePart | None,
) -> str:
    """Write all other files of a snapshot; return the text of its manifest."""
    manifest = {
        "format_version": _store.FORMAT_VERSION,
        "hash_name": _store.HASH_NAME,
        "hash_seed": _store.HASH_SEED,
        "model": info.model,
        "lineage": info.lineage,
        "version": info.version,
        "watermark_ms": info.watermark_ms,
        **({"committed_ms": info.committed_ms} if info.committed_ms else {}),
        "schema_id": schema_id(info, tables),
        "dense_features": info.dense_features,
        "tables": [_table_json(table) for table in tables],
        "features": [_feature_json(each) | _made_json(each) for each in info.features],
        **({"sequences": info.sequences} if info.sequences else {}),
        **({"dense_names": list(info.dense_names)} if _names_dense(info) else {}),
        **_former_json(info),
        **({"heads": list(info.heads)} if info.heads else {}),
        **({"context": list(info.context)} if info.context else {}),
        "buckets": list(buckets),
        "dense": _write_dense(partial, dense, info) if dense else [],
        "dense_id": dense.id if dense else "",
        "dense_cpu": dense.cpu if dense else "",
    }
    # Parsed and printed by the store's library: what it cannot read is never written.
    text = _store.check_manifest(json.dumps(manifest))
    write_synced(partial / MANIFEST, text.encode())
    return text


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return a snapshot's manifest, proved by the store's library.

    Raises:
        SnapshotError: There is none.
        StoreError: It is not what it should be.
    """
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SnapshotError(f"{directory} holds no snapshot: {MANIFEST} is missing") from None
    manifest: dict[str, Any] = json.loads(_store.check_manifest(text))
    return manifest


def read_former(directory: Path) -> tuple[Layout, ...]:
    """Return the former layouts that a snapshot's manifest lists, newest first.

    Raises:
        SnapshotError: There is no snapshot.
        StoreError: Its manifest is not what it should be.
    """
    return tuple(
        Layout(keys=tuple(each["keys"]), dense=tuple(each["dense"]))
        for each in read_manifest(directory).get("former", [])
    )


def manifest_tables(manifest: Mapping[str, Any]) -> dict[int, _store.TableConfig]:
    """Return a manifest's tables by id."""
    tables = {}
    for fields in manifest["tables"]:
        chunk_dim = fields["dim"] // fields["chunks"]
        layout = _store.RowLayout(
            dtype=fields["dtype"], chunks=fields["chunks"], chunk_dim=chunk_dim
        )
        names = ("name", "id", "bucket_bits", "init_seed", "init_scale", "default_row")
        tables[fields["id"]] = _store.TableConfig(
            layout=layout, **{name: fields[name] for name in names}
        )
    return tables


def _read_dense(directory: Path, role: str) -> bytes | None:
    """Return the dense file of a role, as its manifest says it is; None: there is none."""
    for part in read_manifest(directory)["dense"]:
        if part["role"] == role:
            path = directory / part["path"]
            data = path.read_bytes() if path.is_file() else b""
            if (len(data), _store.crc32c(data)) != (part["bytes"], part["crc32c"]):
                raise SnapshotError(f"{path} is not what {MANIFEST} says of it")
            return data
    return None


def read_transforms(directory: Path) -> _store.Transforms | None:
    """Return what a snapshot's net wants done to DENSE; None: nothing.

    Raises:
        SnapshotError: There is no snapshot, or the file is not what its manifest says.
        StoreError: Its contents are no transforms.
    """
    data = _read_dense(directory, "transforms")
    return None if data is None else _store.Transforms(data)


def read_columns(directory: Path) -> RequestColumns:
    """Return the columns that clients make; none of a snapshot that an older build wrote.

    Raises:
        SnapshotError: There is no snapshot, or the file is not what its manifest says.
    """
    data = _read_dense(directory, "config")
    return RequestColumns() if data is None else from_text(data)
