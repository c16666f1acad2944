"""The input options that the commands share: files, a stream, or the generated news."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from embertide.trainer.commands import run_file
from embertide.trainer.config import EvalConfig, ModelConfig, OptimizerConfig, RunConfig
from embertide.trainer.data import is_live, open_events
from embertide.trainer.data.base import DeadLetters, EventSchema, EventSource
from embertide.trainer.data.files import matching_files
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.presets import PRESETS, news_model, news_rates, preset_model

_NO_END = "a stream, which has no end, is for train; give files"
Data = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Events in time order: .parquet, .csv, .tsv, also globs ('day-*.csv') and "
        "fsspec URLs; for train also live events: redis://HOST:PORT/DB#KEY or "
        "kafka://HOST:PORT/TOPIC (docs/streams.md).",
    ),
]


def _preset_name(name: str) -> str:
    try:
        preset_model(name)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from error
    return name


# How an option takes the name of a preset.
of_presets = {
    "parser": _preset_name,
    "metavar": f"[{'|'.join(PRESETS)}]",
    "autocompletion": lambda: list(PRESETS),
}
Preset = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The preset to take. The default, for events of the news stream, is news.",
        **of_presets,
    ),
]
Events = Annotated[int | None, typer.Option(help="Read the first events alone.")]
Demo = Annotated[
    bool, typer.Option("--demo", help="In place of --data: synthetic news, to try things out.")
]
Hours = Annotated[int, typer.Option(help="With --demo: length of the synthetic stream, hours.")]
StreamSeed = Annotated[int, typer.Option(help="With --demo: its seed.")]


def open_input(
    data: str | None,
    events: int | None,
    hours: int | None,
    stream_seed: int,
    dead_letters: Path | None = None,
    group: str | None = None,
    schema: EventSchema | None = None,
    like: EventSource | None = None,
) -> EventSource:
    """Open what the options say; a stream is read as consumer group `group`, or not without.

    `hours`: of synthetic news, if they are asked for. `schema`: what is read of a file; None: one
    that is known. `like`: a source whose files had text of the same kind.

    Raises:
        ConfigurationError: The file is missing, or says nothing that we can read; no events are
            named, or two kinds.
    """
    if (data is None) == (hours is None):
        raise ConfigurationError(
            "no events: give --data FILE, or --demo for synthetic news"
            if data is None
            else "--data and --demo: give one of them"
        )
    try:
        if hours is not None:
            source: EventSource = NewsSource(NewsConfig(hours=hours, seed=stream_seed))
        else:
            assert data is not None, "as there are no hours"
            if group is None and is_live(data):
                raise ConfigurationError(_NO_END)
            letters = DeadLetters(path=dead_letters)
            source = open_events(
                data, schema=schema, dead_letters=letters, group=group or "reader", like=like
            )
        return source if events is None else FirstEvents(source, events)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def open_run(
    config: Path | None, data: str | None, events: int | None, hours: int | None, stream_seed: int
) -> tuple[RunConfig | None, EventSource]:
    """Open what a run's file and the options say: the run, None without a file, and its events.

    Raises:
        ConfigurationError: The file or the events cannot be read, do not fit, or have no end.
    """
    if config is None:
        return None, open_input(data, events, hours, stream_seed)
    given = run_file.load(config)
    source = given.source
    if source is None or data is not None:
        source = open_input(data, events, hours, stream_seed, schema=given.data_schema, like=source)
    elif hours is not None:
        raise ConfigurationError(f"--demo: {config} says it; change it there")
    elif source.live:
        raise ConfigurationError(f"{config}: {_NO_END}")
    elif events is not None:
        source = FirstEvents(source, events)
    check_model(given.run.model, source)
    return given.run, source


def model_for(source: EventSource) -> ModelConfig:
    """Return the preset whose features are the source's."""
    names = [feature.name.lower() for feature in source.schema.features]
    model = news_model()
    if names == [feature.name for feature in model.features]:
        return model
    raise ConfigurationError(
        f"no preset model has the features {', '.join(names)}; `embertide init` guesses one and "
        "writes a run's file, for --config"
    )


def preset_for(preset: str | None, source: EventSource) -> ModelConfig:
    """Return the preset that is named, or the one whose features are the source's.

    Raises:
        ConfigurationError: There is no such preset, or the source has other features.
    """
    if preset is None:
        return model_for(source)
    model = preset_model(preset)
    check_model(model, source)
    return model


def check_model(model: ModelConfig, source: EventSource) -> None:
    """Refuse a model whose features are not the source's.

    Raises:
        ConfigurationError: The features differ, or what events have of one, or the dense ones.
    """
    features = [feature.name.lower() for feature in source.schema.features]
    dense = [name.lower() for name in source.schema.dense]
    for what, names, wanted in (
        ("features", features, [feature.name for feature in model.event_features]),
        ("dense features", dense, [feature.name for feature in model.dense]),
    ):
        if names != wanted:
            raise ConfigurationError(
                f"model {model.name!r} has the {what} {', '.join(wanted) or 'none'}; the events "
                f"have {', '.join(names) or 'none'}: give both the same, in the same order"
            )
    label = source.schema.label or "that of feedback"
    labels = [label, *source.schema.more_labels]
    heads = [head.name for head in model.heads] or labels[:1]
    if heads != labels:
        raise ConfigurationError(
            f"model {model.name!r} has heads {', '.join(heads)}; the events have labels "
            f"{', '.join(labels)}: give both the same, in the same order"
        )
    for column, feature in zip(source.schema.features, model.event_features, strict=True):
        found = "weighed" if column.weights else "list" if column.is_list else "one"
        if feature.keys != found:
            raise ConfigurationError(
                f"model {model.name!r}: feature {feature.name!r} has keys={feature.keys!r}; the "
                f"events have {found!r}: give both the same"
            )


def run_for(preset: str | None, source: EventSource, **settings: Any) -> RunConfig:
    """Return the run of a preset: its model, its rates, and what it measures of itself.

    Args:
        preset: Its name; None: the one whose features are the source's.
        source: The events to learn from.
        settings: Settings of `RunConfig` that are not its defaults.

    Raises:
        ConfigurationError: There is no such preset, the source has other features, or a setting
            will not do.
    """
    model = preset_for(preset, source)
    has_user = any(feature.name == "user" for feature in model.features)
    try:
        return RunConfig(
            model=model,
            optimizer=rates_for(model),
            evaluation=EvalConfig(user="user" if has_user else ""),
            **settings,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def rates_for(model: ModelConfig) -> OptimizerConfig:
    """Return the rates that go with a preset."""
    return news_rates() if model.name == news_model().name else OptimizerConfig()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The events to learn from: as the options say, opened in each process."""

    data: str | None
    events: int | None
    hours: int | None
    stream_seed: int
    config: Path | None

    def open(self) -> tuple[RunConfig, EventSource]:
        """Return the run, and its events.

        Raises:
            ConfigurationError: There is no such run, no such input, or they do not fit.
        """
        run, source = open_run(self.config, self.data, self.events, self.hours, self.stream_seed)
        if run is None:
            model = model_for(source)
            run = RunConfig(model=model, optimizer=rates_for(model))
        return run, source

    def depends(self) -> str:
        """Return all that the events depend on, as text."""
        text = "" if self.config is None else self.config.read_text(encoding="utf-8")
        files = []
        if self.data is not None and "://" not in self.data:
            stats = [(path, Path(path).stat()) for path in matching_files(self.data)]
            files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        return repr((self, text, files))
