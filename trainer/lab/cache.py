"""Hit rates of cache policies on a trace, against the optimum and the best fixed set."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embertide._store import CacheTrace, StoreError, cache_policies
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.picture import write_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE = "lru"
# In a smaller gap, a share of it says nothing.
MIN_GAP = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    """The figures of one policy at one size.

    Attributes:
        hit_rate: Hits per access, from an empty tier.
        gap_closed: (hit rate - LRU's) / (optimum - LRU's); None where that gap is under a point.
        insert_rate: Rows that entered, per access: what the tier below is read for, and written.
        bytes_per_slot: Memory of the policy.
        accesses_per_s: Speed of the simulation on one thread, in CPU time.
    """

    hit_rate: float
    gap_closed: float | None
    insert_rate: float
    bytes_per_slot: float
    accesses_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFigures:
    """All policies at one size.

    Attributes:
        capacity: Rows that the tier holds.
        share: capacity / distinct keys.
        optimum: Hit rate of Belady's MIN with bypass.
        best_fixed: Hit rate of the keys of most accesses, held from the beginning.
        policies: By name, in the order asked for.
    """

    capacity: int
    share: float
    optimum: float
    best_fixed: float
    policies: dict[str, PolicyFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFigures:
    """A trace and what was simulated on it, ascending in size."""

    accesses: int
    distinct: int
    sizes: tuple[SizeFigures, ...]

    def as_json(self) -> dict[str, object]:
        """Returns what json.dumps takes."""
        return dataclasses.asdict(self)


def parse_sizes(text: str, distinct: int) -> list[int]:
    """Rows of each size in "0.1%,1%,5000": shares of the distinct keys, rounded down, or rows.

    Raises:
        ConfigurationError: One is not a number, or comes to less than one row.
    """
    sizes = set()
    for word in text.split(","):
        number = word.strip().removesuffix("%")
        try:
            share = word.strip().endswith("%")
            rows = int(distinct * float(number) / 100 + 1e-9) if share else int(number)
        except (ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"size {word!r} is neither rows nor a share like 1%"
            ) from error
        if rows < 1:
            raise ConfigurationError(
                f"size {word!r} is {rows} of {distinct:,} keys; give 1 or more"
            )
        sizes.add(rows)
    return sorted(sizes)


def between(sizes: Sequence[int], *, per_decade: int) -> list[int]:
    """The sizes, and those between the first and the last that make a curve of them."""
    first, last = math.log10(sizes[0]), math.log10(sizes[-1])
    steps = max(1, math.ceil((last - first) * per_decade))
    more = (round(10 ** (first + (last - first) * step / steps)) for step in range(steps + 1))
    return sorted({*sizes, *more})


def policy_names() -> list[str]:
    """Every policy by itself, the one recommended first."""
    return [policy.name for policy in cache_policies()]


def simulate(
    trace: CacheTrace,
    sizes: Sequence[int],
    policies: Sequence[str],
    *,
    version_accesses: int = 50_000,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> CacheFigures:
    """Simulates each policy at each size.

    Args:
        trace: The accesses.
        sizes: Rows of the tier, ascending.
        policies: Names, maybe with an ending like ":2".
        version_accesses: Accesses in a version; "utility" knows those of versions before.
        progress: Is told what begins, how much is done, and out of how much.

    Raises:
        ConfigurationError: A policy does not exist or cannot have that size.
    """
    total = len(sizes) * (len(policies) + 1)
    found = []
    for at, capacity in enumerate(sizes):
        done = at * (len(policies) + 1)
        progress(f"optimum of {capacity:,} rows", done, total)
        optimum = trace.optimal_hits(capacity) / trace.accesses
        rates: dict[str, PolicyFigures] = {}
        base = _hit_rate(trace, BASELINE, capacity, version_accesses).hit_rate
        for policy in policies:
            done += 1
            progress(f"{policy} with {capacity:,} rows", done, total)
            figures = _hit_rate(trace, policy, capacity, version_accesses)
            if optimum - base >= MIN_GAP:
                closed = (figures.hit_rate - base) / (optimum - base)
                figures = dataclasses.replace(figures, gap_closed=closed)
            rates[policy] = figures
        found.append(
            SizeFigures(
                capacity=capacity,
                share=capacity / trace.distinct,
                optimum=optimum,
                best_fixed=trace.best_fixed_hits(capacity) / trace.accesses,
                policies=rates,
            )
        )
    progress("done", total, total)
    return CacheFigures(accesses=trace.accesses, distinct=trace.distinct, sizes=tuple(found))


def _hit_rate(
    trace: CacheTrace, policy: str, capacity: int, version_accesses: int
) -> PolicyFigures:
    begin = time.thread_time()
    try:
        result = trace.simulate(policy, capacity, version_accesses=version_accesses)
    except StoreError as error:
        raise ConfigurationError(str(error)) from error
    return PolicyFigures(
        hit_rate=result.hits / trace.accesses,
        gap_closed=None,
        insert_rate=result.inserted / trace.accesses,
        bytes_per_slot=result.policy_bytes / capacity,
        accesses_per_s=trace.accesses / max(time.thread_time() - begin, 1e-9),
    )


def draw(picture: "Figure", figures: CacheFigures, title: str, output: Path) -> None:
    """Draws hit rates over sizes and writes the picture."""
    shares = [100 * size.share for size in figures.sizes]
    axes = picture.add_subplot()
    bounds = {
        "optimum (Belady)": ([size.optimum for size in figures.sizes], "--"),
        "best fixed set": ([size.best_fixed for size in figures.sizes], ":"),
    }
    for name, (rates, style) in bounds.items():
        axes.plot(shares, rates, style, color="black", label=name)
    for policy in figures.sizes[0].policies:
        rates = [size.policies[policy].hit_rate for size in figures.sizes]
        axes.plot(shares, rates, marker="o", markersize=3, label=policy)
    axes.set(xscale="log", xlabel="rows of the tier, % of the keys", ylabel="hit rate", title=title)
    write_picture(picture, output)
