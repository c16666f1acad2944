"""Oddities of real files of events, each with the right answer: read, or refused in one line.

Every case goes through `init` as a person runs it; what it accepts, through the trainer's reader.
"""

import bz2
import csv
import datetime as dt
import gzip
import io
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.commands.inputs import open_run
from embertide.trainer.commands.run_file import load
from embertide.trainer.data.base import Batch

ROWS = 400
EPOCH_S = 1_700_000_000
USERS = [f"u{i * 7 % 41}" for i in range(ROWS)]
ITEMS = [i * 13 % 29 for i in range(ROWS)]
PRICES = [round(1 + i * 37 % 211 / 8, 3) for i in range(ROWS)]
TIMES = [EPOCH_S + 60 * i for i in range(ROWS)]
LABELS = [int(i * 5 % 7 < 3) for i in range(ROWS)]


def base(**changes: Any) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "user": USERS,
        "item": ITEMS,
        "price": PRICES,
        "ts": TIMES,
        "label": LABELS,
    }
    return {**columns, **changes}


def each(make: Callable[[int], Any]) -> list[Any]:
    return [make(i) for i in range(ROWS)]


def iso(i: int, zone: str = "") -> str:
    return f"{dt.datetime.fromtimestamp(TIMES[i], dt.UTC):%Y-%m-%d %H:%M:%S}{zone}"


def text(
    columns: dict[str, Any], delimiter: str = ",", end: str = "\n", header: bool = True
) -> str:
    rows = [list(columns)] if header else []
    rows += [list(row) for row in zip(*columns.values(), strict=True)]
    if len(delimiter) > 1:
        return "".join(delimiter.join(map(str, row)) + end for row in rows)
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator=end).writerows(rows)
    return out.getvalue()


