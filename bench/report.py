"""A benchmark's report: rows of ours against a peer, as a table and as JSON."""

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

# The console for a benchmark's messages while it runs.
CONSOLE = Console(stderr=True, highlight=False, soft_wrap=True)
# Fewer repetitions say nothing of the spread.
MIN_REPETITIONS = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One metric of one case: medians of both sides and their ratio, ours / peer."""

    case: str
    metric: str
    unit: str
    ours: float
    peer: float
    peer_name: str
    ratio: float
    better: Literal["higher", "lower"]
    n: int
    spread: float  # the larger side's (maximum - minimum) / median
    target: float  # 0: none
    claim: str = ""  # the requirement that the row answers, as "18.3"; empty: none
    vectors: str = ""  # that the sides were held to, as "avx2"; empty: each had what it chose

    @property
    def met(self) -> bool:
        """Whether the ratio reaches the target; where there is no peer, whether ours does."""
        value = self.ratio if self.peer_name else self.ours
        return value >= self.target if self.better == "higher" else value <= self.target


def _spread(values: Sequence[float]) -> float:
    median = statistics.median(values)
    return (max(values) - min(values)) / abs(median) if median else 0.0


def compare(
    name: tuple[str, str, str],
    ours: Sequence[float],
    peer: Sequence[float],
    *,
    peer_name: str,
    better: Literal["higher", "lower"],
    target: float,
    claim: str = "",
) -> Row:
    """Return the row (case, metric, unit) of two interleaved series of one length."""
    case, metric, unit = name
    if len(ours) != len(peer) or not ours:
        raise ValueError(f"{case}: {len(ours)} measurements of ours, {len(peer)} of the peer")
    medians = statistics.median(ours), statistics.median(peer)
    return Row(
        case=case,
        metric=metric,
        unit=unit,
        ours=round(medians[0], 3),
        peer=round(medians[1], 3),
        peer_name=peer_name,
        ratio=round(medians[0] / medians[1], 4),
        better=better,
        n=len(ours),
        spread=round(max(_spread(ours), _spread(peer)), 4),
        target=target,
        claim=claim,
    )


def measure(
    name: tuple[str, str, str],
    values: Sequence[float],
    *,
    better: Literal["higher", "lower"],
    target: float,
    claim: str = "",
) -> Row:
    """Return the row (case, metric, unit) of a series without a peer: its median is the figure.

    A claim that holds or does not is a series of ones and zeros with the target 1.
    """
    if not values:
        raise ValueError(f"{name[0]}: no measurements")
    return Row(
        case=name[0],
        metric=name[1],
        unit=name[2],
        ours=round(statistics.median(values), 6),
        peer=0.0,
        peer_name="",
        ratio=0.0,
        better=better,
        n=len(values),
        spread=round(_spread(values), 4),
        target=target,
        claim=claim,
    )


def seconds(work: Callable[[], object]) -> float:
    """Return what some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def cpu() -> str:
    """Name this machine's CPU; a virtual one often hides all but its family and model."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    if "model name" not in facts:
        return platform.machine()
    return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"


def machine() -> str:
    """Describe this machine in words."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.platform()}"


def resident_bytes() -> int:
    """Return what this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def commit(root: Path) -> str:
    """Describe what is checked out."""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    result = subprocess.run(git, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def write(path: Path, root: Path, rows: Sequence[Row]) -> None:
    """Write the JSON of a run."""
    document = {
        "commit": commit(root),
        "machine": machine(),
        "load": os.getloadavg(),  # at the end, over 1, 5 and 15 minutes: the benchmark's own is 2-3
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == 0 else f"{value:.4f}"


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    table = Table(title=title)
    for column in (
        "case",
        "metric",
        "ours",
        "peer",
        "unit",
        "ratio",
        "target",
        "spread",
        "peer is",
        "vectors",
        "claim",
    ):
        table.add_column(column, justify="left" if column in {"case", "peer is"} else "right")
    for row in rows:
        sign = "≥" if row.better == "higher" else "≤"
        colour = "white" if row.target == 0 else "green" if row.met else "red"
        table.add_row(
            row.case,
            row.metric,
            _digits(row.ours) if row.peer_name else f"[{colour}]{_digits(row.ours)}[/{colour}]",
            _digits(row.peer) if row.peer_name else "",
            row.unit,
            f"[{colour}]{row.ratio:.2f}[/{colour}]" if row.peer_name else "",
            f"{sign} {row.target:.3g}" if row.target else "",
            f"{row.spread:.0%}",
            row.peer_name,
            row.vectors,
            row.claim,
        )
    Console(width=160).print(table)
