"""Every message that ends a command fits 80 columns and says what to do next."""

import functools
from pathlib import Path

import pytest
from message_rules import (
    Message,
    has_next_step,
    in_a_terminal,
    messages,
    next_step,
    too_wide,
)

from embertide._common.terminal import wrapped

NOBODY = "127.0.0.1:1"
REFUSED: tuple[tuple[str, ...], ...] = (
    ("serve", "nowhere", "--kind", "rank"),
    ("serve", "nowhere", "--http-port", "99999"),
    ("serve", "nowhere", "--host", "127.0.0.1:8000"),
    ("serve", "nowhere", "--node", "[/b]"),
    ("control", "--state", "nowhere"),
    ("control", "--state", "redis://u:p@ss/w#rd@h/0"),
    ("control", "--tokens", "nowhere"),
    ("control", "--listen", "::1"),
    ("status", "--url", f"http://{NOBODY}/metrics"),
    ("status", "--bus", f"redis://{NOBODY}/0"),
    ("node", "list", "--control", NOBODY),
    ("plan", "show", "--control", NOBODY, "--token-file", "nowhere"),
    ("hot", "--control", "10.0.0.7:1", "--token-file", "/dev/null"),
    ("reshard", "--control", NOBODY),
    ("drift", "mode", "odd", "--control", NOBODY),
    ("snapshot", "show", "nowhere"),
    ("snapshot", "diff", "nowhere", "x"),
    ("explain", "item", "1", "--snapshot", "nowhere"),
    ("explain", "item", "1", "--node", NOBODY),
    ("context", "use", "nothing"),
    ("context", "add", "[/b]", "--control", "a:1"),
    ("context", "show"),
    ("init", "nowhere.csv"),
    ("train", "x", "--data", f"redis://{NOBODY}/0"),
    ("send-events", f"redis://{NOBODY}/0", "--demo"),
    ("import", "out"),
    ("import", "out", "--table", "item=nowhere"),
    ("eval", "nowhere", "--data", "x.parquet"),
    ("guard", "nowhere"),
    ("mirror", "nowhere", "x"),
    ("cache-sim", "nowhere.parquet"),
    ("stats",),
)


@functools.cache  # and not when tests are collected, which each worker does for all
def every_message() -> list[Message]:
    return list(messages("server", "trainer", "library"))


def test_every_message_has_a_next_step() -> None:
    assert len(every_message()) > 500
    assert [f"{each.place}: {each.text}" for each in every_message() if not next_step(each)] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no control plane answers at a:1 (start it with `embertide control`)", True),
        ("kind is 'x'; use ranking or lookup", True),
        ("port 7 is in use: choose another", True),
        ("the state store fails", False),
        ("node-2 has schema 0x9; the fleet has 0x7", False),
        ("it starts too late", False),
    ],
)
def test_what_counts_as_a_next_step(text: str, says: bool) -> None:
    assert has_next_step(text) == says


def test_every_message_fits_a_terminal() -> None:
    for each in every_message():
        assert not too_wide(wrapped(f"error: {each.text}", 80)), each.place


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("serve", "nowhere"), 2),
        (("control", "--state", "redis://127.0.0.1:1/0"), 1),
        (("status", "--control", "127.0.0.1:1"), 1),
        (("train", "x", "--data", "nowhere.parquet"), 2),
    ],
)
def test_a_refusal_in_a_terminal(words: tuple[str, ...], status: int, tmp_path: Path) -> None:
    shown = in_a_terminal(*words, folder=tmp_path)
    text = " ".join(shown.lines)
    assert shown.status == status, text
    # Lines of the log stand before it, one a record, for machines too.
    error = [line.startswith("error: ") for line in shown.lines].index(True)
    assert not too_wide(shown.lines[error:])
    assert has_next_step(text.partition("error: ")[2])
    assert (f"Try 'embertide {words[0]} --help' for help." in text) == (status == 2)


@pytest.mark.long
@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_every_refusal_fits_a_terminal_and_has_a_next_step(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    shown = in_a_terminal(*words, folder=tmp_path)
    text = " ".join(line.strip("│╭╮╰╯─ ") for line in shown.lines)
    assert not too_wide(shown.lines)
    assert "Traceback" not in text
    assert shown.status in (1, 2), text
    assert has_next_step(text.partition("error: ")[2] or text) or "--help" in text
