"""The demo's page: figures in words, charts without holes, and one file that asks nobody."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from made_reports import planned, recorded, unmoved, with_silent_hours
from visitor import Page

from embertide.server.cli.demo.charts import Chart, charts
from embertide.server.cli.demo.figures import all_faults, event_time, faults, groups, headline
from embertide.server.cli.demo.report import page, write_report

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b[2J\u202e"
HOUR_MS = 3_600_000


def seen(text: str) -> Page:
    """A page as a person sees it, without its scripts and styles."""
    return Page(re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL))


def shown(report: dict[str, Any]) -> str:
    """The text of a page, its elements with a space between."""
    text = re.sub(r"</(?!script|style)", " </", page(report))
    return " ".join(seen(text).shown.split())


def bands(chart: Chart, kind: str) -> list[tuple[float, float]]:
    """Bands of a chart, in hours."""
    found = [each for each in chart.drawing["bands"] if each["kind"] == kind]
    return [(round(24 * each["from"], 6), round(24 * each["to"], 6)) for each in found]


def test_figures_have_names_for_people_and_stand_in_groups() -> None:
    report = recorded()
    titles = [group.title for group in groups(report)]
    assert titles[:4] == ["Quality", "Moves under traffic", "Latency and freshness", "Failed"]
    text = shown(report)
    for figure in (
        "Served AUC 0.8293",
        "Frozen AUC 0.5096",
        "Impressions scored 400,000",
        "Buckets moved 19 of 39",
        "Answers compared meanwhile 1,283 of 1,283",
        "Request, p99 52.6 ms",
        "Failed requests 0 of 1,563",
        "In use by both nodes, SSD 5.0 MiB",
        "which buckets each node is asked for",
    ):
        assert figure in text, figure
    assert not re.search(r"[a-z]_[a-z]", text), "a raw name"
    assert ("Served AUC", "0.8293") in headline(report)


def test_the_page_is_one_file_that_asks_nobody_and_has_each_chart_as_a_table() -> None:
    text = page(recorded())
    parts = Page(text)
    for tag, said in parts.attributes:
        place = said.get("src", said.get("href", ""))
        assert place == "" or place.startswith(("#", "data:")), (tag, place)
    assert "http-equiv" in dict(parts.tags)["meta"] or 'content="default-src' in text
    assert [tag for tag, _ in parts.tags].count("script") == 3
    drawn = [json.loads(said["data-chart"]) for _, said in parts.attributes if "data-chart" in said]
    assert len(drawn) == 3
    assert text.count("<details>") == 3
    for drawing in drawn:
        xs, *values = drawing["columns"]
        assert xs == sorted(xs)
        assert {len(each) for each in values} == {len(xs)}
        assert len(values) == len(drawing["series"])
    assert text.count('scope="row"') == sum(len(each.rows) for each in charts(recorded()).values())


def test_names_are_text_whatever_they_hold() -> None:
    report = planned(recorded(), why=HOSTILE)
    report["reshard"]["decision"] |= {"why": HOSTILE, "planner": HOSTILE, "triggers": [HOSTILE]}
    text = page(report)
    harmless = planned(recorded())
    assert [tag for tag, _ in Page(text).tags] == [tag for tag, _ in Page(page(harmless)).tags]
    assert not re.search("[\x00\x1b\u202e]", seen(text).shown)
    assert "<img" not in text
    assert html.escape("<script>alert(1)</script>") in text


def test_hours_in_which_nothing_was_asked_are_marked_and_said_in_every_chart() -> None:
    report = with_silent_hours(recorded(), 5, 6, 30)
    for chart in charts(report).values():
        assert bands(chart, "nothing") == [(5, 7), (30, 31)]
        (note,) = [each.text for each in chart.notes if each.kind == "nothing"]
        assert "day 0, 05:00 to day 0, 07:00; day 1, 06:00 to day 1, 07:00" in note
    assert charts(report)["latency"].rows[5] == ["day 0, 05:00", "-", "-"]
    assert not any(bands(chart, "nothing") for chart in charts(recorded()).values())


def test_an_hour_without_an_auc_is_told_from_one_in_which_nothing_was_asked() -> None:
    report = recorded()
    del report["served_auc_by_hour"]["9"]
    chart = charts(report)["quality"]
    assert bands(chart, "nothing") == [(9, 10)]
    assert [each.text for each in chart.notes if each.kind == "nothing"] == [
        "No AUC, as all impressions were clicked or none was: day 0, 09:00 to day 0, 10:00."
    ]


def test_lookups_are_shown_from_the_first_hour_to_the_end_of_the_last() -> None:
    report = recorded()
    chart = charts(report)["lookups"]
    edges = [24 * day for day in chart.drawing["columns"][0]]
    hours = sorted(map(int, report["latency_by_hour"]))
    assert (edges[0], round(edges[-1], 6)) == (hours[0], hours[-1] + 1)
    assert all(None not in each for each in chart.drawing["columns"])
    for shares in zip(*chart.drawing["columns"][1:], strict=True):
        assert sum(shares) == pytest.approx(1)
    counted = sum(int(row[1].replace(",", "")) for row in chart.rows)
    assert counted == sum(report["hits"].values())
    assert len(chart.rows) <= 120
    # A look that found nothing new, as scoring waited, makes no hole.
    waiting = [each | {"ts_ms": each["ts_ms"] + 1} for each in report["samples"] if each["ts_ms"]]
    both = [
        each
        for pair in zip(report["samples"][-len(waiting) :], waiting, strict=True)
        for each in pair
    ]
    again = charts(report | {"samples": both})["lookups"]
    assert again.drawing["columns"][1:] == chart.drawing["columns"][1:]


def test_a_line_begins_where_its_first_hour_does() -> None:
    days, served, frozen = charts(recorded())["quality"].drawing["columns"]
    assert len(served) == len(days) == 1 + len(recorded()["latency_by_hour"])
    assert served[0] == served[1] == recorded()["served_auc_by_hour"]["0"]
    assert frozen[:12] == [None] * 12
    assert frozen[12] == frozen[13] == recorded()["frozen_auc_by_hour"]["12"]
    assert days[12] == 0.5


def test_moves_are_marked_where_they_were() -> None:
    chart = charts(recorded())["quality"]
    ((begin, end),) = bands(chart, "moves")
    assert 24 < begin < end < 30
    (note,) = [each.text for each in chart.notes if each.kind == "moves"]
    assert note.startswith(f"Buckets moved: {event_time(begin * HOUR_MS)}")


def test_a_short_stream_says_why_there_is_no_move_and_no_copy() -> None:
    text = shown(unmoved(recorded()))
    assert "No bucket moved: the stream ended" in text
    assert "the stream ended before a copy was made" in text
    assert "There is no line of a frozen copy" in text
    nobody = unmoved(recorded()) | {"samples": [], "hits": dict.fromkeys(recorded()["hits"], 0)}
    assert "There is nothing to show: no node was looked at" in shown(nobody)


def test_a_reshard_in_which_nothing_was_asked_can_be_reported(tmp_path: Path) -> None:
    # Before: TypeError, at the end of an hour.
    silent = ("largest_difference", "touched", "touched_impressions", "p99_ms", "p99_before_ms")
    report = recorded()
    report["reshard"] |= dict.fromkeys(silent) | {"answers": 0, "compared": 0}
    write_report(tmp_path, report)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page(report)
    text = shown(report)
    assert "Answers compared meanwhile 0 of 0" in text
    assert "1,000 are wanted" in text
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_faults_stand_at_the_top_in_words() -> None:
    assert all_faults(recorded()) == []
    assert "Nothing failed" in shown(recorded())
    report = recorded() | {"failed_requests": 3, "learned_rows": 1200}
    report["reshard"] |= {"answers_changed": 2, "largest_difference": 0.5}
    assert faults(report) == ["2 answers changed by the reshard, by up to 0.5"]
    text = shown(report)
    assert "Nothing failed" not in text
    assert "3 faults 2 answers changed by the reshard, by up to 0.5 3 requests failed" in text
    assert "1,200 impressions were scored by a version that had learned from them" in text


def test_the_search_of_ranks_for_a_plan_is_a_group_of_its_own() -> None:
    text = shown(planned(recorded()))
    assert "Plan of 2 ranks refused the one that was found was not faster Plans timed 1,200" in text
    assert "Step with the plan, measured 40.0 ms" in text
    assert "a step took 40 ms, 20 without it" in text
    assert "Plan of" not in shown(recorded())
