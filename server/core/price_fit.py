"""The cost model fitted to the running fleet: prices from what nodes did and what CPU time it took.

Each load window of a node is an observation: its work by kind (cost.py), and the CPU time of its
process. Prices are those that explain all windows best,

    minimise  sum over windows of weight (1 - work · prices / busy)²  +  PRIOR |prices / prior - 1|²

with prices at least 0. Windows are forgotten by half in half an hour. What was never seen keeps its
prior, and so does the split between kinds of work that always come together. A window that the
prices before it miss by far weighs less; one in which buckets moved does not count at all.

How long requests take follows a node's busy time as in a queue: latency = service / (1 - busy /
capacity), with both constants fitted over all nodes. It leaves out what a request waits for peers,
so it is a trend and no promise; its error is kept beside it.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from embertide.server.core.plan.cost import KIB
from embertide.server.core.plan.prices import KINDS, Prices, prices_of
from embertide.v1 import control_pb2, node_pb2

Floats = NDArray[np.float64]
HALF_LIFE_S = 1800.0
# Weight of a price twice its prior, against windows that are all wrong.
PRIOR = 0.02
# Time a second that a node spends on nothing: a scale where the prior is 0.
BASE_SCALE_US = 20_000.0
# A node below 2 % of a core is idle: relative errors say nothing there.
IDLE_US = 20_000.0
# Above this median error nobody shall act by the prices.
ERROR_MAX = 0.30
_ERRORS_KEPT = 240
_WINDOWS_MIN = 10
_OUTLIER_MIN = 0.10
_REQUESTS_MIN = 20


@dataclasses.dataclass(slots=True)
class _Seen:
    """A node's last report, for differences."""

    window: int
    at_ms: int
    sent: Mapping[str, int]  # keys asked of each peer since its start
    bytes: Mapping[str, int]  # to and from each peer since its start
    needed: Mapping[str, float] | None  # requests a second that need each peer
    wire_kib: Mapping[str, float]  # KiB a second to and from each peer


class _Window(NamedTuple):
    """A node's window that is not learned from yet: its peers may still say what they asked."""

    node: str
    work_F: Floats
    load: node_pb2.NodeServiceGetLoadResponse
    at_ms: int


class Recursive:
    """Non-negative least squares with forgetting, and a prior for what is not seen."""

    def __init__(self, prior_F: Floats, scale_F: Floats, weight: float) -> None:
        """Begin with the prior."""
        self._prior_F, self._scale_F, self._weight = prior_F / scale_F, scale_F, weight
        self._gram_FF = np.zeros((len(prior_F), len(prior_F)))
        self._right_F = np.zeros(len(prior_F))
        self.solution_F = prior_F.copy()

    def forget(self, keep: float) -> None:
        """Keep a share of what was seen."""
        self._gram_FF *= keep
        self._right_F *= keep

    def add(self, row_F: Floats, weight: float) -> None:
        """Take one row whose product with the solution shall be 1."""
        row_F = row_F * self._scale_F
        self._gram_FF += weight * np.outer(row_F, row_F)
        self._right_F += weight * row_F

    def solve(self) -> None:
        """Bring `solution_F` up to date."""
        normal_FF = self._gram_FF + self._weight * np.eye(len(self._right_F))
        lower_FF = np.linalg.cholesky(normal_FF)
        right_F = scipy.linalg.solve_triangular(
            lower_FF, self._right_F + self._weight * self._prior_F, lower=True
        )
        self.solution_F = scipy.optimize.nnls(lower_FF.T, right_F)[0] * self._scale_F


class Errors:
    """Recent relative errors of predictions one window ahead."""

    def __init__(self) -> None:
        """Begin with none."""
        self._recent: collections.deque[float] = collections.deque(maxlen=_ERRORS_KEPT)

    def add(self, error: float) -> None:
        """Take one."""
        self._recent.append(abs(error))

    def quantile(self, q: float) -> float:
        """Return a quantile; 0 if there is none."""
        return float(np.quantile(self._recent, q)) if self._recent else 0.0


