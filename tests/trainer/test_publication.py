"""Publishing versions: to files alone, and with a real Redis that may be taken over or lost."""

import dataclasses
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from checker import DIM, TABLES, bucket_of, dense_tensors
from serving import flip_byte

from bench.criteo import criteo
from embertide import _store
from embertide.server.adapters import process
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.presets import PRESETS
from embertide.trainer.publish.bus import Bus, Keys
from embertide.trainer.publish.folder import Publication, PublicationError, VersionId
from embertide.trainer.publish.lock import FolderLock, LockedError
from embertide.trainer.publish.publisher import (
    BusError,
    Change,
    Publisher,
    SupersededError,
    promotion_record,
)
from embertide.trainer.publish.snapshot import (
    MAX_FORMER,
    Layout,
    SnapshotInfo,
    former_layouts,
    layouts,
    read_former,
    read_manifest,
    write_snapshot,
)
from embertide.v1 import update_pb2

SCHEMA = 77
MODEL = "shop"
LOG = f"e:{{{MODEL}:commit}}:log"
LINEAGE = f"e:{{{MODEL}:commit}}:lineage"


@pytest.fixture
def publication(tmp_path: Path) -> Publication:
    return Publication(tmp_path / "pub")


@pytest.fixture(scope="module")
def one_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    log = tmp_path_factory.mktemp("redis") / "redis.log"
    with RedisServer(RedisOptions(log=log, adjustable=True)) as server:
        yield server


@pytest.fixture
def bus(one_redis: RedisServer) -> Iterator[Any]:
    """A client of an empty Redis; `bus.url` names it."""
    with redis.Redis.from_url(one_redis.url) as client:
        client.flushall()
        client.url = one_redis.url
        yield client


def rows(keys: list[int], value: float, table: int = 0) -> list[Change]:
    """Records of keys in every bucket that they fall in, `value` in every dimension."""
    config = TABLES[table]
    body = _store.encode_payload(config.layout, 1, np.full(DIM, value, np.float32))
    records: dict[int, list[bytes]] = {}
    for key in sorted(keys):
        record = _store.encode_record(key, 1, 0, body)
        records.setdefault(bucket_of(config, key), []).append(record)
    return [(config, bucket, b"".join(records[bucket])) for bucket in sorted(records)]


def publish(publisher: Publisher, number: int, changes: list[Change] | None = None) -> VersionId:
    changes = rows(list(range(100)), number) if changes is None else changes
    dense = dense_tensors(number)
    return publisher.publish(number, watermark_ms=10 * number, changes=changes, dense=dense)


def first_snapshot(publication: Publication, version: VersionId) -> None:
    """Make what counts as a snapshot to listing and pruning."""
    path = publication.snapshot_path(version)
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    (path / "rows").write_text("rows")


def folder(publication: Publication, version: VersionId) -> Path:
    return publication.path / "deltas" / version.folder


def commits(bus: Any) -> list[VersionId]:
    """The versions that the bus says exist, in order."""
    messages = [fields[b"m"] for _, fields in bus.xrange(LOG)]
    return [VersionId.of(update_pb2.GlobalCommit.FromString(m).version) for m in messages]


# --- files ----------------------------------------------------------------------------------------


def test_versions_are_folders_whose_names_ascend_as_they_do(publication: Publication) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    numbers = [2, 9, 10, 11, 100]
    for number in numbers:
        publish(publisher, number)
    names = [path.name for path in (publication.path / "deltas").iterdir()]
    assert sorted(names) == [f"{number:012d}-000001" for number in numbers]
    assert publication.deltas() == [VersionId(number, 1) for number in numbers]
    lines = [json.loads(line) for line in publication.log.read_text().splitlines()]
    assert [(line["number"], line["watermark_ms"]) for line in lines] == [
        (number, 10 * number) for number in numbers
    ]


