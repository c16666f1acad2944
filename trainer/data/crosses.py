"""Crossed features: one key for what several features of an event have together.

How popular an article is after another, or with those who come from a search, neither of the two
tells alone, and a net finds products of embeddings only slowly (Cheng et al. 2016,
arXiv:1606.07792). A cross becomes a column of KEYS. Nodes make it from the other columns, by the
formula of `cross_keys`; a request may also carry it, as it carries every other key.

Shapes: B events of a batch, F features, C features that are crossed.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import FeatureConfig, ModelConfig
from embertide.trainer.data.base import (
    Batch,
    DerivedSource,
    EventSchema,
    EventSource,
    FeatureColumn,
)
from embertide.trainer.data.keys import hash_keys


def cross_keys(keys_BC: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return one key for the C of each event: h = H(k), then h = H(h ^ k) of each that follows.

    H is the store's hash of a key (docs/formats.md). The order of the columns matters.
    """
    crossed_B = np.zeros(len(keys_BC), np.uint64)
    for keys_B in keys_BC.T:
        crossed_B = hash_keys(crossed_B ^ keys_B.astype(np.uint64))
    return crossed_B.view(np.int64)


class CrossedSource(DerivedSource):
    """The events of `source` with the crosses of a model's features behind their own."""

    def __init__(self, source: EventSource, model: ModelConfig) -> None:
        """Name the events and the model.

        Raises:
            ValueError: The source lacks a feature that is crossed.
        """
        names = [feature.name.lower() for feature in source.schema.features]
        crosses = [feature for feature in model.features if feature.crossed]
        for feature in crosses:
            for name in feature.crossed:
                if name not in names:
                    raise ValueError(
                        f"feature {feature.name!r} crosses {name!r}; the events have "
                        f"{', '.join(names)}"
                    )
        self._crosses = [[names.index(name) for name in each.crossed] for each in crosses]
        super().__init__(source, _extended(source.schema, crosses))

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yield batches as the source does, with their crosses."""
        for batch in self._source.batches(batch_size=batch_size, start=start):
            keys_B1 = [cross_keys(batch.keys_BF[:, each])[:, None] for each in self._crosses]
            keys_BF = np.concatenate((batch.keys_BF, *keys_B1), axis=1)
            yield dataclasses.replace(batch, keys_BF=keys_BF)


def crossed(source: EventSource, model: ModelConfig) -> EventSource:
    """Return the events as the model's features are of them: `source`, unless there are crosses."""
    if any(feature.crossed for feature in model.features):
        return CrossedSource(source, model)
    return source


def _extended(schema: EventSchema, crosses: list[FeatureConfig]) -> EventSchema:
    """Return what a schema is with the crosses; their columns are those of what comes first."""
    column = {feature.name.lower(): feature.column for feature in schema.features}
    more = (FeatureColumn(name=each.name, column=column[each.crossed[0]]) for each in crosses)
    return dataclasses.replace(schema, features=(*schema.features, *more))
