"""EmbeddingStore: embedding tables held by the C++ store, used like any nn.Module.

Called with one key a feature; `pool` takes bags of keys, weighed or not.

A key that has no row yet reads as the table's default row, in training as in serving, so the
scores of a forward pass are those that serving would give. After `loss.backward()`, `step()` makes
the missing rows and brings the gradients of the forward passes since into all of them by an exact
step of the optimizer, on as many threads as torch uses; the rows do not depend on how many.

Shapes: B samples, F features, N keys, E all embedding values of a sample.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embertide import _store
from embertide.trainer.config import (
    ModelConfig,
    OptimizerConfig,
    Pooling,
    PruneConfig,
    TableConfig,
)
from embertide.trainer.data.base import PADDING_KEY
from embertide.trainer.embedding.bags import Bags, Floats
from embertide.trainer.publish.snapshot import read_manifest

Keys = NDArray[np.int64]
_MAX_THREADS = 64  # that the store shares a step by
# Of so many steps one says what is at stake, by its first so many samples: they say enough.
_STAKE_EVERY, _STAKE_SAMPLES = 4, 1024
_LEAST_BYTES = 64 << 10  # a share of all keys that is less than this is left alone


def _threads() -> int:
    return min(torch.get_num_threads(), _MAX_THREADS)


def store_table(table: TableConfig, index: int, seed: int) -> _store.TableConfig:
    """Return the store's description of a table."""
    layout = _store.RowLayout(
        dtype=table.dtype,
        chunks=table.chunks + table.counter_chunks,
        chunk_dim=table.chunk_dim,
    )
    return _store.TableConfig(
        name=table.name,
        id=index,
        layout=layout,
        bucket_bits=table.bucket_bits,
        init_seed=seed,
        init_scale=table.init_scale,
        counter_chunks=table.counter_chunks,
    )


def _pruned_tables(config: ModelConfig, prune: PruneConfig) -> list[int]:
    names = prune.tables or tuple(table.name for table in config.tables)
    return [config.table_index(name) for name in names]


def _pruning(config: ModelConfig, prune: PruneConfig | None) -> dict[str, Any]:
    """Return the store's arguments of pruning."""
    if prune is None:
        return {}
    tables = _pruned_tables(config, prune)
    counts = [
        (t, counters.longest, prune.counts_worth)
        for t in tables
        if (counters := config.tables[t].counters) is not None
    ]
    return {
        "utility": "squares" if prune.utility == "fisher" else prune.utility,
        "utility_decay": 0.5 ** (1 / prune.half_life),
        "prune_groups": [(tables, prune.waiting, counts)],
    }