def test_a_version_leads_from_the_one_before_and_names_what_it_changed(
    publication: Publication,
) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    publish(publisher, 1)
    second = publish(publisher, 5, rows([3, 4], 5.0) + rows([8], 5.0, table=1))
    file = publication.read_commit(second)
    assert VersionId.of(file.commit.previous) == (1, 1)
    assert (file.commit.watermark_ms, file.commit.schema_id) == (50, SCHEMA)
    assert [p.partition for p in file.partitions] == sorted(p.partition for p in file.partitions)
    batches = list(publication.read_batches(second))
    wanted = {(t.id, b): r for t, b, r in rows([3, 4], 5.0) + rows([8], 5.0, table=1)}
    assert {(b.table_id, b.bucket): b.records for b in batches} == wanted
    assert {(b.lineage, b.version, b.schema_id) for b in batches} == {(1, 5, SCHEMA)}


def test_equal_dense_tensors_are_not_written_again(publication: Publication) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    first = publish(publisher, 1)
    dense = dense_tensors(1)
    second = publisher.publish(2, watermark_ms=2, changes=[], dense=dense)
    files = [publication.read_commit(version).commit for version in (first, second)]
    assert [file.dense_path for file in files] == ["dense.safetensors", ""]
    assert files[0].dense_id == files[1].dense_id
    assert [p.name for p in folder(publication, second).iterdir()] == ["commit.pb"]


