"""What a lookup and a training step cost by stage: `make bench-store PARTS=cost`.

Instructions a key by callgrind, which runs AVX2 but no AVX-512: they do not depend on what else the
machine does. One table of 300,000 rows, bags of 10 keys drawn evenly, one thread. Needs valgrind
(apt-get install valgrind); the programs beside this file print nanoseconds without it.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench import report
from bench.servers import BenchError
from bench.store import programs

_ROWS = 300_000
_BATCHES = 3  # of 200,000 keys, and one more, first
_KEYS = 200_000 * (_BATCHES + 1)
_CLAIM = "23.8"
_ELSE = "all else"
# By what a function's name holds; the first that fits.
_LOOKUP = {
    r"Finder::Aim|\bHashes\(": "hash, bucket and group; group asked for",
    r"FindInPlain|FindPlain": "keys of the group compared",
    r"Finder::Settle|PlaceOne|BucketIndex::": "second and later groups",
    r"Finder::Place|\bPlaceAll|\bPlace\(": "place of the row, its lines noted",
    r"Finder::Step|AskForRows": "lines of rows asked for",
    r"\bPool\b|\bPool<|PoolBag|PoolRows": "rows added in fp64",
}
_STEP = {
    r"TakePlaces|PlaceKnown|ValidateBags": "places checked",
    r"TableRun::Deal": "keys dealt out to parts",
    r"PartWorker::Run|GroupKeys": "grouped by key",
    r"AskFor|PartWorker::Place\(|FindInPlain": "found; row, state and gradients asked for",
    r"PartWorker::Take|GradientsOf|\bSum\(|SquaresOf": "gradients added, chunks' squares",
    r"Descend|\bUse<|Keep": "optimizer's step, utilities, the row written",
}
_LINE = re.compile(r"^\s*([\d,]+) \(\s*[\d.]+%\)\s+\S*?:(.+?)(?: \[.*\])?$")


def by_stage(annotated: str, stages: Mapping[str, str]) -> dict[str, int]:
    """Return the instructions of each stage, of what callgrind_annotate printed.

    Args:
        annotated: Lines of a count, its share, and file:function.
        stages: Patterns of functions' names, and what they belong to; others are "all else".

    Raises:
        BenchError: No line is as it should be.
    """
    counts: Counter[str] = Counter()
    for line in annotated.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        function = match.group(2)
        stage = next((name for each, name in stages.items() if re.search(each, function)), _ELSE)
        counts[stage] += int(match.group(1).replace(",", ""))
    if not counts:
        raise BenchError("callgrind_annotate printed no function: is it another valgrind?")
    return {stage: counts[stage] for stage in (*dict.fromkeys(stages.values()), _ELSE)}


def _count(program: Path, words: tuple[object, ...], measured: str) -> str:
    """Run a program under callgrind, which collects below `measured`; return the functions."""
    if shutil.which("valgrind") is None:
        raise BenchError("valgrind is not installed: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [
            *("valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"),
            *("--collect-atstart=no", f"--toggle-collect=*{measured}*"),
            *(str(program), *map(str, words)),
        ]
        environment = {**os.environ, "EMBERTIDE_VECTORS": "avx2"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            raise BenchError(f"{program.name} under valgrind: {done.stderr.strip()[-500:]}")
        annotate = ["callgrind_annotate", "--auto=no", "--threshold=100", str(out)]
        return subprocess.run(annotate, capture_output=True, text=True, check=True).stdout


def _instructions(
    target: str, words: tuple[object, ...], measured: str, stages: Mapping[str, str]
) -> dict[str, float]:
    """Return the instructions a key of each stage of a program, and of all together."""
    counts = by_stage(_count(programs.build(target), words, measured), stages)
    return {
        stage: count / _KEYS for stage, count in (*counts.items(), ("all", sum(counts.values())))
    }


def run() -> Iterator[report.Row]:
    """Yield the instructions a key of each stage: of gradients, without and with places."""
    unit = "instructions a key"
    for dim in (16, 64):
        words = (_ROWS, dim, _BATCHES, "fp64", "plain", 0)
        for stage, count in _instructions("lookup_cost", words, "Measured", _LOOKUP).items():
            name = (f"lookup, dim {dim}", stage, unit)
            yield report.measure(name, [count], better="lower", target=0.0, claim=_CLAIM)
    without, told = (
        _instructions("step_cost", (_ROWS, 16, 10, _BATCHES, places, 0), "MeasuredGradients", _STEP)
        for places in (0, 1)
    )
    for stage, count in told.items():
        yield report.compare(
            ("gradients, dim 16, rows' places told", stage, unit),
            [count],
            [without[stage]],
            peer_name="not told",
            better="lower",
            target=0.0,
            claim=_CLAIM,
        )
