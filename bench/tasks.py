"""Seven tasks by the docs alone: the sections of docs/howto.md run as they stand, timed.

A task's minutes are those of its commands, and of reading its section once at `_WORDS_A_MINUTE`.
`python -m bench.tasks [WORDS OF A TITLE]` needs the ports that the page names, and an idle machine.
"""

import argparse
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

from bench import parts, report
from bench.desk import Desk
from bench.report import CONSOLE
from bench.servers import ROOT, BenchError

_PAGE = ROOT / "docs" / "howto.md"
_WORDS_A_MINUTE = 150  # read slowly: half of them are code
# Minutes at most, and the claim: of tasks that have one of their own, and of all others.
_BARS = {"": (10, "22.2"), "A model of HPS": (5, "G.6")}


@dataclass(frozen=True, slots=True)
class Step:
    """A block of a section: a file to save, or shell.

    Attributes:
        file: The file's name; empty: shell.
        text: The block's contents.
    """

    file: str
    text: str


@dataclass(slots=True)
class Task:
    """A section of the page: its title, how many words it has, and its steps."""

    title: str
    words: int = 0
    steps: list[Step] = field(default_factory=list)


def tasks(page: str) -> list[Task]:
    """Return the sections of a page that have steps.

    Raises:
        ValueError: Python that has no name to be saved by.
    """
    found: list[Task] = []
    name = ""
    tokens = MarkdownIt("commonmark").parse(page)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "inline" and before is not None and before.type == "heading_open":
            found.append(Task(token.content))
            name = ""
        elif token.type == "inline" and found:
            for said in re.findall(r"[Ss]ave\s+(?:this|it)\s+as\s+`(\w+\.py)`", token.content):
                name = said
        elif token.type == "fence" and token.info == "python":
            if not name:
                raise ValueError(f"{found[-1].title}: a block of Python without `Save this as`")
            found[-1].steps.append(Step(name, token.content))
            name = ""
        elif token.type == "fence":
            found[-1].steps.append(Step("", token.content))
        if found:
            found[-1].words += len(token.content.split())
    return [task for task in found if task.steps]


def minutes(task: Task) -> float:
    """Do a task in an empty folder; return the minutes that it took.

    Raises:
        BenchError: A command failed.
    """
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="embertide-task-") as folder,
        Desk(Path(folder)) as desk,
    ):
        for step in task.steps:
            at = time.monotonic()
            if step.file:
                desk.save(step.file, step.text)
            else:
                CONSOLE.print(desk.do(step.text), markup=False)
            first = step.file or step.text.splitlines()[0]
            CONSOLE.print(f"{time.monotonic() - at:7.1f} s  {first}", markup=False)
    return (time.monotonic() - begun) / 60 + task.words / _WORDS_A_MINUTE


def _cpu_minutes() -> float:
    """Return what ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / 60


def _measure(given: argparse.Namespace) -> Iterator[report.Row]:
    failed = []
    for task in tasks(_PAGE.read_text(encoding="utf-8")):
        if given.words.lower() not in task.title.lower():
            continue
        CONSOLE.rule(task.title)
        try:
            before = _cpu_minutes()
            took = minutes(task)
        except (BenchError, subprocess.TimeoutExpired) as error:
            CONSOLE.print(f"bench-tasks: {task.title}: {error}", markup=False)
            failed.append(task.title)
            continue
        name = (task.title, "by the docs alone", "min")
        bar, claim = _BARS.get(task.title, _BARS[""])
        yield report.measure(name, [took], better="lower", target=bar, claim=claim)
        cpu = (task.title, "CPU time of its commands", "min")
        yield report.measure(cpu, [_cpu_minutes() - before], better="lower", target=0)
    if failed:
        raise BenchError(f"not done: {', '.join(failed)}")


if __name__ == "__main__":
    parser = parts.options("tasks", __doc__)
    parser.add_argument("words", nargs="?", default="", help="of the titles to do (all)")
    parts.command("Tasks of a new user", _measure, parser)
