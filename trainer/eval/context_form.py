"""Requests that carry once what neighbouring events have in common: a user and its candidates.

docs/serving.md, "One user, many candidates", has the form. A model's configuration says whether it
takes it, and which columns are the user's.

Shapes: B samples, U contexts, F columns of KEYS that events have, D of DENSE.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.client.errors import ClientError
from embertide.client.schema import Schema
from embertide.trainer.data.base import Batch


@dataclasses.dataclass(frozen=True, slots=True)
class ContextForm:
    """Which columns are the user's.

    Attributes:
        keys_F: For the columns of KEYS that events have.
        dense_D: For the columns of DENSE.
    """

    keys_F: NDArray[np.bool_]
    dense_D: NDArray[np.bool_]

    @classmethod
    def told(cls, response: Any, model: str) -> "ContextForm | None":
        """Read the answer to ModelConfig; None: the model takes whole rows, or does not tell."""
        try:
            schema = Schema.told(response, model)
        except ClientError:
            return None
        if not schema.context:
            return None
        own = [feature.name for feature in schema.features if not feature.made]
        dense = schema.dense or ("",) * schema.dense_columns
        return cls(*(np.isin(np.array(names, object), schema.context) for names in (own, dense)))

    def takes(self, batch: Batch) -> bool:
        """Return whether a batch has the columns, with one key each."""
        shape = (batch.keys_BF.shape[1], batch.dense_BD.shape[1])
        return not batch.lists and shape == (len(self.keys_F), len(self.dense_D))

    def tensors(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Return what a request carries: each run of equal user's columns once."""
        keys_BF, dense_BD = batch.keys_BF, batch.dense_BD
        theirs_BC, values_BC = keys_BF[:, self.keys_F], dense_BD[:, self.dense_D]
        # As bits: values that are missing are equal, too.
        bits_BC = np.ascontiguousarray(values_BC, np.float32).view(np.uint32)
        begins_B = np.ones(len(batch), bool)
        begins_B[1:] = (theirs_BC[1:] != theirs_BC[:-1]).any(1) | (bits_BC[1:] != bits_BC[:-1]).any(
            1
        )
        first_U = np.flatnonzero(begins_B)
        counts_U = np.diff(first_U, append=len(batch)).astype(np.int32)
        arrays: dict[str, NDArray[Any]] = {
            "CONTEXT_KEYS": theirs_BC[first_U],
            "CONTEXT_DENSE": values_BC[first_U],
            "CANDIDATES": counts_U,
            "KEYS": keys_BF[:, ~self.keys_F],
            "DENSE": dense_BD[:, ~self.dense_D],
        }
        return {name: array.reshape(1, -1) for name, array in arrays.items() if array.size}
