"""Control planes by name: what commands are told, and what goes before it."""

import json
import os
import stat
from pathlib import Path

import pytest
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
    # What is said on the command line is meant.
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
        assert "there is no context 'prd'; there is dev" in run(*arguments, status=1)
    run("context", "remove", "dev")
    assert "no context is in use" in run("context", "show", status=1)


def test_a_harmed_file_is_named(folder: Path) -> None:
    add("dev", "127.0.0.1:9")
    (folder / "contexts.json").write_text('{"used": "dev", "contexts": {"dev": {"colour": 1}}}')
    assert "contexts.json is not what `embertide context` wrote" in run("hot", status=1)
    assert "embertide" in run("--version")  # what needs no context does not read it


def test_flags_have_no_type_in_help() -> None:
    for command in ((), ("reshard",), ("node", "drain"), ("serve",)):
        assert "<bool>" not in run(*command, "--help")
