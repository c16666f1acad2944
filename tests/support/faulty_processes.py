"""The background tasks of a control plane and of a trainer: exceptions, no memory, no threads.

And of a program that serves from Python (claim A.5). Each process
is started with a fault in all of its tasks at once, so that none of them can heal another, but for
those that begin in a round of another; then, while it runs, each task whose rounds come again and
again has the fault in turn. `faulty_python/sitecustomize.py` sets them off.
"""

import abc
import contextlib
import json
import os
import shutil
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from days_of_news import CACHE, TRAINER
from fault_outcomes import FAULTS, HEALS_S, SAYS_S, STARTS_S, Outcome, Tried
from full_disk import within
from prometheus_client.parser import text_string_to_metric_families
from rolling import write_model
from trainer_disk import Sending

from bench.front.targets import LIVE, heard
from bench.servers import BenchError
from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.publish.folder import Publication
from embertide.v1 import control_pb2, control_pb2_grpc

_PAGE = "metrics"  # the task of the page that shows the others


def _ill(port: int, metric: str, label: str) -> set[str] | None:
    """Return the tasks that a page of metrics says are not well; None: there is no page now."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as page:
            text = page.read().decode()
    except OSError:
        return None
    samples = [each for of in text_string_to_metric_families(text) for each in of.samples]
    return {each.labels[label] for each in samples if each.name == metric and each.value == 0}


def _environment(faults: Path) -> dict[str, str]:
    here = Path(__file__).parent / "faulty_python"
    path = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "EMBERTIDE_FAULTS": str(faults)}


class _Process(abc.ABC):
    """A process of ours that may be started again.

    Attributes:
        whose: The process's name, for reports.
        tasks: That it has.
        later: Further ones, which begin in a round of those.
        in_turn: Those whose rounds come again and again.
        child: That runs now.
    """

    whose = ""
    tasks: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    in_turn: tuple[str, ...] = ()
    child: Child

    def __init__(self, stack: contextlib.ExitStack, name: str, faults: Path) -> None:
        self.command: list[str] = []
        self._stack, self._name, self._environment = stack, name, _environment(faults)
        self.folder = faults.parent
        self._starts = 0

    def start(self) -> None:
        """Start it, or start it again; do not wait for it."""
        if self._starts:
            self.child.stop()
        self._starts += 1
        log = self.folder / f"tasks-{self._name}-{self._starts}.log"
        self.child = self._stack.enter_context(
            Child(self.command, log=log, environment=self._environment)
        )

    def says(self, task: str) -> int:
        """Return in how many lines of its log a task is named."""
        return self.child.log_text().count(f"{task}: ")

    @abc.abstractmethod
    def shows(self, task: str) -> bool:
        """Return whether all places that show tasks say that this one is not well."""

    @abc.abstractmethod
    def works(self) -> bool:
        """Return whether it does its work now."""

    @abc.abstractmethod
    def says_all_well(self) -> bool:
        """Return whether it says, wherever it shows tasks, that none fails."""

    def is_well(self) -> bool:
        """Return whether it does its work, and says that no task fails."""
        return self.works() and self.says_all_well()


class _Control(_Process):
    """A control plane with a state store of its own."""

    whose = "a control plane"
    in_turn = (
        *("control-tick", "control-lease", "control-load", "control-think"),
        *("answers", "first-messages", "state-store"),
    )
    tasks = (*in_turn, _PAGE)

    def __init__(self, stack: contextlib.ExitStack, faults: Path) -> None:
        super().__init__(stack, "control", faults)
        port, self._page = free_ports(2)
        self.command = [sys.executable, "-m", "embertide.server.cli", "control"]
        self.command += ["--model", "edges", "--listen", f"127.0.0.1:{port}"]
        self.command += ["--directory", str(self.folder / "tasks-control")]
        self.command += ["--metrics-port", str(self._page)]
        channel = grpc.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.max_reconnect_backoff_ms", 200)]
        )
        self._stub = control_pb2_grpc.ControlServiceStub(stack.enter_context(channel))

    def _status(self) -> set[str] | None:
        with contextlib.suppress(grpc.RpcError):
            answer: control_pb2.ControlServiceGetStatusResponse = self._stub.GetStatus(
                control_pb2.ControlServiceGetStatusRequest(), timeout=2.0
            )
            return {each.name for each in answer.tasks if each.state in ("failing", "no thread")}
        return None

    def shows(self, task: str) -> bool:
        if task == _PAGE:
            return task in (self._status() or set())
        on_page = _ill(self._page, "embertide_control_task_ok", "what")
        return task in (on_page or set()) and task in (self._status() or set())

    def works(self) -> bool:
        return self._status() is not None

    def says_all_well(self) -> bool:
        return self._status() == _ill(self._page, "embertide_control_task_ok", "what") == set()


_RUN = """
from embertide.trainer.config import RunConfig
from embertide.trainer.data.merge import MergedSource
from embertide.trainer.data.redis_stream import RedisStreamSource, StreamConfig
from embertide.trainer.presets import news_model, news_rates

