"""Nodes that follow a run while it is killed, held to the versions of a run that was not.

Two nodes, one by the bus if there is one and one by files alone, are asked the same keys again and
again. Each answer names a version; its embeddings must be those of that version in the
uninterrupted run, byte for byte. A watcher reads every version that comes out in files.

A run that does not repeat byte for byte keeps all its versions. Answers are then held to its own
files, and the numbers and times of its versions to the uninterrupted run's.

Shapes: S samples, F features.
"""

import contextlib
import dataclasses
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
from killed_run import wait_until
from numpy.typing import NDArray

from bench.nodes import Node, start_nodes
from embertide import _store
from embertide.trainer.data.base import EventSource
from embertide.trainer.publish.folder import Publication, PublicationError, VersionId
from embertide.trainer.publish.snapshot import manifest_tables, read_manifest
from embertide.v1 import node_pb2

_SAMPLES = 32
_EVERY_S = 0.02
_FOLLOW_S = 120.0
_DEADLINE_S = 10.0
_STORE_BYTES = 256 << 20


class Reference:
    """The versions of an uninterrupted run that has kept all of them.

    Attributes:
        keys_SF: Keys that nodes are asked for; F is the manifest's columns.
        embeddings: By version number, the bytes of the right answer.
        commits: By version number, the watermark and the name of the dense tensors.
    """

    def __init__(self, publication: Publication, source: EventSource) -> None:
        """Read all versions; `source` is the stream that the run has learned."""
        self._source = source
        first = publication.snapshots()[0]
        manifest = read_manifest(publication.snapshot_path(first))
        tables = manifest_tables(manifest)
        ids = {table.name: t for t, table in tables.items()}
        self._table_F = [ids[feature["table"]] for feature in manifest["features"]]
        names = [feature["name"] for feature in manifest["features"]]
        self.keys_SF = _samples(source, names)
        store = _store.ServingStore(tables=list(tables.values()), ddr_budget_bytes=_STORE_BYTES)
        for fields in manifest["buckets"]:
            info = _store.BucketFileInfo(**fields)
            t = ids[info.table]
            path = publication.snapshot_path(first)
            records = _store.read_bucket_file(str(path), tables[t], info)
            store.stage_records(first.number, t, info.bucket, records)
        store.commit(first.number)
        self.embeddings = {first.number: self._lookup(store)}
        self.commits: dict[int, tuple[int, str]] = {}
        for version in publication.deltas():
            for batch in publication.read_batches(version):
                store.stage_records(version.number, batch.table_id, batch.bucket, batch.records)
            store.commit(version.number)
            self.embeddings[version.number] = self._lookup(store)
            self.commits[version.number] = _commit(publication, version)

    def of(self, publication: Publication) -> "Reference":
        """Return that of another run of the stream, which has kept all its versions.

        Versions have the times of this one: one of another time was published otherwise.
        """
        own = Reference(publication, self._source)
        for number, (watermark_ms, _) in self.commits.items():
            own.commits[number] = (watermark_ms, own.commits.get(number, (0, ""))[1])
        return own

    def _lookup(self, store: _store.Store) -> bytes:
        columns = [
            store.lookup(t, np.ascontiguousarray(self.keys_SF[:, f]))[0]
            for f, t in enumerate(self._table_F)
        ]
        return np.concatenate(columns, axis=1).tobytes()

    def request(self) -> node_pb2.ReadRequest:
        """Return the request for all keys."""
        samples, features = self.keys_SF.shape
        return node_pb2.ReadRequest(
            keys=self.keys_SF.astype(np.uint64).reshape(-1).tolist(),
            lengths=[1] * (samples * features),
        )


def _samples(source: EventSource, names: list[str]) -> NDArray[np.int64]:
    """Return keys of events from all over the stream; those of the first sample no event has."""
    batches = list(source.batches(batch_size=4096))
    keys_BF = np.concatenate([batch.keys_BF for batch in batches])
    rng = np.random.default_rng(1)
    keys_SF = keys_BF[np.sort(rng.choice(len(keys_BF), _SAMPLES, replace=False))]
    columns = {each.name: keys_SF[:, f] for f, each in enumerate(source.schema.features)}
    # Columns of a sequence hold articles.
    column_F = [columns.get(name, rng.permutation(columns["cand"])) for name in names]
    keys_SF = np.stack(column_F, axis=1)
    keys_SF[0] = rng.integers(1 << 40, 1 << 62, len(names))
    return keys_SF


def _commit(publication: Publication, version: VersionId) -> tuple[int, str]:
    commit = publication.read_commit(version).commit
    return commit.watermark_ms, commit.dense_id


