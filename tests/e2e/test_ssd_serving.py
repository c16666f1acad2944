"""Rows that do not fit DDR are served from the SSD tier by a real tritonserver, bit for bit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
from numpy.typing import NDArray
from serving import metric, wait_until

from embertide import _store
from embertide.server.adapters import process, triton

ROWS = 40_000
DIM = 16
SOURCE_DDR, SOURCE_SSD = 1, 2
LAYOUT = _store.RowLayout(chunks=4, chunk_dim=4)
TABLE = _store.TableConfig(name="item", id=1, layout=LAYOUT, bucket_bits=1)


def row(key: int) -> NDArray[np.float32]:
    return np.arange(key, key + DIM, dtype=np.float32)


def write_buckets(directory: Path) -> list[_store.BucketFileInfo]:
    records: list[list[bytes]] = [[], []]
    for key in range(ROWS):
        payload = _store.encode_payload(LAYOUT, 15, row(key))
        records[_store.hash_key(key) >> 63].append(_store.encode_record(key, 15, 0, payload))
    return [
        _store.write_bucket_file(str(directory), TABLE, bucket, 1, b"".join(records[bucket]))
        for bucket in range(2)
    ]


def counted(server: triton.TritonServer, name: str, **labels: str) -> float:
    return metric(server.metrics(), name, model="large", **labels)


def test_rows_beyond_the_ddr_budget_come_from_the_ssd(
    server_options: triton.ServerOptions,
    tmp_path: Path,
    one_table_manifest: Callable[..., None],
) -> None:
    (tmp_path / "snapshot").mkdir()
    one_table_manifest(tmp_path / "snapshot", TABLE, write_buckets(tmp_path / "snapshot"))
    repository = tmp_path / "models"
    repository.mkdir()
    model = triton.ModelOptions(
        snapshot=tmp_path / "snapshot",
        devices=2,
        ddr_budget_bytes=3 << 20,
        ssd_budget_bytes=32 << 20,
        ssd_directory=tmp_path / "ssd",
    )
    triton.write_model(repository, "large", model)
    ports = process.free_ports(3)
    options = dataclasses.replace(
        server_options,
        repository=repository,
        log=tmp_path / "log",
        models=("large",),
        http_port=ports[0],
        grpc_port=ports[1],
        metrics_port=ports[2],
    )
    rng = np.random.default_rng(3)
    asked = ssd = 0
    with triton.TritonServer(options) as server:
        client = grpcclient.InferenceServerClient(server.grpc)
        for _ in range(40):
            keys = rng.integers(0, ROWS, size=(64, 1), dtype=np.int64)
            tensor = grpcclient.InferInput("KEYS", [64, 1], "INT64")
            tensor.set_data_from_numpy(keys)
            wanted = [grpcclient.InferRequestedOutput(name) for name in ("EMBEDDING", "SOURCE")]
            answer = client.infer("large", [tensor], outputs=wanted)
            expected = np.stack([row(int(key)) for key in keys[:, 0]])
            assert answer.as_numpy("EMBEDDING").tobytes() == expected.tobytes()
            source = answer.as_numpy("SOURCE")
            assert set(source.flatten()) <= {SOURCE_DDR, SOURCE_SSD}
            asked += source.size
            ssd += int((source == SOURCE_SSD).sum())
        assert ssd >= 0.03 * asked
        wait_until(lambda: counted(server, "embertide_lookup_keys_total", source="ssd") == ssd)
        moved = "embertide_rows_moved_total"
        assert counted(server, moved, direction="evicted") > 0
        assert counted(server, moved, direction="promoted") > 0
        assert counted(server, "embertide_rows_refused_total") == 0
        client.close()
