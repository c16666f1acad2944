"""Rows that do not fit DDR are served from the SSD tier by a real tritonserver, bit for bit."""

import os
import queue
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.utils
from numpy.typing import NDArray
from serving import beside, metric
from waiting import wait_until

from embertide import _store
from embertide.server.adapters import triton

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


def write_model(directory: Path, manifest: Callable[..., None]) -> triton.ModelOptions:
    snapshot = directory / "snapshot"
    snapshot.mkdir()
    manifest(snapshot, TABLE, write_buckets(snapshot))
    return triton.ModelOptions(
        snapshot=snapshot,
        devices=2,
        ddr_budget_bytes=3 << 20,
        ssd_budget_bytes=32 << 20,
        ssd_directory=directory / "ssd",
        ddr_policy="lru:2",
    )


def counted(server: triton.TritonServer, name: str, **labels: str) -> float:
    return metric(server.metrics(), name, model="large", **labels)


def start(
    server_options: triton.ServerOptions, directory: Path, model: triton.ModelOptions
) -> triton.TritonServer:
    repository = directory / "models"
    repository.mkdir()
    triton.write_model(repository, "large", model)
    options = beside(server_options, repository, directory / "log", ("large",))
    return triton.TritonServer(options)


def keys_input(keys: NDArray[np.int64]) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput("KEYS", list(keys.shape), "INT64")
    tensor.set_data_from_numpy(keys)
    return tensor


def test_rows_beyond_the_ddr_budget_come_from_the_ssd(
    server_options: triton.ServerOptions,
    tmp_path: Path,
    one_table_manifest: Callable[..., None],
) -> None:
    numa = [str(node) for node in _store.numa_nodes()[:1]]
    model = write_model(tmp_path, one_table_manifest)
    model = model.replace(numa_nodes=",".join(numa) or "none")
    rng = np.random.default_rng(3)
    asked = ssd = 0
    with start(server_options, tmp_path, model) as server:
        client = grpcclient.InferenceServerClient(server.grpc)
        for _ in range(40):
            keys = rng.integers(0, ROWS, size=(64, 1), dtype=np.int64)
            wanted = [grpcclient.InferRequestedOutput(name) for name in ("EMBEDDING", "SOURCE")]
            answer = client.infer("large", [keys_input(keys)], outputs=wanted)
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
        # lru:2 lets a row in at its second read of late.
        assert counted(server, "embertide_promotions_refused_total") > 0
        assert counted(server, "embertide_policy_bytes") > 0
        wait_until(lambda: counted(server, "embertide_table_rows") == ROWS)  # none on its way
        for tier in ("ddr", "ssd"):
            assert counted(server, "embertide_table_rows", tier=tier) > 0
            assert counted(server, "embertide_table_bytes", tier=tier) > 0
        assert counted(server, "embertide_accesses_dropped_total", tier="ddr") == 0
        assert counted(server, "embertide_rows_refused_total") == 0
        assert counted(server, "embertide_reader_waits_given_up_total") == 0
        for device in "01" * len(numa):
            assert counted(server, "embertide_numa_node", device=device, node=numa[0]) == 1
        engine, direct, _ = _store.probe_ssd(str(tmp_path))
        labels = {"engine": engine, "direct": "true" if direct else "false"}
        assert counted(server, "embertide_ssd_engine", **labels) == 1
        size, free = (counted(server, f"embertide_drive_{of}") for of in ("bytes", "free_bytes"))
        assert 0 < free < size
        rows = counted(server, "embertide_ssd_bytes_total", kind="rows")
        assert 0 < rows < counted(server, "embertide_ssd_bytes_total", kind="written")
        assert counted(server, "embertide_ssd_bytes_total", kind="read") >= 4096
        client.close()


def spoil(path: Path, block: int) -> None:
    with path.open("r+b") as log:
        log.seek(block * 4096 + 100)
        byte = log.read(1)[0]
        log.seek(block * 4096 + 100)
        log.write(bytes([byte ^ 16]))
        log.flush()
        os.fsync(log.fileno())