class EmbeddingStore(nn.Module):
    """The tables of a model. Not thread-safe; one process owns a store.

    Args:
        config: Tables and features; a table may serve several features.
        optimizer: That of rows, and its numbers; row-wise Adagrad if left out.
        seed: Of new rows' values, a function of (seed, table, key, dimension).
        devices: Arenas that share buckets and budgets; no value depends on their number.
        ddr_budget_bytes: Rows, index and optimizer state must fit it (or the SSD budget).
        new_row_accesses: A key gets a row at its so many-th occurrence of late, 1 to 15; before, it
            reads as the default row and its gradients are dropped (counted in `stats`). What was
            counted is no part of a checkpoint.
        prune: Which rows stay; None: all.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        optimizer: OptimizerConfig | None = None,
        seed: int = 1,
        devices: int = 1,
        ddr_budget_bytes: int = 4 << 30,
        ssd_budget_bytes: int = 0,
        ssd_directory: str = "",
        new_row_accesses: int = 1,
        prune: PruneConfig | None = None,
    ) -> None:
        """Open the store."""
        super().__init__()
        self.config = config
        self.optimizer = optimizer or OptimizerConfig()
        self.tables = [store_table(table, i, seed) for i, table in enumerate(config.tables)]
        self.store = _store.Store(
            tables=self.tables,
            profile="train",
            devices=devices,
            ddr_budget_bytes=ddr_budget_bytes,
            ssd_budget_bytes=ssd_budget_bytes,
            ssd_directory=ssd_directory,
            new_row_accesses=new_row_accesses,
            optimizer=self.optimizer.name,
            **_pruning(config, prune),
        )
        self.prune = prune
        self._pruned = [] if prune is None else _pruned_tables(config, prune)
        self.steps = self._pruned_at = self.passes = 0
        self.pruned: _store.PruneOutcome | None = None  # the newest pass
        self._poolings = [column.pooling for column in config.columns]
        self._tables = [config.table_index(column.table) for column in config.columns]
        self._counted = {
            config.feature_index(name)
            for table in config.tables
            if table.counters is not None
            for name in table.counters.readers
        }
        self._dims, widths = config.feature_dims, config.feature_widths
        self._begin = [sum(widths[:f]) for f in range(len(widths) + 1)]
        self._pending: list[tuple[Callable[[Floats], list[_store.BagGradients]], Tensor]] = []

    @property
    def embedding_dim(self) -> int:
        """Columns of what forward gives."""
        return self._begin[-1]

    def _columns(self, feature: int) -> slice:
        return slice(self._begin[feature], self._begin[feature + 1])

    def _learned(self, feature: int) -> slice:
        """Return the columns that a gradient is of."""
        return slice(self._begin[feature], self._begin[feature] + self._dims[feature])

    def forward(self, keys_BF: Keys) -> Tensor:
        """Return embeddings_BE for one key a feature; counters stand behind a key's embedding.

        In training mode, unless torch records no gradients, the result takes one for `step`.
        """
        keys_BF = np.asarray(keys_BF, np.int64)
        keys_FB = np.ascontiguousarray(keys_BF.T)
        out = np.empty((len(keys_BF), self.embedding_dim), np.float32)
        bags: list[_store.BagLookup] = [
            (table, keys_B, None, "sum", out[:, self._columns(f)])
            for f, (table, keys_B) in enumerate(zip(self._tables, keys_FB, strict=True))
        ]
        self.store.lookup_bags(bags, threads=_threads())
        return self._taking(partial(self._of_keys, keys_FB), out)

    def pool(self, bags_F: Sequence[Bags]) -> Tensor:
        """Return embeddings_BE for any number of keys a feature, pooled as its config says.

        It takes a gradient for `step` as `forward` does.

        Raises:
            ValueError: There is not one `Bags` a column of KEYS, or they differ in length; or a
                feature whose counters are read has a bag of several keys, or weights.
        """
        columns, sizes = len(self._tables), {len(bags) for bags in bags_F}
        if len(bags_F) != columns or len(sizes) != 1:
            raise ValueError(
                f"{len(bags_F)} features of {sorted(sizes)} bags; give {columns} of one number"
            )
        out = np.empty((sizes.pop(), self.embedding_dim), np.float32)
        lookups: list[_store.BagLookup] = []
        for f, (table, pooling, bags) in enumerate(self._with(bags_F)):
            if f in self._counted and (bags.weights_N is not None or (bags.sizes_B > 1).any()):
                raise ValueError(
                    f"feature {self.config.features[f].name!r} gives counts of its key, of which no"
                    " sum means anything: give bags of one key, without weights"
                )
            out_Bd = out[:, self._columns(f)]
            if bags.weights_N is None:
                lookups.append((table, bags.keys_N, bags.offsets_B1, pooling, out_Bd))
            else:
                rows_Nd, _, _ = self.store.lookup(table, bags.keys_N)
                out_Bd[:] = bags.pooled(rows_Nd, pooling)
        self.store.lookup_bags(lookups, threads=_threads())
        return self._taking(partial(self._of_bags, bags_F), out)

    def _with(self, bags_F: Sequence[Bags]) -> Iterator[tuple[int, Pooling, Bags]]:
        """Give each column's table, pooling and bags."""
        return zip(self._tables, self._poolings, bags_F, strict=True)

    def _taking(
        self, gradients: "Callable[[Floats], list[_store.BagGradients]]", out: Floats
    ) -> Tensor:
        """Return `out` as a tensor whose gradient the next step takes, if there will be one."""
        embeddings = torch.from_numpy(out)
        if self.training and torch.is_grad_enabled():
            embeddings.requires_grad_()
            self._pending.append((gradients, embeddings))
        return embeddings

    def step(self) -> int:
        """Bring the gradients of all forward passes since the last step into the rows.

        As in torch, a key's gradients add up over all of them before the one update.

        Returns:
            How many rows were updated.

        Raises:
            RuntimeError: A forward pass has no gradient yet (backward was not called); no row
                has changed then.
        """
        bags: list[_store.BagGradients] = []
        for gradients, embeddings in self._pending:
            if embeddings.grad is None:
                raise RuntimeError("step() before backward(): the embeddings have no gradient")
            bags += gradients(embeddings.grad.numpy())
        self._note_stakes()
        updated = self.store.apply_gradients(
            bags,
            learning_rate=self.optimizer.sparse_learning_rate,
            epsilon=self.optimizer.epsilon,
            initial_accumulator=self.optimizer.initial_accumulator,
            beta1=self.optimizer.beta1,
            beta2=self.optimizer.beta2,
            max_gradient_norm=self.optimizer.max_gradient_norm,
            threads=_threads(),
        )
        self._pending.clear()
        self.steps += 1
        self._prune()
        self.store.maintain()
        return updated

    def drop_gradients(self) -> None:
        """Forget the forward passes since the last step: the rows learn nothing from them."""
        self._pending.clear()

    def _note_stakes(self) -> None:
        """Say, now and then, how much of the loss is at stake in each pruned table."""
        if self.prune is None or self.prune.utility != "fisher" or self.steps % _STAKE_EVERY:
            return
        sums = np.zeros((len(self.tables), 2))
        for _, embeddings in self._pending:
            values_BE, gradient_BE = (
                each[:_STAKE_SAMPLES].numpy()
                for each in (embeddings.detach(), cast(Tensor, embeddings.grad))
            )
            for f, table in enumerate(self._tables):
                if table not in self._pruned:
                    continue
                values_Bd, gradient_Bd = (
                    each[:, self._learned(f)] for each in (values_BE, gradient_BE)
                )
                has_B = values_Bd.any(axis=1)  # else it had no row, or only such as say nothing
                along_B = np.einsum("Bd,Bd->B", values_Bd, gradient_Bd).astype(np.float64)
                squares_B = np.einsum("Bd,Bd->B", gradient_Bd, gradient_Bd).astype(np.float64)
                sums[table] += along_B @ along_B, squares_B @ has_B
        for t in self._pruned:
            at_stake, squares = sums[t].tolist()
            if np.isfinite(at_stake + squares):
                self.store.note_stake(t, at_stake, squares)

    def _prune(self) -> None:
        """Make a pass of pruning, if one is due."""
        if self.prune is None:
            return
        may_take = self.prune.row_bytes(self.store.seen_bytes(0) if self.prune.ratio else 0)
        if self.prune.ratio and may_take < _LEAST_BYTES:
            return
        room = self.store.prune_room(0) / max(may_take, 1)
        if self.prune.due(self.steps, self.steps - self._pruned_at, room):
            self.pruned = self.store.prune(0, may_take, max_age=self.prune.max_age)
            self._pruned_at = self.steps
            self.passes += 1

    def progress(self) -> tuple[int, int, bytes]:
        """Return what a run depends on beside rows and their state, for checkpoints."""
        state = b"" if self.prune is None else self.store.prune_state(0)
        return self.steps, self._pruned_at, state

    def resume(self, progress: tuple[int, int, bytes]) -> None:
        """Go on from what `progress` gave.

        Raises:
            StoreError: It is not of a store that is pruned as this one.
        """
        self.steps, self._pruned_at, state = progress
        if self.prune is not None:
            self.store.set_prune_state(0, state)

    def _of_keys(self, keys_FB: Keys, gradient_BE: Floats) -> "list[_store.BagGradients]":
        """Return the gradients of a forward pass; a place of a sequence not taken has none."""
        bags: list[_store.BagGradients] = []
        for f, (table, keys_B) in enumerate(zip(self._tables, keys_FB, strict=True)):
            gradient_Bd = gradient_BE[:, self._learned(f)]
            if f >= len(self.config.features):
                taken_B = keys_B != PADDING_KEY
                keys_B, gradient_Bd = keys_B[taken_B], gradient_Bd[taken_B]
            bags.append((table, keys_B, None, gradient_Bd))
        return bags

    def _of_bags(self, bags_F: Sequence[Bags], gradient_BE: Floats) -> "list[_store.BagGradients]":
        """Return the gradients of pooled bags."""
        gradients: list[_store.BagGradients] = []
        for f, (table, pooling, bags) in enumerate(self._with(bags_F)):
            offsets, gradient = bags.gradients(gradient_BE[:, self._learned(f)], pooling)
            gradients.append((table, bags.keys_N, offsets, gradient))
        return gradients

    def places(self) -> Iterator[tuple[int, _store.TableConfig, int]]:
        """Yield every bucket as (table index, table, bucket), in the order of snapshots."""
        for t, table in enumerate(self.tables):
            for bucket in range(1 << table.bucket_bits):
                yield t, table, bucket

    def forget_changes(self) -> None:
        """Take what a version would and leave it, so that changes that nobody publishes go."""
        for t, _, bucket in self.places():
            self.store.take_changes(t, bucket)

    def buckets(self) -> Iterator[tuple[_store.TableConfig, int, bytes]]:
        """Yield all rows as (table, bucket, records), one bucket at a time."""
        for t, table, bucket in self.places():
            yield table, bucket, self.store.export_bucket(t, bucket)

    def read_buckets(self, snapshot: Path) -> Iterator[tuple[int, _store.TableConfig, int, bytes]]:
        """Yield (table index, table, bucket, records) of a snapshot's files, each proved.

        Raises:
            StoreError: A file is not of these tables, or fails its checksum.
        """
        index = {table.name: t for t, table in enumerate(self.tables)}
        for fields in read_manifest(snapshot)["buckets"]:
            info = _store.BucketFileInfo(**fields)
            t = index[info.table]
            records = _store.read_bucket_file(str(snapshot), self.tables[t], info)
            yield t, self.tables[t], info.bucket, records

    def mark_changed(self, table: int, bucket: int, records: bytes) -> None:
        """Make the next take_changes give the keys of `records`, as they are or as tombstones."""
        layout = self.tables[table].layout
        self.store.mark_changed(table, bucket, _store.record_keys(layout, records))

    def pruning(self) -> dict[str, Any] | None:
        """Return how many passes there were since the store was opened, and what the newest left.

        None of a store that is not pruned.
        """
        if self.prune is None:
            return None
        said = {"passes": self.passes, "seen_bytes": self.store.seen_bytes(0)}
        names = ("price", "rows", "bytes", "rows_pruned", "rows_expired", "chunks_pruned")
        newest = {} if self.pruned is None else {n: getattr(self.pruned, n) for n in names}
        return said | newest

    def stats(self) -> dict[str, Any]:
        """Return the store's counters and sizes."""
        return self.store.stats()
