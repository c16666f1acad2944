"""The demo's stages.

    redis-server <── trainer (learns behind the scorer, publishes) ──> build/demo/publication
        └─────────> two nodes that share `news`, and their control plane (fleet.py)
                        ^── replay (scores every impression over gRPC, then lets the trainer go on)

Every impression is scored by the served model before the trainer sees it, by either node in turn.
Half way the traffic shifts to one node, the control plane moves buckets after it (reshard.py), and
each answer meanwhile is compared with that of a copy that moves nothing. Then the copy of the model
that was kept after the first quarter is scored on the same events, all figures are made from what
was written down, and build/demo/report.json and report.html say them.
"""

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import redis

from embertide._common import redis_url
from embertide._common.private import private_folder
from embertide.server.adapters.process import check_interrupt, check_port
from embertide.server.adapters.redis import RedisOptions, RedisServer, connect
from embertide.server.cli.demo.fleet import DemoFleet, node_budget
from embertide.server.cli.demo.options import (
    FROZEN_MODEL,
    MODEL,
    UNMOVED_MODEL,
    DemoError,
    DemoOptions,
)
from embertide.server.cli.demo.proof import verify
from embertide.server.cli.demo.report import write_report
from embertide.server.cli.demo.reshard import SHIFTED_SHARE, DemoReshard
from embertide.server.cli.metrics_page import MetricsPage
from embertide.server.cli.processes import TrainerProcess, run_trainer

FREEZE_AFTER = 0.25
"""The copy is made once this share of the events is learned."""
CHECKS_PER_S = 300
"""Checks beside requests while buckets may move: a proof wants a thousand answers in seconds."""
_POLL_S = 0.1
_SAMPLE_EVERY_S = 1.0
_MAX_SAMPLES = 2000
_BUS_ANSWERS_S = 3.0


@dataclasses.dataclass(slots=True)
class State:
    """The demo's current state, for whoever shows it."""

    stage: str = "starting"
    console: str = ""  # where it is, or why it is not there
    scored: str = "served"  # whose answers `replay` tells of: served, or frozen
    stream: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replay: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    nodes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reshard: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Show = Callable[[State], None]


