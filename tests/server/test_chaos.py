"""The parts of chaos, piece by piece: faults by seed, harmed links, the log replayed."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fleet import CONFIG, KEYS, TABLES, Model

from embertide import _store
from embertide.server.adapters.process import free_ports
from embertide.server.cli.chaos.faults import draw, kinds
from embertide.server.cli.chaos.links import Harm, Links, Route
from embertide.server.cli.chaos.replay import Replay, decode_row, read_records
from embertide.server.cli.chaos.report import timeline
from embertide.server.cli.chaos.traffic import Answer, every_key, faults_of

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
MESSAGE = b"*3\r\n$1\r\nm\r\n$12\r\n" + b"\x00" * 12 + b"\r\n"


def test_a_seed_is_a_schedule() -> None:
    assert draw(7) == draw(7)
    assert [draw(seed) for seed in range(20)] != [draw(seed) for seed in range(20, 40)]
    drawn = {fault.kind for seed in range(300) for fault in draw(seed)}
    assert drawn == {kind.name for kind in kinds()}


def test_what_is_left_out_leaves_the_other_faults_as_they_are() -> None:
    for seed in range(200):
        rest = draw(seed, ["busy-cpu"])
        assert rest == [fault for fault in draw(seed) if fault.kind != "busy-cpu"]


class Echo:
    """A server that sends back what it gets."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    @staticmethod
    def _echo(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(4096):
                connection.sendall(data)

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def link() -> Iterator[tuple[Links, int]]:
    echo, (port,) = Echo(), free_ports(1)
    route = Route(listen=("127.0.0.1", port), to=("127.0.0.1", echo.port))
    with Links({"a>b": route}) as links:
        yield links, port
    echo.close()


def exchange(port: int, data: bytes, timeout_s: float = 5.0) -> bytes:
    """Send data through the link; return what comes back, which is nothing from a cut one."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as client:
        got = b""
        try:
            client.sendall(data)
            while len(got) < len(data) and (part := client.recv(4096)):
                got += part
        except ConnectionError:
            return b""
        return got


def test_a_link_passes_what_it_gets(link: tuple[Links, int]) -> None:
    links, port = link
    links.set("a>b", Harm())
    assert exchange(port, MESSAGE) == MESSAGE


def test_a_delayed_link_takes_its_time(link: tuple[Links, int]) -> None:
    links, port = link
    links.set("a>b", Harm(delay_s=0.1))
    begun_s = time.monotonic()
    assert exchange(port, MESSAGE) == MESSAGE
    assert time.monotonic() - begun_s >= 0.2  # there and back


def test_a_cut_link_passes_nothing(link: tuple[Links, int]) -> None:
    links, port = link
    links.set("a>b", Harm(cut=True))
    assert exchange(port, MESSAGE) == b""


def test_a_stalled_link_holds_what_it_got(link: tuple[Links, int]) -> None:
    links, port = link
    links.set("a>b", Harm(stall=True))
    with socket.create_connection(("127.0.0.1", port), timeout=0.3) as client:
        client.sendall(b"held")
        with pytest.raises(TimeoutError):
            client.recv(4)
        links.set("a>b", Harm())
        client.settimeout(5.0)
        assert client.recv(4) == b"held"


def test_flips_hit_one_bit_of_a_message_and_nothing_else(link: tuple[Links, int]) -> None:
    links, port = link
    before = links.flipped()["a>b"]
    links.set("a>b", Harm(flip=1.0))
    got = exchange(port, MESSAGE)
    links.set("a>b", Harm())
    flipped = links.flipped()["a>b"] - before
    changed = np.unpackbits(np.frombuffer(got, np.uint8) ^ np.frombuffer(MESSAGE, np.uint8))
    begin = MESSAGE.index(b"\x00") * 8
    assert flipped == 2  # there and back
    assert changed.sum() in (0, 2)  # the same bit twice is as it was
    assert not changed[:begin].any()
    assert not changed[begin + 12 * 8 :].any()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    model = Model(tmp_path_factory.mktemp("chaos") / "publication", None, CACHE, seed=11)
    for _ in range(3):
        model.publish()
    return model


def test_the_replay_is_every_version(model: Model) -> None:
    replay = Replay(model.publication.path)
    assert replay.advance() == model.newest
    for version, rows in model.versions.items():
        for t, table in enumerate(TABLES):
            for key in range(KEYS):
                row, want = replay.row(table.id, key, version), rows.get((t, key))
                assert (row is None) == (want is None)
                assert want is None or row == want.astype("<f4").tobytes()
    assert replay.commits[2].watermark_ms == 2


def test_the_replay_reads_a_file_once(model: Model) -> None:
    replay = Replay(model.publication.path)
    replay.advance()
    newest = sorted((model.publication.path / "deltas").iterdir())[-1]
    whole = (newest / "commit.pb").read_bytes()
    try:
        (newest / "commit.pb").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert replay.advance() == model.newest
    finally:
        (newest / "commit.pb").write_bytes(whole)


def answer_of(
    model: Model, replay: Replay, version: int, **changes: object
) -> tuple[list[str], int]:
    """Judge the right answer to all keys at a version, with some of it changed."""
    (keys_BF,) = every_key(replay, 10_000)
    rows, sources = bytearray(), bytearray()
    for keys_F in keys_BF:
        for table, key in zip(replay.features, keys_F, strict=True):
            row = None if key is None else replay.row(table, key, version)
            rows += row or replay.default(table)
            sources += b"" if key is None else bytes([4 if row is None else 1])
    parameters = {"version": version, "watermark_ms": version, "staleness_ms": 1, "node": "n"}
    said = {"rows": rows, "sources": sources, **changes}
    answer = Answer(
        version=version,
        rows=bytes(said["rows"]),  # type: ignore[call-overload]
        sources=bytes(said["sources"]),  # type: ignore[call-overload]
        parameters={**parameters, **changes.get("parameters", {})},  # type: ignore[dict-item]
    )
    return faults_of(replay, keys_BF, answer)


@pytest.fixture(scope="module")
def replay(model: Model) -> Replay:
    replay = Replay(model.publication.path)
    replay.advance()
    return replay


def test_a_right_answer_has_no_fault(model: Model, replay: Replay) -> None:
    for version in model.versions:
        assert answer_of(model, replay, version) == ([], 0)


def test_rows_of_another_version_are_a_fault(model: Model, replay: Replay) -> None:
    (keys_BF,) = every_key(replay, 10_000)
    other = bytearray()
    for keys_F in keys_BF:
        for table, key in zip(replay.features, keys_F, strict=True):
            row = None if key is None else replay.row(table, key, 1)
            other += row or replay.default(table)
    wrong, _ = answer_of(model, replay, 3, rows=other)
    assert wrong
    assert all("another row" in each for each in wrong)


def test_a_default_that_is_not_marked_is_a_fault(model: Model, replay: Replay) -> None:
    (keys_BF,) = every_key(replay, 10_000)
    count = sum(key is not None for keys_F in keys_BF for key in keys_F)
    nothing = bytes(4 * sum(replay.dims()) * len(keys_BF))
    wrong, unanswered = answer_of(model, replay, 2, rows=nothing, sources=bytes([4]) * count)
    assert wrong
    assert unanswered == 0
    marked, unanswered = answer_of(model, replay, 2, rows=nothing, sources=bytes([6]) * count)
    assert not marked
    assert unanswered == count


def test_a_version_that_was_never_published_is_a_fault(model: Model, replay: Replay) -> None:
    wrong, _ = answer_of(model, replay, 2, parameters={"watermark_ms": 77})
    assert wrong == ["version 2 has watermark 77, not 2"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_rows_are_decoded_as_the_format_says(dtype: str) -> None:
    layout = _store.RowLayout(dtype=dtype, chunks=3, chunk_dim=2)
    values = np.array([0.5, -1.5, 9.0, 9.0, 2.0, 0.25], np.float32)
    payload = _store.encode_payload(layout, 0b101, values)
    records = _store.encode_record(3, 0b101, 0, payload) + _store.encode_record(9, 0, 1, b"")
    (key, live, kind, got), (gone, _, tombstone, nothing) = read_records(layout, records)
    assert (key, live, kind, got) == (3, 0b101, 0, payload)
    assert (gone, tombstone, nothing) == (9, 1, b"")
    row = np.frombuffer(decode_row(layout, live, got), "<f4")
    want = np.array([0.5, -1.5, 0.0, 0.0, 2.0, 0.25], np.float32)
    np.testing.assert_allclose(row, want, atol=2 / 127 if dtype == "int8" else 0)
    np.testing.assert_array_equal(row, _store.decode_records(layout, records)[3][0])


def test_the_models_features_may_share_a_table(replay: Replay) -> None:
    assert len(replay.features) == len(CONFIG.features)
    asked = [
        (t, k)
        for keys_BF in every_key(replay, 50)
        for keys_F in keys_BF
        for t, k in zip(replay.features, keys_F, strict=True)
        if k is not None
    ]
    assert len(asked) == len(set(asked))


def test_a_node_that_answers_nothing_is_not_drawn_as_far_behind() -> None:
    bins = [
        {"at_s": 0.25 * i, "published": 900 + i, "versions": versions, "answered": 9}
        | dict.fromkeys(("slow", "degraded", "failed"), 0)
        for i, versions in enumerate(([899, 900], [0, 901], [902, 902]))
    ]
    fault = {"at_s": 0.0, "kind": "stop", "target": "node-0", "for_s": 0.2}
    figure = timeline([{"began_s": 0.0, "faults": [fault], "bins": bins}], "")
    first, second = (line.get_ydata() for line in figure.axes[-1].get_lines())
    np.testing.assert_array_equal(first, [1, np.nan, 0])
    np.testing.assert_array_equal(second, [0, 0, 0])
