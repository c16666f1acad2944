"""A model over lists of keys, plain and weighed, and events of it."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embertide.trainer.config import FeatureConfig, ModelConfig, TableConfig
from embertide.trainer.data.base import EventSchema, FeatureColumn
from embertide.trainer.data.parquet import ParquetSource

DIM, KEYS = 4, 30
FEATURES = (
    FeatureConfig(name="item", table="item"),
    FeatureConfig(name="seen", table="item", pooling="mean", keys="list"),
    FeatureConfig(name="tags", table="tag", keys="weighed"),
    FeatureConfig(name="other", table="tag", pooling="mean", keys="weighed"),
)
MODEL = ModelConfig(
    name="lists",
    tables=(TableConfig(name="item", dim=DIM), TableConfig(name="tag", dim=DIM, bucket_bits=1)),
    features=FEATURES,
    top_mlp=(8,),
)


def columns(events: int, seed: int = 1) -> dict[str, list[Any]]:
    """Labels follow the tags; lists of 0 to 4 keys."""
    rng = np.random.default_rng(seed)
    lists: dict[str, list[Any]] = {name: [] for name in ("seen", "tags", "shares", "other", "w")}
    for _ in range(events):
        lists["seen"].append(rng.integers(0, KEYS, rng.integers(0, 5)).tolist())
        for name, weights in (("tags", "shares"), ("other", "w")):
            size = rng.integers(0, 5)
            lists[name].append(rng.integers(0, KEYS, size).tolist())
            lists[weights].append((rng.integers(-4, 9, size) / 4).tolist())
    liked = [sum(tags) % 2 for tags in lists["tags"]]
    item = rng.integers(0, KEYS, events).tolist()
    return {"ts": sorted(rng.integers(0, 600, events).tolist()), "item": item, "y": liked, **lists}


def plain() -> ModelConfig:
    """Return the model without weights."""
    features = tuple(
        dataclasses.replace(each, keys="one" if each.keys == "one" else "list") for each in FEATURES
    )
    return dataclasses.replace(MODEL, features=features)


def source(path: Path, events: int = 600, *, weighed: bool = True) -> ParquetSource:
    """Write the events of `columns` and open them, with or without weights."""
    pq.write_table(pa.table(columns(events)), path)
    weights = {"tags": "shares", "other": "w"} if weighed else {}
    lists = (
        FeatureColumn(name=name, column=name, transform="keys", weights=weights.get(name, ""))
        for name in ("seen", "tags", "other")
    )
    features = (FeatureColumn(name="item", column="item"), *lists)
    return ParquetSource(str(path), EventSchema(features=features, label="y", ts="ts"))
