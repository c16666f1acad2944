"""The meaning of a text, as a number, a time or a word: one rule for every reader and for `init`.

Texts are Arrow arrays of binary, null where a field is empty; bytes that are no UTF-8 are left as
they are. Nothing here fails on a value: what does not parse is marked. Array suffix: N texts.
"""

import datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Kind = Literal["int", "float", "string", "time"]

Mask = NDArray[np.bool_]

# 20 digits: those of 2^64 - 1. A table with missing integers writes them as "17.0".
INT = r"^ *-?[0-9]{1,20}(\.0*)? *$"
FLOAT = r"^ *[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})? *$"
# ISO 8601: a date, or a date and a time of day, with a zone or without. BigQuery writes " UTC".
ISO_TIME = (
    r"^ *[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.,][0-9]{1,9})?)?"
    r"( ?(Z|UTC|GMT)| ?[+-][0-9]{2}(:?[0-9]{2})?)?)? *$"
)
# Texts that stand for no value in a column of numbers or times. A text "NA" may be a country.
MISSING = r"(?i)^ *(na|n/a|#n/a|<na>|-?nan|nat|null|none|nil|\\n|\?|-|\.)? *$"
# Dates as people write them, which do not say whether day or month comes first.
OTHER_DATE = r"^ *([0-9]{1,2}[./-][0-9]{1,2}[./-][0-9]{2,4}|[0-9]{4}/[0-9]{1,2}/[0-9]{1,2})\b"
DECIMAL_COMMA = r"^ *[+-]?[0-9]+,[0-9]+ *$"

PATTERNS: dict[Kind, str] = {"int": INT, "float": FLOAT, "time": ISO_TIME}
# The share of the non-missing texts that may be of another kind. Few of keys: ids that are digits
# by chance are no integers. Many of times: nothing else looks like one.
_FAULTY: dict[Kind, float] = {"int": 0.02, "float": 0.1, "time": 0.5}
_FEW = 4  # texts, of which one may be faulty

_UTC = datetime.UTC
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=_UTC)
_SIGNED, _KEYS = range(-(1 << 63), 1 << 63), range(-(1 << 63), 1 << 64)


def are(kind: Kind, texts: pa.Array) -> bool:
    """Whether the texts that are there, but for a few, are integers, floats or times."""
    fits, present = counted(kind, texts)
    faulty = present - fits
    return fits > 0 and faulty <= max(_FAULTY[kind] * present, int(present >= _FEW))


def counted(kind: Kind, texts: pa.Array) -> tuple[int, int]:
    """Return the number of texts of this kind, and the number that are there at all."""
    matches = pc.match_substring_regex(texts, PATTERNS[kind])
    fits = int(pc.sum(matches).as_py() or 0)
    rest = texts.filter(pc.invert(matches)).drop_null()
    words = int(pc.sum(pc.match_substring_regex(rest, MISSING)).as_py() or 0)
    return fits, fits + len(rest) - words


def kind_of(texts: pa.Array) -> Kind:
    """Return what most of the texts are."""
    if are("int", texts) and counted("float", texts)[0] == counted("int", texts)[0]:
        return "int"
    return "float" if are("float", texts) else "time" if are("time", texts) else "string"


def parsed(texts: pa.Array, kind: Kind) -> tuple[NDArray[Any], Mask, Mask]:
    """Return N values, where there is none, and where the text is not of this kind.

    Values are int64, of keys of 2^63 and more those of the same 64 bits; float64; or, of times,
    milliseconds as int64.
    """
    matches = pc.fill_null(pc.match_substring_regex(texts, PATTERNS[kind]), False)
    fits_N: Mask = matches.to_numpy(zero_copy_only=False)
    null_N: Mask = texts.is_null().to_numpy(zero_copy_only=False)
    if not (fits_N | null_N).all():
        words = pc.fill_null(pc.match_substring_regex(texts, MISSING), False)
        null_N = null_N | words.to_numpy(zero_copy_only=False)
    zero = pa.scalar(b"1970-01-01" if kind == "time" else b"0", texts.type)
    # Only ASCII is left by now, so the bytes need no check before they are called a string.
    good = pc.if_else(matches, texts, zero).cast(pa.binary()).view(pa.string())
    good = pc.ascii_trim(good, " ")
    values_N: NDArray[Any]
    if kind == "float":
        values_N = good.cast(pa.float64()).to_numpy(zero_copy_only=False)
    elif kind == "int":
        values_N, fits_N = _integers(pc.replace_substring_regex(good, r"\.0*$", ""), fits_N)
    else:
        values_N, fits_N = _times(good, fits_N)
    return values_N, null_N, ~fits_N & ~null_N


def _integers(texts: pa.Array, fits_N: Mask) -> tuple[NDArray[np.int64], Mask]:
    try:
        return texts.cast(pa.int64()).to_numpy(zero_copy_only=False), fits_N
    except pa.ArrowInvalid:  # some exceed 63 bits, and Arrow does not say which
        numbers = [int(text) for text in texts.to_pylist()]
    inside_N = np.fromiter((number in _KEYS for number in numbers), np.bool_, len(numbers))
    return np.array([_wrapped(number) for number in numbers], np.int64), fits_N & inside_N


def _wrapped(number: int) -> int:
    """Return a key of 64 bits as a signed integer; 0 if it is none."""
    if number in _SIGNED:
        return number
    return number - (1 << 64) if number in _KEYS else 0


def _times(texts: pa.Array, fits_N: Mask) -> tuple[NDArray[np.int64], Mask]:
    for zone in (None, "UTC"):
        try:
            whole = texts.cast(pa.timestamp("ns", zone)).view(pa.int64())
            return whole.to_numpy(zero_copy_only=False) // 1_000_000, fits_N
        except pa.ArrowInvalid:  # of the other kind, beyond 2262, or a day that does not exist
            continue
    found = [iso_ms(text) for text in texts.to_pylist()]
    ms_N = np.array([0 if ms is None else ms for ms in found], np.int64)
    real_N = np.fromiter((ms is not None for ms in found), np.bool_, len(found))
    return ms_N, fits_N & real_N


def iso_ms(text: str) -> int | None:
    """Milliseconds of a time of ISO 8601, of UTC where it names no zone; None: it is no time."""
    text = text.strip(" ").replace(",", ".")
    for zone in ("UTC", "GMT"):
        if text.endswith(zone):
            text = text[: -len(zone)].rstrip(" ") + "Z"
    whole, dot, rest = text.partition(".")
    if dot:  # Python reads six digits of a second at most
        digits = rest[: next((i for i, c in enumerate(rest) if not c.isdigit()), len(rest))]
        text = f"{whole}.{digits[:6]:0<6}{rest[len(digits) :].lstrip(' ')}"
    try:
        when = datetime.datetime.fromisoformat(text)
        when = when.replace(tzinfo=_UTC) if when.tzinfo is None else when
        return (when - _EPOCH) // datetime.timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        return None
