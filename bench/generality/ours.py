"""Ours: `embertide init` over a file, then `embertide train` with what it wrote, unchanged."""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.generality.sets import Array, Made
from bench.servers import BUILD, ROOT, BenchError
from embertide.trainer.commands.run_file import load

_FEW_VALUES = 64
_LEFT_OUT = 0.01  # of the rows, at most: malformed, or of a time far from all others
_CACHE = BUILD / "cache" / "dense"
_ROLES: dict[str, tuple[str, ...]] = {
    "key": ("keys",),
    "number": ("numbers",),
    "number and key": ("keys", "numbers"),
    "list": ("lists",),
}


def guessed(path: Path, out: Path) -> dict[str, Any]:
    """Write a run's file as `init` does; return what it says of the columns.

    Raises:
        BenchError: It refused the file.
    """
    return _told(["-m", "embertide.trainer", "init", str(path), "-o", str(out), "--json"], path)


def _told(words: list[str], what: Path) -> dict[str, Any]:
    """Run a command; return the last of its JSON lines."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise BenchError(f"{' '.join(words[2:4])} of {what} failed:\n{done.stderr or done.stdout}")
    try:
        said: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = json.loads(done.stdout.splitlines()[-1])
    return said


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The result of a run.

    Attributes:
        label_N: Labels of its events, in their order.
        score_N: From before each was learned.
        columns: The guess of `init` about each column.
        versions: That were published.
        seconds: `train` took.
    """

    label_N: Array
    score_N: Array
    columns: list[dict[str, Any]]
    versions: int
    seconds: float


def run(path: Path, seed: int) -> Run:
    """Train on a file by what `init` writes.

    Of the seed that `init` writes, its file is run as it is; of another, with that seed.

    Raises:
        BenchError: A command failed, or rejected a row.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, scores = Path(folder) / "run.py", Path(folder) / "scores.npz"
        said = guessed(path, out)
        if seed != load(out).run.seed:
            text = out.read_text(encoding="utf-8")
            more = f"import dataclasses\n\nrun = dataclasses.replace(run, seed={seed})\n"
            out.write_text(text + more, encoding="utf-8")
        words = ["-m", "bench.generality.observed", str(scores), "train", f"{folder}/published"]
        began = time.monotonic()
        told = _told([*words, "--config", str(out), "--cache", str(_CACHE), "--json"], path)
        seconds = round(time.monotonic() - began, 1)
        kept = np.load(scores)
        result = told["result"]
        if result["events"] < said["rows"] * (1 - _LEFT_OUT):
            raise BenchError(f"{path}: of {said['rows']} rows {result['rejected']} were rejected")
        return Run(
            label_N=kept["label_N"],
            score_N=kept["score_N"],
            columns=said["columns"],
            versions=result["version"],
            seconds=seconds,
        )


def first_of_last(rows: int, share: float) -> int:
    """Return the first row of the last share of rows."""
    return rows - round(rows * share)


def as_read(path: Path) -> Made:
    """Return the rows of a file of somebody else, as `init` takes its columns.

    Raises:
        BenchError: `init` refused it.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.py"
        guessed(path, out)
        source = load(out).source
        assert source is not None
        names = [feature.name for feature in source.schema.features]
        lists = [n for n, feature in enumerate(source.schema.features) if feature.is_list]
        batches = list(source.batches(batch_size=65_536))
    keys_NF = np.concatenate([batch.keys_BF for batch in batches])
    dense_ND = np.concatenate([batch.dense_BD for batch in batches])
    columns: dict[str, Any] = {
        f"key {name}": keys_NF[:, n] for n, name in enumerate(names) if n not in lists
    }
    keys = tuple(columns)
    amounts = {f"number {name}": dense_ND[:, d] for d, name in enumerate(source.schema.dense)}
    items: dict[str, list[Array]] = {}
    for n in lists:
        bags = [batch.lists[n] for batch in batches]
        items[f"list {names[n]}"] = [
            each
            for bag in bags
            for each in np.split(bag.keys_N, bag.offsets_B1[1:-1].astype(np.int64))
        ]
    return Made(
        columns={**columns, **amounts, **items},
        label_N=np.concatenate([batch.label_B for batch in batches]).astype(np.int64),
        keys=keys,
        numbers=tuple(amounts),
        lists=tuple(items),
    )


def misread(columns: list[dict[str, Any]], made: Made) -> list[str]:
    """Name the columns that `init` took for something else than they are.

    An amount of few values may be a key: a net learns any shape of it.
    """
    wrong = []
    for each in columns:
        name, taken = each["column"], _ROLES.get(each["role"], ())
        if each["role"] == "key" and name in made.numbers and each["distinct"] <= _FEW_VALUES:
            continue
        meant = {role for role in ("keys", "numbers", "lists") if name in getattr(made, role)}
        if meant and not meant & {*taken}:
            wrong.append(f"{name} as {each['role']}")
    return wrong
