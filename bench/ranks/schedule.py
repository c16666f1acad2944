"""How the cost of a step grows from 2 to 128 ranks: messages, bytes and stalls, counted.

    python -m bench.ranks.schedule

No rank runs: batches are drawn, their keys shared out by a plan, what every rank would send is
counted (bench.ranks.workload), and the trainer's schedule runs in virtual time over a network
(bench.ranks.steps, bench.ranks.network). `compare_counts` holds a real run's counts to the model.

Assumptions
  * Tables are the 26 of MLPerf's DLRM on Criteo 1TB, full (882 million rows), of 128 fp32 values,
    one key a sample and table; its dense net has 2.4 million parameters. Rows and gradients travel
    as fp32.
  * Keys follow Zipf's law, with exponents from 1.05 to 1.2 over the tables (those of bench.keys);
    other skews are counted beside it. Samples are independent of each other.
  * The global batch is fixed: 65,536 as in MLPerf; smaller ones are counted beside it.
  * Plans are made from the keys asked in four steps and judged by six others.
  * Links have 10 or 100 Gb/s each way, 20 us of latency, 5 us a message; the switch is never full.
  * A rank is a server of 16 cores: `steps.Compute` has the times, and where they come from.
  * Events come from rank 0 by a binomial tree, as gloo broadcasts; `parts` is the alternative in
    which rank 0 sends each rank only what it learns from.

How bytes grow. A rank asks (R-1)/R of its distinct keys of others. Their number falls a little
slower than 1/R, as a smaller part of a batch repeats fewer keys; so the exchange of rows falls with
every doubling, at all skews counted here. Against that, a ring all-reduce costs a rank 2 (R-1)/R of
the dense net: twice as much with many ranks as with 2, whatever the batch. So all bytes fall where
rows outweigh the net: at 65,536 samples, but not at 4,096, nor where keys are very skewed.

How loads stay even. A table of few rows has one bucket if buckets have 10^5 rows, but its keys are
asked for by every rank; from 32 ranks on such a bucket alone is more than a rank's share. With as
many buckets a table as ranks there is always something small enough to even out with.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import plot, report
from bench.drift.tasks import CRITEO_1TB
from bench.ranks import batches, plans, steps
from bench.ranks import workload as work
from bench.ranks.network import Link
from bench.ranks.plans import Cut
from bench.ranks.workload import EXCHANGED, KINDS, Asked, Kind, Owners, Sent, Workload
from bench.ranks.zipf import Zipf
from bench.servers import BUILD, ROOT

_CLAIM = "20.6"
_RANKS = (2, 4, 8, 16, 32, 64, 128)
_SAMPLES, _OTHER_SAMPLES = 65_536, (4096, 16_384)
_SKEWS = {"Zipf 1.05-1.2": (1.05, 1.2), "Zipf 0.6-0.9": (0.6, 0.9), "Zipf 1.45": (1.45, 1.45)}
_SKEW = "Zipf 1.05-1.2"
_DIM, _VALUE_BYTES = 128, 4
_BOTTOM, _TOP = (13, 512, 256, 128), (1024, 1024, 512, 256, 1)
_PLANNING_STEPS, _COUNTED_STEPS = 4, 6
_LINKS = {f"{rate} Gb/s": Link(gbit_per_s=rate) for rate in (10, 100)}
_CUT_NAMES: Mapping[Cut, str] = {
    "whole": "whole tables",
    "rows": "10^5 rows a bucket",
    "ranks": "as many buckets a table as ranks",
}
_DEFAULT: Cut = "ranks"
_MB = 1e6
# The targets. Bytes that grow by no more than counting may be wrong by are flat.
_FLAT, _BALANCE, _WITHIN = 1.05, 1.1, 0.05


# --- what is counted ------------------------------------------------------------------------------


def _parameters(widths: Sequence[int]) -> int:
    """Return the parameters of an MLP."""
    return sum(into * out + out for into, out in itertools.pairwise(widths))


def criteo_1tb(samples: int = _SAMPLES, skew: str = _SKEW) -> Workload:
    """Return MLPerf's DLRM on Criteo 1TB."""
    exponents = np.linspace(*_SKEWS[skew], len(CRITEO_1TB))
    vectors = len(CRITEO_1TB) + 1
    seen = vectors * (vectors - 1) // 2 + _DIM
    return Workload(
        laws=tuple(Zipf(rows, float(s)) for rows, s in zip(CRITEO_1TB, exponents, strict=True)),
        samples=samples,
        row_bytes=_DIM * _VALUE_BYTES,
        dense_parameters=_parameters(_BOTTOM) + _parameters((seen, *_TOP)),
    )


