"""Requests to the nodes all the time, and the verdict on every answer.

An answer states its version, its watermark and where each key's row came from. It is right if, by
the replay of the log, each row is that of the stated version, a key that the node could not ask
for says so, and no client sees a node's versions go back.
"""

import collections
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from embertide._common import kserve
from embertide.server.cli.chaos.options import ChaosOptions
from embertide.server.cli.chaos.replay import Replay

MODEL = "lookup"
SOURCE_DEFAULT, SOURCE_PRUNED, SOURCE_UNANSWERED = 4, 5, 6
_UNKNOWN_SHARE = 0.05  # of the keys that are asked for
_DEADLINE_S = 5.0
_FAILED_PAUSE_S = 0.05
_VIOLATIONS_KEPT = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A request and what became of it; times are of the monotonic clock."""

    node: int
    sent_s: float
    took_s: float
    failure: str = ""  # gRPC's code; empty: it was answered
    version: int = 0
    keys: int = 0
    degraded: int = 0  # keys that the node could not ask for, and said so
    reason: str = ""  # of a failure


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A node's answer."""

    version: int
    rows: bytes
    sources: bytes
    parameters: dict[str, Any]


Keys = Sequence[Sequence[int | None]]
"""For each sample, a key per feature, as the log has them; None: the feature has none."""


def _tensors(keys_BF: Keys) -> dict[str, Any]:
    flat = [key for keys_F in keys_BF for key in keys_F]
    held = np.array([key for key in flat if key is not None], np.uint64).view(np.int64)
    if len(held) == len(flat):
        return {"KEYS": held.reshape(len(keys_BF), -1)}
    lengths = np.array([[key is not None for key in flat]], np.int32)
    return {"KEYS": held.reshape(1, -1), "LENGTHS": lengths}


def ask(line: kserve.Line, keys_BF: Keys, deadline_s: float = _DEADLINE_S) -> Answer:
    """Ask a node for the rows of keys.

    Raises:
        CallError: It did not answer; the status says why.
    """
    names = ("EMBEDDING", "SOURCE", "VERSION")
    request = kserve.infer_request(MODEL, _tensors(keys_BF), names, timeout_s=deadline_s)
    response = line.infer(request, deadline_s)
    arrays = kserve.arrays_of(response)
    return Answer(
        version=int(arrays["VERSION"].reshape(-1)[0]),
        rows=arrays["EMBEDDING"].tobytes(),
        sources=arrays["SOURCE"].tobytes(),
        parameters=kserve.parameters_of(response),
    )


def faults_of(replay: Replay, keys_BF: Keys, answer: Answer) -> tuple[list[str], int]:
    """Return what is wrong with an answer, in words, and how many keys were not answered for."""
    version = answer.version
    if version > replay.newest:
        replay.advance()
    commit = replay.commits.get(version)
    if commit is None:
        return [f"version {version} was never published"], 0
    wrong, unanswered = [], 0
    watermark_ms = int(answer.parameters.get("watermark_ms", -1))
    if watermark_ms != commit.watermark_ms:
        wrong.append(f"version {version} has watermark {watermark_ms}, not {commit.watermark_ms}")
    for name in ("version", "staleness_ms", "node"):
        if name not in answer.parameters:
            wrong.append(f"the answer of version {version} does not state {name}")
    features = list(zip(replay.features, [4 * dim for dim in replay.dims()], strict=True))
    at, sources = 0, iter(answer.sources)
    for keys_F in keys_BF:
        for (table, size), key in zip(features, keys_F, strict=True):
            got, at = answer.rows[at : at + size], at + size
            if key is None:
                continue
            source = next(sources)
            fault = _row_fault(replay, (table, key, version), got, source)
            if fault:
                wrong.append(f"key {key} of {replay.tables()[table]} at {version}: {fault}")
            unanswered += source == SOURCE_UNANSWERED
    if int(answer.parameters.get("degraded_keys", unanswered)) != unanswered:
        said = answer.parameters["degraded_keys"]
        wrong.append(f"{unanswered} keys were not answered for, degraded_keys says {said}")
    return wrong, unanswered


def _row_fault(replay: Replay, at: tuple[int, int, int], got: bytes, source: int) -> str:
    """Return what is wrong with what a node gave for (table, key, version); empty: nothing."""
    row = replay.row(*at)
    if source == SOURCE_UNANSWERED:
        row = None
    elif (row is None) != (source in (SOURCE_DEFAULT, SOURCE_PRUNED)):
        return f"{'no' if row is None else 'a'} row, and source {source}"
    want = replay.default(at[0]) if row is None else row
    if got == want or np.array_equal(np.frombuffer(got, "<f4"), np.frombuffer(want, "<f4")):
        return ""
    return f"the values of another row, source {source}"


