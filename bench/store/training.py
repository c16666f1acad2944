"""The training step, embedding side alone: pooled forward, then gradients of the bags into rows.

Ours by hashed 64-bit keys, exact row-wise Adagrad in a TrainingStore; FBGEMM's TBE
by dense ids with EXACT_ROWWISE_ADAGRAD. The sides take turns in one process, batches are never
repeated, rows and optimizer state lie in huge pages where the side lets them. Forward and backward
are timed apart; the bars are for both together. Ours also keeps the utility of each row's chunks.

Shapes: N keys, B samples, T tables, D dimensions.
"""

import dataclasses
import gc
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench import report
from bench.report import CONSOLE
from bench.store import ours, peers
from embertide import _store

EXPONENTS = (0.0, 1.05, 1.2)
THREADS = (1, 2)
_REPETITIONS = 7  # and one more, first, that does not count
_RATE, _EPSILON = 0.01, 1e-8


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """Tables of one size, and what ours is to reach of TBE's steps a second."""

    tables: int
    rows: int
    dim: int
    shapes: tuple[tuple[int, int], ...]  # samples a batch, keys a bag
    bar: float


ONE = Model(1, 10_000_000, 16, ((200_000, 1), (20_000, 10), (4_000, 50)), 0.75)
MANY = Model(26, 200_000, 64, ((128, 20), (512, 20), (2_048, 20)), 1.0)
_MODELS = {"one": ONE, "many": MANY}
CASES = tuple(_MODELS)
_CLAIM = "23.3"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    model: Model
    samples: int
    bag: int
    exponent: float
    threads: int

    def __str__(self) -> str:
        """Name it in the report."""
        tables = f"{self.model.tables} tables, " if self.model.tables > 1 else ""
        spread = f"Zipf {self.exponent:g}" if self.exponent else "uniform"
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        dim = f"dim {self.model.dim}"
        return f"{tables}{dim}, {self.samples:,} bags of {self.bag}, {spread}, {threads}"

    @property
    def keys(self) -> int:
        """The number of keys of a batch."""
        return self.model.tables * self.samples * self.bag


class Ours:
    """A store that has every row."""

    def __init__(self, model: Model) -> None:
        """Make the rows."""
        self._store = ours.train(model.tables, model.rows, model.dim)
        self._dim = model.dim
        self._places: list[_store.RowPlaces] = []

    def forward(self, keys_TN: NDArray[np.int64], bag: int, threads: int) -> None:
        """Look the bags of each table up."""
        samples = keys_TN.shape[1] // bag
        offsets = np.arange(samples + 1, dtype=np.uint32) * np.uint32(bag)
        out_TBD = np.empty((len(keys_TN), samples, self._dim), np.float32)
        bags: list[_store.BagLookup] = [
            (table, keys_N, offsets, "sum", out_TBD[table]) for table, keys_N in enumerate(keys_TN)
        ]
        self._places = self._store.lookup_bags(bags, threads=threads, places=True)

    def backward(
        self,
        keys_TN: NDArray[np.int64],
        bag: int,
        gradients_BTD: NDArray[np.float32],
        threads: int,
    ) -> None:
        """Bring the gradients of all bags into the rows."""
        offsets = np.arange(len(gradients_BTD) + 1, dtype=np.uint32) * np.uint32(bag)
        bags: list[_store.BagGradients] = [
            (table, keys_N, offsets, gradients_BTD[:, table])
            for table, keys_N in enumerate(keys_TN)
        ]
        self._store.apply_gradients(
            bags, learning_rate=_RATE, epsilon=_EPSILON, threads=threads, places=self._places
        )


def _measure(case: Case, side: Ours, tbe: peers.TrainingTbe) -> Iterator[report.Row]:
    model, rng = case.model, np.random.default_rng(4)
    torch.set_num_threads(case.threads)
    offsets = torch.arange(0, case.keys + 1, case.bag)
    rates: list[list[float]] = []
    for _ in range(_REPETITIONS + 1):
        (ids_N,) = ours.draw(rng, model.rows, case.exponent, 1, case.keys)
        keys_TN = ours.keys_of(ids_N).reshape(model.tables, -1)
        shape = (case.samples, model.tables, model.dim)
        gradients_BTD = rng.standard_normal(shape, dtype=np.float32)
        ids, gradients = torch.from_numpy(ids_N), torch.from_numpy(gradients_BTD).flatten(1)
        times = [
            report.seconds(partial(side.forward, keys_TN, case.bag, case.threads)),
            report.seconds(partial(side.backward, keys_TN, case.bag, gradients_BTD, case.threads)),
            report.seconds(partial(tbe.forward, ids, offsets)),
            report.seconds(partial(tbe.backward, gradients)),
        ]
        forward, backward, peer_forward, peer_backward = times
        both = [forward + backward, peer_forward + peer_backward]
        rates.append([case.keys / seconds / 1e6 for seconds in (*times, *both)])
    series = list(zip(*rates[1:], strict=True))
    for metric, mine, peer, bar in (
        ("training step", 4, 5, model.bar),
        ("forward alone", 0, 2, 0.0),
        ("backward alone", 1, 3, 0.0),
    ):
        yield report.compare(
            (str(case), metric, "M keys/s"),
            series[mine],
            series[peer],
            peer_name=tbe.name,
            better="higher",
            target=bar,
            claim=_CLAIM if bar else "",
        )


def measure(level: str, cases: Sequence[str]) -> Iterator[report.Row]:
    """Yield the rows of cases, `one` table or `many`, by the vectors of this process."""
    for model in (_MODELS[case] for case in cases):
        CONSOLE.print(f"training, {level}: {model.tables} x {model.rows:,} rows of {model.dim}")
        side = Ours(model)
        tbe = peers.TrainingTbe(model.tables, model.rows, model.dim, _RATE, _EPSILON)
        for threads, exponent, (samples, bag) in itertools.product(
            THREADS, EXPONENTS, model.shapes
        ):
            yield from _measure(Case(model, samples, bag, exponent, threads), side, tbe)
        del side, tbe
        gc.collect()
