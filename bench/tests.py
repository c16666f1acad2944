"""The project's tests, run by a benchmark whose claim they hold."""

import subprocess
import sys

from bench.servers import ROOT

# `-m pytest` would add the root to the path.
_PYTEST = (sys.executable, "-c", "import pytest, sys; sys.exit(pytest.main())", "-q")


def run_tests(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run pytest with these arguments, quietly; what it prints is in the result."""
    return subprocess.run(
        [*_PYTEST, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
