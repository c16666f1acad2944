"""The Python of docs/client.md and README.md, run as it is printed: train, serve, ask."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "client.md"
README = ROOT / "README.md"


def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 9
    names: dict[str, Any] = {}
    try:
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), names)
            if "result" not in names:  # the node that the first one has started
                (asked,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
                asked = asked.replace("127.0.0.1:8001", names["served"].grpc)
                exec(compile(asked, str(README), "exec"), names)
                names["client"].close()
    finally:
        alive = "served" in names and names["served"].alive()
        if alive:
            names["served"].stop()
    ranked = names["ranked"]
    assert names["result"].as_numpy("SCORE").shape == (1, 1)
    assert ranked.version == names["trained"].version > 1
    assert ranked.scores.shape == (2,)
    assert names["frame"]["score"].to_numpy().tolist() == ranked.scores.tolist()
    assert names["shown"].scores.shape == (500,)
    assert names["shown"].scores[8] == pytest.approx(ranked.scores[0], abs=1e-6)
    assert not alive