@dataclasses.dataclass(slots=True)
class Findings:
    """The observations of followers.

    Attributes:
        answers: The number of answers that were looked at.
        versions: Numbers that answers named.
        mixed: Answers that were not those of the version that they named.
        mixed_at: The numbers that these named.
        unknown: Answers that named a version which the uninterrupted run does not have.
        back: Answers of an older version than the one before.
        published: Numbers of versions that came out in files.
        published_otherwise: Those with another watermark or dense net, or that came out twice.
        lost: Versions of the uninterrupted run that never came out.
        failures: Requests that failed, in words.
    """

    answers: int = 0
    versions: set[int] = dataclasses.field(default_factory=set)
    mixed: int = 0
    mixed_at: set[int] = dataclasses.field(default_factory=set)
    unknown: int = 0
    back: int = 0
    published: set[int] = dataclasses.field(default_factory=set)
    published_otherwise: int = 0
    lost: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: "Findings") -> None:
        """Add those of another run."""
        for field in dataclasses.fields(self):
            mine, its = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, mine | its if isinstance(mine, set) else mine + its)


class _Repeated(threading.Thread):
    """Looks at something again and again, until `ending` is set."""

    def __init__(self, reference: Reference, ending: threading.Event) -> None:
        super().__init__(daemon=True)
        self.findings = Findings()
        self.reference = reference
        self._ending = ending

    def run(self) -> None:
        while not self._ending.wait(_EVERY_S):
            self.look()

    def look(self) -> None:
        raise NotImplementedError

    def judge(self, reference: Reference) -> None:
        """Complete the findings by what is right."""
        raise NotImplementedError


class _Asker(_Repeated):
    """Asks a node for all keys."""

    def __init__(self, node: Node, reference: Reference, ending: threading.Event) -> None:
        super().__init__(reference, ending)
        self.last = 0
        self._answers: Counter[tuple[int, bytes]] = Counter()
        self._node = node
        self._request = reference.request()

    def look(self) -> None:
        try:
            self._check(self._node.stub.Read(self._request, timeout=_DEADLINE_S))
        except grpc.RpcError as error:
            self.findings.failures.append(str(error))

    def _check(self, answer: node_pb2.ReadResponse) -> None:
        number = answer.version.number
        embeddings = np.array(answer.embeddings, np.float32).tobytes()
        self._answers[number, hashlib.sha256(embeddings).digest()] += 1
        self.findings.answers += 1
        self.findings.versions.add(number)
        self.findings.back += number < self.last
        self.last = number

    def judge(self, reference: Reference) -> None:
        for (number, digest), count in self._answers.items():
            right = reference.embeddings.get(number)
            if right is None:
                self.findings.unknown += count
            elif digest != hashlib.sha256(right).digest():
                self.findings.mixed += count
                self.findings.mixed_at.add(number)


class _Watcher(_Repeated):
    """Looks at each version when it comes out in files; pruned ones may be gone soon."""

    def __init__(
        self, publication: Publication, reference: Reference, ending: threading.Event
    ) -> None:
        super().__init__(reference, ending)
        self._publication = publication
        self._seen: dict[VersionId, tuple[int, str]] = {}

    def look(self) -> None:
        for version in self._publication.deltas():
            if version in self._seen:
                continue
            with contextlib.suppress(PublicationError):  # it went meanwhile
                self._seen[version] = _commit(self._publication, version)

    def judge(self, reference: Reference) -> None:
        findings = self.findings
        for version, commit in self._seen.items():
            again = version.number in findings.published
            other = reference.commits.get(version.number) != commit
            findings.published_otherwise += again or other
            findings.published.add(version.number)
        findings.lost = len(reference.commits.keys() - findings.published)


@contextlib.contextmanager
def following(
    folder: Path,
    publication: Publication,
    reference: Reference,
    bus: str | None,
    *,
    repeats: bool = True,
) -> Iterator[Findings]:
    """Have nodes follow a publication; the findings are complete when the context ends.

    Args:
        folder: Folder of the nodes.
        publication: The publication of the run.
        reference: The versions of an uninterrupted run.
        bus: URL of Redis.
        repeats: Whether the run's versions are those of the uninterrupted one.

    Raises:
        BenchError: A node does not start, or does not come to the last version.
    """
    findings, ending = Findings(), threading.Event()
    threads: list[_Repeated] = [watcher := _Watcher(publication, reference, ending)]

    def join() -> None:
        ending.set()
        for thread in threads:
            thread.join()

    with contextlib.ExitStack() as stack:
        watcher.start()
        stack.callback(join)
        wait_until(lambda: bool(publication.snapshots()), "the first snapshot", _FOLLOW_S)
        askers = []
        for name, url in (("bus", bus), ("files", None)):
            (node,) = stack.enter_context(start_nodes(folder / name, publication.path, 1, bus=url))
            askers.append(_Asker(node, reference, ending))
            threads.append(askers[-1])
            askers[-1].start()
            stack.callback(join)  # before the node ends
        yield findings
        newest = publication.versions()[-1].number
        wait_until(
            lambda: all(asker.last >= newest for asker in askers),
            f"the nodes to answer at version {newest}",
            _FOLLOW_S,
        )
        join()
        watcher.look()
        right = reference if repeats else reference.of(publication)
        for thread in threads:
            thread.judge(right)
            findings.add(thread.findings)
