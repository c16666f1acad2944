"""The peer: a factorisation machine (Rendle 2010), tuned on the very figure that it is rated by.

It learns the stream as ours does, each batch scored before it is learned from; or all of a block is
scored before any of it is learned (BLOCKS), as versions of a model are served. It is told what each
column is. Amounts are bins of equally many events, or a vector that their rank is multiplied with.
Shapes: N rows, B rows of a batch, S slots of a row, d factors.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bench.generality.sets import Made
from embertide.trainer.eval.metrics import auc

Array = NDArray[Any]
_MAX_ITEMS = 20
_HOUR_MS = 3_600_000
# The share of the rows that the scale of amounts is taken from, as ours does.
_FITTED = 0.1
Amounts = Literal["bins of 16", "bins of 64", "ranks"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The tuned settings of the machine.

    Attributes:
        optimizer: The optimizer of all weights; Adagrad has a rate of each value's own.
        rate: Its learning rate.
        dim: Factors.
        l2: L2 penalty on the weights that a batch looks up: this times the mean of their squares.
        batch: Rows of a step.
        amounts: The treatment of amounts.
        scale: Standard deviation of new factors.
        accumulator: Adagrad's first sum of squares.
        block: Rows that are scored before any of them is learned; 0: a batch's.
    """

    optimizer: Literal["adagrad", "adam"] = "adagrad"
    rate: float = 0.1
    dim: int = 8
    l2: float = 0.0
    batch: int = 64
    amounts: Amounts = "bins of 16"
    scale: float = 0.01
    accumulator: float = 0.0
    block: int = 0


# One at a time, the best of each kept: 17 runs of a set at most.
STEPS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("rate", (0.03, 0.05, 0.2)),
    ("optimizer, rate", (("adam", 0.001), ("adam", 0.003))),
    ("amounts", ("bins of 64", "ranks")),
    ("dim", (2, 4, 16)),
    ("l2", (1e-4, 1e-3, 1e-2)),
    ("batch", (16, 256)),
    ("scale", (0.1,)),
)

# The machine that scores blocks: 16 runs of a set at most.
BLOCKS = Settings(block=128, batch=128, accumulator=0.1)
STEPS_OF_BLOCKS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("rate", (0.03, 0.05, 0.2, 0.5)),
    ("accumulator", (1.0,)),
    ("l2", (1e-4, 1e-3, 1e-2)),
    ("batch", (16, 32)),
    ("amounts", ("bins of 64", "ranks")),
    ("dim", (2, 4, 16)),
    ("scale", (0.1,)),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """Rows as the machine reads them.

    Attributes:
        index_NS: Which weight; 0 is no weight.
        value_NS: The factor of that weight.
        weights: The number of weights.
    """

    index_NS: Array
    value_NS: Array
    weights: int


def _codes(values: Any) -> Array:
    """Return 1 and more for different values."""
    _, code_N = np.unique(np.asarray(values), return_inverse=True)
    return np.asarray(code_N, np.int64) + 1


def _ranks(value_N: Array) -> Array:
    """Return the share of the first rows' values that are below; NaN stays."""
    fitted = np.sort(value_N[: max(1000, int(len(value_N) * _FITTED))])
    fitted = fitted[~np.isnan(fitted)]
    low_N, high_N = (np.searchsorted(fitted, value_N, side) for side in ("left", "right"))
    return np.where(np.isnan(value_N), np.nan, (low_N + high_N) / (2 * max(1, len(fitted))))


def _amount(value_N: Array, amounts: Amounts) -> tuple[Array, Array]:
    rank_N = _ranks(value_N.astype(np.float64))
    missing_N = np.isnan(rank_N)
    if amounts == "ranks":
        value_N = np.where(missing_N, 1.0, 2 * rank_N - 1)
        return np.where(missing_N, 1, 2), value_N
    bins = int(amounts.removeprefix("bins of "))
    bin_N = np.minimum((np.nan_to_num(rank_N) * bins).astype(np.int64), bins - 1)
    return np.where(missing_N, 1, bin_N + 2), np.ones(len(value_N))


