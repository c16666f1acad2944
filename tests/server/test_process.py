"""An interrupt ends what runs, even one that was raised where exceptions are thrown away."""

import signal
import subprocess
import sys

import pytest

LOST = """
import signal
from embertide.server.adapters.process import check_interrupt, interrupt_on_signals

class Callback:
    def __del__(self):
        signal.raise_signal(signal.{name})

interrupt_on_signals()
check_interrupt()
Callback()
print("lost", flush=True)
check_interrupt()
print("and not found again")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_lost_interrupt_is_raised_again_by_who_waits(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST.format(name=name)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "lost\n"
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr
