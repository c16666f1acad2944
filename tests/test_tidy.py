"""The repository's own rules: what a reviewer would otherwise say each time."""

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

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
    assert folders == TOP_LEVEL, f"folders that are not known, or gone: {folders ^ TOP_LEVEL}"


def test_every_place_names_the_same_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.compile(
        r"(?:project\(embertide VERSION |newTag: |embertide-|(?:trainer|control|node|\$image):)"
        r"(\d+\.\d+\.\d+)"
    )
    places = [ROOT / "CMakeLists.txt", *(ROOT / "docs").glob("*.md"), *(ROOT / "k8s").rglob("*.*")]
    found = {
        str(path.relative_to(ROOT)): versions
        for path in places
        if path.is_file() and (versions := set(named.findall(path.read_text())))
    }
    assert len(found) > 10, found
    others = {name: each for name, each in found.items() if each != {project["version"]}}
    assert not others, f"not of release {project['version']}: {others}"
    assert f"\n## {project['version']}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_code_says_what_it_is_and_stays_readable() -> None:
    faults = []
    for path, name in zip(CODE, _names(CODE), strict=True):
        lines = path.read_text().splitlines()
        if lines and not lines[0].startswith(("//", '"""', "#")):
            faults.append(f"{name} does not open with what it is")
        faults += [
            f"{name}:{i} is over 100 columns" for i, n in enumerate(lines, 1) if len(n) > 100
        ]
    assert not faults, "\n".join(faults)


# A comment that begins so leaves its subject to be guessed; write "The model's id.", not "Of the
# model.".
RIDDLE = re.compile(r"(?:#:?|//+)? ?(Of|Whose|What|How many|How much) [a-z`]")


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each comment and docstring of a file of Python or C++."""
    if path.suffix != ".py":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := re.search(r"(?:^|\s)(//.*)", line):
                yield number, found[1]
        return
    with tokenize.open(path) as file:
        text = file.read()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)


def test_comments_name_their_subject_first() -> None:
    faults = [
        f"{name}:{line} begins with {found[1]!r}: begin with what it is about"
        for path, name in zip(CODE, _names(CODE), strict=True)
        if path.suffix != ".proto"
        for line, text in _comments(path)
        if (found := RIDDLE.match(text))
    ]
    assert not faults, "\n".join(faults)


def test_nothing_unfinished_is_hidden() -> None:
    # Spelled in two parts, so that this file passes its own test.
    unfinished = re.compile("|".join(["FIX" + "ME", "TO" + "DO", "XX" + "X"]))
    found = _names([path for path in CODE if unfinished.search(path.read_text())])
    assert not found, f"unfinished work belongs into an issue: {found}"


def test_no_message_tells_to_delete_what_can_still_be_used() -> None:
    # Spelled in two parts, as above.
    text = re.compile(
        '"[^"\n]*(empty (fol' + "der|directory)|or rem" + "ove it|del" + "ete (it|the))"
    )
    product = [path for path in CODE if {"trainer", "server", "backend_cpp"} & {*path.parts}]
    found = _names([path for path in product if text.search(path.read_text())])
    assert not found, f"a message tells to delete what can still be used: {found}"


def test_no_file_is_named_for_nothing() -> None:
    vague = re.compile(r"(^|_)(utils?|helpers?|managers?|misc)\.")
    found = [name for name in _names(FILES) if vague.search(Path(name).name)]
    assert not found, f"a file's name says nothing of it: {found}"


def test_packages_import_one_way() -> None:
    never = (
        ("trainer", "embertide.server"),
        ("server", "embertide.trainer"),
        ("library/client", "embertide.server"),
        ("library/client", "embertide.trainer"),
        ("library/_common", "embertide.client"),
        ("library/_common", "embertide.server"),
        ("library/_common", "embertide.trainer"),
    )
    faults = []
    for package, other in never:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Import | ast.ImportFrom):
                    continue
                names = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                )
                faults += [
                    f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"
                    for name in names
                    if name.startswith(other)
                ]
    assert not faults, "\n".join(faults)


# How a terminal is written to past embertide._common.terminal, which shows names as data.
PRINTING = re.compile(
    r"(?<![\w.])print\(|\b(typer|click)\.(echo|secho)\b|\bsys\.std(out|err)\.(write|buffer)\b"
    r"|\brich\.(print|console|table|text|markup)\b|\brich\.progress\.(Progress|TextColumn|track)\("
    r"|^from rich|\bfrom_markup\b",
    re.MULTILINE,
)
# Files of the command's start, where the packages of the printer may be missing.
PRINTERS = {"library/_common/terminal.py", "library/_common/quoting.py", "server/cli/__init__.py"}


def test_what_is_printed_is_shown_as_data() -> None:
    product = [
        p for p in FILES if p.suffix == ".py" and {"trainer", "server", "library"} & {*p.parts}
    ]
    past = [
        f"{name}: {found[0]}"
        for path, name in zip(product, _names(product), strict=True)
        if name.split("/")[0] in ("trainer", "server", "library") and name not in PRINTERS
        for found in PRINTING.finditer(_code(path))
    ]
    remedy = "use say, print_json, Table and show_table of embertide._common.terminal"
    assert not past, "\n".join([*past, remedy])


def test_commands_that_are_told_can_be_pasted_into_a_shell() -> None:
    """Names in them are quoted: a folder may be called `out's`, and a name may be anybody's."""
    unquoted = []
    for path, name in zip(FILES, _names(FILES), strict=True):
        if path.suffix != ".py" or name.split("/")[0] not in ("library", "server", "trainer"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr):
                continue
            told = ""
            for part in node.values:
                if isinstance(part, ast.Constant):
                    told += str(part.value)
                elif not isinstance(part, ast.FormattedValue):
                    continue
                elif re.search(r"\bembertide [a-z][^`]*$", told) and not (
                    part.format_spec or ast.unparse(part.value).startswith("shlex.")
                ):
                    unquoted.append(f"{name}:{node.lineno}: {ast.unparse(part)}")
    assert unquoted == []


def _code(path: Path) -> str:
    """A file without its docstrings and comments."""
    return ast.unparse(_Bare().visit(ast.parse(path.read_text())))


class _Bare(ast.NodeTransformer):
    """Takes out texts that stand alone: docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Expr(ast.Constant(...)) if text else node


def test_only_the_triton_folder_knows_triton() -> None:
    faults = [
        name
        for path, name in zip(CODE, _names(CODE), strict=True)
        if name.startswith("backend_cpp/") and path.suffix in {".cc", ".h"}
        if not name.startswith("backend_cpp/triton/") and "TRITONBACKEND_" in path.read_text()
    ]
    assert not faults, f"TRITONBACKEND_ outside backend_cpp/triton: {faults}"
