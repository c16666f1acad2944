"""docs/extending.md ("extending.md"): its source reads as one of ours does, its policy is one.

Its option of a node is one, in C++ and on the command line.
"""

import re
import shutil
import sqlite3
import subprocess
import sys
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


# Shows what `embertide serve` and a model make of a declaration that is not the built one.
WITH_OPTION = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("embertide.v1.options_pb2", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["embertide.v1.options_pb2"] = module
import embertide.v1
embertide.v1.options_pb2 = module
spec.loader.exec_module(module)
from embertide.server.adapters.node_options import ModelOptions
from embertide.server.cli.node_flags import FLAGS
flag = FLAGS["join_step_buckets"]
option = flag.parameter().annotation.__metadata__[0]
print(option.default, option.min, option.max, option.show_default)
print(ModelOptions(join_step_buckets=flag.value(7)).parameters())
"""


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    """A folder with the declaration of options, and the page's among them."""
    (option,) = re.findall(r"```proto\n(.*?)```", PAGE.read_text(), re.DOTALL)
    text = (ROOT / "proto" / "embertide" / "v1" / "options.proto").read_text()
    numbers = [int(each) for each in re.findall(r"^  \w+ \w+ \w+ = (\d+) \[", text, re.MULTILINE)]
    assert f" = {max(numbers) + 1} [" in option
    path = tmp_path / "proto" / "embertide" / "v1" / "options.proto"
    path.parent.mkdir(parents=True)
    assert text.endswith("}\n")
    path.write_text(text[:-2] + option + "}\n")
    return tmp_path / "proto"


def test_the_option_of_the_page_has_a_flag_and_a_parameter(declared: Path, tmp_path: Path) -> None:
    words = ["-m", "grpc_tools.protoc", f"-I{declared}", f"--python_out={tmp_path}"]
    subprocess.run([sys.executable, *words, "embertide/v1/options.proto"], check=True)
    module = tmp_path / "embertide" / "v1" / "options_pb2.py"
    done = subprocess.run(
        [sys.executable, "-c", WITH_OPTION, str(module)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "--join-step-buckets 1 4096 64",
        "{'kind': 'lookup', 'join_step_buckets': '7'}",
    ]


def test_the_option_of_the_page_is_a_field_in_cpp(declared: Path, tmp_path: Path) -> None:
    subprocess.run(
        ["protoc", f"-I{declared}", f"--cpp_out={tmp_path}", "embertide/v1/options.proto"],
        check=True,
    )
    program, made = tmp_path / "write_options", tmp_path / "settings.h"
    messages = tmp_path / "embertide" / "v1" / "options.pb.cc"
    words = ["c++", "-std=c++20", "-O0", f"-I{tmp_path}", str(ROOT / "proto" / "write_options.cc")]
    libraries = ["-lprotobuf", "-pthread", "-o", str(program)]
    subprocess.run([*words, str(messages), *libraries], check=True)
    subprocess.run([str(program), str(made)], check=True)
    text = made.read_text()
    assert "  uint32_t join_step_buckets = 64;\n" in text
    visit = 'visit(Setting{.name = "join_step_buckets", .min = 1ULL, .max = 4096ULL}, '
    assert visit + "&settings->join_step_buckets);" in text
