"""Lists the packages that pins hold back, their age, and known holes inside wheels: `make pins`.

Dates are those of requirements/pins.toml, of the wheels themselves: nothing is asked of an index.
Known holes are a list in the same file, with the date on which it was written; it covers what it
says and no more. The exit status is 1 with --strict where something is listed.
"""

import argparse
import datetime
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "k8s" / "images"))

from inside import Part, parts  # noqa: E402 - a folder of scripts

OLD_DAYS = 365
LOCKS = ("node", "trainer", "build")


def held_back(project: Mapping[str, Any]) -> set[str]:
    """Return the requirements of pyproject.toml that hold a package back, normalized."""
    extras = project["project"]["optional-dependencies"].values()
    lines = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    lines += [line for extra in extras for line in extra]
    wanted = [Requirement(line) for line in lines]
    return {
        f"{each.name}{each.specifier}"
        for each in wanted
        if any(bound.operator in ("==", "<", "<=", "~=") for bound in each.specifier)
    }


def locked_versions(files: Iterable[Path]) -> dict[str, str]:
    """Return the version of each package that lock files name."""
    return {
        canonicalize_name(name): version
        for file in files
        for name, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", file.read_text(), re.MULTILINE)
    }


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def holes_of(
    found: Iterable[Part], holes: Mapping[str, Any]
) -> list[tuple[Part, Mapping[str, Any]]]:
    """Return the known holes of parts, by what the parts say of their versions."""
    listed = []
    for part in found:
        version = _version(part.version)
        if version is None or part.evidence == "file name":
            continue  # a number of a file may be the interface's
        listed += [
            (part, hole)
            for hole in holes["known"]
            if hole["part"] == part.name
            and Version(hole["from"]) <= version < Version(hole["repaired"])
        ]
    return listed


def main() -> int:
    """Print both lists."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strict", action="store_true", help="fail where something is listed")
    given = parser.parse_args()
    stated = tomllib.loads((ROOT / "requirements" / "pins.toml").read_text())
    locked = locked_versions(ROOT / "requirements" / f"{name}.txt" for name in LOCKS)
    today = datetime.datetime.now(datetime.UTC).date()
    old = 0
    print("Pins: the version that is locked, when its wheel was built, why it is held")
    for pin in stated["pin"]:
        name = canonicalize_name(Requirement(pin["requirement"]).name)
        built = pin.get("built")
        days = (today - built).days if built else None
        too_old = days is not None and days > OLD_DAYS
        old += too_old
        mark = "OLDER THAN A YEAR" if too_old else "" if built else "no date known"
        print(f"  {pin['requirement']}: {locked.get(name, '-')}, {built or '?'} {mark}".rstrip())
        print(f"    {pin['reason']} (looked at {pin['looked']})")
    holes = stated["holes"]
    listed = holes_of(parts(set(locked)), holes)
    print(
        f"Known holes of what wheels bring inside, of a list written on {holes['written']} that "
        f"covers {', '.join(holes['looked_into'])}:"
    )
    for part, hole in listed:
        where = f"{part.name} {part.version} ({part.evidence}) in {part.wheel}, {part.file}"
        print(f"  {where}: repaired in {hole['repaired']}")
        print(f"    {', '.join(hole['ids'])}: {hole['what']}")
    print(f"{old} pins older than a year, {len(listed)} entries of known holes")
    return 1 if given.strict and (old or listed) else 0


if __name__ == "__main__":
    sys.exit(main())
