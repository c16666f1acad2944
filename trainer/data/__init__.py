"""Events in time order: files, live events of Redis or Kafka, or a seeded generator."""

import difflib
import shlex
from collections.abc import Mapping, Sequence

from embertide.trainer.config import compatibility
from embertide.trainer.data.assemble import ChunkedSource
from embertide.trainer.data.base import (
    DeadLetters,
    DerivedSource,
    EventSchema,
    EventSource,
    feedback_schema,
    known_schema,
    news_schema,
)
from embertide.trainer.data.csv import CsvSource, TextFormat, header_hint, listed, text_columns
from embertide.trainer.data.files import FilesSource, matching_files
from embertide.trainer.data.merge import MergedSource
from embertide.trainer.data.opening import is_parquet
from embertide.trainer.data.parquet import ParquetSource, parquet_columns
from embertide.trainer.data.redis_stream import SCHEMES, RedisStreamSource, StreamConfig
from embertide.trainer.data.texts import Kind
from embertide.trainer.errors import DataError

__all__ = ["feedback_schema", "joined", "open_events"]

_KAFKA = "kafka://"
_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv"}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4", ".xz")
FORMATS = ("parquet", "csv")


def open_events(
    path: str | Sequence[str],
    *,
    format: str | None = None,
    schema: EventSchema | None = None,
    delimiter: str | None = None,
    names: Sequence[str] = (),
    kinds: Mapping[str, Kind] | None = None,
    quoted: bool = True,
    escaped: bool = False,
    encoding: str = "",
    skip: int = 0,
    dead_letters: DeadLetters | None = None,
    group: str = "reader",
    like: EventSource | None = None,
) -> EventSource:
    """Opens files of events, or a stream.

    Args:
        path: Local path or fsspec URL; with `*`, `?` or `[` all files that match, or a list of
            such: they are read in order of time. Or a stream of live events,
            redis://HOST:PORT/DB#KEY or kafka://HOST:PORT/TOPIC?format=...
        format: "parquet" or "csv"; by default what the file begins with tells, or the suffix (.csv
            or .tsv; of text, also compressed: .csv.gz).
        schema: The columns to read; by default `news_schema`, if the columns fit it.
        delimiter: The text between the fields of csv; by default a tab in .tsv, else a comma.
        names: Columns of csv that has no header; by default its first line names them.
        kinds: Kinds of text columns, by name: these are read as "int", "string", "float" or "time"
            whatever their first values look like (`TextFormat.kinds`).
        quoted: For csv: whether double quotes may enclose a field.
        escaped: For csv: whether a quote inside of quotes has a backslash before it.
        encoding: Encoding of csv, as Python names it; by default UTF-8, or UTF-16 where a file
            begins so.
        skip: Lines of csv before the header.
        dead_letters: Where rejected rows go; by default they are only counted.
        group: Consumer group of a stream; files have none.
        like: Files are read as those of this source, where nothing above says otherwise.

    Raises:
        ValueError: The format does not exist, or is not told by the suffix, or what is said of
            csv cannot be.
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
    base, separated = _text_of(like)
    for name in paths:
        text = TextFormat(
            delimiter=delimiter or separated or delimiter_of(name),
            quoted=quoted and base.quoted,
            names=tuple(names) or (() if base.names and is_parquet(name) else base.names),
            kinds={**base.kinds, **(kinds or {})},
            encoding=encoding or base.encoding,
            escaped=escaped or base.escaped,
            skip=skip or base.skip,
        )
        one = _open_file(name, format, schema, text, dead_letters if len(paths) == 1 else None)
        parts.append(one)
        # The schema and kinds of the first file hold for all.
        schema, kinds = one.schema, one.key_kinds if isinstance(one, CsvSource) else kinds
    return parts[0] if len(parts) == 1 else FilesSource(", ".join(patterns), parts, dead_letters)


def _text_of(source: EventSource | None) -> tuple[TextFormat, str]:
    """Return how a source reads text, and its delimiter where its name does not tell it."""
    while isinstance(source, DerivedSource):
        source = source.source
    if isinstance(source, FilesSource):
        source = source.parts[0]
    if isinstance(source, ParquetSource):
        return TextFormat(kinds=source.kinds), ""
    if not isinstance(source, CsvSource):
        return TextFormat(), ""
    text = source.text
    return text, "" if text.delimiter == delimiter_of(source.path) else text.delimiter


def is_live(path: str) -> bool:
    """Whether a path names a stream of live events, which has no end."""
    return path.startswith((*SCHEMES, _KAFKA))


def joined(
    impressions: EventSource, feedback: EventSource, *, silent_s: float = 10.0
) -> MergedSource:
    """Impressions without labels and feedback on them, for `RunConfig(labels=LabelJoin(...))`.

    Args:
        impressions: Events of a schema with `id` and `ts`, and label=None.
        feedback: Events of `feedback_schema`, each of them a positive; either may be files or a
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
    text: TextFormat,
    dead_letters: DeadLetters | None,
) -> ChunkedSource:
    format = format_found(path) if format is None else format
    if format == "parquet":
        if text.names:
            raise ValueError(f"{path} is parquet, which has names of its own; leave names= out")
        schema = schema or _recognise(path, parquet_columns(path))
        return ParquetSource(path, schema, kinds=text.kinds, dead_letters=dead_letters)
    if format == "csv":
        schema = schema or _recognise(path, text_columns(path, text))
        return CsvSource(path, schema, text, dead_letters=dead_letters)
    known = ", ".join(FORMATS)
    raise ValueError(
        f"format {format!r} does not exist; use one of {known}{compatibility.hint(format)}"
    )


def format_found(path: str) -> str:
    """The format of a file that is there: what it begins with counts more than its suffix.

    Raises:
        ValueError: Neither tells.
        DataError: There is no such file, or it cannot be read.
    """
    if is_parquet(path):
        return "parquet"
    return "csv" if _uncompressed(path).endswith((".csv", ".tsv")) else format_of(path)


def format_of(path: str) -> str:
    """The format that a path's suffix tells.

    Raises:
        ValueError: It tells none.
    """
    name = _uncompressed(path)
    for suffix, format in _SUFFIXES.items():
        if name.endswith(suffix):
            return format
    raise ValueError(
        f"the suffix of {path!r} tells no format; pass format= one of {', '.join(FORMATS)}"
    )


def _uncompressed(path: str) -> str:
    """Return a path in small letters, without what its compression adds."""
    name = path.lower()
    for ending in _COMPRESSIONS:
        name = name.removesuffix(ending)
    return name


def delimiter_of(path: str) -> str:
    """Return the text between the fields of a file, where nobody names it."""
    return "\t" if _uncompressed(path).endswith(".tsv") else ","


def _recognise(path: str, columns: list[str]) -> EventSchema:
    schema = known_schema(columns)
    if schema is None:
        raise DataError(
            path,
            f"{_unfit(columns)}: `embertide init {shlex.quote(path)}` guesses one and writes a "
            f"run's file{header_hint(columns)}",
        )
    return schema


def _unfit(columns: Sequence[str]) -> str:
    """Say why columns fit no schema that is known: which it is nearest to, and what it lacks."""
    named = listed(columns)
    wanted = news_schema().columns
    lacks = [name for name in wanted if name not in columns]
    if 2 * len(lacks) > len(wanted):
        return f"columns {named} fit no schema that is known"
    near = {name: difflib.get_close_matches(name, columns, 1) for name in lacks}
    hints = [f"{name}" + (f" (is it {near[name][0]}?)" if near[name] else "") for name in lacks]
    return f"columns {named} lack {', '.join(hints)} of a schema that is known"
