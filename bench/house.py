"""How large the house is, beside an earlier commit: lines, rooms, classes, what tasks change.

`python -m bench.house --before 1453eff` counts both trees by the same rules, as git has them, and
prints one table. Lines are those of files, blank ones and comments among them; tests are counted
by themselves, and files that a tool writes (requirements, the golden files) are left out.

Claims: C.1 the table of both trees (lines by folder, what is largest, parameters, public names,
files that docs/ARCHITECTURE.md names on the way of a key, a row, a move and an event) and the way
that imports run, C.2 lines in all, C.3 rooms, C.4 what is largest in a node and a store, and
friends, C.5 files that each task of docs/extending.md changes.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import parts, report
from bench.servers import ROOT, BenchError

_PRODUCT = ("backend_cpp", "trainer", "server", "library", "proto", "k8s", "examples", ".ci")
_FOLDERS = (*_PRODUCT, "bench", "tests", "docs")
_CODE = {".py", ".cc", ".h", ".cu", ".cuh", ".proto", ".yaml", ".sh", ".cmake", ".txt", ".toml"}
_TARGETS = {
    ("product and benchmarks", "lines"): 112_000,
    ("bench", "lines"): 12_000,
    ("trainer", "rooms at its root"): 12,
}

_JOURNEYS = {
    "a key": "A lookup's journey",
    "a row of another node": "A key of another node",
    "a move": "A bucket's move",
    "an event": "A version's journey",
}

Counted = dict[tuple[str, str], float]  # by case and metric
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _lines(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def _is_test(path: Path) -> bool:
    return path.stem.endswith("_test") or path.name.startswith("test_")


def _folders(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yield each folder, its lines of code, and those of tests among its files."""
    for name in _FOLDERS:
        suffixes = {".md"} if name == "docs" else _CODE
        files = [each for each in (root / name).rglob("*") if each.suffix in suffixes]
        files = [each for each in files if each.is_file() and not each.is_symlink()]
        tests = [each for each in files if _is_test(each)] if name == "backend_cpp" else []
        kept = [each for each in files if each not in tests and "golden" not in each.parts]
        yield name, sum(map(_lines, kept)), sum(map(_lines, tests))


def _parameters(function: _Function) -> int:
    taken = function.args
    return len(taken.posonlyargs) + len(taken.args) + len(taken.kwonlyargs)


def _python(root: Path, folder: str) -> Counted:
    """Return the largest file, class and function of a folder, and the most parameters."""
    counted: Counted = {}

    def note(metric: str, value: float) -> None:
        key = (folder, metric)
        counted[key] = max(counted.get(key, 0), value)

    for path in (root / folder).rglob("*.py"):
        note("largest file", _lines(path))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                note("largest class", (node.end_lineno or 0) - node.lineno + 1)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = (node.end_lineno or 0) - node.body[0].lineno + 1
                note("largest function, its parameters aside", body)
                note("most parameters of a function", _parameters(node))
    return counted


def _cpp(root: Path, folder: str) -> Counted:
    files = [each for each in (root / folder).rglob("*") if each.suffix in {".cc", ".h"}]
    files = [each for each in files if not _is_test(each)]
    friends = re.compile(r"^\s*friend ", re.MULTILINE)
    headers = [each for each in files if each.suffix == ".h"]
    return {
        (folder, "largest file"): max(map(_lines, files)),
        (folder, "largest header"): max(map(_lines, headers)),
        (folder, "friends"): sum(len(friends.findall(each.read_text())) for each in files),
    }


def _rooms(root: Path) -> int:
    """Return how many files and folders stand at the trainer's root."""
    left_out = {"__init__.py", "__main__.py", "py.typed"}
    found = [each for each in (root / "trainer").iterdir() if each.name not in left_out]
    return sum(each.suffix == ".py" or each.is_dir() for each in found)


def _public_names(root: Path) -> int:
    """Return how many names are in `__all__` of the library's public modules."""
    modules = [*(root / "library").glob("*.py"), *(root / "library").glob("[!_]*/__init__.py")]
    count = 0
    for path in modules:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                count += len(ast.literal_eval(node.value))
    return count


