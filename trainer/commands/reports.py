"""Where a run says how it is, beside the terminal: Prometheus, JSON lines, TensorBoard, MLflow."""

import contextlib
import dataclasses
import datetime
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from embertide._common.background import healths
from embertide._common.quoting import terminal_text, without_secrets
from embertide._common.terminal import say
from embertide.trainer.commands.listening import METRICS_HOST
from embertide.trainer.commands.metrics import PREFIX, counter_family, served
from embertide.trainer.data.base import EventSource
from embertide.trainer.data.lines_file import LinesFile
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.run.progress import Progress

Show = Callable[[Progress], None]

log = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0


class _Page(Collector):
    """The answer to a scrape: the newest progress, and the source's counters as they are now."""

    def __init__(self, source: EventSource, folder: Path) -> None:
        self._source, self._folder = source, folder
        self.newest: Progress | None = None

    def collect(self) -> Iterator[Metric]:
        rejected = dict(self._source.dead_letters.by_reason)
        yield counter_family("rejected_events", "Events not learned from.", "reason", rejected)
        yield counter_family(
            "source_events", "Incidents of the source.", "event", self._source.counters()
        )
        lag = GaugeMetricFamily(
            PREFIX + "source_lag", "Messages that were not read yet.", labels=["input"]
        )
        for name, messages in self._source.lag().items():
            lag.add_metric([name], messages)
        yield lag
        yield from self._of_drive()
        yield from self._of_tasks()
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
        yield counter_family("labels", "Labels that come later, by fate.", "what", labels)
        yield GaugeMetricFamily(PREFIX + "waiting", "Impressions without a label yet.", waiting)
        yield counter_family("dropped", "Work that the store dropped.", "what", newest.dropped)
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
        if newest.window:
            window = GaugeMetricFamily(
                PREFIX + "window", "Rows held for batches read ahead.", labels=["what"]
            )
            for what, value in newest.window.items():
                window.add_metric([what], value)
            yield window
        yield from _of_plan(newest)
        if newest.hot:
            hot = GaugeMetricFamily(
                PREFIX + "hot_rows", "Rows with a rank of their own.", labels=["what"]
            )
            for what, value in newest.hot.items():
                hot.add_metric([what], value)
            yield hot
        yield from _of_pruning(newest)
        yield from _of_ranks(newest)
        yield from _quality(newest)

    def _of_drive(self) -> Iterator[Metric]:
        size = GaugeMetricFamily(
            "embertide_drive_bytes", "Size of the drive that a folder lies on.", labels=["folder"]
        )
        free = GaugeMetricFamily(
            "embertide_drive_free_bytes", "What is free of it.", labels=["folder"]
        )
        with contextlib.suppress(OSError):
            drive = shutil.disk_usage(self._folder)
            size.add_metric([str(self._folder)], drive.total)
            free.add_metric([str(self._folder)], drive.free)
        yield from (size, free)

    def _of_tasks(self) -> Iterator[Metric]:
        """Yield how tasks are now: a training that waits for one of them makes no progress."""
        tasks = healths()
        yield counter_family(
            "background_failures",
            "Failures of tasks beside training; each is tried again.",
            "task",
            {each.name: each.failures for each in tasks},
        )
        ok = GaugeMetricFamily(
            PREFIX + "background_ok", "Whether nothing is wrong with a task.", labels=["task"]
        )
        for each in tasks:
            ok.add_metric([each.name], each.ok)
        yield ok


_STAGES = ("profile", "search", "trial", "kept", "refused", "none")


def _of_plan(progress: Progress) -> Iterator[Metric]:
    """Yield how far a search for a plan of ranks is, and what a step takes with it and without."""
    found = progress.plan
    if not found:
        return
    stage = GaugeMetricFamily(
        PREFIX + "plan_stage", "1: the stage of the search for a plan.", labels=["stage"]
    )
    for name in _STAGES:
        stage.add_metric([name], float(found["stage"] == name))
    yield stage
    step = GaugeMetricFamily(
        PREFIX + "plan_step_seconds",
        "A step without a plan, and with it as predicted and measured; 0: not known.",
        labels=["of"],
    )
    for of in ("default", "predicted", "measured"):
        step.add_metric([of], found[f"{of}_s"])
    yield step


_PRUNING = {
    "loss": "AUC that pruning costs of late.",
    "error": "Standard error of the loss.",
    "bound": "That loss and error are to stay within.",
    "ratio": "Target: so many times fewer bytes than the rows of all keys would take.",
    "factor": "Bytes of unpruned rows over those of the run's.",
    "unpruned_bytes": "Held by unpruned rows.",
}


