"""`lookup` in a real tritonserver: right answers, and errors that cost nobody else anything."""

import concurrent.futures
import dataclasses
import json
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tritonclient.grpc
from numpy.typing import NDArray
from serving import (
    FRONTS,
    Client,
    Samples,
    beside,
    change_manifest,
    flip_byte,
    jagged_arrays,
    metric,
    parameters,
)
from tritonclient.utils import InferenceServerException
from waiting import wait_until

from embertide.server.adapters import process, triton
from embertide.server.cli.metrics_page import MetricsPage
from embertide.trainer.publish.folder import Publication, VersionId

SOURCE_HBM, SOURCE_DDR = 0, 1
SOURCE_DEFAULT = 4
UNKNOWN = 987_654_321


def random_samples(seed: int, count: int) -> Samples:
    rng = np.random.default_rng(seed)
    highest = (3000, 60, 3000, 145)  # beyond what is there: some keys are unknown
    return [
        [rng.integers(0, high, rng.integers(0, 4)).tolist() for high in highest]
        for _ in range(count)
    ]


@pytest.fixture
def server(protocol: str, request: pytest.FixtureRequest) -> triton.TritonServer:
    """Ours over gRPC, tritonserver's over HTTP."""
    return cast("triton.TritonServer", request.getfixturevalue(FRONTS[protocol]))


@pytest.fixture
def client(protocol: str, server: triton.TritonServer) -> Iterator[Client]:
    made = Client(protocol, server)
    yield made
    made.raw.close()


@pytest.fixture
def good(client: Client, reference: Any) -> Iterator[None]:
    """After the test, the server still answers and answers right."""
    yield
    keys = [[7, 3, 14, 101]]
    expected = reference.answer([[[key] for key in row] for row in keys])
    assert np.array_equal(client.rectangular(keys).as_numpy("EMBEDDING"), expected)


# --- answers --------------------------------------------------------------------------------------


def test_bags_of_one_are_bit_for_bit_right(client: Client, reference: Any) -> None:
    keys = [[7 * i, i, 7 * (i + 1), 100 + i] for i in range(20)]
    keys.append([-1, 0, -(2**63), 100])
    keys.append([2**63 - 1, 1, 2**40 + 3, 101])
    result = client.rectangular(keys)
    expected = reference.answer([[[key] for key in row] for row in keys])
    assert result.as_numpy("EMBEDDING").tobytes() == expected.tobytes()
    assert (result.as_numpy("SOURCE") == SOURCE_DDR).all()
    assert result.as_numpy("VERSION").tolist() == [[reference.version]] * len(keys)


@pytest.mark.parametrize("model", ["lookup", "lean"])
def test_pooled_bags_are_within_an_ulp(client: Client, reference: Any, model: str) -> None:
    samples = random_samples(1, 20)
    result = client.jagged(samples, model=model)
    answer = result.as_numpy("EMBEDDING")
    assert answer.shape == (1, len(samples) * reference.total_dim)
    expected = reference.answer(samples)
    np.testing.assert_array_max_ulp(answer.reshape(expected.shape), expected, maxulp=1)
    assert result.as_numpy("VERSION").tolist() == [[reference.version]]


def test_an_empty_bag_is_zeros(client: Client, reference: Any) -> None:
    result = client.jagged([[[], [], [], []]])
    assert not result.as_numpy("EMBEDDING").any()
    assert result.as_numpy("SOURCE").shape == (1, 0)


def test_unknown_keys_get_the_default_row_and_are_marked(client: Client, reference: Any) -> None:
    result = client.rectangular([[UNKNOWN, UNKNOWN, 7, 100]])
    expected = reference.answer([[[UNKNOWN], [UNKNOWN], [7], [100]]])
    assert result.as_numpy("EMBEDDING").tobytes() == expected.tobytes()
    expected_sources = [[SOURCE_DEFAULT, SOURCE_DEFAULT, SOURCE_DDR, SOURCE_DDR]]
    assert result.as_numpy("SOURCE").tolist() == expected_sources


