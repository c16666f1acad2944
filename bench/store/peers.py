"""FBGEMM's table-batched embeddings (TBE), beside a store of ours.

`make bench-store` puts FBGEMM into `build/peers`, out of the way of the environment. Shapes: N
keys, B bags, D dimensions, R rows.
"""

import ctypes
import importlib
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.servers import BUILD, BenchError

FOLDER = BUILD / "peers"
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def fbgemm(module: str) -> Any:
    """Import a module of FBGEMM.

    Raises:
        BenchError: It is not installed; the message says how.
    """
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    try:
        return importlib.import_module(f"fbgemm_gpu.{module}")
    except ImportError as error:
        raise BenchError(f"FBGEMM is not in {FOLDER} ({error}): run make build/.peers") from error


def use_huge_pages(tensor: Tensor) -> None:
    """Put the memory of a tensor into huge pages, as the store's is; small ones where refused."""
    first = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    last = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _HUGE_PAGE * _HUGE_PAGE
    libc = ctypes.CDLL(None)
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(max(last - first, 0)), advice)


class Tbe:
    """FBGEMM's training TBE, one table of dense ids, sum pooling."""

    name = "FBGEMM TBE"

    def __init__(self, rows: int, dim: int, **options: Any) -> None:
        """Make the table with random values."""
        training = fbgemm("split_table_batched_embeddings_ops_training")
        common = fbgemm("split_table_batched_embeddings_ops_common")
        place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        self.module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *place)], pooling_mode=common.PoolingMode.SUM, **options
        )
        self.weights_RD: Tensor = self.module.split_embedding_weights()[0]
        self.weights_RD.uniform_()
        use_huge_pages(self.weights_RD)

    def lookup(self, ids_N: Tensor, offsets_B: Tensor) -> Tensor:
        """Return pooled rows."""
        with torch.no_grad():
            pooled: Tensor = self.module(ids_N, offsets_B)
        return pooled


class TrainingTbe:
    """FBGEMM's training TBE with exact row-wise Adagrad, some tables of one size, sum pooling."""

    name = "FBGEMM TBE"

    def __init__(self, tables: int, rows: int, dim: int, rate: float, epsilon: float) -> None:
        """Make the tables with random values."""
        training = fbgemm("split_table_batched_embeddings_ops_training")
        common = fbgemm("split_table_batched_embeddings_ops_common")
        place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        self._module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *place)] * tables,
            pooling_mode=common.PoolingMode.SUM,
            optimizer=fbgemm("split_embedding_configs").EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=rate,
            eps=epsilon,
        )
        for weights_RD in self._module.split_embedding_weights():
            weights_RD.uniform_(-0.01, 0.01)
        use_huge_pages(self._module.weights_host)
        use_huge_pages(self._module.momentum1_host)
        self._pooled: Tensor | None = None

    def state(self) -> tuple[Tensor, Tensor]:
        """Return weights_RD, which may be written to, and accumulators_R of the first table."""
        weights_RD: Tensor = self._module.split_embedding_weights()[0]
        accumulators_R: Tensor = self._module.split_optimizer_states()[0][0]
        return weights_RD, accumulators_R

    def forward(self, ids_N: Tensor, offsets_B: Tensor) -> Tensor:
        """Return the bags pooled, table by table; its backward brings gradients into the rows."""
        pooled: Tensor = self._module(ids_N, offsets_B)
        self._pooled = pooled
        return pooled

    def backward(self, gradients_BE: Tensor) -> None:
        """Bring the gradients of the last forward's answer into the rows."""
        assert self._pooled is not None
        self._pooled.backward(gradients_BE)
        self._pooled = None


class PrunedHash:
    """FBGEMM's inference TBE behind its hash map of rows that pruning left: half of all ids."""

    name = "FBGEMM pruned-row hash map"

    def __init__(self, rows: int, dim: int) -> None:
        """Make the table and the map; ids are those that `ids` gives."""
        inference = fbgemm("split_table_batched_embeddings_ops_inference")
        common = fbgemm("split_table_batched_embeddings_ops_common")
        sparse = fbgemm("split_embedding_configs").SparseType.FP32
        left = np.random.default_rng(1).permutation(2 * rows)[:rows].astype(np.int32)
        self._ids_R = torch.from_numpy(np.sort(left))
        remapping = torch.full((2 * rows,), -1, dtype=torch.int32)
        remapping[self._ids_R.long()] = torch.arange(rows, dtype=torch.int32)
        self._module = inference.IntNBitTableBatchedEmbeddingBagsCodegen(
            [("table", rows, dim, sparse, common.EmbeddingLocation.HOST)],
            index_remapping=[remapping],
            use_array_for_index_remapping=False,
            pooling_mode=common.PoolingMode.SUM,
            output_dtype=sparse,
            device="cpu",
        )
        self._module.fill_random_weights()
        use_huge_pages(self._module.split_embedding_weights()[0][0])

    def ids(self, rows_N: NDArray[np.int64]) -> Tensor:
        """Return the ids of rows."""
        return self._ids_R[torch.from_numpy(rows_N)]

    def lookup(self, ids_N: Tensor, offsets_B: Tensor) -> Tensor:
        """Return pooled rows."""
        pooled: Tensor = self._module(ids_N, offsets_B)
        return pooled
