"""The commands besides the demo: what they say, and how they refuse."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import commands
import numpy as np
import pytest

from embertide import _store
from embertide.client import text_keys
from embertide.server.cli.metrics_page import MetricsPage

COMMAND = (sys.executable, "-m", "embertide.server.cli")


# Commands that the trainer's process takes over: it can only be asked as a process.
OF_THE_TRAINER = {
    *("init", "train", "send-events", "guard", "rollback", "import", "export-dense"),
    *("prune-search", "transform-search", "cache-sim", "capacity"),
}


class Done(NamedTuple):
    """How a command ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def in_a_process(*arguments: object) -> Done:
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def embertide(*arguments: object) -> Done:
    """Run a command in this process if it can be: a start of Python takes a second and more."""
    if arguments[0] in OF_THE_TRAINER:
        return in_a_process(*arguments)
    done = commands.embertide(*arguments)
    return Done(done.exit_code, done.stdout, done.stderr)


def test_help_names_every_command() -> None:
    done = in_a_process("--help")
    assert done.returncode == 0
    for name in (
        "init",
        "train",
        "eval",
        "compare",
        "backtest",
        "mirror",
        "context",
        "serve",
        "status",
        "snapshot",
        "import",
        "export-dense",
        "prune-search",
        "transform-search",
        "cache-sim",
        "send-events",
        "capacity",
        "doctor",
        "demo",
        "explain",
        "control",
        "reshard",
        "node",
        "plan",
        "hot",
    ):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("name", "teaches"),
    [
        ("init", "--positive"),
        ("train", "--publish-every-s"),
        ("import", "--state-dict"),
        ("export-dense", "--embedding-dim"),
        ("prune-search", "--max-auc-loss"),
        ("transform-search", "--least-gain"),
        ("cache-sim", "--column"),
        ("capacity", "--latency-goal"),
        ("serve", "--ddr-mib"),
        ("status", "--url"),
        ("snapshot", "verify"),
        ("doctor", "--json"),
        ("demo", "--max-staleness"),
        ("status", "--control"),
        ("control", "--expect-nodes"),
        ("reshard", "--planner"),
        ("hot", "--keys"),
        ("slow", "--trace"),
        ("node", "drain"),
        ("plan", "explain"),
        ("explain", "--snapshot"),
    ],
)
def test_each_command_teaches_itself(name: str, teaches: str) -> None:
    done = embertide(name, "--help")
    assert done.returncode == 0
    assert teaches in done.stdout
    assert f"embertide {name}" in done.stdout


def test_doctor_looks_at_what_a_start_needs() -> None:
    done = embertide("doctor", "--json")
    findings = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    needed = ("Python", "CPU", "torch", "tritonserver", "redis-server", "libtriton_embertide.so")
    for name in needed:
        assert findings[name]["ok"], findings[name]
    assert done.returncode == (0 if all(each["ok"] for each in findings.values()) else 1)


def test_doctor_says_how_the_ssd_tier_would_be_read(tmp_path: Path) -> None:
    done = embertide("doctor", "--json", "--ssd-directory", tmp_path)
    findings = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    engine, direct, refused = _store.probe_ssd(str(tmp_path))
    assert findings["SSD engine"]["found"].startswith(f"{engine} in {tmp_path}")
    assert refused in findings["SSD engine"]["found"]
    assert findings["O_DIRECT"]["ok"] == direct
    assert not list(tmp_path.iterdir())
    done = embertide("doctor", "--json", "--ssd-directory", tmp_path / "away")
    findings = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert not findings["SSD engine"]["ok"]
    assert str(tmp_path / "away") in findings["SSD engine"]["found"]
    assert {"huge pages", "NUMA nodes", "vectors"} <= set(findings)


