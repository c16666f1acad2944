"""Resident memory of a trainer over a long stream that brings new items without end.

The whole trainer runs: generated events read ahead, a DLRM whose rows are pruned to fixed bytes,
versions, snapshots and checkpoints into a folder. Each hour brings `new_items_per_hour` items that
were never there, so rows alone would fill the memory many times over if none left. Rows of the
report compare resident memory in the last quarter with that around the end of the first. The least
in each of their parts has the bar: batches that wait to be learned and copies that wait to be
written come on top of it, and go.

One key in a row's place that is never given back, about 100 bytes, is 2 % of the memory after a
fifteenth of the new items; that is the bar. Below it lies what the allocator and copies for
checkpoints move from sample to sample.
"""

import dataclasses
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench import plot, report
from bench.report import CONSOLE
from bench.servers import BUILD
from embertide.trainer.config import PruneConfig, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.presets import news_model, news_rates
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress

_EVENTS = 20_000_000
_PICTURE = BUILD / "bench" / "train_memory_curve.svg"
# About 50,000 events an hour, 4,000 new items in each of 420.
_NEWS = NewsConfig(hours=420, views_per_hour=12_500, new_items_per_hour=4_000)
_RUN = RunConfig(
    model=news_model(),
    optimizer=news_rates(),
    prune=PruneConfig(bytes=16 << 20),
    ddr_budget_bytes=32 << 20,
    batch_size=1024,
)
_SAMPLES = 400  # of a run, after equally many events
_PARTS = 5  # of a quarter of them
_BAR = 1.02
_LOOK_S = 0.2  # a sample is as much later than its events, at most


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Memory after so many events.

    Attributes:
        events: Learned so far.
        resident: Bytes of the process.
        store: Bytes of the store, by its own account.
        rows: That there are.
    """

    events: int
    resident: int
    store: int
    rows: int


def _sample(events: int) -> list[Sample]:
    """Train on the first events and return samples; in a process of its own, for its memory."""
    samples = list[Sample]()

    def look(seen: Progress) -> None:
        if seen.events < events // _SAMPLES * (len(samples) + 1):
            return
        store = seen.resident_bytes["ddr"] + seen.resident_bytes["index"]
        samples.append(Sample(seen.events, report.resident_bytes(), store, seen.rows))

    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        trainer = Trainer(_RUN, Publication(Path(folder)), program_cache=BUILD / "cache" / "dense")
        trainer.fit(FirstEvents(NewsSource(_NEWS), events), progress=look, every_s=_LOOK_S)
    return samples


def _parts(samples: Sequence[Sample], pick: Callable[[list[int]], float]) -> list[float]:
    """Return one figure for each of some equal parts: what is picked of resident bytes, in MB."""
    each = len(samples) // _PARTS
    parts = (samples[part * each : (part + 1) * each] for part in range(_PARTS))
    return [pick([sample.resident for sample in part]) / 1e6 for part in parts]


def run(events: int | None) -> list[report.Row]:
    """Return the rows of the report and draw the curve; with fewer events no bar holds."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        samples = pool.submit(_sample, events or _EVENTS).result()
    curve = {
        "process": [(each.events / 1e6, each.resident / 1e6, 0.0) for each in samples],
        "its store": [(each.events / 1e6, each.store / 1e6, 0.0) for each in samples],
    }
    plot.curves("Memory of a trainer", ("million events", "MB"), curve, _PICTURE, in_time=True)
    CONSOLE.print(f"{samples[-1].rows:,} rows at the end; the curve: {_PICTURE}")
    quarter = len(samples) // 4
    case = f"{samples[-1].events / 1e6:.1f} M events"
    first, last = samples[quarter // 2 : quarter // 2 + quarter], samples[-quarter:]
    rows = [
        report.compare(
            (f"the process after {case}", f"{name} memory", "MB"),
            _parts(last, pick),
            _parts(first, pick),
            peer_name=f"after {samples[quarter].events / 1e6:.1f} M events",
            better="lower",
            target=bar,
        )
        for name, pick, bar in (("least", min, _BAR), ("median", statistics.median, 0.0))
    ]
    store = report.compare(
        (f"its store in {case}", "most memory", "MB"),
        [max(each.store for each in samples) / 1e6],
        [_RUN.ddr_budget_bytes / 1e6],
        peer_name="its budget",
        better="lower",
        target=1.0,
    )
    return [*rows, store]
