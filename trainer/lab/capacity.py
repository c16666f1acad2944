"""Tier sizes for a latency goal: what a trace, the bytes of a row and the tiers' costs come to.

A request reads some keys. Those in HBM or DDR cost a time each; those on the SSD are read in one
batch, which costs a time once and a little more for each further row. Where a key lies follows from
the hit-rate curve of a policy over the trace, simulated at a bounded number of sizes; between them
the curve is interpolated in the logarithm of the size, monotone. Hits are taken as independent, so
the number of misses of a request is binomial: as it is for a shuffled stream, and less than it is
for one whose misses come together (see docs/results/store.md).
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embertide._store import CacheTrace, StoreError
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.picture import write_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The index (bucket_index.h): groups of 7 entries, at most 7/8 of them used, a power of two of them
# in each bucket; buckets of about 10^5 rows.
_GROUP_BYTES = 128
_GROUP_ROWS = 7 * 7 / 8
_BUCKET_ROWS = 100_000
# Slots of 8 bytes, pages with free slots, free room that upkeep keeps: 1/0.95.
WASTE = 0.05
_SIZES_MAX = 24
_SEARCH_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCosts:
    """Times of a read, in microseconds.

    The defaults are assumed, for a small server with an NVMe drive; give your own, or what
    benchmarks measured (`measured_costs`).

    Attributes:
        hbm_us: Each row in HBM.
        ddr_us: Each row in DDR.
        ssd_us: The first row on the SSD, which a request waits for.
        ssd_more_us: Each further row on the SSD.
        base_us: A request, whatever it reads.
    """

    hbm_us: float = 0.01
    ddr_us: float = 0.05
    ssd_us: float = 120.0
    ssd_more_us: float = 20.0
    base_us: float = 50.0

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{field.name} is {value}; give a time of 0 or more")


def measured_costs(path: Path, row_bytes: int) -> dict[str, float]:
    """Reads what benchmarks wrote of this machine: for each cost, that of the nearest size of row.

    Args:
        path: costs.json of `make bench-store` and `make bench-ssd`.
        row_bytes: Bytes of a row's payload.

    Raises:
        ConfigurationError: The file is not there, or is none of theirs.
    """
    found: dict[str, tuple[float, float]] = {}  # how far from row_bytes, and the time
    try:
        for each in json.loads(path.read_text(encoding="utf-8"))["costs"]:
            off = abs(math.log(each["row_bytes"] / row_bytes))
            found[each["name"]] = min(found.get(each["name"], (math.inf, 0.0)), (off, each["us"]))
        TierCosts(**{name: us for name, (_, us) in found.items()})
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is no costs.json of `make bench-store` or `make bench-ssd`: {error}"
        ) from error
    return {name: us for name, (_, us) in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The bounds on a request's time, in microseconds; a bound that is None does not bind.

    Attributes:
        mean_us: On average.
        p99_us: 99 of 100 requests.
        keys: That a request reads.
    """

    mean_us: float | None = None
    p99_us: float | None = None
    keys: int = 26

    def __post_init__(self) -> None:
        """Refuse a goal that says nothing."""
        if self.mean_us is None and self.p99_us is None:
            raise ConfigurationError("no goal: give a mean or a p99 latency")
        if self.keys < 1:
            raise ConfigurationError(f"a request of {self.keys} keys; give 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class HitCurve:
    """Hit rates of a policy at ascending numbers of rows; never falling.

    Attributes:
        rows: Rows of the tier; the last number holds every key.
        hits: Hits per access. The first access to a key misses: the store holds its row, but
            below.
    """

    policy: str
    rows: tuple[int, ...]
    hits: tuple[float, ...]

    def at(self, rows: float) -> float:
        """Return the hit rate of a tier of so many rows."""
        if rows < 1:
            return 0.0
        return float(np.interp(math.log(rows), np.log(self.rows), self.hits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Tier sizes and what they are predicted to give.

    Attributes:
        hbm_rows, ddr_rows, ssd_rows: Rows that each tier holds.
        hbm_bytes, ddr_bytes, ssd_bytes: Budgets for them; DDR's with the index of all rows and the
            memory of the policy.
        hbm_hits, ddr_hits: Shares of the reads.
        mean_us, p99_us: The predicted time of a request.
        meets: Whether the goal is met; if not, no size does.
    """

    hbm_rows: int
    ddr_rows: int
    ssd_rows: int
    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int
    hbm_hits: float
    ddr_hits: float
    mean_us: float
    p99_us: float
    meets: bool

    def as_json(self) -> dict[str, object]:
        """Returns what json.dumps takes."""
        return dataclasses.asdict(self)


def index_bytes(rows: int, buckets: int | None = None) -> int:
    """Return the DDR that the index of so many rows takes while one of its buckets grows."""
    if buckets is None:
        buckets = 1 << max(0, math.ceil(math.log2(max(1, rows) / _BUCKET_ROWS)))
    groups = 1 << max(0, math.ceil(math.log2(max(1, rows) / buckets / _GROUP_ROWS)))
    return (buckets + 1) * groups * _GROUP_BYTES


def hit_curve(
    keys_N: NDArray[np.int64],
    policy: str,
    *,
    sizes: int = 12,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> HitCurve:
    """Simulates a policy at some sizes from 0.05 % of the keys to all of them.

    The first half of the trace warms the tier up, and only the second counts: what both give, less
    what the first gives alone.

    Raises:
        ConfigurationError: The policy does not exist, or `sizes` is none of 2 to 24.
    """
    if not 2 <= sizes <= _SIZES_MAX:
        raise ConfigurationError(f"{sizes} sizes; give 2 to {_SIZES_MAX}")
    trace, first = CacheTrace(keys_N), CacheTrace(keys_N[: max(1, len(keys_N) // 2)])
    counted = trace.accesses - first.accesses
    if counted == 0:
        raise ConfigurationError("a trace of one access says nothing; give a longer one")
    least = max(1, trace.distinct // 2000)
    points = sorted(
        {round(x) for x in np.geomspace(least, trace.distinct, sizes)} | {trace.distinct}
    )
    hits: list[float] = []
    for done, rows in enumerate(points):
        progress(done, len(points))
        try:
            found = trace.simulate(policy, rows).hits - first.simulate(policy, rows).hits
        except StoreError as error:
            raise ConfigurationError(str(error)) from error
        hits.append(max([found / counted, *hits[-1:]]))
    # With room for all rows of the store none is ever below.
    hits[-1] = 1.0
    progress(len(points), len(points))
    return HitCurve(policy=policy, rows=tuple(points), hits=tuple(hits))


def latency(hbm_hits: float, ddr_hits: float, goal: Goal, costs: TierCosts) -> tuple[float, float]:
    """Mean and p99 of a request whose keys hit HBM and DDR with these probabilities."""
    misses = np.arange(goal.keys + 1)
    on_ssd = 1 - hbm_hits - ddr_hits
    probability = _binomial(goal.keys, min(1.0, max(0.0, on_ssd)))
    share = hbm_hits / (hbm_hits + ddr_hits) if hbm_hits + ddr_hits > 0 else 0.0
    each = share * costs.hbm_us + (1 - share) * costs.ddr_us
    waits = np.where(misses > 0, costs.ssd_us + (misses - 1) * costs.ssd_more_us, 0.0)
    times = costs.base_us + (goal.keys - misses) * each + waits
    at_99 = int(np.searchsorted(np.cumsum(probability), 0.99 - 1e-12))
    p99 = float(np.max(times[: min(at_99, goal.keys) + 1]))
    return float(probability @ times), p99


def _binomial(n: int, p: float) -> NDArray[np.float64]:
    if p in (0.0, 1.0):
        return np.asarray(np.arange(n + 1) == n * p, np.float64)
    k = np.arange(n + 1)
    logs = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k])
    return np.asarray(np.exp(logs + k * math.log(p) + (n - k) * math.log1p(-p)), np.float64)


def plan(
    curve: HitCurve,
    goal: Goal,
    costs: TierCosts,
    *,
    row_bytes: int,
    total_rows: int | None = None,
    hbm_bytes: int = 0,
    policy_bytes: int = 0,
    buckets: int | None = None,
) -> Plan:
    """The smallest DDR tier that meets a goal, beside an HBM tier of a given size.

    Args:
        curve: Hit rates by the rows of DDR and above: the hit rate of the two together is that of
            one tier of both their rows, and HBM holds the best of them.
        goal: The bounds on a request's time.
        costs: The times of reads.
        row_bytes: Bytes of a row's payload.
        total_rows: Rows that the model has; None: the keys of the trace. Those that the trace never
            asks for take index and SSD.
        hbm_bytes: Bytes of HBM; 0: none.
        policy_bytes: Bytes of memory that the policy needs for a row of DDR.
        buckets: Buckets of the table; None: one for each 10^5 rows.
    """
    all_rows = max(total_rows or 0, curve.rows[-1])
    slot = math.ceil(row_bytes / 8) * 8
    hbm_rows = min(curve.rows[-1], hbm_bytes // slot)

    def planned(rows: int) -> Plan:
        hbm_hits = curve.at(hbm_rows)
        ddr_hits = curve.at(hbm_rows + rows) - hbm_hits
        mean_us, p99_us = latency(hbm_hits, ddr_hits, goal, costs)
        return Plan(
            hbm_rows=hbm_rows,
            ddr_rows=rows,
            ssd_rows=all_rows - rows,
            hbm_bytes=hbm_rows * slot,
            ddr_bytes=round(
                (rows * (slot + policy_bytes) + index_bytes(all_rows, buckets)) / (1 - WASTE)
            ),
            # Segments that are rewritten when half of them is dead.
            ssd_bytes=2 * (all_rows - rows) * (slot + 8),
            hbm_hits=hbm_hits,
            ddr_hits=ddr_hits,
            mean_us=mean_us,
            p99_us=p99_us,
            meets=(goal.mean_us is None or mean_us <= goal.mean_us)
            and (goal.p99_us is None or p99_us <= goal.p99_us),
        )

    low, high = 0, curve.rows[-1] - hbm_rows
    best = planned(high)
    if not best.meets:
        return best
    for _ in range(_SEARCH_STEPS):  # the latency never rises with the size
        if low >= high:
            break
        middle = (low + high) // 2
        found = planned(middle)
        if found.meets:
            high, best = middle, found
        else:
            low = middle + 1
    return best


def draw(
    picture: "Figure", curves: Sequence[HitCurve], plans: Sequence[Plan], output: Path
) -> None:
    """Draws hit rates over rows, each plan's size marked, and writes the picture."""
    axes = picture.add_subplot()
    for curve, found in zip(curves, plans, strict=True):
        (line,) = axes.plot(curve.rows, curve.hits, marker="o", markersize=3, label=curve.policy)
        axes.axvline(found.hbm_rows + found.ddr_rows, color=line.get_color(), linestyle=":")
    axes.set(xscale="log", xlabel="rows in HBM and DDR (dotted: the plan)", ylabel="hit rate")
    write_picture(picture, output)
