"""TorchRec's EmbeddingBagCollection over the store: a KeyedJaggedTensor in, pooled vectors out.

The interface is that of `torchrec.modules.embedding_modules.EmbeddingBagCollection` 1.8, by its
names, and nothing here imports TorchRec: tables are anything that has an EmbeddingBagConfig's
attributes, features anything that has a KeyedJaggedTensor's methods. docs/torchrec.md moves a
model.

Shapes: B samples, F features, N keys, R rows of a table, d their width, E all widths of a sample.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from embertide import _store
from embertide.trainer.config import FeatureConfig, ModelConfig, Pooling, TableConfig
from embertide.trainer.data.bags import Bags, Floats
from embertide.trainer.data.keys import buckets_of
from embertide.trainer.embedding.records import encode_rows
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.presets import bucket_bits

_POOLINGS: dict[str, Pooling] = {"SUM": "sum", "MEAN": "mean"}


class BagConfig(Protocol):
    """A table as `torchrec.EmbeddingBagConfig` describes it.

    Attributes:
        name: The table's.
        embedding_dim: Width of a row.
        num_embeddings: Rows expected. It chooses how many buckets there are, and bounds nothing.
        feature_names: The features whose keys it holds.
        pooling: torchrec.PoolingType, or its name: "SUM" or "MEAN".
    """

    name: str
    embedding_dim: int
    num_embeddings: int
    feature_names: list[str]
    pooling: Any


class KeyedJagged(Protocol):
    """Keys of F features of B samples, feature by feature, as torchrec.KeyedJaggedTensor's."""

    def keys(self) -> Sequence[str]:
        """Return the names of the features."""

    def values(self) -> Tensor:
        """Return the keys of all features and samples."""

    def lengths(self) -> Tensor:
        """Return how many keys each bag has: those of feature 0's samples, then feature 1's ..."""

    def weights_or_none(self) -> Tensor | None:
        """Return a weight for each key; None: 1."""


class KeyedTensor:
    """Pooled vectors by name, as torchrec.KeyedTensor has them."""

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        """Name the columns of values_BE."""
        self._keys, self._lengths, self._values = list(keys), list(length_per_key), values

    def keys(self) -> list[str]:
        """Return the names, in the order of their columns."""
        return self._keys

    def length_per_key(self) -> list[int]:
        """Return how many columns each name has."""
        return self._lengths

    def values(self) -> Tensor:
        """Return values_BE."""
        return self._values

    def to_dict(self) -> dict[str, Tensor]:
        """Return the columns of each name."""
        parts = self._values.split(self._lengths, dim=1)
        return dict(zip(self._keys, parts, strict=True))

    def __getitem__(self, key: str) -> Tensor:
        """Return the columns of a name."""
        return self.to_dict()[key]


