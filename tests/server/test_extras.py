"""Each extra alone: commands need its packages, and name the extra of one that is missing."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# As each is imported, by the name that it is installed by.
MODULES = {
    "confluent-kafka": "confluent_kafka",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "nvidia-pytriton": "pytriton",
    "torch==2.13.0": "torch",
}
LEFT_OUT = r"""
import runpy, sys

class LeftOut:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, LeftOut())
"""


def modules(extra: str) -> set[str]:
    """Return the modules that an extra brings, as they are imported."""
    found = set()
    for line in EXTRAS[extra]:
        name = line.partition("[")[0].partition(">")[0].partition("=")[0]
        found.add(MODULES.get(name, MODULES.get(line, name)).replace("-", "_"))
    return found


EVERYTHING = set().union(
    *(modules(extra) for extra in ("client", "train", "serve", "console", "mlflow"))
)


def with_extra(extra: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python where nothing but an extra is installed."""
    missing = EVERYTHING - modules(extra)
    return subprocess.run(
        [sys.executable, "-c", LEFT_OUT.format(missing=missing) + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def command(extra: str, *words: str) -> subprocess.CompletedProcess[str]:
    code = f"sys.argv = ['embertide', *{words!r}]\nfrom embertide.server.cli import main\nmain()"
    return with_extra(extra, code)


HELP = """
from embertide.server.cli import main
for words in {commands!r}:
    sys.argv = ["embertide", *words, "--help"]
    try:
        main()
    except SystemExit as ended:
        print(words, "ended with", ended.code)
"""


@pytest.mark.parametrize(
    ("extra", "commands"),
    [
        (
            "train",
            ["", "status", "context list", "snapshot show", "doctor", "plan", "reshard", "node"],
        ),
        ("serve", ["", "serve", "control"]),
        ("console", ["", "console", "status", "reshard", "node", "drift", "hot"]),
    ],
)
def test_commands_need_their_own_packages_alone(extra: str, commands: list[str]) -> None:
    words = [each.split() for each in commands]
    done = with_extra(extra, HELP.format(commands=words))
    assert done.returncode == 0, done.stderr
    for each in words:
        assert f"{each} ended with 0" in done.stdout
        assert f"Usage: {' '.join(['embertide', *each])} " in done.stdout


PUBLIC = """
import embertide
print(sys.modules.keys() & {{"torch", "pyarrow", "tritonclient", "typer", "rich"}})
for name in {names!r}:
    try:
        part = __import__("embertide." + name, fromlist=["*"])
        print(name, "has", len(part.__all__) > 2)
    except ImportError as error:
        print(error)
print(sys.modules.keys() & {{"torch"}})
"""


def test_the_client_alone_has_the_package_and_names_what_the_rest_needs() -> None:
    done = with_extra("client", PUBLIC.format(names=["client", "data", "nn"]))
    assert done.returncode == 0, done.stderr
    nothing, client, data, nn, torch = done.stdout.splitlines()
    assert nothing == torch == "set()"
    assert client == "client has True"
    assert re.fullmatch(r"embertide.data needs \w+: pip install 'embertide\[train\]'", data)
    assert nn == "embertide.nn needs torch: pip install 'embertide[train]'"


def test_settings_and_events_load_no_torch() -> None:
    done = with_extra("train", PUBLIC.format(names=["config", "data"]))
    assert done.stdout == "set()\nconfig has True\ndata has True\nset()\n", done.stderr
    client = with_extra("train", PUBLIC.format(names=["client"])).stdout
    assert client.splitlines()[1].endswith("needs tritonclient: pip install 'embertide[client]'")


def test_a_trainer_needs_no_triton() -> None:
    done = with_extra("train", "import embertide; embertide.train; print('there')")
    assert done.stdout == "there\n", done.stderr
    trainer = (
        "sys.argv = ['embertide', 'train', '--help']\n"
        "runpy.run_module('embertide.trainer', run_name='__main__')"
    )
    done = with_extra("train", trainer)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("extra", "words", "needs", "remedy"),
    [
        ("train", ("control", "--help"), "grpc_", "'embertide[serve]'"),
        ("train", ("chaos", "--help"), "jinja2", "'embertide[serve]'"),
        ("serve", ("console", "--help"), "starlette", "'embertide[console]'"),
        ("client", ("--help",), "typer", "'embertide[train]'"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    extra: str, words: tuple[str, ...], needs: str, remedy: str
) -> None:
    done = command(extra, *words)
    assert done.returncode == 2, done.stderr
    assert f"needs {needs}" in done.stderr
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_alone_says_what_training_needs() -> None:
    trainer = (
        "sys.argv = ['embertide', 'train', '--demo']\n"
        "runpy.run_module('embertide.trainer', run_name='__main__')"
    )
    done = with_extra("serve", trainer)
    assert done.returncode == 2, done.stderr
    assert "'embertide[train]'" in done.stderr
    assert "Traceback" not in done.stderr
