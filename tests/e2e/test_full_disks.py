"""A full disk, a folder at a time: who writes there goes on, says what it lacks, and heals.

Needs root, which mounts a small file system for each. What was seen is printed.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import full_disk
import pytest
import trainer_disk
from full_disk import Seen


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize(
    "case", [*full_disk.CASES, *trainer_disk.CASES], ids=lambda case: case.__name__
)
def test_a_full_disk_is_named_and_costs_little(
    case: Callable[[Path], Seen], tmp_path: Path
) -> None:
    seen = case(tmp_path)
    print(f"{case.__name__}: {seen}")
    assert seen.named
    assert seen.lives
    assert seen.heals_s is not None
    assert seen.core <= 0.01
    assert seen.amplification <= 1


def test_what_a_process_uses_is_its_share_of_a_core() -> None:
    began = time.monotonic()
    used = full_disk.use_of(os.getpid(), 0.2)
    assert time.monotonic() - began >= 0.2
    assert used.core >= 0
    assert used.written >= 0
    assert full_disk.within(5.0, lambda: True) is not None
    assert full_disk.within(0.01, lambda: False) is None
