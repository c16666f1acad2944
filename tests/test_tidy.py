"""The repository's own rules: what a reviewer would otherwise say each time."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# typings/ holds links alone, and links are not looked at.
TOP_LEVEL = {
    ".ci",
    "backend_cpp",
    "bench",
    "docs",
    "examples",
    "k8s",
    "library",
    "proto",
    "requirements",
    "server",
    "tests",
    "trainer",
}


def _files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return [path for path in paths if path.is_file() and not path.is_symlink()]


FILES = _files()
CODE = [path for path in FILES if path.suffix in {".py", ".cc", ".h", ".proto", ".cu"}]


def _names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_the_top_level_is_known() -> None:
    folders = {name.split("/")[0] for name in _names(FILES) if "/" in name}
    assert folders == TOP_LEVEL


@pytest.mark.parametrize("path", CODE, ids=_names(CODE))
def test_code_says_what_it_is_and_stays_readable(path: Path) -> None:
    lines = path.read_text().splitlines()
    if lines:
        assert lines[0].startswith(("//", '"""', "#")), "the file does not open with what it is"
    long = [i + 1 for i, line in enumerate(lines) if len(line) > 100]
    assert not long, f"lines over 100 columns: {long}"


@pytest.mark.parametrize("path", CODE, ids=_names(CODE))
def test_nothing_unfinished_is_hidden(path: Path) -> None:
    # Spelled in two parts, so that this file passes its own test.
    unfinished = re.compile("|".join(["FIX" + "ME", "TO" + "DO", "XX" + "X"]))
    assert not unfinished.search(path.read_text())


def test_no_message_tells_to_delete_what_can_still_be_used() -> None:
    # Spelled in two parts, as above.
    text = re.compile(
        '"[^"\n]*(empty (fol' + "der|directory)|or rem" + "ove it|del" + "ete (it|the))"
    )
    product = [path for path in CODE if {"trainer", "server", "backend_cpp"} & {*path.parts}]
    assert not [
        name for path in product for name in _names([path]) if text.search(path.read_text())
    ]


def test_no_file_is_named_for_nothing() -> None:
    vague = re.compile(r"(^|_)(utils?|helpers?|managers?|misc)\.")
    assert not [name for name in _names(FILES) if vague.search(Path(name).name)]


def test_packages_import_one_way() -> None:
    never = (
        ("trainer", "embertide.server"),
        ("server", "embertide.trainer"),
        ("library/client", "embertide.server"),
        ("library/client", "embertide.trainer"),
    )
    for package, other in never:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                assert not [n for n in names if n.startswith(other)], path


def test_what_trainer_and_server_both_have_stays_the_same() -> None:
    """Where neither may import the other, code that both need stands twice."""
    twins = ("trainer/redis_url.py", "server/adapters/redis_url.py")
    bodies = [ast.parse((ROOT / path).read_text()).body[1:] for path in twins]
    assert ast.dump(ast.Module(bodies[0], [])) == ast.dump(ast.Module(bodies[1], []))


def test_only_the_triton_folder_knows_triton() -> None:
    for path in CODE:
        parts = path.relative_to(ROOT).parts
        if path.suffix in {".cc", ".h"} and parts[0] == "backend_cpp" and parts[1] != "triton":
            assert "TRITONBACKEND_" not in path.read_text(), path