def test_doctor_says_what_seal_a_start_would_find(tmp_path: Path) -> None:
    def seal() -> tuple[bool, str]:
        done = embertide("doctor", "--json", "--ssd-directory", tmp_path)
        findings = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
        return findings["SSD seal"]["ok"], findings["SSD seal"]["found"]

    assert seal() == (True, f"none in {tmp_path}")
    # As a store wrote it, but for its rows.
    written = (
        '{"crc32c":%d,"seal":{"ddr_rows":3,"file":"seal-4.rows","file_bytes":5,"first":{'
        '"lineage":1,"number":6,"proof":1},"format":1,"last":{"lineage":1,"number":7,"proof":2},'
        '"logs":["device-0.log"],"model":"news","rows":1234,"schema_id":18446744073709551615,'
        '"segments_at":2,"sequence":4,"tables":["item 0: 1 x 4 fp32, 1 bits"],'
        '"written_ms":1700000000000}}'
    )
    body = written[written.index('"seal":') + 7 : -1]
    (tmp_path / "seal-4.rows").write_bytes(b"12345")
    (tmp_path / "seal.json").write_text(written % _store.crc32c(body.encode()))
    assert seal() == (
        True,
        "version 7 of news, 1,234 rows, 3 of them from memory, 2023-11-14 22:13:20 UTC",
    )
    (tmp_path / "seal.json").write_text(written % 1)
    ok, found = seal()
    assert not ok
    assert "checksum" in found
    (tmp_path / "seal.json").write_text(written % _store.crc32c(body.encode()))
    (tmp_path / "seal-4.rows").write_bytes(b"1234")
    assert not seal()[0]


def test_doctor_says_how_to_mend_a_missing_backend(tmp_path: Path) -> None:
    done = embertide("doctor", "--json", "--backends", tmp_path)
    assert done.returncode == 1
    findings = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    finding = findings["libtriton_embertide.so"]
    assert not finding["ok"]
    assert "make cpp" in finding["remedy"]


def make_snapshot(directory: Path) -> Path:
    source = directory / "item"
    source.mkdir()
    np.save(source / "keys.npy", np.arange(100, dtype=np.int64))
    np.save(source / "vectors.npy", np.ones((100, 4), np.float32))
    out = directory / "snapshot"
    done = embertide("import", "--table", f"item={source}", out)
    assert done.returncode == 0, done.stderr
    return out


