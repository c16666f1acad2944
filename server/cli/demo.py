"""The demo: a model learns from a stream and is served while it learns.

    redis-server <── trainer (learns behind the scorer, publishes) ──> build/demo/publication
        └─────────> tritonserver: `news`, two CPU devices, rows on DDR and SSD
                        ^── replay (scores every impression over gRPC, then lets the trainer go on)

Every impression is scored by the served model before the trainer sees it. Then the copy of the
model that was kept after the first quarter is scored on the same events, all figures are made from
what was written down, and build/demo/report.json and report.html say them.
"""

import contextlib
import dataclasses
import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from embertide.server.adapters import triton
from embertide.server.adapters.process import ProcessError
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.cli.metrics_page import MetricsPage
from embertide.server.cli.processes import TrainerProcess, run_trainer
from embertide.server.cli.report import write_report

MODEL = "news"
FROZEN_MODEL = "frozen"
DEVICES = 2
NODE = "node-0"
FREEZE_AFTER = 0.25
"""The copy is made once this share of the events is learned."""
DDR_SHARE = 0.25
"""DDR holds the index and this share of the rows' bytes; the versions' chains come out of it."""
_LEAST_ROWS_BYTES = 1 << 19  # of a device: two pages, or a bucket's index while it doubles
# A node of a version chain; a row that changed in the window has one or more (docs/design/0001).
_WINDOW = 8
_CHAIN_BYTES = 64
_SSD_BYTES = 8 << 30
_POLL_S = 0.1
_SAMPLE_EVERY_S = 1.0
_MAX_SAMPLES = 2000
_MARKER = "demo.json"
_FROZEN = "frozen"  # folder of the frozen copy's records


def ddr_budget(stream: Mapping[str, Any]) -> int:
    """Return the node's DDR budget for a stream as `describe` tells of it."""
    chains = _WINDOW * _CHAIN_BYTES * int(stream["changed_rows"])
    least = chains + DEVICES * _LEAST_ROWS_BYTES
    return int(stream["index_bytes"]) + max(int(DDR_SHARE * stream["row_bytes"]), least)


class DemoError(ProcessError):
    """The demo cannot run; the message says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """What the demo runs over, and where."""

    directory: Path
    backends: Path
    cache: Path  # of compiled dense programs
    data: str | None = None
    events: int | None = None
    hours: int = 96
    max_staleness_min: float = 15.0
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    redis_port: int = 16379
    bus: str | None = None  # a Redis that runs already; one of the demo's own without it

    def input(self) -> list[str]:
        """Return the trainer's options that name the stream."""
        named = {"--data": self.data, "--events": self.events, "--hours": self.hours}
        if self.data is not None:
            del named["--hours"]
        return [str(part) for pair in named.items() if pair[1] is not None for part in pair]

    @property
    def publish_every_s(self) -> int:
        """Event time between versions: three fit the staleness that scoring allows."""
        return max(1, min(600, int(self.max_staleness_min * 60 / 3)))


@dataclasses.dataclass(slots=True)
class State:
    """What the demo looks like now, for whoever shows it."""

    stage: str = "starting"
    scored: str = "served"  # whose answers `replay` tells of: served, or frozen
    stream: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replay: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    node: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Show = Callable[[State], None]


