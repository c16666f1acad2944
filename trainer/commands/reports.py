"""Where a run says how it is, beside the terminal: Prometheus, a log of JSON lines, TensorBoard."""

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

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from embertide.trainer.data.base import EventSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.progress import Progress

Show = Callable[[Progress], None]

_LOG_EVERY_S = 10.0
_PREFIX = "embertide_trainer_"


class _Page(Collector):
    """What a scrape gets: the newest progress, and the source's counters as they are now."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self.newest: Progress | None = None

    def collect(self) -> Iterator[Metric]:
        rejected = dict(self._source.dead_letters.by_reason)
        yield _counters("rejected_events", "Events not learned from.", "reason", rejected)
        yield _counters(
            "source_events", "What happened to the source.", "event", self._source.counters()
        )
        newest = self.newest
        if newest is None:
            return
        yield CounterMetricFamily(_PREFIX + "events", "Events learned from.", newest.events)
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
            yield GaugeMetricFamily(_PREFIX + name, text, value)
        sizes = GaugeMetricFamily(_PREFIX + "bytes", "Held by the store.", labels=["tier"])
        for tier, value in newest.resident_bytes.items():
            sizes.add_metric([tier], value)
        yield sizes
        yield CounterMetricFamily(
            _PREFIX + "checkpoints", "With their snapshots.", newest.checkpoints
        )
        yield CounterMetricFamily(
            _PREFIX + "checkpoint_seconds", "Taken by checkpoints.", newest.checkpoint_s
        )
        yield CounterMetricFamily(
            _PREFIX + "dense_missing", "Dense values that were missing.", newest.missing
        )
        yield _counters(
            "set_aside", "Would have made the net not finite.", "what", newest.set_aside
        )
        yield _counters("dropped", "What the store did not do.", "what", newest.dropped)
        yield _counters("published", "Sent, or not.", "what", newest.published)


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


@contextlib.contextmanager
def metrics_page(port: int, source: EventSource) -> Iterator[Show]:
    """Serve /metrics on all addresses while the context lives.

    Raises:
        ConfigurationError: The port cannot be used.
    """
    page, registry = _Page(source), CollectorRegistry()
    registry.register(page)
    try:
        server, thread = start_http_server(port, registry=registry)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"--metrics-port {port} cannot be used: {error}; give another"
        ) from error

    def show(progress: Progress) -> None:
        page.newest = progress

    try:
        yield show
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
        for name in ("auc", "events_per_s", "rows", "version"):
            writer.add_scalar(name, getattr(progress, name), progress.events)

    try:
        yield show
    finally:
        writer.close()