def slots_of(made: Made, amounts: Amounts) -> Slots:
    """Return the rows of a set; a list is the mean of its items."""
    columns = [(_codes(made.columns[name]), np.ones(len(made.label_N))) for name in made.keys]
    if made.ts_ms_N is not None:
        columns.append((made.ts_ms_N // _HOUR_MS % 24 + 1, np.ones(len(made.label_N))))
    columns += [
        _amount(np.asarray(made.columns[name], np.float64), amounts) for name in made.numbers
    ]
    index, value, weights = [], [], 1
    for index_N, value_N in columns:
        index.append(index_N[:, None] + weights - 1)
        value.append(value_N[:, None])
        weights += int(index_N.max())
    for name in made.lists:
        index_NL, value_NL = _list(made.columns[name])
        index.append(np.where(index_NL > 0, index_NL + weights - 1, 0))
        value.append(value_NL)
        weights += int(index_NL.max(initial=0))
    return Slots(
        np.concatenate(index, 1).astype(np.int64),
        np.concatenate(value, 1).astype(np.float32),
        weights,
    )


def _list(lists: Any) -> tuple[Array, Array]:
    items = [_items(each)[:_MAX_ITEMS] for each in lists]
    length_N = np.array([len(each) for each in items])
    place_NL = np.arange(max(1, length_N.max(initial=0)))[None, :] < length_N[:, None]
    index_NL = np.zeros(place_NL.shape, np.int64)
    flat = np.asarray(list(itertools.chain.from_iterable(items)))
    index_NL[place_NL] = _codes(flat) if len(flat) else 0
    return index_NL, place_NL / np.maximum(1, length_N)[:, None]


def _items(value: Any) -> list[Any]:
    if not isinstance(value, str):
        return list(value)
    separator = ";" if ";" in value else "|"
    return [each for each in value.split(separator) if each]


class Machine(nn.Module):
    """A bias, a weight and d factors of each key; gives logits."""

    def __init__(self, weights: int, settings: Settings) -> None:
        """Begin with factors near 0 and weights of 0."""
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.rows = nn.Embedding(weights, 1 + settings.dim, sparse=True)
        with torch.no_grad():
            self.rows.weight.normal_(0, settings.scale)
            self.rows.weight[:, 0] = 0
        self.l2 = settings.l2

    def forward(self, index_BS: Tensor, value_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits_B, and what L2 adds to the loss."""
        x_BSd = self.rows(index_BS) * value_BS.unsqueeze(2)
        sum_Bd = x_BSd.sum(1)
        factors_BSd = x_BSd[:, :, 1:]
        pairs_B = (sum_Bd[:, 1:].square() - factors_BSd.square().sum(1)).sum(1) / 2
        penalty = self.l2 * x_BSd.square().sum((1, 2)).mean() if self.l2 else torch.zeros(())
        return self.bias + sum_Bd[:, 0] + pairs_B, penalty


def scores(slots: Slots, label_N: Array, settings: Settings, seed: int) -> Array:
    """Return score_N, each from before its row was learned; a batch's loss is its mean."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # said, or torch warns
    machine = Machine(slots.weights, settings)
    if settings.optimizer == "adagrad":
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adagrad(
                machine.parameters(),
                lr=settings.rate,
                eps=1e-8,
                initial_accumulator_value=settings.accumulator,
            )
        ]
    else:
        optimizers = [
            torch.optim.SparseAdam(list(machine.rows.parameters()), lr=settings.rate),
            torch.optim.Adam([machine.bias], lr=settings.rate),
        ]
    found = [np.empty(0, np.float32)]
    for at, (index_BS, value_BS, label_B) in enumerate(_batches(slots, label_N, settings.batch)):
        if settings.block and at * settings.batch % settings.block == 0:
            block = slice(at * settings.batch, at * settings.batch + settings.block)
            with torch.no_grad():
                found.append(
                    machine(
                        torch.from_numpy(slots.index_NS[block]),
                        torch.from_numpy(slots.value_NS[block]),
                    )[0].numpy()
                )
        logit_B, penalty = machine(index_BS, value_BS)
        loss = nn.functional.binary_cross_entropy_with_logits(logit_B, label_B)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss + penalty).backward()
        for optimizer in optimizers:
            optimizer.step()
        if not settings.block:
            found.append(logit_B.detach().numpy())
    return np.concatenate(found)


def _batches(slots: Slots, label_N: Array, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    index_NS, value_NS = torch.from_numpy(slots.index_NS), torch.from_numpy(slots.value_NS)
    labels_N = torch.from_numpy(label_N.astype(np.float32))
    for begin in range(0, len(label_N), size):
        part = slice(begin, begin + size)
        yield index_NS[part], value_NS[part], labels_N[part]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The result of tuning.

    Attributes:
        settings: The best.
        auc: AUC of the last part, by seed.
        tried: AUC of each that was tried.
    """

    settings: Settings
    auc: list[float]
    tried: list[tuple[dict[str, Any], float]]


def tune(made: Made, last: int, seeds: tuple[int, ...], first: Settings) -> Tuned:
    """Tune a machine on the AUC of the rows from `last` on, which is what it is rated by.

    Args:
        made: The rows.
        last: The first row that it is rated by.
        seeds: Of the runs; it is tuned with the first.
        first: The settings to begin with: Settings() or BLOCKS.
    """
    slots = {amounts: slots_of(made, amounts) for amounts in ("bins of 16", "bins of 64", "ranks")}
    tried: list[tuple[dict[str, Any], float]] = []

    def rated(settings: Settings, seed: int) -> float:
        score_N = scores(slots[settings.amounts], made.label_N, settings, seed)
        return auc(made.label_N[last:], score_N[last:])

    def attempt(settings: Settings) -> float:
        tried.append((dataclasses.asdict(settings), rated(settings, seeds[0])))
        return tried[-1][1]

    best = first
    found = attempt(best)
    for names, values in STEPS_OF_BLOCKS if first.block else STEPS:
        if names == "amounts" and not made.numbers:
            continue
        base = best
        for value in values:
            each = value if isinstance(value, tuple) else (value,)
            settings = dataclasses.replace(base, **dict(zip(names.split(", "), each, strict=True)))
            figure = attempt(settings)
            if figure > found:
                best, found = settings, figure
    return Tuned(
        settings=best,
        auc=[found, *(rated(best, seed) for seed in seeds[1:])],
        tried=tried,
    )
