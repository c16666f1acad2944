"""Bytes of text as UTF-8: byte order marks, UTF-16, and any encoding that Python knows.

Bytes that are not of the encoding are read as escapes, `xfc` after a backslash: one costs its row
at most.
"""

import codecs
from collections.abc import Iterator

from embertide.trainer.errors import ConfigurationError

DEFAULT = ""
"""UTF-8, unless a file begins with a mark of UTF-16 or looks like it."""

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LOOKED_AT = 512
# In UTF-16 that is mostly ASCII, every other byte is zero.
_ZEROS = 0.4


def check(encoding: str) -> str:
    """Return the encoding if there is one of that name.

    Raises:
        ConfigurationError: There is none.
    """
    try:
        if encoding != DEFAULT and "a".encode(encoding) == b"":
            raise LookupError
    except (LookupError, TypeError, ValueError, UnicodeError, AttributeError):
        raise ConfigurationError(
            f"encoding {encoding!r} is unknown; give a name such as cp1252, utf-16 or shift_jis"
        ) from None
    return encoding


def of_head(head: bytes) -> str:
    """Return the encoding that the first bytes of a file tell: UTF-8 or UTF-16."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    part = head[:_LOOKED_AT]
    even, odd = part[::2].count(0), part[1::2].count(0)
    if odd > _ZEROS * len(part) and even == 0:
        return "utf-16-le"
    return "utf-16-be" if even > _ZEROS * len(part) and odd == 0 else "utf-8"


def as_utf8(pieces: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Yield pieces of a file as UTF-8."""
    decoder: codecs.IncrementalDecoder | None = None
    is_utf8 = False
    for piece in pieces:
        if decoder is None:
            name = encoding or of_head(piece)
            # A mark is no part of the first column's name, whoever names the encoding.
            name = "utf-8-sig" if name.lower() in ("utf-8", "utf8") else name
            is_utf8 = name == "utf-8-sig"
            decoder = codecs.getincrementaldecoder(name)("backslashreplace")
            fresh = True
        if is_utf8 and not fresh and piece.isascii() and not decoder.getstate()[0]:
            yield piece
            continue
        fresh = False
        yield decoder.decode(piece).encode("utf-8", "backslashreplace")
    if decoder is not None:
        yield decoder.decode(b"", final=True).encode("utf-8", "backslashreplace")
