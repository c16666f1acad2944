"""A model with fitted dense features, and events for it.

Shapes: N events, 3 columns of DENSE.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from embertide.trainer.config import (
    DenseConfig,
    FeatureConfig,
    ModelConfig,
    RunConfig,
    TableConfig,
)
from embertide.trainer.data.base import (
    MISSING_KEY,
    Batch,
    DeadLetters,
    EventSchema,
    EventSource,
    FeatureColumn,
)

DENSE = (
    DenseConfig(name="price", steps=("log1p", "clip", "standardise"), missing=True),
    DenseConfig(name="age", steps=("quantile",), points=17),
    DenseConfig(name="stars", steps=("bucketise",), points=5, fill=0.5),
)


def model(*dense: DenseConfig, **more: Any) -> ModelConfig:
    return ModelConfig(
        name="shop",
        tables=(TableConfig(name="item", dim=4),),
        features=(FeatureConfig(name="user", table="item"), FeatureConfig(name="it", table="item")),
        dense=dense,
        bottom_mlp=(4,),
        top_mlp=(4,),
        **more,
    )


# Fitted to the first 300 events, which are some versions.
RUN = RunConfig(
    model=model(*DENSE), batch_size=32, publish_every_s=600, snapshot_every=3, warmup_events=300
)


class Shop(EventSource):
    """Made-up events, five at a time and 25 s apart, whose prices rise; a tenth is missing.

    With `edges`, the feature `it` is the bin of the price.
    """

    def __init__(self, events: int = 1500, edges: tuple[float, ...] = ()) -> None:
        features = [FeatureColumn(name=name, column=name) for name in ("user", "it")]
        if edges:
            features[1] = FeatureColumn(name="it", column="price", transform="bin", edges=edges)
        names = tuple(feature.name for feature in DENSE)
        self.schema = EventSchema(features=tuple(features), label="y", dense=names, ts="ts")
        self.dead_letters = DeadLetters()
        rng = np.random.default_rng(11)
        price_N = rng.lognormal(np.arange(events) / events, 2)
        columns = (price_N, rng.normal(size=events), rng.integers(0, 6, events))
        dense_N3 = np.column_stack(columns).astype(np.float32)
        dense_N3[rng.random((events, 3)) < 0.1] = np.nan
        keys_N2 = rng.integers(0, 50, (events, 2))
        if edges:
            above_EN = np.array(edges, np.float32)[:, None] <= dense_N3[:, 0]
            keys_N2[:, 1] = np.where(np.isnan(dense_N3[:, 0]), MISSING_KEY, above_EN.sum(0))
        self.whole = Batch(
            first=0,
            next_offset=events,
            event_B=np.arange(events),
            ts_ms_B=np.arange(events) // 5 * 25_000,
            keys_BF=keys_N2,
            dense_BD=dense_N3,
            label_B=(rng.random(events) < 0.3).astype(np.float32),
        )

    def total_events(self) -> int:
        return len(self.whole)

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        size = -(-batch_size // 5) * 5
        arrays = ("event_B", "ts_ms_B", "keys_BF", "dense_BD", "label_B")
        for first in range(start, len(self.whole), size):
            end = min(first + size, len(self.whole))
            cut = {name: getattr(self.whole, name)[first:end] for name in arrays}
            yield Batch(first=first, next_offset=end, **cut)
