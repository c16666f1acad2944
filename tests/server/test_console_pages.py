"""Pages of the console: any names are text, an age when nobody answers, fleets of any size."""

import re
from typing import Any

import pytest
from consoles import OF_THE_FLEET, PATHS, Served, made
from hypothesis import given, settings
from hypothesis import strategies as st
from made_fleet import MadeFleet, Names, answers
from visitor import Page, Visitor
from waiting import wait_until

from embertide.server.cli.fleet_view import FleetAnswers
from embertide.server.console import source
from embertide.server.console.app import Console, ConsoleOptions
from embertide.server.console.heat import HeatMap
from embertide.server.console.source import Reading, read
from embertide.server.console.views import VIEWS
from embertide.v1 import control_pb2

PAGE_BYTES_MAX = 500_000
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}",
    "javascript:alert(1)",
    "</textarea></title><svg/onload=alert(1)>",
    "&lt;b&gt;",
    "\x1b[2J\u202e\x00",
)
TEXT = st.one_of(
    st.sampled_from(HOSTILE), st.text(alphabet="<>\"'&;/=`{}%\\ abc\n\u202e\u2028\x1b", max_size=40)
)


def pages(there: Served) -> dict[str, Page]:
    visitor = there.visitor("")
    return {path: visitor.get(path).page for path in PATHS}


@pytest.fixture(scope="module")
def plain() -> dict[str, Page]:
    with made(answers()) as (there, _):
        return pages(there)


def render(told: dict[str, object]) -> dict[str, str]:
    """Each page's text, without a server."""
    fleet = MadeFleet(told)
    console = Console(ConsoleOptions(control="127.0.0.1:7070", dial=fleet.dial))
    reading: Reading = read(fleet.dial(""))
    console.source.heat.add(reading.answers)
    frame: dict[str, Any] = {"csrf": "c", "role": "operator", "may_act": True, "is_open": False}
    try:
        return {
            path: bytes(
                console._render(
                    f"{name}.html",
                    view=name,
                    title=title,
                    problem="",
                    at_ms=reading.answers.at_ms,
                    url=path,
                    planners=["auto"],
                    modes=["off", "advise", "auto"],
                    **frame,
                    **make(reading, {}, console.source),
                ).body
            ).decode()
            for name, (path, title, make) in VIEWS.items()
        }
    finally:
        console.close()


PLAIN = {path: Page(text).tags for path, text in render(answers()).items()}


@settings(max_examples=40, deadline=None)
@given(node=TEXT, table=TEXT, reason=TEXT, author=TEXT, host=TEXT, message=TEXT)
def test_names_are_text_whatever_they_hold(
    node: str, table: str, reason: str, author: str, host: str, message: str
) -> None:
    names = Names(
        node=node, table=table, reason=reason or "r", author=author, host=host, message=message
    )
    for path, text in render(answers(names=names)).items():
        page = Page(text)
        shape = [tag for tag in page.tags if tag[0] not in ("span", "br")]
        assert shape == [tag for tag in PLAIN[path] if tag[0] not in ("span", "br")]
        assert not re.search("[\x00\x1b\u202e\u2028]", text)


def test_no_page_has_a_script_or_a_style_of_its_own(plain: dict[str, Page]) -> None:
    for page in plain.values():
        assert page.inline.strip() == ""
        for tag, attributes in page.tags:
            assert tag != "style"
            assert not [name for name in attributes if name == "style" or name.startswith("on")]
        for tag, said in page.attributes:
            place = said.get("src", said.get("href", "") if tag == "link" else "")
            assert place == "" or place.startswith("/static/"), place


def test_what_pages_show_is_what_status_shows(plain: dict[str, Page]) -> None:
    assert "Live nodes2 of 2" in re.sub(r"\s+", " ", plain["/"].shown)
    assert "drain move-1 was accepted: 4 buckets" in plain["/timeline"].shown
    assert "versions 1 to 40 were published" in plain["/timeline"].shown
    assert "operator/anna" in plain["/operations"].shown
    assert "no gain" in plain["/drift"].shown
    assert "balance x1.50 by 7 operations" in plain["/drift"].shown
    assert "4.0%6.1%-" in re.sub(r"\s+", "", plain["/drift"].shown)
    assert "10.0.0.1:7200" in plain["/nodes"].shown
    shown = {path: "".join(page.shown.split()) for path, page in plain.items()}
    assert "Ordinaryrequestsseeversion38" in shown["/versions"]
    assert "3,6000.73600.40001.01019.5KiB64of64withdrawn" in shown["/versions"]
    assert "Gobacktoaversion" in shown["/versions"]
    assert "node-11.90ms0.80ms1800.42" in shown["/latency"]
    assert "p99,slowestnode1.90ms" in shown["/latency"]
    stages = "9.00ms6.00ms0.50ms2.00ms0.50ms962version40"
    assert f"{stages}4bf92f3577b34da6a3ce929d0e0e4736" in shown["/latency"]
    lookup = r"node-1node-0\d+\.\dsago5\.20ms484bf92f3577b34da6a3ce929d0e0e4736"
    assert re.search(lookup, shown["/latency"])
    assert "90.0MiBof1.0GiB" in shown["/storage"]
    assert "10.0%" in shown["/storage"]


