"""Every code block of the pages is run or checked, by its language.

Blocks of Python run, one after the other as a page has them. Bash parses blocks of shell, and the
command line of `embertide` the commands in them. Blocks of `text` show output and drawings.
"""

import ast
import contextlib
import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
import yaml
from google.protobuf import text_format
from pages import PAGES, ROOT, Block, blocks, parse
from tritonclient.grpc import model_config_pb2

from embertide._common.commands import loaded
from embertide.server.cli.app import app as server
from embertide.server.cli.target import read_target
from embertide.trainer.__main__ import app as trainer
from embertide.trainer.commands import mirror
from embertide.trainer.data import redis_stream
from embertide.trainer.data.base import news_schema
from embertide.v1 import plan_pb2

BLOCKS = [block for page in PAGES for block in blocks(page)]
# Pages whose Python needs a node, another library, or a look at what it has made.
RUN_BY = {
    "README.md": "tests/client/test_client_page.py",
    "docs/client.md": "tests/client/test_client_page.py",
    "docs/extending.md": "tests/trainer/test_extending_page.py",
    "docs/howto.md": "tests/docs/test_howto.py",
    "docs/library.md": "tests/trainer/test_library_page.py",
    "docs/torchrec.md": "tests/trainer/test_torchrec_page.py",
    "docs/tutorial.md": "tests/docs/test_tutorial.py",
}
SLOW = {"docs/design/0007-utilities.md"}  # a benchmark
# Files that pages read, and names that a page takes for there.
PARQUET: dict[str, list[str]] = {
    "clicks-1.parquet": ["impression", "ts"],
    # The hour is made of ts.
    "impressions-1.parquet": ["impression", *(each.column for each in news_schema().features)],
}
BEFORE = {
    "docs/evaluation.md": """
from embertide.trainer.config import RunConfig
from embertide.trainer.presets import news_model
model = news_model()
""",
}
# Programs of others, which are not run: what they do needs a network, a cluster or root.
FOREIGN = {"docker", "kubectl", "openssl", "sudo", "apt-get", "git", "cd", "mkdir", "sleep", "tar"}
FOREIGN |= {"echo", "sed"}
SHELL = {"do", "done", "for", "export"}
SERVER: Any = typer.main.get_command(server)
trainer.command("mirror")(mirror.command)  # a process of its own, without torch
TRAINER: Any = typer.main.get_command(trainer)
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def embertide(words: list[str]) -> None:
    """Parse a command as `embertide` does, without running it."""
    command = TRAINER if words[0] in TRAINER.commands else SERVER
    with contextlib.suppress(typer.Exit):  # an option that prints and ends, as --print-config
        context = command.make_context("embertide", list(words))
        while hasattr(command, "resolve_command"):
            left = [*context._protected_args, *context.args]
            if not left:
                assert command.invoke_without_command, f"{words[0]} needs a command"
                return
            name, command, rest = command.resolve_command(context, left)
            context = command.make_context(name, rest, parent=context)


def make(words: list[str]) -> None:
    """Targets and variables are those of the Makefile."""
    for word in words:
        variable, given, _ = word.partition("=")
        assert not given or f"$({variable})" in MAKEFILE or f"$(or $({variable})," in MAKEFILE, word
        assert given or re.search(rf"^{re.escape(word)}:", MAKEFILE, re.MULTILINE), word


def pip(words: list[str]) -> None:
    """The extras of `pip install 'embertide[EXTRA]'` are those of pyproject.toml."""
    assert words[0] == "install"
    for word in words[1:]:
        if extras := re.fullmatch(r"embertide\[(.+)\]", word):
            assert set(extras[1].split(",")) <= set(EXTRAS), word


def python(words: list[str]) -> None:
    """A module of ours that is run exists; a script is one that the page has shown."""
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, words[1]
    else:
        assert words[0].endswith(".py"), words[0]


OURS: dict[str, Callable[[list[str]], None]] = {
    "embertide": embertide,
    "make": make,
    "pip": pip,
    "python": python,
}


def command_lines(line: str) -> list[list[str]]:
    """The words of each command of a line, comments left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in iter(lexer.get_token, None):
        if re.fullmatch(r"[|&;<>()]+", word):
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in found if words]


def check_shell(block: Block) -> None:
    parsed = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    assert parsed.returncode == 0, parsed.stderr
    redirected = re.sub(r"(?<![\w-])>\s*\S+", "", block.text)
    for line in Block(block.page, block.line, block.language, redirected).commands():
        for program, *words in command_lines(line):
            if program in OURS:
                OURS[program](words)
            elif (ROOT / program).is_file():
                pass
            else:
                assert program in FOREIGN | SHELL, f"say in this test who runs {program}"
            for word in words:
                # The overlay `mine` is what new-overlay.sh makes.
                if re.match(r"(k8s|tests|docs|bench)/", word) and "/mine" not in word:
                    assert "$" in word or (ROOT / word).exists(), word


def check_json(block: Block, tmp_path: Path) -> None:
    """An object with `base_epoch` is a target of a reshard."""
    assert "base_epoch" in json.loads(block.text)
    plan = plan_pb2.Plan(epoch=7)
    for number, name in enumerate(("user", "cand")):
        plan.tables.add(id=number, name=name)
    plan.topology.nodes.add(name="node-0").devices.add(index=0)
    (tmp_path / "target.json").write_text(block.text)
    target = read_target(tmp_path / "target.json", plan)
    assert len(target.assignments) + len(target.hot_rows) + len(target.tier_shares) >= 1


def check_text(block: Block) -> None:
    assert block.text.strip()


def check_cpp(block: Block) -> None:
    """It opens with what it is, as files of C++ do; the page's own test compiles it."""
    assert block.text.startswith("// ")


