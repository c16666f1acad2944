"""The lines of docs/client.md, run as they are printed there: train, serve, ask."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "client.md"


def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 7
    names: dict[str, Any] = {}
    try:
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), names)
    finally:
        alive = "served" in names and names["served"].alive()
        if alive:
            names["served"].stop()
    ranked = names["ranked"]
    assert ranked.version == names["trained"].version > 1
    assert ranked.scores.shape == (2,)
    assert names["frame"]["score"].to_numpy().tolist() == ranked.scores.tolist()
    assert names["shown"].scores.shape == (500,)
    assert names["shown"].scores[8] == pytest.approx(ranked.scores[0], abs=1e-6)
    assert not alive