def test_hps_names(client: Client, reference: Any) -> None:
    samples = random_samples(2, 5)
    result = client.jagged(samples, "NUMKEYS", model="hps", outputs=["OUTPUT0"])
    expected = reference.answer(samples)
    answer = result.as_numpy("OUTPUT0").reshape(expected.shape)
    np.testing.assert_array_max_ulp(answer, expected, maxulp=1)


def test_outputs_not_asked_for_are_not_sent(client: Client, reference: Any) -> None:
    result = client.rectangular([[7, 3, 14, 101]], outputs=["VERSION"])
    assert result.as_numpy("VERSION").tolist() == [[reference.version]]
    assert result.as_numpy("EMBEDDING") is None


def test_response_parameters(client: Client, reference: Any) -> None:
    values = parameters(client.rectangular([[7, 3, 14, 101]]))
    assert int(values["version"]) == reference.version
    assert int(values["plan_epoch"]) == 1
    assert values["node"] == "node-test"
    # Nobody published this snapshot, so it has no age; what it has learned from is known.
    assert int(values["watermark_ms"]) == reference.watermark_ms
    assert "staleness_ms" not in values


def test_both_forms_and_bad_requests_at_the_same_time(
    server: triton.TritonServer, reference: Any
) -> None:
    """Concurrent requests meet in executions; each gets its own answer or its own error."""

    def run(seed: int) -> None:
        mine = Client("grpc", server)
        for i in range(seed, seed + 40):
            samples = random_samples(i, 1 + i % 5)
            if i % 3 == 0:
                answer = mine.jagged(samples).as_numpy("EMBEDDING")
                expected = reference.answer(samples)
            elif i % 3 == 1:
                keys = [[i, i % 60, 7 * i, 100 + i % 50]] * (1 + i % 4)
                answer = mine.rectangular(keys).as_numpy("EMBEDDING")
                expected = reference.answer([[[key] for key in row] for row in keys])
            else:
                bad = jagged_arrays(samples)
                bad["LENGTHS"][0, 0] += 1
                with pytest.raises(InferenceServerException, match="LENGTHS sum to"):
                    mine.send(bad)
                continue
            np.testing.assert_array_max_ulp(answer.reshape(expected.shape), expected, maxulp=1)
        mine.raw.close()

    before = metric(server.metrics(), "nv_inference_exec_count", model="lookup")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(0, 800, 100)))
    executions = metric(server.metrics(), "nv_inference_exec_count", model="lookup") - before
    assert executions < 8 * 40, "no two requests met in one execution"


# --- bad requests ---------------------------------------------------------------------------------


def keys_and_lengths(keys: int, lengths: list[int]) -> dict[str, NDArray[Any]]:
    return {
        "KEYS": np.full((1, keys), 7, np.int64),
        "LENGTHS": np.array([lengths], np.int32),
    }


