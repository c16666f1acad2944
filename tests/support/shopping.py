"""The news with a second task, unknown in some events, and weights of events."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from embertide.trainer.config import HeadConfig
from embertide.trainer.data.base import Batch, DerivedSource
from embertide.trainer.data.generator import NewsConfig, NewsSource

HEADS = (HeadConfig(name="click"), HeadConfig(name="buy", weight=0.5))
NEWS_CONFIG = NewsConfig(hours=2, views_per_hour=60, users=40, new_items_per_hour=5)


def tasks_of(batch: Batch) -> Batch:
    """A batch with a second label, unknown in some events, and weights."""
    event_B = batch.event_B
    buy_B = np.where(event_B % 5 == 0, np.nan, (event_B % 3 == 0) * batch.label_B)
    return dataclasses.replace(
        batch,
        more_labels_BL=buy_B[:, None].astype(np.float32),
        weight_B=(0.5 + event_B % 4).astype(np.float32),
    )


class Shopping(DerivedSource):
    """The news with the tasks of `HEADS`."""

    def __init__(self) -> None:
        news = NewsSource(NEWS_CONFIG)
        schema = news.schema
        super().__init__(
            news, dataclasses.replace(schema, label="click", more_labels=("buy",), weight="w")
        )

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        for batch in self._source.batches(batch_size=batch_size, start=start):
            yield tasks_of(batch)
