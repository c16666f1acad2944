"""Each link of the documents leads to a file that is there, and to a heading that it has."""

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it.token import Token
from pages import PAGES, ROOT, parse


def _flat(tokens: list[Token]) -> list[Token]:
    """The tokens, each followed by those within it: text in a link in a paragraph."""
    return [part for token in tokens for part in (token, *_flat(token.children or []))]


@cache
def _anchors(text: str) -> frozenset[str]:
    """The headings as a forge names them: lower case, hyphens for blanks, `-1` at a second."""
    tokens = parse(text)
    anchors: set[str] = set()
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            parts = _flat(tokens[i + 1].children or [])
            words = "".join(part.content for part in parts if part.type in {"text", "code_inline"})
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            again = re.compile(rf"{re.escape(slug)}(-\d+)?")
            count = sum(again.fullmatch(each) is not None for each in anchors)
            anchors.add(f"{slug}-{count}" if slug in anchors else slug)
    return frozenset(anchors)


def broken(page: Path) -> list[str]:
    """The links and pictures of a page that lead nowhere in this repository."""
    found = []
    for token in _flat(parse(page.read_text())):
        target = str(token.attrGet("href") or token.attrGet("src") or "")
        if not target or re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        path = (page.parent / name) if name else page
        if not path.exists():
            found.append(f"{target}: no such file")
        elif anchor and path.suffix != ".md":
            found.append(f"{target}: only pages have anchors")
        elif anchor and anchor not in _anchors(path.read_text()):
            found.append(f"{target}: no such heading")
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    assert broken(ROOT / name) == []


def test_a_broken_link_is_found_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One `two`\n\n## What?\n\n## What?\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n\n[a](other.md#one-two) [b](other.md#what-1) [c](#here) <https://example.org>\n\n"
        "| table |\n|---|\n| **[d](gone.md)** |\n\n* ![e](gone.svg)\n\n"
        "[f](other.md#gone) [g][far]\n\n    [code](gone.md)\n\n`[code](gone.md)`\n\n[far]: #gone\n"
    )
    assert [each.split(":")[0] for each in broken(page)] == [
        "gone.md",
        "gone.svg",
        "other.md#gone",
        "#gone",
    ]
