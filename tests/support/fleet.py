"""Many nodes in one test: a model that changes by version and says what is right, node
processes, and plans written by hand.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import redis
from checker import CheckerNet, bucket_of, dense_tensors
from numpy.typing import NDArray
from waiting import wait_until

from embertide import _store
from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.config import FeatureConfig, ModelConfig, TableConfig
from embertide.trainer.embedding.store import store_table
from embertide.trainer.model.export import export_dense
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.publisher import Change, Publisher
from embertide.trainer.publish.snapshot import DensePart, SnapshotInfo, schema_id, write_snapshot
from embertide.v1 import node_pb2, node_pb2_grpc, plan_pb2

ROOT = Path(__file__).parents[2]
BINARY = ROOT / "build" / "cpp" / "embertide_node"
KEYS = 600
DIM = 4
CONFIG = ModelConfig(
    name="fleet",
    tables=(
        TableConfig(name="user", dim=DIM, bucket_bits=4),
        TableConfig(name="item", dim=DIM, bucket_bits=3),
        TableConfig(name="tag", dim=DIM),
    ),
    features=(
        FeatureConfig(name="user", table="user"),
        FeatureConfig(name="item", table="item"),
        FeatureConfig(name="history", table="item", pooling="mean"),
        FeatureConfig(name="tag", table="tag"),
    ),
)
TABLES = [store_table(table, i, 1) for i, table in enumerate(CONFIG.tables)]
TABLE_OF_FEATURE = [CONFIG.table_index(feature.table) for feature in CONFIG.features]
Rows = dict[tuple[int, int], NDArray[np.float32]]  # (table, key)
Lost = Set[tuple[int, int]]
NONE: Lost = frozenset()
Place = tuple[int, int]  # node, device


class Model:
    """Publishes versions of random rows, and keeps what each version is."""

    def __init__(
        self,
        folder: Path,
        bus: str | None,
        cache: Path,
        seed: int,
        net: CheckerNet | None = None,  # its weight is the version
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.publication = Publication(folder)
        program = self.publication.program
        export_dense(
            net or CheckerNet(1),
            program,
            dense_features=0,
            embedding_dim=len(CONFIG.features) * DIM,
            cache=cache,
        )
        info = SnapshotInfo.of(CONFIG, lineage=0, version=0, watermark_ms=0)
        self.publisher = Publisher(
            self.publication, bus=bus, model=CONFIG.name, schema_id=schema_id(info, TABLES)
        )
        rows: Rows = {
            (t, key): self._values()
            for t in range(len(TABLES))
            for key in range(KEYS)
            if self.rng.random() < 0.8
        }
        self.versions: dict[int, Rows] = {1: rows}
        self.snapshot(1)
        self.publisher.adopt(1, watermark_ms=1, dense=dense_tensors(1))

    def _values(self) -> NDArray[np.float32]:
        return self.rng.standard_normal(DIM).astype(np.float32)

    @property
    def newest(self) -> int:
        return max(self.versions)

    def _records(self, table: int, keys: Sequence[int], rows: Rows) -> bytes:
        layout = TABLES[table].layout
        out = []
        for key in sorted(keys):
            values = rows.get((table, key))
            if values is None:
                out.append(_store.encode_record(key, 0, 1, b""))  # pruned
            else:
                payload = _store.encode_payload(layout, 1, values)
                out.append(_store.encode_record(key, 1, 0, payload))
        return b"".join(out)

    def _changes(self, keys: set[tuple[int, int]], rows: Rows) -> list[Change]:
        by_bucket: dict[tuple[int, int], list[int]] = {}
        for table, key in keys:
            by_bucket.setdefault((table, bucket_of(TABLES[table], key)), []).append(key)
        return [
            (TABLES[table], bucket, self._records(table, each, rows))
            for (table, bucket), each in sorted(by_bucket.items())
        ]

    def snapshot(self, version: int, *, into: Path | None = None, without: Lost = NONE) -> None:
        """Write a version as a snapshot; elsewhere and without some rows if that is wanted."""
        lineage = self.publisher.lineage
        rows = {at: row for at, row in self.versions[version].items() if at not in without}
        every = {
            (t, b): (table, b, b"")
            for t, table in enumerate(TABLES)
            for b in range(1 << table.bucket_bits)
        }
        for table, bucket, records in self._changes(set(rows), rows):
            every[table.id, bucket] = (table, bucket, records)
        info = SnapshotInfo.of(CONFIG, lineage=lineage, version=version, watermark_ms=version)
        part = DensePart(
            program=self.publication.program, cpu="x86-64-v3", tensors=dense_tensors(version)
        )
        path = into or self.publication.snapshot_path(VersionId(version, lineage))
        write_snapshot(path, info, TABLES, list(every.values()), part)

    def publish(self, changed: int = 60) -> int:
        """Publish the next version: some rows new or changed, some pruned."""
        version, rows = self.newest + 1, dict(self.versions[self.newest])
        keys = {
            (int(self.rng.integers(len(TABLES))), int(self.rng.integers(KEYS)))
            for _ in range(changed)
        }
        for key in keys:
            if self.rng.random() < 0.15:
                rows.pop(key, None)
            else:
                rows[key] = self._values()
        # Known before it is out: a node may answer by it at once.
        self.versions[version] = rows
        self.publisher.publish(
            version,
            watermark_ms=version,
            changes=self._changes(keys, rows),
            dense=dense_tensors(version),
        )
        return version

    def draw(self, rng: np.random.Generator, samples: int) -> list[list[int]]:
        """Bags of keys, some unknown, sample-major."""
        lengths = rng.choice([0, 1, 1, 1, 2, 3, 7], samples * len(CONFIG.features))
        return [[int(key) for key in rng.integers(0, KEYS + 50, n)] for n in lengths]

    def answer(
        self, version: int, bags: Sequence[Sequence[int]], lost: Lost = NONE
    ) -> NDArray[np.float32]:
        """Return the right answer: bags summed in float64, rounded once; `lost` rows are zeros."""
        rows, zero = self.versions[version], np.zeros(DIM, np.float32)
        if lost:
            rows = {at: row for at, row in rows.items() if at not in lost}
        out = []
        for b, bag in enumerate(bags):
            feature = b % len(CONFIG.features)
            table = TABLE_OF_FEATURE[feature]
            values = [rows.get((table, key), zero) for key in bag]
            if len(values) < 2:
                out.append(values[0] if values else zero)
                continue
            total = np.sum(values, axis=0, dtype=np.float64)
            if CONFIG.features[feature].pooling == "mean":
                total = total / len(bag)
            out.append(total.astype(np.float32))
        return np.concatenate(out)


def keys_of(bags: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Table and key of each key, in the order of a request."""
    tables = len(TABLE_OF_FEATURE)
    return [(TABLE_OF_FEATURE[b % tables], key) for b, bag in enumerate(bags) for key in bag]


