"""Where a run says how it is, beside the terminal: Prometheus, JSON lines, TensorBoard, MLflow."""

import contextlib
import dataclasses
import datetime
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from embertide.trainer.commands.metrics import PREFIX, counter_family, served
from embertide.trainer.data.base import EventSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.progress import Progress

Show = Callable[[Progress], None]

log = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0


class _Page(Collector):
    """What a scrape gets: the newest progress, and the source's counters as they are now."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self.newest: Progress | None = None

    def collect(self) -> Iterator[Metric]:
        rejected = dict(self._source.dead_letters.by_reason)
        yield counter_family("rejected_events", "Events not learned from.", "reason", rejected)
        yield counter_family(
            "source_events", "What happened to the source.", "event", self._source.counters()
        )
        lag = GaugeMetricFamily(
            PREFIX + "source_lag", "Messages that were not read yet.", labels=["input"]
        )
        for name, messages in self._source.lag().items():
            lag.add_metric([name], messages)
        yield lag
        newest = self.newest
        if newest is None:
            return
        yield CounterMetricFamily(PREFIX + "events", "Events learned from.", newest.events)
        gauges = {
            "events_per_second": ("Since the start.", newest.events_per_s),
            "auc": ("Prequential, of the current day of event time.", newest.auc),
            "version": ("Published last.", newest.version),
            "watermark_seconds": ("Event time up to which all is learned.", newest.ts_ms / 1000),
            "watermark_lag_seconds": (
                "Behind the clock, where events have its time.",
                time.time() - newest.ts_ms / 1000,
            ),
            "rows": ("Rows of all tables.", newest.rows),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value)
        sizes = GaugeMetricFamily(PREFIX + "bytes", "Held by the store.", labels=["tier"])
        for tier, value in newest.resident_bytes.items():
            sizes.add_metric([tier], value)
        yield sizes
        yield CounterMetricFamily(
            PREFIX + "checkpoints", "With their snapshots.", newest.checkpoints
        )
        yield CounterMetricFamily(
            PREFIX + "checkpoint_seconds", "Taken by checkpoints.", newest.checkpoint_s
        )
        yield CounterMetricFamily(
            PREFIX + "dense_missing", "Dense values that were missing.", newest.missing
        )
        yield counter_family(
            "set_aside", "Would have made the net not finite.", "what", newest.set_aside
        )
        labels = dict(newest.labels)
        waiting = labels.pop("waiting", 0)
        labels.pop("waiting_positives", 0)
        yield counter_family("labels", "Of labels that come later.", "what", labels)
        yield GaugeMetricFamily(PREFIX + "waiting", "Impressions without a label yet.", waiting)
        yield counter_family("dropped", "What the store did not do.", "what", newest.dropped)
        yield counter_family("published", "Sent, or not.", "what", newest.published)
        if newest.storage:
            yield counter_family(
                "storage", "Brought to object storage, or not.", "what", newest.storage
            )
            yield GaugeMetricFamily(
                PREFIX + "storage_behind_seconds",
                "For how long storage has lacked something.",
                newest.storage_behind_s,
            )
        yield from _quality(newest)


_FIGURES = {
    "events": "Events of the current day of event time that the figures are of.",
    "label_mean": "Share of events with label 1.",
    "log_loss": "In nats.",
    "normalised_entropy": "Log loss over the entropy of the mean label.",
    "calibration": "Mean score over mean label.",
    "auc": "Area under the ROC curve.",
    "gauc": "AUC within each user, weighed by events.",
    "gauc_users": "Users that GAUC is of.",
    "gauc_one_class_users": "Users left out of GAUC, for their labels are one.",
    "gauc_sampled_share": "Share of the users that GAUC is measured on.",
}


def _quality(progress: Progress) -> Iterator[Metric]:
    """Yield figures by whose they are, and by slice and value."""
    for figure, text in _FIGURES.items():
        family = GaugeMetricFamily(PREFIX + "quality_" + figure, text, labels=["of"])
        for of, figures in progress.quality.items():
            if figure in figures:
                family.add_metric([of], figures[figure])
        if family.samples:
            yield family
        sliced = GaugeMetricFamily(PREFIX + "slice_" + figure, text, labels=["slice", "value"])
        for name, values in progress.slices.items():
            for value, figures in values.items():
                if figure in figures:
                    sliced.add_metric([name, value], figures[figure])
        if sliced.samples:
            yield sliced


def scalars(progress: Progress) -> dict[str, float]:
    """Return the numbers of a run that make curves, by name."""
    said = {name: getattr(progress, name) for name in ("auc", "events_per_s", "rows", "version")}
    said = {name: value for name, value in said.items() if not math.isnan(value)}
    for of, figures in progress.quality.items():
        said |= {f"{of}/{name}": value for name, value in figures.items()}
    for name, values in progress.slices.items():
        for value, figures in values.items():
            said |= {f"slice/{name}/{value}/{what}": each for what, each in figures.items()}
    return said


@contextlib.contextmanager
def metrics_page(port: int, source: EventSource) -> Iterator[Show]:
    """Serve /metrics on all addresses while the context lives.

    Raises:
        ConfigurationError: The port cannot be used.
    """
    page = _Page(source)

    def show(progress: Progress) -> None:
        page.newest = progress

    with served(port, page):
        yield show


class _Seldom:
    """Says when ten seconds have passed since it last said so; at first at once."""

    def __init__(self) -> None:
        self._last = -_LOG_EVERY_S

    def due(self) -> bool:
        now = time.monotonic()
        if now - self._last < _LOG_EVERY_S:
            return False
        self._last = now
        return True


def state_of(progress: Progress) -> str:
    """Say in words where a run is, but for its events."""
    auc = "not known yet" if math.isnan(progress.auc) else f"{progress.auc:.4f}"
    return f"version {progress.version} · AUC {auc} · {progress.events_per_s:,.0f} events/s"


def lines() -> Show:
    """Return what writes a line of progress to stderr now and then, where no bar can be drawn."""
    seldom = _Seldom()

    def show(progress: Progress) -> None:
        if seldom.due():
            of = "" if progress.total_events is None else f" of {progress.total_events:,}"
            time_s = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            said = f"{time_s} training: {progress.events:,}{of} events · {state_of(progress)}"
            print(said, file=sys.stderr, flush=True)

    return show


class JsonLog(logging.Handler):
    """A file of JSON lines: `time`, and `progress`, `result`, or `level` and `message`."""

    def __init__(self, file: TextIO) -> None:
        """Write to an open file."""
        super().__init__(logging.INFO)
        self._file = file
        self._seldom = _Seldom()

    def emit(self, record: logging.LogRecord) -> None:
        """Write what a module logs."""
        self.write({"level": record.levelname.lower(), "message": record.getMessage()})

    def show(self, progress: Progress) -> None:
        """Write the progress, ten seconds after the last at the earliest."""
        if self._seldom.due():
            auc = None if math.isnan(progress.auc) else progress.auc  # JSON has no NaN
            self.write({"progress": {**dataclasses.asdict(progress), "auc": auc}})

    def write(self, said: Mapping[str, Any]) -> None:
        """Write a line."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._file.write(json.dumps({"time": now, **said}) + "\n")
        self._file.flush()