class Demo:
    """One run. A context manager: leaving it stops every process that it started."""

    def __init__(self, options: DemoOptions, show: Show) -> None:
        """Prepare the folder; nothing runs yet.

        Raises:
            DemoError: The folder holds something else, or the input or the bus is missing.
            ProcessError: A port is in use.
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
        if directory.exists() and any(directory.iterdir()) and not DemoOptions.marks(directory):
            raise DemoError(f"{directory} holds something else than a demo: give another --out")
        data = self.options.data
        if data is not None and "://" not in data and not Path(data).is_file():
            raise DemoError(f"{data} is missing: give the path of a Parquet or CSV file as DATA")
        self._check_others()
        shutil.rmtree(directory, ignore_errors=True)
        private_folder(directory)
        self.options.mark()

    def _check_others(self) -> None:
        """Refuse a bus that is away and ports that are taken now, and not in a minute."""
        options = self.options
        if options.bus is not None:
            try:
                with connect(options.bus, _BUS_ANSWERS_S) as bus:
                    bus.ping()
            except (redis.RedisError, ValueError) as error:
                raise DemoError(redis_url.failure("--bus", options.bus, error)) from error
        for what, port in (
            ("grpc", options.grpc_port),
            ("metrics", options.metrics_port),
            ("control plane", options.control_port),
            ("console", options.console_port),
        ):
            check_port(what, "127.0.0.1", port)

    def _describe(self) -> None:
        """Read the input, and choose how far apart versions are."""
        options = self.options
        words = [*options.input(), "--model", options.model]
        words += ["--every-s", str(options.publish_every_s)]
        if options.versions is not None:
            words += ["--versions", str(options.versions)]
        self.state.stream = run_trainer("describe", words)
        if options.versions is not None:
            self.options = options.published_every(int(self.state.stream["every_s"]))
            self.options.mark()

    # --- the stages -------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Run everything and return the report.

        Raises:
            ProcessError: A process could not be started, or failed; the message says which.
        """
        self._stage("reading the input")
        self._describe()
        bus = self._start_redis()
        trainer = self._start_trainer(bus)
        self._stage("making the first snapshot (the dense net is compiled once)")
        while not self._publishes() and trainer.poll():
            self._tick(trainer)
        self._stage("starting the control plane and two nodes")
        fleet = DemoFleet(self.options, self.state.stream, bus, self._processes)
        self._stage("learning and serving")
        reshard = DemoReshard(self.options, fleet, self.state.stream)
        replay = self._start_served_replay(fleet, reshard, bus)
        while replay.poll():
            trainer.poll()
            reshard.step(replay.progress)
            self._tick(trainer, replay, fleet, reshard)
        reshard.end(replay.progress)
        self._stage("the trainer publishes its last version")
        while trainer.poll():
            self._tick(trainer, replay, fleet)
        self._await_last(fleet, int((trainer.result or {})["version"]))
        served = fleet.pages()
        self.options.metrics.write_text(served)
        self._stage("scoring the frozen copy on the same events")
        self._score_frozen(fleet)
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
        fleet: DemoFleet | None = None,
        reshard: DemoReshard | None = None,
    ) -> None:
        self.state.trainer = trainer.progress
        if replay is not None:
            self.state.replay = replay.progress
        if reshard is not None:
            self.state.reshard = reshard.facts(self.state.replay)
        now = time.monotonic()
        if fleet is not None and now - self._sampled >= _SAMPLE_EVERY_S:
            fleet.check()
            self._sampled = now
            self.state.nodes = fleet.facts()
            self.state.console = fleet.console.text()
            if self.state.nodes["refused_versions"]:
                raise DemoError(f"a node refuses a version: see {self.options.log('node-0')}")
            phase = self.state.reshard.get("phase")
            self._samples.append(
                {"ts_ms": self.state.replay.get("ts_ms"), "reshard": phase, **self.state.nodes}
            )
            if len(self._samples) > _MAX_SAMPLES:
                del self._samples[1::2]
        self._show(self.state)
        self._pause()

    def _pause(self) -> None:
        check_interrupt()
        time.sleep(_POLL_S)

    def _start_redis(self) -> str:
        if self.options.bus is not None:
            return self.options.bus
        options = RedisOptions(log=self.options.log("redis"))
        return self._processes.enter_context(RedisServer(options)).url

    def _publishes(self) -> bool:
        return any(self.options.publication.glob("snapshots/*/manifest.json"))

    def _start_trainer(self, bus: str) -> TrainerProcess:
        keep_after = int(self.state.stream["events"] * FREEZE_AFTER)
        arguments = [
            str(self.options.publication),
            *self.options.input(),
            *("--model", self.options.model),
            *self.options.context(),
            *("--bus", bus, "--behind-scorer", "--cache", str(self.options.cache)),
            *("--publish-every-s", str(self.options.publish_every_s)),
            *("--keep-after", str(keep_after), "--keep-in", str(self.options.kept)),
            *self.options.rank_words(),
        ]
        log = self.options.log("trainer")
        return self._processes.enter_context(TrainerProcess("train", arguments, log=log))

    def _start_served_replay(
        self, fleet: DemoFleet, reshard: DemoReshard, bus: str
    ) -> TrainerProcess:
        nodes = [word for node in fleet.nodes for word in ("--url", node.grpc)]
        compare = [*("--compare", UNMOVED_MODEL), *("--compare-from", str(reshard.begins_at))]
        compare += ["--checks-per-s", str(CHECKS_PER_S)]
        shift = ("--shift-from", str(reshard.begins_at), "--shift-share", str(SHIFTED_SHARE))
        pace = ("--events-per-s", str(reshard.events_per_s))
        more = (*nodes, "--bus", bus, *compare, *shift, *pace)
        return self._start_replay(MODEL, self.options.directory, *more)

    def _start_replay(self, model: str, output: Path, *more: str) -> TrainerProcess:
        arguments = [
            str(output),
            *self.options.input(),
            *("--model", model, "--max-staleness", str(self.options.max_staleness_min)),
            *more,
        ]
        log = self.options.log(f"replay-{model}")
        return self._processes.enter_context(TrainerProcess("replay", arguments, log=log))

    def _await_last(self, fleet: DemoFleet, version: int) -> None:
        """Wait until the nodes answer at the last version: what they hold is then the model."""
        deadline = time.monotonic() + 30
        while int(fleet.facts()["version"]) < version:
            if time.monotonic() > deadline:
                log = self.options.log("node-0")
                raise DemoError(f"the nodes did not reach version {version}: see {log}")
            self._pause()

    def _score_frozen(self, fleet: DemoFleet) -> None:
        if not (self.options.kept / "manifest.json").is_file():
            return  # so few events that no version fell after the first quarter
        fleet.load_frozen(FROZEN_MODEL)
        url = ("--url", fleet.nodes[0].grpc)
        how = ("--frozen", "--batch-size", "1000")
        replay = self._start_replay(FROZEN_MODEL, self.options.frozen_records, *url, *how)
        self.state.replay, self.state.scored = {}, "frozen"
        while replay.poll():
            self.state.replay = replay.progress
            self._show(self.state)
            self._pause()

    # --- the report -------------------------------------------------------------------------------

    def _report(
        self, trainer: TrainerProcess, replay: TrainerProcess, page: MetricsPage
    ) -> dict[str, Any]:
        stats, trained = replay.result or {}, trainer.result or {}
        figures = verify(self.options)
        nodes = page.model(MODEL)
        first, last = figures["window_days"]
        by_day = trained["auc_by_day"]
        window = [by_day[str(day)] for day in range(first, last + 1) if str(day) in by_day]
        report = {
            **figures,
            "trainer_auc": sum(window) / len(window) if window else None,
            "trainer_auc_by_day": by_day,
            "failed_requests": stats["failed_requests"],
            "probes": stats["probes"],
            "failed_probes": stats["failed_probes"],
            "waited_s": stats["waited_s"],
            "versions_published": trained["version"],
            "ranks": trained["ranks"],
            "plan": trained["plan"],
            "rows": nodes["rows"],
            "resident_bytes": nodes["resident_bytes"],
            "hits": nodes["hits"],
            "node_ddr_budget_bytes": node_budget(self.state.stream),
            "row_bytes": self.state.stream["row_bytes"],
            "stream": self.state.stream,
            "samples": self._samples,
        }
        write_report(self.options.directory, report)
        return report
