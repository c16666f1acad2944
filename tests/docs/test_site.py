"""The site's navigation, mkdocs.yml, against the pages that there are; `make site` builds it."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


class _Loader(yaml.SafeLoader):
    """A loader for mkdocs.yml, whose tags are for MkDocs."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def _named(nav: list[Any]) -> list[str]:
    """The pages and folders of a navigation, in its order."""
    places: list[str] = []
    for entry in nav:
        ((_, what),) = entry.items()
        places += _named(what) if isinstance(what, list) else [what]
    return places


def test_each_page_is_in_the_navigation_once() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Loader)
    named = _named(config["nav"])
    assert len(named) == len(set(named))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    missing = pages - set(named)
    assert not missing, f"add {sorted(missing)} to nav in mkdocs.yml"
    folders = {f"{path.parent.name}/" for path in (ROOT / "docs").glob("*/*.md")}
    assert folders <= set(named)
    examples = {f"examples/{page.parent.name}.md" for page in ROOT.glob("examples/*/README.md")}
    assert len(examples) == 3
    assert examples <= set(named)
    added = (ROOT / ".ci" / "site.py").read_text()
    assert not [place for place in examples if f'"{place}": ' not in added]


def test_a_folder_opens_with_a_page_that_names_the_others() -> None:
    for index in (ROOT / "docs").glob("*/README.md"):
        text = index.read_text()
        others = {path.name for path in index.parent.glob("*.md")} - {"README.md"}
        missing = [name for name in sorted(others) if f"]({name})" not in text]
        assert not missing, f"{index.relative_to(ROOT)} does not link to {missing}"
