"""Questions of an operator at three in the morning: answered by a command and by a page?

Chaos' fleet runs: two nodes that share a model, a trainer, a control plane, two Redis, clients. A
node is drained, with a reason; its process is killed, and the trainer is stopped. Then each
question is asked twice, while that lasts: by one command of a terminal of 80 columns, and of the
console's pages, which are one click each from any other (none for the first one). An answer counts
if it has the words that answer the question, which the faults decide. Times are those of the
command's process, and of the page over HTTP.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import NamedTuple, Self

from bench import parts
from bench.console import Visitor
from bench.report import CONSOLE, Row, measure
from bench.servers import BUILD, BenchError
from embertide.server.cli.chaos.faults import Fault
from embertide.server.cli.chaos.inject import Injector
from embertide.server.cli.chaos.options import ChaosOptions
from embertide.server.cli.chaos.rounds import Chaos
from embertide.server.cli.common_options import DEFAULT_BACKENDS, DEFAULT_CACHE
from embertide.server.cli.control_client import Caller
from embertide.server.console.app import Console, ConsoleOptions
from embertide.server.console.server import ConsoleServer

_CLAIM = "G.2"
_REASON = "disk of node-0 is worn"
_TIME = r"\d\d:\d\d:\d\d"
_AWAY_S = 400.0  # the faults last as long as it takes to ask
_NOTICED_S = 60.0
_CLICKS = 2


class Question(NamedTuple):
    """A question, where its answer stands, and the words of the answer.

    Attributes:
        text: The question.
        command: Words after `embertide`.
        page: The page's path.
        words: A regular expression that both must have.
    """

    text: str
    command: str
    page: str
    words: str


QUESTIONS = (
    Question(
        "when did node-1 die?",
        "timeline node-1",
        "/timeline",
        rf"{_TIME}.{{0,40}}node node-1 is dead",
    ),
    Question("is the trainer alive?", "status", "/", r"(?i)silent for \d+"),
    Question(
        "who moved what, when, and why?",
        "timeline --kind operation",
        "/timeline",
        rf"{_TIME}.*{_REASON}",
    ),
    Question(
        "how much memory is left?", "status", "/storage", r"node-0/0[\d ,]*\d+%|node-0 .*[KMG]iB"
    ),
    Question("which requests were slow, and where?", "slow", "/latency", r"node-\d.*\d"),
    Question(
        "which buckets have no live owner?", "status", "/", r"(?i)(39|without a live owner\D*39)"
    ),
    Question("which nodes are dead, and since when?", "node list", "/nodes", r"node-1.*dead"),
    Question("how old are the answers?", "status", "/freshness", r"(?i)stale.*\d+ ?s"),
    Question(
        "which version is the newest, and of when?",
        "versions",
        "/versions",
        rf"\d+ \d+-\d+-\d+ {_TIME}",
    ),
    Question(
        "why is nothing moved?",
        "drift",
        "/drift",
        r"unknown load: the load of node-\d is not known|less than|no detector fired",
    ),
    Question("which keys are hot?", "hot", "/load", r"(hour|env|device) \d+ [\d,]+"),
    Question(
        "is the control plane itself well?", "status", "/control", r"(?i)plan \d+|plan epoch \d+"
    ),
    Question("what was done to the fleet?", "reshard list", "/operations", _REASON),
    Question(
        "what did the last hour bring?",
        "timeline --since 1h",
        "/timeline",
        r"versions? \d+.*published",
    ),
)


class Night:
    """The fleet after its faults. A context manager."""

    def __init__(self, given: argparse.Namespace) -> None:
        """Start it, do what is asked about, and wait until the control plane knows.

        Raises:
            ProcessError: A process does not start.
            BenchError: It is not known in time.
        """
        options = ChaosOptions(
            directory=given.directory, backends=given.backends, cache=DEFAULT_CACHE
        )
        options.empty()
        self.chaos = Chaos(options, print)
        self.control = self.chaos.fleet.control
        self._drain()
        faults = [
            Fault(at_s=0.0, kind="kill", target="node-1", for_s=_AWAY_S),
            Fault(at_s=0.0, kind="stop", target="trainer", for_s=_AWAY_S),
        ]
        self._injector = Injector(self.chaos.fleet, self.chaos.replay, faults, time.monotonic())
        deadline = time.monotonic() + _NOTICED_S
        while not all(word in self.say("status")[0] for word in ("SILENT", "node-1 is dead")):
            if time.monotonic() > deadline:
                raise BenchError(f"the faults are not known:\n{self.say('status')[0]}")
            self.go(1.0)

    def _drain(self) -> None:
        words = ["node", "drain", "node-0", "--reason", _REASON, "--watch"]
        done = self._run(words)
        CONSOLE.print(f"[dim]{done.stdout}{done.stderr}")
        self.go(5.0)

    def go(self, for_s: float) -> None:
        """Keep the fleet going for a while."""
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            if hasattr(self, "_injector"):
                self._injector.step()
            self.chaos.tick()

    def _run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "embertide.server.cli", *words, "--control", self.control],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
        )

    def say(self, command: str) -> tuple[str, float]:
        """Return what a command prints, and how long it took."""
        began = time.perf_counter()
        done = self._run(command.split())
        return done.stdout + done.stderr, time.perf_counter() - began

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes."""
        self._injector.end()
        self.chaos.__exit__()


def _measure(given: argparse.Namespace) -> Iterator[Row]:
    found: dict[str, list[tuple[bool, float]]] = {"command": [], "page": []}
    with Night(given) as night:
        console = Console(
            ConsoleOptions(
                control=night.control,
                dial=lambda token: Caller(night.control, token),
            )
        )
        try:
            with ConsoleServer(console.app, "127.0.0.1:0", None) as server:
                visitor = Visitor(server.address)
                visitor.log_in()
                for each in QUESTIONS:
                    said, command_s = night.say(each.command)
                    night.go(0.5)
                    began = time.perf_counter()
                    page = visitor.ask(each.page).decode()
                    page_s = time.perf_counter() - began
                    shown = unescape(re.sub(r"<[^>]+>", " ", page))
                    for name, text, seconds in (
                        ("command", said, command_s),
                        ("page", shown, page_s),
                    ):
                        answered = re.search(each.words, re.sub(r"[ \n]+", " ", text)) is not None
                        found[name].append((answered, seconds))
                        if not answered:
                            CONSOLE.print(f"[red]{each.text} {name}:[/red]\n{text[:3000]}")
                    CONSOLE.print(
                        f"[dim]{each.text} embertide {each.command}: {command_s:.2f} s; "
                        f"{each.page}: {page_s:.2f} s"
                    )
        finally:
            console.close()
    case = f"{len(QUESTIONS)} questions, a node dead, a trainer silent"
    for name, metric in (
        ("command", "answered by one command"),
        ("page", f"answered in at most {_CLICKS} clicks"),
    ):
        shares = [float(each) for each, _ in found[name]]
        yield measure(
            (case, metric, "share"),
            [sum(shares) / len(shares)],
            better="higher",
            target=1,
            claim=_CLAIM,
        )
        yield measure(
            (case, f"time of a {name}, median", "s"),
            [seconds for _, seconds in found[name]],
            better="lower",
            target=0,
        )


if __name__ == "__main__":
    parser = parts.options("questions", __doc__)
    parser.add_argument("--directory", type=Path, default=BUILD / "questions")
    parser.add_argument("--backends", type=Path, default=DEFAULT_BACKENDS)
    parts.command("Questions of an operator", _measure, parser)
