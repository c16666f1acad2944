"""The public API: pages, examples and files that commands write import nothing else of ours.

docs/library.md ("library.md") lists the modules; a name is public if it is in `__all__`.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks, parse
from typer.testing import CliRunner

import embertide
from embertide.trainer.__main__ import app
from embertide.trainer.commands.run_file import read_plain

PUBLIC = {
    name: importlib.import_module(name)
    for name in (
        *("embertide", "embertide.client", "embertide.config", "embertide.data", "embertide.nn"),
    )
}
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
# Modules that are also commands.
COMMANDS = ("embertide.trainer", "embertide.trainer.sync.launch")
# Pages for people who change the code, not for those who use it.
OF_THE_SOURCE = ("CHANGELOG.md", "docs/ARCHITECTURE.md", "docs/design/", "docs/results/")


def private(source: str) -> list[str]:
    """Return the private modules of ours that a program imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
            found += [n for n in names if n.split(".")[0] == "embertide" and n not in PUBLIC]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "embertide":
            module = PUBLIC.get(node.module or "")
            public = [] if module is None else module.__all__
            found += [f"{node.module}.{a.name}" for a in node.names if a.name not in public]
    return found


@pytest.mark.parametrize("module", PUBLIC.values(), ids=PUBLIC)
def test_a_public_module_has_what_it_names_and_says_what_it_is(module: object) -> None:
    names = getattr(module, "__all__", [])
    assert list(names) == sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert all(getattr(module, name) is not None for name in names)
    assert (module.__doc__ or "").strip()


def test_the_page_lists_every_module_and_name_of_the_package() -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    for name in PUBLIC:
        assert f"| `{name}` |" in page
    for name in set(embertide.__all__) - {"client", "config", "data", "nn"}:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("page", [each for each in PAGES if not each.startswith("tests/")])
def test_a_page_shows_public_names_alone(page: str) -> None:
    for block in blocks(page):
        if block.language == "python":
            assert private(block.text) == [], block
    if page.startswith(OF_THE_SOURCE) or page == "docs/library.md":
        return
    tokens = [part for token in parse((ROOT / page).read_text()) for part in token.children or []]
    text = " ".join(token.content for token in tokens if token.type == "code_inline")
    named = re.findall(r"(?<![\w.])(embertide(?:\.\w+)+)", text)
    of_ours = [n for n in named if re.match(r"embertide\.(trainer|server|_\w+)\b", n)]
    assert set(of_ours) <= set(COMMANDS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_example_imports_public_names_alone(path: Path) -> None:
    assert private(path.read_text()) == []


def test_files_that_commands_write_import_public_names_alone(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", "--print-config", "news-crossed"])
    assert done.exit_code == 0, done.output
    assert "from embertide.config import" in done.stdout
    assert private(done.stdout) == []
    data, guessed = tmp_path / "clicks.csv", tmp_path / "run.py"
    rows = (f"{n % 7},{n % 5},{n / 9:.2f},{n % 2},{1_750_000_000 + n}" for n in range(300))
    data.write_text("user_id,item_id,price,clicked,time\n" + "\n".join(rows) + "\n")
    done = CliRunner().invoke(app, ["init", str(data), "-o", str(guessed)])
    assert done.exit_code == 0, done.output
    assert private(guessed.read_text()) == []
    assert set(read_plain(guessed.read_text())) == {"run", "source"}


def test_a_private_import_is_found() -> None:
    assert private("import embertide\nfrom embertide.config import RunConfig\nimport numpy") == []
    assert private("from embertide import Client, config, train\nimport embertide.data") == []
    for line, name in (
        ("import embertide.trainer.config", "embertide.trainer.config"),
        ("from embertide.trainer.config import RunConfig", "embertide.trainer.config.RunConfig"),
        ("from embertide import _store", "embertide._store"),
        ("from embertide.config import Codec", "embertide.config.Codec"),
        ("from embertide.client.sync import Client", "embertide.client.sync.Client"),
    ):
        assert private(f"def f():\n    {line}\n") == [name]
