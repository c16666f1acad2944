"""The pages of the documentation, and their code blocks."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]


def _named() -> tuple[str, ...]:
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


PAGES = _named()


@dataclass(frozen=True)
class Block:
    """A fenced block: the line that it starts at, its language, and what is in it."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """The commands of a block of shell, continued lines joined."""
        lines = (line.strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def parse(text: str) -> list[Token]:
    """The tokens of a page."""
    return MarkdownIt("commonmark").enable("table").parse(text)


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in its order; shell is a language that need not be named."""
    return [
        Block(page, token.map[0] + 1, token.info or "sh", token.content)
        for token in parse((ROOT / page).read_text())
        if token.type == "fence" and token.map is not None
    ]