run = RunConfig(
    model=news_model(), optimizer=news_rates(), batch_size=8, publish_every_s=60, snapshot_every=5
)
source = MergedSource(
    [RedisStreamSource(StreamConfig(url={url!r}, stream=stream)) for stream in {streams!r}]
)
"""


class _Trainer(_Process):
    """A trainer of two streams that sends to a bus and to object storage, a version a second."""

    whose = "a trainer"
    in_turn = ("sign of life", "upload-versions", "upload-snapshots")
    tasks = (*in_turn, "reader", _PAGE)
    later = ("merged",)

    def __init__(self, stack: contextlib.ExitStack, faults: Path) -> None:
        super().__init__(stack, "trainer", faults)
        bus = stack.enter_context(
            RedisServer(RedisOptions(log=self.folder / "tasks-redis.log"))
        ).url
        streams = ("one", "another")
        for stream in streams:
            stack.enter_context(Sending(bus, stream))
        run_file = self.folder / "tasks-trainer.py"
        run_file.write_text(_RUN.format(url=bus, streams=streams))
        (self._page,) = free_ports(1)
        folder = self.folder / "tasks-trainer"
        shutil.rmtree(folder, ignore_errors=True)
        self._publication, self._stored = (Publication(folder / at) for at in ("pub", "stored"))
        self.command = [*TRAINER, "train", str(self._publication.path), "--cache", str(CACHE)]
        self.command += ["--config", str(run_file), "--bus", bus]
        self.command += ["--storage", f"file://{self._stored.path}"]
        self.command += ["--metrics-port", str(self._page)]
        self._seen = 0

    def shows(self, task: str) -> bool:
        on_page = _ill(self._page, "embertide_trainer_background_ok", "task")
        if task == _PAGE:
            return on_page is None  # it is what would show itself
        return task in (on_page or set())

    def works(self) -> bool:
        newest = max((each.number for each in self._publication.versions()), default=0)
        before, self._seen = self._seen, max(newest, self._seen)
        return newest > before

    def says_all_well(self) -> bool:
        return _ill(self._page, "embertide_trainer_background_ok", "task") == set()


_SERVES = """
import json, sys, time
from pathlib import Path
import embertide

snapshot, folder, port, said = sys.argv[1:]
with embertide.serve(snapshot, kind="lookup", folder=folder, grpc_port=int(port)) as node:
    while True:
        told = {"unwatched": node.unwatched, "restarts": node.restarts, "pid": node._server.pid}
        Path(f"{said}.new").write_text(json.dumps(told))
        Path(f"{said}.new").replace(said)
        time.sleep(0.1)
