"""Each message of docs/troubleshooting.md is one of the code's, but for its values."""

import ast
import functools
import re
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
ANY = "…"
_LITERALS = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def _message(node: ast.AST) -> str | None:
    """The text of a string of Python, with `…` for its values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_message(part) or ANY for part in node.values)
    return None


@functools.cache  # and not when tests are collected, which each worker does for all
def _python() -> str:
    """Every string of the product, one a line."""
    found = []
    for folder in ("server", "trainer", "library"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            found += [text for node in nodes if (text := _message(node))]
    return "\n".join(found)


@functools.cache
def _cpp() -> str:
    """The literals of each statement of the backend as one text, one statement a line."""
    found = []
    for path in (ROOT / "backend_cpp").rglob("*.cc"):
        for statement in path.read_text().split(";\n"):
            parts = _LITERALS.findall(statement)
            found.append(ANY.join(part.replace('\\"', '"') for part in parts))
    return "\n".join(found)


def messages() -> list[str]:
    """The first cell of each row that has one in code."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [row[1] for row in re.findall(r"^\| (`+)(.+?)\1 \| ", page, re.MULTILINE)]
    assert len(rows) == page.count("\n| ") - page.count("\n| message")
    return rows


def test_every_message_is_in_the_code() -> None:
    patterns = {each: re.compile(re.escape(each).replace(ANY, r".{0,200}?")) for each in messages()}
    missing = [
        message
        for message, pattern in patterns.items()
        if not pattern.search(_python()) and not pattern.search(_cpp())
    ]
    assert not missing, "\n".join(missing)


def test_a_message_that_is_gone_would_be_found() -> None:
    assert "the suffix of … tells no format" in _python()
    assert "the suffixes of … tell no format" not in _python()


def test_the_page_is_read_as_a_table() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    rows = sum(token.type == "tr_open" for token in tokens)
    assert rows - sum(token.type == "thead_open" for token in tokens) == len(messages())
