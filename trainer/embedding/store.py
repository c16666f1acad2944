"""EmbeddingStore: embedding tables held by the C++ store, used like any nn.Module.

Called with one key a feature; `pool` takes bags of keys, weighed or not.

A key that has no row yet reads as the table's default row, in training as in serving, so the
scores of a forward pass are those that serving would give. After `loss.backward()`, `step()` makes
the missing rows and brings the gradients of the forward passes since into all of them by an exact
step of the optimizer, on as many threads as torch uses; the rows do not depend on how many.

Shapes: B samples, F features, N keys, E all embedding values of a sample.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embertide import _store
from embertide.trainer.config import (
    Codecs,
    ModelConfig,
    OptimizerConfig,
    Pooling,
    PruneConfig,
    SequenceConfig,
    TableConfig,
)
from embertide.trainer.data.bags import Bags, Floats
from embertide.trainer.data.base import PADDING_KEY
from embertide.trainer.embedding.columns import ColumnTables, check_columns
from embertide.trainer.embedding.hot import HotRows, check_hot_rows, guests_bytes
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.sync.exchange import Asked, BagKeys, Exchange, Travelling
from embertide.trainer.sync.plan import Ownership, balanced
from embertide.trainer.sync.ranks import Ranks
from embertide.trainer.sync.row_server import RowServer, ServedExchange

Keys = NDArray[np.int64]
TableKeys = list[tuple[int, Keys]]
"""Keys of tables, by their places: what a pass looks up."""

_MAX_THREADS = 64  # that the store shares a step by
# One in this many steps measures the importance of tables, by its first so many samples: they say
# enough.
_STAKE_EVERY, _STAKE_SAMPLES = 4, 1024
_MAX_CHUNKS = 16  # of a row
_OF_UTILITY = ("utility", "utility_decay")  # options of the store
_MIN_BYTES = 64 << 10  # a share of all keys that is less than this is left alone


def _threads() -> int:
    return min(torch.get_num_threads(), _MAX_THREADS)


def store_table(
    table: TableConfig, index: int, seed: int, *, served: bool = False
) -> _store.TableConfig:
    """Return the store's description of a table, as it is trained, or as it is served."""
    layout = _store.RowLayout(
        dtype=table.served if served else table.dtype,
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


def store_tables(
    config: ModelConfig, seed: int, *, served: bool = False
) -> list[_store.TableConfig]:
    """Return the store's description of all tables, those of published histories behind."""
    learned = [store_table(table, i, seed, served=served) for i, table in enumerate(config.tables)]
    return learned + history_tables(config)


def history_tables(config: ModelConfig) -> list[_store.TableConfig]:
    """Return the tables of the histories that are published: rows of keys, by user."""
    published = [sequence for sequence in config.sequences if sequence.published]
    return [
        _store.TableConfig(
            name=sequence.table,
            id=index,
            layout=history_layout(sequence),
            # As many buckets as the users' own rows have.
            bucket_bits=config.tables[config.table_of(sequence.user)].bucket_bits,
            init_seed=0,
            init_scale=0.0,
        )
        for index, sequence in enumerate(published, len(config.tables))
    ]


def history_layout(sequence: SequenceConfig) -> _store.RowLayout:
    """Return the layout with the fewest keys a chunk: what is not taken costs nothing.

    With times, a chunk has an even number of items, and behind them half as many keys of times.
    """
    items = -(-sequence.length // _MAX_CHUNKS)
    keys = items
    if sequence.times:
        items += items % 2
        keys = items // 2 * 3
    return _store.RowLayout(dtype="keys", chunks=-(-sequence.length // items), chunk_dim=keys)


def _pruned_tables(config: ModelConfig, prune: PruneConfig) -> list[int]:
    names = prune.tables or tuple(table.name for table in config.tables)
    return [config.table_index(name) for name in names]


def _pruning(config: ModelConfig, prune: PruneConfig | None, ranks: int) -> dict[str, Any]:
    """Return the store's arguments of pruning; each of the ranks remembers its part of the keys."""
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
        "prune_groups": [(tables, prune.waiting // ranks, counts)],
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass whose gradient the next step takes.

    Attributes:
        gradients: Turns the embeddings' gradient into those of the pass's bags.
        asked: The rows asked of other ranks; None: the rows came from this store.
        places: The places where this store found the rows of the pass's bags; None: not known.
    """

    embeddings: Tensor
    gradients: "Callable[[Floats], list[_store.BagGradients]]"
    asked: Asked | None
    places: "list[_store.RowPlaces | None]"


class EmbeddingStore(nn.Module):
    """The tables of a model. Not thread-safe; one process owns a store.

    Args:
        config: Tables and features; a table may serve several features.
        optimizer: That of rows, and its numbers; row-wise Adagrad if left out.
        seed: Seed of new rows' values, a function of (seed, table, key, dimension).
        devices: Arenas that share buckets and budgets; no value depends on their number.
        ddr_budget_bytes: Rows, index and optimizer state must fit it (or the SSD budget).
        new_row_accesses: A key gets a row at its so many-th occurrence of late, 1 to 15; before, it
            reads as the default row and its gradients are dropped (counted in `stats`). What was
            counted is no part of a checkpoint.
        prune: Which rows stay; None: all. Of many ranks' rows together.
        ranks: With whom the tables are shared: each rank gives its own part of a batch to `forward`
            and calls `step` as often as all others, and each holds the rows of its own buckets.
            `Ranks.join()` names those that torchrun started; None: this process alone.
        ownership: Who owns which bucket; None: a balanced plan.
        codecs: How rows and gradients travel.
        hold_bytes: The part of the DDR budget for rows that are held there for passes to come; 0:
            none is held.
        max_staleness: Ranks learn whole batches by themselves, and the gradients of so many may
            come between the time when a batch reads rows and its own; None: ranks take every step
            together.
        hot_rows: How many rows may have a rank of their own, which answers for them in place of
            their bucket's owner; 0: none.

    Attributes:
        tables: Those of the store, as they are trained.
        served_tables: The same as versions, snapshots and nodes have them.
        hot: Such rows; None: there can be none.
        columns: The plan's column-wise tables; None: it has none.
        served: With `max_staleness`, how ranks read and change one another's rows; else None.
        prune_ratio: So many times fewer bytes than those of all keys seen, where that is the target
            of pruning, else 0: whoever measures what pruning costs may change it, and the next pass
            follows.
        maintains: Whether `step` calls `store.maintain`; else another thread does it, after each
            batch or so.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        ranks: Ranks | None = None,
        ownership: Ownership | None = None,
        codecs: Codecs | None = None,
        optimizer: OptimizerConfig | None = None,
        seed: int = 1,
        devices: int = 1,
        ddr_budget_bytes: int = 4 << 30,
        ssd_budget_bytes: int = 0,
        ssd_directory: str = "",
        new_row_accesses: int = 1,
        prune: PruneConfig | None = None,
        hold_bytes: int = 0,
        max_staleness: int | None = None,
        hot_rows: int = 0,
    ) -> None:
        """Open the store."""
        super().__init__()
        self.config = config
        self.optimizer = optimizer or OptimizerConfig()
        self.tables = store_tables(config, seed)
        self.served_tables = store_tables(config, seed, served=True)
        learned = self.tables[: len(config.tables)]
        self.ranks = ranks or Ranks.alone()
        owned = ownership or balanced(config, self.ranks.size)
        guests_budget = 0
        if hot_rows > 0:
            check_hot_rows(learned, hot_rows, ddr_budget_bytes, self.ranks.size)
            guests_budget = guests_bytes(learned, hot_rows)
        elif any(owned.columns(t) for t in range(len(learned))):
            guests_budget = ddr_budget_bytes // 2
        self.store = _store.TrainingStore(
            tables=self.tables,
            devices=devices,
            ddr_budget_bytes=ddr_budget_bytes - guests_budget,
            ssd_budget_bytes=ssd_budget_bytes,
            ssd_directory=ssd_directory,
            new_row_accesses=new_row_accesses,
            optimizer=self.optimizer.name,
            hold_bytes=hold_bytes,
            **_pruning(config, prune, (ranks or Ranks.alone()).size),
        )
        self.prune = prune
        self.prune_ratio = 0.0 if prune is None else prune.first_ratio
        self._pruned = [] if prune is None else _pruned_tables(config, prune)
        self.ownership = owned.with_more([1 << t.bucket_bits for t in self.tables[len(learned) :]])
        self.exchange: Exchange | None = None
        for t in self._pruned:
            if self.ownership.everywhere(t):
                raise ConfigurationError(
                    f"table {self.tables[t].name!r} is pruned, and the plan has it everywhere: give"
                    " its buckets to ranks"
                )
        if self.ranks.size > 1:
            made = Exchange if max_staleness is None else ServedExchange
            self.exchange = made(
                self.ranks,
                learned,
                owned,
                codecs or Codecs(),
                counting=new_row_accesses > 1
                or (prune is not None and prune.utility in ("norms", "accesses")),
                hot=hot_rows > 0,
            )
        self.hot: HotRows | None = None
        self.columns: ColumnTables | None = None
        pruning = _pruning(config, prune, self.ranks.size)
        learning = {
            "optimizer": self.optimizer.name,
            **{name: pruning[name] for name in _OF_UTILITY if name in pruning},
        }
        if self.exchange is not None and self.exchange.columns:
            check_columns(self.exchange, learned, hot=hot_rows > 0)
            self.columns = ColumnTables(self.store, learned, self.exchange, learning, guests_budget)
        if self.exchange is not None and hot_rows > 0:
            self.hot = HotRows(
                self.store,
                [
                    store_table(dataclasses.replace(table, bucket_bits=0), i, seed)
                    for i, table in enumerate(config.tables)
                ],
                self.exchange,
                learning,
                hot_rows,
            )
        self.served: ServedExchange | None = None
        if isinstance(self.exchange, ServedExchange) and max_staleness is not None:
            self.served = self.exchange
            self.served.server = RowServer(max_staleness, self._serve_rows, self._apply)
        self._on_ssd = ssd_budget_bytes > 0
        self.maintains = True
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
        self._passes: list[_Pass] = []
        self._given: list[tuple[Asked, Travelling]] | None = None  # by `send`, for the next step

    @property
    def embedding_dim(self) -> int:
        """Columns of what forward gives."""
        return self._begin[-1]

    def _columns(self, feature: int) -> slice:
        return slice(self._begin[feature], self._begin[feature + 1])

    def _learned(self, feature: int) -> slice:
        """Return the columns that a gradient is of."""
        return slice(self._begin[feature], self._begin[feature] + self._dims[feature])

    def ask(
        self, keys_BF: Keys | None = None, bags_F: Sequence[Bags] | None = None
    ) -> Asked | None:
        """Ask other ranks for the keys of a pass that is to come: `forward`'s, or `pool`'s.

        May be called by another thread, for one pass ahead of those that are learned. None: there
        are no others.
        """
        if self.exchange is None:
            return None
        pieces: list[BagKeys]
        if bags_F is not None:
            pieces = [
                # A weighed key's row is wanted by itself.
                (table, bags.keys_N, bags.offsets_B1 if bags.weights_N is None else None)
                for table, bags in zip(self._tables, bags_F, strict=True)
            ]
        else:
            keys_FB = np.ascontiguousarray(np.asarray(keys_BF, np.int64).T)
            pieces = [
                (table, keys_B, None) for table, keys_B in zip(self._tables, keys_FB, strict=True)
            ]
        return self.exchange.ask(pieces)

    def forward(self, keys_BF: Keys, asked: Asked | None = None) -> Tensor:
        """Return embeddings_BE for one key a feature; counters stand behind a key's embedding.

        In training mode, unless torch records no gradients, the result takes one for `step`.
        `asked` is what `ask` gave for these keys, if it was called.
        """
        keys_BF = np.asarray(keys_BF, np.int64)
        keys_FB = np.ascontiguousarray(keys_BF.T)
        out = np.empty((len(keys_BF), self.embedding_dim), np.float32)
        if self.exchange is not None:
            asked = asked or self.ask(keys_BF)
            assert asked is not None
            rows = self.exchange.rows(asked, self._look_up)
            columns = (out[:, self._columns(f)] for f in range(len(keys_FB)))
            asked.routed.pool(rows, [("sum", out_Bd) for out_Bd in columns])
            return self._taking(partial(self._of_keys, keys_FB), out, asked)
        bags: list[_store.BagLookup] = [
            (table, keys_B, None, "sum", out[:, self._columns(f)])
            for f, (table, keys_B) in enumerate(zip(self._tables, keys_FB, strict=True))
        ]
        # Only the keys of a sequence that are taken have gradients: `_of_keys`.
        places = [
            each if f < len(self.config.features) else None
            for f, each in enumerate(self._look_up(bags))
        ]
        return self._taking(partial(self._of_keys, keys_FB), out, None, places)

    def table_keys(
        self, keys_BF: Keys | None = None, bags_F: Sequence[Bags] | None = None
    ) -> TableKeys:
        """Return the keys of a pass, each once a column, for `hold`, `bring` and `release`."""
        if bags_F is not None:
            keys_F = [bags.keys_N for bags in bags_F]
        else:
            keys_F = list(np.ascontiguousarray(np.asarray(keys_BF, np.int64).T))
        return _store.distinct_keys(list(zip(self._tables, keys_F, strict=True)))

    @property
    def brings(self) -> bool:
        """Whether `bring` does anything: there is an SSD, and no other rank asks for rows."""
        return self._on_ssd and self.exchange is None

    def bring(self, keys: TableKeys) -> None:
        """Bring rows of passes that are to come from the SSD to memory, if there is an SSD.

        They are then read once, many at a time, and not by `forward` and by `step`, but for the
        few that leave again before those come to them; rows that are held stay. No value depends on
        it. May be called by another thread.

        Raises:
            StoreError: A row cannot be read, or there is no room; the others were brought.
        """
        if self.brings:
            self.store.bring_rows(keys)

    def hold(self, keys: TableKeys) -> TableKeys | None:
        """Have the rows of these keys stay in memory, once they are there, until `release`.

        May be called by another thread.

        Returns:
            Those that were not held before, which are to be brought. None: the keys do not fit
            `hold_bytes`, or what index and directories leave of DDR; none is held by this call.
        """
        try:
            return self.store.hold_rows(keys)
        except _store.StoreError as error:
            if error.code != "RESOURCE_EXHAUSTED":
                raise
            return None

    def release(self, keys: TableKeys) -> None:
        """Let go of what one call of `hold` has held."""
        self.store.release_rows(keys)

    def hold_bytes_of_event(self) -> int:
        """Return what the rows of an event with one key a column may take while they are held."""
        return sum(self.store.hold_bytes_of(table) for table in self._tables)

    def _look_up(self, bags: "Sequence[_store.BagLookup]") -> "list[_store.RowPlaces]":
        """Look bags up; tell where rows are, if a step is to follow."""
        follows = self.training and torch.is_grad_enabled()
        tables = len(self.config.tables)
        elsewhere: HotRows | ColumnTables | None = self.hot
        other_N = [n for n, bag in enumerate(bags) if bag[0] >= tables]
        if self.columns is not None:
            self.columns.begin()
            elsewhere = self.columns
            other_N = [n for n, bag in enumerate(bags) if self.columns.has(bag[0])]
        if other_N:
            assert elsewhere is not None
            return self._look_up_both(elsewhere, bags, set(other_N), follows=follows)
        return self._look_up_here(bags, follows=follows)

    def _look_up_here(
        self, bags: "Sequence[_store.BagLookup]", *, follows: bool
    ) -> "list[_store.RowPlaces]":
        """Look bags up whose rows are at home."""
        if self._on_ssd and self.exchange is not None and follows:
            # Those that other ranks have asked for are known now alone.
            self.store.bring_rows([(bag[0], bag[1]) for bag in bags], threads=_threads())
        return self.store.lookup_bags(bags, threads=_threads(), places=follows)

    def _look_up_both(
        self,
        elsewhere: HotRows | ColumnTables,
        bags: "Sequence[_store.BagLookup]",
        other_N: set[int],
        *,
        follows: bool,
    ) -> "list[_store.RowPlaces]":
        """Look up bags of rows at home, and of those that stores beside this one have."""
        places: dict[int, _store.RowPlaces] = {}
        home_N = [n for n in range(len(bags)) if n not in other_N]
        at_home = self._look_up_here([bags[n] for n in home_N], follows=follows)
        places |= zip(home_N, at_home, strict=follows)
        found = elsewhere.look_up(
            [bags[n] for n in sorted(other_N)], threads=_threads(), places=follows
        )
        places |= zip(sorted(other_N), found, strict=follows)
        return [places[n] for n in sorted(places)]

    def _serve_rows(self, bags: "Sequence[_store.BagLookup]") -> None:
        """Look bags up for a rank that learns a batch by itself; another thread may train."""
        self.store.lookup_bags(bags, threads=_threads())

    def pool(self, bags_F: Sequence[Bags], asked: Asked | None = None) -> Tensor:
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
        for f, bags in enumerate(bags_F):
            if f in self._counted and (bags.weights_N is not None or (bags.sizes_B > 1).any()):
                raise ValueError(
                    f"feature {self.config.features[f].name!r} gives counts of its key, of which no"
                    " sum means anything: give bags of one key, without weights"
                )
        out = np.empty((sizes.pop(), self.embedding_dim), np.float32)
        if self.exchange is not None:
            asked = asked or self.ask(bags_F=bags_F)
            assert asked is not None
            self._pool_of_others(asked, self.exchange, bags_F, out)
            return self._taking(partial(self._of_bags, bags_F), out, asked)
        lookups: list[_store.BagLookup] = [
            (table, bags.keys_N, bags.offsets_B1, pooling, out[:, self._columns(f)], bags.weights_N)
            for f, (table, pooling, bags) in enumerate(self._with(bags_F))
        ]
        places = self._look_up(lookups)
        return self._taking(partial(self._of_bags, bags_F), out, None, places)

    def _pool_of_others(
        self, asked: Asked, exchange: Exchange, bags_F: Sequence[Bags], out: Floats
    ) -> None:
        """Pool rows that lie at all ranks."""
        rows = exchange.rows(asked, self._look_up)
        outs: list[tuple[str, Floats]] = []
        weighed: dict[int, Floats] = {}
        for f, (_, pooling, bags) in enumerate(self._with(bags_F)):
            if bags.weights_N is None:
                outs.append((pooling, out[:, self._columns(f)]))
            else:
                columns = self._columns(f)
                width = columns.stop - columns.start
                weighed[f] = np.empty((len(bags.keys_N), width), np.float32)
                outs.append(("none", weighed[f]))
        asked.routed.pool(rows, outs)
        for f, (_, pooling, bags) in enumerate(self._with(bags_F)):
            if f in weighed:
                out[:, self._columns(f)] = bags.pooled(weighed[f], pooling)

    def _with(self, bags_F: Sequence[Bags]) -> Iterator[tuple[int, Pooling, Bags]]:
        """Give each column's table, pooling and bags."""
        return zip(self._tables, self._poolings, bags_F, strict=True)

    def _taking(
        self,
        gradients: "Callable[[Floats], list[_store.BagGradients]]",
        out: Floats,
        asked: Asked | None,
        places: "Sequence[_store.RowPlaces | None]" = (),
    ) -> Tensor:
        """Return `out` as a tensor whose gradient the next step takes, if there will be one."""
        embeddings = torch.from_numpy(out)
        if self.training and torch.is_grad_enabled():
            embeddings.requires_grad_()
            self._passes.append(_Pass(embeddings, gradients, asked, list(places)))
        return embeddings

    def send(self) -> None:
        """Send the gradients of all forward passes since the last step to the ranks that own rows.

        `step` does it if nobody did; they travel while the caller does other things. A second call
        does nothing.

        Raises:
            RuntimeError: A forward pass has no gradient yet (backward was not called).
        """
        exchange = self.exchange
        if exchange is None or self._given is not None:
            return
        self._given = []
        for each, gradient in self._gradients():
            assert each.asked is not None
            pieces = [(bags[2], bags[3]) for bags in each.gradients(gradient)]
            sums = each.asked.routed.sum(pieces)
            if (travelling := exchange.give(each.asked, sums)) is not None:
                self._given.append((each.asked, travelling))

    def _gradients(self) -> list[tuple[_Pass, Floats]]:
        """Return the passes since the last step, each with its gradient; a part may be empty."""
        found: list[tuple[_Pass, Floats]] = []
        for each in self._passes:
            gradient = each.embeddings.grad
            if gradient is None and len(each.embeddings):
                raise RuntimeError("step() before backward(): the embeddings have no gradient")
            given = torch.zeros_like(each.embeddings) if gradient is None else gradient
            found.append((each, np.ascontiguousarray(given.detach().numpy())))
        return found

    def step(self) -> int:
        """Bring the gradients of all forward passes since the last step into the rows.

        As in torch, a key's gradients add up over all of them, and over all ranks, before the one
        update.

        Returns:
            How many rows were updated; of those that this rank owns. Where rows are served, 0:
            their owners have counted them.

        Raises:
            RuntimeError: A forward pass has no gradient yet (backward was not called); no row
                has changed then.
        """
        if self.served is not None:
            self.send()
            self._passes.clear()
            self._given = None
            return 0
        bags: list[_store.BagGradients] = []
        places: list[_store.RowPlaces | None] = []
        if self.exchange is None:
            for each, gradient in self._gradients():
                bags += each.gradients(gradient)
                places += each.places
        else:
            self.send()
            for asked, travelling in self._given or ():
                of_ranks, found = self.exchange.gradients(asked, travelling)
                bags += of_ranks
                places += found
                if self.hot is not None:
                    self.hot.note(asked)
        self._record_sensitivities()
        updated = self._apply(bags, places)
        self.drop_gradients()
        return updated

    def _apply(
        self,
        bags: "Sequence[_store.BagGradients]",
        places: "Sequence[_store.RowPlaces | None]" = (),
    ) -> int:
        """Take a step of the optimizer, and what follows each."""
        apply = partial(
            _store.TrainingStore.apply_gradients,
            learning_rate=self.optimizer.sparse_learning_rate,
            epsilon=self.optimizer.epsilon,
            initial_accumulator=self.optimizer.initial_accumulator,
            beta1=self.optimizer.beta1,
            beta2=self.optimizer.beta2,
            max_gradient_norm=self.optimizer.max_gradient_norm,
            threads=_threads(),
        )
        updated = 0
        if self.hot is not None:
            updated, bags, places = self.hot.apply(apply, bags, places)
        if self.columns is not None:
            updated, bags, places = self.columns.apply(apply, bags, places)
        updated += apply(self.store, bags, places=places)
        if self.columns is not None:
            self.columns.send_new()
        self.steps += 1
        self._prune()
        if self.maintains:
            self.store.maintain()
        return updated

    def drop_gradients(self) -> None:
        """Forget the forward passes since the last step: the rows learn nothing from them."""
        for each in self._passes if self.served is not None else ():
            assert self.served is not None
            assert each.asked is not None
            self.served.release(each.asked)
        self._passes.clear()
        for asked, travelling in self._given or ():
            if self.exchange is not None and not travelling.taken:
                self.exchange.gradients(asked, travelling)  # they are on their way
        self._given = None

    def _record_sensitivities(self) -> None:
        """Say, now and then, how much of the loss is at stake in each pruned table."""
        if self.prune is None or self.prune.utility != "fisher" or self.steps % _STAKE_EVERY:
            return
        sums = np.zeros((len(self.tables), 2))
        samples = -(-_STAKE_SAMPLES // self.ranks.size)
        for each, gradient in self._gradients():
            values_BE = each.embeddings.detach()[:samples].numpy()
            gradient_BE = gradient[:samples]
            for f, table in enumerate(self._tables):
                if table not in self._pruned:
                    continue
                values_Bd, gradient_Bd = (
                    part[:, self._learned(f)] for part in (values_BE, gradient_BE)
                )
                has_B = values_Bd.any(axis=1)  # else it had no row, or only such as say nothing
                along_B = np.einsum("Bd,Bd->B", values_Bd, gradient_Bd).astype(np.float64)
                squares_B = np.einsum("Bd,Bd->B", gradient_Bd, gradient_Bd).astype(np.float64)
                sums[table] += along_B @ along_B, squares_B @ has_B
        sums = self._summed(sums, "stakes")
        for t in self._pruned:
            at_stake, squares = sums[t].tolist()
            if np.isfinite(at_stake + squares):
                self.store.record_sensitivity(t, at_stake, squares)

    def _summed(self, values: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
        """Add up what all ranks say."""
        if self.exchange is None:
            return values
        return self.exchange.summed(values, kind)

    def _prune(self) -> None:
        """Make a pass of pruning, if one is due; all ranks make it, at one price."""
        if self.prune is None:
            return
        since = self.steps - self._pruned_at
        scheduled = self.exchange is None or self.prune.due(self.steps, since, 1.0)
        if not scheduled and since % self.prune.least:
            return  # ranks ask one another only so often how much room there is
        here = [self.store.seen_bytes(0) if self.prune_ratio else 0.0, self.store.prune_room(0)]
        seen, left = self._summed(np.array(here, np.float64), "room").tolist()
        may_take = self.prune.row_bytes(int(seen), self.prune_ratio)
        if self.prune_ratio and may_take < _MIN_BYTES:
            return
        if self.prune.due(self.steps, since, left / max(may_take, 1)):
            self.pruned = self._pass(may_take, self.prune.max_age)
            self._pruned_at = self.steps
            self.passes += 1

    def may_prune_next(self) -> bool:
        """Whether a pass of pruning may follow the next step; all ranks say the same."""
        if self.prune is None:
            return False
        since = self.steps + 1 - self._pruned_at
        return self.prune.due(self.steps + 1, since, 1.0) or since % self.prune.least == 0

    def bring_rows_home(self) -> None:
        """Have each row be at its bucket's owner, as versions and checkpoints find it.

        All ranks call it together, while no rank has asked for keys that are not learned yet.

        Raises:
            RankLostError: A rank is gone.
        """
        if self.hot is not None:
            self.hot.bring_home()
        if self.columns is not None:
            self.columns.bring_home()

    def send_hot_rows_out(self) -> None:
        """Choose rows by what was asked for since the last call, and have hosts answer for them.

        As `bring_rows_home`, which came before.

        Raises:
            RankLostError: A rank is gone.
        """
        if self.hot is not None:
            self.hot.send_out(self.hot.choose())

    def column_figures(self) -> dict[str, int]:
        """Return what there is of column-wise tables, as of `ColumnTables.figures`."""
        return {} if self.columns is None else self.columns.figures()

    def hot_figures(self) -> dict[str, int]:
        """Return what is hot, and what was, as of `HotRows.figures`; empty where nothing can be."""
        return {} if self.hot is None else self.hot.figures()

    def _pass(self, may_take: int, max_age: int) -> _store.PruneOutcome:
        """Make a pass of pruning over rows that are at home."""
        if self.columns is not None:
            self.columns.recall()
        if self.hot is None:
            return self._pass_here(may_take, max_age)
        out = self.hot.bring_home()
        outcome = self._pass_here(may_take, max_age)
        self.hot.send_out(out)
        return outcome

    def _pass_here(self, may_take: int, max_age: int) -> _store.PruneOutcome:
        if self.exchange is None:
            return self.store.prune(0, may_take, max_age=max_age)
        rows = np.array([self.store.prune_rows(0)], np.float64)
        sample = self.store.prune_sample(0, int(self.exchange.summed(rows, "room")[0]))
        samples = self.exchange.samples(sample)
        outcome = self.store.prune(0, may_take, max_age=max_age, samples=samples)
        # The bytes left free go to the ranks in proportion to their rows.
        bytes_ = float(outcome.bytes)
        total = float(self.exchange.summed(np.array([bytes_]), "room")[0])
        share = (bytes_ + 1) / (total + self.ranks.size)
        self.store.set_prune_room(0, int(max(may_take - total, 0.0) * share))
        return outcome

    def progress(self) -> tuple[int, int, list[bytes]]:
        """Return what a run depends on beside rows and their state, for checkpoints.

        The last is of each rank; all ranks call it together.
        """
        state = b"" if self.prune is None else self.store.prune_state(0)
        states = [state] if self.exchange is None else self.exchange.samples(state)
        return self.steps, self._pruned_at, states

    def resume(self, progress: tuple[int, int, list[bytes]], *, same_owners: bool = True) -> None:
        """Go on from what `progress` gave.

        Args:
            progress: The progress of as many ranks as there were.
            same_owners: Whether this rank owns what the rank of its number did.

        Raises:
            StoreError: It is not of a store that is pruned as this one.
        """
        steps, pruned_at, states = progress
        self.go_on_at(steps, pruned_at)
        if self.prune is None:
            return
        if same_owners and len(states) == self.ranks.size:
            self.store.set_prune_state(0, states[self.ranks.rank])
        else:
            self.store.load_prune_states(0, states, seen=self.ranks.first)

    def go_on_at(self, steps: int, pruned_at: int) -> None:
        """Count steps from `steps`, the newest pass of pruning having followed `pruned_at`.

        What pruning remembers of keys without a row begins anew.
        """
        self.steps, self._pruned_at = steps, pruned_at

    def _of_keys(self, keys_FB: Keys, gradient_BE: Floats) -> "list[_store.BagGradients]":
        """Return the gradients of a forward pass; a place of a sequence not taken has none."""
        bags: list[_store.BagGradients] = []
        for f, (table, keys_B) in enumerate(zip(self._tables, keys_FB, strict=True)):
            gradient_Bd = gradient_BE[:, self._learned(f)]
            # Questions to other ranks leave such places out by themselves.
            if f >= len(self.config.features) and self.exchange is None:
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
        """Yield every bucket as (table index, table, bucket), in the order of snapshots.

        Of many ranks, those that this one writes to versions and checkpoints.
        """
        for t, table in enumerate(self.tables):
            for bucket in range(1 << table.bucket_bits):
                if self.ownership.publishes(self.ranks.rank, t, bucket):
                    yield t, table, bucket

    def forget_changes(self, *, of_others: bool = False) -> None:
        """Take what a version would and leave it, so that changes that nobody publishes go.

        Args:
            of_others: Only those of rows held here that another rank writes.
        """
        for t, table in enumerate(self.tables):
            for bucket in range(1 << table.bucket_bits):
                mine = self.ownership.publishes(self.ranks.rank, t, bucket)
                if not (mine and of_others) and self.ownership.holds(self.ranks.rank, t, bucket):
                    self.store.take_changes(t, bucket)

    def is_served_otherwise(self, table: int) -> bool:
        """Whether nodes have a table's rows in another type than the one they are trained in."""
        return self.served_tables[table].layout.dtype != self.tables[table].layout.dtype

    def as_served(self, table: int, records: bytes) -> bytes:
        """Return trained records as nodes have them; tombstones stay as they are."""
        if not self.is_served_otherwise(table):
            return records
        layouts = self.tables[table].layout, self.served_tables[table].layout
        return _store.convert_records(*layouts, records)

    def take_changes(self, table: int, bucket: int) -> bytes:
        """Take what changed in a bucket since the last call, as a version carries it."""
        return self.as_served(table, self.store.take_changes(table, bucket))

    def served_bucket(self, table: int, bucket: int) -> bytes:
        """Return all rows of a bucket, as nodes have them."""
        return self.as_served(table, self.store.export_bucket(table, bucket))

    def buckets(self) -> Iterator[tuple[_store.TableConfig, int, bytes]]:
        """Yield all rows as nodes have them, (table, bucket, records), one bucket at a time."""
        for t, _, bucket in self.places():
            yield self.served_tables[t], bucket, self.served_bucket(t, bucket)

    def mark_changed(self, table: int, bucket: int, records: bytes) -> None:
        """Have the next version carry the keys of served `records`, as rows or as tombstones."""
        layout = self.served_tables[table].layout
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
        """Return the store's counters and sizes; steps of rows elsewhere are among the counters.

        A row of a column-wise table counts at each rank that has a part of it.
        """
        stats = self.store.stats()
        for each in (self.hot, self.columns):
            for name, count in ({} if each is None else each.counters()).items():
                stats[name] += count
        return stats
