"""Bills of materials in CycloneDX 1.6 (JSON): of the wheel and its requirements, and of an image.

    python k8s/images/sbom.py wheel build/sbom/wheel.json
    python k8s/images/sbom.py image ROOT build/sbom/node.json

ROOT is a folder with the files of an image (`buildah mount`, or `docker export`, unpacked). Nothing
in it is run. Python packages are read by cyclonedx-py, Debian's from dpkg's own records.
"""

import argparse
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from debian.copyright import Copyright, MachineReadableFormatError, NotMachineReadableError
from inside import parts
from packageurl import PackageURL
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON_TIMEOUT_S = 120
DPKG_FIELDS = ("Package", "Version", "Architecture", "source:Package", "source:Version")


class SbomError(Exception):
    """The thing to describe is missing."""


def python_packages(python: Path, names: set[str] | None = None) -> Bom:
    """The packages that an interpreter would import, their licences and what needs what.

    Args:
        python: an interpreter, or the folder of a virtual environment.
        names: the packages to keep, in their canonical form; None keeps all.

    Raises:
        SbomError: there is no such interpreter, or embertide is not among its packages.
    """
    command = [sys.executable, "-m", "cyclonedx_py", "environment", str(python)]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--spec-version", "1.6"]
    command += ["--no-validate"]  # the whole is, when it is written
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PYTHON_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SbomError(f"{python}: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    if not found.get("components"):
        raise SbomError(
            f"{python} finds no package: its Python is not of the version of this one's"
        )
    if names is not None:
        kept = [each for each in found["components"] if canonicalize_name(each["name"]) in names]
        left_out = names - {canonicalize_name(each["name"]) for each in kept}
        if left_out:
            print(
                f"left out, as not installed here: {', '.join(sorted(left_out))}", file=sys.stderr
            )
        refs = {each["bom-ref"] for each in (*kept, found["metadata"]["component"])}
        found["components"] = kept
        found["dependencies"] = [
            {"ref": each["ref"], "dependsOn": [r for r in each.get("dependsOn", []) if r in refs]}
            for each in found["dependencies"]
            if each["ref"] in refs
        ]
    bom: Bom = Bom.from_json(found)  # type: ignore[attr-defined]
    return bom


def debian_packages(root: Path) -> Iterator[Component]:
    """The Debian packages under a root, each with the licences that its copyright file names.

    Licences have Debian's names (GPL-2+). A package whose file is prose has none, and the property
    embertide:licence says where to read it.

    Raises:
        SbomError: dpkg has no record there.
    """
    records = root / "var" / "lib" / "dpkg"
    if not (records / "status").is_file():
        raise SbomError(f"{root} has no {records.relative_to(root)}/status: not a Debian root")
    shown = "\\t".join(f"${{{field}}}" for field in ("db:Status-Status", *DPKG_FIELDS)) + "\\n"
    done = subprocess.run(
        ["dpkg-query", f"--admindir={records}", "--show", f"--showformat={shown}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    distribution = _distribution(root)
    for line in done.stdout.splitlines():
        status, name, version, architecture, source, source_version = line.split("\t")
        if status != "installed":
            continue
        place = f"usr/share/doc/{name}/copyright"
        licences = debian_licences(root / place)
        yield Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=version,
            bom_ref=f"deb:{name}:{architecture}={version}",
            licenses=licences,
            properties=[
                Property(name="embertide:source", value=f"{source}={source_version}"),
                *([] if licences else [Property(name="embertide:licence", value=f"/{place}")]),
            ],
            purl=PackageURL(
                type="deb",
                namespace="debian",
                name=name,
                version=version,
                qualifiers={"arch": architecture, "distro": distribution},
            ),
        )


def _distribution(root: Path) -> str:
    """The name and number of the release, as package URLs have it: debian-12."""
    release = root / "etc" / "os-release"
    pairs = dict(line.split("=", 1) for line in release.read_text().splitlines() if "=" in line)
    return "-".join(pairs[key].strip('"') for key in ("ID", "VERSION_ID"))


def debian_licences(path: Path) -> list[License]:
    """The licences that a machine-readable copyright file gives to files, without repeats."""
    names = set()
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for paragraph in Copyright(file, strict=False).all_files_paragraphs():
                licence: Any = paragraph.license  # of a class that its stubs do not know
                if licence:
                    names.add(re.sub(r"\s+", " ", licence.synopsis).strip())
    except (OSError, NotMachineReadableError, MachineReadableFormatError, ValueError):
        return []
    licences = LicenseFactory()
    return [licences.make_with_name(name) for name in sorted(names - {""})]


def inside(names: set[str] | None = None, place: Path | None = None) -> Iterator[Component]:
    """Yield the components inside the installed wheels (inside.py), with wheel and evidence.

    Args:
        names: the wheels, in their canonical form; None: all.
        place: the folder of packages; None: this interpreter's.
    """
    for part in parts(names, None if place is None else [str(place)]):
        yield Component(
            type=ComponentType.LIBRARY,
            name=part.name,
            version=part.version,
            bom_ref=f"inside:{part.wheel}:{part.file}:{part.name}={part.version}",
            properties=[
                Property(name="embertide:in", value=f"{part.wheel} {part.file}"),
                Property(name="embertide:evidence", value=part.evidence),
            ],
            purl=PackageURL(type="generic", name=part.name, version=part.version),
        )


def wheel() -> Bom:
    """The wheel and what its extras `train` and `serve` install, of the locked versions."""
    files = [ROOT / "requirements" / f"{name}.txt" for name in ("node", "trainer", "torch")]
    locked: set[str] = {
        canonicalize_name(name)
        for file in files
        for name in re.findall(r"^([\w.-]+)==", file.read_text(), re.MULTILINE)
    }
    bom = python_packages(Path(sys.executable), locked)
    for each in inside(locked):
        bom.components.add(each)
    return bom


def image(root: Path) -> Bom:
    """An image, from its files: Python packages of /opt/embertide and their insides, Debian's."""
    bom = python_packages(root / "opt" / "embertide")
    for each in debian_packages(root):
        bom.components.add(each)
    for place in (root / "opt" / "embertide" / "lib").glob("python3*/site-packages"):
        for each in inside(place=place):
            bom.components.add(each)
    return bom


def invalid(text: str) -> str | None:
    """Return why the schema of CycloneDX 1.6 refuses a document; None if it accepts it."""
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return None if error is None else str(error)


def write(bom: Bom, path: Path) -> None:
    """Write a document that is valid by the schema.

    Raises:
        SbomError: it is not.
    """
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    if fault := invalid(text):
        raise SbomError(f"{path} would not be valid: {fault}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("wheel").add_argument("out", type=Path)
    of_image = commands.add_parser("image")
    of_image.add_argument("root", type=Path)
    of_image.add_argument("out", type=Path)
    given = parser.parse_args()
    logging.getLogger("debian.copyright").setLevel(logging.CRITICAL)  # each old format's name
    try:
        bom = wheel() if given.command == "wheel" else image(given.root)
        write(bom, given.out)
    except SbomError as error:
        sys.exit(f"sbom: {error}")
    print(f"{given.out}: {len(bom.components)} packages")


if __name__ == "__main__":
    main()
