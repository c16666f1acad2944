"""Models of the news stream, and their rates: `embertide train --print-config NAME`."""

import dataclasses
import math
from typing import TYPE_CHECKING

from embertide.trainer.config import (
    CountersConfig,
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    SequenceConfig,
    TableConfig,
    compatibility,
)
from embertide.trainer.errors import ConfigurationError


def bucket_bits(expected_rows: int) -> int:
    """Return the bits that give about 10^5 rows a bucket."""
    return max(0, math.ceil(math.log2(max(1, expected_rows) / 1e5)))


_SMALL = ("env", "device", "os", "country", "region", "referrer", "hour")


def news_model() -> ModelConfig:
    """Return the model of the news stream: user, article before, article shown, small columns."""
    # More buckets than the rows ask for: buckets are what devices share and a reshard moves.
    tables = (
        TableConfig(name="user", bucket_bits=bucket_bits(400_000) + 2),
        TableConfig(name="prev", bucket_bits=3),
        TableConfig(name="cand", bucket_bits=3),
        *(TableConfig(name=name) for name in _SMALL),
    )
    features = tuple(FeatureConfig(name=table.name, table=table.name) for table in tables)
    return ModelConfig(name="news", tables=tables, features=features, top_mlp=(256, 64))


def news_rates() -> OptimizerConfig:
    """Return the rates of both news models, chosen on days 2 and 3 of the stream.

    Where keys come and go within hours, rows must learn quickly, and not from one event alone.
    Where keys stay, as those of ads, the defaults are better.
    """
    return OptimizerConfig(sparse_learning_rate=0.4, initial_accumulator=0.001)


def news_history() -> ModelConfig:
    """Return the news model that knows what its users liked; articles share a table."""
    tables = (
        TableConfig(name="user", dim=32, bucket_bits=bucket_bits(400_000) + 2),
        TableConfig(name="article", dim=32, bucket_bits=3),
        *(TableConfig(name=name, dim=32) for name in _SMALL),
    )
    table_of = {"user": "user", "prev": "article", "cand": "article"}
    table_of |= {name: name for name in _SMALL}
    return ModelConfig(
        name="news",
        tables=tables,
        features=tuple(FeatureConfig(name=n, table=t) for n, t in table_of.items()),
        sequences=(SequenceConfig(name="hist", user="user", item="cand", published=True),),
        net="history",
        bottom_mlp=(16,),
        top_mlp=(256, 64),
    )


def news_counters() -> ModelConfig:
    """Return the history model that also knows how popular the article shown is of late."""
    model = news_history()
    # Four chunks: eight counters fill one more of their size.
    counted = dataclasses.replace(
        model.tables[1], chunks=4, counters=CountersConfig(feature="cand")
    )
    return dataclasses.replace(
        model, tables=(model.tables[0], counted, *model.tables[2:]), bottom_mlp=(32,)
    )


def news_crossed() -> ModelConfig:
    """Return the model with counters that also has a row for what comes together.

    An article shown after another, to those who came the same way, and on the same device.
    """
    model = news_counters()
    crosses = {
        "prev_cand": ("prev", "cand"),
        "ref_cand": ("referrer", "cand"),
        "device_cand": ("env", "os", "cand"),
    }
    tables = (TableConfig(name=name, dim=32, bucket_bits=3) for name in crosses)
    features = (FeatureConfig(name=n, table=n, crossed=crossed) for n, crossed in crosses.items())
    return dataclasses.replace(
        model,
        tables=(*model.tables, *tables),
        features=(*model.features, *features),
        top_mlp=(512, 128),
    )


def news_hstu() -> ModelConfig:
    """Return the model with crosses whose histories are longer, have times, and are encoded."""
    model = news_crossed()
    (sequence,) = model.sequences
    longer = dataclasses.replace(sequence, length=20, times=True)
    return dataclasses.replace(model, net="hstu", sequences=(longer,))


PRESETS = {
    "news": news_model,
    "news-history": news_history,
    "news-counters": news_counters,
    "news-crossed": news_crossed,
    "news-hstu": news_hstu,
}
"""Models of the news stream, by name; the first is what commands take for its events."""


def preset_model(name: str) -> ModelConfig:
    """Return the model of that name.

    Raises:
        ConfigurationError: There is none.
    """
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise ConfigurationError(
            f"there is no preset {name!r}; there are {known}{compatibility.hint(name)}"
        )
    return PRESETS[name]()


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise compatibility.missing(__name__, name)
