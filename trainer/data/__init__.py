"""Events in time order: from Parquet, CSV and Criteo's files, or from a seeded generator."""

from embertide.trainer.data.base import (
    DeadLetters,
    EventSchema,
    EventSource,
    criteo_schema,
    globo_schema,
)
from embertide.trainer.data.criteo import CriteoSource
from embertide.trainer.data.csv import CsvSource, TextFormat, text_columns
from embertide.trainer.data.parquet import ParquetSource, parquet_columns
from embertide.trainer.errors import DataError

__all__ = ["open_events"]

_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "criteo"}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")
FORMATS = ("parquet", "csv", "criteo")


def open_events(
    path: str,
    *,
    format: str | None = None,
    schema: EventSchema | None = None,
    dead_letters: DeadLetters | None = None,
) -> EventSource:
    """Opens a file of events.

    Args:
        path: Local path or fsspec URL.
        format: "parquet", "csv" or "criteo"; by default the suffix tells (.parquet or .pq, .csv,
            .tsv for criteo; of text, also compressed: .csv.gz).
        schema: What to read; by default `globo_schema` or `criteo_schema`, whichever the columns
            fit. Criteo's TSV is always read with its own.
        dead_letters: Where rejected rows go; by default they are only counted.

    Raises:
        ValueError: The format does not exist, or is not told by the suffix, or criteo was given
            another schema.
        DataError: The file is missing or broken, or its columns fit no schema.
    """
    format = _format(path) if format is None else format
    if format == "criteo":
        if schema not in (None, criteo_schema()):
            raise ValueError("format 'criteo' has its own schema; leave schema out, or use 'csv'")
        return CriteoSource(path, dead_letters=dead_letters)
    if format == "parquet":
        schema = schema or _recognise(path, list(parquet_columns(path)))
        return ParquetSource(path, schema, dead_letters=dead_letters)
    if format == "csv":
        schema = schema or _recognise(path, text_columns(path, TextFormat()))
        return CsvSource(path, schema, dead_letters=dead_letters)
    raise ValueError(f"format {format!r} does not exist; use one of {', '.join(FORMATS)}")


def _format(path: str) -> str:
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
    for schema in (globo_schema(), criteo_schema()):
        if set(schema.columns) <= set(columns):
            return schema
    raise DataError(
        path,
        f"columns {', '.join(columns)} fit no known schema; pass schema=EventSchema(features="
        "(FeatureColumn(name=..., column=...), ...), label=..., ts=...)",
    )