class Demo:
    """One run. A context manager: leaving it stops every process that it started."""

    def __init__(self, options: DemoOptions, show: Show) -> None:
        """Prepare the folder; nothing runs yet.

        Raises:
            DemoError: The folder holds something else, or the input is missing.
        """
        self.options = options
        self.state = State()
        self._show = show
        self._processes = contextlib.ExitStack()
        self._samples: list[dict[str, Any]] = []
        self._sampled = 0.0
        self._prepare()

    def __enter__(self) -> Self:
        """Return the demo."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop what runs, the last started first."""
        self._processes.close()

    def _prepare(self) -> None:
        directory = self.options.directory
        if directory.exists() and any(directory.iterdir()) and not (directory / _MARKER).exists():
            raise DemoError(f"{directory} holds something else than a demo: give another --out")
        data = self.options.data
        if data is not None and "://" not in data and not Path(data).is_file():
            raise DemoError(f"{data} is missing: give the path of a Parquet or CSV file as DATA")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        said = dataclasses.asdict(self.options)
        (directory / _MARKER).write_text(json.dumps(said, default=str, indent=1) + "\n")

    # --- the stages -------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Run everything and return the report.

        Raises:
            ProcessError: A process could not be started, or failed; the message says which.
        """
        self._stage("reading the input")
        every = ("--every-s", str(self.options.publish_every_s))
        self.state.stream = run_trainer("describe", [*self.options.input(), *every])
        bus = self._start_redis()
        trainer = self._start_trainer(bus)
        self._stage("making the first snapshot (the dense net is compiled once)")
        while not self._publishes() and trainer.poll():
            self._tick(trainer)
        node = self._start_node(bus)
        self._stage("learning and serving")
        replay = self._start_replay(MODEL, self.options.directory, "--bus", bus)
        while replay.poll():
            trainer.poll()
            self._tick(trainer, replay, node)
        self._stage("the trainer publishes its last version")
        while trainer.poll():
            self._tick(trainer, replay, node)
        self._await_last(node, int((trainer.result or {})["version"]))
        served = node.metrics()
        (self.options.directory / "metrics.txt").write_text(served)
        self._stage("scoring the frozen copy on the same events")
        self._score_frozen(node)
        self._processes.close()
        self._stage("making the figures")
        return self._report(trainer, replay, MetricsPage(served))

    def _stage(self, text: str) -> None:
        self.state.stage = text
        self._show(self.state)

    def _tick(
        self,
        trainer: TrainerProcess,
        replay: TrainerProcess | None = None,
        node: triton.TritonServer | None = None,
    ) -> None:
        self.state.trainer = trainer.progress
        if replay is not None:
            self.state.replay = replay.progress
        now = time.monotonic()
        if node is not None and now - self._sampled >= _SAMPLE_EVERY_S:
            if not node.alive():
                raise DemoError(
                    f"the node ended with code {node.process.code}: see {node.process.log}"
                )
            self._sampled = now
            self.state.node = MetricsPage(node.metrics()).model(MODEL)
            if self.state.node["refused_versions"]:
                raise DemoError(f"the node refuses a version: see {node.process.log}")
            self._samples.append({"ts_ms": self.state.replay.get("ts_ms"), **self.state.node})
            if len(self._samples) > _MAX_SAMPLES:
                del self._samples[1::2]
        self._show(self.state)
        time.sleep(_POLL_S)

    def _start_redis(self) -> str:
        if self.options.bus is not None:
            return self.options.bus
        log = self.options.directory / "logs" / "redis.log"
        options = RedisOptions(log=log, port=self.options.redis_port)
        return self._processes.enter_context(RedisServer(options)).url

    @property
    def _publication(self) -> Path:
        return self.options.directory / "publication"

    @property
    def _kept(self) -> Path:
        return self.options.directory / "kept"

    def _publishes(self) -> bool:
        return any(self._publication.glob("snapshots/*/manifest.json"))

    def _start_trainer(self, bus: str) -> TrainerProcess:
        keep_after = int(self.state.stream["events"] * FREEZE_AFTER)
        arguments = [
            str(self._publication),
            *self.options.input(),
            *("--bus", bus, "--behind-scorer", "--cache", str(self.options.cache)),
            *("--publish-every-s", str(self.options.publish_every_s)),
            *("--keep-after", str(keep_after), "--keep-in", str(self._kept)),
        ]
        log = self.options.directory / "logs" / "trainer.log"
        return self._processes.enter_context(TrainerProcess("train", arguments, log=log))

    def _model_options(self, **fields: Any) -> triton.ModelOptions:
        return triton.ModelOptions(
            kind="ranking",
            instances=2,
            max_batch_size=4096,  # a request ends where a group of one ts does
            devices=DEVICES,
            node=NODE,
            ddr_budget_bytes=ddr_budget(self.state.stream),
            ssd_budget_bytes=_SSD_BYTES,
            **fields,
        )

    def _start_node(self, bus: str) -> triton.TritonServer:
        self._stage("starting the node")
        options, directory = self.options, self.options.directory
        repository = directory / "models"
        news = self._model_options(
            publication=self._publication, bus=bus, ssd_directory=directory / "ssd" / MODEL
        )
        triton.write_model(repository, MODEL, news)
        frozen = self._model_options(
            snapshot=self._kept, ssd_directory=directory / "ssd" / FROZEN_MODEL
        )
        triton.write_model(repository, FROZEN_MODEL, frozen)
        server = triton.ServerOptions(
            repository=repository,
            backends=options.backends,
            log=directory / "logs" / "node.log",
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            explicit=True,
            models=(MODEL,),
        )
        return self._processes.enter_context(triton.TritonServer(server))

    def _start_replay(self, model: str, output: Path, *more: str) -> TrainerProcess:
        arguments = [
            str(output),
            *self.options.input(),
            *("--url", f"127.0.0.1:{self.options.grpc_port}", "--model", model),
            *("--max-staleness", str(self.options.max_staleness_min)),
            *more,
        ]
        log = self.options.directory / "logs" / f"replay-{model}.log"
        return self._processes.enter_context(TrainerProcess("replay", arguments, log=log))

    def _await_last(self, node: triton.TritonServer, version: int) -> None:
        """Wait until the node answers at the last version: what it holds is then the model."""
        deadline = time.monotonic() + 30
        while int(MetricsPage(node.metrics()).model(MODEL)["version"]) < version:
            if time.monotonic() > deadline:
                raise DemoError(f"the node did not reach version {version}: see {node.process.log}")
            time.sleep(_POLL_S)

    def _score_frozen(self, node: triton.TritonServer) -> None:
        if not (self._kept / "manifest.json").is_file():
            return  # so few events that no version fell after the first quarter
        request = urllib.request.Request(
            f"http://{node.http}/v2/repository/models/{FROZEN_MODEL}/load", data=b"{}"
        )
        with urllib.request.urlopen(request, timeout=60):
            pass
        output = self.options.directory / _FROZEN
        replay = self._start_replay(FROZEN_MODEL, output, "--frozen", "--batch-size", "1000")
        self.state.replay, self.state.scored = {}, "frozen"
        while replay.poll():
            self.state.replay = replay.progress
            self._show(self.state)
            time.sleep(_POLL_S)

    # --- the report -------------------------------------------------------------------------------

    def _report(
        self, trainer: TrainerProcess, replay: TrainerProcess, page: MetricsPage
    ) -> dict[str, Any]:
        stats, trained = replay.result or {}, trainer.result or {}
        figures = verify(self.options)
        node = page.model(MODEL)
        first, last = figures["window_days"]
        by_day = trained["auc_by_day"]
        window = [by_day[str(day)] for day in range(first, last + 1) if str(day) in by_day]
        report = {
            **figures,
            "trainer_auc": sum(window) / len(window) if window else None,
            "trainer_auc_by_day": by_day,
            "failed_requests": stats["failed_requests"],
            "probes": stats["probes"],
            "waited_s": stats["waited_s"],
            "versions_published": trained["version"],
            "rows": node["rows"],
            "resident_bytes": node["resident_bytes"],
            "hits": node["hits"],
            "ddr_budget_bytes": ddr_budget(self.state.stream),
            "row_bytes": self.state.stream["row_bytes"],
            "stream": self.state.stream,
            "samples": self._samples,
        }
        write_report(self.options.directory, report)
        return report


def verify(options: DemoOptions) -> dict[str, Any]:
    """Make the figures from the demo's records and the input.

    Raises:
        CommandError: The records do not prove themselves; the message says the fault.
    """
    directory = options.directory
    frozen = ("--frozen", str(directory / _FROZEN)) if (directory / _FROZEN).is_dir() else ()
    versions = directory / "publication" / "versions.jsonl"
    return dict(run_trainer("verify", [str(directory), str(versions), *options.input(), *frozen]))


def load_demo(directory: Path) -> tuple[DemoOptions, dict[str, Any]]:
    """Return the options and the report of a demo that ran.

    Raises:
        DemoError: There is none.
    """
    try:
        said = json.loads((directory / _MARKER).read_text())
        report = json.loads((directory / "report.json").read_text())
    except FileNotFoundError as error:
        raise DemoError(f"{error.filename} is missing: run the demo first") from None
    paths = {name: Path(said.pop(name)) for name in ("directory", "backends", "cache")}
    return DemoOptions(**{**paths, **said, "directory": directory}), report


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One thing that the report says, and what was found."""

    name: str
    reported: Any
    found: Any

    @property
    def holds(self) -> bool:
        """Whether the two are the same, to the last digits of a float."""
        if isinstance(self.reported, float) and isinstance(self.found, float):
            return abs(self.reported - self.found) <= 1e-9
        return bool(self.reported == self.found)


def check(options: DemoOptions, report: Mapping[str, Any]) -> Iterator[Check]:
    """Yield every check of a report against the records, the input and the node's metrics.

    Raises:
        CommandError: The records do not prove themselves.
    """
    figures = verify(options)
    for name, found in figures.items():
        yield Check(name, report[name], found)
    page = MetricsPage((options.directory / "metrics.txt").read_text())
    inferences = int(page.sum("nv_inference_count", model=MODEL))
    yield Check("nv_inference_count", report["events"] + report["probes"], inferences)
    failures = int(page.sum("nv_inference_request_failure", model=MODEL))
    yield Check("nv_inference_request_failure", report["failed_requests"], failures)
    for name, found in page.model(MODEL).items():
        if name in ("rows", "hits", "resident_bytes"):
            yield Check(name, report[name], found)