BAD_REQUESTS: dict[str, tuple[dict[str, NDArray[Any]], str]] = {
    "keys_of_int32": ({"KEYS": np.zeros((1, 4), np.int32)}, "INT64"),
    "keys_of_fp32": ({"KEYS": np.zeros((1, 4), np.float32)}, "INT64"),
    "lengths_of_int64": (
        {"KEYS": np.zeros((1, 4), np.int64), "LENGTHS": np.ones((1, 4), np.int64)},
        "INT32",
    ),
    "too_few_features": ({"KEYS": np.zeros((2, 3), np.int64)}, r"KEYS has shape \[2,3\]"),
    "too_many_dimensions": ({"KEYS": np.zeros((1, 4, 1), np.int64)}, "(?i)shape"),
    "one_dimension": ({"KEYS": np.zeros(4, np.int64)}, "(?i)shape"),
    "empty": ({"KEYS": np.zeros((1, 0), np.int64)}, r"\[1,0\]"),
    "no_sample": (keys_and_lengths(0, []), "no sample"),
    "negative_length": (keys_and_lengths(4, [5, -1, 0, 0]), "is -1; it must not be negative"),
    "huge_lengths": (keys_and_lengths(4, [2**31 - 1] * 4), "sum to more than 4"),
    "lengths_too_short": (keys_and_lengths(4, [1, 1, 1, 0]), "sum to 3 but KEYS has 4"),
    "lengths_of_no_whole_sample": (keys_and_lengths(3, [1, 1, 1]), "not a multiple of the 4"),
    "too_many_keys": (keys_and_lengths(201, [201, 0, 0, 0]), "201 keys; max_keys is 200"),
    "too_many_samples": ({"KEYS": np.zeros((33, 4), np.int64)}, "33 samples; max_samples is 32"),
    "too_many_for_triton": ({"KEYS": np.zeros((65, 4), np.int64)}, "batch"),
    "unknown_input": (
        {"KEYS": np.zeros((1, 4), np.int64), "DENSE": np.zeros((1, 4), np.float32)},
        "DENSE",
    ),
    "no_keys": ({"LENGTHS": np.ones((1, 4), np.int32)}, "KEYS|expected"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
@pytest.mark.usefixtures("good")
def test_a_bad_request_gets_a_clear_error(client: Client, name: str) -> None:
    arrays, says = BAD_REQUESTS[name]
    with pytest.raises(InferenceServerException, match=says):
        client.send(arrays)


# --- bad models -----------------------------------------------------------------------------------

BAD_CONFIGS = {
    "unknown_parameter": (
        'parameters { key: "snapshott" value: { string_value: "x" } }',
        'parameter "snapshott" is unknown',
    ),
    "bad_number": (
        'parameters { key: "devices" value: { string_value: "many" } }',
        'parameter "devices" is "many"',
    ),
    "response_cache": ("response_cache { enable: true }", "response_cache is on"),
    "decoupled": ("model_transaction_policy { decoupled: true }", "decoupled"),
    "unknown_output": (
        'output [ { name: "OTHER" data_type: TYPE_FP32 dims: [ -1 ] } ]',
        "output OTHER is unknown",
    ),
}


def load_error(client: Client) -> str:
    with pytest.raises(InferenceServerException) as caught:
        client.raw.load_model("bad")
    return str(caught.value)


def write_bad(server: triton.TritonServer, snapshot: Path | None, **options: Any) -> Path:
    options = {"max_batch_size": 8, **options}
    return triton.write_model(
        server.options.repository, "bad", triton.ModelOptions(snapshot=snapshot, **options)
    )


@pytest.mark.parametrize("name", BAD_CONFIGS)
@pytest.mark.usefixtures("good")
def test_a_bad_config_is_refused_at_load(
    server: triton.TritonServer, client: Client, snapshot: Any, name: str
) -> None:
    more, says = BAD_CONFIGS[name]
    config = write_bad(server, snapshot[0]) / "config.pbtxt"
    config.write_text(config.read_text() + more + "\n")
    assert says in load_error(client)


@pytest.mark.usefixtures("good")
def test_sequence_batching_is_refused_at_load(
    server: triton.TritonServer, client: Client, snapshot: Any
) -> None:
    config = write_bad(server, snapshot[0]) / "config.pbtxt"
    text = re.sub(r"dynamic_batching {.*}", "sequence_batching { }", config.read_text())
    config.write_text(text)
    assert "sequence_batching" in load_error(client)


def bucket_file(directory: Path) -> Path:
    return directory / "tables" / "item" / "bucket-000001.emb"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "no_manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json"),
    "no_bucket_file": (lambda d: bucket_file(d).unlink(), "bucket-000001.emb"),
    "truncated_bucket": (lambda d: truncate(bucket_file(d)), "bucket-000001.emb"),
    "flipped_row_byte": (lambda d: flip_byte(bucket_file(d), 150), "checksum"),
    "flipped_header_byte": (
        lambda d: flip_byte(bucket_file(d), 8),
        "format version 17, this build reads 1",
    ),
    "truncated_manifest": (lambda d: truncate(d / "manifest.json"), "manifest.json"),
    "other_format_version": (lambda d: change_manifest(d, format_version=2), "format_version is 2"),
    "other_hash": (lambda d: change_manifest(d, hash_name="md5"), "hash_name"),
    "no_features": (lambda d: change_manifest(d, features=[]), "feature"),
    "pooling_max": (
        lambda d: change_manifest(d, features=[{"name": "a", "table": "tag", "pooling": "max"}]),
        "use sum, mean or none",
    ),
}


