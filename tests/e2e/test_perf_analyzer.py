"""perf_analyzer drives lookup and ranking by gRPC and HTTP without a complaint.

The first run puts perf_analyzer into an environment of its own, `build/bench/venv`.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_perf_analyzer_complains_of_nothing() -> None:
    command = [sys.executable, "-m", "bench.perf_check"]
    # Its model is kept for benchmarks: compiled as ever.
    environment = {name: value for name, value in os.environ.items() if "AOT_INDUCTOR" not in name}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("requests/s") == 6