def test_a_bad_block_fails_the_requests_for_its_rows_alone_and_is_mended(
    server_options: triton.ServerOptions,
    tmp_path: Path,
    one_table_manifest: Callable[..., None],
) -> None:
    model = write_model(tmp_path, one_table_manifest).replace(devices=1, max_queue_delay_us=500_000)
    with start(server_options, tmp_path, model) as server:
        log = tmp_path / "ssd" / "device-0.log"
        # Nothing to mend by, for the time being.
        (tmp_path / "snapshot").rename(tmp_path / "away")
        spoil(log, block=3)
        client = grpcclient.InferenceServerClient(server.grpc)
        answers: queue.Queue[tuple[int, grpcclient.InferResult | None, str]] = queue.Queue()

        def ask(number: int, keys: NDArray[np.int64]) -> None:
            def done(
                result: grpcclient.InferResult | None,
                error: tritonclient.utils.InferenceServerException | None,
            ) -> None:
                answers.put((number, result, str(error) if error else ""))

            client.async_infer("large", [keys_input(keys)], done)

        # Some of the rows that left memory first lie in that block.
        for first in range(0, ROWS, 500):
            ask(first, np.arange(first, first + 500, dtype=np.int64)[:, None])
        said = {number: error for number, _, error in (answers.get() for _ in range(0, ROWS, 500))}
        failed = [number for number, error in said.items() if error]
        assert 0 < len(failed) < ROWS // 500
        assert all("SSD block 3 fails its checksum" in said[number] for number in failed)

        def counted_by_triton() -> tuple[int, int]:
            """Return the requests and batches that it counted, which it does after it answers."""
            stats = client.get_inference_statistics("large").model_stats[0]
            of_requests = stats.inference_stats
            return of_requests.success.count + of_requests.fail.count, stats.execution_count

        asked = ROWS // 500
        wait_until(lambda: counted_by_triton()[0] == asked)
        _, before = counted_by_triton()
        bad = np.arange(failed[0], failed[0] + 500, dtype=np.int64)[:, None]
        good = np.arange(min(set(said) - set(failed)), ROWS, dtype=np.int64)[:500, None]
        ask(0, bad)
        ask(1, good)
        both = {number: (result, error) for number, result, error in (answers.get(), answers.get())}
        wait_until(lambda: counted_by_triton()[0] == asked + 2 and counted_by_triton()[1] > before)
        assert counted_by_triton()[1] == before + 1
        assert "SSD block 3 " in both[0][1]
        result, error = both[1]
        assert result is not None, error
        expected = np.stack([row(int(key)) for key in good[:, 0]])
        assert result.as_numpy("EMBEDDING").tobytes() == expected.tobytes()
        wait_until(
            lambda: counted(server, "embertide_ssd_errors_total", kind="corrupt") > len(failed)
        )
        assert counted(server, "embertide_ssd_errors_total", kind="read") == 0

        mending = "embertide_ssd_mending_total"
        wait_until(lambda: counted(server, mending, event="failed") > 0)
        assert counted(server, mending, event="bad_block") == 1
        assert counted(server, mending, event="mended_row") == 0
        (tmp_path / "away").rename(tmp_path / "snapshot")
        wait_until(lambda: counted(server, mending, event="mended_row") > 0)
        for number in failed:
            keys = np.arange(number, number + 500, dtype=np.int64)[:, None]
            expected = np.stack([row(int(key)) for key in keys[:, 0]])
            answer = client.infer("large", [keys_input(keys)])
            assert answer.as_numpy("EMBEDDING").tobytes() == expected.tobytes()
        client.close()
    said_once = f"byte {3 * 4096} of {log} is not what was written"
    assert (tmp_path / "log").read_text().count(said_once) == 1


def test_a_node_that_starts_again_has_the_rows_that_it_was_asked_for_in_ddr(
    server_options: triton.ServerOptions,
    tmp_path: Path,
    one_table_manifest: Callable[..., None],
) -> None:
    model = write_model(tmp_path, one_table_manifest).replace(
        ddr_policy="clock",
        ssd_seal_interval_ms=0,
        warm_up_bytes=1 << 20,
        warm_up_file=tmp_path / "warm_up.keys",
    )
    asked = np.arange(0, ROWS, 40, dtype=np.int64).reshape(-1, 50, 1)
    from_ssd = []
    for start_number in range(2):
        folder = tmp_path / str(start_number)
        folder.mkdir()
        with start(server_options, folder, model) as server:
            client = grpcclient.InferenceServerClient(server.grpc)
            wanted = [grpcclient.InferRequestedOutput(name) for name in ("EMBEDDING", "SOURCE")]
            from_ssd.append(0)
            for n in range(64):  # one of sixteen is taken
                for keys in asked:
                    answer = client.infer("large", [keys_input(keys)], outputs=wanted)
                    if n == 0:
                        from_ssd[-1] += int((answer.as_numpy("SOURCE") == SOURCE_SSD).sum())
            looked_up = counted(server, "embertide_warm_up", what="lookups")
            assert (looked_up > 0) == (start_number == 1)
            assert counted(server, "embertide_warm_up", what="failed_files") == 0
    assert from_ssd[0] > asked.size / 10
    assert from_ssd[1] <= asked.size / 10
