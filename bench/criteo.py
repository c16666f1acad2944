"""Criteo's display ads: what their files have, and the reference DLRM over them.

A run's file, too: `embertide train FOLDER --config bench/criteo.py --data ads.parquet`. A file as
Criteo publishes it needs a run's file of its own, with `source = published("day_0.tsv")`.
"""

from embertide.trainer.config import (
    DenseConfig,
    FeatureConfig,
    ModelConfig,
    RunConfig,
    TableConfig,
)
from embertide.trainer.data import open_events
from embertide.trainer.data.base import DeadLetters, EventSchema, EventSource, FeatureColumn

COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))

# No time: lines are in order of time, but the time itself is not given.
schema = EventSchema(
    features=tuple(FeatureColumn(name=name, column=name) for name in CATEGORIES),
    dense=COUNTS,
    label="label",
)


def criteo() -> ModelConfig:
    """Return the reference DLRM: 13 dense features, 26 sparse."""
    names = tuple(name.lower() for name in CATEGORIES)
    return ModelConfig(
        name="criteo",
        tables=tuple(TableConfig(name=name) for name in names),
        features=tuple(FeatureConfig(name=name, table=name) for name in names),
        dense=tuple(DenseConfig(name=name.lower()) for name in COUNTS),
        bottom_mlp=(512, 256, 64),
        top_mlp=(512, 256),
        top_sees_embeddings=False,
    )


def published(path: str, *, dead_letters: DeadLetters | None = None) -> EventSource:
    """Open a file as it is published: tabs, no header, an impression a line, the label first.

    Categories are hexadecimal strings; any field but the label may be empty. A line of other than
    40 fields is a dead letter.

    Raises:
        DataError: The file is missing or empty.
    """
    return open_events(
        path,
        format="csv",
        schema=schema,
        delimiter="\t",
        names=("label", *COUNTS, *CATEGORIES),
        # By name, for some columns happen to start with values of decimal digits only.
        kinds=dict.fromkeys(CATEGORIES, "string"),
        quoted=False,
        dead_letters=dead_letters,
    )


run = RunConfig(model=criteo())
