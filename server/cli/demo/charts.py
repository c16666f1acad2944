"""The charts of the demo's page, each with the same figures as a table.

A drawing is the argument of `lines` in page.js: columns over days of event time, and bands where
buckets moved or where there is nothing to show. Each band is also said in words.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from embertide.server.cli.demo.figures import SOURCES, auc_text, event_time, hit_share

_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000
_MAX_STEPS = 120
"""Stretches of event time in which lookups are added up."""
_MAX_STRETCHES = 6
_MOVES = ("moving", "settling")
Hours = Mapping[str, Any]


class Note(NamedTuple):
    """A sentence below a chart.

    Attributes:
        text: The sentence.
        kind: The band that it explains: moves or nothing; empty: none.
    """

    text: str
    kind: str = ""


class Chart(NamedTuple):
    """Figures over event time.

    Attributes:
        title: What they are.
        drawing: For the script that draws them.
        notes: What the bands are, and what is missing.
        columns: The names of the table's columns.
        rows: Its rows.
    """

    title: str
    drawing: dict[str, Any]
    notes: Sequence[Note]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class _Stretch(NamedTuple):
    """A time of events, in ms: [from, to)."""

    from_ms: float
    to_ms: float

    def __str__(self) -> str:
        return f"{event_time(self.from_ms)} to {event_time(self.to_ms)}"

    def band(self, kind: str) -> dict[str, Any]:
        return {"from": self.from_ms / _DAY_MS, "to": self.to_ms / _DAY_MS, "kind": kind}


def charts(report: Mapping[str, Any]) -> dict[str, Chart]:
    """Return the charts by the keys of their groups of figures."""
    return {"quality": _auc(report), "latency": _latency(report), "lookups": _lookups(report)}


def _hours(report: Mapping[str, Any]) -> range:
    """Return the hours of the stream, from the first request to the last."""
    asked = [int(hour) for hour in report["latency_by_hour"]]
    return range(min(asked), max(asked) + 1) if asked else range(0)


def _stretches(hours: Sequence[int]) -> list[_Stretch]:
    """Return hours, neighbours together."""
    found: list[_Stretch] = []
    for hour in hours:
        if found and found[-1].to_ms == hour * _HOUR_MS:
            found[-1] = found[-1]._replace(to_ms=(hour + 1) * _HOUR_MS)
        else:
            found.append(_Stretch(hour * _HOUR_MS, (hour + 1) * _HOUR_MS))
    return found


def _listed(stretches: Sequence[_Stretch]) -> str:
    said = [str(each) for each in stretches[:_MAX_STRETCHES]]
    more = len(stretches) - len(said)
    return "; ".join([*said, f"and {more:,} more"] if more else said)


def _moves(report: Mapping[str, Any]) -> Iterator[_Stretch]:
    """Yield the event time in which buckets moved."""
    at_ms = [
        each["ts_ms"]
        for each in report["samples"]
        if each["reshard"] in _MOVES and each["ts_ms"] is not None
    ]
    if at_ms:
        yield _Stretch(min(at_ms), max(at_ms))


def _bands(
    report: Mapping[str, Any], missing: Sequence[tuple[str, Sequence[int]]]
) -> tuple[list[dict[str, Any]], list[Note]]:
    """Return bands and what they are: of moves, and of hours without values, by reason."""
    moved = list(_moves(report))
    bands = [each.band("moves") for each in moved]
    notes = [Note(f"Buckets moved: {_listed(moved)}.", "moves")] if moved else []
    for reason, hours in missing:
        stretches = _stretches(hours)
        bands += [each.band("nothing") for each in stretches]
        if stretches:
            notes.append(Note(f"{reason}: {_listed(stretches)}.", "nothing"))
    return bands, notes


def _unasked(report: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return the hours in which nothing was asked."""
    asked = report["latency_by_hour"]
    hours = [hour for hour in _hours(report) if str(hour) not in asked]
    return "Nothing was asked, so there is nothing to show", hours


def _by_hour(report: Mapping[str, Any], *series: Hours) -> list[list[float | None]]:
    """Return the columns of steps: the hours' edges in days, and values."""
    hours = _hours(report)
    values = [[each.get(str(hour)) for hour in hours] for each in series]
    return _columns([hour / 24 for hour in range(hours.start, hours.stop + 1)], values)


def _columns(
    edges: Sequence[float], values: Sequence[Sequence[float | None]]
) -> list[list[float | None]]:
    """Return columns in which a value holds since the edge before.

    The edge at which the first value begins has it, too: steps are drawn from there.
    """
    columns: list[list[float | None]] = [list(edges)]
    for each in values:
        column = [None, *each]
        first = next((at for at, value in enumerate(each) if value is not None), None)
        if first is not None:
            column[first] = each[first]
        columns.append(column)
    return columns


def _hour_rows(report: Mapping[str, Any], texts: Sequence[Mapping[str, str]]) -> list[list[str]]:
    return [
        [event_time(hour * _HOUR_MS), *(each.get(str(hour), "-") for each in texts)]
        for hour in _hours(report)
    ]


