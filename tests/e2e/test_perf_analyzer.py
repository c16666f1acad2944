"""perf_analyzer drives lookup and ranking by gRPC and HTTP without a complaint."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ANALYZER = ROOT / "build" / "bench" / "venv" / "bin" / "perf_analyzer"


@pytest.mark.skipif(not ANALYZER.is_file(), reason="`make perf-check` installs perf_analyzer")
def test_perf_analyzer_complains_of_nothing() -> None:
    command = [sys.executable, "-m", "bench.perf_check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("requests/s") == 4
