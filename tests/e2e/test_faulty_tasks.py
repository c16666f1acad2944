"""Each background task throws, has no memory or gets no thread: it is named, and it heals."""

import dataclasses
from pathlib import Path

import faulty_node
import faulty_processes
import pytest
from fault_outcomes import Outcome, wrong

WELL = Outcome(lives=True, answers=True, in_status=True, in_log=True, heals_s=1.0)


@pytest.mark.long
@pytest.mark.alone
def test_every_task_of_a_node_heals(tmp_path: Path) -> None:
    assert [line for tried in faulty_node.run(tmp_path) for line in wrong(tried)] == []


@pytest.mark.long
@pytest.mark.alone
def test_every_task_of_python_processes_heals(tmp_path: Path) -> None:
    assert [line for tried in faulty_processes.run(tmp_path) for line in wrong(tried)] == []


def test_a_task_that_does_not_heal_is_told() -> None:
    outcomes = {"upkeep": WELL, "seals": dataclasses.replace(WELL, heals_s=None)}
    (line,) = wrong(("a node", "exception", outcomes))
    assert line.startswith("a node, seals, an exception: ")
