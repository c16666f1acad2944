"""The tutorial: its files are written and its commands run in a shell, as they are printed."""

import re
from pathlib import Path

import pytest

from bench.desk import Desk
from embertide.server.adapters.process import free_ports

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"(?:as `(\w+\.py)`[^`]*)?```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def test_its_files_are_named_and_compile() -> None:
    files = {name: text for name, kind, text in BLOCKS if kind == "python"}
    assert sorted(files) == ["ask.py", "make_ratings.py"]
    for name, text in files.items():
        compile(text, name, "exec")


@pytest.mark.long
def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    grpc, metrics = free_ports(2)
    # Other ports than the page's, where a node of somebody else may be.
    changes = {
        "--name ratings": f"--name ratings --grpc-port {grpc} --metrics-port {metrics}",
        "127.0.0.1:8001": f"127.0.0.1:{grpc}",
        "embertide status": f"embertide status --url http://127.0.0.1:{metrics}/metrics",
    }
    said: list[str] = []
    with Desk(tmp_path, changes) as desk:
        for name, kind, text in BLOCKS:
            if kind == "python":
                desk.save(name, text)
            elif kind == "bash":
                said.append(desk.do(text))
    # The page shows each command's true output, but for figures of a net's last bits.
    everything = re.sub(r"\s+", " ", " ".join(said).replace("│", " "))
    shown = [line for _, kind, text in BLOCKS if kind == "text" for line in text.splitlines()]
    assert len(shown) == 17
    for line in shown:
        known = re.split(r"AUC|scores|100,000: 17", re.sub(r"\s+", " ", line))[0].strip()
        assert known in everything, line
    assert re.findall(r"version (\d+)\n", "".join(said[-3:])) == ["48", "57"]
    assert float(re.findall(r"AUC +([\d.]+)", said[-1])[0]) > 0.9