def is_right(
    model: Model,
    bags: Sequence[Sequence[int]],
    answer: "node_pb2.ReadResponse",
    lost: Lost = NONE,
) -> bool:
    """Single keys bit for bit, sums within one unit in the last place."""
    got = np.array(answer.embeddings, np.float32)
    want = model.answer(answer.version.number, bags, lost)
    single = np.repeat([len(bag) <= 1 for bag in bags], DIM)
    off = np.abs(got - want)
    return bool(np.all(off[single] == 0) and np.all(off <= np.spacing(np.abs(want))))


class NodeProcess:
    """An embertide_node, and a client of it."""

    def __init__(self, name: str, port: int, log: Path, **options: Any) -> None:
        self.name, self.address = name, f"127.0.0.1:{port}"
        arguments = {"node": name, "peer_address": self.address, **options}
        command = [str(BINARY)]
        for option, value in arguments.items():
            command += [f"--{option.replace('_', '-')}", str(value)]
        self.process = Child(command, log=log)
        # One that is started again is to be found at once.
        backoff = ("initial_reconnect_backoff_ms", "min_reconnect_backoff_ms")
        options_of = [(f"grpc.{name}", 50) for name in (*backoff, "max_reconnect_backoff_ms")]
        self.channel = grpc.insecure_channel(self.address, options_of)
        self.stub = node_pb2_grpc.NodeServiceStub(self.channel)

    def read(self, bags: Sequence[Sequence[int]], timeout: float = 5.0) -> "node_pb2.ReadResponse":
        request = node_pb2.ReadRequest(
            keys=[key for bag in bags for key in bag], lengths=[len(bag) for bag in bags]
        )
        return self.stub.Read(request, timeout=timeout)

    def status(self) -> "node_pb2.NodeServiceGetStatusResponse":
        return self.stub.GetStatus(node_pb2.NodeServiceGetStatusRequest(), timeout=2.0)

    def acts_by(self, epoch: int) -> bool:
        """Whether it acts by the plan and holds all that the plan gives it."""
        try:
            status = self.status()
        except grpc.RpcError:
            return False
        held = status.counters["buckets_left"] == 0 and status.versions.newest.number > 0
        return status.plan_epoch >= epoch and held

    def reaches_all(self, nodes: int) -> bool:
        return self.status().counters["peers_alive"] == nodes - 1

    def stop(self) -> int:
        self.channel.close()
        return self.process.stop()


