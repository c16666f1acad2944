"""Column-wise tables: what is learned of them, what they send, and whom they load.

    torchrun --standalone --nproc-per-node 4 -m bench.search.columns -- --steps 40

One launch takes the same steps under two plans of a model with one wide table of one bucket, which
most keys are of, beside small ones: each table whole at a rank of its own, and the wide one's
chunks over all ranks. Bytes are those that ranks sent, and floats those of rows that a rank looked
up for a step; nothing depends on the load of the machine.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import report
from bench.keys import DENSE
from bench.ranks.launching import launch
from bench.search.real import batches_of
from embertide import _store
from embertide.trainer.config import (
    DenseConfig,
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    PruneConfig,
    RunConfig,
    TableConfig,
)
from embertide.trainer.data.base import Batch
from embertide.trainer.model.learner import Learner
from embertide.trainer.sync.plan import Ownership
from embertide.trainer.sync.ranks import Ranks

_ROWS, _SMALL_ROWS, _CHUNKS = 5000, 200, 8
_OF_THE_WIDE = 4  # features, beside one of each small table
_LARGEST = 1e-5
_PRUNED = PruneConfig(bytes=1 << 20, half_life=10, first=(5,), every=8, least=4)


def _model(ranks: int, dim: int) -> ModelConfig:
    tables = [TableConfig(name="wide", dim=dim, chunks=_CHUNKS, bucket_bits=0)]
    tables += [
        TableConfig(name=f"small{n}", dim=dim, chunks=_CHUNKS, bucket_bits=0)
        for n in range(1, ranks)
    ]
    features = [FeatureConfig(name=f"w{n}", table="wide") for n in range(_OF_THE_WIDE)]
    features += [FeatureConfig(name=f"s{n}", table=f"small{n}") for n in range(1, ranks)]
    return ModelConfig(
        name="columns",
        tables=tuple(tables),
        features=tuple(features),
        dense=tuple(DenseConfig(name=f"x{d}", steps=()) for d in range(DENSE)),
        bottom_mlp=(16, dim),
        top_mlp=(16,),
    )


def _batches(count: int, samples: int, model: ModelConfig) -> list[Batch]:
    rows = [_ROWS if each.table == "wide" else _SMALL_ROWS for each in model.features]
    return batches_of(count, samples, 1, rows)


@dataclasses.dataclass(slots=True)
class _Learned:
    """Steps under a plan: all numbers of rows that are at home here, and what a rank did."""

    numbers: list[NDArray[Any]]
    scores: NDArray[np.float32]
    sent_bytes: int
    floats: int


def _learn(run: RunConfig, batches: list[Batch], ranks: Ranks, owners: Ownership) -> _Learned:
    learner = Learner(run, ranks, owners)
    rows, asked = learner.rows, 0
    exchange = rows.exchange
    assert exchange is not None
    answered = exchange.rows

    def counting(of: Any, look_up: Any) -> Any:
        nonlocal asked
        for keys_T in of.keys_RT:
            asked += sum(
                len(keys) * dim for keys, dim in zip(keys_T, exchange.answered_dims, strict=True)
            )
        return answered(of, look_up)

    exchange.rows = counting  # type: ignore[method-assign, assignment]
    kinds = ("lengths", "keys", "counts", "rows", "gradients", "columns")
    scores = [learner.learn(each) for each in batches[: len(batches) // 2]]
    # The second half: by then most keys have rows.
    asked, before = 0, {k: t.bytes for k, t in ranks.traffic.items() if k in kinds}
    scores += [learner.learn(each) for each in batches[len(batches) // 2 :]]
    sent = sum(t.bytes - before.get(k, 0) for k, t in ranks.traffic.items() if k in kinds)
    rows.bring_rows_home()
    numbers: list[NDArray[Any]] = []
    for t, table, bucket in rows.places():
        records = rows.store.export_bucket(t, bucket)
        keys = _store.record_keys(table.layout, records).view(np.int64)
        values, _, _ = rows.store.lookup(t, keys)
        numbers += [keys, values, *rows.store.bucket_state(t, bucket)]
    return _Learned(numbers, np.concatenate(scores), sent, asked)


def _difference(one: list[NDArray[Any]], other: list[NDArray[Any]]) -> float:
    """Return the largest difference of two numbers; infinite where there are others."""
    if [each.shape for each in one] != [each.shape for each in other]:
        return float("inf")
    return max(
        float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0))
        for a, b in zip(one, other, strict=True)
    )


def measure(_: object) -> Iterator[report.Row]:
    """Yield the rows of each case."""
    for ranks, dim, pruned in ((2, 64, False), (4, 64, False), (4, 256, False), (4, 64, True)):
        arguments = ("--dim", str(dim), *(("--pruned",) if pruned else ()))
        found = launch("bench.search.columns", ranks, arguments)
        case = f"{ranks} ranks, rows of {dim} floats{', pruned' if pruned else ''}"
        yield report.measure(
            (case, "largest difference from whole tables, of values, states and scores", ""),
            [found["difference"]],
            better="lower",
            target=_LARGEST,
            claim="E.3",
        )
        for name in ("whole", "columns"):
            yield report.measure(
                (case, f"max / mean of the floats that a rank answers with, {name}", ""),
                [found[name]["uneven"]],
                better="lower",
                target=0,
            )
        yield report.measure(
            (case, "bytes of all ranks, columns / whole", ""),
            [found["columns"]["bytes"] / found["whole"]["bytes"]],
            better="lower",
            target=0,
        )


def main() -> None:
    """Run as a rank that torchrun started."""
    made = argparse.ArgumentParser(prog="bench.search.columns", description=__doc__)
    made.add_argument("--samples", type=int, default=512, help="of a batch, all ranks together")
    made.add_argument("--steps", type=int, default=40)
    made.add_argument("--dim", type=int, default=64)
    made.add_argument("--pruned", action="store_true")
    given = made.parse_args()
    ranks = Ranks.join()
    model = _model(ranks.size, given.dim)
    run = RunConfig(
        model=model,
        batch_size=given.samples,
        optimizer=OptimizerConfig(sparse_learning_rate=0.05, initial_accumulator=1e-5),
        prune=_PRUNED if given.pruned else None,
    )
    batches = _batches(given.steps, given.samples, model)
    homes = tuple(np.full(1, t % ranks.size, np.uint16) for t in range(len(model.tables)))
    over = tuple(int(c * ranks.size // _CHUNKS) for c in range(_CHUNKS))
    learned = {
        "whole": _learn(run, batches, ranks, Ownership(ranks.size, homes)),
        "columns": _learn(run, batches, ranks, Ownership(ranks.size, homes, (over,))),
    }
    whole, columns = learned["whole"], learned["columns"]
    mine = {
        "difference": max(
            _difference(whole.numbers, columns.numbers),
            _difference([whole.scores], [columns.scores]),
        ),
        **{name: [each.sent_bytes, each.floats] for name, each in learned.items()},
    }
    every = ranks.channel("found").gather(mine)
    if ranks.first:
        said: dict[str, Any] = {"difference": max(each["difference"] for each in every)}
        for name in learned:
            floats = [each[name][1] for each in every]
            said[name] = {
                "bytes": sum(each[name][0] for each in every),
                "uneven": max(floats) * len(floats) / sum(floats),
            }
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