class CostFit:
    """The prices of a fleet, refitted with each load window.

    Attributes:
        prices: As they are now.
        windows: That have been learned from.
        left_out: Windows that were not: buckets moved, or the node did not say what it spent.
        errors: Errors of the busy time that the prices before a window predicted for it.
        latency_errors: Errors of the mean latency, likewise.
    """

    def __init__(self, prior: Prices | None = None) -> None:
        """Begin with the prior."""
        self.prices = prior or Prices()
        self.windows = self.left_out = 0
        self.errors, self.latency_errors = Errors(), Errors()
        us_F = self.prices.us_F
        self._fit = Recursive(us_F, np.where(us_F > 0, us_F, BASE_SCALE_US), PRIOR)
        # 1 / latency = a - b busy: service 500 us on two cores, until something is seen.
        self._latency = Recursive(np.array([2e-3, 1e-9]), np.array([2e-3, 1e-9]), 0.01)
        self._seen: dict[str, _Seen] = {}
        self._waiting: dict[str, _Window] = {}
        self._learned_ms = 0
        self._disturbed_ms = -(1 << 60)

    @property
    def error(self) -> float:
        """Median relative error of recent predictions; 0 before there is one."""
        return self.errors.quantile(0.5)

    @property
    def trusted(self) -> bool:
        """Whether plans may be acted on by these prices: nothing says that they are wrong."""
        return self.windows < _WINDOWS_MIN or self.error <= ERROR_MAX

    def forget(self, node: str) -> None:
        """Drop a node, as when it is removed."""
        self._seen.pop(node, None)
        self._waiting.pop(node, None)

    def disturb(self, now_ms: int) -> None:
        """Buckets move now, which costs time that prices leave out."""
        self._disturbed_ms = now_ms

    def take(self, node: str, load: node_pb2.NodeServiceGetLoadResponse, now_ms: int) -> None:
        """Take a node's last window, once. It is learned from when the next round begins."""
        before = self._seen.get(node)
        if before is not None and before.window == load.window:
            return
        if node in self._waiting:
            self._learn_all()
        # Keys that are asked again to keep copies up to date belong to no request.
        sent = {
            peer.node: sum(each.keys - each.since_keys for each in peer.tables)
            for peer in load.peers
        }
        bytes = {peer.node: sum(each.bytes for each in peer.tables) for peer in load.peers}
        requests = 1000 * load.requests / load.window_ms if load.window_ms else 0.0
        needed: dict[str, float] | None = None
        wire_kib: dict[str, float] = {}
        # A node that has started again counts from 0, and the control plane may have.
        follows = before is not None and before.window < load.window and now_ms > before.at_ms
        if before is not None and follows:
            seconds = (now_ms - before.at_ms) / 1000
            needed = {}
            for peer, keys in sent.items():
                rate = max(0, keys - before.sent.get(peer, 0)) / seconds
                if requests:
                    needed[peer] = requests * -float(np.expm1(-rate / requests))
            wire_kib = {
                peer: max(0, size - before.bytes.get(peer, 0)) / KIB / seconds
                for peer, size in bytes.items()
            }
        self._seen[node] = _Seen(load.window, now_ms, sent, bytes, needed, wire_kib)
        # The window ended up to a window ago, and lasted as long.
        moving = now_ms - self._disturbed_ms <= 2 * load.window_ms
        if needed is None or moving or not load.cpu_us or not load.window_ms:
            self.left_out += follows
            return
        work_F = work_of(load)
        work_F[KINDS.index("call")] = sum(needed.values())
        work_F[KINDS.index("wire_kib")] = sum(wire_kib.values())
        self._waiting[node] = _Window(node, work_F, load, now_ms)

    def _learn_all(self) -> None:
        """Learn from the windows of a round, now that all nodes have said whom they ask."""
        waiting, self._waiting = self._waiting, {}
        for window in waiting.values():
            # Peers that say nothing any more call nobody.
            live = [
                each
                for each in self._seen.values()
                if window.at_ms - each.at_ms <= 3 * window.load.window_ms
            ]
            if any(each.needed is None for each in live):
                self.left_out += 1
                continue
            window.work_F[KINDS.index("called")] = sum(
                (each.needed or {}).get(window.node, 0.0) for each in live
            )
            window.work_F[KINDS.index("wire_kib")] += sum(
                each.wire_kib.get(window.node, 0.0) for each in live
            )
            self._learn(window)

    def _learn(self, window: _Window) -> None:
        _, work_F, load, now_ms = window
        busy_us = 1000 * load.cpu_us / load.window_ms
        scale_us = max(busy_us, IDLE_US)
        error = (float(work_F @ self.prices.us_F) - busy_us) / scale_us
        usual = max(_OUTLIER_MIN, 3 * self.error)
        weight = busy_us / (busy_us + IDLE_US)
        if self.windows >= _WINDOWS_MIN and abs(error) > usual:
            weight *= usual / abs(error)
        self.errors.add(error)
        keep = 0.5 ** (max(0, now_ms - self._learned_ms) / 1000 / HALF_LIFE_S)
        self._learned_ms = max(self._learned_ms, now_ms)
        self.windows += 1
        self._fit.forget(keep)
        self._fit.add(work_F / busy_us, weight)
        self._fit.solve()
        self.prices = prices_of(self._fit.solution_F)
        self._latency.forget(keep)
        if load.requests >= _REQUESTS_MIN and load.request_us:
            latency_us = load.request_us / load.requests
            self.latency_errors.add((self.latency_us(busy_us) - latency_us) / latency_us)
            # Mirrored, since the solution is not negative: 1 = latency (a - b busy).
            self._latency.add(np.array([latency_us, -latency_us * busy_us]), 1.0)
            self._latency.solve()

    def latency_us(self, busy_us: float) -> float:
        """Return the mean latency of a node's own requests at a busy time a second."""
        a, b = self._latency.solution_F
        return float(1 / max(a - b * busy_us, 0.02 * a, 1e-9))

    @property
    def service_us(self) -> float:
        """Latency of a request on an idle node."""
        return self.latency_us(0.0)

    @property
    def capacity_us(self) -> float:
        """Busy time a second at which requests would wait for ever; 0: no queueing is seen."""
        a, b = self._latency.solution_F
        return float(a / b) if b > 0 else 0.0

    def message(self) -> control_pb2.CostModel:
        """Write it."""
        prices = {
            field.name: getattr(self.prices, field.name) for field in dataclasses.fields(Prices)
        }
        return control_pb2.CostModel(
            **prices,
            windows=self.windows,
            windows_left_out=self.left_out,
            error_median=self.error,
            error_p90=self.errors.quantile(0.9),
            trusted=self.trusted,
            service_us=self.service_us,
            capacity_us=self.capacity_us,
            latency_error_median=self.latency_errors.quantile(0.5),
        )