def synthetic(
    samples: int, *, row_bytes: int, dense_parameters: int, coded: bool = True
) -> Workload:
    """Return the workload of a run over `bench.ranks.batches`, for `compare_counts`."""
    return Workload(
        laws=tuple(batches.laws()),
        samples=samples,
        row_bytes=row_bytes,
        dense_parameters=dense_parameters,
        coded=coded,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    """A plan for some ranks, and the batches that judge it.

    Attributes:
        asked: By step.
        owner_P: The plan, made from what was asked in other steps.
        guess_P: The plan of a run that has no such steps yet.
    """

    asked: list[Asked]
    owner_P: Owners
    guess_P: Owners

    @classmethod
    def make(cls, workload: Workload, ranks: int, cut: Cut) -> "_Case":
        """Draw the batches and plan."""
        bits = plans.bits(workload, cut, ranks)
        ask = functools.partial(work.ask, workload, bits, ranks)
        costs_P = sum(ask(step).load_P.astype(np.float64) for step in range(_PLANNING_STEPS))
        assert isinstance(costs_P, np.ndarray)
        counted = range(_PLANNING_STEPS, _PLANNING_STEPS + _COUNTED_STEPS)
        return cls(
            asked=[ask(step) for step in counted],
            owner_P=plans.place(costs_P.tolist(), ranks),
            guess_P=plans.place(plans.guess(bits), ranks),
        )

    def sent(self, workload: Workload) -> list[list[dict[Kind, Sent]]]:
        """Return what each rank sends, by step."""
        return [work.count(workload, each, self.owner_P) for each in self.asked]


# --- the rows of the report -----------------------------------------------------------------------


def _growth(
    case: str, metric: str, by_ranks: Mapping[int, list[float]], *, target: float
) -> Iterator[report.Row]:
    """Compare bytes by step with those of the fewest ranks."""
    fewest = min(by_ranks)
    for ranks, values in by_ranks.items():
        if ranks > fewest:
            yield report.compare(
                (f"{case}, {ranks} ranks", metric, "MB"),
                [value / _MB for value in values],
                [value / _MB for value in by_ranks[fewest]],
                peer_name=f"{fewest} ranks",
                better="lower",
                target=target,
                claim=_CLAIM if target else "",
            )


def _bytes(workload: Workload, cases: Mapping[int, _Case]) -> Iterator[report.Row]:
    """Count bytes: of the mean rank, of its exchange of rows alone, of the busiest rank."""
    for path in ("tree", "parts"):
        routed = dataclasses.replace(workload, events=path)
        sent = {ranks: case.sent(routed) for ranks, case in cases.items()}
        every = {
            ranks: np.array([[work.total_bytes(rank) for rank in step] for step in by_step])
            for ranks, by_step in sent.items()
        }
        name = "events by tree" if path == "tree" else "events in parts"
        means = {ranks: list(total_SR.mean(axis=1)) for ranks, total_SR in every.items()}
        most = {ranks: list(total_SR.max(axis=1)) for ranks, total_SR in every.items()}
        yield from _growth(name, "sent a rank", means, target=_FLAT)
        yield from _growth(name, "sent by the busiest", most, target=_FLAT)
        if path == "tree":
            exchanged = {
                ranks: [work.total_bytes(work.mean(step), EXCHANGED) for step in by_step]
                for ranks, by_step in sent.items()
            }
            yield from _growth("keys and rows", "sent a rank", exchanged, target=_FLAT)


def _kinds(workload: Workload, cases: Mapping[int, _Case]) -> Iterator[report.Row]:
    """Count messages, and bytes by kind, of the mean rank."""
    for ranks, case in cases.items():
        by_step = [work.mean(step) for step in case.sent(workload)]
        name = f"{ranks} ranks"
        messages = [sum(each[kind].messages for kind in KINDS) for each in by_step]
        yield report.measure((name, "messages a rank", ""), messages, better="lower", target=0)
        for kind in KINDS:
            yield report.measure(
                (name, f"{kind} a rank", "MB"),
                [each[kind].bytes / _MB for each in by_step],
                better="lower",
                target=0,
            )


def _loads(workload: Workload, ranks: int, cases: Mapping[Cut, _Case]) -> Iterator[report.Row]:
    """Judge plans by the keys that are asked of the busiest rank."""
    for cut, case in cases.items():
        default = cut == _DEFAULT
        yield report.measure(
            (f"{_CUT_NAMES[cut]}, {ranks} ranks", "max / mean load", ""),
            work.loads(case.asked, case.owner_P).tolist(),
            better="lower",
            target=_BALANCE if default else 0,
            claim=_CLAIM if default else "",
        )
    fresh = cases[_DEFAULT]
    yield report.measure(
        (f"a fresh run's plan, {ranks} ranks", "max / mean load", ""),
        work.loads(fresh.asked, fresh.guess_P).tolist(),
        better="lower",
        target=0,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Timed:
    """Steps in virtual time."""

    name: str
    ranks: int
    times: steps.Times

    def rows(self) -> Iterator[report.Row]:
        """Return the time of a step, and which part of it is stalls."""
        case = f"{self.name}, {self.ranks} ranks"
        stall = float(self.times.stall_R.mean())
        for metric, unit, value in (
            ("step", "ms", self.times.step_s * 1e3),
            ("stall share", "", stall),
        ):
            yield report.measure((case, metric, unit), [value], better="lower", target=0)


def _timed(workload: Workload, ranks: int, cases: Mapping[Cut, _Case]) -> Iterator[_Timed]:
    """Run the schedule over both links, with the default plan and with whole tables."""
    for link_name, link in _LINKS.items():
        for cut in (_DEFAULT, "whole"):
            case = cases[cut]
            times = steps.simulate(workload, case.asked, case.owner_P, link)
            name = link_name if cut == _DEFAULT else f"{link_name}, {_CUT_NAMES[cut]}"
            yield _Timed(name, ranks, times)
        parts, case = dataclasses.replace(workload, events="parts"), cases[_DEFAULT]
        times = steps.simulate(parts, case.asked, case.owner_P, link)
        yield _Timed(f"{link_name}, events in parts", ranks, times)


def _elsewhere() -> Iterator[report.Row]:
    """Predict how bytes grow for other batches and skews: at the count of ranks with the most."""
    counts = f"{_RANKS[1]}-{_RANKS[-1]}"
    for skew in _SKEWS:
        for samples in (*_OTHER_SAMPLES, _SAMPLES):
            if (skew, samples) == (_SKEW, _SAMPLES):
                continue
            workload = criteo_1tb(samples, skew)
            for name, kinds in (("keys and rows sent", EXCHANGED), ("sent a rank", KINDS)):
                size = {
                    ranks: work.total_bytes(work.predict(workload, ranks), kinds)
                    for ranks in _RANKS
                }
                most = max(size[ranks] for ranks in _RANKS[1:])
                exchanged = kinds is EXCHANGED
                yield report.compare(
                    (f"{skew}, {samples:,} samples, worst of {counts} ranks", name, "MB"),
                    [most / _MB],
                    [size[_RANKS[0]] / _MB],
                    peer_name=f"{_RANKS[0]} ranks",
                    better="lower",
                    target=_FLAT if exchanged else 0,
                    claim=_CLAIM if exchanged else "",
                )


def _check(workload: Workload, cases: Mapping[int, _Case]) -> Iterator[report.Row]:
    """Hold the counts of drawn batches to the formulas."""
    for ranks, case in cases.items():
        counted = work.mean([work.mean(step) for step in case.sent(workload)])
        predicted = work.predict(workload, ranks)
        errors = [abs(counted[kind].bytes / predicted[kind].bytes - 1) for kind in KINDS]
        yield report.measure(
            (f"counted and predicted, {ranks} ranks", "largest difference of a kind", ""),
            [max(errors)],
            better="lower",
            target=_WITHIN,
            claim=_CLAIM,
        )


def compare_counts(
    workload: Workload, steps_taken: int, counted: Sequence[Mapping[str, tuple[float, float]]]
) -> list[report.Row]:
    """Hold what a real run has counted to the model.

    Args:
        workload: What it learned; `synthetic` has that of `bench.ranks.batches`.
        steps_taken: How many steps it counted.
        counted: Of each rank, (messages, bytes) sent to other ranks, by kind. Kinds that the model
            does not have are left out, as are those that the run does not name.

    Returns:
        A row a kind, over all ranks: how far counted bytes are from predicted ones, at most 5 %.
    """
    ranks = len(counted)
    predicted = work.predict(workload, ranks)
    rows = []
    for kind in KINDS:
        if not any(kind in each for each in counted):
            continue
        sent = sum(each.get(kind, (0.0, 0.0))[1] for each in counted)
        expected = predicted[kind].bytes * ranks * steps_taken
        rows.append(
            report.measure(
                (f"{kind}, {ranks} ranks", "bytes counted and predicted, difference", ""),
                [abs(sent / expected - 1)],
                better="lower",
                target=_WITHIN,
                claim=_CLAIM,
            )
        )
    return rows


# --- pictures and the part as a whole -------------------------------------------------------------


def _draw(workload: Workload, timed: Sequence[_Timed], folder: Path) -> None:
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for ranks in _RANKS:
        sent = work.predict(workload, ranks)
        for kind in KINDS:
            lines.setdefault(kind, []).append((ranks, sent[kind].bytes / _MB, 0.0))
        lines.setdefault("all", []).append((ranks, work.total_bytes(sent) / _MB, 0.0))
    plot.curves(
        f"What a rank sends a step, {workload.samples:,} samples",
        ("ranks", "MB, mean over ranks"),
        lines,
        folder / "ranks_bytes.svg",
    )
    lines = {}
    for each in timed:
        lines.setdefault(each.name, []).append((each.ranks, float(each.times.stall_R.mean()), 0.0))
    plot.curves(
        f"Share of a step in which a rank waits, {workload.samples:,} samples",
        ("ranks", "share"),
        lines,
        folder / "ranks_stalls.svg",
    )


def _show(workload: Workload, cases: Mapping[int, _Case], timed: Sequence[_Timed]) -> None:
    """Print a line a count of ranks."""
    names = list(dict.fromkeys(each.name for each in timed))
    table = Table(title=f"A rank's step, {workload.samples:,} samples a batch: MB sent, and stalls")
    for column in ("ranks", "messages", *KINDS, "all", *(f"{name}: ms, stalls" for name in names)):
        table.add_column(column, justify="right")
    for ranks, case in cases.items():
        sent = work.mean([work.mean(step) for step in case.sent(workload)])
        by_name = {each.name: each.times for each in timed if each.ranks == ranks}
        table.add_row(
            str(ranks),
            f"{sum(each.messages for each in sent.values()):.0f}",
            *(f"{sent[kind].bytes / _MB:.2f}" for kind in KINDS),
            f"{work.total_bytes(sent) / _MB:.1f}",
            *(f"{by_name[n].step_s * 1e3:.1f}, {by_name[n].stall_R.mean():.0%}" for n in names),
        )
    Console(width=200).print(table)


def measure(folder: Path = BUILD / "bench") -> list[report.Row]:
    """Count and simulate; print a table, and write pictures into a folder."""
    workload = criteo_1tb()
    defaults: dict[int, _Case] = {}
    loads: list[report.Row] = []
    timed: list[_Timed] = []
    for ranks in _RANKS:
        cases = {cut: _Case.make(workload, ranks, cut) for cut in plans.CUTS}
        loads += _loads(workload, ranks, cases)
        timed += _timed(workload, ranks, cases)
        defaults[ranks] = cases[_DEFAULT]
    _show(workload, defaults, timed)
    _draw(workload, timed, folder)
    return [
        *_bytes(workload, defaults),
        *loads,
        *_check(workload, defaults),
        *_kinds(workload, defaults),
        *(row for each in timed for row in each.rows()),
        *_elsewhere(),
    ]


def main() -> int:
    """Run the part alone."""
    rows = measure()
    report.write(BUILD / "bench" / "ranks_schedule.json", ROOT, rows)
    report.show("Growth of cost with ranks", [row for row in rows if row.target or row.peer_name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
