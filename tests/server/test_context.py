"""Control planes by name: what commands are told, and what goes before it."""

import json
import os
import stat
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from proxy import unused_proxy
from typer.testing import CliRunner

from embertide.server.cli.app import app
from embertide.server.cli.context import apply_context

VARIABLES = ("CONTROL", "TLS", "TOKEN_FILE", "MODEL", "PLAINTEXT", "CONTEXT")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.setenv(f"EMBERTIDE_{name}", "")  # so that it is as before afterwards
        monkeypatch.delenv(f"EMBERTIDE_{name}")
    monkeypatch.setenv("EMBERTIDE_CONFIG", str(tmp_path / "settings"))
    return tmp_path / "settings"


def run(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, arguments, prog_name="embertide")
    assert done.exit_code == status, done.output
    return done.output


def add(name: str, control: str, *more: str) -> None:
    run("context", "add", name, "--control", control, *more)


def test_the_first_is_used_and_another_when_told() -> None:
    add("dev", "127.0.0.1:1")
    add("prod", "10.0.0.7:2", "--model", "news")
    assert json.loads(run("context", "list", "--json"))["used"] == "dev"
    run("context", "use", "prod")
    apply_context(None)
    assert os.environ["EMBERTIDE_CONTROL"] == "10.0.0.7:2"
    assert os.environ["EMBERTIDE_MODEL"] == "news"


def test_a_command_asks_the_context_in_use() -> None:
    add("dev", "127.0.0.1:9")
    assert "127.0.0.1:9" in run("hot", status=1)
    add("other", "127.0.0.1:8")
    assert "127.0.0.1:8" in run("--context", "other", "hot", status=1)


def test_options_and_the_environment_go_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    add("dev", "127.0.0.1:9")
    assert "127.0.0.1:7" in run("hot", "--control", "127.0.0.1:7", status=1)
    monkeypatch.setenv("EMBERTIDE_CONTROL", "127.0.0.1:6")
    for command in ("hot", "status"):
        assert "127.0.0.1:6" in run(command, status=1)
    # The command line takes precedence.
    assert "no node answers at http://127.0.0.1:5/" in run(
        "status", "--url", "http://127.0.0.1:5/", status=1
    )
    both = ("status", "--url", "http://127.0.0.1:5/", "--control", "127.0.0.1:4")
    assert "give one of them" in run(*both, status=2)
    assert "the environment says 127.0.0.1:6" in run("context", "show")


def test_it_has_the_path_of_a_token_and_is_the_users_alone(folder: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    add("dev", "127.0.0.1:9", "--token-file", str(token))
    path = folder / "contexts.json"
    assert "secret" not in path.read_text()
    assert str(token) in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(folder.iterdir()) == [path]


def test_a_context_that_is_not_there_is_named() -> None:
    add("dev", "127.0.0.1:9")
    for arguments in (("context", "use", "prd"), ("--context", "prd", "hot")):
        assert "there is no context 'prd'; there is dev" in run(*arguments, status=2)
    run("context", "remove", "dev")
    assert "no context is in use" in run("context", "show", status=2)


def test_a_harmed_file_is_named(folder: Path) -> None:
    add("dev", "127.0.0.1:9")
    (folder / "contexts.json").write_text('{"used": "dev", "contexts": 7}')
    assert "contexts.json is not what `embertide context` wrote" in run("hot", status=2)
    assert "embertide" in run("--version")  # what needs no context does not read it


def test_what_asks_no_control_plane_needs_no_context(folder: Path) -> None:
    add("dev", "127.0.0.1:9")
    (folder / "contexts.json").write_text("{")
    node = ("status", "--url", "http://127.0.0.1:5/")
    assert "no node answers at http://127.0.0.1:5/" in run(*node, status=1)
    assert "contexts.json is not what" in run("status", status=2)


@pytest.mark.parametrize(
    "fields", [{"colour": 1}, {"control": 5}, {"control": "a:1", "tls": {}}, 7]
)
def test_one_that_is_not_right_leaves_the_others(folder: Path, fields: object) -> None:
    add("dev", "127.0.0.1:9")
    path = folder / "contexts.json"
    said = json.loads(path.read_text())
    said["contexts"] |= {"[/b]": {"control": "x:1"}, "prod": fields}
    path.write_text(json.dumps(said))
    listed = run("context", "list")
    assert "127.0.0.1:9" in listed
    assert listed.count("not right: add it again") == 2
    assert "127.0.0.1:9" in run("hot", status=1)
    assert "embertide context remove prod" in run("--context", "prod", "hot", status=2)
    add("other", "127.0.0.1:8")  # keeps what it cannot read
    assert run("context", "list").count("not right: add it again") == 2
    run("context", "remove", "[/b]")
    add("prod", "127.0.0.1:7")
    assert "not right" not in run("context", "list")


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("[/b]", "a:1"),
        ("\x1b[2J", "a:1"),
        ("", "a:1"),
        ("dev", "a"),
        ("dev", "::1"),
        ("dev", "a:99999"),
    ],
)
def test_names_and_addresses_are_checked_as_they_are_given(name: str, control: str) -> None:
    said = run("context", "add", name, "--control", control, status=2)
    assert "error: " in said
    assert "\x1b" not in said


def test_flags_have_no_type_in_help() -> None:
    for command in ((), ("reshard",), ("node", "drain"), ("serve",)):
        assert "<bool>" not in run(*command, "--help")


class Heard(grpc.GenericRpcHandler):
    """A control plane that notes what callers show it; it refuses all."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, call: Any) -> Any:
        self.tokens += [value for key, value in call.invocation_metadata if key == "authorization"]

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def heard() -> Iterator[Heard]:
    running = Heard()
    yield running
    running.stop()


COMMANDS = (("status",), ("hot",), ("plan", "show"), ("reshard", "list"), ("node", "list"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_token_goes_to_the_control_plane_of_its_context_alone(
    command: tuple[str, ...], heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    add("prod", f"127.0.0.1:9,{heard.address}", "--token-file", str(token))
    run(*command, "--control", heard.address, status=1)
    assert heard.tokens == ["Bearer secret"], "it is one of the context's"
    heard.tokens.clear()
    add("prod", "127.0.0.1:9", "--token-file", str(token), "--tls", str(tmp_path))
    run(*command, "--control", heard.address, status=1)
    monkeypatch.setenv("EMBERTIDE_CONTROL", heard.address)
    run(*command, status=1)
    assert heard.tokens == []
    # The value for this call, or in the environment for all, takes precedence.
    run(*command, "--token-file", str(token), status=1)
    monkeypatch.setenv("EMBERTIDE_TOKEN_FILE", str(token))
    run(*command, status=1)
    assert heard.tokens == ["Bearer secret"] * 2


def test_no_proxy_is_told_a_token(
    heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    with unused_proxy(monkeypatch):
        run("hot", "--control", heard.address, "--token-file", str(token), status=1)
        assert heard.tokens == ["Bearer secret"]
        assert "no page of metrics" in run("status", "--url", f"http://{heard.address}/", status=1)