def test_explain_reads_a_row_of_a_snapshot(tmp_path: Path) -> None:
    path = make_snapshot(tmp_path)
    said = json.loads(embertide("explain", "item", 42, "--snapshot", path, "--json").stdout)
    assert (said["resident"], said["live_chunks"], said["payload_bytes"]) == (True, [0], 16)
    assert said["version"] == json.loads((path / "manifest.json").read_text())["version"]
    absent = json.loads(embertide("explain", "item", -7, "--snapshot", path, "--json").stdout)
    assert (absent["resident"], absent["live_chunks"]) == (False, [])
    assert "default row" in embertide("explain", "item", 100, "--snapshot", path).stdout
    for words in (["Blue in Green"], ["42", "--text"]):  # texts have the keys that events give them
        said = embertide("explain", "item", *words, "--snapshot", path, "--json").stdout
        assert json.loads(said)["key"] == text_keys(words[:1])[0]
    assert "--text" in embertide("explain", "item", 10**20, "--snapshot", path).stderr
    refused = embertide("explain", "user", 1, "--snapshot", path)
    assert refused.returncode == 2
    assert "no table 'user'" in refused.stderr
    assert "it has item" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("snapshot", "verify", "nowhere"), "nowhere holds no snapshot"),
        (("snapshot", "diff", "nowhere", "x"), "nowhere holds no snapshot"),
        (("serve", "nowhere"), "nowhere holds neither a snapshot"),
        (("serve", "nowhere", "--kind", "rank"), "kind is 'rank'; use ranking or lookup"),
        (("serve", "nowhere", "--hbm-kind", "cpu"), "hbm_kind is 'cpu'; use gpu or twin"),
        (("status", "--url", "http://127.0.0.1:1/metrics"), "no node answers at"),
        (("status", "--url", "127.0.0.1:8002"), "URL: give --url http://HOST:8002/metrics"),
        (
            ("control", "--state", "nowhere"),
            "--state: 'nowhere' is no Redis URL; use redis://HOST:PORT/0",
        ),
        (("control", "--tokens", "nowhere"), "tokens file nowhere"),
        (("train", "build/x", "--data", "nowhere.parquet"), "nowhere.parquet"),
        (("explain", "item", 1, "--snapshot", "nowhere"), "nowhere holds no snapshot"),
        (("explain", "item", 1, "--node", "127.0.0.1:1"), "no node that shares a model answers"),
        (
            ("explain", "item", 1, "--node", "a:1", "--token-file", "nowhere"),
            "--token-file nowhere",
        ),
        (("explain", "item", 1 << 63), "is no 64-bit integer"),
        (("explain", "item", 1, "--snapshot", "x", "--version", 2), "leave those out"),
        (("import", "out", "--table", "item=nowhere"), "nowhere"),
    ],
)
def test_refusals_name_the_value(arguments: tuple[str, ...], message: str) -> None:
    done = embertide(*arguments)
    # A failure that no repetition mends is told apart (docs/cli.md): a training job ends for good
    # by it.
    assert done.returncode == (1 if "127.0.0.1:1" in "".join(map(str, arguments)) else 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refusal_of_a_process_is_the_same() -> None:
    arguments = ("snapshot", "verify", "nowhere")
    assert in_a_process(*arguments) == embertide(*arguments)


def test_the_metrics_page_is_read_by_name_and_labels() -> None:
    page = MetricsPage(
        "# TYPE nv_inference_count counter\n"
        'nv_inference_count{model="a",version="1"} 3\n'
        'nv_inference_count{model="b",version="1"} 5\n'
        "# TYPE embertide_version gauge\n"
        'embertide_version{model="a"} 7\n'
        "# TYPE embertide_lookup_keys_total counter\n"
        'embertide_lookup_keys_total{model="a",source="ddr",table="x"} 1\n'
        'embertide_lookup_keys_total{model="a",source="ddr",table="y"} 2\n'
        "# TYPE embertide_table_rows gauge\n"
        'embertide_table_rows{model="a",table="x",tier="ddr"} 4\n'
        'embertide_table_rows{model="a",table="x",tier="ssd"} 5\n'
        'embertide_table_rows{model="a",table="x",tier="hbm"} 3\n'
        'embertide_table_rows{model="a",table="y",tier="ddr"} 6\n'
        'embertide_table_rows{model="b",table="z",tier="ddr"} 7\n'
    )
    assert page.sum("nv_inference_count", model="b") == 5
    assert page.models() == ["a"]
    assert page.hits("a")["ddr"] == 3
    assert page.model("a")["version"] == 7
    assert page.model("a")["rows_by_table"] == {"x": 9, "y": 6}
    assert "hbm" not in page.model("a")
    assert page.model("a")["inferences"] == 3
    assert "tritonserver" not in page.model("a"), "of a backend that does not say it"
    said = "# TYPE embertide_server_info gauge\n" + "".join(
        f'embertide_server_info{{model="{model}",version="{version}"}} 1\n'
        for model, version in (("a", "2.51.0"), ("a", "2.72.0"), ("b", "2.40.0"))
    )
    assert MetricsPage(said).model("a")["tritonserver"] == "2.51.0, 2.72.0"
    assert "restarts" not in page.model("a"), "of a server that nobody keeps"
    said = "".join(
        f"# TYPE embertide_server_{what}_total counter\n"
        f'embertide_server_{what}_total{{model="a"}} {count}\n'
        for what, count in (("restarts", 3), ("silences", 1))
    )
    kept = MetricsPage(said).model("a")
    assert (kept["restarts"], kept["silences"]) == (3, 1)