def test_the_commit_file_is_written_last(
    publication: Publication, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    publish(publisher, 1)
    rename, names = Path.rename, []

    def killed(self: Path, target: Path) -> Path:
        names.extend(sorted(path.name for path in self.parent.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        publish(publisher, 2)
    monkeypatch.setattr(Path, "rename", rename)
    assert names == [".commit.pb", "dense.safetensors", *(f"p-0{p}.delta" for p in range(4))]
    # All is there but the name: this is no version, and the next publisher may use its number.
    assert publication.versions() == [VersionId(1, 1)]
    successor = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    assert successor.newest == (1, 1)
    assert publish(successor, 2) == (2, 2)


def test_a_version_is_never_written_again(publication: Publication) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    version = publish(publisher, 3)
    before = {path.name: path.read_bytes() for path in folder(publication, version).iterdir()}
    for number in (2, 3):
        with pytest.raises(ValueError, match="not newer than 3"):
            publish(publisher, number)
    publisher.newest = VersionId(2, 1)  # as if it had not listed the files
    with pytest.raises(PublicationError, match="never written again"):
        publish(publisher, 3)
    after = {path.name: path.read_bytes() for path in folder(publication, version).iterdir()}
    assert after == before


def test_a_line_that_was_cut_does_not_spoil_the_next(publication: Publication) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    publish(publisher, 1)
    with publication.log.open("a") as file:
        file.write('{"number": 2, "li')
    publish(publisher, 2)
    lines = publication.log.read_text().splitlines()
    assert [json.loads(line)["number"] for line in (lines[0], lines[2])] == [1, 2]
    assert len(lines) == 3


@pytest.mark.parametrize("name", ["commit.pb", "p-00.delta"])
def test_harm_to_a_version_is_found_and_its_file_named(publication: Publication, name: str) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    version = publish(publisher, 1)
    path = folder(publication, version) / name
    whole = path.read_bytes()

    def refused(reason: str = "checksum") -> None:
        with pytest.raises(PublicationError, match=f"{name}.*{reason}"):
            list(publication.read_batches(version))

    for at in range(0, len(whole), 7):
        flip_byte(path, at)
        refused()
        path.write_bytes(whole)
    for length in [*range(0, 24), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused()
    path.write_bytes(whole + b"\0")
    refused()
    path.unlink()
    refused("missing")
    path.write_bytes(whole)
    assert sum(batch.rows for batch in publication.read_batches(version)) == 100


def test_a_commit_under_another_versions_name_is_refused(publication: Publication) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    version = publish(publisher, 1)
    other = VersionId(2, 1)
    folder(publication, version).rename(folder(publication, other))
    with pytest.raises(PublicationError, match="another version"):
        publication.read_commit(other)


def test_a_large_change_is_cut_into_batches_under_a_mebibyte(publication: Publication) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    changes = rows(list(range(100_000)), 1.0, table=1)
    version = publish(publisher, 1, changes)
    batches = list(publication.read_batches(version))
    assert max(batch.ByteSize() for batch in batches) <= 1 << 20
    for table, bucket, records in changes:
        mine = [batch for batch in batches if batch.bucket == bucket]
        assert [batch.sequence for batch in mine] == list(range(1, len(mine) + 1))
        assert len(mine) == -(-len(records) // ((1 << 20) - 256)) > 1
        assert b"".join(batch.records for batch in mine) == records
        partition = next(
            p for p in publication.read_commit(version).partitions if p.partition == bucket
        )
        (entry,) = partition.buckets
        assert (entry.table_id, entry.sequence) == (table.id, len(mine))
        assert entry.batches == len(mine)
    assert publisher.stats.rows == 100_000


def test_prune_keeps_a_snapshot_and_every_delta_after_it(publication: Publication) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    for number in range(1, 13):
        version = publish(publisher, number)
        if number in (2, 5, 8, 11):
            first_snapshot(publication, version)
    # Leftovers of a killed writer, before the oldest kept snapshot and after it.
    for name in ("deltas/000000000004-000009", "deltas/000000000010-000009"):
        (publication.path / name).mkdir()
        (publication.path / name / "p-00.delta").write_text("half")
    for name in (
        "snapshots/.000000000005-000009.partial",
        "snapshots/.000000000012-000009.partial",
    ):
        (publication.path / name / "tables").mkdir(parents=True)
    assert publication.prune(5) == 0
    assert publication.prune(4) == 2  # the deltas up to the first snapshot
    assert publication.prune(2) == 2 + 6 + 2
    assert [v.number for v in publication.snapshots()] == [8, 11]
    assert [v.number for v in publication.deltas()] == [9, 10, 11, 12]
    left = {path.name for path in (publication.path / "deltas").iterdir()}
    left |= {path.name for path in (publication.path / "snapshots").iterdir()}
    assert "000000000010-000009" in left
    assert ".000000000012-000009.partial" in left
    assert "000000000004-000009" not in left
    assert ".000000000005-000009.partial" not in left
    at = VersionId(12, 1)
    while at.number > 8:  # the chain reaches the older snapshot
        at = VersionId.of(publication.read_commit(at).commit.previous)
    assert at in publication.snapshots()


def test_snapshots_written_of_late_are_kept_however_many(publication: Publication) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    for number in range(1, 9):
        version = publish(publisher, number)
        first_snapshot(publication, version)
        written_s = time.time() - 100 * (9 - number)
        os.utime(publication.snapshot_path(version) / "manifest.json", (written_s, written_s))
    publication.prune(2, keep_s=450)
    assert [v.number for v in publication.snapshots()] == [5, 6, 7, 8]
    assert [v.number for v in publication.deltas()] == [6, 7, 8]
    publication.prune(2, keep_s=50)
    assert [v.number for v in publication.snapshots()] == [7, 8]


def test_a_prune_that_is_killed_leaves_no_version_in_part(
    publication: Publication, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    for number in range(1, 4):
        first_snapshot(publication, publish(publisher, number))

    def killed(path: Path, ignore_errors: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    for _ in range(5):  # two snapshots, three deltas
        with pytest.raises(KeyboardInterrupt):
            publication.prune(1)
        for version in publication.snapshots():
            assert (publication.snapshot_path(version) / "rows").exists()
        for version in publication.deltas():
            assert sum(batch.rows for batch in publication.read_batches(version)) == 100
    monkeypatch.undo()
    publication.prune(1)
    assert publication.versions() == [VersionId(3, 1)]
    assert len(list((publication.path / "deltas").iterdir())) == 0


def test_without_redis_a_lineage_in_the_files_still_fences(publication: Publication) -> None:
    old = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    publish(old, 1)
    new = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    assert (old.lineage, new.lineage) == (1, 2)
    publish(new, 2)
    with pytest.raises(SupersededError, match="lineage 2 has taken over from 1"):
        publish(old, 3)
    assert publication.versions() == [VersionId(1, 1), VersionId(2, 2)]


# --- the bus --------------------------------------------------------------------------------------


def test_what_goes_on_the_bus_is_what_the_files_hold(publication: Publication, bus: Any) -> None:
    publisher = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    versions = [publish(publisher, number) for number in (1, 2, 3)]
    assert commits(bus) == versions
    for i, version in enumerate(versions):
        file = publication.read_commit(version)
        on_bus = update_pb2.GlobalCommit.FromString(bus.xrange(LOG)[i][1][b"m"])
        assert on_bus.dense == dense_tensors(version.number)
        on_bus.ClearField("dense")
        assert on_bus == file.commit
        for partition, ref in zip(file.partitions, file.commit.partitions, strict=True):
            sent = bus.xrange(f"e:{{{MODEL}:{partition.partition}}}:commit")[i][1][b"m"]
            assert update_pb2.PartitionCommit.FromString(sent) == partition
            assert ref.crc32c == _store.crc32c(sent)
        for batch in publication.read_batches(version):
            stream = f"e:{{{MODEL}:{batch.bucket}}}:{batch.table_id}:{batch.bucket}"
            entry_id, fields = bus.xrange(stream)[i]
            assert entry_id.decode() == f"{version.number}-{1 << 32}"
            sent = fields[b"m"]
            assert update_pb2.RowBatch.FromString(sent) == batch
            assert batch.sequence == i + 1


def test_the_commit_goes_out_when_all_that_it_names_is_there(
    publication: Publication, bus: Any
) -> None:
    publisher = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    sent: list[str] = []
    with redis.Redis.from_url(bus.url) as other, other.monitor() as monitor:
        publish(publisher, 1)
        while not sent or sent[-1] != LOG:
            command = monitor.next_command()["command"].split()
            if command[0] == "XADD":
                sent.append(command[1])
    # All rows, then the partitions' commits; the version's commit when all of them are there.
    assert sent == [
        *(f"e:{{{MODEL}:{p}}}:0:{p}" for p in range(4)),
        *(f"e:{{{MODEL}:{p}}}:commit" for p in range(4)),
        LOG,
    ]


def test_the_lineage_is_larger_than_any_in_files_and_in_redis(
    publication: Publication, bus: Any
) -> None:
    assert Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA).lineage == 1
    assert Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA).lineage == 2
    publisher = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    publish(publisher, 1)
    bus.flushall()
    assert Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA).lineage == 4
    bus.set(LINEAGE, 40)
    assert Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA).lineage == 41
    assert int(bus.get(LINEAGE)) == 41
    publish(Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA), 2)  # files alone: 4
    bus.delete(LINEAGE)
    assert Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA).lineage == 5


def test_two_models_on_one_redis_do_not_meet(tmp_path: Path, bus: Any) -> None:
    # Before keys carried the model's name, the second publisher superseded the first.
    news, shop = (
        Publisher(Publication(tmp_path / model), bus=bus.url, model=model, schema_id=SCHEMA)
        for model in ("news", "shop")
    )
    for number in (1, 2):
        publish(news, number)
        publish(shop, number)
    assert (news.lineage, shop.lineage) == (1, 1)
    assert commits(bus) == [(1, 1), (2, 1)]
    for key in bus.scan_iter():
        assert key.startswith((b"e:{news:", b"e:{shop:"))
    assert len(bus.keys("e:{news:*")) == len(bus.keys("e:{shop:*"))


def test_a_lineage_under_the_key_of_the_build_before_is_a_floor(
    publication: Publication, bus: Any
) -> None:
    bus.set("e:{commit}:lineage", 6)
    assert Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA).lineage == 7
    assert Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA).lineage == 8


