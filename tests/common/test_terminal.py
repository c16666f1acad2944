"""Printed text: names stay data, no word is cut, a pipe gets one line a message."""

import contextlib
import io
import json
import math
import os
import pty
import re
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from embertide._common.terminal import Table, print_json, say, show_table, wrapped

HOSTILE = (
    "[/b]",
    "[link=https://evil.example]x[/link]",
    "\x1b[2J\x1b]0;title\x07",
    "a\nerror: it is all lost",
    "\u202egnp.exe",
    "\x9b31m",
    ":smile:",
)
texts = st.text(max_size=120) | st.sampled_from(HOSTILE)


def visible(said: str) -> bool:
    """Whether nothing but line feeds is obeyed, and nothing is hidden."""
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return all(unicodedata.category(each) not in hidden for each in said.replace("\n", ""))


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_shown_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("node", "state", names=("node",), title=name)
    table.add_row(name, "alive")
    show_table(table)
    say(f"node {name!s} is gone", err=True)
    said = capsys.readouterr()
    assert visible(said.out)
    assert visible(said.err)
    if name.isprintable():
        assert f"node {name} is gone" in said.err
    assert re.sub(r"\\.*", "", name) in said.out.replace("\n", "")[:4000] or not name.isprintable()


@given(st.lists(st.lists(texts, min_size=3, max_size=3), max_size=4))
def test_any_table_is_data_and_no_word_of_it_is_cut(rows: list[list[str]]) -> None:
    table = Table("node", "what it does", "last beat", names=("node",))
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "80")
        show_table(table)
    said = out.getvalue()
    assert visible(said)
    for row in rows:
        for word in " ".join(row[1:]).split(" "):
            if re.fullmatch(r"[a-z]{3,}", word):
                assert re.search(rf"(?<![a-z]){word}(?![a-z])", said)


@given(st.text(max_size=400), st.integers(20, 120))
def test_a_wrapped_message_has_all_its_words_and_fits(text: str, columns: int) -> None:
    lines = wrapped(text, columns)
    for line in lines:
        assert visible(line)
        assert len(line) <= columns or " " not in line.strip()


def test_wide_tables_are_listed_row_by_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("decision", "outcome", "triggers")
    table.add_row("look-12", "unconfirmed", "node_joined,load_moved,unknown_rows")
    show_table(table)
    assert capsys.readouterr().out.splitlines() == [
        "decision: look-12",
        "  outcome: unconfirmed",
        "  triggers: node_joined,load_moved,unknown_rows",
    ]


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"auc": math.nan, "days": [1.5, math.inf], "by": {"a": -math.inf}})
    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert said == {"auc": None, "days": [1.5, None], "by": {"a": None}}


MESSAGE = "no control plane answers at 10.0.0.7:7070: " + "start it with `embertide control` " * 4
SAY = f"from embertide._common.terminal import say; say({MESSAGE!r}, err=True)"


def test_a_pipe_gets_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True)
    assert done.stderr == MESSAGE + "\n"


def test_a_terminal_gets_lines_that_fit() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", SAY], stderr=theirs, env=environment, check=True)
    os.close(theirs)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    lines = said.replace("\r", "").splitlines()
    assert len(lines) == 3
    assert all(cell_len(line) <= 80 for line in lines)
    assert " ".join(" ".join(lines).split()) == MESSAGE.strip()
