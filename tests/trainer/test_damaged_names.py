"""Names of files that come from object storage: what no file of ours can have is damaged."""

import json
import struct
from pathlib import Path

import pytest

from embertide import _store
from embertide.trainer.publish.download import fetch_delta, inside
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.storage import DamagedError, Storage
from embertide.trainer.run.checkpoint.restoring import _fetch_checkpoint
from embertide.v1 import update_pb2

VERSION = VersionId(7, 1)
BAD = (
    *("", "/etc/passwd", "../x", "a/../../x", ".hidden", "a/.hidden", "a\0b", "a\nb", "a\rb"),
    *("x" * 300, "é" * 150, "/".join(["d"] * 600), "\x1b[2J", "\u202eabc", "\ud800"),
)


@pytest.mark.parametrize("name", BAD)
def test_such_a_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(DamagedError, match="is no name of a file of a publication") as caught:
        inside(["p-00.delta", name])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def test_a_file_is_no_folder_of_another() -> None:
    with pytest.raises(DamagedError):
        inside(["a", "a/b"])
    inside(["p-00.delta", "dense.safetensors", "buckets/table-1/00001.emb", "a/b", "a/c"])


def commit(name: str) -> bytes:
    file = update_pb2.CommitFile()
    file.commit.version.number, file.commit.version.lineage = VERSION
    file.partitions.add(partition=0, delta_path=name, delta_bytes=1)
    message = file.SerializeToString()
    return b"EMCMT001" + struct.pack("<II", len(message), _store.crc32c(message)) + message


@pytest.mark.parametrize("name", [each for each in BAD if each.isascii()])
def test_a_version_with_such_a_name_is_damaged(tmp_path: Path, name: str) -> None:
    storage = Storage(f"file://{tmp_path}/bucket")
    storage.put_bytes(f"deltas/{VERSION.folder}/commit.pb", commit(name))
    with pytest.raises(DamagedError):
        fetch_delta(storage, Publication(tmp_path / "pub"), VERSION)
    assert not any((tmp_path / "pub").rglob("*.delta"))


@pytest.mark.parametrize("name", BAD[1:])
def test_a_checkpoint_with_such_a_name_is_damaged(tmp_path: Path, name: str) -> None:
    storage = Storage(f"file://{tmp_path}/bucket")
    files = [{"path": name, "bytes": 1, "sha256": "0"}]
    body = json.dumps({"checkpoint": {"files": files, "buckets": []}})
    storage.put_bytes(f"checkpoints/{VERSION.folder}/checkpoint.json", body.encode())
    with pytest.raises(DamagedError):
        _fetch_checkpoint(storage, Publication(tmp_path / "pub"), VERSION)