def test_a_name_that_is_none_for_the_bus_is_refused(publication: Publication, bus: Any) -> None:
    with pytest.raises(BusError, match=r"model 'a\}b': a name on the bus has no braces"):
        Publisher(publication, bus=bus.url, model="a}b", schema_id=SCHEMA)


def test_the_newest_version_is_looked_up_once_the_lineage_is_taken(
    publication: Publication, bus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    publish(old, 1)
    take = Bus.take_lineage

    def slowly(self: Bus, floor: int) -> int:
        publish(old, 2)  # while the new one starts
        return take(self, floor)

    monkeypatch.setattr(Bus, "take_lineage", slowly)
    assert Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA).newest == (2, 1)


def test_a_superseded_publisher_stops_before_it_writes(publication: Publication, bus: Any) -> None:
    old = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    publish(old, 1)
    new = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    entries = {key: bus.xlen(key) for key in bus.keys("e:*}:?:*")}
    with pytest.raises(SupersededError, match="lineage 2 has taken over from 1"):
        publish(old, 2)
    assert publication.versions() == [VersionId(1, 1)]
    assert {key: bus.xlen(key) for key in bus.keys("e:*}:?:*")} == entries
    publish(new, 2)
    assert commits(bus) == [(2, 2)]  # the rows of the one before are not kept