def test_a_dead_node_is_named_with_its_remedy_and_its_time() -> None:
    with made(answers(3, dead=1)) as (there, _):
        shown = {path: " ".join(page.shown.split()) for path, page in pages(there).items()}
    assert "node node-0 is dead, its last beat 61 s ago" in shown["/"]
    assert "6 buckets have no live owner" in shown["/"]
    assert "node node-0 is dead" in shown["/timeline"]


def test_a_timeline_is_searched() -> None:
    with made(answers(names=Names(reason="the great move"))) as (there, _):
        visitor = there.visitor("")
        found = " ".join(visitor.get("/timeline?q=GREAT+move&kind=operation").page.shown.split())
        assert "1 events, out of the newest 5." in found
        assert "No such event" in visitor.get("/timeline?q=nothing+of+this").page.shown
        assert visitor.get("/timeline?kind=odd&q=%00%ff").status == 200
        assert visitor.get("/nodes?page=99999999999999999999&state=%22%3E").status == 200


def test_it_shows_what_it_knew_while_the_control_plane_is_away() -> None:
    with made(answers()) as (there, fleet):
        visitor = there.visitor("")
        assert "does not answer; these figures" not in visitor.get("/").text
        fleet.die()
        there.console.source.forget_age()
        wait_until(lambda: "does not answer; these figures" in visitor.get("/").text)
        for path in OF_THE_FLEET:
            page = visitor.get(path)
            assert page.status == 200
            assert "does not answer; these figures are" in page.text
            assert "no control plane answers" in page.text
        assert there.console.source.failures >= 1
        refused = Visitor(there.address).log_in()
        assert refused.status == 403
        assert "no control plane answers" in refused.text


def test_a_control_plane_that_never_answered_is_named() -> None:
    with made(answers()) as (there, fleet):
        visitor = there.visitor("")
        fleet.die()
        for path in OF_THE_FLEET:
            page = visitor.get(path)
            assert page.status == 503
            assert "has not said anything yet" in page.text


def test_an_answer_that_cannot_be_shown_ends_nothing() -> None:
    with made(answers()) as (there, fleet):
        visitor = there.visitor("")
        fleet.told = {}
        assert "cannot be shown: KeyError" in visitor.get("/").text
        fleet.told = answers()
        there.console.source.forget_age()
        assert visitor.get("/").status == 200


def test_an_empty_fleet_says_what_to_do() -> None:
    with made(answers(0)) as (there, _):
        shown = pages(there)
    assert "No node has registered yet" in shown["/nodes"].shown
    assert "no plan has been made" in shown["/load"].shown
    assert "None yet." in shown["/operations"].shown
    assert "No version is known" in shown["/versions"].shown
    assert "No node has said how long it takes" in shown["/latency"].shown
    assert "Not known: the control plane has no --bus" in shown["/storage"].shown


def test_pages_of_a_thousand_nodes_are_small() -> None:
    with made(answers(1000, bits=12, dead=400)) as (there, _):
        visitor = there.visitor("")
        static = sum(
            len(visitor.get(f"/static/{name}").text)
            for name in (
                *("page.css", "page.js", "console.js", "theme.js"),
                *("htmx.min.js", "uplot.min.js", "uplot.min.css"),
            )
        )
        for path in PATHS:
            page = visitor.get(path)
            assert page.status == 200
            assert len(page.text) + static < PAGE_BYTES_MAX, path
        assert "1,000 of 1,000 nodes" in visitor.get("/nodes").text
        assert "page 10 of 10" in visitor.get("/nodes?page=10").text
        assert "1 of 1,000 nodes" in visitor.get("/nodes?q=node-777").text


def test_a_heat_map_groups_buckets_that_are_neighbours() -> None:
    reading = read(MadeFleet(answers(2, bits=12)).dial(""))
    there = source.Source()
    there.heat.add(reading.answers)
    facts = there.heat.facts()
    assert facts["rows"][:2] == ["user 0-63", "user 64-127"]
    assert facts["rows"][-1] == "user 4032-4095"
    assert [sum(column) for column in facts["values"]] == [sum(10 + b for b in range(4096))]
    assert there.heat.facts("user", "max_reads")["values"][0][0] == 10 + 63
    assert there.heat.facts("user", "odd") == facts
    assert there.heat.facts("nobody")["rows"] == []
    row, values = there.heat.newest(1, "user")[0]
    assert str(row) == "user 4032-4095"
    assert values == {
        "reads": sum(10 + b for b in range(4032, 4096)),
        "max_reads": 10 + 4095,
        "remote": 0,
        "ssd": 64,
        "bytes": 64_000,
    }
    there.close()


def test_a_heat_map_of_many_tables_has_a_row_for_each_and_no_row_of_two() -> None:
    figures = control_pb2.GetFleetFiguresResponse(plan_epoch=1)
    for table in range(100):
        figures.tables.add(id=table, name=f"t{table}", bucket_bits=8)
        for begin in range(0, 256, 16):
            figures.ranges.add(table_id=table, bucket_begin=begin, bucket_count=16, reads=table)
    heat = HeatMap()
    status = control_pb2.ControlServiceGetStatusResponse()
    heat.add(FleetAnswers(1, False, status, figures))
    facts = heat.facts()
    assert len(facts["rows"]) <= 300
    assert {row.split()[0] for row in facts["rows"]} == {f"t{table}" for table in range(100)}
    assert sum(facts["values"][0]) == 16 * sum(range(100))
    assert len(heat.facts("t7")["rows"]) == 16
