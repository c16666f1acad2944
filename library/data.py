"""Events: what is read of an input, and readers of files, streams and the synthetic news.

`open_events` opens files, a Redis Stream or a topic of Kafka by an `EventSchema`. `joined` reads
impressions and their feedback as one. Both return an `EventSource`, which gives `Batch`es in order
of time from any offset; `train` also takes a source of your own. docs/training.md and
docs/streams.md have examples. Needs `embertide[train]`, and loads no torch.
"""

from embertide._common.extras import needed_by

with needed_by("data", "train"):
    from embertide.trainer.data import feedback_schema, joined, open_events
    from embertide.trainer.data.base import (
        Batch,
        DeadLetters,
        EventSchema,
        EventSource,
        EventTimes,
        FeatureColumn,
        news_schema,
    )
    from embertide.trainer.data.crosses import cross_keys
    from embertide.trainer.data.generator import NewsConfig, NewsSource
    from embertide.trainer.data.redis_stream import RedisStreamSource, StreamConfig

__all__ = [
    "Batch",
    "DeadLetters",
    "EventSchema",
    "EventSource",
    "EventTimes",
    "FeatureColumn",
    "NewsConfig",
    "NewsSource",
    "RedisStreamSource",
    "StreamConfig",
    "cross_keys",
    "feedback_schema",
    "joined",
    "news_schema",
    "open_events",
]
