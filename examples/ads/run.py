"""Display ads: 13 counts and 26 categories, a DLRM, and figures by hour and by placement."""

from embertide.config import (
    DenseConfig,
    EvalConfig,
    FeatureConfig,
    ModelConfig,
    RunConfig,
    TableConfig,
)
from embertide.data import EventSchema, FeatureColumn

COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))

schema = EventSchema(
    features=tuple(FeatureColumn(name=name, column=name) for name in CATEGORIES),
    dense=COUNTS,
    label="label",
    ts="ts",
)
run = RunConfig(
    model=ModelConfig(
        name="ads",
        # Eight buckets a table: the units that nodes share out and a reshard moves.
        tables=tuple(TableConfig(name=name.lower(), bucket_bits=3) for name in CATEGORIES),
        # Categories stay for good, so the net learns what a key without a row reads as.
        features=tuple(
            FeatureConfig(name=name.lower(), table=name.lower(), learned_default=True)
            for name in CATEGORIES
        ),
        dense=tuple(
            DenseConfig(name=name.lower(), steps=("log1p", "standardise"), missing=True)
            for name in COUNTS
        ),
        bottom_mlp=(64,),
        top_mlp=(128, 64),
        top_sees_embeddings=False,
    ),
    # Counts are fitted on the first events, which are then learned from.
    warmup_events=2000,
    publish_every_s=1800,
    snapshot_every=12,
    evaluation=EvalConfig(slices=("c9", "hour_of_day")),
)
