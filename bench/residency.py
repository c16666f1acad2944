"""Hit rates in DDR of a real store under each policy, at equal bytes, `python -m bench.residency`.

A store of the serving profile holds every key of a trace, most of them on its SSD tier; its DDR
budget is the index of all and the rows of a share of the keys, whatever the policy takes of it.
The trace is read batch by batch, with a turn of `maintain` after each, as a node's worker has.
Nothing is timed; an SSD that is not in memory makes it slow, and no figure other.
"""

import argparse
import tempfile
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.store import ours
from embertide import _store
from embertide.trainer.data.trace import read_trace

Keys = NDArray[np.int64]
_BUCKET_ROWS = 10_000
_POLICIES = ("clock", "clock:2", "lru", "lfu", "s3-fifo", "w-tinylfu", "reuse-density")


def zipf(accesses: int, keys: int, exponent: float, seed: int) -> Keys:
    """Few keys often, many seldom."""
    weights = np.arange(1, keys + 1) ** -exponent
    drawn = np.random.default_rng(seed).choice(keys, accesses, p=weights / weights.sum())
    return drawn.astype(np.int64)


def hit_rates(store: _store.Store, keys_N: Keys, batch: int) -> Iterator[float]:
    """Reads a trace; gives the share of DDR in each quarter of it."""
    for quarter_N in np.array_split(keys_N, 4):
        before = store.stats()["hits"]
        for batch_N in np.array_split(quarter_N, max(1, len(quarter_N) // batch)):
            store.lookup(0, batch_N)
            store.maintain()
        after = store.stats()["hits"]
        yield (after["ddr"] - before["ddr"]) / len(quarter_N)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", help="PATH[:COLUMN]; default: Zipf 0.9, 200,000 keys")
    parser.add_argument("--accesses", type=int, default=400_000)
    parser.add_argument("--dim", type=int, default=64, help="of fp32 rows")
    parser.add_argument("--shares", default="0.01,0.1")
    parser.add_argument("--policies", default=",".join(_POLICIES))
    parser.add_argument("--batch", type=int, default=256, help="keys read between two turns")
    parser.add_argument("--ssd-directory", help="default: a temporary folder")
    given = parser.parse_args()
    if given.trace is None:
        keys_N = zipf(given.accesses, 200_000, 0.9, seed=1)
    else:
        path, _, column = given.trace.partition(":")
        keys_N = read_trace(path, column=column or None, accesses=given.accesses)
    named_R = np.unique(keys_N)
    distinct = len(named_R)
    # Small ones, for while a bucket's index grows there are two of it.
    rows = ours.table_of(distinct, given.dim, bucket_rows=_BUCKET_ROWS)
    index = ours.filled(rows, named_R, ddr_budget_bytes=4 << 30).stats()["index_bytes"]
    table = Table(
        "policy",
        title=f"{len(keys_N):,} accesses, {distinct:,} keys, rows of "
        f"{4 * given.dim} bytes: hits in DDR, last quarter",
    )
    shares = [float(share) for share in given.shares.split(",")]
    for share in shares:
        table.add_column(f"{100 * share:g} %", justify="right")
    for policy in given.policies.split(","):
        cells = []
        for share in shares:
            with tempfile.TemporaryDirectory(dir=given.ssd_directory) as folder:
                store = ours.filled(
                    rows,
                    named_R,
                    ddr_budget_bytes=index + int(share * distinct * 4 * given.dim),
                    ssd_budget_bytes=max(64 << 20, 3 * distinct * (4 * given.dim + 8)),
                    ssd_directory=folder,
                    ddr_policy=policy,
                )
                *_, last = hit_rates(store, keys_N, given.batch)
                stats = store.stats()
                dropped = stats["dropped_accesses"] / len(keys_N)
                cells.append(
                    f"{last:.4f} ({stats['policy_bytes'] >> 10} KiB, {dropped:.1%} dropped)"
                )
        table.add_row(policy, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
