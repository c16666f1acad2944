"""The examples: what their pages print is run, on a few events, and as it stands there."""

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
from pages import ROOT, blocks

from bench.desk import Desk
from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.schema import schema_of
from embertide.server.cli.snapshot import newest_snapshot
from embertide.trainer.commands.inputs import open_run

CACHE = ROOT / "build" / "cache" / "dense"
EXAMPLES = ("ads", "shop", "ratings")
# Fewer events than the page's, and what is said of them.
FEW = {
    "ads": ("--events 3000", "2,250 impressions"),
    "shop": ("--sessions 60", "items shown in four days"),
    "ratings": ("--ratings 3000", "ratings of seven years"),
}
LEARNED = 400


def commands(name: str, start: str) -> str:
    """The command of an example's page that starts so."""
    found = [each for block in blocks(f"examples/{name}/README.md") for each in block.commands()]
    return next(each for each in found if each.startswith(start))


@pytest.fixture(params=EXAMPLES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    """A copy of an example's folder, without what was built in it."""
    copy = tmp_path / name
    shutil.copytree(ROOT / "examples" / name, copy, ignore=shutil.ignore_patterns("build"))
    return copy


@pytest.fixture
def triton_server(
    name: str, folder: Path, server: triton.TritonServer
) -> Iterator[triton.TritonServer]:
    """The server that tests share; an example's model is unloaded at the end."""
    yield server
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.unload_model(name)


def test_data_is_made_learned_served_and_asked_for(
    name: str, folder: Path, triton_server: triton.TritonServer
) -> None:
    more, says = FEW[name]
    changes = {
        "make_data.py": f"make_data.py {more}",
        "embertide train": f"embertide train --cache {CACHE} --events {LEARNED}",
        "ask.py 127.0.0.1:8001 127.0.0.1:8011": f"ask.py {triton_server.grpc}",
        "ask.py": f"ask.py {triton_server.grpc}",
    }
    with Desk(folder, changes) as desk:
        assert says in desk.do(commands(name, "python make_data.py"))
        trained = desk.do(commands(name, "embertide train"))
        publication = folder / "build" / name
        options = triton.ModelOptions(
            kind="ranking",
            publication=publication,
            max_batch_size=4096,
            schema=schema_of(newest_snapshot(publication)),
        )
        triton.write_model(triton_server.options.repository, name, options)
        with tritonclient.grpc.InferenceServerClient(triton_server.grpc) as client:
            client.load_model(name)
        answer = desk.do(commands(name, "python ask.py"))
    assert "0 rejected" in trained
    (version,) = re.findall(r"^version +([\d,]+)", trained, re.MULTILINE)
    assert answer.startswith(f"version {version.replace(',', '')}: ")
    scores = [float(each) for each in re.findall(r"0\.\d{4,}", answer)]
    assert len(scores) == (1 if name == "ads" else 5)
    assert scores == sorted(scores, reverse=True)


def test_init_guesses_the_columns_of_the_ratings(tmp_path: Path) -> None:
    folder = tmp_path / "ratings"
    shutil.copytree(ROOT / "examples" / "ratings", folder)
    with Desk(folder, {"make_data.py": "make_data.py --ratings 3000"}) as desk:
        desk.do(commands("ratings", "python make_data.py"))
        desk.do(commands("ratings", "embertide init"))
    data = str(folder / "build" / "ratings.csv")
    ours, guessed = (
        open_run(folder / path, data, None, None, 1)[1].schema
        for path in ("run.py", "build/guessed.py")
    )
    # It also writes what each column holds, which the example leaves to the reader.
    assert ours.features == tuple(
        dataclasses.replace(each, kind="") for each in guessed.features[:2]
    )
    assert (ours.label, ours.positive, ours.ts) == (guessed.label, guessed.positive, guessed.ts)


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_folder_has_is_on_its_page(name: str) -> None:
    page = (ROOT / "examples" / name / "README.md").read_text()
    for path in (ROOT / "examples" / name).glob("*.py"):
        assert path.name in page


@pytest.mark.long
def test_the_page_runs_from_top_to_bottom(name: str, folder: Path) -> None:
    # Other ports than the page's, where a node of somebody else may be.
    printed = ("7070", "7200", "7201", "8001", "8011", "8012")
    *ports, metrics = map(str, free_ports(len(printed) + 1))
    port = dict(zip(printed, ports, strict=True))
    changes = port | {
        "--node node-0": f"--node node-0 --grpc-port {port['8001']} --metrics-port {metrics}",
        "embertide control": f"embertide control --listen 127.0.0.1:{port['7070']}",
        "python ask.py\n": f"python ask.py 127.0.0.1:{port['8001']}\n",
    }
    move = folder / "move.py"
    if move.exists():
        move.write_text(move.read_text().replace("7070", port["7070"]))
    said: list[str] = []
    with Desk(folder, changes) as desk:
        for block in blocks(f"examples/{name}/README.md"):
            if block.language == "sh":
                said.append(desk.do(block.text))
    answer = re.compile(r"^version \d+: .*\n(?:(?:item|film) .*\n)*", re.MULTILINE)
    before, after = answer.findall("".join(said))
    assert before == after
    assert "SUCCEEDED" in said[-1]
