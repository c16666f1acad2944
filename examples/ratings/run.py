"""Ratings of years: what `embertide init` guesses, with a version a week and no hour of the day."""

from embertide.config import (
    EvalConfig,
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TableConfig,
)
from embertide.data import EventSchema, EventTimes, FeatureColumn

WEEK_S = 7 * 86_400

schema = EventSchema(
    features=(
        FeatureColumn(name="user_id", column="userId"),
        FeatureColumn(name="movie_id", column="movieId"),
    ),
    label="rating",
    positive=">= 4",
    ts="timestamp",
    # Nobody may have rated anything for a day.
    times=EventTimes(max_jump_s=86_400),
)
run = RunConfig(
    model=ModelConfig(
        name="ratings",
        # Eight buckets a table: the units that nodes share out and a reshard moves.
        tables=(
            TableConfig(name="user_id", bucket_bits=3),
            TableConfig(name="movie_id", bucket_bits=3),
        ),
        features=(
            FeatureConfig(name="user_id", table="user_id"),
            FeatureConfig(name="movie_id", table="movie_id"),
        ),
    ),
    optimizer=OptimizerConfig(sparse_learning_rate=0.1),
    batch_size=128,
    publish_every_s=WEEK_S,
    snapshot_every=13,  # a quarter of a year
    evaluation=EvalConfig(user="user_id"),
)
