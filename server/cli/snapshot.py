"""`snapshot`: what a snapshot holds, and the proof that every byte of it is right."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.progress
import rich.table
import typer

from embertide import _store
from embertide.server.adapters.process import ProcessError
from embertide.server.cli.refusals import Json, print_json, refusals


def newest_snapshot(path: Path) -> Path:
    """Return the snapshot at `path`: itself, or the newest of a publication.

    Raises:
        ProcessError: There is none.
    """
    if (path / "manifest.json").is_file():
        return path
    found = sorted(path.glob("snapshots/*/manifest.json"))
    if not found:
        raise ProcessError(
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


def _verify(path: Path, manifest: dict[str, Any]) -> None:
    """Read every file of a snapshot.

    Raises:
        StoreError: A file is not what the manifest says.
    """
    tables = {fields["name"]: config_of(fields) for fields in manifest["tables"]}
    bar = rich.progress.track(
        manifest["buckets"],
        description="proving",
        console=rich.console.Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    for fields in bar:
        info = _store.BucketFileInfo(**fields)
        _store.read_bucket_file(str(path), tables[info.table], info)
    for part in manifest["dense"]:
        try:
            data = (path / part["path"]).read_bytes()
        except OSError as error:
            raise ProcessError(f"{path / part['path']}: {error.strerror}") from error
        if len(data) != part["bytes"] or _store.crc32c(data) != part["crc32c"]:
            raise ProcessError(f"{path / part['path']} fails its checksum")


def command(
    path: Annotated[Path, typer.Argument(help="A snapshot, or a publication (its newest).")],
    verify: Annotated[bool, typer.Option(help="Read every file and prove it.")] = True,
    as_json: Json = False,
) -> None:
    """Describe a snapshot and prove its files against their checksums."""
    with refusals(as_json):
        path = newest_snapshot(path)
        manifest = json.loads(_store.check_manifest((path / "manifest.json").read_text()))
        if verify:
            _verify(path, manifest)
    rows = {
        table["name"]: sum(b["rows"] for b in manifest["buckets"] if b["table"] == table["name"])
        for table in manifest["tables"]
    }
    if as_json:
        print_json({"path": str(path), "verified": verify, "rows": rows, **manifest})
        return
    dense = f"dense net {manifest['dense_id']} for {manifest['dense_cpu']}"
    typer.echo(
        f"{path}: model {manifest['model']!r}, version {manifest['version']} of lineage "
        f"{manifest['lineage']}, {dense if manifest['dense'] else 'no dense net'}"
        f"{', every file proved' if verify else ''}"
    )
    table = rich.table.Table("table", "rows", "dim", "chunks", "dtype", "buckets", "features")
    for fields in manifest["tables"]:
        features = [f["name"] for f in manifest["features"] if f["table"] == fields["name"]]
        table.add_row(
            fields["name"],
            f"{rows[fields['name']]:,}",
            *(str(fields[name]) for name in ("dim", "chunks", "dtype")),
            str(1 << fields["bucket_bits"]),
            ", ".join(features),
        )
    rich.console.Console().print(table)