def _of_pruning(progress: Progress) -> Iterator[Metric]:
    """Yield what pruning costs, where that is measured."""
    found = progress.pruning
    if not found:
        return
    for name, text in _PRUNING.items():
        if found[name] is not None:
            yield GaugeMetricFamily(f"{PREFIX}pruning_{name}", text, found[name])
    yield GaugeMetricFamily(
        PREFIX + "pruning_exceeds", "1: the loss is above its bound.", float(found["exceeds"])
    )


_HISTOGRAMS = {
    "row_staleness": "Batches whose gradients a batch's rows lacked.",
    "batch_gap": "Newer batches that were handed out when one was done.",
    "iteration_gap": "Iterations between a net that came and the rank it came to.",
}


def _of_ranks(progress: Progress) -> Iterator[Metric]:
    """Yield what ranks sent one another, and how far apart they are."""
    for name, of, text in (
        ("messages", "messages", "Sent to other ranks."),
        ("bytes", "bytes", "Sent to other ranks, headers of protocols apart."),
        ("wait_seconds", "waits_s", "In which a thread stood still for other ranks."),
    ):
        sent = {kind: values[of] for kind, values in progress.traffic.items()}
        if sent:
            yield counter_family(f"ranks_{name}", text, "kind", sent)
    apart = progress.apart
    for name, of, label, text in (
        ("batches", "batches", "rank", "Learned by a rank."),
        ("groups", "groups", "size", "Groups of ranks that took the mean of their nets."),
        ("wait_seconds", "waits_s", "for", "In which ranks had to wait."),
    ):
        if of in apart:
            yield counter_family(f"apart_{name}", text, label, apart[of])
    for name, text in _HISTOGRAMS.items():
        if name in apart:
            yield _histogram(f"apart_{name}", text, apart[name], apart["sums"][name])


def _histogram(name: str, text: str, bins: Mapping[str, float], total: float) -> Metric:
    """Return a histogram of whole numbers; `bins` begin with 0, 1, 2, 4 and so on."""
    family = HistogramMetricFamily(PREFIX + name, text)
    begins = sorted((int(begin), count) for begin, count in bins.items())
    buckets, below = list[tuple[str, float]](), 0.0
    for begin, count in begins:
        below += count
        buckets.append((str(float(max(0, 2 * begin - 1))), below))
    buckets[-1] = ("+Inf", below)
    family.add_metric([], buckets, total)
    return family