def test_a_publisher_that_is_superseded_while_it_sends_never_commits(
    publication: Publication, bus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    publish(old, 1)
    send = Bus.send

    def late(self: Bus, *message: Any) -> bool:
        # Its lineage was checked; now another one starts.
        Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
        return send(self, *message)

    monkeypatch.setattr(Bus, "send", late)
    with pytest.raises(SupersededError, match="taken over from 1"):
        publish(old, 2)
    assert commits(bus) == [(1, 1)]


def test_a_bus_emptied_while_a_version_is_sent_does_not_end_its_publisher(
    publication: Publication, bus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by chaos: the trainer was told that another one had taken over, and ended.
    publisher = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    publish(publisher, 1)
    send = Bus.send

    def emptied(self: Bus, *message: Any) -> bool:
        bus.flushall()  # the lineage was checked just before
        return send(self, *message)

    with monkeypatch.context() as patched:
        patched.setattr(Bus, "send", emptied)
        publish(publisher, 2)
    assert int(bus.get(LINEAGE)) == publisher.lineage
    publish(publisher, 3)
    assert commits(bus) == [(2, publisher.lineage), (3, publisher.lineage)]


def test_redis_that_went_back_to_an_older_copy_is_told_the_lineage(
    publication: Publication, bus: Any
) -> None:
    bus.set(LINEAGE, 6)
    publisher = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    bus.set(LINEAGE, 3)
    publish(publisher, 1)
    assert int(bus.get(LINEAGE)) == publisher.lineage == 7
    assert commits(bus) == [(1, 7)]


def test_redis_that_lost_everything_is_told_the_lineage(publication: Publication, bus: Any) -> None:
    publisher = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    publish(publisher, 1)
    bus.flushall()
    publish(publisher, 2)
    assert int(bus.get(LINEAGE)) == 1
    assert commits(bus) == [(2, 1)]
    # From the newest that the files have, so that a node sees what it lacks.
    commit = update_pb2.GlobalCommit.FromString(bus.xrange(LOG)[0][1][b"m"])
    assert VersionId.of(commit.previous) == (1, 1)
    assert publisher.stats.bus_failures == 0
    assert publisher.stats.bus_emptied == 1


# --- room on the bus ------------------------------------------------------------------------------


def versions_in(bus: Any, pattern: str = f"e:{{{MODEL}:*}}:?:*") -> set[int]:
    """The versions that the streams of rows hold."""
    return {
        int(entry_id.split(b"-")[0]) for key in bus.keys(pattern) for entry_id, _ in bus.xrange(key)
    }


def note(bus: Any, name: str, number: int, expires_ms: int = 60_000) -> None:
    """Say, as a node does, what it has applied."""
    bus.sadd(f"e:{{{MODEL}:commit}}:nodes", name)
    bus.set(f"e:{{{MODEL}:commit}}:node:{name}", number, px=expires_ms)


def test_rows_stay_until_the_slowest_live_node_has_them(publication: Publication, bus: Any) -> None:
    publisher = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    for number in range(1, 5):
        publish(publisher, number)
    assert versions_in(bus) == {1, 2, 3, 4}
    note(bus, "fast", 4)
    note(bus, "slow", 2)
    publish(publisher, 5)
    assert versions_in(bus) == {3, 4, 5}
    assert [version.number for version in commits(bus)] == [3, 4, 5]
    note(bus, "slow", 3, expires_ms=1)  # it goes away
    while bus.exists(f"e:{{{MODEL}:commit}}:node:slow"):
        pass
    publish(publisher, 6, rows([1], 6))  # of one bucket
    assert versions_in(bus) == {5, 6}
    assert bus.smembers(f"e:{{{MODEL}:commit}}:nodes") == {b"fast"}
    assert publisher.stats.bus_trimmed_early == 0


def test_the_bus_keeps_to_its_budget_whatever_nodes_lack(
    publication: Publication, bus: Any
) -> None:
    # Before, streams were trimmed by their number of entries alone: 256 MiB of each bucket.
    publisher = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA, bus_bytes=50_000)
    note(bus, "slow", 0)
    for number in range(1, 21):
        publish(publisher, number, rows(list(range(400)), number))
    held = sum(len(f[b"m"]) for key in bus.keys("e:*}:?:*") for _, f in bus.xrange(key))
    assert 25_000 < held < 50_000
    assert max(versions_in(bus)) == 20
    assert publisher.stats.bus_trimmed_early == 20 - len(versions_in(bus))
    publish(publisher, 21, rows(list(range(4000)), 21))  # larger than the budget
    assert commits(bus)[-1] == (21, 1)
    assert 21 not in versions_in(bus)
    assert publisher.stats.bus_commits_alone == 1
    assert sum(batch.rows for batch in publication.read_batches(VersionId(21, 1))) == 4000


@pytest.fixture
def full(bus: Any) -> Iterator[Any]:
    """A Redis that refuses to grow beyond what `fill` leaves of it."""

    def fill(room: int) -> None:
        bus.config_set("maxmemory", bus.info("memory")["used_memory"] + room)

    bus.config_set("maxmemory-policy", "noeviction")
    bus.fill = fill
    yield bus
    bus.config_set("maxmemory", 0)


def test_a_full_redis_is_trimmed_and_heals_by_itself(publication: Publication, full: Any) -> None:
    # Before, every version from the first that was refused on went out by files.
    publisher = Publisher(publication, bus=full.url, model=MODEL, schema_id=SCHEMA)
    full.fill(200_000)
    for number in range(1, 41):
        publish(publisher, number, rows(list(range(400)), number))
        assert commits(full)[-1] == (number, 1)
    stats = publisher.stats
    assert stats.bus_full > 0
    assert stats.bus_failures == 0
    assert stats.bus_commits_alone <= stats.bus_full < 15
    assert len(versions_in(full)) > 1
    assert len(publication.deltas()) == 40


def test_a_redis_that_others_have_filled_gets_commits_alone(
    publication: Publication, full: Any
) -> None:
    publisher = Publisher(publication, bus=full.url, model=MODEL, schema_id=SCHEMA)
    publish(publisher, 1)
    full.set("others", b"x" * 20_000_000)
    full.fill(-10_000_000)
    publish(publisher, 2)
    publish(publisher, 3)
    assert [version.number for version in commits(full)][-1] == 3
    assert versions_in(full) == set()
    assert publisher.stats.bus_commits_alone == 2
    full.delete("others")
    publish(publisher, 4)
    assert versions_in(full) == {4}


def test_a_trainer_takes_its_lineage_when_redis_is_full(
    publication: Publication, full: Any
) -> None:
    # Before: BusError, "Redis cannot be used: command not allowed when used memory > 'maxmemory'".
    full.set("others", b"x" * 20_000_000)
    full.set(LINEAGE, 4)
    full.fill(-10_000_000)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        full.set("more", b"x")
    publisher = Publisher(publication, bus=full.url, model=MODEL, schema_id=SCHEMA)
    assert publisher.lineage == 5
    full.delete(LINEAGE)
    publish(publisher, 1)
    assert int(full.get(LINEAGE)) == 5


def test_nodes_hear_of_a_promotion_when_redis_is_full(publication: Publication, full: Any) -> None:
    record = promotion_record(publication, bus=full.url, model=MODEL)
    publish(Publisher(publication, bus=full.url, model=MODEL, schema_id=SCHEMA), 1)
    full.set("others", b"x" * 20_000_000)
    full.fill(-10_000_000)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        full.set("more", b"x")
    record.promote(1, by="test", revision=0)
    assert record.mirror_failures == 0
    assert full.get(Keys(MODEL).promoted) == record.read().encode()


def test_newer_rows_of_a_superseded_publisher_do_not_stay_in_the_way(
    publication: Publication, bus: Any
) -> None:
    publisher = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    publish(publisher, 1)
    stream = f"e:{{{MODEL}:0}}:0:0"
    bus.xadd(stream, {"m": b"late"}, id="9-1")
    bus.xadd(LOG, {"m": b"late"}, id="9-1")
    publish(publisher, 2)
    assert [entry_id for entry_id, _ in bus.xrange(stream)] == [f"2-{1 << 32}".encode()]
    assert commits(bus) == [(2, 1)]
    assert publisher.stats.bus_failures == 0


def test_a_publisher_that_starts_clears_the_streams_of_the_one_before(
    publication: Publication, bus: Any
) -> None:
    publish(Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA), 1)
    other = "e:{other:0}:0:0"
    bus.xadd(other, {"m": b"of another model"})
    new = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    publish(new, 2)
    assert versions_in(bus) == {2}
    assert bus.xlen(other) == 1


