"""Models of the inputs that we know, and their rates: `embertide train --print-config NAME`."""

import dataclasses
import math

from embertide.trainer.config import (
    CountersConfig,
    DenseConfig,
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    SequenceConfig,
    TableConfig,
)


def bucket_bits(expected_rows: int) -> int:
    """Return the bits that give about 10^5 rows a bucket."""
    return max(0, math.ceil(math.log2(max(1, expected_rows) / 1e5)))


_GLOBO_SMALL = ("env", "device", "os", "country", "region", "referrer", "hour")


def globo() -> ModelConfig:
    """Return the model of the news stream: user, article before, article shown, small columns."""
    # More buckets than the rows ask for: buckets are what devices share and a reshard moves.
    tables = (
        TableConfig(name="user", bucket_bits=bucket_bits(400_000) + 2),
        TableConfig(name="prev", bucket_bits=3),
        TableConfig(name="cand", bucket_bits=3),
        *(TableConfig(name=name) for name in _GLOBO_SMALL),
    )
    features = tuple(FeatureConfig(name=table.name, table=table.name) for table in tables)
    return ModelConfig(name="news", tables=tables, features=features, top_mlp=(256, 64))


def globo_rates() -> OptimizerConfig:
    """Return the rates of both news models, chosen on days 2 and 3 of the stream.

    Where keys come and go within hours, rows must learn quickly, and not from one event alone. On
    Criteo's ads, whose keys stay, the defaults are better.
    """
    return OptimizerConfig(sparse_learning_rate=0.4, initial_accumulator=0.001)


def globo_history() -> ModelConfig:
    """Return the news model that knows what its users liked; articles share a table."""
    tables = (
        TableConfig(name="user", dim=32, bucket_bits=bucket_bits(400_000) + 2),
        TableConfig(name="article", dim=32, bucket_bits=3),
        *(TableConfig(name=name, dim=32) for name in _GLOBO_SMALL),
    )
    table_of = {"user": "user", "prev": "article", "cand": "article"}
    table_of |= {name: name for name in _GLOBO_SMALL}
    return ModelConfig(
        name="news",
        tables=tables,
        features=tuple(FeatureConfig(name=n, table=t) for n, t in table_of.items()),
        sequences=(SequenceConfig(name="hist", user="user", item="cand", published=True),),
        net="history",
        bottom_mlp=(16,),
        top_mlp=(256, 64),
    )


def globo_counters() -> ModelConfig:
    """Return the history model that also knows how popular the article shown is of late."""
    model = globo_history()
    # Four chunks: eight counters fill one more of their size.
    counted = dataclasses.replace(
        model.tables[1], chunks=4, counters=CountersConfig(feature="cand")
    )
    return dataclasses.replace(
        model, tables=(model.tables[0], counted, *model.tables[2:]), bottom_mlp=(32,)
    )


def globo_crossed() -> ModelConfig:
    """Return the model with counters that also has a row for what comes together.

    An article shown after another, to those who came the same way, and on the same device.
    """
    model = globo_counters()
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


def criteo() -> ModelConfig:
    """Return the reference DLRM of Criteo's display ads: 13 dense features, 26 sparse."""
    names = tuple(f"c{i}" for i in range(1, 27))
    return ModelConfig(
        name="criteo",
        tables=tuple(TableConfig(name=name) for name in names),
        features=tuple(FeatureConfig(name=name, table=name) for name in names),
        dense=tuple(DenseConfig(name=f"i{i}") for i in range(1, 14)),
        bottom_mlp=(512, 256, 64),
        top_mlp=(512, 256),
        top_sees_embeddings=False,
    )


PRESETS = {
    "news": globo,
    "news-history": globo_history,
    "news-counters": globo_counters,
    "news-crossed": globo_crossed,
    "criteo": criteo,
}
"""Models of the inputs that we know, by name; the first of an input is what commands take."""