def parquet(columns: Any) -> bytes:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def key(value: str | bytes) -> int:
    data = value.encode() if isinstance(value, str) else value
    return int(np.uint64(xxhash.xxh3_64_intdigest(data)).astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class Odd:
    """An oddity and the right answer.

    `roles`: of columns, as init says them. `keys`: of a column's first rows. `refused`: parts of
    the one line that says why not; nothing else holds then. `notes`: parts of what is said.
    """

    name: str
    data: bytes | str
    options: tuple[str, ...] = ()
    roles: dict[str, str] = field(default_factory=dict)
    keys: dict[str, list[int]] = field(default_factory=dict)
    learned: int = ROWS
    rejected: int = 0
    positive: str = ""
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    first_ms: int | None = None


TIMED = {"ts": "time", "user": "key", "price": "number", "label": "label"}
FIRST = EPOCH_S * 1000


def decimals(values: list[Any], precision: int, scale: int) -> pa.Array:
    return pa.array([Decimal(str(v)) for v in values], pa.decimal128(precision, scale))


CASES = [
    # --- line ends, delimiters, headers
    Odd(name="cr.csv", data=text(base(), end="\r"), roles=TIMED),
    Odd(name="crlf.csv", data=text(base(), end="\r\n"), roles=TIMED),
    Odd(name="tabs.csv", data=text(base(), "\t"), roles=TIMED),
    Odd(name="semicolons.csv", data=text(base(), ";"), roles=TIMED),
    Odd(name="pipes.csv", data=text(base(), "|"), roles=TIMED),
    Odd(name="hive.txt", data=text(base(), "\x01"), roles=TIMED),
    Odd(name="spaces.txt", data=text(base(), " "), roles=TIMED),
    Odd(name="colons.dat", data=text(base(), "::"), roles=TIMED),
    Odd(
        name="colons-bare.dat",
        data=text({"u": ITEMS, "i": ITEMS[::-1], "r": LABELS, "t": TIMES}, "::", header=False),
        refused=("its first line, '0::25::1::1700000000',", "holds values", "--names"),
    ),
    Odd(
        name="colons-named.dat",
        data=text({"u": ITEMS, "i": ITEMS[::-1], "r": LABELS, "t": TIMES}, "::", header=False),
        options=("--names", "user,item,label,ts"),
        roles={"user": "key", "label": "label", "ts": "time"},
    ),
    Odd(
        name="bare.tsv",
        data=text(base(), "\t", header=False),
        refused=("bare.tsv: its first line,", "holds values; write the names"),
    ),
    Odd(
        name="bare-named.tsv",
        data=text(base(), "\t", header=False),
        options=("--names", "user,item,price,ts,label"),
        roles=TIMED,
    ),
    Odd(
        name="few-names.tsv",
        data=text(base(), "\t", header=False),
        options=("--names", "a,b"),
        refused=("has 5 fields between '\\t', and there are 2 names",),
    ),
    Odd(
        name="recbole.inter",
        data=text(
            {
                "user_id:token": USERS,
                "item_id:token": ITEMS,
                "rating:float": each(lambda i: 1 + i % 5),
                "timestamp:float": TIMES,
            },
            "\t",
        ),
        roles={"user_id:token": "key", "rating:float": "label", "timestamp:float": "time"},
        positive=">= 4",
    ),
    Odd(name="excel.csv", data="sep=;\n" + text(base(), ";"), roles=TIMED),
    Odd(
        name="r-rownames.csv",
        data="user,item,label\n" + text(base(), header=False),
        refused=("has 3 names between ','", "most lines after it have 5 fields"),
    ),
    Odd(
        name="index.csv",
        data=text({"": list(range(ROWS)), **base()}),
        roles={"": "left out", **TIMED},
    ),
    Odd(
        name="blank-end.csv",
        data=text(base()) + "\n\n",
        roles=TIMED,
        rejected=2,
        notes=("label is",),
    ),
    # --- encodings
    Odd(name="bom.csv", data=text(base()).encode("utf-8-sig"), roles=TIMED),
    Odd(
        name="utf16.csv",
        data=text(base(city=["Zürich", "Wien"] * (ROWS // 2))).encode("utf-16"),
        keys={"city": [key("Zürich"), key("Wien")]},
    ),
    Odd(
        name="utf16-unmarked.csv",
        data=text(base(city=["Zürich", "Wien"] * (ROWS // 2))).encode("utf-16-le"),
        keys={"city": [key("Zürich")]},
    ),
    Odd(
        name="latin1.csv",
        data=text(base(city=["Zürich", "Wien"] * (ROWS // 2))).encode("latin-1"),
        keys={"city": [key("Zürich"), key("Wien")]},
        notes=("line 2 is not UTF-8; read as cp1252", "Zürich", "--encoding"),
    ),
    Odd(
        name="latin1-header.csv",
        data=text(base(Größe=["a", "b"] * (ROWS // 2))).encode("latin-1"),
        roles={"Größe": "key"},
        notes=("line 1 is not UTF-8",),
    ),
    Odd(
        name="gbk.csv",
        data=text(base(city=["北京市海淀区"] * ROWS)).encode("gbk"),
        refused=("gbk.csv: line 2 is not UTF-8", "--encoding, such as cp1251, gbk"),
    ),
    Odd(
        name="gbk-said.csv",
        data=text(base(city=["北京市", "上海"] * (ROWS // 2))).encode("gbk"),
        options=("--encoding", "gbk"),
        keys={"city": [key("北京市"), key("上海")]},
    ),
    Odd(
        name="no-encoding.csv",
        data=text(base()),
        options=("--encoding", "utf-99"),
        refused=("encoding 'utf-99' is unknown",),
    ),
    # --- quotes
    Odd(
        name="lines-in-quotes.csv",
        data=text(base(note=["a\nb", "c"] * (ROWS // 2))),
        keys={"note": [key("a\nb"), key("c")]},
    ),
    Odd(
        name="backslash-quotes.csv",
        data="user,note,label\n"
        + "".join(f'u{i % 9},"he said \\"hi\\", {i % 3}",{i % 2}\n' for i in range(ROWS)),
        keys={"note": [key('he said "hi", 0'), key('he said "hi", 1')]},
    ),
    Odd(
        name="inches.csv",
        data="user,size,label\n"
        + "".join(f'u{i % 9},{i % 5}" pipe,{i % 2}\n' for i in range(ROWS)),
        keys={"size": [key('0" pipe'), key('1" pipe')]},
    ),
    Odd(
        name="open-quote.csv",
        data=text(base()).replace(f"\n{USERS[9]},", f'\n"{USERS[9]},', 1),
        roles=TIMED,
        learned=ROWS - 1,
        rejected=1,
        notes=("1 of 400 rows are rejected: malformed line",),
    ),
    # --- names
    Odd(
        name="twice.csv",
        data=text(base()).replace("price", "item", 1),
        refused=("twice.csv: column 'item' is there 2 times", "--ignore 'item'"),
    ),
    Odd(
        name="twice-ignored.csv",
        data=text(base()).replace("price", "item", 1),
        options=("--ignore", "item"),
        roles={"item": "left out", "ts": "time"},
    ),
    Odd(
        name="twice.parquet",
        data=parquet(
            pa.Table.from_arrays(
                [pa.array(v) for v in base().values()], ["user", "item", "item", "ts", "label"]
            )
        ),
        refused=("twice.parquet: column 'item' is there 2 times",),
    ),
    Odd(
        name="cases.parquet",
        data=parquet(base(Price=PRICES)),
        refused=("columns price, Price are amounts whose names differ in case alone", "--ignore"),
    ),
    # --- formats that are not what they are called
    Odd(name="parquet-called.csv", data=parquet(base()), roles=TIMED),
    Odd(name="csv-called.parquet", data=text(base()), roles=TIMED),
    Odd(name="plain-called.csv.gz", data=text(base()), roles=TIMED),
    Odd(name="gzip-called.csv", data=gzip.compress(text(base()).encode()), roles=TIMED),
    Odd(name="a.csv.bz2", data=bz2.compress(text(base()).encode()), roles=TIMED),
    Odd(name="a.csv.xz", data=lzma.compress(text(base()).encode()), roles=TIMED),
    Odd(
        name="a.csv.zst", data=pa.compress(text(base()).encode(), "zstd", asbytes=True), roles=TIMED
    ),
    Odd(
        name="cut.csv.gz",
        data=gzip.compress(text(base()).encode())[:-200],
        refused=("cut.csv.gz: cannot be read", "copy it again"),
    ),
    Odd(name="lines.json", data='{"a": 1}\n', refused=("is JSON and no text in columns",)),
    Odd(name="page.csv", data="<html><body>", refused=("is HTML or XML",)),
    Odd(name="sheet.csv", data=b"PK\x03\x04....", refused=("is a zip archive",)),
    Odd(name="empty.csv", data="", refused=("empty.csv: is empty",)),
    Odd(name="header.csv", data="a,b,label\n", refused=("header.csv: has no row",)),
    Odd(
        name="zeros.csv",
        data=b"a,b,label\n1,\x00\x00,1\n",
        refused=("holds bytes of zero and is no text",),
    ),
    # --- types
    Odd(
        name="decimals.parquet",
        data=parquet(base(price=decimals(PRICES, 12, 3), item=decimals(ITEMS, 38, 0))),
        roles=TIMED,
        keys={"item": ITEMS[:3]},
    ),
    Odd(
        name="float16.parquet",
        data=parquet(base(price=pa.array(np.array(PRICES, np.float16)))),
        roles=TIMED,
    ),
    Odd(
        name="nested.parquet",
        data=parquet(
            base(lists=each(lambda i: [[i]]), struct=each(lambda i: {"a": i}), none=pa.nulls(ROWS))
        ),
        roles={"lists": "left out", "struct": "left out", "none": "left out", **TIMED},
    ),
    Odd(
        name="dictionaries.parquet",
        data=parquet(
            base(
                user=pa.array(USERS).dictionary_encode(),
                item=pa.array(ITEMS).dictionary_encode(),
                tags=pa.array(each(lambda i: [f"t{i % 3}", "x"])),
            )
        ),
        roles={"tags": "list", **TIMED},
        keys={"user": [key(USERS[0])], "item": ITEMS[:2]},
    ),
    Odd(
        name="fixed.parquet",
        data=parquet(base(user=pa.array([u.ljust(4).encode() for u in USERS], pa.binary(4)))),
        keys={"user": [key(USERS[0].ljust(4))]},
    ),
    Odd(
        name="uint64.parquet",
        data=parquet(base(item=pa.array([2**64 - 1 - i for i in ITEMS], pa.uint64()))),
        options=("--key-column", "item"),
        keys={"item": [-1 - i for i in ITEMS[:3]]},
    ),
    Odd(
        name="uint64.csv",
        data=text(base(item=[2**64 - 1 - i for i in ITEMS])),
        options=("--key-column", "item"),
        keys={"item": [-1 - i for i in ITEMS[:3]]},
    ),
    Odd(
        name="snowflakes.csv",
        data=text(base(item_id=each(lambda i: 999_999_999_999_000_000 + 10**13 * (i % 40)))),
        roles={"item_id": "key"},
        keys={"item_id": [999_999_999_999_000_000, 1_000_009_999_999_000_000]},
    ),
    Odd(
        name="whole-floats.csv",
        data=text(base(item_id=each(lambda i: "" if i == 1 else f"{i % 90}.0"))),
        roles={"item_id": "key"},
        keys={"item_id": [0, -1, 2]},
    ),
    Odd(
        name="texts.parquet",
        data=parquet({name: [str(v) for v in values] for name, values in base().items()}),
        roles={"price": "number", "ts": "time", "label": "label", "item": "key"},
        keys={"item": [key(str(ITEMS[0]))]},
    ),
    Odd(
        name="label-texts.parquet", data=parquet(base(label=[str(v) for v in LABELS])), roles=TIMED
    ),
    Odd(
        name="label-words.csv",
        data=text(base(label=each(lambda i: "yes" if LABELS[i] else "no"))),
        positive="== yes",
    ),
    Odd(
        name="label-quoted.csv",
        data=text(base(label=each(lambda i: "1" if LABELS[i] else "nothing"))),
        positive="== '1'",
    ),
    Odd(
        name="label-third.csv",
        data=text(base(label=each(lambda i: 2 if i == 5 else LABELS[i]))),
        learned=ROWS - 1,
        rejected=1,
        notes=("label is not 0 or 1, first '2' in row 6; --positive",),
    ),
    Odd(
        name="label-missing.csv",
        data=text(base(label=[""] * ROWS)),
        refused=("label-missing.csv: no column looks like a label", "--label"),
    ),
    # --- missing values and outliers
    Odd(
        name="na.csv",
        data=text(
            base(
                price=each(
                    lambda i: ("NA", "null", "NaN")[i // 10 % 3] if i % 10 == 0 else PRICES[i]
                )
            )
        ),
        roles=TIMED,
    ),
    Odd(
        name="word.csv",
        data=text(base(item=each(lambda i: "other" if i == 7 else ITEMS[i]))),
        learned=ROWS - 1,
        rejected=1,
        notes=("key item is not an integer, first 'other' in row 8; --text-column 'item'",),
    ),
    Odd(
        name="word-as-text.csv",
        data=text(base(item=each(lambda i: "other" if i == 1 else ITEMS[i]))),
        options=("--text-column", "item"),
        keys={"item": [key(str(ITEMS[0])), key("other")]},
    ),
    Odd(
        name="comma.csv",
        data=text(base(price=[str(v).replace(".", ",") for v in PRICES]), ";"),
        roles={"price": "left out"},
    ),
    # --- times
    Odd(name="iso.csv", data=text(base(ts=each(iso))), roles=TIMED, first_ms=FIRST),
    Odd(
        name="february.csv",
        data=text(base(ts=each(lambda i: "2023-02-30" if i == 9 else iso(i)))),
        roles=TIMED,
        learned=ROWS - 1,
        rejected=1,
        notes=("ts is not a time of ISO 8601, first '2023-02-30' in row 10",),
        first_ms=FIRST,
    ),
    Odd(
        name="zones.csv",
        data=text(base(ts=each(lambda i: iso(i, ("", "Z", " UTC", "+00:00")[i % 4])))),
        roles=TIMED,
        first_ms=FIRST,
    ),
    Odd(
        name="ahead.csv",
        data=text(base(ts=each(lambda i: TIMES[i] + (10**9 if i == 50 else 0)))),
        roles=TIMED,
        learned=ROWS - 1,
        rejected=1,
        notes=("1 of 400 rows have a ts far from all others, first in row 51: 2055-",),
        first_ms=FIRST,
    ),
    Odd(
        name="first-zero.csv",
        data=text(base(ts=each(lambda i: TIMES[i] if i else 0))),
        roles=TIMED,
        learned=ROWS - 1,
        notes=("first in row 1: 1970-01-01 00:00:00; they decide nothing",),
        first_ms=FIRST + 60_000,
    ),
    Odd(
        name="one-in-ms.csv",
        data=text(base(ts=each(lambda i: TIMES[i] * (1000 if i == 8 else 1)))),
        roles=TIMED,
        learned=ROWS - 1,
        rejected=1,
        first_ms=FIRST,
    ),
    Odd(
        name="half-in-ms.csv",
        data=text(base(ts=each(lambda i: TIMES[i] * (1000 if i % 2 else 1)))),
        roles=TIMED,
        learned=ROWS // 2,
        rejected=ROWS // 2,
        notes=("200 of 400 rows have a ts far from all others",),
        first_ms=FIRST,
    ),
    Odd(
        name="dates-of-people.csv",
        data=text(base(ts=each(lambda i: f"{1 + i % 28}/11/2023"))),
        roles={"ts": "left out"},
        notes=("no time: the order of rows is time",),
    ),
    Odd(
        name="dates-said.csv",
        data=text(base(ts=each(lambda i: f"{1 + i % 28}/11/2023"))),
        options=("--time", "ts"),
        refused=("--time 'ts': its values are no times", "write 2024-01-31"),
    ),
    *(
        Odd(
            name=f"{str(kind).replace('[', '-').partition(',')[0].rstrip(']')}.parquet",
            data=parquet(base(ts=pa.array([t * per for t in TIMES], pa.int64()).cast(kind))),
            roles=TIMED,
            first_ms=FIRST,
        )
        for kind, per in (
            (pa.timestamp("s"), 1),
            (pa.timestamp("ms", "Europe/Vienna"), 1000),
            (pa.timestamp("us"), 10**6),
            (pa.timestamp("ns", "UTC"), 10**9),
        )
    ),
    Odd(
        name="date32.parquet",
        data=parquet(
            base(ts=pa.array([19_000 + i for i in range(ROWS)], pa.int32()).cast(pa.date32()))
        ),
        roles=TIMED,
        first_ms=19_000 * 86_400_000,
    ),
    Odd(
        name="nanoseconds.csv",
        data=text(base(ts=[t * 10**9 for t in TIMES])),
        roles=TIMED,
        first_ms=FIRST,
    ),
]


def init(path: Path, out: Path, *options: str) -> Any:
    done = CliRunner().invoke(app, ["init", str(path), "-o", str(out), *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done


def read(out: Path) -> tuple[list[Batch], Any]:
    source = load(out).source
    assert source is not None
    return list(source.batches(batch_size=100)), source


@pytest.mark.parametrize("odd", CASES, ids=lambda odd: odd.name)
def test_an_oddity_has_the_right_answer(odd: Odd, tmp_path: Path) -> None:
    path, out = tmp_path / odd.name, tmp_path / "run.py"
    path.write_bytes(odd.data if isinstance(odd.data, bytes) else odd.data.encode())
    done = init(path, out, "--json", *odd.options)
    if odd.refused:
        assert done.exit_code == 2
        assert len(done.stderr.strip().splitlines()) == 1
        for part in odd.refused:
            assert part in done.stderr
        assert sorted(tmp_path.iterdir()) == [path]
        return
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["positive"] == odd.positive
    roles = {column["column"]: column["role"] for column in said["columns"]}
    assert {name: roles[name] for name in odd.roles} == odd.roles
    notes = "\n".join(said["notes"])
    for part in odd.notes:
        assert part in notes
    batches, source = read(out)
    assert sum(map(len, batches)) == odd.learned
    assert source.dead_letters.count == odd.rejected
    columns = [feature.column for feature in source.schema.features]
    for name, keys in odd.keys.items():
        found = batches[0].keys_BF[: len(keys), columns.index(name)].tolist()
        assert found == keys
    if odd.first_ms is not None:
        assert batches[0].ts_ms_B[0] == odd.first_ms
        assert said["publish_every_s"] <= ROWS * 86_400


def test_there_are_enough_oddities() -> None:
    assert len({odd.name for odd in CASES}) == len(CASES) >= 40


def test_lines_in_quotes_are_read_at_any_size(tmp_path: Path) -> None:
    """Above 4 MiB Arrow named an option of its own, and rows were split."""
    rows = 3000
    note = "x" * 2000 + "\n" + "y" * 10
    lines = [f'u{i % 9},"{note}{i % 2}",{i % 2}' for i in range(rows)]
    (tmp_path / "big.csv").write_text("user,note,label\n" + "\n".join(lines) + "\n")
    done = init(tmp_path / "big.csv", tmp_path / "run.py", "--key-column", "note")
    assert done.exit_code == 0, done.output
    batches, source = read(tmp_path / "run.py")
    assert sum(map(len, batches)) == rows
    assert source.dead_letters.count == 0
    names = [feature.column for feature in source.schema.features]
    assert batches[0].keys_BF[0, names.index("note")] == key(f"{note}0")


def test_files_of_two_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text(base()))
    (tmp_path / "b.csv").write_bytes(parquet(base()))
    done = init(tmp_path / "*.csv", tmp_path / "run.py")
    assert done.exit_code == 2
    assert f"b.csv: is Parquet, and {tmp_path}/a.csv is text: give files of one kind" in done.stderr


def test_ids_of_18_digits_in_one_file_and_19_in_the_other_are_keys(tmp_path: Path) -> None:
    for name, least in (("a", 10**17), ("b", 10**18)):
        ids = [least + i % 31 * 10**12 for i in range(ROWS)]
        (tmp_path / f"{name}.csv").write_text(text(base(item_id=ids)))
    done = init(tmp_path / "*.csv", tmp_path / "run.py", "--no-time")
    assert done.exit_code == 0, done.output
    batches, source = read(tmp_path / "run.py")
    assert sum(map(len, batches)) == 2 * ROWS
    names = [feature.column for feature in source.schema.features]
    assert batches[-1].keys_BF[0, names.index("item_id")] >= 10**17


def test_other_files_are_read_as_those_of_the_run(tmp_path: Path) -> None:
    """`eval` and `train` with --data know what `init` found out of the text."""
    city = ["Zürich", "Wien"] * (ROWS // 2)
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_bytes(text(base(city=city), ";").encode("latin-1"))
    assert init(tmp_path / "a.csv", tmp_path / "run.py").exit_code == 0
    pq.write_table(pa.table(base(city=city)), tmp_path / "c.parquet")
    wanted = read(tmp_path / "run.py")[0]
    for name in ("b.csv", "c.parquet"):
        _, source = open_run(tmp_path / "run.py", str(tmp_path / name), None, None, 0)
        batches = list(source.batches(batch_size=100))
        assert len(batches) == len(wanted)
        for ours, theirs in zip(batches, wanted, strict=True):
            assert np.array_equal(ours.keys_BF, theirs.keys_BF)
            assert np.array_equal(ours.ts_ms_B, theirs.ts_ms_B)


def test_a_full_drive_leaves_no_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text(text(base()))
    written = Path.write_text

    def full(self: Path, data: str, **options: Any) -> int:
        written(self, "", **options)
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    done = init(tmp_path / "a.csv", tmp_path / "run.py")
    assert done.exit_code == 1
    assert "No space left on device; free room there" in done.stderr
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a.csv"]