class EmbeddingBagCollection(nn.Module):
    """Tables of the store, pooled by feature. Not thread-safe.

    Rows learn by the store's own optimizer: after `loss.backward()` call `step()`, beside the dense
    optimizer's. A key that has no row reads as zeros, and gets one when it first learns.

    Args:
        tables: The tables, TorchRec's EmbeddingBagConfigs or such.
        is_weighted: Whether each key is multiplied by its weight; a mean is divided by the number
            of keys, as FBGEMM's.
        options: Options of `EmbeddingStore`: optimizer, seed, budgets, ranks.

    Attributes:
        rows: The store.

    Raises:
        ValueError: A table is pooled by something else, or names no feature.
    """

    def __init__(
        self, tables: Sequence[BagConfig], *, is_weighted: bool = False, **options: Any
    ) -> None:
        """Open a store for the tables."""
        super().__init__()
        self.is_weighted = is_weighted
        self.rows = EmbeddingStore(model_of(tables, is_weighted=is_weighted), **options)
        self._features = [name for table in tables for name in table.feature_names]

    @property
    def embedding_names(self) -> list[str]:
        """Names of what forward gives: the feature's, of one in several tables "feature@table"."""
        return [feature.name for feature in self.rows.config.features]

    def forward(self, features: KeyedJagged) -> KeyedTensor:
        """Return the pooled vectors of every feature of the tables.

        Features that no table has are passed over.

        Raises:
            ValueError: A feature is missing, or its bags are not as many as others', or weights
                are missing.
        """
        bags = dict(zip(features.keys(), self._bags(features), strict=True))
        missing = [name for name in self._features if name not in bags]
        if missing:
            raise ValueError(f"features {missing} are not there; the keys are {[*bags]}")
        pooled_BE = self.rows.pool([bags[name] for name in self._features])
        return KeyedTensor(self.embedding_names, self.rows.config.feature_dims, pooled_BE)

    def step(self) -> int:
        """Bring the gradients since the last step into the rows; see `EmbeddingStore.step`."""
        return self.rows.step()

    def load(
        self, table: str, rows_Rd: Tensor, accumulator_R: Tensor | None = None, first: int = 0
    ) -> None:
        """Take rows that were trained or drawn elsewhere: row r becomes that of key first + r.

        Of many ranks, each takes those that it owns.

        Args:
            table: Its name.
            rows_Rd: A table's weights, as `state_dict()["embedding_bags.NAME.weight"]` has them.
            accumulator_R: State of row-wise Adagrad for each row; None: the optimizer's beginning.
            first: Key of the first row, so that a large table can be loaded in parts.

        Raises:
            ValueError: Rows are of another width, or not as many as the accumulators; or no finite
                numbers.
            StoreError: There is no room.
        """
        t = self.rows.config.table_index(table)
        layout, bits = self.rows.tables[t].layout, self.rows.tables[t].bucket_bits
        values_Rd = np.ascontiguousarray(rows_Rd.detach().cpu().numpy(), np.float32)
        if values_Rd.ndim != 2 or values_Rd.shape[1] != layout.dim:
            raise ValueError(f"table {table!r}: rows are {values_Rd.shape}; give [R, {layout.dim}]")
        if not np.isfinite(values_Rd).all():
            raise ValueError(f"table {table!r}: some values of rows are not finite numbers")
        count = len(values_Rd)
        state_R = None if accumulator_R is None else accumulator_R.detach().cpu().reshape(-1)
        if state_R is not None and len(state_R) != count:
            raise ValueError(f"table {table!r}: {count} rows, {len(state_R)} accumulators")
        keys_R = np.arange(first, first + count, dtype=np.int64).view(np.uint64)
        bucket_R = buckets_of(keys_R, bits)
        for bucket in np.unique(bucket_R).tolist():
            if not self.rows.ownership.holds(self.rows.ranks.rank, t, bucket):
                continue
            here_R = bucket_R == bucket
            records = encode_rows(layout, keys_R[here_R], values_Rd[here_R])
            self.rows.store.import_records(t, bucket, records.tobytes())
            self.rows.store.mark_changed(t, bucket, keys_R[here_R])
            if state_R is not None:
                self._set_accumulators(t, bucket, keys_R[here_R], state_R.numpy()[here_R])

    def _set_accumulators(
        self, table: int, bucket: int, keys_K: NDArray[np.uint64], accumulator_K: Floats
    ) -> None:
        store, layout = self.rows.store, self.rows.tables[table].layout
        all_N = _store.record_keys(layout, store.export_bucket(table, bucket))
        before_N, age_N, utility_NC, steps_N, elements_NE = store.bucket_state(table, bucket)
        accumulator_N = before_N.copy()
        by_key = np.argsort(all_N)
        accumulator_N[by_key[np.searchsorted(all_N, keys_K, sorter=by_key)]] = accumulator_K
        state = (accumulator_N, age_N, utility_NC, steps_N, elements_NE)
        store.set_bucket_state(table, bucket, state)

    def _bags(self, features: KeyedJagged) -> Iterator[Bags]:
        """Yield the bags of each of the features."""
        names, lengths = list(features.keys()), features.lengths()
        samples, rest = divmod(lengths.numel(), max(len(names), 1))
        if rest:
            raise ValueError(
                f"{lengths.numel()} lengths for {len(names)} features; give each as many samples"
            )
        sizes_FB = lengths.reshape(len(names), samples).cpu().numpy().astype(np.int64)
        keys_N = features.values().cpu().numpy().astype(np.int64, copy=False)
        weights_N: Floats | None = None
        if self.is_weighted:
            weights = features.weights_or_none()
            if weights is None:
                raise ValueError("the features have no weights; give them, or is_weighted=False")
            weights_N = weights.detach().cpu().numpy().astype(np.float32, copy=False)
        ends = np.cumsum(sizes_FB.sum(1)).tolist()
        for sizes_B, (begin, end) in zip(sizes_FB, itertools.pairwise([0, *ends]), strict=True):
            part = slice(begin, end)
            yield Bags.of(keys_N[part], sizes_B, None if weights_N is None else weights_N[part])


def model_of(tables: Sequence[BagConfig], *, is_weighted: bool = False) -> ModelConfig:
    """Return the model that TorchRec's tables are: for `RunConfig`, too.

    Raises:
        ValueError: A table is pooled by something else, or names no feature.
    """
    shared = Counter(name for table in tables for name in table.feature_names)
    features = []
    for table in tables:
        pooling = getattr(table.pooling, "name", table.pooling)
        if pooling not in _POOLINGS:
            raise ValueError(
                f"table {table.name!r}: pooling is {pooling!r}; use one of {[*_POOLINGS]}"
            )
        if not table.feature_names:
            raise ValueError(f"table {table.name!r} has no feature_names; name at least one")
        features += [
            FeatureConfig(
                name=f"{name}@{table.name}" if shared[name] > 1 else name,
                table=table.name,
                pooling=_POOLINGS[pooling],
                keys="weighed" if is_weighted else "list",
            )
            for name in table.feature_names
        ]
    made = tuple(
        TableConfig(
            name=each.name, dim=each.embedding_dim, bucket_bits=bucket_bits(each.num_embeddings)
        )
        for each in tables
    )
    return ModelConfig(name="torchrec", tables=made, features=tuple(features))