def _sections(page: Path) -> Iterator[tuple[str, str]]:
    """Yield title and text of each section of a page; none, if there is no page."""
    for section in page.read_text(encoding="utf-8").split("\n## ")[1:] if page.exists() else ():
        title, _, text = section.partition("\n")
        yield title, text


def _journeys(root: Path) -> Counted:
    """Return how many files of code docs/ARCHITECTURE.md names on each way through the parts."""
    found = dict(_sections(root / "docs" / "ARCHITECTURE.md"))
    link = re.compile(r"\]\(\.\./([^)]+\.(?:h|cc|py))\)")
    return {
        (way, "files on its way"): len(set(link.findall(found[section])))
        for way, section in _JOURNEYS.items()
        if section in found
    }


def _tasks(root: Path) -> Counted:
    """Return how many files each task of docs/extending.md changes, new ones aside."""
    counted: Counted = {}
    for task, text in _sections(root / "docs" / "extending.md"):
        changed = set(re.findall(r"^\| [^|\n]*\[[^]]+\]\(([^)]+)\)", text, re.MULTILINE))
        counted[task[0].lower() + task[1:], "files changed"] = len(changed)
    return counted


def count(root: Path) -> Counted:
    """Count a tree."""
    counted: Counted = {}
    product = 0
    for name, lines, tests in _folders(root):
        counted[name, "lines"] = lines
        product += lines if name in (*_PRODUCT, "bench") else 0
        if tests:
            counted[f"{name}, its tests", "lines"] = tests
    counted["product and benchmarks", "lines"] = product
    for folder in ("server", "trainer", "library", "bench"):
        counted |= _python(root, folder)
    counted |= _cpp(root, "backend_cpp/node")
    counted |= _cpp(root, "backend_cpp/store")
    counted["trainer", "rooms at its root"] = _rooms(root)
    counted["library", "public names"] = _public_names(root)
    return counted | _journeys(root) | _tasks(root)


def _tree(revision: str, folder: Path) -> Path:
    """Write the tree of a commit into a folder."""
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        raise BenchError(f"git has no {revision!r}: {archive.stderr.decode(errors='replace')}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def _claim(case: str, metric: str) -> str:
    """Return the requirement that a count answers, of this tree or beside another."""
    if (case, metric) in _TARGETS or metric == "files changed":
        return {"lines": "C.2", "rooms at its root": "C.3"}.get(metric, "C.5")
    return "C.4" if case.startswith("backend_cpp/") else "C.1"


def _imports() -> report.Row:
    """Return whether imports run one way in this tree, as pyproject.toml says which."""
    said = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if (found := re.search(r"(\d+) kept, (\d+) broken", said.stdout)) is None:
        raise BenchError(f"lint-imports said: {said.stdout[-500:]}{said.stderr[-500:]}")
    name = ("trainer, server, library", "contracts of imports kept", "count")
    kept, broken = map(int, found.groups())
    return report.measure(name, [kept], better="higher", target=kept + broken, claim="C.1")


def _measure(options: argparse.Namespace) -> Iterator[report.Row]:
    """Yield a row for each count: ours now, the peer before; a target is of ours alone."""
    with tempfile.TemporaryDirectory() as now, tempfile.TemporaryDirectory() as then:
        ours, before = count(_tree("HEAD", Path(now))), count(_tree(options.before, Path(then)))
    for (case, metric), value in ours.items():
        unit = "lines" if "line" in metric or "largest" in metric else "count"
        target, claim = _TARGETS.get((case, metric), 0), _claim(case, metric)
        if target or metric == "files changed":
            name = (case, metric, unit)
            yield report.measure(name, [value], better="lower", target=target, claim=claim)
        former = before.get((case, metric), 0)
        if former:
            name = (case, f"{metric}, beside {options.before}", unit)
            yield report.compare(
                name,
                [value],
                [former],
                peer_name=options.before,
                better="lower",
                target=0,
                claim=claim,
            )
    yield _imports()


if __name__ == "__main__":
    parser = parts.options("house", __doc__)
    parser.add_argument("--before", required=True, help="a commit or tag of git")
    parts.command("The house", _measure, parser)
