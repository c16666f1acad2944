"""The example of docs/library.md, run as it is printed there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


@pytest.mark.usefixtures("one_thread")
def test_the_example_of_a_loop_of_ones_own_learns() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 20
    torch.manual_seed(1)
    names: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    assert float(names["loss"].detach()) < 0.1
    stats = names["rows"].stats()
    assert stats["rows"] == 200
    assert stats["refused_gradients"] == 0
