"""Snapshots, compared byte for byte."""

import json
from pathlib import Path

from embertide.trainer.publish.snapshot import read_manifest


def snapshot_files(snapshot: Path) -> dict[str, bytes]:
    """Every file; of the manifest all but the lineage, which names the run."""
    manifest = {k: v for k, v in read_manifest(snapshot).items() if k != "lineage"}
    paths = [path for path in snapshot.rglob("*") if path.is_file()]
    found = {str(path.relative_to(snapshot)): path.read_bytes() for path in paths}
    return {**found, "manifest.json": json.dumps(manifest).encode()}