@dataclasses.dataclass
class PlanWriter:
    """Writes plans to the state store as the control plane would."""

    url: str
    nodes: Sequence[tuple[str, str]]  # name, address
    devices: int
    epoch: int = 0
    owners: dict[tuple[int, int], list[Place]] = dataclasses.field(default_factory=dict)
    joining: dict[tuple[int, int], Place] = dataclasses.field(default_factory=dict)
    leaving: dict[tuple[int, int], Place] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        places = [(n, d) for d in range(self.devices) for n in range(len(self.nodes))]
        for t, table in enumerate(TABLES):
            for b in range(1 << table.bucket_bits):
                self.owners[t, b] = [places[(t + b) % len(places)]]

    def plan(self) -> "plan_pb2.Plan":
        plan = plan_pb2.Plan(epoch=self.epoch)
        for table in TABLES:
            plan.tables.add(id=table.id, name=table.name, bucket_bits=table.bucket_bits, chunks=1)
        for name, address in self.nodes:
            node = plan.topology.nodes.add(name=name, address=address)
            for d in range(self.devices):
                device = node.devices.add(index=d, kind=plan_pb2.DEVICE_KIND_CPU)
                device.budgets.add(tier=plan_pb2.TIER_DDR, budget_bytes=1 << 28)
        for (t, b), owners in sorted(self.owners.items()):
            assignment = plan.assignments.add(table_id=t, bucket_begin=b, bucket_count=1)
            for n, d in owners:
                assignment.owners.add(node=n, device=d)
            for which, place in (("joining", self.joining), ("leaving", self.leaving)):
                if (t, b) in place:
                    n, d = place[t, b]
                    getattr(assignment, which).add(node=n, device=d)
        return plan

    def write(self) -> int:
        self.epoch += 1
        with redis.Redis.from_url(self.url) as client:
            client.set(f"c:{{{CONFIG.name}}}:plan:{self.epoch}", self.plan().SerializeToString())
            client.set(f"c:{{{CONFIG.name}}}:epoch", self.epoch)
        return self.epoch

    def move(self, moves: dict[tuple[int, int], Place]) -> Iterator[int]:
        """The four plans of some moves; each epoch is given once it is written."""
        sources = {which: self.owners[which][0] for which in moves}
        self.joining = dict(moves)
        yield self.write()
        self.joining = {}
        for which, target in moves.items():
            same_node = target[0] == sources[which][0]
            self.owners[which] = [target] if same_node else [sources[which], target]
            if same_node:
                self.leaving[which] = sources[which]
        yield self.write()
        for which, target in moves.items():
            self.owners[which], self.leaving[which] = [target], sources[which]
        yield self.write()
        self.leaving = {}
        yield self.write()


@dataclasses.dataclass
class FleetSite:
    """A Redis, a model and nodes that share it."""

    directory: Path
    url: str
    model: Model
    writer: PlanWriter
    options: dict[str, Any]
    nodes: list[NodeProcess] = dataclasses.field(default_factory=list)

    def start(self, n: int) -> NodeProcess:
        name, address = self.writer.nodes[n]
        log = self.directory / f"{name}.log"
        port = int(address.rpartition(":")[2])
        return NodeProcess(name, port, log, **self.options)

    def await_epoch(self, epoch: int, timeout_s: float = 20.0) -> None:
        """Wait until every node acts by a plan, and reaches all others."""
        peers = len(self.nodes)
        wait_until(lambda: all(node.acts_by(epoch) for node in self.nodes), timeout_s)
        wait_until(lambda: all(node.reaches_all(peers) for node in self.nodes), timeout_s)

    def __enter__(self) -> Self:
        epoch = self.writer.write()
        self.nodes = [self.start(n) for n in range(len(self.writer.nodes))]
        self.await_epoch(epoch)
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as stack:
            for node in self.nodes:
                stack.callback(node.stop)


@contextlib.contextmanager
def start_fleet(
    directory: Path, *, nodes: int, devices: int, seed: int, **options: Any
) -> Iterator[FleetSite]:
    """Start nodes of a new model; `options` are further ones of embertide_node."""
    ports = free_ports(nodes)
    with RedisServer(RedisOptions(log=directory / "redis.log")) as server:
        folder = directory / "publication"
        model = Model(folder, server.url, ROOT / "build" / "cache" / "dense", seed=seed)
        named = [(f"node-{n}", f"127.0.0.1:{p}") for n, p in enumerate(ports)]
        shared = {"publication": folder, "state": server.url, "bus": server.url}
        writer = PlanWriter(server.url, named, devices)
        of = {**shared, "devices": devices, **options}
        with FleetSite(directory, server.url, model, writer, of) as running:
            yield running