def check_proto(block: Block) -> None:
    """It is a field of a message; the page's own test compiles it."""
    assert re.match(r"  (optional|repeated) \w+ \w+ = \d+", block.text)


def check_protobuf(block: Block) -> None:
    """A model's config.pbtxt, or a part of one, has fields that Triton knows."""
    text_format.Parse(block.text, model_config_pb2.ModelConfig())


def check_yaml(block: Block) -> None:
    assert all(isinstance(each, dict) for each in yaml.safe_load_all(block.text))


def check_lua(block: Block) -> None:
    """A script for Redis is the code's own."""
    assert re.sub(r"\s+", " ", redis_stream._ADD).strip() == re.sub(r"\s+", " ", block.text).strip()


CHECKS: dict[str, Callable[[Block], None]] = {
    "sh": check_shell,
    "bash": check_shell,
    "text": check_text,
    "cpp": check_cpp,
    "proto": check_proto,
    "protobuf": check_protobuf,
    "yaml": check_yaml,
    "lua": check_lua,
}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_what_its_language_says(block: Block, tmp_path: Path) -> None:
    if block.language == "json":
        check_json(block, tmp_path)
    elif block.language == "python":
        ast.parse(block.text)
    else:
        assert block.language in CHECKS, f"nothing checks blocks of {block.language!r}"
        CHECKS[block.language](block)


def _pages_of_python() -> list[Any]:
    pages = {block.page for block in BLOCKS if block.language == "python"} - set(RUN_BY)
    return [
        pytest.param(page, marks=[pytest.mark.long] if page in SLOW else [])
        for page in sorted(pages)
    ]


@pytest.mark.parametrize("page", _pages_of_python())
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clicks-1.csv").write_text("user_id,item_id,clicked,time\n1,2,0,1700000000000\n")
    Path("day-1.tsv").write_text("0\t31\t00000001\t7\t\n")
    for name, columns in PARQUET.items():
        pq.write_table(pa.table({column: pa.array([], pa.int64()) for column in columns}), name)
    names: dict[str, Any] = {"__name__": "run_file"}
    exec(BEFORE.get(page, ""), names)
    for block in blocks(page):
        if block.language == "python":
            code = "\n" * block.line + block.text
            exec(compile(code, str(ROOT / page), "exec"), names)


@pytest.mark.parametrize("page", RUN_BY)
def test_python_that_runs_elsewhere_is_read_there(page: str) -> None:
    assert f'"{Path(page).name}"' in (ROOT / RUN_BY[page]).read_text()
    assert any(block.language == "python" for block in blocks(page))


def unknown(command: str) -> str | None:
    """The name or options of a command that do not exist; text may leave values out."""
    words = shlex.split(command, comments=True)
    group, path = TRAINER if words[0] in TRAINER.commands else SERVER, list(words)
    while path and path[0] in getattr(group, "commands", {}):
        group = loaded(group.commands[path.pop(0)])
    if group is SERVER and not path[0].startswith("-"):
        return f"{path[0]} is no command"
    options = {name for each in group.params for name in (*each.opts, *each.secondary_opts)}
    given = {word.split("=")[0] for word in path if re.match(r"--?[a-z]", word)}
    missing = sorted(given - options - {"--help"})
    return f"{' '.join(words[:2])} has no {missing}" if missing else None


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_text_are_there(page: str) -> None:
    tokens = [part for token in parse((ROOT / page).read_text()) for part in token.children or []]
    texts = [token.content for token in tokens if token.type == "code_inline"]
    started = re.compile(r"(?:python -m )?embertide(?:\.trainer)? ([a-z-].*)")
    # `embertide ranks 1` is the name of a format.
    starts = [started.match(text) for text in texts if not re.match(r"[a-z ]+ \d+$", text)]
    commands = [each[1] for each in starts if each]
    assert [f"{each}: {unknown(each)}" for each in commands if unknown(each)] == []
    targets = [text.split()[1:] for text in texts if re.match(r"make [a-z]", text)]
    for words in targets:
        make(words)


def test_a_wrong_command_within_text_is_found() -> None:
    assert unknown("teach x") == "teach is no command"
    assert unknown("serve x --nmae y") == "serve x has no ['--nmae']"
    assert unknown("node drain node-2 --wtach") == "node drain has no ['--wtach']"
    assert unknown("reshard --planner") is None


@pytest.mark.parametrize(
    "text",
    [
        "embertide teach x",
        "embertide serve x --nmae y  # a node",
        "embertide node drain node-2 --wtach",
        "embertide node add-group two",
        "embertide reshard | embertide plan shew",
        "make tset",
        "make chaos RUNDS=20",
        "pip install 'embertide[serving]'",
        "python -m embertide.trainer.sync.lunch",
        "docker build -f k8s/images/nodes.Dockerfile .",
        "rm -rf /",
        "for image in node control; do",
    ],
)
def test_a_wrong_command_is_found(text: str) -> None:
    with pytest.raises((typer.exceptions.TyperException, AssertionError, ModuleNotFoundError)):
        check_shell(Block("page.md", 1, "sh", text))
