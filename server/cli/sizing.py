"""`sizing`: how many nodes a model needs, and how much memory and disk, from a few numbers."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import typer

from embertide._common.commands import with_options
from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, show_table
from embertide.server.adapters.process import UsageError
from embertide.server.cli.common_options import Json
from embertide.server.core.sizing import QUESTIONS, Size, SizingError, check, size

_MB, _GB = 1e6, 1e9


class Figure(NamedTuple):
    """A figure of a size, as people read it.

    Attributes:
        name: Its name.
        value: With its unit.
        note: The text that explains it.
    """

    name: str
    value: str
    note: str


def _bytes(count: float) -> str:
    if count < 100 * _MB:
        return f"{count / _MB:,.1f} MB"
    return f"{count / _GB:,.1f} GB" if count < 1e13 else f"{count / 1e12:,.1f} TB"


def figures(found: Size) -> Iterator[Figure]:
    """Yield what is shown of a size, on the command line and on the console's page."""
    yield Figure(
        "nodes", f"{found.nodes:,}", f"{found.nodes_a_copy:,} a copy, decided by {found.bound}"
    )
    yield Figure("DDR budget of a node", _bytes(found.ddr_bytes), "an eighth of it stays free")
    if found.ssd_bytes:
        yield Figure("SSD budget of a node", _bytes(found.ssd_bytes), "a quarter is for compaction")
        yield Figure(
            "reads that DDR answers", f"{found.ddr_share:.1%}", "simulated, by the policy `clock`"
        )
        yield Figure("rows read from a node's SSD", f"{found.ssd_reads_per_s:,.0f}/s", "once warm")
    yield Figure("keys that a node looks up", f"{found.keys_per_s:,.0f}/s", "of peers, too")
    yield Figure("cores of a node that this takes", f"{found.cores:,.1f}", "without a dense net")
    yield Figure(
        "keys that other nodes answer",
        f"{found.remote_share:.0%}",
        "fewer with copies of hot rows and a good plan",
    )
    yield Figure("a version", _bytes(found.version_bytes), "rows that changed")
    yield Figure("memory of the bus' Redis", _bytes(found.bus_bytes), "what slow nodes still need")
    yield Figure("deltas of a day", _bytes(found.day_bytes), "in the publication")
    yield Figure(
        "a snapshot", _bytes(found.snapshot_bytes), "two are kept, and as many checkpoints"
    )
    yield Figure("memory of the trainer", _bytes(found.trainer_bytes), "all rows in DDR")


def _options() -> list[inspect.Parameter]:
    """Return an option for each question."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=Annotated[
                float, typer.Option(help=each.label[:1].upper() + each.label[1:] + ".")
            ],
        )
        for name, each in QUESTIONS.items()
    ]


def _with_questions(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each question; it gets the answers by name, as `answers`."""
    return with_options(command, "answers", _options())


@_with_questions
def command(*, answers: dict[str, float], as_json: Json = False) -> None:
    """Say how many nodes a model needs, and how much memory and disk each of them.

    Bytes and times are measured ones (docs/sizing.md); the share of reads that DDR answers is
    simulated. The console has the same as a form.

    Example: embertide sizing --rows 1e9 --row-bytes 64 --ddr-percent 20 --requests-per-s 20000
    """
    with report_errors(as_json):
        try:
            for name, value in answers.items():
                check(name, value)
        except SizingError as error:
            option = "--" + error.question.replace("_", "-")
            raise UsageError(f"{option}: {error}") from error
        found = size(answers)
    if as_json:
        print_json({"asked": answers, "size": dataclasses.asdict(found)})
        return
    table = Table("what", "size", "", show_lines=False)
    for each in figures(found):
        table.add_row(*each)
    show_table(table)
