"""Snapshots, compared byte for byte."""

import json
from pathlib import Path

from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot import read_manifest


def snapshot_files(snapshot: Path) -> dict[str, bytes]:
    """Return every file of a snapshot; of the manifest all but what names the run and its time."""
    of_run = ("lineage", "committed_ms")
    manifest = {k: v for k, v in read_manifest(snapshot).items() if k not in of_run}
    paths = [path for path in snapshot.rglob("*") if path.is_file()]
    files = {str(path.relative_to(snapshot)): path.read_bytes() for path in paths}
    return {**files, "manifest.json": json.dumps(manifest).encode()}


def newest_files(publication: Publication) -> dict[str, bytes]:
    """Return what `snapshot_files` does of the newest snapshot."""
    return snapshot_files(publication.snapshot_path(publication.snapshots()[-1]))
