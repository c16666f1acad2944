"""`snapshot`: what a snapshot holds, the proof that every byte of it is right, and two compared."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import rich.progress
import safetensors
import typer

from embertide import _store
from embertide._common.reporting import report_errors, system_error
from embertide._common.terminal import Table, print_json, progress_bar, say, show_table
from embertide.server.adapters.process import ProcessError, UsageError
from embertide.server.cli.common_options import Json

app = typer.Typer(
    help="Snapshots: what they hold, whether every byte is right, how two differ. "
    "Example: embertide snapshot show build/news.",
    rich_markup_mode="markdown",
    no_args_is_help=True,
)
Snapshot = Annotated[Path, typer.Argument(help="A snapshot, or a publication (its newest).")]
# Fields of a manifest that say what rows and net mean; others name the version or list files.
_SCHEMA = ("model", "features", "dense_features", "dense_cpu")


def newest_snapshot(path: Path) -> Path:
    """Return the snapshot at `path`: itself, or the newest of a publication.

    Raises:
        ProcessError: There is none.
    """
    if (path / "manifest.json").is_file():
        return path
    found = sorted(path.glob("snapshots/*/manifest.json"))
    if not found:
        raise UsageError(
            f"{path} holds no snapshot: give the folder that `embertide import` or `embertide "
            "train` wrote"
        )
    return found[-1].parent


def config_of(fields: dict[str, Any]) -> _store.TableConfig:
    """Return a table as the manifest describes it."""
    layout = _store.RowLayout(
        dtype=fields["dtype"],
        chunks=fields["chunks"],
        chunk_dim=fields["dim"] // fields["chunks"],
    )
    return _store.TableConfig(
        name=fields["name"],
        id=fields["id"],
        layout=layout,
        bucket_bits=fields["bucket_bits"],
        init_seed=fields["init_seed"],
        init_scale=fields["init_scale"],
        default_row=fields["default_row"],
    )


class Files:
    """A snapshot's files, each proved as it is read.

    Attributes:
        path: The snapshot's folder.
        manifest: As the store's library reads it.
        tables: By name.
    """

    def __init__(self, path: Path) -> None:
        """Read the manifest.

        Raises:
            ProcessError: There is no snapshot, or its manifest is no text.
            StoreError: Its manifest is not what it should be.
        """
        self.path = newest_snapshot(path)
        try:
            text = (self.path / "manifest.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProcessError(
                f"{self.path}/manifest.json cannot be read: {error}; bring it back from a copy"
            ) from error
        self.manifest: dict[str, Any] = json.loads(_store.check_manifest(text))
        self.tables = {fields["name"]: config_of(fields) for fields in self.manifest["tables"]}
        self.buckets = {(b["table"], b["bucket"]): b for b in self.manifest["buckets"]}

    def records(self, table: str, bucket: int) -> bytes:
        """Return the records of a bucket, each row parsed; none if the snapshot lacks the bucket.

        Raises:
            StoreError: The file is not what the manifest says.
        """
        fields = self.buckets.get((table, bucket))
        if fields is None:
            return b""
        info = _store.BucketFileInfo(**fields)
        return _store.read_bucket_file(str(self.path), self.tables[table], info)

    def dense(self, part: Mapping[str, Any]) -> bytes:
        """Return the bytes of a file of the dense net.

        Raises:
            ProcessError: It is not what the manifest says.
        """
        path = self.path / part["path"]
        try:
            data: bytes = path.read_bytes()
        except OSError as error:
            raise ProcessError(system_error(error)) from error
        for field, found in (("bytes", len(data)), ("crc32c", _store.crc32c(data))):
            if found != part[field]:
                raise ProcessError(
                    f"{path}: {field} is {found}, the manifest says {part[field]}: bring it back "
                    "from a copy"
                )
        return data

    def dense_columns(self) -> list[dict[str, Any]]:
        """Return the columns of DENSE, each with what is done to it; none without transforms.

        Raises:
            ProcessError: The file is not what the manifest says.
            StoreError: It holds no transforms.
        """
        for part in self.manifest["dense"]:
            if part["role"] == "transforms":
                text = _store.Transforms(self.dense(part)).text
                columns: list[dict[str, Any]] = json.loads(text)["columns"]
                return columns
        return []

    def described(self, table: str) -> dict[str, Any] | None:
        """Return a table as the manifest has it; None: it has none of this name."""
        return next((each for each in self.manifest["tables"] if each["name"] == table), None)

    def size(self, table: str) -> tuple[int, int]:
        """Return (rows, bytes of bucket files) of a table, as the manifest has them."""
        mine = [each for each in self.manifest["buckets"] if each["table"] == table]
        return sum(each["rows"] for each in mine), sum(each["bytes"] for each in mine)

    def version(self) -> dict[str, Any]:
        """Return what names it."""
        names = ("model", "version", "lineage", "watermark_ms", "dense_id", "dense_cpu")
        return {"path": str(self.path), **{name: self.manifest[name] for name in names}}


@dataclasses.dataclass(slots=True)
class TableSummary:
    """The contents of a table.

    Attributes:
        rows: Their number.
        bytes: Size of its bucket files.
        buckets: With a file.
        live_chunks: The number of rows with 0, 1, ... live chunks.
    """

    rows: int
    bytes: int
    buckets: int
    live_chunks: list[int]


@dataclasses.dataclass(slots=True)
class TableDiff:
    """How a table's rows differ.

    Attributes:
        table: Its name.
        layout: Whether dim, chunks, dtype, buckets or initial values differ: then rows cannot be
            compared, and all of them count as removed and added.
        added: Rows that the second alone has.
        removed: Rows that the first alone has.
        changed: Rows whose live chunks or values differ.
        bytes: Size of the second's bucket files, less that of the first's.
    """

    table: str
    layout: bool = False
    added: int = 0
    removed: int = 0
    changed: int = 0
    bytes: int = 0


def _track(what: str, each: Iterable[Any], total: int) -> Iterator[Any]:
    bar = progress_bar(*rich.progress.Progress.get_default_columns())
    with bar:
        yield from bar.track(each, total=total, description=what)


def _faults(files: Files) -> Iterator[str]:
    """Read every file and say what is wrong with each that is not as the manifest says."""
    for table, bucket in _track("proving", files.buckets, len(files.buckets)):
        try:
            files.records(table, bucket)
        except _store.StoreError as error:
            yield str(error)
    for part in files.manifest["dense"]:
        try:
            files.dense(part)
            if part["role"] == "transforms":
                files.dense_columns()
        except (ProcessError, _store.StoreError) as error:
            yield str(error)
    if len(files.buckets) != len(files.manifest["buckets"]):
        yield f"{files.path}/manifest.json: buckets names a bucket twice"


@app.command("verify")
def verify(path: Snapshot, as_json: Json = False) -> None:
    """Read every file of a snapshot: every checksum, every row, every count.

    Exit status 0: every byte is what was written; 1: each file that is not is named.
    """
    with report_errors(as_json):
        files = Files(path)
        faults = list(_faults(files))
    counts = {
        "files": len(files.manifest["buckets"]) + len(files.manifest["dense"]),
        "rows": sum(b["rows"] for b in files.manifest["buckets"]),
        "bytes": sum(
            each["bytes"] for name in ("buckets", "dense") for each in files.manifest[name]
        ),
    }
    if as_json:
        print_json({**files.version(), **counts, "valid": not faults, "faults": faults})
    else:
        for fault in faults:
            say(f"error: {fault}", err=True)
        said = f"{len(faults)} of them not what was written" if faults else "every one proved"
        say(
            f"{files.path}: {counts['files']:,} files, {counts['rows']:,} rows, "
            f"{counts['bytes']:,} bytes, {said}"
        )
    if faults:
        raise typer.Exit(1)


def _summaries(files: Files) -> dict[str, TableSummary]:
    """Read every row.

    Raises:
        StoreError: A file is not what the manifest says.
    """
    found = {
        name: TableSummary(rows=0, bytes=0, buckets=0, live_chunks=[0] * (table.layout.chunks + 1))
        for name, table in files.tables.items()
    }
    for (name, bucket), fields in _track("reading", files.buckets.items(), len(files.buckets)):
        live = _store.count_live(files.tables[name].layout, files.records(name, bucket))
        each = found[name]
        each.rows += fields["rows"]
        each.bytes += fields["bytes"]
        each.buckets += 1
        each.live_chunks = [one + more for one, more in zip(each.live_chunks, live, strict=True)]
    return found


def _said(column: Mapping[str, Any]) -> str:
    """Return a column of DENSE and what is done to it, in a few words."""
    steps = [step["kind"] for step in column["steps"]] + ["missing"] * column["missing"]
    return f"{column['name']} ({', '.join(steps)})" if steps else column["name"]


@app.command("show")
def show(path: Snapshot, as_json: Json = False) -> None:
    """Show what a snapshot holds: version, dense columns, tables, rows, rows by live chunks."""
    with report_errors(as_json):
        files = Files(path)
        tables, columns = _summaries(files), files.dense_columns()
    if as_json:
        held = {name: dataclasses.asdict(each) for name, each in tables.items()}
        features = files.manifest["features"]
        print_json({**files.version(), "tables": held, "features": features, "dense": columns})
        return
    manifest = files.manifest
    dense = f"dense net {manifest['dense_id']} for {manifest['dense_cpu']}"
    say(
        f"{files.path}: model {manifest['model']!r}, version {manifest['version']} of lineage "
        f"{manifest['lineage']}, watermark {manifest['watermark_ms']} ms, "
        f"{dense if manifest['dense'] else 'no dense net'}"
    )
    if columns:
        say(f"DENSE: {', '.join(map(_said, columns))}")
    view = Table(
        "table", "rows", "bytes", "dim", "chunks", "rows by live chunks", "dtype", "buckets",
        "features",
    )  # fmt: skip
    for fields in manifest["tables"]:
        each = tables[fields["name"]]
        named = [f["name"] for f in manifest["features"] if f["table"] == fields["name"]]
        live = (f"{n}: {rows:,}" for n, rows in enumerate(each.live_chunks) if rows)
        view.add_row(
            fields["name"],
            f"{each.rows:,}",
            f"{each.bytes:,}",
            str(fields["dim"]),
            str(fields["chunks"]),
            ", ".join(live),
            fields["dtype"],
            str(1 << fields["bucket_bits"]),
            ", ".join(named),
        )
    show_table(view)


def _diff_table(name: str, before: Files, after: Files) -> TableDiff:
    """Compare the rows of a table that one of the two has at least."""
    (rows, size), (new_rows, new_size) = before.size(name), after.size(name)
    found = TableDiff(name, bytes=new_size - size)
    if before.described(name) != after.described(name):
        found.layout, found.added, found.removed = True, new_rows, rows
        return found
    table = after.tables[name]
    for bucket in range(1 << table.bucket_bits):
        old, new = before.records(name, bucket), after.records(name, bucket)
        added, removed, changed = _store.diff_records(table.layout, old, new)
        found.added += added
        found.removed += removed
        found.changed += changed
    return found


def _tensors(files: Files) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return (dtype, shape, bytes) of each dense tensor; the program is one of them, by its bytes.

    Raises:
        ProcessError: A file is not what the manifest says.
    """
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for part in files.manifest["dense"]:
        data = files.dense(part)
        if part["role"] == "tensors":
            for name, tensor in safetensors.deserialize(data):  # type: ignore[no-untyped-call]
                found[name] = (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        else:
            found[f"({part['role']})"] = ("", (), data)
    return found


@app.command("diff")
def diff(
    before: Annotated[Path, typer.Argument(help="A snapshot, or a publication (its newest).")],
    after: Snapshot,
    as_json: Json = False,
) -> None:
    """Show how two snapshots differ: schema, rows by table, bytes, dense tensors.

    Version, lineage and watermark are shown and make no difference. Exit status 0: they hold the
    same; 1: they differ.

    Example: embertide snapshot diff build/a build/b
    """
    with report_errors(as_json):
        one, other = Files(before), Files(after)
        names = list({**one.tables, **other.tables})
        tables = [_diff_table(name, one, other) for name in _track("comparing", names, len(names))]
        dense_one, dense_other = _tensors(one), _tensors(other)
    tensors = [
        name
        for name in {**dense_one, **dense_other}
        if dense_one.get(name) != dense_other.get(name)
    ]
    schema = [name for name in _SCHEMA if one.manifest[name] != other.manifest[name]]
    unlike = [t for t in tables if t.layout or t.added or t.removed or t.changed]
    equal = not (schema or tensors or unlike)
    if as_json:
        print_json(
            {
                "before": one.version(),
                "after": other.version(),
                "equal": equal,
                "schema": schema,
                "tables": [dataclasses.asdict(each) for each in tables],
                "tensors": tensors,
            }
        )
    else:
        for said in (one.version(), other.version()):
            say("{path}: version {version} of lineage {lineage}".format(**said))
        for name in schema:
            say(f"{name}: {one.manifest[name]!r} -> {other.manifest[name]!r}")
        view = Table("table", "added", "removed", "changed", "bytes")
        for each in unlike:
            note = " (described otherwise)" if each.layout else ""
            counts = (f"{n:,}" for n in (each.added, each.removed, each.changed))
            view.add_row(each.table + note, *counts, f"{each.bytes:+,}")
        if unlike:
            show_table(view)
        if tensors:
            say(f"dense tensors that differ: {', '.join(tensors)}")
        say("they hold the same" if equal else "they differ")
    if not equal:
        raise typer.Exit(1)
