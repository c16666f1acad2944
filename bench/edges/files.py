"""Generated files (claim A.1): init, train, a node's manifest, the client; nothing runs or breaks.

TABLES (10,000), SEED (1) and WORKERS (1) are settings of the environment. Tables come in chunks of
50, a chunk by its own seed; what is done is kept in build/bench/edges_files/, so a run that was
stopped goes on, and `python -m bench.edges.files 17 23` draws table 23 of chunk 17 alone again.
"""

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis

from bench import report
from bench.edges.pipeline import outcome
from bench.edges.tables import PLANTED, Drawn, tables
from bench.report import CONSOLE
from bench.servers import BUILD

CHUNK = 50
_DONE = BUILD / "bench" / "edges_files"
_CLAIM = "A.1"
# Where files cost no drive's time.
_FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None


def chunk(seed: int, number: int) -> list[Drawn]:
    """Return the tables of a chunk."""
    drawn: list[Drawn] = []

    @hypothesis.seed(seed * 1_000_003 + number)
    @hypothesis.settings(
        max_examples=CHUNK,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(tables())
    def draw(table: Drawn) -> None:
        drawn.append(table)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw()
    return drawn[:CHUNK]


def _run_chunk(job: tuple[int, int]) -> Path:
    """Take all tables of a chunk through, unless that was done."""
    seed, number = job
    path = _DONE / f"seed-{seed}-chunk-{number}.json"
    if path.exists():
        return path
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="embertide-edges-", dir=_FAST) as folder:
        for place, drawn in enumerate(chunk(seed, number)):
            began = time.monotonic()
            seen = outcome(drawn, Path(folder) / "table")
            found.append(
                {
                    "place": place,
                    "table": drawn.said,
                    "options": drawn.options,
                    "works": seen.works,
                    "message": seen.message,
                    "fault": seen.fault,
                    "seconds": round(time.monotonic() - began, 3),
                }
            )
        gc.collect()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1))
    partial.rename(path)
    return path


def notices_planted_code() -> bool:
    """Whether code that is planted would be seen, were names written as they are."""
    exec(f"# A column: x\nimport sys;sys.{PLANTED}=1#", {})  # as a careless writer did
    seen = hasattr(sys, PLANTED)
    delattr(sys, PLANTED)
    return seen


def run() -> Iterator[report.Row]:
    """Take the tables through; yield what became of them."""
    total, seed = int(os.environ.get("TABLES", "10000")), int(os.environ.get("SEED", "1"))
    jobs = [(seed, number) for number in range(-(-total // CHUNK))]
    seen: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(int(os.environ.get("WORKERS", "1")), maxtasksperchild=20) as pool:
        for done, path in enumerate(pool.imap_unordered(_run_chunk, jobs), 1):
            seen += json.loads(path.read_text())
            faults = sum(bool(each["fault"]) for each in seen)
            if done % 10 == 0:
                CONSOLE.print(f"{len(seen):,} of {total:,} tables, {faults} faults")
    kinds = Counter(each["fault"].partition(":")[0] for each in seen if each["fault"])
    for each in seen:
        if each["fault"]:
            CONSOLE.print(each["fault"], each["table"][:300], markup=False)
    works = sum(each["works"] and not each["fault"] for each in seen)
    refused = sum(bool(each["message"]) and not each["fault"] for each in seen)
    case = f"{len(seen):,} generated tables"

    def row(metric: str, value: float, target: float = 0.0) -> report.Row:
        name = (case, metric, "tables")
        return report.measure(name, [value], better="lower", target=target, claim=_CLAIM)

    yield row("code of names that ran", kinds.pop("executed", 0))
    yield row("tracebacks", kinds.pop("traceback", 0))
    yield row(
        "accepted by init, refused by train", kinds.pop("accepted by init, refused by train", 0)
    )
    yield row("other faults: messages, names at the client", sum(kinds.values()))
    share = report.measure(
        (case, "work, or are refused in one line", "%"),
        [100 * (works + refused) / max(1, len(seen))],
        better="higher",
        target=100,
        claim=_CLAIM,
    )
    yield share
    yield report.measure(
        (case, "work all the way", "tables"), [works], better="higher", target=0, claim=_CLAIM
    )
    yield report.measure(
        ("planted code that is executed on purpose", "is noticed", "1 = yes"),
        [float(notices_planted_code())],
        better="higher",
        target=1,
        claim=_CLAIM,
    )


def _again(number: int, place: int) -> None:
    seed = int(os.environ.get("SEED", "1"))
    drawn = chunk(seed, number)[place]
    print(drawn.said, drawn.options, [name for name, _ in drawn.files])
    folder = Path(tempfile.mkdtemp(prefix="embertide-edges-"))
    try:
        print(outcome(drawn, folder / "table"), folder)
    except BaseException:
        traceback.print_exc()


if __name__ == "__main__":
    _again(int(sys.argv[1]), int(sys.argv[2]))
