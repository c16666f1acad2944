"""docs/extending.md ("extending.md"): its source reads as one of ours does, its policy is one."""

import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from killing import CACHE

import embertide
from embertide.data import Batch, EventSource, open_events
from embertide.trainer.commands.run_file import RunFile, load

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
EVENTS = 3000


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    """The page's run, and the same events as clicks.csv."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    ts = 1_750_000_000 + np.sort(rng.integers(0, 9000, EVENTS))
    values = (rng.integers(0, most, EVENTS) for most in (50, 9, 2))
    rows = np.column_stack((ts, *values)).tolist()
    with sqlite3.connect("clicks.db") as db:
        db.execute("CREATE TABLE clicks (ts INTEGER, user INTEGER, item INTEGER, clicked INTEGER)")
        db.executemany("INSERT INTO clicks VALUES (?, ?, ?, ?)", rows)
    lines = [",".join(map(str, row)) for row in rows]
    Path("clicks.csv").write_text("ts,user,item,clicked\n" + "\n".join(lines) + "\n")
    (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    Path("run.py").write_text(text)
    return load(Path("run.py"))


def read(source: EventSource, start: int = 0) -> Iterator[Batch]:
    return source.batches(batch_size=64, start=start)


def test_it_reads_what_a_reader_of_ours_reads(given: RunFile) -> None:
    source = given.source
    assert source is not None
    assert source.total_events() == EVENTS
    whole = list(read(source))
    ours = open_events("clicks.csv", schema=source.schema)
    for one, other in zip(whole, read(ours), strict=True):
        assert (one.first, one.next_offset) == (other.first, other.next_offset)
        for name in ("event_B", "ts_ms_B", "keys_BF", "dense_BD", "label_B"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
    for batch in whole[:-1:5]:
        again = next(read(source, batch.next_offset))
        assert again.first == batch.next_offset


def test_a_run_goes_on_from_where_it_stopped(given: RunFile) -> None:
    run, data = given.run, given.source
    for events, learned in ((1000, 1000), (None, EVENTS)):
        done = embertide.train(run, data=data, folder="pub", events=events, program_cache=CACHE)
        assert done.events == learned


def added(text: str, after: str, line: str) -> str:
    """A text with a line behind the first that matches."""
    found = re.search(rf"^.*{after}.*\n", text, re.MULTILINE)
    assert found is not None, after
    return text[: found.end()] + line + "\n" + text[found.end() :]


def test_the_policy_of_the_page_passes_the_test_of_all_policies(tmp_path: Path) -> None:
    page = PAGE.read_text()
    (policy,) = re.findall(r"```cpp\n(.*?)```", page, re.DOTALL)
    maker, entry, name = (
        re.findall(rf"^\| \[{file}\].*?\| `(.+?)`", page, re.MULTILINE)[at]
        for file, at in (("policies.h", 0), ("policy.cc", 0), ("policy.cc", 1))
    )
    folder = tmp_path / "policy"
    shutil.copytree(ROOT / "backend_cpp" / "policy", folder)
    (folder / "fifo.cc").write_text(policy)
    text = (folder / "policies.h").read_text()
    (folder / "policies.h").write_text(added(text, "MakeLru", maker))
    text = added((folder / "policy.cc").read_text(), r'\{"lru"', entry)
    text = added(text, r'name == "lru"', name)
    text = re.sub(r"PolicyInfo, (\d+)>", lambda m: f"PolicyInfo, {int(m[1]) + 1}>", text)
    (folder / "policy.cc").write_text(text)

    program, base = tmp_path / "policy_test", ROOT / "backend_cpp"
    words = ["c++", "-std=c++20", "-O0", f"-I{tmp_path}", f"-I{base}", f"-I{base / 'include'}"]
    sources = [*sorted(folder.glob("*.cc")), base / "base" / "status.cc"]
    libraries = ["-lgtest", "-lgtest_main", "-pthread", "-o", str(program)]
    subprocess.run([*words, *map(str, sources), *libraries], check=True)
    done = subprocess.run(
        [str(program), "--gtest_filter=*/fifo*"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"PASSED  \] [1-9]", done.stdout)