def test_a_redis_that_hangs_does_not_hold_up_every_version(
    publication: Publication, bus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before, each version waited for the client's five seconds.
    publisher = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    now, asked = 100.0, 0

    def hang(self: Bus, lineage: int) -> int:
        nonlocal now, asked
        now, asked = now + 5.0, asked + 1
        raise redis.TimeoutError("no answer")

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(Bus, "hold_lineage", hang)
    publish(publisher, 1)
    publish(publisher, 2)
    assert (asked, publisher.stats.bus_failures) == (1, 2)
    now += 5.1
    publish(publisher, 3)
    assert (asked, publisher.stats.bus_failures) == (2, 3)


def test_memory_of_a_version_does_not_grow_with_it(publication: Publication, bus: Any) -> None:
    # Before: 78 MB for a version of 40 MB.
    publisher = Publisher(publication, bus=bus.url, model=MODEL, schema_id=SCHEMA)
    publish(publisher, 1)
    (table, _, records), *_ = rows(list(range(2000)), 1.0)
    repeats = 1_000_000 // len(records)

    def changes() -> Iterator[Change]:
        for each in range(4, 44):  # buckets of a MB each
            yield table, each, records * repeats

    tracemalloc.start()
    try:
        publisher.publish(2, watermark_ms=20, changes=changes(), dense=dense_tensors(2))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(each.delta_bytes for each in publication.read_commit(VersionId(2, 1)).partitions)
    assert size > 38_000_000
    assert peak < 16_000_000


# --- the folder's lock ----------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from embertide.trainer.publish.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_two_trainers_without_a_bus_exclude_each_other(publication: Publication) -> None:
    # Before, both took the same lineage and wrote versions over each other.
    command = [sys.executable, "-c", HOLD, str(publication.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        expected = rf"published to by pid {other.pid} on .*: stop that trainer"
        with pytest.raises(LockedError, match=expected):
            Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
        other.kill()
        other.wait()
    assert Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA).lineage == 1


def test_publishers_of_one_process_share_the_lock(publication: Publication) -> None:
    first = FolderLock(publication.path)
    second = FolderLock(publication.path)
    del first
    command = [sys.executable, "-c", HOLD, str(publication.path)]
    refused = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert b"LockedError" in refused.stderr
    del second
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        other.kill()


# --- Redis away -----------------------------------------------------------------------------------


def test_without_redis_versions_go_on_by_files_and_are_counted(
    publication: Publication, tmp_path: Path
) -> None:
    options = RedisOptions(log=tmp_path / "redis.log")
    server = RedisServer(options)
    publisher = Publisher(publication, bus=server.url, model=MODEL, schema_id=SCHEMA)
    publish(publisher, 1)
    server.process.kill()
    began = time.monotonic()
    for number in (2, 3, 4):
        publish(publisher, number)
    assert publisher.stats.bus_failures == 3
    assert time.monotonic() - began < 2, "a version waits for a Redis that is away"
    assert [v.number for v in publication.deltas()] == [1, 2, 3, 4]
    with RedisServer(options), redis.Redis.from_url(options.url) as client:  # it comes back empty
        publish(publisher, 5)
        assert commits(client) == [(5, 1)]
        assert int(client.get(LINEAGE)) == 1
        assert publisher.stats.bus_failures == 3
        assert publisher.stats.versions == 5


def test_redis_lost_between_check_and_send_costs_freshness_alone(
    publication: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RedisServer(RedisOptions(log=tmp_path / "redis.log"))
    publisher = Publisher(publication, bus=server.url, model=MODEL, schema_id=SCHEMA)
    note: Callable[..., None] = Publication.note

    def then_lost(self: Publication, *args: Any, **kwargs: Any) -> None:
        server.process.kill()
        note(self, *args, **kwargs)

    monkeypatch.setattr(Publication, "note", then_lost)
    assert publish(publisher, 1) in publication.deltas()
    assert publisher.stats.bus_failures == 1


def test_a_redis_that_is_not_there_at_the_start_is_refused_without_its_password(
    publication: Publication,
) -> None:
    (port,) = process.free_ports(1)
    with pytest.raises(BusError, match=f"127.0.0.1:{port} cannot be reached") as caught:
        Publisher(
            publication, bus=f"redis://me:hush@127.0.0.1:{port}/0", model=MODEL, schema_id=SCHEMA
        )
    assert "hush" not in str(caught.value)
    assert not os.path.lexists(publication.path)


def test_rows_sent_after_a_checkpoint_are_owed(publication: Publication) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    for number, keys in ((1, [1]), (2, [2, 3]), (3, [3]), (4, [])):
        publish(publisher, number, rows(keys, number))
    owed = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA).owed(since=1)
    sent = {
        (table, int(key))
        for (table, _), batches in owed.batches.items()
        for batch in batches
        for key in _store.record_keys(TABLES[table].layout, batch.records)
    }
    assert sent == {(0, 2), (0, 3)}
    assert not owed.damaged
    later = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA).owed(since=4)
    assert not later.batches


@pytest.mark.parametrize("file", ["p-*.delta", "commit.pb"])
def test_what_a_damaged_file_held_is_owed_by_its_partition(
    publication: Publication, file: str
) -> None:
    publisher = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA)
    for number in (1, 2, 3):
        publish(publisher, number, rows([number], number))
    (path,) = (publication.path / "deltas" / VersionId(2, 1).folder).glob(file)
    flip_byte(path, 20)
    owed = Publisher(publication, bus=None, model=MODEL, schema_id=SCHEMA).owed(since=0)
    assert [batch.version for batches in owed.batches.values() for batch in batches] == [1, 3]
    assert owed.damaged == (set(range(64)) if file == "commit.pb" else {int(path.name[2:4])})


