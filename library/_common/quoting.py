"""Text from outside stays data: the one place where names and values are quoted.

A column, file, node or model is named by somebody else. Each function here makes one kind of
output of such a text, so that it cannot become code, configuration, markup or a terminal's escape
sequence there. Every function takes any `str` and is safe to call from any thread.
"""

import html
import json
import re
import reprlib
import unicodedata
from typing import Any

MAX_NAME = 128  # letters of a node's, model's or group's name
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_NAME}}}")
# Control characters, formats (right-to-left marks, zero width), surrogates, private use,
# unassigned, and the separators of lines and paragraphs.
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
# As rich finds tags.
_BRACKET = re.compile(r"(\\*)\[([a-z#/@][^[]*?\])?")


# The text before the host: `user:password@`, or `token@`. A password that somebody has not encoded
# may hold `/`, `?`, `#` and `@`; after http://HOST:PORT/ an `@` is part of the path.
_CREDENTIALS = re.compile(
    r"""
    (?P<scheme> \b[A-Za-z][A-Za-z0-9+.-]*:// )
    (?: (?<!http://)(?<!https://) [^\s'"<>@/?#]* : [^\s'"<>]* @
      | (?! \[?[\w.:-]*\]? : \d{1,5} [/?#] ) [^\s'"<>@/?#]* : [^\s'"<>]* @
      | [^\s'"<>/?#]* @ )
    """,
    re.VERBOSE,
)
_SECRET_VALUE = re.compile(
    r"""
    (?P<name> [?&;] [\w.%-]*
      (?: password | passwd | pwd | secret | token | signature | credential(?!s=)
        | (?: access | account | api | auth | session | shared ) [_-]? key | \bsig )
      (?!_file) [\w.%-]* = )
    [^&;#\s'"<>]+
    """,
    re.VERBOSE | re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Return a text with what may be a secret in its URLs replaced by `...`.

    That is all before a host's `@`, and values in the query whose names say so; the names of files
    that hold a secret stay. Whatever is printed, logged or kept of a URL goes through here.
    """
    if "://" not in text:
        return text
    text = _CREDENTIALS.sub(r"\g<scheme>...@", text)
    return _SECRET_VALUE.sub(r"\g<name>...", text)


def terminal_text(text: str) -> str:
    r"""Return one line that a terminal or a log shows as it is: what is invisible is escaped.

    An escape sequence becomes letters (`\x1b[2J`), a line feed `\n`. Printable text of any script
    stays, and so do `"` and `\`.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode("ascii")
        if unicodedata.category(letter) in _INVISIBLE
        else letter
        for letter in text
    )


def markup_text(text: str) -> str:
    """Return `terminal_text` for what rich prints with markup: `[b]` is shown and not obeyed.

    A tag of ours may follow, and is obeyed. rich's own `escape` loses backslashes before a bracket
    that begins no tag.
    """

    def escaped(bracket: re.Match[str]) -> str:
        slashes, tag = bracket[1], bracket[2] or ""
        return f"{slashes}{slashes if tag else ''}\\[{tag}"

    shown = _BRACKET.sub(escaped, terminal_text(text))
    return shown + "\\" * (len(shown) - len(shown.rstrip("\\")))


def python_literal(value: Any) -> str:
    """Return Python source of a value of str, int, float, bool, None, tuple, list or dict.

    Its `ast.literal_eval` is the value. It is ASCII and one line, so it can stand in a comment.

    Raises:
        TypeError: The value has another type, or holds one.
    """
    if value is None or type(value) in (bool, int, str):
        return ascii(value)
    if type(value) is float:
        return repr(value) if value - value == 0 else f'float("{value}")'
    if type(value) is list:
        return f"[{', '.join(map(python_literal, value))}]"
    if type(value) is tuple:
        items = ", ".join(map(python_literal, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if type(value) is dict:
        pairs = (f"{python_literal(k)}: {python_literal(v)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    raise TypeError(f"{type(value).__name__} has no literal")


def python_comment(text: str) -> str:
    """Return `# text`, one line whatever the text holds."""
    return f"# {terminal_text(text)}"


def protobuf_text(text: str) -> str:
    """Return a quoted string of protobuf's text format (config.pbtxt)."""
    out = []
    try:
        octets = text.encode("utf-8", "surrogateescape")  # what names of files have
    except UnicodeEncodeError:
        octets = text.encode("utf-8", "surrogatepass")
    for byte in octets:
        letter = chr(byte)
        if letter in '"\\':
            out.append("\\" + letter)
        elif 0x20 <= byte < 0x7F:
            out.append(letter)
        else:
            out.append(f"\\{byte:03o}")
    return f'"{"".join(out)}"'


def yaml_text(text: str) -> str:
    """Return a double-quoted YAML scalar, which is JSON's string in ASCII."""
    return json.dumps(text)


def html_text(text: str) -> str:
    """Return text for HTML, in an element or a quoted attribute."""
    return html.escape(terminal_text(text), quote=True)


def is_name(text: str) -> bool:
    """Return whether the text may name a node, model, group or operation."""
    return _NAME.fullmatch(text) is not None


def check_name(what: str, text: str) -> str:
    """Return the text if it may be a name; `what` says of what.

    Only such names become parts of Redis keys, file names and metric labels.

    Raises:
        ValueError: It may not.
    """
    if not is_name(text):
        raise ValueError(
            f"{what} {shown(text)} is no name; use 1 to {MAX_NAME} of the letters A-Z a-z 0-9 . _ -"
        )
    return text


def check_text(what: str, text: str) -> str:
    """Return the text if it is printable and has no braces; `what` says of what.

    Names of models are older than `check_name`: folders of theirs still have to be read.

    Raises:
        ValueError: It is not.
    """
    if not text or set(text) & set("{}") or terminal_text(text) != text:
        raise ValueError(f"{what} {shown(text)} is no name; use letters A-Z a-z 0-9 . _ -")
    return text


class _Bounded(reprlib.Repr):
    """Lists in lists and long texts are cut; what cannot be shown says of which type it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = 4
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_int(self, x: int, level: int) -> str:
        # An integer of many thousand digits takes Python long, or is refused.
        return (
            super().repr_int(x, level)
            if x.bit_length() < 512
            else f"<int of {x.bit_length()} bits>"
        )


_BOUNDED = _Bounded()


def shown(value: Any, most: int = 120) -> str:
    """Return a repr of any value for a message: one line of at most `most` letters.

    It never raises, and takes the same time for a value of any size or depth.
    """
    try:
        text = terminal_text(_BOUNDED.repr(value))
    except Exception:  # a repr of somebody else's
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."
