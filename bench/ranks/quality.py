"""Quality and bytes of runs of 1, 2 and 4 ranks on the news file (bench.ranks.auc).

A run's figures are kept in `build/bench/ranks` under its arguments, so a part that was stopped goes
on; delete the folder after a change of the trainer.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.ranks.launching import launch
from bench.servers import BUILD
from bench.train.runs import difference_row

_FOLDER = BUILD / "bench" / "ranks"
_SEEDS = (1, 2, 3)
_RANKS = (2, 4)
_TOLERANCE = 0.0005
_DLRM = 0.8707
_KEY_BYTES = 8


def _run(
    data: Path, ranks: int, model: str, seed: int, rows: str, gradients: str
) -> dict[str, Any]:
    path = _FOLDER / f"{model}-{ranks}-{seed}-{rows}-{gradients}.json"
    if not path.is_file() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["--data", str(data.resolve()), "--model", model, "--seed", str(seed)]
        arguments += ["--rows", rows, "--gradients", gradients]
        found = launch("bench.ranks.auc", ranks, arguments, timeout_s=3600)
        path.write_text(json.dumps(found) + "\n")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def _apart(
    case: str, found: Sequence[float], than: Sequence[float], name: str, claim: str
) -> report.Row:
    """Return the row of how far apart two means of AUC are; the spread is the standard error."""
    return difference_row(
        f"{case}: AUC {statistics.fmean(found):.4f}, {name} {statistics.fmean(than):.4f}",
        "AUC apart, absolute",
        [mine - theirs for mine, theirs in zip(found, than, strict=True)],
        shown=abs,
        better="lower",
        target=_TOLERANCE,
        claim=claim,
    )


def measure(data: Path, seeds: Sequence[int] = _SEEDS) -> Iterator[report.Row]:
    """Yield the rows of AUC by ranks and by codecs, and of what travelled."""

    def aucs(ranks: int, model: str, rows: str = "fp32", gradients: str = "fp32") -> list[float]:
        return [_run(data, ranks, model, seed, rows, gradients)["auc"] for seed in seeds]

    alone = {model: aucs(1, model) for model in ("dlrm", "counters", "pruned")}
    yield _apart("DLRM, 1 rank", alone["dlrm"], [_DLRM] * len(seeds), "the bar", "20.2")
    for ranks in _RANKS:
        for model, name in (("dlrm", "DLRM"), ("counters", "counters")):
            found = aucs(ranks, model)
            yield _apart(f"{name}, {ranks} ranks", found, alone[model], "1 rank", "20.2")
    pruned = aucs(2, "pruned")
    yield _apart("counters pruned 20x, 2 ranks", pruned, alone["pruned"], "1 rank", "20.2")
    exact = aucs(2, "dlrm")
    for rows, gradients in (("fp16", "fp16"), ("bf16", "bf16"), ("fp32", "int8"), ("int8", "int8")):
        coded = aucs(2, "dlrm", rows, gradients)
        claim = "20.5" if "int8" not in (rows, gradients) else ""
        yield _apart(f"DLRM, rows {rows}, gradients {gradients}", coded, exact, "fp32", claim)
    yield from _bytes(data, seeds[0])


def _sent(found: dict[str, Any], kind: str) -> int:
    return sum(int(each[kind][1]) for each in found["sent"])


def _bytes(data: Path, seed: int) -> Iterator[report.Row]:
    """Yield what travelled under each codec, against fp32; and keys against their occurrences."""
    exact = _run(data, 2, "dlrm", seed, "fp32", "fp32")
    for rows, gradients, share in (("fp16", "fp16", 0.5), ("int8", "int8", 0.25 + 4 / 64)):
        coded = _run(data, 2, "dlrm", seed, rows, gradients)
        for kind in ("rows", "gradients"):
            yield report.compare(
                (f"{kind} as {rows}, dim 16", "bytes sent", "bytes"),
                [float(_sent(coded, kind))],
                [float(_sent(exact, kind))],
                peer_name="fp32",
                better="lower",
                target=share,
                claim="20.5",
            )
    # Every event is scored and learned; half of its keys are another rank's.
    occurrences = exact["events"] * exact["columns"] * 2 / 2
    yield report.compare(
        ("keys, each once a part", "bytes sent", "bytes"),
        [float(_sent(exact, "keys"))],
        [occurrences * _KEY_BYTES],
        peer_name="a key each time it occurs",
        better="lower",
        target=0.5,
        claim="20.5",
    )
