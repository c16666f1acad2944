"""What two snapshots must share to be the same model."""

import json
from pathlib import Path


def files(snapshot: Path) -> dict[str, bytes]:
    """Every file of a snapshot; the lineage, which names the run, is left out of the manifest."""
    found = {
        str(path.relative_to(snapshot)): path.read_bytes()
        for path in snapshot.rglob("*")
        if path.is_file()
    }
    manifest = json.loads(found["manifest.json"])
    del manifest["lineage"]
    return {**found, "manifest.json": json.dumps(manifest).encode()}