@contextlib.contextmanager
def json_log(path: Path) -> Iterator[JsonLog]:
    """Append to a log while the context lives; warnings still go to stderr as well.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--log {path} cannot be written: {error}") from error
    root = logging.getLogger("embertide")
    level = root.level
    with file:
        log = JsonLog(file)
        handlers = [log, *([logging.lastResort] if logging.lastResort else [])]
        root.setLevel(logging.INFO)
        for handler in handlers:
            root.addHandler(handler)
        try:
            yield log
        finally:
            for handler in handlers:
                root.removeHandler(handler)
            root.setLevel(level)


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[Show]:
    """Write scalars for TensorBoard while the context lives; a step is an event.

    Raises:
        ConfigurationError: The package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigurationError(
            "--tensorboard needs a package that is not installed: pip install tensorboard, or "
            "leave the option out"
        ) from error
    writer = SummaryWriter(str(folder))

    def show(progress: Progress) -> None:
        for name, value in scalars(progress).items():
            writer.add_scalar(name, value, progress.events)

    try:
        yield show
    finally:
        writer.close()


@contextlib.contextmanager
def mlflow(uri: str, experiment: str, settings: Mapping[str, Any]) -> Iterator[Show]:
    """Write a run with its settings and curves to MLflow while the context lives.

    A step is an event. Figures go out ten seconds after the last at the earliest, and once more at
    the end. A tracking server that is away costs figures, which a warning says, and not the run.

    Args:
        uri: Of the tracking server, or a folder or database as MLflow takes it.
        experiment: Its name; made if need be.
        settings: Of the run, nested; they become parameters, 500 characters each at most.

    Raises:
        ConfigurationError: The package is not installed, or MLflow refuses the run.
    """
    try:
        from mlflow.entities import Metric as Curve
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise ConfigurationError(
            f"--mlflow needs a package that is not installed ({error}): pip install mlflow-skinny, "
            "or leave the option out"
        ) from error
    try:
        client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else client.create_experiment(experiment)
        run_id = client.create_run(number).info.run_id
        params = [Param(name, value[:500]) for name, value in _flat(settings, "")]
        for begin in range(0, len(params), 100):
            client.log_batch(run_id, params=params[begin : begin + 100])
    except MlflowException as error:
        raise ConfigurationError(f"--mlflow {uri}: {error}") from error
    seldom, newest, ended = _Seldom(), None, "FAILED"

    def write(progress: Progress) -> None:
        now_ms = time.time_ns() // 1_000_000
        curves = [
            Curve(name, float(value), now_ms, progress.events)
            for name, value in scalars(progress).items()
        ]
        try:
            for begin in range(0, len(curves), 1000):
                client.log_batch(run_id, metrics=curves[begin : begin + 1000])
        except MlflowException as error:
            log.warning("MLflow did not take figures of event %d: %s", progress.events, error)

    def show(progress: Progress) -> None:
        nonlocal newest
        newest = progress
        if seldom.due():
            write(progress)

    try:
        yield show
        ended = "FINISHED"
    finally:
        if newest is not None:
            write(newest)
        try:
            client.set_terminated(run_id, ended)
        except MlflowException as error:
            log.warning("MLflow was not told that the run has ended: %s", error)


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each setting that is no part of another."""
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _flat(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        for i, each in enumerate(value):
            yield from _flat(each, f"{path}/{i}")
    else:
        yield path, str(value)
