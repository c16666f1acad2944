"""Images: what their recipes share, how a trainer's pod ends, and that they build.

Building takes minutes and a network, so it is done only when asked for:
`EMBERTIDE_IMAGES=1 pytest tests/k8s/test_images.py`, with buildah installed. A machine that reaches
no registry names a base image of its own in EMBERTIDE_BASE_IMAGE.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from installed import as_in_the_container

from embertide.server.adapters.installation import find_installation
from embertide.server.adapters.triton import find_backends

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = sorted((ROOT / "k8s" / "images").glob("*.Dockerfile"))
NAMES = [path.name.removesuffix(".Dockerfile") for path in RECIPES]
BUILD_TIMEOUT_S = 1_800


def packages_of(*files: Path) -> subprocess.CompletedProcess[str]:
    """Run the script by which an image knows what its libraries need."""
    return subprocess.run(
        [ROOT / "k8s" / "images" / "packages.sh", *files],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def wheels_server() -> Path:
    wheel = importlib.metadata.distribution("nvidia-pytriton")
    return Path(str(wheel.locate_file("pytriton/tritonserver/bin/tritonserver")))


def test_there_is_a_recipe_for_each_image() -> None:
    assert NAMES == ["control", "node", "trainer"]


def test_images_share_their_first_stage_as_a_cache() -> None:
    texts = [path.read_text() for path in RECIPES]
    first = [text[text.index("\nARG BASE") : text.index("--wheel-dir /wheels .")] for text in texts]
    assert len(set(first)) == 1


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_images_run_as_the_user_of_the_manifests(path: Path) -> None:
    assert "USER 10001:10001" in path.read_text()


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_images_install_by_hash_and_take_a_base_by_digest(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    assert {line.split()[1] for line in text.splitlines() if line.startswith("FROM")} <= {
        *("${BASE}", "build"),
    }
    installs = [each.strip() for each in re.findall(r"pip (?:install|wheel)([^&\n]*)", text)]
    assert installs
    for install in installs:
        assert (
            "--require-hashes -r requirements/" in install
            or install.endswith("-r requirements/torch.txt")
            or "--no-deps" in install
        ), install
    assert f"requirements/{path.name.removesuffix('.Dockerfile')}.txt" in text


def test_everything_that_a_build_reads_is_in_its_context() -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    paths = [line[1:] for line in allowed if line.startswith("!")]
    assert "*" in allowed
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_an_image_has_the_packages_that_its_libraries_load() -> None:
    """Package names are those of this machine's release; NVIDIA's container has others."""
    done = packages_of(find_backends() / "embertide" / "libtriton_embertide.so", Path("/bin/true"))
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split())
    # As long as the backend speaks gRPC, reads Redis and drives, and is C++.
    for library in ("libgrpc++", "libhiredis", "libprotobuf", "libaio", "liburing", "libstdc++"):
        assert any(name.startswith(library) for name in found), (library, found)
    known = subprocess.run(["dpkg-query", "-W", *found], capture_output=True, check=False)
    assert known.returncode == 0, known.stderr


def test_an_image_whose_libraries_lack_one_is_not_built(tmp_path: Path) -> None:
    lacks = tmp_path / "tritonserver"
    shutil.copy(wheels_server(), lacks)  # away from its libraries
    done = packages_of(lacks)
    assert done.returncode == 1
    assert "libtritonserver" in done.stderr
    assert not done.stdout


def starts(environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the script by which a node's image proves that it can serve."""
    return subprocess.run(
        [sys.executable, ROOT / "k8s" / "images" / "starts.py"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "EMBERTIDE_BACKENDS": str(find_backends()), **environment},
    )


def test_a_nodes_image_is_built_only_if_its_servers_start(tmp_path: Path) -> None:
    recipe = (ROOT / "k8s" / "images" / "node.Dockerfile").read_text()
    assert "&& python /opt/embertide/starts.py\n" in recipe[recipe.rindex("\nFROM") :]
    for named in ({}, {"EMBERTIDE_TRITON": str(as_in_the_container(tmp_path / "tritonserver"))}):
        done = starts(named)
        assert done.returncode == 0, done.stderr
        assert "embertide_server with" in done.stdout
        assert done.stdout.split()[-1] == find_installation().version()


def test_a_nodes_image_whose_server_does_not_start_is_not_built(tmp_path: Path) -> None:
    server = tmp_path / "embertide_server"
    server.write_text("#!/bin/sh\necho 'embertide_server: no such core' >&2; exit 1\n")
    server.chmod(0o755)
    done = starts({"EMBERTIDE_SERVER": str(server)})
    assert done.returncode == 1
    assert "no such core" in done.stderr


def test_the_nodes_base_may_bring_the_server() -> None:
    """Read, not built: no registry of NVIDIA's can be reached from here."""
    text = (ROOT / "k8s" / "images" / "node.Dockerfile").read_text()
    last = text[text.rindex("\nFROM") :]
    assert "\nARG TRITON\n" in last, "without a default: the wheel's server"
    assert re.search(r"^ENV .*EMBERTIDE_TRITON=\$TRITON$", last, re.MULTILINE)
    assert "\nENTRYPOINT []\n" in last, "NVIDIA's container has one, the manifests expect none"
    assert "$(cat /opt/embertide/packages)" in last


@pytest.mark.parametrize(
    ("worker", "code"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(2)", 2),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + 9),
    ],
    ids=["success", "configuration", "killed"],
)
def test_a_trainer_pod_ends_with_its_workers_exit_code(
    worker: str, code: int, tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(worker)
    launch = [sys.executable, "-m", "embertide.trainer.sync.launch", "--nnodes=1"]
    rendezvous = ["--rdzv-endpoint=localhost:0", "--rdzv-id=test"]
    environment = {**os.environ, "JOB_COMPLETION_INDEX": "0"}
    done = subprocess.run(
        [*launch, *rendezvous, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == code, done.stderr


@pytest.mark.skipif(
    not os.environ.get("EMBERTIDE_IMAGES"), reason="takes minutes: EMBERTIDE_IMAGES=1 asks for it"
)
@pytest.mark.skipif(shutil.which("buildah") is None, reason="buildah is not installed")
@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_an_image_builds(path: Path) -> None:
    base = os.environ.get("EMBERTIDE_BASE_IMAGE")
    name = f"localhost/embertide/{path.name.removesuffix('.Dockerfile')}:test"
    command = ["buildah", "build", "--layers", "--isolation", "chroot", "-f", str(path), "-t", name]
    command += [f"--build-arg=BASE={base}"] if base else []
    done = subprocess.run(
        [*command, str(ROOT)], capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-4_000:]
