"""Live events from a topic of Kafka, read so that a trainer that was killed goes on exactly.

Each partition is an input of its own, read by a consumer and a thread of its own, and
`MergedSource` brings them into one order of time. The places to read from are in the trainer's
checkpoint. The offsets that the consumer group has at the broker are written for other tools, and
never read.
"""

import functools
from collections.abc import Sequence
from typing import Any

from embertide.trainer.data.base import DeadLetters, EventSchema
from embertide.trainer.data.kafka_client import KafkaClient, KafkaConfig
from embertide.trainer.data.kafka_partition import KafkaPartition
from embertide.trainer.data.merge import MergedSource
from embertide.trainer.data.payloads import Payloads, payloads_of, recognise
from embertide.trainer.errors import FinalError

_MESSAGES_TO_RECOGNISE = 16


def open_topic(
    config: KafkaConfig,
    schema: EventSchema | None = None,
    *,
    dead_letters: DeadLetters | None = None,
) -> MergedSource:
    """Opens all partitions of a topic as one live source.

    Args:
        config: Where it is.
        schema: The columns to read; by default the known schema that the newest messages fit.
        dead_letters: The file for rejected events; each partition counts its own.

    Raises:
        ConfigurationError: The format, the settings or the schema will not do.
        TrainerError: No broker answers, there is no such topic, or no message tells the schema.
    """
    payloads = payloads_of(config.format, config.avro_schema)
    with KafkaClient(config) as client:
        partitions = client.partitions()
        schema = schema or _recognise(config, client, payloads, partitions)
    payloads.check(schema)
    letters = dead_letters or DeadLetters()
    parts = [
        KafkaPartition(
            config,
            partition,
            schema,
            dead_letters=DeadLetters(
                path=letters.path, max_lines=letters.max_lines, input=f"{config.topic}-{partition}"
            ),
            partitions=len(partitions) if partition == partitions[0] else 0,
        )
        for partition in partitions
    ]
    return MergedSource(parts, silent_s=2 * config.quiet_s)


def _recognise(
    config: KafkaConfig, client: KafkaClient, payloads: Payloads[Any], partitions: Sequence[int]
) -> EventSchema:
    columns = (
        functools.partial(payloads.names, data)
        for partition in partitions
        for data in client.newest(partition, _MESSAGES_TO_RECOGNISE)
    )
    schema, seen = recognise(columns)
    if schema is None:
        raise FinalError(
            f"{config} has no message of a known schema{seen}; add events first, or give schema= "
            "in a run's file (embertide train --config)"
        )
    return schema
