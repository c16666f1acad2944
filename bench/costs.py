"""The cost of each tier's reads on this machine: build/bench/costs.json, for `embertide capacity`.

The benchmarks that measure one note it here, over what stood there for the same size of row.
"""

import json
from pathlib import Path
from typing import Literal

from bench import report
from bench.servers import BUILD

PATH = BUILD / "bench" / "costs.json"


def note(
    name: Literal["ddr_us", "ssd_us", "ssd_more_us"],
    *,
    row_bytes: int,
    us: float,
    by: str,
    path: Path = PATH,
) -> None:
    """Write a cost of `TierCosts`, for rows of so many bytes of payload; `by`: what measured it."""
    costs = json.loads(path.read_text(encoding="utf-8"))["costs"] if path.is_file() else []
    costs = [each for each in costs if (each["name"], each["row_bytes"]) != (name, row_bytes)]
    costs.append({"name": name, "row_bytes": row_bytes, "us": round(us, 4), "by": by})
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": report.machine(), "costs": costs}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
