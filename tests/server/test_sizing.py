"""Sizes of a fleet: docs/sizing.md's example computed, bounds, and the same on command and page."""

import json
import re
from pathlib import Path

import pytest
from commands import embertide
from consoles import made
from hypothesis import given, settings
from hypothesis import strategies as st
from made_fleet import answers

from embertide.server.core.sizing import QUESTIONS, SizingError, answers_of, share_in_ddr, size

EXAMPLE = {
    "rows": "100,000,000",
    "row_bytes": "128",
    "changed_per_s": "333",
    "publish_s": "600",
    "ddr_percent": "20",
}


def test_it_computes_the_example_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()
    found = size(answers_of(EXAMPLE))
    assert found.nodes == 2 * found.nodes_a_copy
    rows_gb = 20e6 * 152 + 80e6 * 24
    window = 8 * 333 * 600 * 152
    assert found.ddr_bytes * found.nodes_a_copy == pytest.approx((rows_gb + window) / (7 / 8))
    assert found.ssd_bytes * found.nodes_a_copy == pytest.approx(80e6 * 148 * 4 / 3)
    assert f"{rows_gb / 1e9:.1f} GB" in page
    for value in (found.trainer_bytes, found.snapshot_bytes, found.day_bytes):
        assert f"{value / 1e9:.1f} GB" in page
    assert f"{found.version_bytes / 1e6:.1f} MB" in page


answer = st.fixed_dictionaries(
    {
        name: st.integers(int(each.least), int(min(each.most, 1e12)))
        if each.whole
        else st.floats(each.least, each.most)
        for name, each in QUESTIONS.items()
        if name not in ("ddr_percent", "skew")
    }
)


@settings(max_examples=200, deadline=None)
@given(given_=answer, ddr=st.sampled_from([5, 40, 100]), more=st.integers(2, 10))
def test_a_fleet_is_within_its_bounds_and_grows_with_what_is_asked(
    given_: dict[str, float], ddr: int, more: int
) -> None:
    asked = given_ | {"ddr_percent": float(ddr), "skew": 1.0}
    found = size(asked)
    assert found.ddr_bytes <= asked["node_ddr_gib"] * (1 << 30) * (1 + 1e-9)
    assert found.cores <= asked["node_cores"] / 2 * (1 + 1e-9)
    assert found.ssd_reads_per_s <= asked["drive_reads_per_s"] / 2 * (1 + 1e-9)
    assert (found.ssd_bytes == 0) == (ddr == 100)
    larger = size(asked | {"rows": min(asked["rows"] * more, QUESTIONS["rows"].most)})
    assert larger.nodes >= found.nodes
    assert larger.snapshot_bytes >= found.snapshot_bytes


def test_ddr_answers_more_of_skewed_reads() -> None:
    assert share_in_ddr(100, 0) == 1
    assert share_in_ddr(20, 0) == pytest.approx(0.2, abs=0.01)
    shares = [share_in_ddr(20, skew) for skew in (0, 0.5, 1, 1.5)]
    assert shares == sorted(shares)
    assert shares[-1] > 0.95


@pytest.mark.parametrize("name", list(QUESTIONS))
@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e300", "many", "<b>", "0x10"])
def test_an_answer_that_cannot_be_is_refused_by_its_name(name: str, text: str) -> None:
    with pytest.raises(SizingError, match="give") as refused:
        answers_of({name: text})
    assert refused.value.question == name
    assert QUESTIONS[name].label in str(refused.value)


def test_the_command_shows_it_and_refuses_what_cannot_be() -> None:
    words = ("sizing", "--rows", "1e9", "--ddr-percent", "20")
    assert "nodes" in embertide(*words).stdout
    said = json.loads(embertide(*words, "--json").stdout)
    assert said["size"]["nodes"] == size(answers_of({"rows": "1e9", "ddr_percent": "20"})).nodes
    refused = embertide("sizing", "--rows", "0")
    assert refused.exit_code == 2
    assert "--rows" in refused.stderr


def test_the_page_says_what_the_command_says() -> None:
    with made(answers()) as (there, _):
        assert there.visitor().get("/sizing").status == 303
        visitor = there.visitor("operator")
        answer = visitor.get("/sizing?rows=1e9&ddr_percent=20")
        assert answer.status == 200
        command = re.search(r"<code>(.+?)</code>", answer.text)
        assert command is not None
        assert command[1] == "embertide sizing --rows 1000000000 --ddr-percent 20"
        shown = embertide(*command[1].split()[1:]).stdout
        for name, value in re.findall(
            r'<tr><th scope="row">(.+?)</th><td class="num">(.+?)</td>', answer.text
        ):
            plain = name.replace("&#39;", "'")
            assert re.search(re.escape(plain) + r"\s+" + re.escape(value), shown), plain
        refused = visitor.get("/sizing?rows=%3Cscript%3Ealert(1)%3C/script%3E")
        assert refused.status == 400
        assert "<script>alert" not in refused.text
        assert "is no number" in refused.text
        assert 'aria-describedby="wrong"' in refused.text
        assert visitor.get("/storage").text.count('href="/sizing"') == 1
