"""Tables drawn at random: what people, exports and attackers put into files of events.

Names hold quotes, line ends, brackets, escapes, emoji and code; types are those of Arrow and of
delimited text; files have encodings, delimiters, compressions and sizes down to none at all.
Everything that is drawn is drawn by Hypothesis, so that a seed names a table.
"""

import bz2
import csv
import datetime
import decimal
import gzip
import io
import lzma
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

PLANTED = "embertide_planted"
"""The attribute of `sys` that the code in names would set, if it ran."""

_CODE = f"import sys;sys.{PLANTED}=1"
_HOSTILE = (
    f"x\n{_CODE}#",
    f'"""\n{_CODE}\n"""',
    f"');{_CODE};('",
    f'");{_CODE};("',
    f"x\r{_CODE}#",
    f"x\\\n{_CODE}#",
    f"{{__import__('sys').__dict__.update({PLANTED}=1)}}",
    f"\x85{_CODE}\u2028{_CODE}\u2029",
    "\\",
    "a\\",
    "'",
    '"',
    "'''",
    "[b]bold[/b]",
    "[/b]",
    "[link=http://x]",
    "\x1b[2J\x1b]0;owned\x07",
    "\u202euser\u202c",
    "\u05d0\u05d1\u05d2",
    "\u7528\u6237 id",
    "\U0001f600",
    "%s%n{0}${HOME}$(id)`id`",
    "a\tb",
    "a,b",
    "a;b",
    "a|b",
    "a::b",
    " ",
    "",
    "None",
    "__class__",
    "features",
    "hour",
    "hour_of_day",
    "1",
    "3.5",
    "-",
    "a.b",
    "a/b",
    "../../x",
    "n" * 300,
    "Price",
    "price",
    "PRICE",
    "user_id:token",
    "\ufeffid",
    "a\u0000b",
)
_PLAIN = (
    *("user_id", "item", "item_id", "price", "country", "ts", "time", "event_time", "created_at"),
    *("genres", "age", "device", "zip", "score", "amount", "session", "comment", "quantity"),
)
_LABEL = ("label", "click", "clicked", "y", "target", "rating", "converted", "event_type")
_E0 = 1_700_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One table, as files.

    Attributes:
        files: Relative paths and bytes.
        options: Options of `embertide init`.
        said: A description of it, for a report.
    """

    files: tuple[tuple[str, bytes], ...]
    options: tuple[str, ...]
    said: str


# --- values ---------------------------------------------------------------------------------------

Maker = Callable[[random.Random, int], tuple[pa.DataType | None, list[Any]]]


def _arrow(kind: pa.DataType, one: Callable[[random.Random], Any]) -> Maker:
    return lambda rng, rows: (kind, [one(rng) for _ in range(rows)])


def _word(rng: random.Random) -> str:
    return rng.choice(("at", "de", "fr", "us", "x y", "\u00fc", "'", '"', "a,b", "a\nb", "[b]"))


def _when(rng: random.Random) -> datetime.datetime:
    return datetime.datetime(2024, 1, 1) + datetime.timedelta(seconds=rng.randrange(10**7))


def _ascending(step: int, unit: int) -> Callable[[random.Random, int], list[int]]:
    return lambda rng, rows: [(_E0 + step * i) * unit for i in range(rows)]


_CELLS: dict[str, Maker] = {
    "int64": _arrow(pa.int64(), lambda r: r.randrange(50)),
    "int8": _arrow(pa.int8(), lambda r: r.randrange(-9, 9)),
    "uint64": _arrow(pa.uint64(), lambda r: r.choice((1, 2**63, 2**64 - 1))),
    "snowflake": _arrow(pa.int64(), lambda r: 999_999_999_999_999_000 + r.randrange(2000)),
    "float": _arrow(pa.float64(), lambda r: round(r.lognormvariate(2, 1), 2)),
    "float32": _arrow(pa.float32(), lambda r: r.random()),
    "float16": _arrow(pa.float16(), lambda r: r.randrange(9) / 4),
    "wild float": _arrow(
        pa.float64(), lambda r: r.choice((1e308, -1e308, float("inf"), float("nan"), 0.0, 1e-320))
    ),
    "huge float": _arrow(pa.float64(), lambda r: r.choice((1e39, 2e38, -3e38, 1.0))),
    "bool": _arrow(pa.bool_(), lambda r: r.random() < 0.5),
    "string": _arrow(pa.string(), _word),
    "large string": _arrow(pa.large_string(), _word),
    "binary": _arrow(pa.binary(), lambda r: r.choice((b"\xff\xfe", b"", b"a", b"12"))),
    "uuid": _arrow(pa.binary(16), lambda r: uuid.UUID(int=r.randrange(9)).bytes),
    "digits": _arrow(pa.string(), lambda r: str(r.randrange(40))),
    "dictionary": _arrow(pa.dictionary(pa.int8(), pa.string()), _word),
    "int dictionary": _arrow(pa.dictionary(pa.int8(), pa.int64()), lambda r: r.randrange(5)),
    "decimal": _arrow(pa.decimal128(12, 2), lambda r: decimal.Decimal(r.randrange(10**6)) / 100),
    "wide decimal": _arrow(
        pa.decimal128(38, 0), lambda r: decimal.Decimal(r.choice((1, 2, 10**25)))
    ),
    "date32": _arrow(pa.date32(), lambda r: _when(r).date()),
    "date64": _arrow(pa.date64(), lambda r: _when(r).date()),
    "time": _arrow(pa.time64("us"), lambda r: _when(r).time()),
    "duration": _arrow(pa.duration("s"), lambda r: datetime.timedelta(seconds=r.randrange(99))),
    "timestamp s": _arrow(pa.timestamp("s"), lambda r: _when(r)),
    "timestamp us zone": _arrow(pa.timestamp("us", "Europe/Vienna"), lambda r: _when(r)),
    "timestamp ns": _arrow(pa.timestamp("ns"), lambda r: _when(r)),
    "far timestamp": _arrow(pa.timestamp("us"), lambda r: r.choice((0, 2**60, -(2**60), 1))),
    "list int": _arrow(
        pa.list_(pa.int64()), lambda r: [r.randrange(9) for _ in range(r.randrange(4))]
    ),
    "list string": _arrow(
        pa.large_list(pa.string()), lambda r: [_word(r) for _ in range(r.randrange(4))]
    ),
    "list float": _arrow(
        pa.list_(pa.float32()), lambda r: [r.random() for _ in range(r.randrange(3))]
    ),
    "fixed list": _arrow(pa.list_(pa.int32(), 2), lambda r: [r.randrange(9), r.randrange(9)]),
    "list list": _arrow(pa.list_(pa.list_(pa.int64())), lambda r: [[r.randrange(3)]]),
    "list dictionary": _arrow(pa.list_(pa.string()), lambda r: [r.choice("ab")]),
    "struct": _arrow(pa.struct([("a", pa.int64())]), lambda r: {"a": r.randrange(3)}),
    "map": _arrow(pa.map_(pa.string(), pa.int64()), lambda r: [("k", r.randrange(3))]),
    "null": _arrow(pa.null(), lambda r: None),
    "constant": _arrow(pa.string(), lambda r: "same"),
    "seconds": lambda rng, rows: (pa.int64(), _ascending(60, 1)(rng, rows)),
    "milliseconds": lambda rng, rows: (pa.int64(), _ascending(60, 1000)(rng, rows)),
    "nanoseconds": lambda rng, rows: (pa.int64(), _ascending(60, 10**9)(rng, rows)),
    "mixed units": lambda rng, rows: (
        pa.int64(),
        [each * rng.choice((1, 1000)) for each in _ascending(60, 1)(rng, rows)],
    ),
    "seconds with one far ahead": lambda rng, rows: (
        pa.int64(),
        [
            each + (10**9 if i == rows // 2 else 0)
            for i, each in enumerate(_ascending(60, 1)(rng, rows))
        ],
    ),
    "row number": lambda rng, rows: (pa.int64(), list(range(rows))),
    "iso": lambda rng, rows: (
        pa.string(),
        [f"2024-01-{1 + i % 28:02d}T10:00:00" for i in range(rows)],
    ),
    "iso zones": lambda rng, rows: (
        pa.string(),
        [
            f"2024-02-{1 + i % 28:02d} 10:00:00" + rng.choice(("", "Z", "+02:00", " UTC", ".5"))
            for i in range(rows)
        ],
    ),
    "iso with junk": lambda rng, rows: (
        pa.string(),
        [
            rng.choice(("2024-02-01", "2024-02-02", "2023-02-30", "0000-00-00", "soon"))
            for _ in range(rows)
        ],
    ),
    "dates of people": _arrow(
        pa.string(), lambda r: f"{r.randrange(1, 29)}/{r.randrange(1, 13)}/2024"
    ),
    "decimal comma": _arrow(pa.string(), lambda r: f"{r.randrange(99)},{r.randrange(99)}"),
    "numbers with NA": _arrow(
        pa.string(), lambda r: r.choice(("NA", "null", "NaN", "1.5", "2.5", "3.25", "4"))
    ),
    "integers with a word": _arrow(
        pa.string(), lambda r: r.choice(("7", "8", "9", "10", "11") * 10 + ("other",))
    ),
    "texts of lists": _arrow(
        pa.string(), lambda r: "|".join(r.sample(("a", "b", "c", "1"), r.randrange(4)))
    ),
    "free text": _arrow(pa.string(), lambda r: " ".join(_word(r) for _ in range(30))),
    "code": _arrow(pa.string(), lambda r: r.choice(_HOSTILE)),
}
_LABELS: dict[str, Maker] = {
    "0 and 1": _arrow(pa.int64(), lambda r: r.randrange(2)),
    "0 and 1 of 8 bits": _arrow(pa.int8(), lambda r: r.randrange(2)),
    "bool": _arrow(pa.bool_(), lambda r: r.random() < 0.5),
    "texts 0 and 1": _arrow(pa.string(), lambda r: r.choice("01")),
    "yes and no": _arrow(pa.string(), lambda r: r.choice(("yes", "no"))),
    "floats": _arrow(pa.float32(), lambda r: float(r.randrange(2))),
    "decimal": _arrow(pa.decimal128(3, 0), lambda r: decimal.Decimal(r.randrange(2))),
    "minus": _arrow(pa.int64(), lambda r: r.choice((-1, 1))),
    "ratings": _arrow(pa.float64(), lambda r: r.randrange(2, 11) / 2),
    "one class": _arrow(pa.int64(), lambda r: 0),
    "missing": _arrow(pa.int64(), lambda r: None),
    "odd words": _arrow(pa.string(), lambda r: r.choice(("'1'", "== 1", "> 5\nx", "[b]"))),
    "two of code": _arrow(pa.string(), lambda r: r.choice(_HOSTILE[:2])),
    "actions": _arrow(pa.string(), lambda r: r.choice(("view", "cart", "purchase"))),
    "two and a few": _arrow(pa.int64(), lambda r: r.choice((0, 1) * 200 + (2,))),
}
_SIZES = (0, 1, 2, 5, *range(30, 50))


# --- tables ---------------------------------------------------------------------------------------

_MAX_COLUMNS = 6  # beside label and key
_NAMES = st.one_of(
    st.sampled_from(_PLAIN),
    st.sampled_from(_HOSTILE),
    st.text(min_size=1, max_size=12),
)
_FILE_NAMES = st.one_of(
    st.sampled_from(("events", "clicks day 1", "a", "ratings")),
    st.sampled_from([each.replace("/", "_").replace("\0", "")[:60] for each in _HOSTILE]),
    st.text(
        st.characters(codec="utf-8", exclude_characters="/\0"),
        min_size=1,
        max_size=20,
    ),
).map(lambda name: name if name.strip(". ") and len(name.encode()) < 120 else "f")


@st.composite
def tables(draw: st.DrawFn) -> Drawn:
    """Draw a table, as one file or two, and what is said of it to `init`."""
    folder, name = draw(_FILE_NAMES), draw(_FILE_NAMES)
    names = [draw(_NAMES) for _ in range(_MAX_COLUMNS)]
    # Shapes and values evenly; Hypothesis draws mostly what is small, which is right for names.
    rng = random.Random(repr((draw(st.integers(0, 2**64 - 1)), folder, name, names)))
    rows = rng.choice(_SIZES)
    columns: list[tuple[str, str, pa.DataType | None, list[Any]]] = []
    for kind in rng.sample(sorted(_CELLS), rng.randrange(1, _MAX_COLUMNS)):
        columns.append((names[len(columns)], kind, *_CELLS[kind](rng, rows)))
    if rng.random() < 0.9:
        label = rng.choice(sorted(_LABELS))
        called = rng.choice(_LABEL) if rng.random() < 0.9 else names[-1]
        columns.append((called, label, *_LABELS[label](rng, rows)))
    if rng.random() < 0.8:  # most tables have a key
        keys = [rng.randrange(9) for _ in range(rows)]
        columns.append((rng.choice(_PLAIN[:3]), "key", pa.int64(), keys))
    if rng.random() < 0.9:  # and names of their own
        columns = list({each[0]: each for each in columns}.values())
    if rng.random() < 0.5:
        share = rng.choice((0.1, 0.5, 1.0))
        called, kind, arrow, values = columns[0]
        if kind != "fixed list":  # which Parquet cannot write
            columns[0] = (
                called,
                kind,
                arrow,
                [None if rng.random() < share else v for v in values],
            )
    data, suffix, said = (_as_parquet if rng.random() < 0.5 else _as_text)(rng, columns)
    if rng.random() < 0.2:
        suffix = rng.choice((".csv", ".parquet", ".dat", ""))
    files = [(f"{folder}/{name}{suffix}", data)]
    if rng.random() < 0.1:
        files.append((f"{folder}/2{name[:40]}{suffix}", data))
    kinds_said = ", ".join(f"{n!a}: {k}" for n, k, _, _ in columns)
    return Drawn(
        files=tuple(files),
        options=_options(rng, [each[0] for each in columns]),
        said=f"{said}, {rows} rows of {kinds_said}",
    )


def _options(rng: random.Random, names: list[str]) -> tuple[str, ...]:
    options: list[str] = []
    for option in _OPTIONS:
        if rng.random() < 0.03:
            said = rng.choice(_RULES) if option == "--positive" else rng.choice(names)
            options.append(f"{option}={said}")
    if rng.random() < 0.1:
        options.append("--no-time")
    return tuple(options)


_OPTIONS = (
    *("--label", "--time", "--ignore", "--key-column", "--text-column", "--number-column"),
    *("--list-column", "--positive"),
)
_RULES = (">= 1", "== yes", "== '1'", "x", f"== \n{_CODE}")

Columns = list[tuple[str, str, pa.DataType | None, list[Any]]]


def _as_parquet(rng: random.Random, columns: Columns) -> tuple[bytes, str, str]:
    arrays, names = [], []
    for name, _, kind, values in columns:
        arrays.append(pa.array(values, kind))
        names.append(name.encode("utf-8", "replace").decode())
    table = pa.Table.from_arrays(arrays, names=names)
    file = io.BytesIO()
    compression = rng.choice(("snappy", "zstd", "none", "gzip"))
    pq.write_table(table, file, row_group_size=rng.choice((1, 7, 1000)), compression=compression)
    return file.getvalue(), ".parquet", f"parquet of {compression}"


def _as_text(rng: random.Random, columns: Columns) -> tuple[bytes, str, str]:
    delimiter = rng.choice((",", ",", ",", ",", "\t", ";", "|", "::", " "))
    end = rng.choice(("\n", "\n", "\n", "\r\n", "\r"))
    quoting = rng.choice(("minimal", "minimal", "minimal", "all", "none", "backslash"))
    lines = [[name for name, *_ in columns]] if rng.random() < 0.95 else []
    for row in zip(*(values for *_, values in columns), strict=True):
        lines.append([_text(value) for value in row])
    if rng.random() < 0.1 and len(lines) > 2:
        lines[rng.randrange(1, len(lines))].append("more")
    text = _joined(lines, delimiter, end, quoting)
    encoding = rng.choice(("utf-8",) * 5 + ("utf-8-sig", "utf-16", "latin-1", "cp1252", "gbk"))
    data = text.encode(encoding, "replace" if encoding != "utf-8" else "surrogatepass")
    pack, suffix = rng.choice(_PACKED)
    data = data if pack is None else pack(data)
    said = (
        f"text of {encoding}, {delimiter!r} between fields, quotes {quoting}, {suffix or 'plain'}"
    )
    return data, f".{'tsv' if delimiter == chr(9) else 'csv'}{suffix}", said


def _zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def _cut(data: bytes) -> bytes:
    return gzip.compress(data)[:-9]


def _flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + b"\xff\x00" + data[len(data) // 2 :]


_PACKED: tuple[tuple[Callable[[bytes], bytes] | None, str], ...] = (
    *(((None, ""),) * 10),
    *((gzip.compress, ".gz"), (bz2.compress, ".bz2"), (lzma.compress, ".xz"), (_zstd, ".zst")),
    *((_cut, ""), (_flipped, "")),
)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, list | tuple):
        return "|".join(map(str, value))
    return str(value)


def _joined(lines: list[list[str]], delimiter: str, end: str, quoting: str) -> str:
    if len(delimiter) > 1 or quoting == "none":
        return "".join(delimiter.join(line) + end for line in lines)
    out = io.StringIO()
    writer = csv.writer(
        out,
        delimiter=delimiter,
        lineterminator=end,
        quoting=csv.QUOTE_ALL if quoting == "all" else csv.QUOTE_MINIMAL,
        doublequote=quoting != "backslash",
        escapechar="\\" if quoting == "backslash" else None,
    )
    writer.writerows(lines)
    return out.getvalue()


def write(drawn: Drawn, folder: Path) -> list[str]:
    """Write the files; return their paths."""
    paths = []
    for name, data in drawn.files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        paths.append(str(path))
    return paths
