"""The unpruned rows of a run that bounds what pruning costs: a second store, with rows of all keys.

Net and unpruned rows learn as in a run without pruning, of the same seed, bit for bit. The run's
own rows are those of them that pruning keeps, and what nodes serve with the same net:

* They take the gradients that the unpruned rows take. So a row that was kept from its first step on
  is the unpruned one, bit for bit. Where rows are not of fp32, each is set to the unpruned one,
  rounded once, after each of its steps.
* A row that is made for a key, or made again, begins with what the unpruned row has learned, and so
  does a chunk that comes back. So the loss depends on the rows that are missing now, and not on
  those that once were.

Each batch is scored by both before it is learned, and the difference bounds the ratio
(prune_bound.py). Unpruned rows are fp32 whatever the run's are, so that the loss of rows of fewer
bits counts, too. They are never published.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.config import RunConfig
from embertide.trainer.embedding.carry import RowCarrier
from embertide.trainer.embedding.store import EmbeddingStore, Keys, TableKeys
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.prune_bound import PruneBound

_SIZES = ("ddr_payload_bytes", "index_bytes", "ssd_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnprunedState:
    """The part of a checkpoint that a bound needs, beside the unpruned rows.

    Attributes:
        steps: That the rows have taken.
        figures: Of `PruneBound.state`, as JSON has them.
        arrays: ... and its arrays.
    """

    steps: int
    figures: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def check_alone(ranks: int) -> None:
    """Refuse a bound where rows are at several ranks.

    Raises:
        ConfigurationError: They are.
    """
    if ranks > 1:
        raise ConfigurationError(
            f"prune: within is measured by one rank, and there are {ranks}: leave --nproc out, or"
            " find a ratio by `embertide prune-search` and give it (--prune-ratio)"
        )


def unpruned_store(run: RunConfig) -> EmbeddingStore:
    """Open the store of a run's unpruned rows: of fp32, and with budgets as large as the run's.

    On an SSD they have a folder of their own.
    """
    tables = tuple(
        each if each.dtype == "fp32" else dataclasses.replace(each, dtype="fp32")
        for each in run.model.tables
    )
    return EmbeddingStore(
        dataclasses.replace(run.model, tables=tables),
        optimizer=run.optimizer,
        seed=run.seed,
        devices=run.devices,
        ddr_budget_bytes=run.ddr_budget_bytes,
        ssd_budget_bytes=run.ssd_budget_bytes,
        ssd_directory=f"{run.ssd_directory}/unpruned" if run.ssd_directory else "",
    )


class Unpruned:
    """The unpruned rows, and what comes of comparing them. Used by the thread that learns.

    Attributes:
        rows: With a row of every key.
        bound: The loss, and the ratio that it leads to.
        brought: How often a row of the run was set to the unpruned one, since the start.
    """

    def __init__(self, pruned: EmbeddingStore, rows: EmbeddingStore, run: RunConfig) -> None:
        """Begin beside the run's own rows; both have learned nothing."""
        assert run.prune is not None
        self.rows = rows
        self.bound = PruneBound(run.prune)
        self.brought = 0
        self._pruned = pruned
        self._carriers = [
            RowCarrier(rows.tables[t], pruned.tables[t], state=False, counters=True)
            for t in range(len(run.model.tables))
        ]
        # Tables whose rows may have lost a part of their chunks.
        self._parted = [t for t, each in enumerate(self._carriers) if each.new.layout.chunks > 1]
        self._passes = 0  # of pruning, after which chunks were brought

    def add(
        self,
        label_B: NDArray[np.float32],
        unpruned: NDArray[np.float32],
        served: NDArray[np.float32],
    ) -> None:
        """Take both scores of a batch from before it was learned, [B] or [B, H]."""
        first, other = (
            each if each.ndim == 1 else np.ascontiguousarray(each[:, 0])
            for each in (unpruned, served)
        )
        if self.bound.add(label_B, first, other):
            self._pruned.prune_ratio = self.bound.ratio

    def to_bring(self, keys: TableKeys) -> dict[int, Keys]:
        """Return whose rows are to be brought after a step, by table; each once, ascending.

        These are keys of the pass that have no row in the run before it; and all, if rows are of
        another type: what a step rounds off would be lost, and the net knows the unpruned ones.
        """
        found: dict[int, Keys] = {}
        for t in sorted({table for table, _ in keys}):
            key_N = np.unique(np.concatenate([each for table, each in keys if table == t]))
            if self._carriers[t].new.layout.dtype == "fp32":
                key_N = key_N[~np.isin(key_N, self._with_row(t, key_N), assume_unique=True)]
            found[t] = key_N
        return found

    def bring(self, keys: Mapping[int, Keys]) -> None:
        """Have the rows of keys be as the unpruned ones, as far as a step has left them any."""
        for t, key_N in keys.items():
            new_N = np.sort(self._with_row(t, key_N).view(np.uint64))
            if len(new_N):
                self._bring(t, new_N)
        if self._pruned.passes != self._passes:
            self._passes = self._pruned.passes
            newest = self._pruned.pruned
            for t in self._parted if newest is not None and newest.chunks_regrown else ():
                self._bring_chunks(t)

    def refresh(self) -> None:
        """Follow the end of a version: both stores have counted its events.

        A chunk of counts that pruning took away is back with these alone: it gets those of before.
        What changed of the unpruned rows is nobody's to publish.
        """
        for t, carrier in enumerate(self._carriers):
            if carrier.new.counter_chunks:
                self._bring_chunks(t)
        self.rows.forget_changes()

    def figures(self) -> dict[str, Any]:
        """Return what a run says of its bound."""
        pruned, whole = (each.stats() for each in (self._pruned, self.rows))
        mine, theirs = (sum(each[name] for name in _SIZES) for each in (pruned, whole))
        return {
            **self.bound.figures(),
            "bytes": mine,
            "unpruned_bytes": theirs,
            "factor": theirs / mine if mine else None,
            "unpruned_rows": whole["rows"],
            "rows_brought": self.brought,
        }

    def state(self) -> UnprunedState:
        """Return a copy for a checkpoint."""
        figures, arrays = self.bound.state()
        return UnprunedState(steps=self.rows.steps, figures=figures, arrays=arrays)

    def restore(self, saved: UnprunedState) -> None:
        """Go on from a checkpoint, where nothing is learned yet; its rows are brought apart."""
        self.rows.go_on_at(saved.steps, 0)
        self.bound.restore(saved.figures, saved.arrays)
        self._pruned.prune_ratio = self.bound.ratio

    def _with_row(self, t: int, key_N: Keys) -> Keys:
        """Return which keys have a row in the run."""
        if not len(key_N):
            return key_N
        records, _ = self._pruned.store.copy_rows(t, key_N)
        return _store.record_keys(self._carriers[t].new.layout, records).view(np.int64)

    def _bring(self, t: int, key_N: NDArray[np.uint64]) -> None:
        """Have rows of the run be as the unpruned ones; keys ascend."""
        carrier = self._carriers[t]
        records, learned = self.rows.store.export_rows(t, key_N)
        there_N = _store.record_keys(carrier.old.layout, records)
        mine, state = self._pruned.store.export_rows(t, there_N)
        assert (there_N == _store.record_keys(carrier.new.layout, mine)).all()
        # A row may be made with some chunks alone: the others come once they are there.
        live_N = None
        if carrier.new.layout.chunks > 1:
            live_N = _store.decode_records(carrier.new.layout, mine)[1]
        brought = carrier.records(records, live_N)
        self._pruned.store.put_rows(t, brought, _as_learned(state, learned))
        self.brought += len(there_N)

    def _bring_chunks(self, t: int) -> None:
        """Have the live chunks of a table's rows be as the unpruned ones, where they are not."""
        carrier, store = self._carriers[t], self._pruned.store
        for bucket in range(1 << carrier.new.bucket_bits):
            mine = store.export_bucket(t, bucket)
            key_N, live_N, _, _ = _store.decode_records(carrier.new.layout, mine)
            records, learned = self.rows.store.export_rows(t, key_N)
            if not len(key_N):
                continue
            changed = _store.differing_records(
                carrier.new.layout, carrier.records(records, live_N), mine
            )
            changed_N = _store.record_keys(carrier.new.layout, changed)
            if not len(changed_N):
                continue
            places_N = np.searchsorted(key_N, changed_N)
            _, state = store.export_rows(t, changed_N)
            found = tuple(each[places_N] for each in learned)
            store.put_rows(t, changed, _as_learned(state, found))


def _as_learned(
    state: "_store.BucketState", learned: "tuple[NDArray[Any], ...]"
) -> "_store.BucketState":
    """Return states of rows with the optimizer's part of others; pruning's part is their own."""
    _, age_N, utility_NC, steps_N, _ = state
    return learned[0], age_N, utility_NC, steps_N, learned[4]
