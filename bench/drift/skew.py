"""Eight nodes and keys that everybody reads: how even the nodes' work is, by itself.

Each node owns an eighth of a table and is asked for an eighth of all reads. The work of a node is
the keys that it looks up: for its own requests, for peers, and in copies. Two streams, each against
nodes that keep copies of 1 % of the rows, and against nodes that keep none:

* one key gets a fifth of all reads, the other keys share the rest;
* a hundred keys get half of them, and from one moment on a hundred others do.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bench import models, report
from bench.drift.local import FOLDER
from bench.nodes import Node, publication_of, start_nodes
from bench.report import CONSOLE
from bench.servers import BUILD
from bench.shapes import SEED, Shape
from embertide.v1 import node_pb2

_NODES = 8
_SHAPE = Shape(name="skew", rows=200_000, tables=1, buckets=64)
_KEYS_A_REQUEST = 8  # few, as a key that stands twice in a request is asked for once
_WINDOW_S = 5.0
_WARM_WINDOWS = 2
_HOT_KEYS = 100
_ONE_KEY, _SWAPPED = 1.2, 1.15
_COUNTED = ("lookups_hbm", "lookups_ddr", "lookups_ssd", "lookups_default", "lookups_hot")


class Stream(threading.Thread):
    """Asks all nodes in turn, each for as many reads, until it is stopped."""

    def __init__(self, nodes: Sequence[Node], share: float, hot: NDArray[np.uint64]) -> None:
        """Give the `hot` keys a share of the reads; the others share the rest."""
        super().__init__(daemon=True)
        self.hot = hot
        self._nodes, self._share = nodes, share
        self._random = np.random.default_rng(SEED)
        self._ended = threading.Event()
        self.sent = self.failed = 0

    def run(self) -> None:
        """Send."""
        waiting = []
        while not self._ended.is_set():
            for node in self._nodes:
                keys_K = self._random.integers(0, _SHAPE.rows, _KEYS_A_REQUEST, np.uint64)
                hot_K = self._random.random(_KEYS_A_REQUEST) < self._share
                keys_K[hot_K] = self._random.choice(self.hot, int(hot_K.sum()))
                request = node_pb2.ReadRequest(lengths=[1] * _KEYS_A_REQUEST)
                request.keys.extend(keys_K.tolist())
                waiting.append(node.stub.Read.future(request, timeout=10))
                if len(waiting) > _NODES:
                    self._take(waiting.pop(0))

    def _take(self, answer: object) -> None:
        self.sent += 1
        self.failed += answer.exception() is not None  # type: ignore[attr-defined]

    def end(self) -> None:
        """Send no more."""
        self._ended.set()
        self.join()


def _work(nodes: Sequence[Node]) -> NDArray[np.int64]:
    return np.array([sum(node.status().counters[name] for name in _COUNTED) for node in nodes])


def _windows(nodes: Sequence[Node], count: int) -> Iterator[float]:
    """Yield max/mean of the nodes' work in windows that follow each other."""
    before = _work(nodes)
    for _ in range(count):
        time.sleep(_WINDOW_S)
        now = _work(nodes)
        work = now - before
        before = now
        yield float(work.max() / work.mean())


def _run(hot_rows: int, repetitions: int) -> dict[str, list[float]]:
    files = models.make(_SHAPE, BUILD)
    publication = publication_of(files.snapshot, FOLDER / "skew-publication")
    random = np.random.default_rng(SEED + 1)
    keys = random.permutation(_SHAPE.rows).astype(np.uint64)
    table = _SHAPE.config().tables[0].name
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(
            start_nodes(FOLDER / "skew", publication, _NODES, hot_rows={table: hot_rows})
        )

        def run(name: str, stream: Stream) -> None:
            stream.start()
            list(_windows(nodes, _WARM_WINDOWS))
            found[name] = list(_windows(nodes, repetitions))
            if name == "many":
                # Again and again, so that each window is one of the first two after a swap.
                found["swapped"] = []
                for swap in range(repetitions):
                    stream.hot = keys[(swap + 1) * _HOT_KEYS :][:_HOT_KEYS]
                    found["swapped"].append(list(_windows(nodes, 2))[-1])
            stream.end()
            CONSOLE.print(
                f"[dim]{hot_rows} hot rows, {name}: max/mean "
                + " ".join(f"{each:.3f}" for each in found[name] + found.get("swapped", []))
                + f"; {stream.sent:,} requests, {stream.failed} failed"
            )

        run("one", Stream(nodes, 0.2, keys[:1]))
        run("many", Stream(nodes, 0.5, keys[:_HOT_KEYS]))
    return found


def measure(repetitions: int) -> list[report.Row]:
    """Return the rows of 19.2.

    Raises:
        BenchError: A node does not start.
    """
    ours, alone = _run(_SHAPE.rows // 100, repetitions), _run(0, repetitions)
    rows = []
    for name, case, target in (
        ("one", "8 nodes, one key with 20 % of the reads", _ONE_KEY),
        ("swapped", "8 nodes, 100 keys with 50 % swapped for others", _SWAPPED),
    ):
        metric = "max/mean of work" + (", second window after" if name == "swapped" else "")
        rows.append(
            report.measure(
                (case, metric, "ratio"), ours[name], better="lower", target=target, claim="19.2"
            )
        )
        rows.append(
            report.compare(
                (case, f"{metric}: with copies / plan alone", "ratio"),
                ours[name],
                alone[name],
                peer_name="plan alone",
                better="lower",
                target=0,
                claim="19.2",
            )
        )
    return rows