"""


class _Serving(_Process):
    """A program that serves from Python, and writes down how its node is."""

    whose = "a program that serves"
    tasks = in_turn = ("kept-server",)

    def __init__(self, stack: contextlib.ExitStack, faults: Path) -> None:
        super().__init__(stack, "serving", faults)
        folder = self.folder / "tasks-serving"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (port,) = free_ports(1)
        self._said = folder / "said.json"
        words = [
            str(write_model(folder)),
            str(folder / "node"),
            str(port),
            str(self._said),
        ]
        self.command = [sys.executable, "-c", _SERVES, *words]
        self._server = f"127.0.0.1:{port}"

    def start(self) -> None:
        self._said.unlink(missing_ok=True)
        super().start()

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self._said.read_text()) if self._said.exists() else {}
        return told

    def shows(self, task: str) -> bool:
        return bool(self._told().get("unwatched"))

    def works(self) -> bool:
        return heard(self._server, *LIVE)

    def says_all_well(self) -> bool:
        return self._told().get("unwatched") == ""

    def is_well(self) -> bool:
        """Also whether a server that is killed is started again."""
        before = self._told()
        if not self.says_all_well():
            return False
        os.kill(before["pid"], signal.SIGKILL)
        return (
            within(HEALS_S, lambda: self._told()["restarts"] > before["restarts"] and self.works())
            is not None
        )


def _at_start(
    process: _Process, faults: Path, fault: str, tasks: Sequence[str]
) -> dict[str, Outcome]:
    """Start a process with a fault in tasks, and end it once all is said."""
    faults.write_text("".join(f"{fault} {task}\n" for task in tasks))
    process.start()
    if within(STARTS_S, lambda: any(map(process.says, tasks))) is None:
        raise BenchError(f"{process.whose} does not start: {process.child.log_text()[-500:]}")

    def in_time(says: Callable[[str], object], task: str, within_s: float = SAYS_S) -> bool:
        return within(within_s, lambda: bool(says(task))) is not None

    # Some begin late in a start.
    in_log = {task: in_time(process.says, task, STARTS_S) for task in tasks}
    in_status = {_PAGE: in_time(process.shows, _PAGE)} if _PAGE in tasks else {}
    others = [task for task in tasks if task != _PAGE]
    faults.write_text("".join(f"{fault} {task}\n" for task in others))
    in_status |= {task: in_time(process.shows, task) for task in others}
    lives = process.child.alive()
    faults.write_text("")
    heals_s = within(HEALS_S, process.says_all_well)
    # It has yet to start: what it does then takes as long as ever.
    lives = lives and within(STARTS_S, process.works) is not None and process.child.alive()
    return {
        f"{task}, at the start": Outcome(
            lives=lives,
            answers=None,
            in_status=in_status[task],
            in_log=in_log[task],
            heals_s=heals_s,
        )
        for task in tasks
    }


def _in_turn(process: _Process, faults: Path, task: str, fault: str) -> Outcome:
    before = process.says(task)
    faults.write_text(f"{fault} {task}\n")
    in_status = within(SAYS_S, lambda: process.shows(task)) is not None
    in_log = within(SAYS_S, lambda: process.says(task) > before) is not None
    works = within(SAYS_S, process.works) is not None
    lives = process.child.alive()
    faults.write_text("")
    heals_s = within(HEALS_S, process.is_well)
    return Outcome(
        lives=lives and process.child.alive(),
        answers=works,
        in_status=in_status,
        in_log=in_log,
        heals_s=heals_s,
    )


def run(folder: Path) -> Iterator[Tried]:
    """Set off each fault in each task of all processes, and yield what became of them.

    Raises:
        BenchError: A process does not start.
    """
    faults = folder / "tasks-faults"
    for kind in (_Control, _Trainer, _Serving):
        faults.write_text("")
        with contextlib.ExitStack() as stack:
            process: _Process = kind(stack, faults)
            for fault in FAULTS:
                outcomes: dict[str, Outcome] = {}
                for tasks in filter(None, (process.later, process.tasks)):
                    outcomes |= _at_start(process, faults, fault, tasks)
                if fault != "start":
                    for task in process.in_turn:
                        outcomes[task] = _in_turn(process, faults, task, fault)
                yield process.whose, fault, outcomes
