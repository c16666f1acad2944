"""Rules of a message: it fits a terminal, and it says what to do next.

Messages are read where they are written, in the source (values stand as `<>`), and where they are
seen, in a terminal of 80 columns.
"""

import ast
import importlib
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from embertide._common.errors import OperatingError

ROOT = Path(__file__).resolve().parent.parent.parent
# Verbs that tell a reader what to do next.
_VERBS = (
    *(
        "add",
        "allow",
        "ask",
        "build",
        "call",
        "change",
        "check",
        "choose",
        "close",
        "compile",
        "correct",
    ),
    *("create", "declare", "divide", "drain", "drop", "end", "fetch", "fit", "fix", "free", "give"),
    *(
        "bring",
        "convert",
        "decide",
        "export",
        "evaluate",
        "load",
        "go",
        "have",
        "import",
        "install",
    ),
    *("keep", "leave", "let", "list", "lists", "look", "lower"),
    *("make", "mend", "mount", "move", "name", "open", "order", "pass", "pip", "put", "raise"),
    *("read", "register", "reinstall", "remove", "rename", "repair", "repeat", "report", "retry"),
    *(
        "run",
        "say",
        "see",
        "send",
        "set",
        "sort",
        "spell",
        "split",
        "start",
        "stop",
        "take",
        "tell",
    ),
    *("train", "try", "unset", "update", "upgrade", "use", "wait", "write"),
)
_VERB = "|".join(_VERBS)
_NEXT = re.compile(
    rf"(^|[;:,.(] ?(or |and |then |first )?)({_VERB})\b|`[a-z]|--[a-z]"
    r"|at (most|least) \S|docs/[a-z]"
    r"|must (be|give|have|hold) "
    r"|apt-get|only \S+ to \S+|\?$",
    re.IGNORECASE,
)


class Message(NamedTuple):
    """A message of the source; values stand as `<>`."""

    place: str
    error: str
    text: str


def has_next_step(text: str) -> bool:
    """Return whether a message says what to do."""
    return _NEXT.search(" ".join(text.split())) is not None


def error_class(message: Message) -> type[BaseException] | None:
    """Return the class that a message is raised as; None: it cannot be told."""
    path = message.place.partition(":")[0].removesuffix(".py").removeprefix("library/")
    found = getattr(
        importlib.import_module(f"embertide.{path.replace('/', '.')}"), message.error, None
    )
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def next_step(message: Message) -> str:
    """Return where a command tells what to do next: "text", "class", "help"; empty: nowhere."""
    raised = error_class(message)
    if has_next_step(message.text):
        return "text"
    if raised is None or not issubclass(raised, OperatingError):
        return "text"  # no command ends with it as it is
    return "class" if raised.remedy else "help" if raised.exit_status == 2 else ""


class Shown(NamedTuple):
    """The output of a command to a terminal as it ended, and its status."""

    lines: list[str]
    status: int


def in_a_terminal(*words: str, folder: Path, columns: int = 80, timeout_s: float = 120) -> Shown:
    """Run `embertide` in a folder, with stderr in a terminal of so many columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "EMBERTIDE_CONFIG": str(folder)}
    command = [sys.executable, "-m", "embertide.server.cli", *words]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=environment,
        cwd=folder,
    ) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                more = os.read(ours, 65_536)
            except OSError:  # all who could write have ended
                break
            if not more:
                break
            said += more
        os.close(ours)
        status = process.wait(timeout_s)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode("utf-8", "replace"))
    return Shown(text.replace("\r", "").splitlines(), status)


def too_wide(lines: list[str], columns: int = 80) -> list[str]:
    """Return the lines that do not fit, but for a word alone, as a path is."""
    return [line for line in lines if len(line) > columns and " " in line.strip()]


def messages(*folders: str) -> Iterator[Message]:
    """Yield what is raised with a text of its own, file by file."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            constants = dict(_constants(tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield from _of_call(place, node.exc, constants)


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the texts that a module gives names to."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = _text(node.value, {})
            if text is not None:
                yield node.targets[0].id, text


def _of_call(place: str, call: ast.Call, constants: dict[str, str]) -> Iterator[Message]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if not (name.endswith("Error") or name in ("invalid", "BadParameter")):
        return
    texts = [text for each in call.args if (text := _text(each, constants)) is not None]
    text = max(texts, key=len, default="")
    if len(text.split()) > 2:
        yield Message(place, name, text)


def _text(node: ast.expr, constants: dict[str, str]) -> str | None:
    def of(part: ast.expr) -> str:
        return _text(part, constants) or "<>"

    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.FormattedValue):
        return of(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return of(node.left) + of(node.right)
    if isinstance(node, ast.IfExp):
        return min(of(node.body), of(node.orelse), key=len)
    return None