def _auc(report: Mapping[str, Any]) -> Chart:
    served, frozen = report["served_auc_by_hour"], report["frozen_auc_by_hour"]
    unasked = _unasked(report)
    # An hour of clicks alone, or of none, has no AUC.
    asked = sorted(set(_hours(report)) - set(unasked[1]))
    no_auc = [hour for hour in asked if str(hour) not in served]
    bands, notes = _bands(
        report, [unasked, ("No AUC, as all impressions were clicked or none was", no_auc)]
    )
    if not frozen:
        notes.append(Note("There is no line of a frozen copy: none was scored."))
    values = [*served.values(), *frozen.values(), 0.5]
    low, high = math.floor(20 * min(values)) / 20, math.ceil(20 * max(values)) / 20
    lines: list[dict[str, Any]] = [{"label": "Served", "colour": "--accent"}]
    if frozen:
        lines.append({"label": "Frozen copy", "colour": "--muted", "dash": True})
    drawing = {
        "series": lines,
        "columns": _by_hour(report, served, *([frozen] if frozen else [])),
        "range": [low, max(high, low + 0.05)],
        "label": "AUC of an hour",
        "digits": 4,
    }
    texts = [{hour: auc_text(value) for hour, value in each.items()} for each in (served, frozen)]
    return Chart(
        "AUC by hour of event time: the model that learns, and its copy frozen early on",
        _drawing(drawing, bands),
        notes,
        ("Hour from", "Served AUC", "Frozen AUC"),
        _hour_rows(report, texts),
    )


def _drawing(own: dict[str, Any], bands: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": "day", "least": 1 / 24, "steps": True, "bands": bands, **own}


def _latency(report: Mapping[str, Any]) -> Chart:
    hours = report["latency_by_hour"]
    p50, p99 = ({hour: pair[at] for hour, pair in hours.items()} for at in (0, 1))
    bands, notes = _bands(report, [_unasked(report)])
    values = [value for pair in hours.values() for value in pair if value > 0] or [1.0]
    drawing = {
        "series": [
            {"label": "p99", "colour": "--accent"},
            {"label": "p50", "colour": "--muted", "dash": True},
        ],
        "columns": _by_hour(report, p99, p50),
        "log": True,
        "range": [_rounded(min(values), down=True), _rounded(1.001 * max(values), down=False)],
        "label": "ms (log scale)",
        "unit": "ms",
    }
    texts = [{hour: f"{value:.1f} ms" for hour, value in each.items()} for each in (p50, p99)]
    return Chart(
        "Latency of scoring requests by hour of event time",
        _drawing(drawing, bands),
        notes,
        ("Hour from", "p50", "p99"),
        _hour_rows(report, texts),
    )


def _rounded(value: float, *, down: bool) -> float:
    """Return the next 1, 2 or 5 times a power of ten, below a value or above it."""
    power = 10.0 ** math.floor(math.log10(value))
    steps = [power * step for step in (1, 2, 5, 10)]
    return max(s for s in steps if s <= value) if down else min(s for s in steps if s >= value)


class _Step(NamedTuple):
    """Lookups in a stretch of event time, by where they were answered."""

    when: _Stretch
    hits: Mapping[str, int]


def _steps(report: Mapping[str, Any]) -> list[_Step]:
    """Return the lookups between looks at the nodes, neighbours added up to at most so many steps.

    A look that found nothing new, as scoring waited for a version, belongs to the next step. What
    came after the last look is known by the sums of the whole run.
    """
    hours = _hours(report)
    if not hours:
        return []
    shortest_ms = len(hours) * _HOUR_MS / _MAX_STEPS
    since_ms, end_ms = float(hours.start * _HOUR_MS), float(hours.stop * _HOUR_MS)
    before: Mapping[str, int] = {}
    steps: list[_Step] = []
    looks = [(each["ts_ms"], each["hits"]) for each in report["samples"]]
    for at_ms, sums in [*looks, (end_ms, report["hits"])]:
        if at_ms is None:  # nothing was asked yet
            continue
        hits = {name: count - before.get(name, 0) for name, count in sums.items()}
        is_long_enough = at_ms - since_ms >= shortest_ms or at_ms == end_ms
        if is_long_enough and any(hits.values()):
            steps.append(_Step(_Stretch(since_ms, at_ms), hits))
            since_ms, before = at_ms, sums
    if steps:
        steps[-1] = steps[-1]._replace(when=steps[-1].when._replace(to_ms=end_ms))
    return steps


def _lookups(report: Mapping[str, Any]) -> Chart:
    steps = _steps(report)
    used = [name for name in SOURCES if any(each.hits.get(name) for each in steps)]
    bands, notes = _bands(report, [_unasked(report)])
    if not steps:
        notes.append(Note("There is nothing to show: no node was looked at while it was asked."))
    edges = [steps[0].when.from_ms, *(each.when.to_ms for each in steps)] if steps else []
    shares = [[hit_share(each.hits, name) for each in steps] for name in used]
    drawing = {
        "series": [
            {"label": SOURCES[name], "colour": f"--part-{1 + list(SOURCES).index(name)}"}
            for name in used
        ],
        "columns": _columns([edge / _DAY_MS for edge in edges], shares),
        "stacked": True,
        "range": [0, 1],
        "times": 100,
        "unit": "%",
        "label": "% of looked-up keys",
    }
    rows = [
        [
            str(each.when),
            f"{sum(each.hits.values()):,}",
            *(f"{hit_share(each.hits, name):.1%}" for name in used),
        ]
        for each in steps
    ]
    names = [SOURCES[name] for name in used]
    return Chart(
        "Where keys were looked up, over event time",
        _drawing(drawing, bands),
        notes,
        ("Event time", "Keys", *(f"{name[0].upper()}{name[1:]}" for name in names)),
        rows,
    )
