"""Events in time order: files, live events of Redis or Kafka, or a seeded generator."""

import difflib
from collections.abc import Mapping, Sequence

from embertide.trainer.data.arrow import Kind
from embertide.trainer.data.assemble import ChunkedSource
from embertide.trainer.data.base import (
    DeadLetters,
    EventSchema,
    EventSource,
    criteo_schema,
    feedback_schema,
    globo_schema,
    known_schema,
)
from embertide.trainer.data.criteo import CriteoSource
from embertide.trainer.data.csv import CsvSource, TextFormat, text_columns
from embertide.trainer.data.files import FilesSource, matching_files
from embertide.trainer.data.merge import MergedSource
from embertide.trainer.data.parquet import ParquetSource, parquet_columns
from embertide.trainer.data.redis_stream import SCHEMES, RedisStreamSource, StreamConfig
from embertide.trainer.errors import DataError

__all__ = ["feedback_schema", "joined", "open_events"]

_KAFKA = "kafka://"
_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "criteo"}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")
_SHOWN_COLUMNS = 50
FORMATS = ("parquet", "csv", "criteo")


def open_events(
    path: str | Sequence[str],
    *,
    format: str | None = None,
    schema: EventSchema | None = None,
    delimiter: str = ",",
    dead_letters: DeadLetters | None = None,
    group: str = "reader",
) -> EventSource:
    """Opens files of events, or a stream.

    Args:
        path: Local path or fsspec URL; with `*`, `?` or `[` all files that match, or a list of
            such: they are read in order of time. Or a stream of live events,
            redis://HOST:PORT/DB#KEY or kafka://HOST:PORT/TOPIC?format=...
        format: "parquet", "csv" or "criteo"; by default the suffix tells (.parquet or .pq, .csv,
            .tsv for criteo; of text, also compressed: .csv.gz).
        schema: What to read; by default `globo_schema` or `criteo_schema`, whichever the columns
            fit. Criteo's TSV is always read with its own.
        delimiter: What stands between the fields of csv.
        dead_letters: Where rejected rows go; by default they are only counted.
        group: Consumer group of a stream; files have none.

    Raises:
        ValueError: The format does not exist, or is not told by the suffix, or criteo was given
            another schema.
        DataError: A file is missing or broken, or its columns fit no schema.
        TrainerError: Redis or Kafka cannot be reached.
    """
    if isinstance(path, str) and path.startswith(_KAFKA):
        from embertide.trainer.data.kafka import open_topic  # its client takes 0.1 s
        from embertide.trainer.data.kafka_client import KafkaConfig

        return open_topic(KafkaConfig.of(path, group=group), schema, dead_letters=dead_letters)
    if isinstance(path, str) and path.startswith(SCHEMES):
        stream = StreamConfig.of(path, group=group)
        return RedisStreamSource(stream, schema, dead_letters=dead_letters)
    patterns = [path] if isinstance(path, str) else list(path)
    paths = [name for pattern in patterns for name in matching_files(pattern)]
    parts: list[ChunkedSource] = []
    kinds: Mapping[str, Kind] | None = None
    for name in paths:
        one = _open_file(
            name, format, schema, kinds, delimiter, dead_letters if len(paths) == 1 else None
        )
        parts.append(one)
        # What was found in the first file holds for all.
        schema, kinds = one.schema, one.key_kinds if isinstance(one, CsvSource) else None
    return parts[0] if len(parts) == 1 else FilesSource(", ".join(patterns), parts, dead_letters)


def is_live(path: str) -> bool:
    """Whether a path names a stream of live events, which has no end."""
    return path.startswith((*SCHEMES, _KAFKA))


def joined(
    impressions: EventSource, feedback: EventSource, *, silent_s: float = 10.0
) -> MergedSource:
    """Impressions without labels and feedback on them, for `RunConfig(labels=LabelJoin(...))`.

    Args:
        impressions: Of a schema with `id` and `ts`, and label=None.
        feedback: Of `feedback_schema`: what is in it is a positive; either may be files or a
            stream.
        silent_s: See `MergedSource`.

    Raises:
        ConfigurationError: The schemas do not fit.
    """
    return MergedSource(_parts(impressions), _parts(feedback), silent_s=silent_s)


def _parts(source: EventSource) -> list[EventSource]:
    return list(source.parts) if isinstance(source, MergedSource) else [source]


def _open_file(
    path: str,
    format: str | None,
    schema: EventSchema | None,
    kinds: Mapping[str, Kind] | None,
    delimiter: str,
    dead_letters: DeadLetters | None,
) -> ChunkedSource:
    format = format_of(path) if format is None else format
    if format == "criteo":
        if schema not in (None, criteo_schema()):
            raise ValueError("format 'criteo' has its own schema; leave schema out, or use 'csv'")
        return CriteoSource(path, dead_letters=dead_letters)
    if format == "parquet":
        schema = schema or _recognise(path, list(parquet_columns(path)))
        return ParquetSource(path, schema, dead_letters=dead_letters)
    if format == "csv":
        schema = schema or _recognise(path, text_columns(path, TextFormat(delimiter=delimiter)))
        return CsvSource(path, schema, kinds=kinds, delimiter=delimiter, dead_letters=dead_letters)
    raise ValueError(f"format {format!r} does not exist; use one of {', '.join(FORMATS)}")


def format_of(path: str) -> str:
    """The format that a path's suffix tells.

    Raises:
        ValueError: It tells none.
    """
    name = path.lower()
    for ending in _COMPRESSIONS:
        name = name.removesuffix(ending)
    for suffix, format in _SUFFIXES.items():
        if name.endswith(suffix):
            return format
    raise ValueError(
        f"the suffix of {path!r} tells no format; pass format= one of {', '.join(FORMATS)}"
    )


def _recognise(path: str, columns: list[str]) -> EventSchema:
    schema = known_schema(columns)
    if schema is None:
        raise DataError(
            path, f"{_unfit(columns)}: `embertide init {path}` guesses one and writes a run's file"
        )
    return schema


def _unfit(columns: Sequence[str]) -> str:
    """Say why columns fit no schema that is known: which it is nearest to, and what it lacks."""
    named = ", ".join(columns[:_SHOWN_COLUMNS]) + (", ..." if len(columns) > _SHOWN_COLUMNS else "")
    for schema in (globo_schema(), criteo_schema()):
        lacks = [name for name in schema.columns if name not in columns]
        if 2 * len(lacks) > len(schema.columns):
            continue
        near = {name: difflib.get_close_matches(name, columns, 1) for name in lacks}
        hints = [f"{name}" + (f" (is it {near[name][0]}?)" if near[name] else "") for name in lacks]
        return f"columns {named} lack {', '.join(hints)} of a schema that is known"
    return f"columns {named} fit no schema that is known"
