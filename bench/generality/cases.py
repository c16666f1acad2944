"""A set's trials, the peer's and ours, and the rows that they come to."""

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.generality import machine, ours, sets
from bench.servers import BUILD, BenchError
from bench.train.runs import difference_row, mean_row, tree_of
from embertide.trainer.eval.metrics import auc
from embertide.trainer.lab.trials import Trial

FOLDER = BUILD / "bench" / "generality"
"""Where sets and figures are kept."""

PEERS = 2
"""Trials of a set that are the peers'; they come first."""

_LAST = 0.2
_LOSS = -0.01


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A set, or a file of somebody else's.

    Attributes:
        name: The name of its rows.
        path: The file.
        share: The share of a set's rows that are made.
        known: The set; None: `init` says what the columns are, to the peer as well.
    """

    name: str
    path: Path
    share: float
    known: str | None

    @property
    def held_out(self) -> bool:
        """Whether no rule was chosen by it."""
        return self.known is None or _set(self.known).held_out

    def made(self) -> sets.Made:
        """Return its rows, in the order of events."""
        if self.known is None:
            return ours.as_read(self.path)
        return _set(self.known).made(share=self.share)


def _set(name: str) -> sets.Dataset:
    return next(each for each in sets.SETS if each.name == name)


def case_of_set(dataset: sets.Dataset, share: float) -> Case:
    """Write a set to a file, unless it is there."""
    code = hashlib.sha256((inspect.getsource(sets) + str(share)).encode()).hexdigest()[:8]
    path = FOLDER / "files" / code / f"{dataset.name}.{dataset.format}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"unfinished.{dataset.format}")
        sets.write(dataset.made(share=share), unfinished)
        unfinished.rename(path)
    return Case(name=dataset.name, path=path, share=share, known=dataset.name)


def _peer(case: Case, seeds: tuple[int, ...], first: machine.Settings) -> dict[str, Any]:
    made = case.made()
    last = ours.first_of_last(len(made.label_N), _LAST)
    return {
        **dataclasses.asdict(machine.tune(made, last, seeds, first)),
        "labels": _digest(_as_sorted(made)),
    }


def _ours(case: Case, seed: int) -> dict[str, Any]:
    found = ours.run(case.path, seed)
    last = ours.first_of_last(len(found.label_N), _LAST)
    made = case.made()
    return {
        "auc": auc(found.label_N[last:], found.score_N[last:]),
        "labels": _digest(found.label_N),
        "seconds": found.seconds,
        "versions": found.versions,
        "misread": [] if case.known is None else ours.misread(found.columns, made),
    }


def _as_sorted(made: sets.Made) -> sets.Array:
    """Return the labels as whoever sorts the file by time has them: of equal times, as they lie."""
    if made.order_N is None or made.ts_ms_N is None:
        return made.label_N
    order_N = made.order_N[np.argsort(made.ts_ms_N[made.order_N], kind="stable")]
    return np.asarray(made.label_N[order_N])


def _digest(label_N: sets.Array) -> str:
    return hashlib.sha256(np.packbits(label_N.astype(bool)).tobytes()).hexdigest()


def trials(case: Case, seeds: tuple[int, ...]) -> list[Trial]:
    """Return the trials of the two peers, then ours by seed."""
    code = [inspect.getsource(module) for module in (sets, machine)]
    what = repr((case, seeds, code))
    peers = [
        Trial(
            name=f"{case.name} {name}",
            depends=what,
            measure=functools.partial(_peer, case, seeds, first),
        )
        for name, first in (("peer", machine.Settings()), ("peer of blocks", machine.BLOCKS))
    ]
    code += [tree_of("trainer"), inspect.getsource(ours)]
    return [
        *peers,
        *(
            Trial(
                name=f"{case.name} {seed}",
                depends=repr((case, seed, code)),
                measure=functools.partial(_ours, case, seed),
            )
            for seed in seeds
        ),
    ]


def rows_of(case: Case, found: Sequence[dict[str, Any]]) -> list[report.Row]:
    """Return the rows of a set: both AUCs, and their difference, which the claim is about.

    Args:
        case: The set.
        found: The figures of both peers, then ours by seed.

    Raises:
        BenchError: They are not of the same events.
    """
    peers, runs = found[:PEERS], found[PEERS:]
    if len({each["labels"] for each in found}) > 1:
        raise BenchError(f"{case.name}: ours and the peer did not score the same events")
    aucs = [run["auc"] for run in runs]
    of_peers = [float(np.mean(each["auc"])) for each in peers]
    of_peer = max(of_peers)
    less = [each - of_peer for each in aucs]
    name = f"{case.name}, held out" if case.held_out else case.name
    better = ("each batch", "blocks of 128")[int(np.argmax(of_peers))]
    both = mean_row(name, aucs, of_peer, f"tuned FM that scores {better}")
    return [
        both,
        difference_row(
            name,
            "AUC, ours less the better tuned FM's",
            less,
            better="higher",
            target=_LOSS,
            claim="H.1",
        ),
    ]
