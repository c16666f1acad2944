"""The request with contexts that docs/serving.md prints, byte by byte."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
_TYPES = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4"}
_ROW = re.compile(
    r"^\| `(\w+)` \| (\w+) \| \[(\d+), (\d+)\] \| ([0-9a-f ]+) \| .* \|$", re.MULTILINE
)


def printed_request() -> dict[str, NDArray[Any]]:
    """Return its tensors by name, read from the bytes."""
    return {
        name: np.frombuffer(bytes.fromhex(data), _TYPES[dtype]).reshape(int(first), int(second))
        for name, dtype, first, second, data in _ROW.findall(PAGE.read_text())
    }
