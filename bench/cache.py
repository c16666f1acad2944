"""Hit rates of every cache policy on traces of keys, `make bench-cache TRACES="PATH[:COLUMN] ..."`.

Without traces, one is generated: the articles of the seeded news stream, which drifts. Nothing is
timed, and a repeat gives the same figures.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench import parts, report
from embertide._store import CacheTrace
from embertide.trainer.commands.cache_sim import show
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.trace import read_trace
from embertide.trainer.lab import cache

_SIZES = "0.1%,1%,10%"
_POLICIES = (*cache.policy_names(), "reuse-density:2", "lru:2", "lfu:2")
_OURS, _PEER = _POLICIES[0], "s3-fifo"
# The recommended policy may be so much below the better of the two simple choices, nowhere more.
_MAX_BELOW = 0.005
_GENERATED_HOURS = 96


def _generated() -> CacheTrace:
    source = NewsSource(NewsConfig(hours=_GENERATED_HOURS))
    column = [feature.name for feature in source.schema.features].index("cand")
    batches = source.batches(batch_size=65_536)
    return CacheTrace(np.concatenate([batch.keys_BF[:, column] for batch in batches]))


def _read(word: str) -> tuple[str, CacheTrace]:
    path, _, column = word.partition(":")
    return Path(path).name, CacheTrace(read_trace(path, column=column or None))


def _hit_rates(name: str, figures: cache.CacheFigures) -> list[report.Row]:
    """Return a row a size and policy, in hits of 10,000 accesses."""
    rows = []
    for size in figures.sizes:
        rates = {policy: found.hit_rate for policy, found in size.policies.items()}
        peer = max(rates[cache.BASELINE], size.best_fixed)
        keys = f"{name}, {100 * size.share:.2g} % of the keys"
        rows += [
            report.compare(
                (f"{keys}, {policy}", "hits of 10,000", "hits"),
                [1e4 * rate],
                [1e4 * peer],
                peer_name="better of LRU and the best fixed set",
                better="higher",
                target=round((peer - _MAX_BELOW) / peer, 4),
            )
            for policy, rate in rates.items()
        ]
    return rows


def _gap_closed(all_figures: Sequence[cache.CacheFigures]) -> report.Row:
    sizes = [size for figures in all_figures for size in figures.sizes]

    def mean(policy: str) -> float:
        closed = [size.policies[policy].gap_closed for size in sizes]
        return 100 * statistics.fmean(share for share in closed if share is not None)

    name = (f"gap from LRU to the optimum closed, mean, {_OURS}", "gap closed", "%")
    ours, peer = [mean(_OURS)], [mean(_PEER)]
    return report.compare(name, ours, peer, peer_name=_PEER, better="higher", target=1.0)


def _measure(given: argparse.Namespace) -> Iterator[report.Row]:
    traces = map(_read, given.traces) if given.traces else [("news", _generated())]
    simulated = []
    for name, trace in traces:
        sizes = cache.parse_sizes(_SIZES, trace.distinct)
        simulated.append(cache.simulate(trace, sizes, _POLICIES))
        show(simulated[-1], sizes)
        yield from _hit_rates(name, simulated[-1])
    yield _gap_closed(simulated)


if __name__ == "__main__":
    parser = parts.options("cache", __doc__)
    parser.add_argument(
        "traces", nargs="*", metavar="PATH[:COLUMN]", help="as cache-sim reads them"
    )
    parts.command("Cache policies", _measure, parser)