def draw_keys(replay: Replay, rng: random.Random, samples: int) -> Keys:
    """Draw keys of all features: most have, or had, a row; some are unknown."""
    known_F = [replay.keys(table) for table in replay.features]
    return [
        [
            known[int(rng.random() * len(known))]
            if known and rng.random() > _UNKNOWN_SHARE
            else rng.getrandbits(64)
            for known in known_F
        ]
        for _ in range(samples)
    ]


def every_key(replay: Replay, samples: int) -> Iterator[Keys]:
    """Yield questions of so many samples that ask for each key of the log once."""
    columns: list[list[int]] = []
    for f, table in enumerate(replay.features):
        first = replay.features.index(table) == f  # features may share a table
        columns.append(list(replay.keys(table)) if first else [])
    for begin in range(0, max(map(len, columns)), samples):
        parts = [column[begin : begin + samples] for column in columns]
        yield list(itertools.zip_longest(*parts))


class Client(threading.Thread):
    """One client of one node."""

    def __init__(
        self, node: int, address: str, replay: Replay, *, seed: int, options: ChaosOptions
    ) -> None:
        """Prepare; `start` begins to ask."""
        super().__init__(daemon=True)
        self.node = node
        self._line = kserve.Line(address)
        self._replay, self._rng = replay, random.Random(seed)
        self._options = options
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._asked: list[Asked] = []
        self._violations: list[str] = []
        self.last: Asked | None = None
        self.error: Exception | None = None
        self._version = 0

    def run(self) -> None:
        """Ask until told to stop."""
        try:
            while not self._ended.is_set():
                asked = self._ask()
                with self._lock:
                    self._asked.append(asked)
                    self.last = asked
                self._ended.wait(_FAILED_PAUSE_S if asked.failure else self._options.pause_s)
        except Exception as error:
            self.error = error
        finally:
            self._line.close()

    def _ask(self) -> Asked:
        keys_BF = draw_keys(self._replay, self._rng, self._options.samples)
        sent_s = time.monotonic()
        try:
            answer = ask(self._line, keys_BF, self._options.deadline_s)
        except kserve.CallError as error:
            took_s = time.monotonic() - sent_s
            return Asked(self.node, sent_s, took_s, error.status, reason=error.details[:200])
        took_s = time.monotonic() - sent_s
        wrong, degraded = faults_of(self._replay, keys_BF, answer)
        if answer.version < self._version:
            wrong.append(f"version {answer.version} after {self._version}")
        self._version = max(answer.version, self._version)
        if wrong:
            with self._lock:
                said = [f"node-{self.node}: {each}" for each in wrong]
                self._violations += said[:_VIOLATIONS_KEPT]
        return Asked(
            self.node,
            sent_s,
            took_s,
            version=answer.version,
            keys=len(answer.sources),
            degraded=degraded,
        )

    def take(self) -> tuple[list[Asked], list[str]]:
        """Return what was asked and what was wrong since the last call."""
        with self._lock:
            asked, self._asked = self._asked, []
            wrong, self._violations = self._violations, []
        return asked, wrong

    def end(self) -> None:
        """Ask no more."""
        self._ended.set()


class Traffic:
    """All clients. A context manager that ends them."""

    def __init__(self, addresses: Sequence[str], replay: Replay, options: ChaosOptions) -> None:
        """Prepare the clients of every node."""
        self.clients = [
            Client(
                node,
                address,
                replay,
                seed=options.seed * 1000 + node * 100 + n,
                options=options,
            )
            for node, address in enumerate(addresses)
            for n in range(options.clients)
        ]

    def take(self) -> tuple[list[Asked], list[str]]:
        """Return what was asked, in order, and what was wrong since the last call.

        Raises:
            Exception: An error ended a client, which nothing should.
        """
        all_asked, all_wrong = [], []
        for each in self.clients:
            if each.error is not None:
                raise each.error
            asked, wrong = each.take()
            all_asked += asked
            all_wrong += wrong
        return sorted(all_asked, key=lambda each: each.sent_s), all_wrong

    def all_answer(self, since_s: float, accept: Callable[[Asked], bool]) -> bool:
        """Return whether the last request of every client was sent after a time and accepted."""
        lasts = [each.last for each in self.clients]
        return all(last is not None and last.sent_s > since_s and accept(last) for last in lasts)

    def __enter__(self) -> "Traffic":
        """Begin to ask."""
        for each in self.clients:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ask no more."""
        for each in self.clients:
            each.end()
        for each in self.clients:
            each.join()


def failures(asked: Sequence[Asked]) -> dict[str, int]:
    """Count failed requests by code."""
    return dict(collections.Counter(each.failure for each in asked if each.failure))