@pytest.mark.parametrize("name", HARM)
@pytest.mark.usefixtures("good")
def test_a_harmed_snapshot_is_refused_at_load(
    server: triton.TritonServer, client: Client, new_snapshot: Callable[[], Path], name: str
) -> None:
    harm, says = HARM[name]
    directory = new_snapshot()
    harm(directory)
    write_bad(server, directory)
    error = load_error(client)
    assert says in error
    assert str(directory) in error


@pytest.mark.usefixtures("good")
def test_a_missing_snapshot_is_refused_at_load(
    server: triton.TritonServer, client: Client, tmp_path: Path
) -> None:
    write_bad(server, tmp_path / "nothing")
    assert str(tmp_path / "nothing") in load_error(client)


@pytest.mark.usefixtures("good")
def test_what_a_node_cannot_be_is_told_with_its_publication(
    server: triton.TritonServer, client: Client, snapshot: Any, tmp_path: Path
) -> None:
    (tmp_path / "snapshots").mkdir()
    path = Publication(tmp_path).snapshot_path(VersionId(snapshot[1].version, 1))
    path.symlink_to(snapshot[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        write_bad(
            server,
            None,
            publication=tmp_path,
            state="redis://127.0.0.1:1/0",
            node="bad",
            peer_address=place,
        )
        error = load_error(client)
    said = f"publication {tmp_path}: peers cannot be answered: cannot listen at {place}: Address"
    assert said in error
    assert "give another" in error


@pytest.mark.usefixtures("good")
def test_a_budget_too_small_is_refused_at_load(
    server: triton.TritonServer, client: Client, snapshot: Any
) -> None:
    write_bad(server, snapshot[0], ddr_budget_bytes=1000)
    assert "RESOURCE_EXHAUSTED" in load_error(client) or "budget" in load_error(client)


def test_a_model_loads_and_unloads_beside_others(
    server: triton.TritonServer, client: Client, snapshot: Any, reference: Any
) -> None:
    for _ in range(3):
        write_bad(server, snapshot[0])
        client.raw.load_model("bad")
        answer = client.rectangular([[7, 3, 14, 101]], model="bad").as_numpy("EMBEDDING")
        assert np.array_equal(answer, reference.answer([[[7], [3], [14], [101]]]))
        client.raw.unload_model("bad")
        wait_until(lambda: not client.loaded("bad"))


# --- bounds ---------------------------------------------------------------------------------------


@pytest.fixture
def bounded(
    server: triton.TritonServer, snapshot: tuple[Path, Any]
) -> Iterator[Callable[..., Client]]:
    """Load a model `bounded` with these options, and return a client."""
    client = Client("grpc", server)
    loaded = False

    def load(**options: Any) -> Client:
        nonlocal loaded
        made = triton.ModelOptions(snapshot=snapshot[0], **options)
        triton.write_model(server.options.repository, "bounded", made)
        client.raw.load_model("bounded")
        loaded = True
        return client

    yield load
    if loaded:
        client.raw.unload_model("bounded")
    client.raw.close()


def refusals_of(server: triton.TritonServer, reason: str) -> float:
    page = server.metrics()
    return metric(page, "embertide_requests_refused_total", model="bounded", reason=reason)


def all_at_once(client: Client, requests: int) -> list[Any]:
    """The answers of so many requests, or what they were refused with."""
    keys = np.array([[7, 3, 14, 101]], np.int64)
    tensor = tritonclient.grpc.InferInput("KEYS", keys.shape, "INT64")
    tensor.set_data_from_numpy(keys)
    answers: queue.Queue[Any] = queue.Queue()
    for _ in range(requests):
        client.raw.async_infer(
            "bounded", [tensor], lambda result, error: answers.put(error or result)
        )
    return [answers.get(timeout=30) for _ in range(requests)]


def test_a_request_whose_timeout_has_passed_is_refused_and_counted(
    bounded: Callable[..., Client], server: triton.TritonServer, reference: Any
) -> None:
    client = bounded()
    keys = [[7, 3, 14, 101]]
    with pytest.raises(InferenceServerException, match="timeout has passed") as refused:
        client.rectangular(keys, model="bounded", timeout=1)
    assert "UNAVAILABLE" in str(refused.value.status())
    for timeout in (10_000_000, 2**63 - 1):
        answer = client.rectangular(keys, model="bounded", timeout=timeout)
        expected = reference.answer([[[key] for key in row] for row in keys])
        assert np.array_equal(answer.as_numpy("EMBEDDING"), expected)
    wait_until(lambda: refusals_of(server, "expired") == 1)


def test_load_past_the_queue_is_refused_at_once(bounded: Callable[..., Client]) -> None:
    # Requests wait half a second for others: the queue is as long as the test makes it.
    client = bounded(max_queue_delay_us=500_000, max_queue_size=2, max_wait_ms=10_000)
    answers = all_at_once(client, 6)
    refused = [each for each in answers if isinstance(each, InferenceServerException)]
    assert 1 <= len(refused) <= 4
    assert isinstance(answers[0], InferenceServerException), "refused before the others' answers"
    for each in refused:
        assert "UNAVAILABLE" in str(each.status())
        assert "maximum queue size" in str(each)


def test_a_request_that_waited_too_long_is_refused(bounded: Callable[..., Client]) -> None:
    client = bounded(max_queue_delay_us=1_000_000, max_wait_ms=50)
    (refused,) = all_at_once(client, 1)
    assert isinstance(refused, InferenceServerException)
    assert "UNAVAILABLE" in str(refused.status())


def test_an_answer_that_is_too_large_is_refused_alone(
    bounded: Callable[..., Client], server: triton.TritonServer, reference: Any
) -> None:
    client = bounded(max_output_bytes=64 * reference.total_dim)
    few, many = np.zeros((4, 4), np.int64), np.zeros((40, 4), np.int64)
    assert client.rectangular(few, model="bounded").as_numpy("VERSION").shape == (4, 1)
    with pytest.raises(InferenceServerException, match=f"max_output_bytes is {64 * 26}"):
        client.rectangular(many, model="bounded")
    wait_until(lambda: refusals_of(server, "max_output_bytes") == 1)


def test_no_request_ends_the_server_for_want_of_memory(
    bounded: Callable[..., Client], server: triton.TritonServer, reference: Any
) -> None:
    samples = 1 << 20
    client = bounded(max_samples=samples, max_keys=1 << 24, max_output_bytes=1 << 31)
    # 16 MiB of lengths ask for 104 MiB of embeddings, which the server has no memory for.
    arrays: dict[str, NDArray[Any]] = {
        "KEYS": np.zeros((1, 0), np.int64),
        "LENGTHS": np.zeros((1, 4 * samples), np.int32),
    }
    status = Path(f"/proc/{server.pid}/status").read_text()
    used = 1024 * int(re.search(r"VmSize:\s+(\d+) kB", status)[1])  # type: ignore[index]
    before = resource.prlimit(server.pid, resource.RLIMIT_AS)
    resource.prlimit(server.pid, resource.RLIMIT_AS, (used + (96 << 20), before[1]))
    try:
        for outputs in (["VERSION"], ["EMBEDDING"]):
            with pytest.raises(InferenceServerException):
                client.send(arrays, model="bounded", outputs=outputs)
            assert server.alive(), server.log_text()
        for keys, lengths in (
            ([], []),
            ([], [-1] * 4),
            ([1], [2**31 - 1] * 4),
            ([-(2**63)] * 4, [2**31 - 1, 1, 1, 1]),
            ([2**63 - 1] * 5, [1, 1, 1, 1]),
        ):
            extreme: dict[str, NDArray[Any]] = {
                "KEYS": np.array([keys], np.int64),
                "LENGTHS": np.array([lengths], np.int32),
            }
            with pytest.raises(InferenceServerException):
                client.send(extreme, model="bounded")
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_AS, before)
    keys_BF = [[7, 3, 14, 101]]
    expected = reference.answer([[[key] for key in row] for row in keys_BF])
    answer = client.rectangular(keys_BF, model="bounded").as_numpy("EMBEDDING")
    assert np.array_equal(answer, expected)


# --- sequences ------------------------------------------------------------------------------------


@pytest.fixture
def sequences(
    server: triton.TritonServer, new_snapshot: Callable[[], Path], client: Client
) -> Iterator[None]:
    """Serve a model whose third feature is a sequence."""
    directory = new_snapshot()
    features = json.loads((directory / "manifest.json").read_text())["features"]
    features[2]["pooling"] = "none"
    change_manifest(directory, features=features)
    options = triton.ModelOptions(snapshot=directory, instances=2, threads=3, max_keys=5000)
    triton.write_model(server.options.repository, "sequences", options)
    client.raw.load_model("sequences")
    yield
    client.raw.unload_model("sequences")


@pytest.mark.usefixtures("sequences")
def test_a_sequence_gives_a_row_for_each_key(client: Client, reference: Any) -> None:
    samples = [
        [[7, 14], [3], [21, UNKNOWN, 28, 21], [101, 102]],
        [[], [1], [], []],
        [[0], [], [35], [139]],
    ]
    wanted = ["EMBEDDING", "SOURCE"]
    reply = client.jagged(samples, model="sequences", outputs=wanted)
    want = reference.flat(samples)
    assert reply.as_numpy("EMBEDDING").shape == (1, len(want))
    np.testing.assert_allclose(reply.as_numpy("EMBEDDING")[0], want, rtol=1e-6)
    keys = [key for bags in samples for bag in bags for key in bag]
    sources = [SOURCE_DEFAULT if key == UNKNOWN else SOURCE_DDR for key in keys]
    assert reply.as_numpy("SOURCE")[0].tolist() == sources
    # Without lengths every bag has one key, and every sample the same width.
    keys_BF = [[7, 3, 21, 101], [0, 1, UNKNOWN, 139]]
    reply = client.rectangular(keys_BF, model="sequences")
    want = reference.flat([[[key] for key in keys] for keys in keys_BF])
    np.testing.assert_allclose(reply.as_numpy("EMBEDDING"), want.reshape(2, -1), rtol=1e-6)


@pytest.mark.usefixtures("sequences")
def test_threads_share_long_sequences_out(client: Client, reference: Any) -> None:
    rng = np.random.default_rng(4)
    samples = [
        [[7], [int(rng.integers(50))], (7 * rng.integers(0, 400, n)).tolist(), [100, 101]]
        for n in rng.integers(0, 120, 40)
    ]
    reply = client.jagged(samples, model="sequences")
    want = reference.flat(samples)
    np.testing.assert_allclose(reply.as_numpy("EMBEDDING")[0], want, rtol=1e-6)
    wanted = client.jagged(samples, model="sequences", outputs=["VERSION"])
    assert wanted.as_numpy("VERSION")[0, 0] == 41


# --- metrics, start -------------------------------------------------------------------------------


def test_metrics_count_what_was_done(
    server: triton.TritonServer, client: Client, reference: Any
) -> None:
    def value(name: str, **labels: str) -> float:
        return metric(server.metrics(), name, model="lookup", **labels)

    time.sleep(1.2)  # what earlier tests did is published
    inferences = value("nv_inference_count")
    keys = value("embertide_lookup_keys_total", table="item", source="ddr")
    defaults = value("embertide_default_returned_total")
    refused = value("embertide_requests_refused_total", reason="lengths")
    client.rectangular([[7, 0, 14, 100]] * 3)
    client.rectangular([[UNKNOWN, 0, 14, 100]])
    with pytest.raises(InferenceServerException):
        client.send(keys_and_lengths(4, [5, -1, 0, 0]))
    wait_until(lambda: value("embertide_requests_refused_total", reason="lengths") == refused + 1)
    wait_until(lambda: value("nv_inference_count") == inferences + 4)
    assert value("embertide_lookup_keys_total", table="item", source="ddr") == keys + 7
    assert value("embertide_default_returned_total") == defaults + 1
    tables = {name: value("embertide_table_rows", table=name) for name in reference.rows}
    assert tables == {name: len(rows) for name, rows in reference.rows.items()}
    assert value("embertide_rows") == sum(tables.values())
    assert value("embertide_table_rows", tier="ssd") == 0
    held = value("embertide_table_bytes", tier="ddr")
    assert 0 < held <= value("embertide_tier_bytes", tier="ddr")
    assert value("embertide_tier_bytes", tier="index") > 0
    assert value("embertide_plan_epoch") == 1
    assert value("embertide_version") == 41


def test_lookup_durations_are_a_histogram_of_executions(
    server: triton.TritonServer, client: Client
) -> None:
    def value(name: str, **labels: str) -> float:
        full = f"embertide_lookup_duration_us{name}"
        return metric(server.metrics(), full, model="lookup", **labels)

    def executions() -> float:
        return metric(server.metrics(), "nv_inference_exec_count", model="lookup")

    executed, count, total = executions(), value("_count"), value("_sum")
    begin = time.monotonic()
    for _ in range(20):
        client.rectangular([[7, 0, 14, 100]] * 3)
    passed_us = (time.monotonic() - begin) * 1e6
    # Triton counts after it answers.
    wait_until(lambda: executions() - executed == 20)
    assert value("_count") - count == 20
    assert 0 < value("_sum") - total < passed_us
    assert value("_bucket", le="+Inf") == value("_count") >= value("_bucket", le="20")


def test_an_hbm_tier_answers_alike_and_counts_by_device(
    server: triton.TritonServer, snapshot: Any, reference: Any
) -> None:
    options = triton.ModelOptions(
        snapshot=snapshot[0],
        hbm_budget_bytes=16 << 20,
        hbm_devices=2,
        hbm_kind="twin",
        hbm_policy="clock:2,tag=none",
    )
    triton.write_model(server.options.repository, "twin", options)
    client = Client("grpc", server)
    client.raw.load_model("twin")

    def events(event: str, **labels: str) -> float:
        page = server.metrics()
        name = "embertide_hbm_events_total"
        return metric(page, name, model="twin", event=event, **labels)

    samples = [[[7 * i], [i], [14, 21 * i], [100 + i]] for i in range(16)]
    answers = 0

    def all_but_tags_hit() -> bool:
        nonlocal answers
        reply = client.jagged(samples, model="twin", outputs=["EMBEDDING", "SOURCE"])
        answers += 1
        got = reply.as_numpy("EMBEDDING").reshape(16, -1)
        np.testing.assert_allclose(got, reference.answer(samples), rtol=1e-6)
        source = reply.as_numpy("SOURCE").reshape(16, 5)
        assert (source[:, 4] == SOURCE_DDR).all()  # tag=none
        return bool((source[:, :4] == SOURCE_HBM).all())

    wait_until(all_but_tags_hit)
    keys = 5 * 16 * answers
    wait_until(lambda: events("hit") + events("miss") == keys)
    for device in ("0", "1"):
        assert events("hit", device=device) > 0
        assert events("placed", device=device) > 0
    page = server.metrics()
    hits = metric(page, "embertide_lookup_keys_total", model="twin", source="hbm")
    assert hits == events("hit")
    assert metric(page, "embertide_hbm_rows", model="twin") == events("placed")
    used = metric(page, "embertide_hbm_bytes", model="twin")
    assert 0 < used == metric(page, "embertide_tier_bytes", model="twin", tier="hbm")
    assert metric(page, "embertide_hbm_failed", model="twin") == 0

    def copies(table: str) -> float:
        return metric(page, "embertide_table_rows", model="twin", table=table, tier="hbm")

    assert (copies("user"), copies("tag")) == (16, 0)
    assert copies("item") + 16 == metric(page, "embertide_hbm_rows", model="twin")
    copied = metric(page, "embertide_table_bytes", model="twin", table="user", tier="hbm")
    assert copied == 16 * 32  # rows of 12 bytes
    assert MetricsPage(page).model("twin")["rows_by_table"]["tag"] == len(reference.rows["tag"])
    shown = MetricsPage(page).model("twin")["hbm"]
    assert (shown["hit"], shown["placed"]) == (events("hit"), events("placed"))
    client.raw.unload_model("twin")
    client.raw.close()


@pytest.mark.usefixtures("good")
def test_a_gpu_that_is_not_there_is_named_at_load(
    server: triton.TritonServer, client: Client, snapshot: Any
) -> None:
    write_bad(server, snapshot[0], hbm_budget_bytes=16 << 20, hbm_devices=64)
    assert "GPU" in load_error(client)


def test_statistics_hold_every_request_and_batch(protocol: str, client: Client) -> None:
    more = {"as_json": True} if protocol == "grpc" else {}

    def counts() -> tuple[int, int, int]:
        stats = client.raw.get_inference_statistics("lookup", **more)["model_stats"][0]
        pairs = [each for each in stats["batch_stats"] if int(each["batch_size"]) == 2]
        infer = sum(int(each["compute_infer"]["count"]) for each in pairs)
        return int(stats["inference_count"]), int(stats["execution_count"]), infer

    # Triton counts after it answers.
    time.sleep(0.2)
    inferences, executions, pairs = counts()
    client.rectangular([[7, 3, 14, 101]] * 2)
    wait_until(lambda: counts() == (inferences + 2, executions + 1, pairs + 1))


def test_a_port_in_use_is_named(server_options: triton.ServerOptions, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        free = process.free_ports(1)
        options = dataclasses.replace(
            server_options,
            log=tmp_path / "log",
            grpc_port=port,
            metrics_port=free[0],
        )
        with pytest.raises(process.ProcessError, match=f"grpc port {port} is in use"):
            triton.TritonServer(options)


def test_a_model_that_does_not_load_ends_the_start(
    server_options: triton.ServerOptions, tmp_path: Path
) -> None:
    triton.write_model(tmp_path, "m", triton.ModelOptions(snapshot=tmp_path / "nothing"))
    options = beside(server_options, tmp_path, tmp_path / "log", (), explicit=False)
    with pytest.raises(triton.TritonError, match="nothing"):
        triton.TritonServer(options)


def test_a_backend_not_built_is_named(server_options: triton.ServerOptions, tmp_path: Path) -> None:
    options = dataclasses.replace(server_options, backends=tmp_path, log=tmp_path / "log")
    with pytest.raises(triton.TritonError, match=r"libtriton_embertide\.so is missing"):
        triton.TritonServer(options)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie has ended; whoever adopted it has only not asked yet.
    return ") Z " not in Path(f"/proc/{pid}/stat").read_text()


def test_a_server_ends_with_the_process_that_started_it(
    server_options: triton.ServerOptions, tmp_path: Path
) -> None:
    ports = process.free_ports(2)
    script = f"""
import pathlib, time
from embertide.server.adapters import process, triton
repository = pathlib.Path({str(tmp_path / "models")!r})
repository.mkdir()
server = triton.TritonServer(triton.ServerOptions(
    repository=repository, backends=pathlib.Path({str(server_options.backends)!r}),
    log=pathlib.Path({str(tmp_path / "log")!r}), explicit=True,
    grpc_port={ports[0]}, metrics_port={ports[1]}))
print(server.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert _alive(pid)
        starter.send_signal(signal.SIGKILL)
    wait_until(lambda: not _alive(pid))
