"""Every attack of `make bench-edges` on every listener of ours, each for a second."""

from pathlib import Path

import pytest

from bench.edges.attack import ATTACKS
from bench.edges.callers import all_targets, attacked

pytestmark = [pytest.mark.long, pytest.mark.alone]


def test_whoever_attacks_others_are_served_and_memory_is_bounded(tmp_path: Path) -> None:
    wrong = []
    with all_targets(tmp_path) as targets:
        assert len(targets) == 11
        for target in targets:
            for attack in ATTACKS:
                came = attacked(target, attack, seconds=1.0)
                assert came.alive, f"{target.name}, {target.who}, {attack}"
                if came.failed or came.memory > 1 or not came.during_ms:
                    wrong.append(
                        f"{target.name}, {target.who}, {attack}: {came.failed} failed "
                        f"{came.first_failure}, memory {came.memory:.2f} of its bound"
                    )
    assert not wrong, "\n".join(wrong)
