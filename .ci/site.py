"""Adds to mkdocs.yml: pages from elsewhere, generated pages, and links out of docs/.

A hook of MkDocs. Pages are written for a forge, so a link may lead to any file of the repository.
"""

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# Pages that stand where a forge looks for them, by their place on the site.
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security-policy.md": "SECURITY.md",
    "examples/ads.md": "examples/ads/README.md",
    "examples/shop.md": "examples/shop/README.md",
    "examples/ratings.md": "examples/ratings/README.md",
}
# The public API (docs/client.md, docs/library.md) and the settings of a run: a page's title, and
# things with the members of each that are public, or what filters them.
REFERENCE: dict[str, tuple[str, dict[str, str]]] = {
    "client": ("The client", {"embertide.client": ""}),
    "library": (
        "Train and serve",
        {
            "embertide.training": "members: [train, Trained]",
            "embertide.serving": "members: [serve, Served]",
        },
    ),
    "config": (
        "Settings of a run",
        {"embertide.trainer.config": "filters: ['!^[a-z_]', '!^[A-Z_]+$']"},
    ),
    "embedding": (
        "Tables in torch",
        {
            "embertide.trainer.embedding.store.EmbeddingStore": (
                "members: [forward, pool, bring, step, stats]"
            ),
            "embertide.trainer.data.bags.Bags": "members: [of]",
            "embertide.trainer.embedding.collection.EmbeddingBagCollection": (
                "members: [forward, step, load]"
            ),
        },
    ),
}
PROTOS = ROOT / "build" / "protos" / "sabledocs_output"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the folders of the navigation, and lead links through `_Links`."""
    config.nav = _filled(config.nav or [])
    config.markdown_extensions.append(_LINKS)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand outside docs/, the Python reference and that of the protos."""
    for place, name in ELSEWHERE.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    for name, (title, things) in REFERENCE.items():
        body = [f"# {title}\n"]
        for thing, option in things.items():
            body.append(f"::: {thing}\n" + (f"    options: {{{option}}}\n" if option else ""))
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(body)))
    if not PROTOS.is_dir():
        raise PluginError(f"{PROTOS} is missing: run `make site`, which makes it")
    for path in PROTOS.rglob("*"):
        if path.is_file():
            place = f"protos/{path.relative_to(PROTOS)}"
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tell `_Links` whose links come next."""
    place = page.file.src_uri
    _LINKS.links.page = ELSEWHERE.get(place, f"docs/{place}")
    _LINKS.links.place = place
    _LINKS.links.source = f"{config.repo_url.rstrip('/')}/blob/main/" if config.repo_url else None
    return markdown


def _filled(nav: list[Any]) -> list[Any]:
    """The navigation, with the pages of a folder where it names the folder."""
    filled: list[Any] = []
    for entry in nav:
        ((title, what),) = entry.items()
        if isinstance(what, list):
            filled.append({title: _filled(what)})
        elif what == "reference/":
            filled.append({title: [{t: f"reference/{n}.md"} for n, (t, _) in REFERENCE.items()]})
        elif what.endswith("/"):
            pages = sorted((ROOT / "docs" / what).glob("*.md"), key=_first_is_the_index)
            filled.append({title: [f"{what}{path.name}" for path in pages]})
        else:
            filled.append(entry)
    return filled


def _first_is_the_index(path: Path) -> tuple[bool, str]:
    return path.name != "README.md", path.name


class _Links(Treeprocessor):
    """Leads links from a page's place in the repository on to their places on the site."""

    page = place = ""
    source: str | None = None

    def run(self, root: Element) -> None:
        for element in root.iter():
            name = {"a": "href", "img": "src"}.get(element.tag, "")
            target = element.get(name, "")
            if name and target and not re.match(r"[a-z]+:|#", target):
                self._lead(element, name, target)

    def _lead(self, element: Element, name: str, target: str) -> None:
        path, _, anchor = target.partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(self.page), unquote(path)))
        place = _on_site(there)
        if place is not None:
            path = posixpath.relpath(place, posixpath.dirname(self.place) or ".")
            element.set(name, f"{path}#{anchor}" if anchor else path)
        elif self.source is not None:
            element.set(name, self.source + there)
        else:  # no forge to lead to: the text alone, which names the file
            element.tag = "span"
            del element.attrib[name]
            element.set("title", there)


def _on_site(there: str) -> str | None:
    """The place on the site of a path of the repository, if it has one."""
    for place, name in ELSEWHERE.items():
        if there == name:
            return place
    path = PurePosixPath(there)
    if path.parts[:1] != ("docs",) or not (ROOT / path).exists():
        return None
    page = path / "README.md" if (ROOT / path).is_dir() else path
    return str(page.relative_to("docs"))


class _LinksExtension(Extension):
    """After inline Markdown became links, before MkDocs looks where they lead."""

    def extendMarkdown(self, md: Markdown) -> None:
        self.links.md = md
        md.treeprocessors.register(self.links, "repository_links", 5)

    def __init__(self) -> None:
        super().__init__()
        self.links = _Links()


_LINKS = _LinksExtension()
