"""The input options that the commands share: files, a stream, or the generated news."""

from pathlib import Path
from typing import Annotated

import typer

from embertide.trainer.config import ModelConfig, OptimizerConfig, criteo, globo, globo_rates
from embertide.trainer.data import open_events
from embertide.trainer.data.base import DeadLetters, EventSource
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.data.redis_stream import SCHEMES
from embertide.trainer.errors import ConfigurationError

Data = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Events in time order: .parquet, .csv, .tsv (Criteo), also globs ('day-*.csv') and "
        "fsspec URLs; for train also redis://HOST:PORT/DB#KEY, a stream of live events. Without "
        "it, a seeded news stream is generated.",
    ),
]
Events = Annotated[int | None, typer.Option(help="Read the first events alone.")]
Hours = Annotated[int, typer.Option(help="Length of the generated stream.")]
StreamSeed = Annotated[int, typer.Option(help="Seed of the generated stream.")]


def open_input(
    data: str | None,
    events: int | None,
    hours: int,
    stream_seed: int,
    dead_letters: Path | None = None,
    group: str | None = None,
) -> EventSource:
    """Open what the options say; a stream is read as consumer group `group`, or not without.

    Raises:
        ConfigurationError: The file is missing, or says nothing that we can read.
    """
    try:
        if data is None:
            source: EventSource = NewsSource(NewsConfig(hours=hours, seed=stream_seed))
        else:
            if group is None and data.startswith(SCHEMES):
                raise ConfigurationError("a stream, which has no end, is for train; give files")
            letters = DeadLetters(path=dead_letters)
            source = open_events(data, dead_letters=letters, group=group or "reader")
        return source if events is None else FirstEvents(source, events)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def model_for(source: EventSource) -> ModelConfig:
    """Return the preset whose features are the source's."""
    names = [feature.name.lower() for feature in source.schema.features]
    for preset in (globo(), criteo()):
        if names == [feature.name for feature in preset.features]:
            return preset
    raise ConfigurationError(
        f"no preset model has the features {', '.join(names)}; define one in a run's file: --config"
    )


def check_model(model: ModelConfig, source: EventSource) -> None:
    """Refuse a model whose features are not the source's.

    Raises:
        ConfigurationError: The features differ, or what events have of one, or the dense ones.
    """
    features = [feature.name.lower() for feature in source.schema.features]
    dense = [name.lower() for name in source.schema.dense]
    for what, names, wanted in (
        ("features", features, [feature.name for feature in model.features]),
        ("dense features", dense, [feature.name for feature in model.dense]),
    ):
        if names != wanted:
            raise ConfigurationError(
                f"model {model.name!r} has the {what} {', '.join(wanted) or 'none'}; the events "
                f"have {', '.join(names) or 'none'}: give both the same, in the same order"
            )
    for column, feature in zip(source.schema.features, model.features, strict=True):
        found = "weighed" if column.weights else "list" if column.is_list else "one"
        if feature.keys != found:
            raise ConfigurationError(
                f"model {model.name!r}: feature {feature.name!r} has keys={feature.keys!r}; the "
                f"events have {found!r}: give both the same"
            )


def rates_for(model: ModelConfig) -> OptimizerConfig:
    """Return the rates that go with a preset."""
    return globo_rates() if model.name == globo().name else OptimizerConfig()
