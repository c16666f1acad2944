"""Each `embertide` command on a page exists, with its options, and so does each `make` target."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from markdown_it import MarkdownIt

from embertide.server.cli.app import app as server
from embertide.trainer.__main__ import app as trainer
from embertide.trainer.commands import mirror

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
trainer.command("mirror")(mirror.command)  # a process of its own, without torch
SERVER: Any = typer.main.get_command(server)
TRAINER: Any = typer.main.get_command(trainer)
# `embertide demo --verify` and the like: before an option comes a command, by its name.
_STARTS = re.compile(r"^(?:\$ )?(?:python -m )?embertide(?:\.trainer)? (.+)$")
_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def lines(page: str) -> list[str]:
    """The lines of code blocks, continued ones as one, and the commands within text."""
    found: list[str] = []
    for token in MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text()):
        if token.type == "fence":
            found += token.content.replace("\\\n", " ").splitlines()
        for each in (each for each in token.children or [] if each.type == "code_inline"):
            # Other things have such names too, as formats.
            named = _STARTS.match(each.content)
            if named is None or named[1].split()[0] in SERVER.commands:
                found.append(each.content)
    return [line.strip() for line in found]


def wrong(line: str) -> str | None:
    """What of a command is not there."""
    started = _STARTS.match(re.split(r" {3,}", line)[0])  # an explanation may follow
    if started is None:
        return None
    words = shlex.split(started[1], comments=True)
    for root in (TRAINER, SERVER):
        command, path = root, list(words)
        while path and path[0] in getattr(command, "commands", {}):
            command = command.commands[path.pop(0)]
        # Of some groups a command of its own stands where no other is named.
        alone = getattr(command, "invoke_without_command", True)
        if (command is not root and alone) or (command is SERVER and path[0].startswith("-")):
            break
    else:
        return f"{words[0]} is no command"
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    given = {word.split("=")[0] for word in path if re.match(r"--?[a-z]", word)}
    missing = sorted(given - known - {"--help"})
    return f"{' '.join(words[:2])} has no {missing}" if missing else None


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_there(page: str) -> None:
    assert [f"{line}: {wrong(line)}" for line in lines(page) if wrong(line)] == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_of_a_page_are_there(page: str) -> None:
    named = (re.match(r"make ([a-z][a-z-]+)(?![/\w-])", line) for line in lines(page))
    assert [name[1] for name in named if name and name[1] not in _TARGETS] == []


def test_a_wrong_command_is_found() -> None:
    assert wrong("embertide teach x") == "teach is no command"
    assert wrong("embertide serve x --nmae y  # a node") == "serve x has no ['--nmae']"
    assert wrong("embertide node drain node-2 --wtach") == "node drain has no ['--wtach']"
    assert wrong("embertide serve x --name y") is None
