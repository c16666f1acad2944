"""Whatever a text holds, what is made of it is one value of that kind and nothing else."""

import ast
import json
import string
import sys
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from embertide._common import quoting

# Surrogates too: names of files have them.
ANY_TEXT = st.text(st.characters(codec=None), max_size=40) | st.sampled_from(
    [
        "x\nimport os;os.abort()#",
        '"""',
        "[/b]",
        "\\[",
        "[link=http://x]y",
        "\x1b[2J",
        "\u202eabc",
        "a\\",
        "\r",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(ANY_TEXT, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_a_python_literal_is_the_value_and_one_line(value: Any) -> None:
    source = quoting.python_literal(value)
    assert source.isascii()
    assert "\n" not in source
    assert eval(source, {"__builtins__": {}, "float": float}) == value


@given(ANY_TEXT)
def test_a_python_comment_is_no_code(text: str) -> None:
    module = ast.parse(f"a = 1  {quoting.python_comment(text)}\nb = 2\n")
    assert [type(each) for each in module.body] == [ast.Assign, ast.Assign]


def test_what_has_no_literal_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no literal"):
        quoting.python_literal([object()])


@given(ANY_TEXT)
def test_terminal_text_is_one_printable_line(text: str) -> None:
    shown = quoting.terminal_text(text)
    assert len(shown.splitlines()) <= 1
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    shown.encode("utf-8")  # so that it can be printed


@given(ANY_TEXT)
def test_markup_is_shown_and_not_obeyed(text: str) -> None:
    rendered = Text.from_markup(f"[bold]{quoting.markup_text(text)}[/bold]")
    assert rendered.plain == quoting.terminal_text(text)
    assert [span.style for span in rendered.spans] in ([], ["bold"])


@given(ANY_TEXT)
def test_yaml_gives_the_text_back(text: str) -> None:
    assert json.loads(quoting.yaml_text(text)) == text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return
    # PyYAML makes two letters of a pair of surrogates; our manifests go through JSON's rules.
    if all(ord(letter) < 0x10000 for letter in text):
        assert yaml.safe_load(f"a: {quoting.yaml_text(text)}\n") == {"a": text}


@given(ANY_TEXT)
def test_protobuf_text_gives_the_bytes_back(text: str) -> None:
    quoted = quoting.protobuf_text(text)
    assert quoted.isascii()
    assert quoted.isprintable()
    octets = ast.literal_eval(f"b{quoted}")  # its escapes are C's, as those of Python's bytes
    lone = any("\ud800" <= letter < "\udc80" or "\udd00" <= letter <= "\udfff" for letter in text)
    assert octets == text.encode("utf-8", "surrogatepass" if lone else "surrogateescape")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)


@given(ANY_TEXT)
def test_html_has_no_tags_but_ours(text: str) -> None:
    parser = _Tags()
    parser.feed(f'<p title="{quoting.html_text(text)}">{quoting.html_text(text)}</p>')
    assert parser.tags == ["p"]


@given(ANY_TEXT)
def test_a_name_is_plain(text: str) -> None:
    if quoting.is_name(text):
        assert text.isascii()
        assert not set(text) & set(" \t\n/\\:*?[]{}\"'$`")
        assert quoting.check_name("node", text) == text
    else:
        with pytest.raises(ValueError, match="is no name"):
            quoting.check_name("node", text)


class _Bad:
    def __repr__(self) -> str:
        raise RuntimeError


def test_any_value_is_shown_in_one_short_line() -> None:
    deep: list[Any] = []
    for _ in range(10 * sys.getrecursionlimit()):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    for value in (deep, loop, 10**5000, _Bad(), "x" * 10**6, {"a\n": "\x1b[2J"}, b"\xff" * 1000):
        text = quoting.shown(value)
        assert len(text) <= 120
        assert text.isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://me:hush@h:1/0", "redis://...@h:1/0"),
        ("redis://me:p@ss/w#rd@host:6379/0 is away", "redis://...@host:6379/0 is away"),
        ("redis://:12345/x@h:1", "redis://...@h:1"),
        ("s3://AKIA:se/cret+x@bucket/prefix", "s3://...@bucket/prefix"),
        ("https://TOKEN@h/p", "https://...@h/p"),
        ("'redis://a:b@c' and redis://d:e@f", "'redis://...@c' and redis://...@f"),
        ("redis://h:1/0?password=hush&db=1", "redis://h:1/0?password=...&db=1"),
        ("https://a/c?sv=1&sig=abc%3D&se=2", "https://a/c?sv=1&sig=...&se=2"),
        ("s3://b/p?X-Amz-Signature=ab&x=1", "s3://b/p?X-Amz-Signature=...&x=1"),
        *(
            (text, text)
            for text in (
                *("redis://h:1/0?password_file=/etc/p", "rediss://h/0?ssl_keyfile=/k"),
                *("s3://bucket/a@b/c", "http://host:8000/path@v1", "http://[::1]:80/a@b"),
                *("kafka://h:1/t?credentials=/etc/k", "me@example.org: x", "unix:///run/a.sock"),
            )
        ),
    ],
)
def test_secrets_of_urls_are_not_shown(text: str, shown: str) -> None:
    assert quoting.without_secrets(text) == shown


@given(
    st.sampled_from(["redis", "rediss", "s3", "gs", "kafka", "abfss"]),
    st.text(string.ascii_letters + string.digits, max_size=8),
    st.text(string.ascii_letters + string.digits + "/?#@:%+=&;.-_~!$()*,[]", min_size=8),
    st.sampled_from(["h", "host:6379", "[::1]:6379", "a.example.org"]),
    st.sampled_from(["", "/0", "/bucket/prefix", "/0?db=1"]),
)
def test_no_password_is_shown_however_it_is_written(
    scheme: str, user: str, password: str, host: str, path: str
) -> None:
    shown = quoting.without_secrets(f"error: {scheme}://{user}:{password}@{host}{path}: no answer")
    assert shown == f"error: {scheme}://...@{host}{path}: no answer"