def work_of(load: node_pb2.NodeServiceGetLoadResponse) -> Floats:
    """Return what a node did in its last window a second, by kind, but for calls and `wire_kib`.

    These are the sums that cost.work_DF predicts, over a node's devices.
    """
    work_F = np.zeros(len(KINDS))
    asked = 0
    for bucket in load.buckets:
        tiers: Sequence[int] = (*bucket.reads_by_source[:3], 0, 0, 0)[:3]
        work_F[:3] += tiers
        work_F[3] += max(0, bucket.reads - sum(tiers))
        work_F[KINDS.index("copied")] += bucket.hot_reads
        work_F[KINDS.index("answered")] += bucket.peer_reads
        work_F[KINDS.index("read_kib")] += bucket.bytes_read / KIB
        asked += bucket.asked
    tables = [table for peer in load.peers for table in peer.tables]
    keys = sum(table.keys for table in tables)
    sums = sum(table.sum_keys for table in tables) / keys if keys else 0.0
    work_F[KINDS.index("asked_row")] = asked * (1 - sums)
    work_F[KINDS.index("asked_sum")] = asked * sums
    work_F[KINDS.index("request")] = load.requests
    work_F *= 1000 / load.window_ms
    work_F[KINDS.index("base")] = 1.0
    return work_F