_FIGURES = {
    "events": "Events of the current day of event time that the figures are of.",
    "label_mean": "Share of events with label 1.",
    "log_loss": "In nats.",
    "normalised_entropy": "Log loss over the entropy of the mean label.",
    "calibration": "Mean score over mean label.",
    "auc": "Area under the ROC curve.",
    "auc_error": "Standard error of the AUC.",
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
    of_pruning = {name: progress.pruning.get(name) for name in _PRUNING}
    said |= {f"pruning/{n}": value for n, value in of_pruning.items() if value is not None}
    for of, figures in progress.quality.items():
        said |= {f"{of}/{name}": value for name, value in figures.items()}
    for name, values in progress.slices.items():
        for value, figures in values.items():
            said |= {f"slice/{name}/{value}/{what}": each for what, each in figures.items()}
    return said


@contextlib.contextmanager
def metrics_page(
    port: int, source: EventSource, folder: Path, host: str = METRICS_HOST
) -> Iterator[Show]:
    """Serve /metrics of a run and its folder on an address of this machine while the context lives.

    Raises:
        ConfigurationError: The port cannot be used.
    """
    page = _Page(source, folder)

    def show(progress: Progress) -> None:
        page.newest = progress

    with served(port, page, host):
        yield show


class Seldom:
    """Writes the newest progress, ten seconds after the last at the earliest; at first at once."""

    def __init__(self, write: Show) -> None:
        """Write by `write`."""
        self._write, self._last_s = write, -_LOG_EVERY_S
        self._newest: Progress | None = None  # not written yet

    def show(self, progress: Progress) -> None:
        """Write it now, or keep it for `idle`, unless a newer one comes."""
        self._newest = progress
        self.idle()

    def idle(self) -> None:
        """Write what was kept, once it is time."""
        if time.monotonic() - self._last_s >= _LOG_EVERY_S:
            self.finish()

    def finish(self) -> None:
        """Write what was kept."""
        if self._newest is not None:
            newest, self._newest, self._last_s = self._newest, None, time.monotonic()
            self._write(newest)


def state_of(progress: Progress) -> str:
    """Say in words where a run is, but for its events."""
    auc = "not known yet" if math.isnan(progress.auc) else f"{progress.auc:.4f}"
    said = f"version {progress.version} · AUC {auc} · {progress.events_per_s:,.0f} events/s"
    pruning = progress.pruning
    if not pruning or pruning["loss"] is None or pruning["factor"] is None:
        return said
    return f"{said} · pruned {pruning['factor']:.1f}x for {pruning['loss']:.4f}"


def line(progress: Progress) -> None:
    """Write a line of progress to stderr, where no bar can be drawn."""
    of = "" if progress.total_events is None else f" of {progress.total_events:,}"
    time_s = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    say(f"{time_s} training: {progress.events:,}{of} events · {state_of(progress)}", err=True)


class JsonLog(logging.Handler):
    """A file of JSON lines: `time`, and `progress`, `result`, or `level` and `message`.

    Attributes:
        progress: Takes the run's.
    """

    def __init__(self, path: Path) -> None:
        """Append to a file."""
        super().__init__(logging.INFO)
        self._file = LinesFile(path)
        self.progress = Seldom(self._write_progress)

    def emit(self, record: logging.LogRecord) -> None:
        """Write what a module logs."""
        self.write({"level": record.levelname.lower(), "message": record.getMessage()})

    def _write_progress(self, progress: Progress) -> None:
        auc = None if math.isnan(progress.auc) else progress.auc  # JSON has no NaN
        self.write({"progress": {**dataclasses.asdict(progress), "auc": auc}})

    def write(self, said: Mapping[str, Any]) -> None:
        """Write a line; where the drive is full, it is counted (`lost` of the next line)."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        with self.lock or contextlib.nullcontext():
            lost = {"lost": self._file.lost} if self._file.lost else {}
            self._file.add([json.dumps({"time": now, **lost, **said}).encode() + b"\n"])


@contextlib.contextmanager
def json_log(path: Path) -> Iterator[JsonLog]:
    """Append to a log while the context lives; warnings still go to stderr as well.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    try:
        log = JsonLog(path)
        path.open("ab").close()
    except OSError as error:
        raise ConfigurationError(f"--log {path} cannot be written: {error}") from error
    root = logging.getLogger("embertide")
    level = root.level
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


class MlflowRun:
    """A run in MLflow: its settings, then its curves; a step is an event.

    Figures go out ten seconds after the last at the earliest, and once more at the end. A tracking
    server that is away costs figures, which a warning says, and not the run.

    Attributes:
        progress: Takes the run's.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        """Find the experiment, or make it.

        Raises:
            ConfigurationError: The package is not installed, or MLflow cannot be used.
        """
        # MLflow would wait four minutes for a server that is away, and training with it.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
        try:
            from mlflow import entities
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ConfigurationError(
                f"--mlflow needs a package that is not installed ({error}): pip install "
                "mlflow-skinny, or leave the option out"
            ) from error
        self._entities, self._error = entities, MlflowException
        self._uri = terminal_text(without_secrets(uri))
        with self._refused():
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(experiment)
            made = found.experiment_id if found else self._client.create_experiment(experiment)
            self._experiment = made
        self._id: str | None = None  # until there are settings
        self.progress = Seldom(self._write)

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            cause = terminal_text(without_secrets(str(error)))
            raise ConfigurationError(
                f"--mlflow {self._uri} cannot be used: {cause}; start that server, or give another"
            ) from error

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Make the run.

        Args:
            settings: Nested; they become parameters, 500 characters each at most.

        Raises:
            ConfigurationError: MLflow refuses it.
        """
        params = [self._entities.Param(name, value[:500]) for name, value in _flat(settings, "")]
        with self._refused():
            self._id = self._client.create_run(self._experiment).info.run_id
            for begin in range(0, len(params), 100):
                self._client.log_batch(self._id, params=params[begin : begin + 100])

    def _write(self, progress: Progress) -> None:
        now_ms = time.time_ns() // 1_000_000
        curves = [
            self._entities.Metric(name, float(value), now_ms, progress.events)
            for name, value in scalars(progress).items()
        ]
        try:
            for begin in range(0, len(curves), 1000):
                self._client.log_batch(self._id, metrics=curves[begin : begin + 1000])
        except self._error as error:
            log.warning("MLflow did not take figures of event %d: %s", progress.events, error)

    def end(self, status: str) -> None:
        """Write the last figures, and how the run ended."""
        if self._id is None:
            return
        self.progress.finish()
        try:
            self._client.set_terminated(self._id, status)
        except self._error as error:
            log.warning("MLflow was not told that the run has ended: %s", error)


@contextlib.contextmanager
def mlflow(uri: str, experiment: str) -> Iterator[MlflowRun]:
    """Write a run to MLflow while the context lives, from when it is told to begin.

    Args:
        uri: The tracking server, or a folder or database as MLflow takes it.
        experiment: Its name; made if need be.

    Raises:
        ConfigurationError: The package is not installed, or MLflow cannot be used.
    """
    run = MlflowRun(uri, experiment)
    ended = "FAILED"
    try:
        yield run
        ended = "FINISHED"
    finally:
        run.end(ended)


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