# --- what requests carry --------------------------------------------------------------------------


def test_a_manifest_names_the_users_columns_where_the_model_does(tmp_path: Path) -> None:
    model = criteo()
    context = (model.features[0].name, model.dense[0].name)
    for name, of in (("without", model), ("with", dataclasses.replace(model, context=context))):
        info = SnapshotInfo.of(of, lineage=1, version=1, watermark_ms=1)
        write_snapshot(tmp_path / name, info, [], [])
    manifest = read_manifest(tmp_path / "with")
    assert manifest.pop("context") == list(context)
    # A node looks for a column of DENSE by its name.
    assert manifest.pop("dense_names") == list(model.raw_columns)
    assert manifest == read_manifest(tmp_path / "without")


def test_a_manifest_keeps_the_former_layouts(tmp_path: Path) -> None:
    made = PRESETS["news-history"]()  # nodes make its sequence
    former = former_layouts(criteo(), made, [])
    assert [(len(each.keys), len(each.dense)) for each in former] == [(20, 2), (10, 0)]
    info = SnapshotInfo.of(criteo(), lineage=1, version=1, watermark_ms=1, former=former)
    write_snapshot(tmp_path / "snapshot", info, [], [])
    manifest = read_manifest(tmp_path / "snapshot")
    assert manifest["dense_names"] == list(info.dense_names)
    assert read_former(tmp_path / "snapshot") == former
    assert former_layouts(made, made, former) == ()


def test_a_manifest_lists_the_newest_former_layouts() -> None:
    model = PRESETS["news"]()
    listed = [Layout(keys=(f"was{n}",), dense=()) for n in range(MAX_FORMER)]
    own = layouts(criteo())
    assert former_layouts(model, criteo(), listed) == (*own, *listed[:-1])
