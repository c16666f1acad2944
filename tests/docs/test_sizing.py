"""docs/sizing.md: the example is computed again, and sizes are those of their sources."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sizing.md").read_text()
EXAMPLE = re.findall(r"^\| (.+?) \| ([\d,x+() ]+) \| ([\d.]+) (MB|GB) \|$", PAGE, re.MULTILINE)


def test_the_whole_example_is_computed() -> None:
    rows = PAGE.split("## Example")[1].count("\n| ")
    assert len(EXAMPLE) == rows - 1 == 9


@pytest.mark.parametrize(("what", "formula", "size", "unit"), EXAMPLE)
def test_sizes_of_the_example(what: str, formula: str, size: str, unit: str) -> None:
    value = eval(formula.replace(",", "").replace("x", "*"), {"__builtins__": {}})
    assert f"{value / {'MB': 1e6, 'GB': 1e9}[unit]:.1f}" == size, what


def test_bytes_of_a_row_are_those_of_the_results() -> None:
    results = (ROOT / "docs" / "results" / "store.md").read_text()
    for figure in (
        "| **serving profile** | 23.5 | 26.5",
        "marks) | 48.5 |",
        "| 23.1 | 23.1 | 20.2 |",
    ):
        assert figure in results
    assert "payload + 24" in PAGE
    assert "payload + 49" in PAGE
    assert "payload + 20 on disk" in PAGE
